//! Credentials, permissions, addresses.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::gcp::{ACCOUNT, Gcp, PERMISSIONS, POOL, RING};
use pagevault_tests::key_servers::helper::Provider;
use serde_json::{Value, json};

use crate::Test;
use crate::contract::{CONTEXT, KEY, SECRET, Subject, rotate, says, unwrap, wrap};

pub(super) const TESTS: &[Test] = &[
    Test { name: "gcp_kms::least_privilege_is_enough_and_less_is_denied", needs: &[], run: least },
    Test { name: "gcp_kms::credentials_come_from_four_places", needs: &[], run: places },
    Test { name: "gcp_kms::credentials_that_are_not_accepted_say_so", needs: &[], run: rejected },
    Test { name: "gcp_kms::a_machine_without_an_account_says_so", needs: &[], run: no_account },
    Test { name: "gcp_kms::files_that_cannot_be_used_say_why", needs: &[], run: files },
    Test { name: "gcp_kms::only_signed_tokens_are_sent", needs: &[], run: signed_tokens },
    Test { name: "gcp_kms::addresses_are_googles", needs: &[], run: addresses },
    Test { name: "gcp_kms::check_says_what_is_missing", needs: &[], run: check },
];

/// The permissions in the user guide's role.
fn documented() -> Result<Vec<&'static str>> {
    let guide = include_str!("../../../../docs/gcp-kms.md");
    let (_, role) = guide.split_once("includedPermissions:").context("no role in the guide")?;
    let lines = role.lines().skip(1).map_while(|line| line.trim().strip_prefix("- "));
    Ok(lines.map(|line| line.split(' ').next().unwrap_or(line)).collect())
}

