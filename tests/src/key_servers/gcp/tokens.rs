//! The services that issue tokens.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use openssl::hash::MessageDigest;
use openssl::pkey::{PKey, Private};
use openssl::sign::Verifier;
use serde_json::{Value, json};

use super::{ACCOUNT, Google, POOL, SCOPES, error, now};
use crate::key_servers::rest::{Answer, Asked};

/// A claim set, if this key has signed the token.
fn verified(token: &str, key: &PKey<Private>) -> Option<Value> {
    let (signed, signature) = token.rsplit_once('.')?;
    let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
    let mut verifier = Verifier::new(MessageDigest::sha256(), key).ok()?;
    verifier.verify_oneshot(&signature, signed.as_bytes()).ok().filter(|verified| *verified)?;
    let (header, claims) = signed.split_once('.')?;
    let part = |part: &str| -> Option<Value> {
        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(part).ok()?).ok()
    };
    (part(header)?["alg"] == "RS256").then_some(())?;
    part(claims).filter(|claims| claims["exp"].as_u64() > Some(now()))
}

impl Google {
    fn token(&mut self, scope: &str) -> String {
        self.issued += 1;
        let token = format!("ya29.token-{}", self.issued);
        self.tokens.insert(token.clone(), scope.to_owned());
        token
    }

    pub(super) fn oauth(&mut self, asked: &Asked) -> Answer {
        let refused = |text: &str| {
            Answer::new(400, json!({"error": "invalid_grant", "error_description": text}))
        };
        if asked.form("grant_type") != "urn:ietf:params:oauth:grant-type:jwt-bearer" {
            return refused("Bad grant type.");
        }
        let Some(claims) = verified(&asked.form("assertion"), &self.account_key) else {
            return refused("Invalid JWT Signature.");
        };
        let audience = format!("{}/token", asked.origin());
        let issued = claims["iat"].as_u64().unwrap_or_default();
        let lasts = claims["exp"].as_u64().unwrap_or_default() - issued;
        if claims["aud"] != audience || issued > now() + 5 || lasts > 3600 {
            return refused("Invalid JWT: Token must be a short-lived token (60 minutes).");
        }
        if claims["iss"] != ACCOUNT {
            return refused("Invalid grant: account not found");
        }
        let scope = claims["scope"].as_str().unwrap_or_default().to_owned();
        let token = self.token(&scope);
        Answer::new(200, json!({"access_token": token, "token_type": "Bearer", "expires_in": 3599}))
    }

    pub(super) fn exchange(&mut self, asked: &Asked) -> Answer {
        let refused = |text: &str| {
            Answer::new(400, json!({"error": "invalid_grant", "error_description": text}))
        };
        let grant = asked.form("grant_type") == "urn:ietf:params:oauth:grant-type:token-exchange";
        if !grant || asked.form("audience") != POOL {
            return refused("The audience is not a pool.");
        }
        let claims = verified(&asked.form("subject_token"), &self.issuer_key);
        if claims.is_none_or(|claims| claims["aud"] != POOL) {
            return refused("The signature of the ID Token is not valid.");
        }
        let token = self.token(&asked.form("scope"));
        Answer::new(
            200,
            json!({"access_token": token, "token_type": "Bearer", "expires_in": 3599,
            "issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}),
        )
    }

    pub(super) fn impersonate(&mut self, asked: &Asked, path: &str) -> Answer {
        let known = self.tokens.get(asked.bearer()).map(String::as_str);
        if known != Some(SCOPES[1]) {
            return error(
                401,
                "UNAUTHENTICATED",
                "Request had invalid authentication credentials.",
            );
        }
        if path != format!("/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken") {
            return error(
                403,
                "PERMISSION_DENIED",
                "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist).",
            );
        }
        let scope = asked.json()["scope"][0].as_str().unwrap_or_default().to_owned();
        let token = self.token(&scope);
        Answer::new(200, json!({"accessToken": token, "expireTime": "2099-01-01T00:00:00Z"}))
    }

    pub(super) fn metadata(&mut self, asked: &Asked, path: &str) -> Answer {
        let header = Some(("Metadata-Flavor", "Google"));
        if asked.header("metadata-flavor") != "Google" {
            return Answer::new(403, json!("Missing Metadata-Flavor:Google header."));
        }
        let token = path == "/computeMetadata/v1/instance/service-accounts/default/token";
        if !token || !self.has_account {
            return Answer { status: 404, body: json!("not found"), header };
        }
        let token = self.token(SCOPES[1]);
        let body = json!({"access_token": token, "token_type": "Bearer", "expires_in": 3599});
        Answer { status: 200, body, header }
    }
}
