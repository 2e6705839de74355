//! Credentials, permissions, regions, TLS: everything between the server and its key.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::canned::Canned;
use pagevault_tests::key_servers::certificates::Authority;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{
    Credentials, Emulator, REGION, without_ambient_credentials,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Test;
use crate::contract::{CONTEXT, SECRET};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "aws_kms::least_privilege_is_enough_and_less_is_denied",
        needs: &[Server::Ministack],
        run: least_privilege_is_enough_and_less_is_denied,
    },
    Test {
        name: "aws_kms::unknown_and_forged_credentials_are_not_accepted",
        needs: &[Server::Ministack],
        run: unknown_and_forged_credentials_are_not_accepted,
    },
    Test {
        name: "aws_kms::credentials_come_from_where_aws_looks",
        needs: &[Server::Ministack],
        run: credentials_come_from_where_aws_looks,
    },
    Test { name: "aws_kms::no_credentials_says_so", needs: &[], run: no_credentials_says_so },
    Test {
        name: "aws_kms::bad_credentials_files_say_what_is_wrong",
        needs: &[],
        run: bad_credentials_files_say_what_is_wrong,
    },
    Test { name: "aws_kms::no_region_says_so", needs: &[], run: no_region_says_so },
    Test {
        name: "aws_kms::addresses_in_the_environment_are_not_followed",
        needs: &[],
        run: addresses_in_the_environment_are_not_followed,
    },
    Test { name: "aws_kms::options_are_checked", needs: &[], run: options_are_checked },
    Test {
        name: "aws_kms::only_trusted_servers_are_spoken_to",
        needs: &[Server::Moto],
        run: only_trusted_servers_are_spoken_to,
    },
];

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

/// A user with an access key and permission for `actions` on all keys.
fn user(kms: &Emulator, name: &str, actions: &[&str]) -> Result<Credentials> {
    let statement = json!({"Effect": "Allow", "Action": actions, "Resource": "*"});
    user_with(kms, name, &json!({"Version": "2012-10-17", "Statement": [statement]}).to_string())
}

/// A user with an access key and a policy.
fn user_with(kms: &Emulator, name: &str, policy: &str) -> Result<Credentials> {
    kms.aws("iam", "create_user", json!({"UserName": name}))?;
    let parameters = json!({"UserName": name, "PolicyName": "p", "PolicyDocument": policy});
    kms.aws("iam", "put_user_policy", parameters)?;
    let made = kms.aws("iam", "create_access_key", json!({"UserName": name}))?;
    let part = |part: &str| made["AccessKey"][part].as_str().context("no access key");
    Credentials::of(part("AccessKeyId")?, part("SecretAccessKey")?)
}

/// The first policy of the user guide, for `key`, without its conditions: ministack does not
/// support `kms:EncryptionContext`.
fn documented_policy(key: &str) -> Result<String> {
    let guide = include_str!("../../../../docs/aws-kms.md");
    let (_, policy) = guide.split_once("\n```json\n").context("no policy in the guide")?;
    let (policy, _) = policy.split_once("\n```\n").context("no end of the policy")?;
    let example = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab";
    ensure!(policy.contains(example));
    let mut policy: Value = serde_json::from_str(&policy.replace(example, key))?;
    let statements = policy["Statement"].as_array_mut().context("no statements")?;
    for statement in statements.iter_mut().filter_map(Value::as_object_mut) {
        statement.remove("Condition");
    }
    Ok(policy.to_string())
}

