//! The ways to log in to Vault that need an issuer of their own: signed tokens, wrapped secret ids;
//! and namespaces.

use std::path::Path;
use std::process::Output;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use pagevault_tests::Installation;
use pagevault_tests::key_servers::Server;
use pagevault_tests::key_servers::helper::Provider;
use pagevault_tests::key_servers::vault::Vault;
use serde_json::{Value, json};

use crate::Test;

const CONTEXT: &str = "pagevault/1/00112233445566778899aabbccddeeff/0";
/// 32 recognizable bytes, in base64.
const SECRET: &str = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0ISEhISE=";

pub(crate) fn tests() -> Vec<Test> {
    let test = |name, run| Test { name, needs: &[Server::Vault], run };
    vec![
        test("vault_logins::signed_tokens_are_checked_by_vault", signed_tokens),
        test("vault_logins::a_wrapped_secret_id_is_unwrapped_once", wrapped_secret_id),
        test("vault_logins::a_namespace_has_its_own_keys_and_roles", namespaces),
    ]
}

fn wrap() -> Value {
    json!({"wrap": {"plaintext": SECRET}})
}

fn works(options: Value) -> Result<()> {
    let provider = Provider::new("vault", options);
    let (wrapped, _) = provider.wrap("db-kek", CONTEXT, SECRET)?;
    ensure!(provider.unwrap("db-kek", CONTEXT, &wrapped)? == SECRET);
    Ok(())
}

fn fails(options: Value, class: &str) -> Result<Value> {
    Provider::new("vault", options).refused("db-kek", CONTEXT, wrap(), class)
}

/// Kubernetes issues signed tokens as other issuers do. Vault's JWT method verifies such a token
/// with the public key of the issuer. Its login is the same as that of the Kubernetes method, which
/// would need a whole Kubernetes.
fn signed_tokens() -> Result<()> {
    let vault = Vault::start()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let claims = |audience: &str, end: u64| {
        json!({"sub": "system:serviceaccount:db:postgres", "aud": audience,
            "iat": now - 3600, "nbf": now - 3600, "exp": end})
    };
    for method in ["kubernetes", "jwt"] {
        let (public, token) = signed(claims("vault", now + 3600))?;
        let key = vault.write("signer.pem", &public, 0o644)?;
        vault.cli(&["auth", "enable", &format!("-path={method}"), "jwt"])?;
        let keys = format!("jwt_validation_pubkeys=@{}", key.display());
        vault.cli(&["write", &format!("auth/{method}/config"), &keys])?;
        vault.cli(&[
            "write",
            &format!("auth/{method}/role/postgres"),
            "role_type=jwt",
            "bound_audiences=vault",
            "user_claim=sub",
            "token_policies=db-kek",
        ])?;
        let file = vault.write(method, &token, 0o600)?;
        let auth = |role: &str| vault.options(json!({method: {"role": role, "jwt_file": file}}));
        works(auth("postgres"))?;
        fails(auth("nobody"), "unauthenticated")?;
        // By another issuer.
        let (_, stranger) = signed(claims("vault", now + 3600))?;
        vault.write(method, &stranger, 0o600)?;
        fails(auth("postgres"), "unauthenticated")?;
        vault.write(method, "no token", 0o600)?;
        fails(auth("postgres"), "bad_options")?;
    }

    // A token of the JWT method is a credential like others; Kubernetes makes its own readable.
    let file = vault.path("jwt");
    let (public, expired) = signed(claims("vault", now - 1800))?;
    vault.write("signer.pem", &public, 0o644)?;
    let keys = format!("jwt_validation_pubkeys=@{}", vault.path("signer.pem").display());
    vault.cli(&["write", "auth/jwt/config", &keys])?;
    vault.write("jwt", &expired, 0o600)?;
    let options = vault.options(json!({"jwt": {"role": "postgres", "jwt_file": file}}));
    let failure = fails(options.clone(), "unauthenticated")?;
    ensure!(failure["hint"].as_str().is_some_and(|text| text.contains("audience")), "{failure}");
    ensure!(!failure.to_string().contains(&expired), "the token is in the message");
    vault.write("jwt", &expired, 0o644)?;
    fails(options.clone(), "insecure")?;
    if rustix::process::geteuid().is_root() {
        vault.write("jwt", &expired, 0o640)?;
        std::os::unix::fs::chown(&file, Some(65534), None)?;
        fails(options, "insecure")?;
    }
    Ok(())
}

/// A public key, and a token with these claims signed with its private key.
fn signed(claims: Value) -> Result<(String, String)> {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
    use openssl::bn::BigNumRef;
    use openssl::ec::{EcGroup, EcKey};
    use openssl::ecdsa::EcdsaSig;
    use openssl::hash::{MessageDigest, hash};
    use openssl::nid::Nid;

    let key = EcKey::generate(EcGroup::from_curve_name(Nid::X9_62_PRIME256V1)?.as_ref())?;
    let public = String::from_utf8(key.public_key_to_pem()?)?;
    let part = |value: Value| BASE64.encode(value.to_string());
    let signed = format!("{}.{}", part(json!({"alg": "ES256", "typ": "JWT"})), part(claims));
    let digest = hash(MessageDigest::sha256(), signed.as_bytes())?;
    let signature = EcdsaSig::sign(&digest, &key)?;
    let number = |n: &BigNumRef| n.to_vec_padded(32);
    let raw = [number(signature.r())?, number(signature.s())?].concat();
    Ok((public, format!("{signed}.{}", BASE64.encode(raw))))
}

