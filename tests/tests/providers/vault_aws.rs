//! The login to Vault as a principal of AWS: with HashiCorp's Vault, whose method asks an emulator
//! of AWS's STS; and the signed request alone.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use pagevault_tests::installation::run;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::clock::Clock;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{
    Credentials, Emulator, REGION, ROOT, without_ambient_credentials,
};
use pagevault_tests::key_servers::vault::Vault;
use serde_json::{Map, Value, json};

use crate::Test;
use crate::contract::{CONTEXT, SECRET, wrap};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test {
            name: "vault_aws::vault_asks_aws_who_has_signed",
            needs: &[Server::HashiCorpVault, Server::Ministack],
            run: logins,
        },
        Test {
            name: "vault_aws::what_has_expired_is_told",
            needs: &[Server::HashiCorpVault, Server::Ministack],
            run: expired,
        },
        Test {
            name: "vault_aws::a_signed_request_proves_an_aws_principal",
            needs: &[Server::Ministack],
            run: signature,
        },
    ]
}

/// The name of the server in signed requests.
const SERVER_ID: &str = "vault.example.com";

/// A Vault that asks an emulator of AWS, which verifies signatures.
struct Pair {
    vault: Vault,
    aws: Emulator,
}

impl Pair {
    /// With the role `db` for the user `postgres`, and `instance` for a role of that name.
    fn start(aws: Emulator) -> Result<Pair> {
        let vault = Vault::start()?;
        vault.cli(&["auth", "enable", "aws"])?;
        let endpoint = aws.endpoint();
        vault.cli(&[
            "write",
            "auth/aws/config/client",
            &format!("access_key={}", ROOT.0),
            &format!("secret_key={}", ROOT.1),
            &format!("iam_endpoint={endpoint}"),
            &format!("sts_endpoint={endpoint}"),
            &format!("sts_region={REGION}"),
            &format!("iam_server_id_header_value={SERVER_ID}"),
        ])?;
        let user = aws.aws("iam", "create_user", json!({"UserName": "postgres"}))?;
        // Here the administrator is in the place of the service that gives instances sessions.
        let trust = json!({"Version": "2012-10-17", "Statement": [{"Effect": "Allow",
            "Principal": {"AWS": "arn:aws:iam::000000000000:root"}, "Action": "sts:AssumeRole"}]});
        let role = json!({"RoleName": "instance", "AssumeRolePolicyDocument": trust.to_string()});
        let role = aws.aws("iam", "create_role", role)?;
        for (name, principal) in [("db", &user["User"]), ("instance", &role["Role"])] {
            let arn = principal["Arn"].as_str().context("no ARN")?;
            vault.cli(&[
                "write",
                &format!("auth/aws/role/{name}"),
                "auth_type=iam",
                &format!("bound_iam_principal_arn={arn}"),
                "token_policies=db-kek",
                "token_ttl=5m",
            ])?;
        }
        Ok(Pair { vault, aws })
    }

    /// An access key of a user.
    fn access_key(&self, user: &str) -> Result<Credentials> {
        let key = self.aws.aws("iam", "create_access_key", json!({"UserName": user}))?;
        let text = |name: &str| key["AccessKey"][name].as_str().context("no access key");
        Credentials::of(text("AccessKeyId")?, text("SecretAccessKey")?)
    }

    /// What an instance with the role has: an access key that expires, with a token; the token.
    fn session(&self) -> Result<(Credentials, String)> {
        let role = self.aws.aws("iam", "get_role", json!({"RoleName": "instance"}))?;
        let parameters = json!({"RoleArn": role["Role"]["Arn"], "RoleSessionName": "i-0123",
            "DurationSeconds": 900});
        let session = self.aws.aws("sts", "assume_role", parameters)?;
        let text = |name: &str| session["Credentials"][name].as_str().context("no credentials");
        let token = text("SessionToken")?;
        let credentials = Credentials::from_text(&format!(
            "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\naws_session_token = {token}\n",
            text("AccessKeyId")?,
            text("SecretAccessKey")?
        ))?;
        Ok((credentials, token.to_owned()))
    }