fn least_privilege_is_enough_and_less_is_denied() -> Result<()> {
    let kms = Emulator::ministack_with_iam()?;
    let key = kms.create_key()?;
    let enough = user_with(&kms, "enough", &documented_policy(&key)?)?;
    let provider = kms.provider(&enough);
    let (wrapped, _) = provider.wrap(&key, CONTEXT, SECRET)?;
    ensure!(provider.unwrap(&key, CONTEXT, &wrapped)? == SECRET);
    let reply = provider.ask(&key, CONTEXT, json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
    ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
    ensure!(findings[3]["seen"].as_str().is_some_and(|seen| seen.contains("may not list")));

    let less = user(&kms, "less", &["kms:DescribeKey", "kms:Encrypt"])?;
    let provider = kms.provider(&less);
    provider.wrap(&key, CONTEXT, SECRET)?;
    let action = json!({"unwrap": {"wrapped": wrapped}});
    let reply = provider.refused(&key, CONTEXT, action, "denied")?;
    let message = reply["message"].as_str().unwrap_or_default();
    ensure!(message.contains("does not allow kms:Decrypt") && message.contains(&key), "{reply}");
    ensure!(reply["detail"].as_str().is_some_and(|text| text.contains("AccessDeniedException")));
    ensure!(reply["retry"] == false);

    let nothing = user(&kms, "nothing", &["s3:ListBucket"])?;
    let reply = kms.provider(&nothing).refused(&key, CONTEXT, wrap(), "denied")?;
    ensure!(reply["message"].as_str().is_some_and(|text| text.contains("kms:DescribeKey")));
    Ok(())
}

fn unknown_and_forged_credentials_are_not_accepted() -> Result<()> {
    let kms = Emulator::ministack_with_iam()?;
    let key = kms.create_key()?;
    let known = user(&kms, "known", &["kms:*"])?;
    let text = fs::read_to_string(known.path())?;
    let id = text.lines().find_map(|line| line.strip_prefix("aws_access_key_id = "));
    let forged = "FORGEDFORGEDFORGEDFORGED";
    for id in [id.context("no id")?, "AKIAUNKNOWN000000000"] {
        let credentials = Credentials::of(id, forged)?;
        let reply = kms.provider(&credentials).refused(&key, CONTEXT, wrap(), "unauthenticated")?;
        ensure!(reply["retry"] == false && !reply.to_string().contains(forged), "{reply}");

        let reply = kms.provider(&credentials).ask(&key, CONTEXT, json!("check"))?;
        let findings =
            reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
        let last = findings.last().context("no findings")?;
        ensure!(last["what"] == "the credentials are accepted", "{reply}");
        ensure!(last["failure"]["class"] == "unauthenticated", "{reply}");
        ensure!(!reply.to_string().contains(forged), "{reply}");
    }
    Ok(())
}

fn credentials_come_from_where_aws_looks() -> Result<()> {
    let kms = Emulator::ministack_with_iam()?;
    let key = kms.create_key()?;
    let source = |provider: &Provider| -> Result<String> {
        let reply = provider.ask(&key, CONTEXT, json!("check"))?;
        let findings =
            reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
        ensure!(findings.len() == 7, "{reply}");
        ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
        Ok(findings[1]["seen"].as_str().unwrap_or_default().to_owned())
    };
    let options =
        json!({"region": REGION, "endpoint": kms.endpoint(), "insecure_loopback_http": true});

    let environment = without_ambient_credentials(Provider::new("aws_kms", options.clone()))
        .env("AWS_ACCESS_KEY_ID", "test")
        .env("AWS_SECRET_ACCESS_KEY", "test");
    let seen = source(&environment)?;
    ensure!(seen == "from the environment, access key ID test", "{seen}");

    // Credentials in the options take precedence over the environment.
    let root = Credentials::root()?;
    let mut named = environment.env("AWS_SECRET_ACCESS_KEY", "wrong");
    named.options["credentials_file"] = json!(root.path());
    let seen = source(&named)?;
    ensure!(seen == "from a profile, access key ID test", "{seen}");

    let process = Credentials::from_text(
        "[default]\naws_access_key_id = no\naws_secret_access_key = no\n[vaulted]\n\
         credential_process = printf '{\"Version\": 1, \"AccessKeyId\": \"test\", \
         \"SecretAccessKey\": \"test\"}'\n",
    )?;
    let mut provider = kms.provider(&process);
    provider.options["profile"] = json!("vaulted");
    let seen = source(&provider)?;
    ensure!(seen == "from the credential_process of a profile, access key ID test", "{seen}");

    // Containers get an address on their host.
    let document = json!({"AccessKeyId": "test", "SecretAccessKey": "test", "Token": "none",
        "Expiration": "2099-01-01T00:00:00Z"});
    let host = Canned::answer(200, "application/json", document.to_string())?;
    let container = without_ambient_credentials(Provider::new("aws_kms", options))
        .env("AWS_CONTAINER_CREDENTIALS_FULL_URI", &host.endpoint);
    let seen = source(&container)?;
    ensure!(seen == "from the container, access key ID test" && host.requests() == 1, "{seen}");
    Ok(())
}

fn no_credentials_says_so() -> Result<()> {
    let silent = Canned::silent()?;
    let options =
        json!({"region": REGION, "endpoint": silent.endpoint, "insecure_loopback_http": true});
    let provider = without_ambient_credentials(Provider::new("aws_kms", options));
    let reply = provider.refused("alias/x", CONTEXT, wrap(), "unauthenticated")?;
    let message = reply["message"].as_str().unwrap_or_default();
    ensure!(message.ends_with("there are no AWS credentials"), "{reply}");
    ensure!(reply["retry"] == false && silent.requests() == 0);
    Ok(())
}

fn bad_credentials_files_say_what_is_wrong() -> Result<()> {
    let refused = |credentials: &Credentials, profile: Option<&str>, detail: &str| -> Result<()> {
        let mut options = json!({"region": REGION, "endpoint": "http://127.0.0.1:9",
            "insecure_loopback_http": true, "credentials_file": credentials.path()});
        if let Some(profile) = profile {
            options["profile"] = json!(profile);
        }
        let provider = without_ambient_credentials(Provider::new("aws_kms", options));
        let reply = provider.refused("alias/x", CONTEXT, wrap(), "unauthenticated")?;
        let text = reply["detail"].as_str().unwrap_or_default();
        ensure!(text.contains(detail), "{detail:?} is not in {reply}");
        ensure!(!reply.to_string().contains("hidden") && reply["retry"] == false, "{reply}");
        Ok(())
    };
    let file = Credentials::of("AKIA", "hidden")?;
    refused(&file, Some("other"), "other")?;
    let garbage = Credentials::from_text("[default]\nhidden hidden hidden\n")?;
    refused(&garbage, None, "could not parse")?;
    // The output of the process may be anything, so errors do not repeat it.
    let failing = Credentials::from_text(
        "[default]\ncredential_process = /bin/sh -c \"echo hidden >&2; exit 1\"\n",
    )?;
    refused(&failing, None, "did not provide any")?;
    let class_of = |credentials: &Credentials| -> Result<Value> {
        let options = json!({"region": REGION, "credentials_file": credentials.path()});
        let provider = without_ambient_credentials(Provider::new("aws_kms", options));
        let mut reply = provider.ask("alias/x", CONTEXT, wrap())?;
        Ok(reply["failed"]["class"].take())
    };
    let file = Credentials::of("AKIA", "hidden")?;
    fs::set_permissions(file.path(), Permissions::from_mode(0o644))?;
    ensure!(class_of(&file)? == "insecure");
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(file.path(), Permissions::from_mode(0o600))?;
        std::os::unix::fs::chown(file.path(), Some(0), Some(0))?;
        ensure!(class_of(&file)? == "unreachable");
    }
    fs::remove_file(file.path())?;
    ensure!(class_of(&file)? == "unreachable");
    Ok(())
}