fn unwrap_secret_id(options: &Value, token_file: &Path) -> Result<Output> {
    Ok(Installation::get()?
        .command("pagevault-keyring")
        .args(["unwrap-secret-id", "--options", &options.to_string(), "--wrapping-token-file"])
        .arg(token_file)
        .output()?)
}

fn wrapped_secret_id() -> Result<()> {
    let vault = Vault::start()?;
    let options = vault.approle()?;
    let secret_id = vault.path("secret-id");
    std::fs::remove_file(&secret_id)?;
    fails(options.clone(), "unreachable")?;
    let path = "auth/approle/role/db/secret-id";
    let token =
        |path: &str| vault.cli(&["write", "-f", "-wrap-ttl=60s", "-field=wrapping_token", path]);
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();

    let first = token(path)?;
    let file = vault.write("wrapped", &first, 0o600)?;
    let output = unwrap_secret_id(&options, &file)?;
    ensure!(output.status.success(), "{}", said(&output));
    ensure!(!file.exists(), "the used token is still there");
    let content = std::fs::read_to_string(&secret_id)?;
    ensure!(!String::from_utf8_lossy(&output.stdout).contains(&content), "it is printed");
    works(options.clone())?;

    // Used twice: it may have been stolen. The secret id in use stays.
    vault.write("wrapped", &first, 0o600)?;
    let output = unwrap_secret_id(&options, &file)?;
    let text = said(&output);
    ensure!(!output.status.success() && text.contains("used already"), "{text}");
    ensure!(text.contains("destroy") && !text.contains(&first), "{text}");
    ensure!(std::fs::read_to_string(&secret_id)? == content && file.exists());
    works(options.clone())?;

    // A token that wraps something else is not used.
    let other = vault.cli(&[
        "write",
        "-f",
        "-wrap-ttl=60s",
        "-field=wrapping_token",
        "auth/token/create",
    ])?;
    vault.write("wrapped", &other, 0o600)?;
    let output = unwrap_secret_id(&options, &file)?;
    ensure!(said(&output).contains("does not wrap a secret id"), "{}", said(&output));
    vault.cli(&["unwrap", "-field=token", &other])?;

    // Where the secret id cannot be written, the token is not used either.
    let mut nowhere = options.clone();
    nowhere["auth"]["approle"]["secret_id_file"] = json!("/nonexistent/secret-id");
    let unused = token(path)?;
    vault.write("wrapped", &unused, 0o600)?;
    ensure!(!unwrap_secret_id(&nowhere, &file)?.status.success());
    vault.write("wrapped", &unused, 0o644)?;
    let output = unwrap_secret_id(&options, &file)?;
    ensure!(said(&output).contains("accessible to other users"), "{}", said(&output));
    vault.write("wrapped", &unused, 0o600)?;
    let output = unwrap_secret_id(&options, &file)?;
    ensure!(output.status.success(), "{}", said(&output));
    works(options)
}

/// Vault has namespaces in its enterprise edition only, which the tests do not have.
fn namespaces() -> Result<()> {
    let vault = Vault::start()?;
    let mut options = vault.approle()?;
    if !vault.is_openbao() {
        eprintln!("vault_logins: this Vault has no namespaces");
        return Ok(());
    }
    vault.cli(&["namespace", "create", "team"])?;
    vault.cli(&["namespace", "create", "-namespace=team", "db"])?;
    let inside = "-namespace=team/db";
    vault.cli(&["secrets", "enable", inside, "transit"])?;
    vault.cli(&["write", inside, "transit/keys/db-kek", "derived=true"])?;
    let policy = vault.path("db-kek.hcl").display().to_string();
    vault.cli(&["policy", "write", inside, "db-kek", &policy])?;
    vault.cli(&["auth", "enable", inside, "approle"])?;
    vault.cli(&["write", inside, "auth/approle/role/db", "token_policies=db-kek"])?;
    // Another role, and another key of the same name.
    works(options.clone())?;
    options["namespace"] = json!("team/db");
    fails(options.clone(), "unauthenticated")?;
    let role = vault.cli(&["read", inside, "-field=role_id", "auth/approle/role/db/role-id"])?;
    vault.write("role-id", &role, 0o644)?;
    let wrapped = vault.cli(&[
        "write",
        "-f",
        inside,
        "-wrap-ttl=60s",
        "-field=wrapping_token",
        "auth/approle/role/db/secret-id",
    ])?;
    let file = vault.write("wrapped", &wrapped, 0o600)?;
    let output = unwrap_secret_id(&options, &file)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    works(options.clone())?;
    options["namespace"] = json!("/team/db/");
    works(options.clone())?;
    options["namespace"] = json!("team/none");
    let outcome = Provider::new("vault", options.clone()).ask("db-kek", CONTEXT, wrap())?;
    ensure!(outcome.get("failed").is_some(), "{outcome}");
    for wrong in ["team//db", "team/../db", "team\r\nX-Vault-Token: x"] {
        options["namespace"] = json!(wrong);
        fails_plainly(&options)?;
    }
    Ok(())
}

fn fails_plainly(options: &Value) -> Result<()> {
    let outcome = Provider::new("vault", options.clone()).ask("db-kek", CONTEXT, wrap())?;
    ensure!(outcome["failed"]["class"] == "bad_options", "{outcome}");
    Ok(())
}