    fn provider(&self, role: &str, credentials: &Credentials) -> Provider {
        let auth = json!({"aws": {"role": role, "server_id": SERVER_ID, "region": REGION,
            "credentials_file": credentials.path()}});
        without_ambient_credentials(Provider::new("vault", self.vault.options(auth)))
    }
}

fn works(provider: &Provider) -> Result<()> {
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

/// Refused for good, with what Vault says, and without what was sent to it.
fn refused(provider: &Provider) -> Result<Value> {
    let failure = provider.refused("db-kek", CONTEXT, wrap(), "unauthenticated")?;
    ensure!(failure["retry"] == false, "{failure}");
    let text = failure.to_string();
    ensure!(text.contains("Vault says: ") && text.contains("bound_iam_principal_arn"), "{text}");
    ensure!(!text.contains("AWS4-HMAC-SHA256"), "the signed request is in the message: {text}");
    Ok(failure)
}

fn logins() -> Result<()> {
    let pair = Pair::start(Emulator::ministack_with_iam()?)?;
    let own = pair.access_key("postgres")?;
    works(&pair.provider("db", &own))?;
    let (session, token) = pair.session()?;
    works(&pair.provider("instance", &session))?;
    let findings = pair.provider("db", &own).ask("db-kek", "", json!("check"))?.to_string();
    ensure!(findings.contains("AWS role \\\"db\\\" at auth/aws"), "{findings}");
    ensure!(!findings.contains("\"failure\""), "{findings}");

    // Another principal, in each direction, and a role that is not there.
    let failure = refused(&pair.provider("db", &session))?;
    ensure!(!failure.to_string().contains(&token), "{failure}");
    refused(&pair.provider("instance", &own))?;
    refused(&pair.provider("nobody", &own))?;
    pair.aws.aws("iam", "create_user", json!({"UserName": "stranger"}))?;
    refused(&pair.provider("db", &pair.access_key("stranger")?))?;
    // A secret that is not that of the access key: STS refuses the signature.
    let text = std::fs::read_to_string(own.path())?;
    let wrong =
        Credentials::from_text(&text.replace("secret_access_key = ", "secret_access_key = wrong"))?;
    refused(&pair.provider("db", &wrong))?;
    // Signed for another server, and for none. (The emulator is STS of all regions.)
    for server_id in [Some("vault.evil.example"), None] {
        let mut provider = pair.provider("db", &own);
        let login = provider.options["auth"]["aws"].as_object_mut().context("no options")?;
        login.remove("server_id");
        login.extend(server_id.map(|id| ("server_id".to_owned(), json!(id))));
        refused(&provider)?;
    }
    // The user is gone.
    works(&pair.provider("db", &own))?;
    let key = text.lines().find_map(|line| line.strip_prefix("aws_access_key_id = "));
    pair.aws.aws(
        "iam",
        "delete_access_key",
        json!({"UserName": "postgres", "AccessKeyId": key.context("no key")?}),
    )?;
    refused(&pair.provider("db", &own))?;
    Ok(())
}

fn expired() -> Result<()> {
    let (of_aws, of_helper) = (Clock::new()?, Clock::new()?);
    let pair = Pair::start(Emulator::ministack_with_clock(&of_aws)?)?;
    let own = pair.access_key("postgres")?;
    let (session, token) = pair.session()?;
    let with_clock = |mut provider: Provider| {
        for (name, value) in of_helper.variables() {
            provider = provider.env(name, &value);
        }
        provider
    };
    let of_session = with_clock(pair.provider("instance", &session));
    let of_user = with_clock(pair.provider("db", &own));
    works(&of_session)?;
    works(&of_user)?;
    // Twenty minutes later the session of the instance's role is over.
    of_aws.set(1200)?;
    of_helper.set(1200)?;
    works(&of_user)?;
    let failure = refused(&of_session)?;
    ensure!(!failure.to_string().contains(&token), "{failure}");
    // A new one works without further action, as the instance gets one.
    let (next, _) = pair.session()?;
    works(&with_clock(pair.provider("instance", &next)))?;
    // A machine whose clock is wrong signs requests that have expired.
    of_helper.set(0)?;
    let failure = refused(&of_user)?;
    ensure!(failure["hint"].as_str().is_some_and(|hint| hint.contains("clock")), "{failure}");
    of_helper.set(1200)?;
    works(&of_user)
}

/// OpenBao has no method of AWS. So this test takes the login as Vault receives it, and compares
/// the signature with that of AWS's own library for Python, which the emulators have.
fn signature() -> Result<()> {
    let vault = Canned::paths(|path| {
        let (status, body) = match path {
            "/v1/auth/aws/login" => (200, LOGGED_IN),
            _ => (403, r#"{"errors":["1 error occurred:\n\t* permission denied\n\n"]}"#),
        };
        (status, "application/json", body.to_owned())
    })?;
    let credentials = Credentials::root()?;
    let options = |id: &str| {
        json!({"address": vault.endpoint, "insecure_loopback_http": true, "auth": {"aws": {
            "role": "db", "server_id": id, "region": "eu-central-1",
            "credentials_file": credentials.path()}}})
    };
    let provider =
        without_ambient_credentials(Provider::new("vault", options("vault.example.com")));
    provider.ask("db-kek", CONTEXT, wrap())?;
    let seen = vault.seen();
    let login = &seen.first().context("no login")?.body;
    ensure!(login["role"] == "db" && login["iam_http_request_method"] == "POST", "{login}");
    let decoded = |name: &str| -> Result<String> {
        use base64::Engine;
        let text = login[name].as_str().unwrap_or_default();
        Ok(String::from_utf8(base64::engine::general_purpose::STANDARD.decode(text)?)?)
    };
    let (url, body) = (decoded("iam_request_url")?, decoded("iam_request_body")?);
    ensure!(url == "https://sts.eu-central-1.amazonaws.com/", "{url}");
    let mut headers: Map<String, Value> = serde_json::from_str(&decoded("iam_request_headers")?)?;
    ensure!(headers["X-Vault-AWS-IAM-Server-ID"] == "vault.example.com", "{headers:?}");
    let authorization = headers["authorization"].as_str().unwrap_or_default();
    ensure!(authorization.contains("x-vault-aws-iam-server-id"), "{authorization}");
    let computed = |headers: &Map<String, Value>| {
        let python = Server::Ministack.program().context("no Python with botocore")?;
        let headers = Value::from(headers.clone()).to_string();
        run(Command::new(python).args(["-c", SIGN, &url, &body, &headers, ROOT.0, ROOT.1]))
    };
    let expected = computed(&headers)?;
    ensure!(authorization.ends_with(&format!("Signature={}", expected.trim())), "{expected}");
    // It is of no use for another server.
    headers.insert("X-Vault-AWS-IAM-Server-ID".into(), json!("vault.evil.example"));
    ensure!(computed(&headers)? != expected, "the signature does not cover the server");

    // Without credentials nothing is sent.
    let before = vault.requests();
    let mut options = options("vault.example.com");
    options["auth"]["aws"]["credentials_file"] = json!("/nonexistent/credentials");
    let provider = without_ambient_credentials(Provider::new("vault", options));
    provider.refused("db-kek", CONTEXT, wrap(), "unreachable")?;
    ensure!(vault.requests() == before, "sent without credentials");
    Ok(())
}

/// The signature of a request by AWS's library: URL, body, headers, access key.
const SIGN: &str = "
import json, sys
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
url, body, headers, key_id, secret = sys.argv[1:]
headers = {name.lower(): value for name, value in json.loads(headers).items()}
del headers['authorization']
request = AWSRequest('POST', url, headers=headers, data=body)
request.context['timestamp'] = headers['x-amz-date']
signer = SigV4Auth(Credentials(key_id, secret), 'sts', 'eu-central-1')
canonical = signer.canonical_request(request)
print(signer.signature(signer.string_to_sign(request, canonical), request))";

/// Vault's reply to a login.
const LOGGED_IN: &str = r#"{"request_id":"","lease_id":"","renewable":false,"lease_duration":0,
    "data":null,"wrap_info":null,"warnings":null,"auth":{"client_token":"hvs.token",
    "accessor":"","policies":[],"token_policies":[],"metadata":null,"lease_duration":60,
    "renewable":true,"entity_id":"","token_type":"service","orphan":true}}"#;