fn no_region_says_so() -> Result<()> {
    let root = Credentials::root()?;
    let options = json!({"credentials_file": root.path()});
    let provider = without_ambient_credentials(Provider::new("aws_kms", options));
    let reply = provider.refused("alias/x", CONTEXT, wrap(), "bad_options")?;
    ensure!(reply["message"].as_str().is_some_and(|text| text.ends_with("no AWS region is set")));
    // The region becomes part of a host name.
    let strange = provider.env("AWS_REGION", "example.com/");
    strange.refused("alias/x", CONTEXT, wrap(), "bad_options")?;
    Ok(())
}

fn addresses_in_the_environment_are_not_followed() -> Result<()> {
    let (right, wrong) = (Canned::error(400, "NotFoundException")?, Canned::silent()?);
    let root = Credentials::root()?;
    let options = json!({"region": REGION, "endpoint": right.endpoint,
        "insecure_loopback_http": true, "credentials_file": root.path()});
    let mut provider = without_ambient_credentials(Provider::new("aws_kms", options));
    for variable in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"] {
        provider = provider.env(variable, &wrong.endpoint);
    }
    for variable in ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_KMS"] {
        provider = provider.env(variable, &wrong.endpoint);
    }
    provider.refused("alias/x", CONTEXT, wrap(), "key_missing")?;
    ensure!(right.requests() == 1);

    // Without the option, requests go to AWS itself, which does not have this region.
    provider.options = json!({"region": "xx-none-1", "credentials_file": root.path()});
    provider.deadline_ms = 3000;
    let reply = provider.ask("alias/x", CONTEXT, wrap())?;
    ensure!(!reply["failed"].is_null(), "{reply}");
    ensure!(wrong.requests() == 0, "an address in the environment was followed");
    Ok(())
}

