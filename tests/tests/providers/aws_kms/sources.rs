//! Where credentials come from on AWS's own machines and in its clusters: a server here plays the
//! metadata service, the agent of EKS, STS and IAM Identity Center.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{
    Credentials, Emulator, REGION, without_ambient_credentials,
};
use pagevault_tests::key_servers::rest::{Answer, Asked, RestServer, Service};
use pagevault_tests::key_servers::write_file;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Test;
use crate::contract::{CONTEXT, SECRET, says};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "aws_kms::an_instance_is_asked_with_a_session_token",
        needs: &[Server::Ministack],
        run: instance,
    },
    Test { name: "aws_kms::a_pod_has_an_identity", needs: &[Server::Ministack], run: pod },
    Test {
        name: "aws_kms::a_service_account_has_a_role",
        needs: &[Server::Ministack],
        run: service_account,
    },
    Test {
        name: "aws_kms::a_login_of_identity_center_is_used",
        needs: &[Server::Ministack],
        run: identity_center,
    },
    Test {
        name: "aws_kms::programs_in_files_are_refused_unless_permitted",
        needs: &[],
        run: programs,
    },
];

const TOKEN: &str = "token-of-the-host";

/// Everything that gives credentials.
struct Host {
    /// Whether sessions of the metadata service (IMDSv2) exist.
    has_sessions: bool,
    /// What a pod must send.
    pod_token: String,
}

/// A date far away.
const LATER: &str = "2099-01-01T00:00:00Z";

fn plain(status: u16, text: &str) -> Answer {
    Answer::new(status, json!(text))
}

impl Service for Host {
    fn answer(&mut self, asked: &Asked) -> Answer {
        const ROLES: &str = "/latest/meta-data/iam/security-credentials/";
        let keys = json!({"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "test",
            "SecretAccessKey": "test", "Token": "none", "LastUpdated": "2026-01-01T00:00:00Z",
            "Expiration": LATER});
        let path = asked.path.split('?').next().unwrap_or_default();
        let has_session = asked.header("x-aws-ec2-metadata-token") == TOKEN;
        match (asked.method.as_str(), path) {
            ("PUT", "/latest/api/token") if self.has_sessions => Answer {
                header: Some(("x-aws-ec2-metadata-token-ttl-seconds", "21600")),
                ..plain(200, TOKEN)
            },
            ("GET", ROLES) if has_session => plain(200, "postgres"),
            ("GET", path) if has_session && path == format!("{ROLES}postgres") => {
                Answer::new(200, keys)
            }
            ("GET", path) if path.starts_with("/latest/") => plain(401, "no session"),
            ("GET", "/v1/credentials") if asked.header("authorization") == self.pod_token => {
                Answer::new(200, keys)
            }
            ("GET", "/v1/credentials") => Answer::new(401, json!({"message": "unknown token"})),
            ("GET", "/federation/credentials") => self.identity_center(asked),
            ("POST", _) => self.sts(asked),
            _ => plain(404, "nothing here"),
        }
    }
}

impl Host {
    fn identity_center(&self, asked: &Asked) -> Answer {
        if asked.header("x-amz-sso_bearer_token") != self.pod_token {
            let body = json!({"message": "Session token not found or invalid",
                "__type": "com.amazonaws.switchboard.portal#UnauthorizedException"});
            return Answer::new(401, body);
        }
        if asked.query("role_name") != "postgres" || asked.query("account_id") != "111122223333" {
            let body = json!({"message": "No access",
                "__type": "com.amazonaws.switchboard.portal#ForbiddenException"});
            return Answer::new(403, body);
        }
        let keys = json!({"accessKeyId": "test", "secretAccessKey": "test",
            "sessionToken": "none", "expiration": 4_070_908_800_000_u64});
        Answer::new(200, json!({"roleCredentials": keys}))
    }

    fn sts(&self, asked: &Asked) -> Answer {
        let is_asked = asked.form("Action") == "AssumeRoleWithWebIdentity"
            && asked.form("RoleArn") == "arn:aws:iam::111122223333:role/postgres";
        if !is_asked || asked.form("WebIdentityToken") != self.pod_token {
            return plain(
                400,
                "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><Error><Type>Sender</Type><Code>InvalidIdentityToken</Code><Message>no</Message></Error></ErrorResponse>",
            );
        }
        plain(
            200,
            "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>test</AccessKeyId><SecretAccessKey>test</SecretAccessKey><SessionToken>none</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>",
        )
    }
}

/// An emulator, the server above, and a directory of the server user.
struct Bench {
    kms: Emulator,
    key: String,
    host: RestServer<Host>,
    directory: TempDir,
}

impl Bench {
    fn start() -> Result<Bench> {
        let kms = Emulator::ministack_with_iam()?;
        let key = kms.create_key()?;
        let host = Host { has_sessions: true, pod_token: "pod-token".to_owned() };
        let directory = tempfile::Builder::new().prefix("pagevault-aws-").tempdir()?;
        Installation::get()?.give(directory.path())?;
        Ok(Bench { kms, key, host: RestServer::start(host)?, directory })
    }

    fn provider(&self) -> Provider {
        let options = json!({"region": REGION, "endpoint": self.kms.endpoint(),
            "insecure_loopback_http": true});
        without_ambient_credentials(Provider::new("aws_kms", options))
    }

    fn write(&self, name: &str, content: &str) -> Result<PathBuf> {
        write_file(&self.directory.path().join(name), content, 0o600)
    }

    /// What `check` says of the credentials.
    fn source(&self, provider: &Provider) -> Result<String> {
        let reply = provider.ask(&self.key, CONTEXT, json!("check"))?;
        let findings =
            reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
        ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
        Ok(findings[1]["seen"].as_str().unwrap_or_default().to_owned())
    }
}

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

