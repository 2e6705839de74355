//! The services that issue tokens.

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::asn1::Asn1Time;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::rsa::Padding;
use openssl::sign::{RsaPssSaltlen, Signer, Verifier};
use openssl::x509::{X509, X509NameBuilder};
use serde_json::{Value, json};

use super::{Azure, CLIENT, RESOURCE, TENANT, now, rsa};
use crate::key_servers::rest::{Answer, Asked};

const ASSERTION: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";

/// A key and its certificate.
pub(super) fn certificate() -> Result<(PKey<Private>, X509)> {
    let key = rsa()?;
    let mut name = X509NameBuilder::new()?;
    name.append_entry_by_text("CN", "pagevault tests")?;
    let name = name.build();
    let mut builder = X509::builder()?;
    builder.set_subject_name(&name)?;
    builder.set_issuer_name(&name)?;
    builder.set_pubkey(&key)?;
    let (begin, end) = (Asn1Time::days_from_now(0)?, Asn1Time::days_from_now(1)?);
    builder.set_not_before(&begin)?;
    builder.set_not_after(&end)?;
    builder.sign(&key, MessageDigest::sha256())?;
    Ok((key, builder.build()))
}

/// A token signed with RS256, that expires in ten minutes.
pub(super) fn sign(key: &PKey<Private>, claims: &Value) -> Result<String> {
    let mut claims = claims.clone();
    claims["exp"] = json!(now() + 600);
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(&json!({"alg": "RS256"})), part(&claims));
    let signature =
        Signer::new(MessageDigest::sha256(), key)?.sign_oneshot_to_vec(signed.as_bytes())?;
    Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
}

/// Header and claims, if this key has signed the token.
fn verified(token: &str, key: &PKey<Private>, algorithm: &str) -> Option<(Value, Value)> {
    let (signed, signature) = token.rsplit_once('.')?;
    let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
    let mut verifier = Verifier::new(MessageDigest::sha256(), key).ok()?;
    if algorithm == "PS256" {
        verifier.set_rsa_padding(Padding::PKCS1_PSS).ok()?;
        verifier.set_rsa_pss_saltlen(RsaPssSaltlen::DIGEST_LENGTH).ok()?;
    }
    verifier.verify_oneshot(&signature, signed.as_bytes()).ok().filter(|verified| *verified)?;
    let (header, claims) = signed.split_once('.')?;
    let part = |part: &str| -> Option<Value> {
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
    };
    let (header, claims) = (part(header)?, part(claims)?);
    let is_good = header["alg"] == algorithm && claims["exp"].as_u64() > Some(now());
    is_good.then_some((header, claims))
}

fn refused(code: &str, text: &str) -> Answer {
    Answer::new(401, json!({"error": code, "error_description": format!("{text}\r\nTrace ID: 1")}))
}

impl Azure {
    fn token(&mut self) -> Answer {
        let token = format!("eyJ0.token-{}", self.tokens.len());
        self.tokens.insert(token.clone());
        Answer::new(200, json!({"access_token": token, "token_type": "Bearer", "expires_in": 3599}))
    }

    pub(super) fn entra(&mut self, asked: &Asked, tenant: &str) -> Answer {
        if tenant != TENANT {
            let text = format!("AADSTS90002: Tenant '{tenant}' not found.");
            return Answer::new(
                400,
                json!({"error": "invalid_request", "error_description": text}),
            );
        }
        if asked.form("client_id") != CLIENT {
            return refused("unauthorized_client", "AADSTS700016: Application was not found.");
        }
        let is_asked = asked.form("grant_type") == "client_credentials"
            && asked.form("scope") == format!("{RESOURCE}/.default");
        if !is_asked {
            return refused("invalid_scope", "AADSTS70011: The provided value is not valid.");
        }
        let assertion = asked.form("client_assertion");
        if assertion.is_empty() {
            if asked.form("client_secret") == self.secret {
                return self.token();
            }
            return refused("invalid_client", "AADSTS7000215: Invalid client secret provided.");
        }
        if asked.form("client_assertion_type") != ASSERTION {
            return refused("invalid_request", "AADSTS900144: client_assertion_type.");
        }
        let (key, certificate) = &self.certificate;
        let digest = certificate.digest(MessageDigest::sha256());
        let thumbprint = digest.map(|digest| URL_SAFE_NO_PAD.encode(digest)).unwrap_or_default();
        let address = format!("{}/{TENANT}/oauth2/v2.0/token", asked.origin());
        let by_certificate = verified(&assertion, key, "PS256").is_some_and(|(header, claims)| {
            header["x5t#S256"] == thumbprint.as_str()
                && claims["aud"] == address
                && claims["iss"] == CLIENT
                && claims["sub"] == CLIENT
                && claims["jti"].is_string()
        });
        let by_issuer = verified(&assertion, &self.issuer, "RS256").is_some_and(|(_, claims)| {
            claims["aud"] == "api://AzureADTokenExchange"
                && claims["sub"] == "system:serviceaccount:db:postgres"
        });
        if by_certificate || by_issuer {
            return self.token();
        }
        refused("invalid_client", "AADSTS700213: No matching federated identity record found.")
    }

    pub(super) fn metadata(&mut self, asked: &Asked) -> Answer {
        let refused = |text: &str| {
            Answer::new(400, json!({"error": "invalid_request", "error_description": text}))
        };
        if asked.header("metadata") != "true" || asked.query("api-version") != "2018-02-01" {
            return refused("Required metadata header not specified");
        }
        let client = asked.query("client_id");
        let is_known = match &self.identities[..] {
            [_] if client.is_empty() => true,
            known => known.contains(&client.as_str()),
        };
        if !is_known {
            return refused("Identity not found");
        }
        if asked.query("resource") != RESOURCE {
            return refused("invalid resource");
        }
        self.token()
    }
}