fn options_are_checked() -> Result<()> {
    for (options, part) in [
        (json!({"regoin": REGION}), "regoin"),
        (json!({"secret_access_key": "x"}), "secret_access_key"),
        (json!({"region": 1}), "region"),
        (json!({"region": "Frankfurt"}), "Frankfurt"),
        (json!({"endpoint": "https://id:secret@kms.example.com"}), "endpoint"),
        (json!({"ca_file": "relative"}), "ca_file"),
        (json!({"ca_file": "/etc/hostname"}), "/etc/hostname"),
        (json!({"credentials_file": "../credentials"}), "credentials_file"),
        (json!({"profile": ""}), "profile"),
    ] {
        let provider = without_ambient_credentials(Provider::new("aws_kms", options));
        let reply = provider.ask("", "", json!("check_options"))?;
        ensure!(reply["failed"]["class"] == "bad_options", "{reply}");
        let message = reply["failed"]["message"].as_str().unwrap_or_default();
        ensure!(message.contains(part) && !message.contains("secret@"), "{reply}");
    }
    for (address, accepted) in [("http://kms.example.com", true), ("http://127.0.0.1:9", false)] {
        let options = json!({"endpoint": address, "insecure_loopback_http": accepted});
        let clear = Provider::new("aws_kms", options);
        clear.refused("", "", json!("check_options"), "insecure")?;
    }
    let all = json!({"region": REGION, "endpoint": "https://kms.example.com", "profile": "p",
        "ca_file": "/nonexistent/ca.pem", "credentials_file": "/nonexistent/credentials"});
    let reply = Provider::new("aws_kms", all).ask("", "", json!("check_options"))?;
    ensure!(reply == "options_ok", "{reply}");
    Ok(())
}

/// moto with a certificate for `host`, and a directory with the certificate of its issuer
/// (`ca.pem`).
fn moto_as(host: &str) -> Result<(Emulator, TempDir)> {
    let directory = TempDir::new()?;
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
    let authority = Authority::new()?;
    let (certificate, key) = authority.sign("moto", &[host])?;
    let file = |name: &str, text: &str| -> Result<PathBuf> {
        let path = directory.path().join(name);
        fs::write(&path, text)?;
        Ok(path)
    };
    let kms = Emulator::moto_with_tls(
        &file("server.pem", &certificate)?,
        &file("server.key", &key)?,
        &file("ca.pem", authority.pem())?,
    )?;
    Ok((kms, directory))
}

fn only_trusted_servers_are_spoken_to() -> Result<()> {
    let ((kms, directory), root) = (moto_as("127.0.0.1")?, Credentials::root()?);
    let key = kms.create_key()?;
    let mut provider = kms.provider(&root);
    let reply = provider.refused(&key, CONTEXT, wrap(), "tls")?;
    ensure!(reply["detail"].as_str().is_some_and(|text| text.contains("UnknownIssuer")), "{reply}");
    ensure!(reply["retry"] == false);

    provider.options["ca_file"] = json!(directory.path().join("ca.pem"));
    let (wrapped, _) = provider.wrap(&key, CONTEXT, SECRET)?;
    ensure!(provider.unwrap(&key, CONTEXT, &wrapped)? == SECRET);

    let stranger = directory.path().join("stranger.pem");
    fs::write(&stranger, Authority::new()?.pem())?;
    provider.options["ca_file"] = json!(stranger);
    provider.refused(&key, CONTEXT, wrap(), "tls")?;

    let (kms, directory) = moto_as("kms.example.com")?;
    let mut provider = kms.provider(&root);
    provider.options["ca_file"] = json!(directory.path().join("ca.pem"));
    let reply = provider.refused(&key, CONTEXT, wrap(), "tls")?;
    ensure!(
        reply["detail"].as_str().is_some_and(|text| text.contains("kms.example.com")),
        "{reply}"
    );

    // Unusable files are an error of the options, not of the connection.
    let empty = directory.path().join("empty.pem");
    fs::write(&empty, "")?;
    for file in [empty, directory.path().join("missing.pem")] {
        provider.options["ca_file"] = json!(file);
        provider.refused(&key, CONTEXT, wrap(), "bad_options")?;
    }
    Ok(())
}