fn least() -> Result<()> {
    let gcp = Gcp::start()?;
    let provider = Subject::provider(&gcp);
    let mut documented = documented()?;
    let mut expected = PERMISSIONS.to_vec();
    documented.sort_unstable();
    expected.sort_unstable();
    ensure!(documented == expected, "{documented:?}");
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    for (permission, action) in [
        ("cloudkms.cryptoKeys.get", wrap()),
        ("cloudkms.cryptoKeyVersions.useToEncrypt", wrap()),
        ("cloudkms.cryptoKeyVersions.useToDecrypt", unwrap(&wrapped)),
        ("cloudkms.cryptoKeyVersions.list", rotate(&wrapped)),
        ("cloudkms.cryptoKeyVersions.create", rotate(&wrapped)),
        ("cloudkms.cryptoKeyVersions.get", rotate(&wrapped)),
        ("cloudkms.cryptoKeys.update", rotate(&wrapped)),
    ] {
        gcp.server.state().granted.remove(permission);
        let failure = provider.refused(KEY, CONTEXT, action, "denied")?;
        says(&failure, permission)?;
        ensure!(failure["retry"] == false, "{failure}");
        gcp.server.state().granted.insert(permission);
    }
    // Without those for rotation everything else works.
    let rest = ["list", "create", "get"].map(|verb| format!("cloudkms.cryptoKeyVersions.{verb}"));
    gcp.server.state().granted.retain(|name| !rest.contains(&(*name).to_owned()));
    let reply = provider.ask(KEY, CONTEXT, json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
    ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
    Ok(())
}

/// What `check` says of the credentials.
fn source(provider: &Provider) -> Result<String> {
    let reply = provider.ask(KEY, CONTEXT, json!("check"))?;
    let findings = reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
    ensure!(findings.iter().all(|finding| finding["failure"].is_null()), "{reply}");
    ensure!(findings[0]["what"] == "the credentials can be read", "{reply}");
    Ok(findings[0]["seen"].as_str().unwrap_or_default().to_owned())
}

fn places() -> Result<()> {
    let gcp = Gcp::start()?;
    let account = format!("service account {ACCOUNT}");
    ensure!(source(&gcp.provider(gcp.options()))? == account);

    // Without the option: the variable, then the metadata service.
    let mut options = gcp.options();
    let file = options["credentials_file"].take();
    options.as_object_mut().context("options")?.remove("credentials_file");
    let ambient = gcp.provider(options.clone());
    let seen = source(&ambient)?;
    ensure!(seen == "the machine's service account", "{seen}");
    let named = ambient.env("GOOGLE_APPLICATION_CREDENTIALS", file.as_str().context("path")?);
    ensure!(source(&named)? == account);

    // A workload identity, with and without a service account; its token as text and in JSON.
    for impersonate in [false, true] {
        let config = gcp.federation(impersonate)?;
        options["credentials_file"] = json!(gcp.write("federation.json", &config.to_string())?);
        let seen = source(&gcp.provider(options.clone()))?;
        let pool = POOL.trim_start_matches("//iam.googleapis.com/");
        ensure!(seen.contains(pool) && seen.contains(ACCOUNT) == impersonate, "{seen}");
    }
    let mut config = gcp.federation(true)?;
    let token = gcp.issue(json!({"aud": POOL}))?;
    let file = gcp.write("token.json", &json!({"id_token": token}).to_string())?;
    config["credential_source"] = json!({"file": file,
        "format": {"type": "json", "subject_token_field_name": "id_token"}});
    options["credentials_file"] = json!(gcp.write("federation.json", &config.to_string())?);
    source(&gcp.provider(options))?;
    Ok(())
}

fn rejected() -> Result<()> {
    let gcp = Gcp::start()?;
    let other = Gcp::start()?;
    // A key file with the key of another account.
    let mut file: Value = serde_json::from_str(&gcp.account_file()?)?;
    let foreign: Value = serde_json::from_str(&other.account_file()?)?;
    file["private_key"] = foreign["private_key"].clone();
    let mut options = gcp.options();
    options["credentials_file"] = json!(gcp.write("forged.json", &file.to_string())?);
    let provider = gcp.provider(options.clone());
    let failure = provider.refused(KEY, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "Invalid JWT Signature")?;
    says(&failure, ACCOUNT)?;
    ensure!(failure["retry"] == false && !failure.to_string().contains("PRIVATE"), "{failure}");

    // A token of another issuer, one for another audience, and one of an unknown pool.
    let mut config = gcp.federation(false)?;
    for token in [other.issue(json!({"aud": POOL}))?, gcp.issue(json!({"aud": "x"}))?] {
        config["credential_source"] = json!({"file": gcp.write("token", &token)?});
        options["credentials_file"] = json!(gcp.write("federation.json", &config.to_string())?);
        let provider = gcp.provider(options.clone());
        let failure = provider.refused(KEY, CONTEXT, wrap(), "unauthenticated")?;
        says(&failure, "The signature of the ID Token is not valid")?;
        ensure!(!failure.to_string().contains(&token), "{failure}");
    }
    // The identity of the pool may not act as this service account.
    let mut config = gcp.federation(true)?;
    let url = config["service_account_impersonation_url"].as_str().context("url")?;
    config["service_account_impersonation_url"] = json!(url.replace("pagevault@", "other@"));
    options["credentials_file"] = json!(gcp.write("federation.json", &config.to_string())?);
    let provider = gcp.provider(options);
    let failure = provider.refused(KEY, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "roles/iam.workloadIdentityUser")?;
    Ok(())
}

fn no_account() -> Result<()> {
    let gcp = Gcp::start()?;
    gcp.server.state().has_account = false;
    let mut options = gcp.options();
    options.as_object_mut().context("options")?.remove("credentials_file");
    let provider = gcp.provider(options.clone());
    let failure = provider.refused(KEY, CONTEXT, wrap(), "unauthenticated")?;
    says(&failure, "no service account")?;
    // Another server at that address.
    let mut provider = gcp.provider(options.clone());
    provider.deadline_ms = 2000;
    let body = r#"{"access_token": "x"}"#.to_owned();
    let fault = pagevault_tests::key_servers::rest::Fault::Reply(200, body);
    gcp.server.fault("/computeMetadata", usize::MAX, fault);
    provider.refused(KEY, CONTEXT, wrap(), "unreachable")?;
    // The connection is not encrypted, so it must not leave the machine.
    let far = Provider::new("gcp_kms", options).env("GCE_METADATA_HOST", "metadata.example.com");
    far.refused(KEY, CONTEXT, wrap(), "insecure")?;
    Ok(())
}

fn files() -> Result<()> {
    let gcp = Gcp::start()?;
    let account: Value = serde_json::from_str(&gcp.account_file()?)?;
    let federation = gcp.federation(false)?;
    let with = |base: &Value, name: &str, value: Value| {
        let mut file = base.clone();
        file[name] = value;
        file.to_string()
    };
    let mut options = gcp.options();
    for (content, class, part) in [
        ("hunter2 hunter2".to_owned(), "bad_options", "It is not JSON"),
        (with(&account, "private_key", json!("hunter2")), "bad_options", "private_key is not"),
        (with(&account, "private_key", json!(null)), "bad_options", "has no private_key"),
        (with(&account, "type", json!("authorized_user")), "bad_options", "of a person"),
        (
            with(&account, "type", json!("impersonated_service_account")),
            "bad_options",
            "not supported",
        ),
        (with(&account, "universe_domain", json!("example.com")), "bad_options", "universe_domain"),
        (with(&account, "token_uri", json!("https://example.com/t")), "insecure", "token_uri"),
        (
            with(&federation, "token_url", json!("https://sts.example.com/")),
            "insecure",
            "token_url",
        ),
        (with(&federation, "audience", json!(null)), "bad_options", "has no audience"),
        (with(&federation, "subject_token_type", json!("saml2")), "bad_options", "signed token"),
        (
            with(&federation, "credential_source", json!({"url": "http://127.0.0.1"})),
            "bad_options",
            "not a file",
        ),
        (
            with(
                &federation,
                "credential_source",
                json!({"executable": {"command": "/bin/false"}}),
            ),
            "bad_options",
            "Programs",
        ),
        (
            with(
                &federation,
                "service_account_impersonation_url",
                json!("https://iam.googleapis.com/v1/x"),
            ),
            "bad_options",
            "service_account_impersonation_url",
        ),
    ] {
        options["credentials_file"] = json!(gcp.write("file.json", &content)?);
        let provider = gcp.provider(options.clone());
        for action in [wrap(), json!("check_options")] {
            let failure = provider.refused(KEY, CONTEXT, action, class)?;
            says(&failure, part)?;
            ensure!(!failure.to_string().contains("hunter2"), "{failure}");
        }
    }
    super::nothing_sent(&gcp)
}

/// A configuration may name any file; only a signed token leaves the machine.
fn signed_tokens() -> Result<()> {
    let gcp = Gcp::start()?;
    let mut options = gcp.options();
    for content in ["hunter2", "root:x:0:0", "-----BEGIN PRIVATE KEY-----", "a.b.c"] {
        let mut config = gcp.federation(false)?;
        config["credential_source"] = json!({"file": gcp.write("secret", content)?});
        options["credentials_file"] = json!(gcp.write("federation.json", &config.to_string())?);
        let provider = gcp.provider(options.clone());
        let failure = provider.refused(KEY, CONTEXT, wrap(), "bad_options")?;
        ensure!(!failure.to_string().contains(content), "{failure}");
    }
    super::nothing_sent(&gcp)
}

fn addresses() -> Result<()> {
    let gcp = Gcp::start()?;
    for endpoint in ["https://kms.example.com", "https://cloudkms.googleapis.com.example.com"] {
        let mut options = gcp.options();
        options["endpoint"] = json!(endpoint);
        let provider = gcp.provider(options);
        provider.refused(KEY, CONTEXT, wrap(), "insecure")?;
        provider.refused("", "", json!("check_options"), "insecure")?;
    }
    let mut options = gcp.options();
    options["insecure_loopback_http"] = json!(false);
    gcp.provider(options).refused(KEY, CONTEXT, wrap(), "insecure")?;
    super::nothing_sent(&gcp)?;
    for (options, part) in [
        (json!({"credentials": "hunter2"}), "credentials"),
        (json!({"key_ring": "postgres"}), "key ring"),
        (json!({"key_ring": 1}), "key_ring"),
        (json!({"ca_file": "relative"}), "ca_file"),
    ] {
        let failure = gcp.provider(options).ask("", "", json!("check_options"))?;
        ensure!(failure["failed"]["class"] == "bad_options", "{failure}");
        says(&failure["failed"], part)?;
    }
    let all = json!({"key_ring": RING, "endpoint": "https://cloudkms.europe-west3.rep.googleapis.com",
        "ca_file": "/nonexistent/ca.pem", "credentials_file": "/nonexistent/account.json"});
    let reply = gcp.provider(all).ask("", "", json!("check_options"))?;
    ensure!(reply == "options_ok", "{reply}");
    // Proxies and redirections are not followed.
    let provider = Subject::provider(&gcp)
        .env("HTTP_PROXY", "http://127.0.0.1:9")
        .env("http_proxy", "http://127.0.0.1:9");
    provider.wrap(KEY, CONTEXT, SECRET)?;
    Ok(())
}

fn check() -> Result<()> {
    let gcp = Gcp::start()?;
    let last = |provider: &Provider, key: &str| -> Result<(String, Value)> {
        let reply = provider.ask(key, CONTEXT, json!("check"))?;
        let findings =
            reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
        let last = findings.last().context("no findings")?;
        Ok((last["what"].as_str().unwrap_or_default().to_owned(), last["failure"].clone()))
    };
    let provider = Subject::provider(&gcp);
    let (what, failure) = last(&provider, "typo")?;
    ensure!(what == "the key exists" && failure["class"] == "key_missing", "{what}: {failure}");
    gcp.server.state().granted.remove("cloudkms.cryptoKeyVersions.useToDecrypt");
    let (what, failure) = last(&provider, KEY)?;
    ensure!(what == "the key wraps and unwraps" && failure["class"] == "denied", "{failure}");
    says(&failure, "useToDecrypt")?;
    let mut options = gcp.options();
    options["credentials_file"] = json!("/nonexistent/account.json");
    let (what, failure) = last(&gcp.provider(options.clone()), KEY)?;
    ensure!(
        what == "the credentials can be read" && failure["class"] == "unreachable",
        "{failure}"
    );
    options["credentials_file"] = gcp.options()["credentials_file"].take();
    options["key_ring"] = json!(RING.replace("postgres", "other"));
    let (what, failure) = last(&gcp.provider(options), KEY)?;
    ensure!(what == "Cloud KMS accepts the credentials", "{what}");
    ensure!(failure["class"] == "key_missing", "{failure}");
    Ok(())
}