fn instance() -> Result<()> {
    let bench = Bench::start()?;
    let provider = bench
        .provider()
        .env("AWS_EC2_METADATA_DISABLED", "false")
        .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", &bench.host.endpoint());
    let seen = bench.source(&provider)?;
    ensure!(seen == "from the instance metadata, access key ID test", "{seen}");
    // Without sessions (IMDSv1) it is not asked for credentials.
    bench.host.state().has_sessions = false;
    let _ = bench.host.seen();
    let reply = provider.ask(&bench.key, CONTEXT, wrap())?;
    ensure!(reply["failed"]["class"] == "unauthenticated", "{reply}");
    let paths = bench.host.paths();
    ensure!(paths.iter().all(|path| path.starts_with("PUT ")), "{paths:?}");
    Ok(())
}

fn pod() -> Result<()> {
    let bench = Bench::start()?;
    let file = bench.write("token", "pod-token")?;
    let address = format!("{}/v1/credentials", bench.host.endpoint());
    let provider = bench
        .provider()
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", &address)
        .env("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", file.to_str().context("path")?);
    let seen = bench.source(&provider)?;
    ensure!(seen == "from the container, access key ID test", "{seen}");
    // The token is read again each time.
    bench.host.state().pod_token = "renewed".to_owned();
    provider.refused(&bench.key, CONTEXT, wrap(), "unauthenticated")?;
    bench.write("token", "renewed")?;
    bench.source(&provider)?;
    // It is sent to this machine and to the agents of ECS and EKS only.
    let _ = bench.host.seen();
    for far in ["http://10.0.0.1/v1/credentials", "http://metadata.example.com/"] {
        let mut provider = provider.clone().env("AWS_CONTAINER_CREDENTIALS_FULL_URI", far);
        provider.deadline_ms = 3000;
        let reply = provider.ask(&bench.key, CONTEXT, wrap())?;
        ensure!(reply["failed"]["class"] == "unauthenticated", "{far}: {reply}");
        ensure!(!reply.to_string().contains("renewed"), "{reply}");
    }
    // Others may have written it.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666))?;
    provider.refused(&bench.key, CONTEXT, wrap(), "insecure")?;
    Ok(())
}

fn service_account() -> Result<()> {
    let bench = Bench::start()?;
    let file = bench.write("token", "pod-token")?;
    let provider = bench
        .provider()
        .env("AWS_ENDPOINT_URL_STS", &bench.host.endpoint())
        .env("AWS_ROLE_ARN", "arn:aws:iam::111122223333:role/postgres")
        .env("AWS_WEB_IDENTITY_TOKEN_FILE", file.to_str().context("path")?);
    let seen = bench.source(&provider)?;
    ensure!(seen == "from a web identity, access key ID test", "{seen}");
    bench.write("token", "forged")?;
    let failure = provider.refused(&bench.key, CONTEXT, wrap(), "unauthenticated")?;
    ensure!(!failure.to_string().contains("forged"), "{failure}");
    Ok(())
}

fn identity_center() -> Result<()> {
    let bench = Bench::start()?;
    let config = "[profile db]\nsso_session = corp\nsso_account_id = 111122223333\n\
        sso_role_name = postgres\n[profile other]\nsso_session = corp\n\
        sso_account_id = 111122223333\nsso_role_name = other\n\
        [sso-session corp]\nsso_start_url = https://corp.awsapps.com/start\n\
        sso_region = eu-central-1\n";
    bench.write("config", config)?;
    let cache = bench.directory.path().join(".aws/sso/cache");
    std::fs::create_dir_all(&cache)?;
    for directory in [".aws", ".aws/sso", ".aws/sso/cache"] {
        Installation::get()?.give(&bench.directory.path().join(directory))?;
    }
    let login = |token: &str, expires: &str| -> Result<()> {
        let text = json!({"startUrl": "https://corp.awsapps.com/start", "region": "eu-central-1",
            "accessToken": token, "expiresAt": expires});
        write_file(&cache.join("0a1b.json"), &text.to_string(), 0o600).map(drop)
    };
    let path = |name: &str| bench.directory.path().join(name).display().to_string();
    let mut provider = bench
        .provider()
        .env("HOME", &path(""))
        .env("AWS_CONFIG_FILE", &path("config"))
        .env("AWS_ENDPOINT_URL_SSO", &bench.host.endpoint());
    provider.options["profile"] = json!("db");
    let failure = provider.refused(&bench.key, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "aws sso login --profile db")?;
    login("pod-token", "2020-01-01T00:00:00Z")?;
    let failure = provider.refused(&bench.key, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "has expired")?;
    login("forged-token", LATER)?;
    let failure = provider.refused(&bench.key, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "has ended")?;
    ensure!(!failure.to_string().contains("forged-token"), "{failure}");
    login("pod-token", LATER)?;
    let seen = bench.source(&provider)?;
    ensure!(seen == "from IAM Identity Center, access key ID test", "{seen}");
    provider.options["profile"] = json!("other");
    let failure = provider.refused(&bench.key, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "ForbiddenException")?;
    Ok(())
}

fn programs() -> Result<()> {
    let credentials =
        Credentials::from_text("[default]\ncredential_process = /bin/sh -c 'exit 1'\n")?;
    let options = json!({"region": REGION, "endpoint": "http://127.0.0.1:9",
        "insecure_loopback_http": true, "credentials_file": credentials.path()});
    let mut provider = without_ambient_credentials(Provider::new("aws_kms", options));
    provider.programs = false;
    for action in [wrap(), json!("check_options")] {
        let failure = provider.refused("alias/x", CONTEXT, action, "insecure")?;
        says(&failure, "runs a program, which is not allowed")?;
    }
    Ok(())
}
