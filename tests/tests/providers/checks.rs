//! `check` with each thing missing: it names the step that fails, and what is missing there. Those
//! of other providers are in their own tests, that of the key file in those of the helper.

use std::fs;

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::certificates::Authority;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::kms::{Credentials, Emulator, without_ambient_credentials};
use pagevault_tests::key_servers::program::Program;
use pagevault_tests::key_servers::vault::{POLICY, Vault};
use pagevault_tests::key_servers::{Server, free_port};
use serde_json::{Value, json};

use crate::Test;
use crate::contract::{CONTEXT, KEY, NEXT, SECRET, rotate, says};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        Test { name: "checks::vault_says_what_is_missing", needs: &[Server::Vault], run: of_vault },
        Test {
            name: "checks::each_rule_of_the_policy_for_vault_is_needed",
            needs: &[Server::Vault],
            run: policy,
        },
        Test {
            name: "checks::aws_kms_says_what_is_missing",
            needs: &[Server::Ministack],
            run: of_aws,
        },
        Test { name: "checks::a_program_says_what_is_missing", needs: &[], run: of_program },
    ]
}

/// The last step of a check, and its failure.
fn last(provider: &Provider, key: &str) -> Result<(String, Value)> {
    let reply = provider.ask(key, "", json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| reply.to_string())?;
    let last = findings.last().context("no findings")?;
    let what = last["what"].as_str().context("no step")?;
    Ok((what.to_owned(), last["failure"].clone()))
}

/// Fails unless a check ends at this step, with a failure of this class that says this.
fn stops(provider: &Provider, key: &str, step: &str, class: &str, part: &str) -> Result<()> {
    let (what, failure) = last(provider, key)?;
    ensure!(what == step && failure["class"] == class, "{step}: {what}: {failure}");
    for text in ["message", "detail", "hint"] {
        ensure!(failure[text].as_str().is_some_and(|text| !text.is_empty()), "{text}: {failure}");
    }
    says(&failure, part)
}

fn passes(provider: &Provider, key: &str) -> Result<()> {
    let (what, failure) = last(provider, key)?;
    ensure!(what == "wrapped keys are bound to their database", "{what}: {failure}");
    ensure!(failure.is_null(), "{failure}");
    Ok(())
}

/// The rules of the guide's policy, without one.
fn policy_without(left_out: &str) -> Result<String> {
    let rules: Vec<&str> = POLICY.split_inclusive("\n}\n").collect();
    let left_out = format!("path \"{left_out}\"");
    let kept: Vec<&str> = rules.iter().copied().filter(|rule| !rule.contains(&left_out)).collect();
    ensure!(rules.len() == 5 && kept.len() == 4, "{left_out}: {kept:?}");
    Ok(kept.concat())
}

fn of_vault() -> Result<()> {
    let vault = Vault::start()?;
    let options = vault.approle()?;
    let provider = |options: Value| {
        let mut provider = Provider::new("vault", options);
        provider.deadline_ms = 3000;
        provider
    };
    let with = |name: &str, value: Value| {
        let mut options = options.clone();
        options[name] = value;
        provider(options)
    };
    passes(&provider(options.clone()), KEY)?;
    let reachable = "the server is reachable and trusted";
    let closed = format!("https://127.0.0.1:{}", free_port()?);
    stops(&with("address", json!(closed)), KEY, reachable, "unreachable", "refused")?;
    let stranger = vault.write("stranger.pem", Authority::new()?.pem(), 0o644)?;
    stops(&with("ca_file", json!(stranger)), KEY, reachable, "tls", "ca_file")?;

    let mut auth = options["auth"].clone();
    auth["approle"]["secret_id_file"] = json!("/nonexistent/secret-id");
    let read = "the credentials can be read";
    stops(&with("auth", auth.clone()), KEY, read, "unreachable", "/nonexistent/secret-id")?;
    let loose = vault.write("loose", "00000000-0000-0000-0000-000000000000", 0o644)?;
    auth["approle"]["secret_id_file"] = json!(loose);
    stops(&with("auth", auth.clone()), KEY, read, "insecure", "accessible to other users")?;
    vault.write("loose", "00000000-0000-0000-0000-000000000000", 0o600)?;
    let accepted = "the credentials are accepted";
    stops(&with("auth", auth), KEY, accepted, "unauthenticated", "AppRole")?;

    // The engine, the key, and what the role may do with it.
    let exists = "the key exists";
    let good = provider(options.clone());
    stops(&good, "typo", exists, "denied", "path \"transit/keys/typo\"")?;
    vault.write_policy("typo", &POLICY.replace(KEY, "typo"))?;
    vault.make_key(NEXT)?;
    stops(&good, "typo", exists, "key_missing", "vault write -f")?;
    stops(&with("mount", json!("other")), KEY, exists, "denied", "other/keys/db-kek")?;
    vault.cli(&["write", "-f", "transit/keys/typo"])?;
    stops(&good, "typo", exists, "insecure", "derived=true")?;

    vault.seal()?;
    stops(&good, KEY, "the server is unsealed", "sealed", "vault operator unseal")?;
    vault.unseal()?;
    passes(&good, KEY)
}

