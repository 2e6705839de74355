//! Credentials, permissions, addresses.

use anyhow::{Context, Result, ensure};
use pagevault_tests::key_servers::azure::{CLIENT, KeyVault, TENANT};
use pagevault_tests::key_servers::helper::Provider;
use serde_json::{Value, json};

use crate::Test;
use crate::contract::{CONTEXT, KEY, SECRET, rotate, says, unwrap, wrap};

pub(super) const TESTS: &[Test] = &[
    Test { name: "azure_key_vault::less_privilege_is_denied", needs: &[], run: least },
    Test { name: "azure_key_vault::tokens_come_from_four_places", needs: &[], run: places },
    Test { name: "azure_key_vault::rejected_credentials_say_so", needs: &[], run: rejected },
    Test { name: "azure_key_vault::files_that_cannot_be_used_say_why", needs: &[], run: files },
    Test { name: "azure_key_vault::addresses_are_azures", needs: &[], run: addresses },
    Test { name: "azure_key_vault::check_says_what_is_missing", needs: &[], run: check },
];

fn least() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let provider = vault.provider(vault.options());
    let (wrapped, _) = provider.wrap(KEY, CONTEXT, SECRET)?;
    for (permission, action) in [
        ("get", wrap()),
        ("wrapKey", wrap()),
        ("unwrapKey", unwrap(&wrapped)),
        ("rotate", rotate(&wrapped)),
    ] {
        vault.server.state().granted.remove(permission);
        let failure = provider.refused(KEY, CONTEXT, action, "denied")?;
        says(&failure, &format!("does not allow {permission} with key {KEY}"))?;
        ensure!(failure["retry"] == false, "{failure}");
        vault.server.state().granted.insert(permission);
    }
    // What Azure's own role for this purpose permits, is enough without rotation.
    for permission in ["list", "rotate"] {
        vault.server.state().granted.remove(permission);
    }
    source(&provider)?;
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

/// Options with a certificate.
fn certificate(vault: &KeyVault) -> Value {
    vault.options_with(json!({"client_certificate": {"tenant": TENANT, "client_id": CLIENT,
        "cert_file": vault.path("application.pem"), "key_file": vault.path("application.key")}}))
}

fn places() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let seen = source(&vault.provider(vault.options()))?;
    ensure!(seen == format!("application {CLIENT}, by a secret"), "{seen}");
    let seen = source(&vault.provider(certificate(&vault)))?;
    ensure!(seen == format!("application {CLIENT}, by a certificate"), "{seen}");

    let token = vault.path("token");
    let by_token = format!("application {CLIENT}, by the token in {}", token.display());
    let options = vault.options_with(json!({"workload_identity":
        {"tenant": TENANT, "client_id": CLIENT, "token_file": token}}));
    ensure!(source(&vault.provider(options))? == by_token);
    // As Azure's webhook sets them in a pod, with and without the option.
    let mut options = vault.options_with(json!({"workload_identity": {}}));
    for _ in 0..2 {
        let provider = vault
            .provider(options.clone())
            .env("AZURE_TENANT_ID", TENANT)
            .env("AZURE_CLIENT_ID", CLIENT)
            .env("AZURE_FEDERATED_TOKEN_FILE", token.to_str().context("path")?);
        ensure!(source(&provider)? == by_token);
        options.as_object_mut().context("options")?.remove("auth");
    }

    let seen = source(&vault.provider(options.clone()))?;
    ensure!(seen == "the machine's managed identity", "{seen}");
    options["auth"] = json!({"managed_identity": {"client_id": CLIENT}});
    let seen = source(&vault.provider(options))?;
    ensure!(seen == format!("managed identity {CLIENT}"), "{seen}");
    Ok(())
}

fn rejected() -> Result<()> {
    let (vault, other) = (KeyVault::start("RSA")?, KeyVault::start("oct-HSM")?);
    let refused = |options: Value, part: &str| -> Result<String> {
        let provider = vault.provider(options);
        let failure = provider.refused(KEY, CONTEXT, wrap(), "unauthenticated")?;
        says(&failure, part)?;
        ensure!(failure["retry"] == false, "{failure}");
        Ok(failure.to_string())
    };
    let mut options = vault.options();
    let secret = "wr0ng~0a9b8c7d6e5f4g3h2i1j";
    options["auth"]["client_secret"]["secret_file"] = json!(vault.write("wrong", secret)?);
    let said = refused(options.clone(), "AADSTS7000215")?;
    ensure!(!said.contains(secret), "{said}");
    options = vault.options();
    options["auth"]["client_secret"]["tenant"] = json!("contoso.example.com");
    refused(options.clone(), "AADSTS90002")?;
    options = vault.options();
    options["auth"]["client_secret"]["client_id"] = json!("0");
    refused(options, "AADSTS700016")?;

    // The certificate of another application, and a key that is not the certificate's.
    let mut options = certificate(&vault);
    options["auth"]["client_certificate"]["key_file"] = json!(other.path("application.key"));
    refused(options.clone(), "AADSTS700213")?;
    options["auth"]["client_certificate"]["cert_file"] = json!(other.path("application.pem"));
    refused(options, "AADSTS700213")?;

    for token in [other.issue("api://AzureADTokenExchange")?, vault.issue("another")?] {
        let file = vault.write("other-token", &token)?;
        let login = json!({"tenant": TENANT, "client_id": CLIENT, "token_file": file});
        let options = vault.options_with(json!({"workload_identity": login}));
        let said = refused(options, "AADSTS700213")?;
        ensure!(!said.contains(&token), "{said}");
    }

    // A machine with several identities needs the name of one.
    vault.server.state().identities = vec![CLIENT, "other"];
    refused(vault.options_with(json!({"managed_identity": {}})), "Identity not found")?;
    vault.server.state().identities.clear();
    let options = vault.options_with(json!({"managed_identity": {"client_id": CLIENT}}));
    refused(options.clone(), "Identity not found")?;
    // The connection is not encrypted, so it must not leave the machine.
    let far = Provider::new("azure_key_vault", options)
        .env("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://metadata.example.com");
    far.refused(KEY, CONTEXT, wrap(), "insecure")?;
    Ok(())
}

