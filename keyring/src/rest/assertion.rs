//! Signed tokens: JSON Web Tokens (RFC 7519) that this program signs, and those of others that it
//! passes on.
//!
//! The signature is made by the key of TLS's library, so no other implementation of RSA is needed.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rustls::SignatureScheme;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::sign::SigningKey;
use serde_json::{Map, Value};
use zeroize::Zeroizing;

use crate::net::signing_key;

/// How tokens are signed with an RSA key (RFC 7518 section 3).
#[derive(Clone, Copy)]
pub(crate) enum Algorithm {
    /// RSASSA-PKCS1-v1_5 with SHA-256.
    Rs256,
    /// RSASSA-PSS with SHA-256.
    Ps256,
}

impl Algorithm {
    fn scheme(self) -> SignatureScheme {
        match self {
            Algorithm::Rs256 => SignatureScheme::RSA_PKCS1_SHA256,
            Algorithm::Ps256 => SignatureScheme::RSA_PSS_SHA256,
        }
    }
}

/// A private RSA key that signs.
pub(crate) struct Signer {
    key: Arc<dyn SigningKey>,
    algorithm: Algorithm,
}

impl Signer {
    /// From PEM; `None` if it contains no RSA key.
    pub(crate) fn from_pem(pem: &[u8], algorithm: Algorithm) -> Option<Signer> {
        let key = PrivateKeyDer::from_pem_slice(pem).ok()?;
        let key = signing_key(key)?;
        key.choose_scheme(&[algorithm.scheme()])?;
        Some(Signer { key, algorithm })
    }

    /// The algorithm's name in a token's header.
    pub(crate) fn name(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Rs256 => "RS256",
            Algorithm::Ps256 => "PS256",
        }
    }

    /// The signed token; `None` if the key cannot sign.
    pub(crate) fn sign(&self, header: &Value, claims: &Value) -> Option<Zeroizing<String>> {
        let encoded = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encoded(header), encoded(claims));
        let signer = self.key.choose_scheme(&[self.algorithm.scheme()])?;
        let signature = signer.sign(signed.as_bytes()).ok()?;
        Some(Zeroizing::new(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))))
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Whether `text` has the form of a signed token. A file with other content is not sent anywhere.
pub(crate) fn is_signed_token(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let [header, claims, signature] = parts[..] else { return false };
    let is_object = |part: &str| {
        let decoded = URL_SAFE_NO_PAD.decode(part).map(Zeroizing::new);
        decoded.is_ok_and(|bytes| serde_json::from_slice::<Map<String, Value>>(&bytes).is_ok())
    };
    is_object(header)
        && is_object(claims)
        && !signature.is_empty()
        && URL_SAFE_NO_PAD.decode(signature).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_signed_tokens_have_their_form() {
        let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let (header, claims) = (part(r#"{"alg":"RS256"}"#), part(r#"{"sub":"x"}"#));
        assert!(is_signed_token(&format!("{header}.{claims}.AAAA")));
        for wrong in [
            String::new(),
            "root:x:0:0".to_owned(),
            format!("{header}.{claims}"),
            format!("{header}.{claims}."),
            format!("{header}.{claims}.AAAA.AAAA"),
            format!("{header}.{}.AAAA", part("text")),
            format!("{}.{claims}.AAAA", part("[]")),
            format!("{header}.{claims}.not base64"),
        ] {
            assert!(!is_signed_token(&wrong), "{wrong}");
        }
    }

    #[test]
    fn only_rsa_keys_sign() {
        let pem = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        for wrong in [&b""[..], pem] {
            assert!(Signer::from_pem(wrong, Algorithm::Rs256).is_none());
        }
    }
}