fn policy() -> Result<()> {
    let vault = Vault::start()?;
    let provider = Provider::new("vault", vault.approle()?);
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    let uses = "the key wraps and unwraps";
    for (rule, step) in [
        ("transit/keys/db-kek", "the key exists"),
        ("transit/encrypt/db-kek", uses),
        ("transit/decrypt/db-kek", uses),
    ] {
        vault.write_policy(KEY, &policy_without(rule)?)?;
        let needed = format!("path \"{rule}\"");
        stops(&provider, KEY, step, "denied", &needed)?;
    }
    // What a check does not try, because it would change the key.
    vault.write_policy(KEY, &policy_without("transit/keys/db-kek/rotate")?)?;
    passes(&provider, KEY)?;
    let failure = provider.refused(KEY, "", rotate(&wrapped), "denied")?;
    says(&failure, "path \"transit/keys/db-kek/rotate\"")?;
    vault.write_policy(KEY, &policy_without("transit/rewrap/db-kek")?)?;
    passes(&provider, KEY)?;
    let rewrap = json!({"rewrap": {"from_key": KEY, "wrapped": wrapped}});
    let failure = provider.refused(KEY, CONTEXT, rewrap, "denied")?;
    says(&failure, "path \"transit/rewrap/db-kek\"")
}

fn of_aws() -> Result<()> {
    let kms = Emulator::ministack_with_iam()?;
    let key = kms.create_key()?;
    let user = |name: &str, actions: &[&str]| -> Result<(Provider, Credentials)> {
        let statement = json!({"Effect": "Allow", "Action": actions, "Resource": "*"});
        let policy = json!({"Version": "2012-10-17", "Statement": [statement]}).to_string();
        kms.aws("iam", "create_user", json!({"UserName": name}))?;
        let policy = json!({"UserName": name, "PolicyName": "p", "PolicyDocument": policy});
        kms.aws("iam", "put_user_policy", policy)?;
        let made = kms.aws("iam", "create_access_key", json!({"UserName": name}))?;
        let part = |part: &str| made["AccessKey"][part].as_str().context("no access key");
        let credentials = Credentials::of(part("AccessKeyId")?, part("SecretAccessKey")?)?;
        Ok((kms.provider(&credentials), credentials))
    };
    let (enough, _file) = user("enough", &["kms:DescribeKey", "kms:Encrypt", "kms:Decrypt"])?;
    passes(&enough, &key)?;
    let changed = |name: &str, value: Value| {
        let mut provider = enough.clone();
        provider.options[name] = value;
        provider.deadline_ms = 3000;
        provider
    };
    let mut nowhere = enough.clone();
    nowhere.options.as_object_mut().context("options")?.remove("region");
    stops(&nowhere, &key, "the AWS region is known", "bad_options", "region")?;
    let missing = changed("credentials_file", json!("/nonexistent/credentials"));
    stops(&missing, &key, "credentials are available", "unreachable", "/nonexistent/credentials")?;
    let mut none = enough.clone();
    none.options.as_object_mut().context("options")?.remove("credentials_file");
    let none = without_ambient_credentials(none);
    stops(&none, &key, "credentials are available", "unauthenticated", "credentials")?;
    let closed = format!("http://127.0.0.1:{}", free_port()?);
    let closed = changed("endpoint", json!(closed));
    stops(&closed, &key, "AWS KMS replies", "unreachable", "refused")?;
    let unknown = Credentials::of("AKIAUNKNOWN000000000", "x")?;
    let accepted = "the credentials are accepted";
    stops(&kms.provider(&unknown), &key, accepted, "unauthenticated", "credentials")?;
    let gone = key.replace(&key[key.len() - 12..], "000000000000");
    stops(&enough, &gone, "the key exists", "key_missing", &gone)?;
    let uses = "the key wraps and unwraps";
    for (name, actions, step, lacking) in [
        ("a", &["kms:Encrypt", "kms:Decrypt"], "the key exists", "kms:DescribeKey"),
        ("b", &["kms:DescribeKey", "kms:Decrypt"], uses, "kms:Encrypt"),
        ("c", &["kms:DescribeKey", "kms:Encrypt"], uses, "kms:Decrypt"),
    ] {
        let (provider, _file) = user(name, actions)?;
        stops(&provider, &key, step, "denied", lacking)?;
    }
    kms.aws("kms", "disable_key", json!({"KeyId": key}))?;
    stops(&enough, &key, "the key exists", "key_disabled", "enable-key")
}

fn of_program() -> Result<()> {
    let program = Program::new()?;
    let mut provider = Provider::new("command", program.options());
    provider.data_directory = program.path("data");
    provider.deadline_ms = 3000;
    passes(&provider, KEY)?;
    let exists = "the key exists";
    for (status, class, part) in [
        ("10", "unreachable", "cannot be reached"),
        ("11", "unauthenticated", "credentials"),
        ("12", "denied", "not allowed to use"),
        ("14", "key_disabled", "disabled"),
        ("15", "sealed", "sealed"),
        ("16", "throttled", "too many requests"),
        ("127", "unreachable", "exit status was 127"),
    ] {
        program.write("keys/instead", &format!("{status}\n").repeat(100), 0o600)?;
        stops(&provider, KEY, exists, class, part)?;
    }
    fs::remove_file(program.path("keys/instead"))?;
    stops(&provider, "typo", exists, "key_missing", "no such key")?;
    let safe = "the program for \"wrap\" is safe to run";
    let chmod = |mode| {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(program.path("program"), fs::Permissions::from_mode(mode))
    };
    chmod(0o777)?;
    stops(&provider, KEY, safe, "insecure", "other users")?;
    chmod(0o644)?;
    let (what, failure) = last(&provider, KEY)?;
    ensure!(what == safe && !failure.is_null(), "{what}: {failure}");
    fs::rename(program.path("program"), program.path("elsewhere"))?;
    stops(&provider, KEY, safe, "unreachable", "program")
}