fn files() -> Result<()> {
    let vault = KeyVault::start("oct-HSM")?;
    let mut options = certificate(&vault);
    let file = vault.write("garbage", "hunter2")?;
    for property in ["cert_file", "key_file"] {
        let mut options = options.clone();
        options["auth"]["client_certificate"][property] = json!(file);
        for action in [wrap(), json!("check_options")] {
            let failure =
                vault.provider(options.clone()).refused(KEY, CONTEXT, action, "bad_options")?;
            says(&failure, "garbage")?;
            ensure!(!failure.to_string().contains("hunter2"), "{failure}");
        }
    }
    // Only a signed token leaves the machine.
    for content in ["hunter2", "root:x:0:0", "a.b.c"] {
        let file = vault.write("token-file", content)?;
        let login = json!({"tenant": TENANT, "client_id": CLIENT, "token_file": file});
        options["auth"] = json!({"workload_identity": login});
        for action in [wrap(), json!("check_options")] {
            let failure =
                vault.provider(options.clone()).refused(KEY, CONTEXT, action, "bad_options")?;
            ensure!(!failure.to_string().contains(content), "{failure}");
        }
    }
    // Without the variables of a pod.
    options["auth"] = json!({"workload_identity": {}});
    let failure = vault.provider(options).refused(KEY, CONTEXT, wrap(), "bad_options")?;
    says(&failure, "AZURE_FEDERATED_TOKEN_FILE")?;
    super::nothing_sent(&vault)
}

fn addresses() -> Result<()> {
    let vault = KeyVault::start("oct-HSM")?;
    for address in ["https://vault.example.com", "https://db.vault.azure.net.example.com"] {
        let mut options = vault.options();
        options["vault"] = json!(address);
        let provider = vault.provider(options);
        provider.refused(KEY, CONTEXT, wrap(), "insecure")?;
        provider.refused("", "", json!("check_options"), "insecure")?;
    }
    let mut options = vault.options();
    options["insecure_loopback_http"] = json!(false);
    vault.provider(options).refused(KEY, CONTEXT, wrap(), "insecure")?;
    super::nothing_sent(&vault)?;
    for (options, part) in [
        (json!({}), "vault"),
        (json!({"vault": "https://db.vault.azure.net", "secret": "hunter2"}), "secret"),
        (json!({"vault": "https://db.vault.azure.net", "auth": {}}), "auth"),
        (json!({"vault": "https://db.vault.azure.net", "ca_file": "relative"}), "ca_file"),
        (json!({"vault": "https://u:hunter2@db.vault.azure.net"}), "vault"),
    ] {
        let reply = vault.provider(options).ask("", "", json!("check_options"))?;
        ensure!(reply["failed"]["class"] == "bad_options", "{reply}");
        says(&reply["failed"], part)?;
        ensure!(!reply.to_string().contains("hunter2"), "{reply}");
    }
    let all = json!({"vault": "https://db.managedhsm.azure.net", "ca_file": "/nonexistent/ca.pem",
        "auth": {"client_secret":
            {"tenant": TENANT, "client_id": CLIENT, "secret_file": "/nonexistent/secret"}}});
    let reply = vault.provider(all).ask("", "", json!("check_options"))?;
    ensure!(reply == "options_ok", "{reply}");
    // Proxies are not used.
    let provider = vault.provider(vault.options()).env("HTTP_PROXY", "http://127.0.0.1:9");
    provider.env("http_proxy", "http://127.0.0.1:9").wrap(KEY, CONTEXT, SECRET)?;
    Ok(())
}

fn check() -> Result<()> {
    let vault = KeyVault::start("RSA")?;
    let last = |provider: &Provider, key: &str| -> Result<(String, Value)> {
        let reply = provider.ask(key, CONTEXT, json!("check"))?;
        let findings =
            reply["checked"]["findings"].as_array().with_context(|| format!("{reply}"))?;
        let last = findings.last().context("no findings")?;
        Ok((last["what"].as_str().unwrap_or_default().to_owned(), last["failure"].clone()))
    };
    let provider = vault.provider(vault.options());
    let (what, failure) = last(&provider, "typo")?;
    ensure!(what == "the key exists" && failure["class"] == "key_missing", "{what}: {failure}");
    vault.server.state().granted.remove("unwrapKey");
    let (what, failure) = last(&provider, KEY)?;
    ensure!(what == "the key wraps and unwraps" && failure["class"] == "denied", "{failure}");
    let mut options = vault.options();
    options["auth"]["client_secret"]["secret_file"] = json!("/nonexistent/secret");
    let (what, failure) = last(&vault.provider(options.clone()), KEY)?;
    ensure!(what == "the credentials can be read", "{what}");
    ensure!(failure["class"] == "unreachable", "{failure}");
    options["auth"]["client_secret"]["secret_file"] = json!(vault.write("wrong", "wrong")?);
    let (what, failure) = last(&vault.provider(options), KEY)?;
    ensure!(what == "an access token is issued", "{what}");
    ensure!(failure["class"] == "unauthenticated", "{failure}");
    Ok(())
}
