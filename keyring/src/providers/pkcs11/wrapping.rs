//! Wrapping and unwrapping with a key in the token, by the best method that the token, and the
//! key's attributes, permit.

use cryptoki::error::{Error, RvError};
use cryptoki::mechanism::aead::GcmParams;
use cryptoki::mechanism::rsa::{PkcsMgfType, PkcsOaepParams, PkcsOaepSource};
use cryptoki::mechanism::{Mechanism, MechanismType};
use cryptoki::object::{Attribute, AttributeType, KeyType, ObjectClass};
use cryptoki::session::Session;
use pagevault_cipher::Secret32;
use pagevault_cipher::secret::fill_random;
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::failure::{self, Doing, is_ambiguous};
use super::keys::{Key, Kind, public_key};
use super::token::Token;
use crate::envelope::{self, Method, NONCE, Parts, TAG, associated_data, head};
use crate::failure::Failure;
use crate::options::printable;

/// The beginning of associated data.
const BOUND: &str = "pagevault pkcs11 provider 1";

/// How a mechanism is called: by `C_Encrypt` and `C_Decrypt`, or by `C_WrapKey` and `C_UnwrapKey`
/// on objects that exist only in this session. Both give the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    Encrypt,
    WrapKey,
}

/// A key in a token, with a session that may use it.
pub(super) struct Use<'a> {
    pub(super) token: &'a Token,
    pub(super) session: &'a Session,
    /// The master key's name.
    pub(super) name: &'a str,
    pub(super) key: &'a Key,
}

/// The best method with which a key can wrap.
///
/// # Errors
/// `key_disabled` if the key's attributes permit none, `bad_options` if the token has none.
pub(super) fn choose(token: &Token, key: &Key, name: &str) -> Result<Method, Failure> {
    let methods: &[Method] = match key.kind {
        Kind::Aes => &[Method::Gcm, Method::Kw, Method::Kwp],
        Kind::Rsa => &[Method::Oaep],
    };
    let usable = methods.iter().find(|method| calls(token, key, **method).is_some());
    usable.copied().ok_or_else(|| {
        let permitted = match key.kind {
            Kind::Aes => {
                key.may(AttributeType::Encrypt) && key.may(AttributeType::Decrypt)
                    || key.may(AttributeType::Wrap) && key.may(AttributeType::Unwrap)
            }
            Kind::Rsa => key.may(AttributeType::Decrypt),
        };
        if !permitted {
            return disabled(
                name,
                "attributes CKA_ENCRYPT and CKA_DECRYPT, or CKA_WRAP and CKA_UNWRAP, are not true",
            );
        }
        Failure::new(ErrorClass::BadOptions, "token has no mechanism for this key")
            .with_detail(format!(
                "Key \"{}\" needs one of: {}.",
                printable(name),
                match key.kind {
                    Kind::Aes => "CKM_AES_GCM, CKM_AES_KEY_WRAP, CKM_AES_KEY_WRAP_PAD",
                    Kind::Rsa => "CKM_RSA_PKCS_OAEP",
                }
            ))
            .with_hint("Use a key of another kind: see docs/pkcs11.md, \"Mechanisms\".")
    })
}

/// The failure for a key whose attributes forbid its use.
fn disabled(name: &str, attributes: &str) -> Failure {
    let name = printable(name);
    Failure::new(
        ErrorClass::KeyDisabled,
        format!("key \"{name}\" may not be used to wrap and unwrap"),
    )
    .with_detail(format!("Its {attributes}."))
    .with_hint("Change the attributes with the tools of the token's vendor, or use another key.")
}

/// How token and key permit to call the mechanism of a method, if they do.
fn calls(token: &Token, key: &Key, method: Method) -> Option<Calls> {
    let mechanism = match method {
        Method::Gcm => MechanismType::AES_GCM,
        Method::Kw => MechanismType::AES_KEY_WRAP,
        Method::Kwp => MechanismType::AES_KEY_WRAP_PAD,
        Method::Oaep => MechanismType::RSA_PKCS_OAEP,
    };
    let info = token.context.get_mechanism_info(token.slot, mechanism).ok()?;
    let has = |attribute| key.may(attribute);
    // The public key encrypts; it is looked up when it is needed.
    let encrypts = has(AttributeType::Encrypt) || key.kind == Kind::Rsa;
    if info.encrypt() && info.decrypt() && encrypts && has(AttributeType::Decrypt) {
        return Some(Calls::Encrypt);
    }
    let by_objects = matches!(method, Method::Kw | Method::Kwp)
        && info.wrap()
        && info.unwrap()
        && has(AttributeType::Wrap)
        && has(AttributeType::Unwrap);
    by_objects.then_some(Calls::WrapKey)
}

/// The name of a method's mechanism.
pub(super) fn mechanism_name(method: Method) -> &'static str {
    match method {
        Method::Gcm => "CKM_AES_GCM",
        Method::Kw => "CKM_AES_KEY_WRAP, with a one-time key",
        Method::Kwp => "CKM_AES_KEY_WRAP_PAD, with a one-time key",
        Method::Oaep => "CKM_RSA_PKCS_OAEP (SHA-256), with a one-time key",
    }
}

impl Use<'_> {
    /// Wraps `plaintext`, bound to `context` and the master key's name.
    ///
    /// # Errors
    /// Those of [`choose`] and of the token.
    pub(super) fn wrap(&self, context: &str, plaintext: &[u8]) -> Result<Vec<u8>, Failure> {
        let method = choose(self.token, self.key, self.name)?;
        let Key { version, id, .. } = self.key;
        let too_long = || internal("The token returned too much.");
        if method == Method::Gcm {
            let mut wrapped = head(*version, method, id, &[]).ok_or_else(too_long)?;
            let bound = associated_data(BOUND, &wrapped, self.name, context);
            let (nonce, ciphertext) = self.encrypt_gcm(&bound, plaintext)?;
            if ciphertext.len() != plaintext.len() + TAG {
                return Err(internal("The token returned a ciphertext of another length."));
            }
            wrapped.extend_from_slice(&nonce);
            wrapped.extend_from_slice(&ciphertext);
            return Ok(wrapped);
        }
        let secret = Secret32::random().map_err(|error| internal(&format!("{error}.")))?;
        let once = self.wrap_once(method, secret.expose())?;
        let mut wrapped = head(*version, method, id, &once).ok_or_else(too_long)?;
        let bound = associated_data(BOUND, &wrapped, self.name, context);
        envelope::seal(&secret, &bound, plaintext, &mut wrapped)
            .map_err(|error| internal(&format!("{error}.")))?;
        Ok(wrapped)
    }

    /// Unwraps what this key has wrapped.
    ///
    /// # Errors
    /// `wrong_ciphertext` if it is damaged, or was wrapped by another key, under another name or in
    /// another context.
    pub(super) fn unwrap(
        &self,
        context: &str,
        parts: &Parts<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let key_wrap = matches!(parts.method, Method::Kw | Method::Kwp);
        if self.key.is_not(AttributeType::Decrypt)
            && !(key_wrap && self.key.may(AttributeType::Unwrap))
        {
            let attributes = if key_wrap {
                "attributes CKA_DECRYPT and CKA_UNWRAP are"
            } else {
                "attribute CKA_DECRYPT is"
            };
            return Err(disabled(self.name, &format!("{attributes} false")));
        }
        let bound = associated_data(BOUND, parts.head, self.name, context);
        if parts.method == Method::Gcm {
            return self.surely(parts.method, |key| key.decrypt_gcm(&bound, parts.body));
        }
        let once = self.surely(parts.method, |key| key.unwrap_once(parts.method, parts.once))?;
        envelope::open(&once, &bound, parts.body).ok_or_else(foreign)
    }

    /// Unwraps, and finds out what a failure means. Many tokens return the same general error for a
    /// wrong tag as for a defect. So the key is tried with something that it wraps now: if that
    /// works, and unwrapping fails once more, the fault is in what was to be unwrapped.
    fn surely(
        &self,
        method: Method,
        unwrap: impl Fn(&Use<'_>) -> Result<Zeroizing<Vec<u8>>, Error>,
    ) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let error = match unwrap(self) {
            Ok(plaintext) => return Ok(plaintext),
            Err(error) if is_ambiguous(&error) => error,
            Err(error) => return Err(failure::of(&error, Doing::Unwrap)),
        };
        // In another session: an operation of this one may still be active.
        let session = self.token.context.open_ro_session(self.token.slot);
        let session = session.map_err(|_| outage(&error))?;
        let again = Use { session: &session, ..*self };
        match again.works(method) {
            Some(true) => unwrap(&again).map_err(|error| {
                if is_ambiguous(&error) { foreign() } else { failure::of(&error, Doing::Unwrap) }
            }),
            Some(false) => Err(outage(&error)),
            // The key may unwrap only, as old versions may.
            None => Err(failure::of(&error, Doing::Unwrap)),
        }
    }

    /// Whether the key unwraps what it wraps; `None` if it must not wrap.
    fn works(&self, method: Method) -> Option<bool> {
        calls(self.token, self.key, method)?;
        let test = [0x5a; 32];
        Some(if method == Method::Gcm {
            self.encrypt_gcm(b"test", &test).is_ok_and(|(nonce, ciphertext)| {
                let body = [&nonce[..], &ciphertext].concat();
                self.decrypt_gcm(b"test", &body).is_ok_and(|again| *again == test)
            })
        } else {
            self.wrap_once(method, &test)
                .is_ok_and(|once| self.unwrap_once(method, &once).is_ok_and(|again| *again == test))
        })
    }

    fn encrypt_gcm(&self, bound: &[u8], plaintext: &[u8]) -> Result<Encrypted, Failure> {
        let mut nonce = [0; NONCE];
        fill_random(&mut nonce).map_err(|error| internal(&format!("{error}.")))?;
        let encrypted = with_nonce(nonce, |nonce| {
            let parameters = GcmParams::new(nonce, bound, (8 * TAG as u64).into())?;
            self.session.encrypt(&Mechanism::AesGcm(parameters), self.key.handle, plaintext)
        });
        match encrypted {
            Ok(Some(done)) => Ok(done),
            Ok(None) => {
                Err(internal("The token used a nonce of zeros, which must not be repeated."))
            }
            Err(error) => Err(failure::of(&error, Doing::Wrap)),
        }
    }

    fn decrypt_gcm(&self, bound: &[u8], body: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
        let (nonce, ciphertext) = body.split_first_chunk::<NONCE>().ok_or(Error::InvalidValue)?;
        let mut nonce = *nonce;
        let parameters = GcmParams::new(&mut nonce, bound, (8 * TAG as u64).into())?;
        self.session
            .decrypt(&Mechanism::AesGcm(parameters), self.key.handle, ciphertext)
            .map(Zeroizing::new)
    }

    /// Wraps a one-time key.
    fn wrap_once(&self, method: Method, once: &[u8; 32]) -> Result<Vec<u8>, Failure> {
        let failed = |error: &Error| failure::of(error, Doing::Wrap);
        let mechanism = mechanism(method);
        if self.key.kind == Kind::Rsa {
            let public = public_key(self.session, self.key, self.name)?;
            return self.session.encrypt(&mechanism, public, once).map_err(|e| failed(&e));
        }
        if calls(self.token, self.key, method) == Some(Calls::Encrypt) {
            return self.session.encrypt(&mechanism, self.key.handle, once).map_err(|e| failed(&e));
        }
        let mut template = one_time_template();
        template.push(Attribute::Value(once.to_vec()));
        let object = self.session.create_object(&template);
        if let Some(Attribute::Value(copy)) = template.last_mut() {
            zeroize::Zeroize::zeroize(copy);
        }
        let object = object.map_err(|error| failed(&error))?;
        let wrapped = self.session.wrap_key(&mechanism, self.key.handle, object);
        // A session object: it ends with the session if this fails.
        let _ = self.session.destroy_object(object);
        wrapped.map_err(|error| failed(&error))
    }

    /// Unwraps a one-time key.
    fn unwrap_once(&self, method: Method, wrapped: &[u8]) -> Result<Zeroizing<Vec<u8>>, Error> {
        let mechanism = mechanism(method);
        let by_objects = self.key.kind == Kind::Aes
            && calls(self.token, self.key, method) != Some(Calls::Encrypt)
            && self.key.may(AttributeType::Unwrap);
        if !by_objects {
            let plaintext = self.session.decrypt(&mechanism, self.key.handle, wrapped);
            return plaintext.map(Zeroizing::new);
        }
        let template = one_time_template();
        let object = self.session.unwrap_key(&mechanism, self.key.handle, wrapped, &template)?;
        let value = self.session.get_attributes(object, &[AttributeType::Value]);
        let _ = self.session.destroy_object(object);
        match value?.pop() {
            Some(Attribute::Value(value)) => Ok(Zeroizing::new(value)),
            _ => Err(Error::Pkcs11(
                RvError::AttributeSensitive,
                cryptoki::context::Function::GetAttributeValue,
            )),
        }
    }
}

/// A nonce, and what was encrypted with it.
type Encrypted = ([u8; NONCE], Vec<u8>);

/// Encrypts with a random nonce. Tokens in FIPS mode that make the nonce themselves
/// (NIST SP 800-38D section 8.2) overwrite it; some of them accept only a nonce of zeros. `None` if
/// such a token did not overwrite it: a second wrapping would have the same nonce.
fn with_nonce(
    random: [u8; NONCE],
    mut encrypt: impl FnMut(&mut [u8]) -> Result<Vec<u8>, Error>,
) -> Result<Option<Encrypted>, Error> {
    let mut nonce = random;
    let refused = match encrypt(&mut nonce) {
        Ok(ciphertext) => return Ok(Some((nonce, ciphertext))),
        Err(error) => error,
    };
    let is_refusal = matches!(
        &refused,
        Error::Pkcs11(RvError::MechanismParamInvalid | RvError::ArgumentsBad, _)
    );
    if !is_refusal {
        return Err(refused);
    }
    let mut nonce = [0; NONCE];
    let ciphertext = encrypt(&mut nonce)?;
    Ok((nonce != [0; NONCE]).then_some((nonce, ciphertext)))
}

fn mechanism(method: Method) -> Mechanism<'static> {
    match method {
        Method::Oaep => Mechanism::RsaPkcsOaep(PkcsOaepParams::new(
            MechanismType::SHA256,
            PkcsMgfType::MGF1_SHA256,
            PkcsOaepSource::empty(),
        )),
        Method::Kwp => Mechanism::AesKeyWrapPad,
        // AES-GCM has parameters of its own.
        Method::Kw | Method::Gcm => Mechanism::AesKeyWrap,
    }
}

/// Attributes of a one-time key: it exists in this session only, and can be read.
fn one_time_template() -> Vec<Attribute> {
    vec![
        Attribute::Class(ObjectClass::SECRET_KEY),
        Attribute::KeyType(KeyType::GENERIC_SECRET),
        Attribute::Token(false),
        Attribute::Sensitive(false),
        Attribute::Extractable(true),
    ]
}

fn foreign() -> Failure {
    refused(
        "It was wrapped by another key of the same name, under another name or for another database, or it is damaged.",
    )
}

/// The failure for a wrapped key that cannot be unwrapped.
pub(super) fn refused(cause: &str) -> Failure {
    Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be unwrapped")
        .with_detail(cause)
        .with_hint("Use the token and the master key that wrapped it.")
}

fn outage(error: &Error) -> Failure {
    let failure = failure::of(error, Doing::Unwrap);
    Failure { class: ErrorClass::Unreachable, retry: true, ..failure }
}

fn internal(cause: &str) -> Failure {
    Failure::new(ErrorClass::Internal, "could not wrap the key")
        .with_detail(cause)
        .with_hint("Report this, with the name and version of the token's module.")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryptoki::context::Function;

    const RANDOM: [u8; NONCE] = [7; NONCE];

    fn refusal() -> Error {
        Error::Pkcs11(RvError::MechanismParamInvalid, Function::EncryptInit)
    }

    #[test]
    fn the_nonce_that_the_token_used_is_stored() {
        let plain = with_nonce(RANDOM, |_| Ok(vec![1])).unwrap();
        assert_eq!(plain, Some((RANDOM, vec![1])));
        let own = with_nonce(RANDOM, |nonce| {
            nonce.fill(9);
            Ok(vec![1])
        });
        assert_eq!(own.unwrap(), Some(([9; NONCE], vec![1])));
    }

    #[test]
    fn a_token_that_wants_zeros_must_replace_them() {
        let mut replaces = true;
        let encrypt = |nonce: &mut [u8], replaces: bool| {
            if nonce != [0; NONCE] {
                return Err(refusal());
            }
            if replaces {
                nonce.fill(9);
            }
            Ok(vec![1])
        };
        let done = with_nonce(RANDOM, |nonce| encrypt(nonce, replaces)).unwrap();
        assert_eq!(done, Some(([9; NONCE], vec![1])));
        replaces = false;
        assert_eq!(with_nonce(RANDOM, |nonce| encrypt(nonce, replaces)).unwrap(), None);
    }

    #[test]
    fn other_errors_are_not_tried_again() {
        let mut attempts = 0;
        let failed = with_nonce(RANDOM, |_| {
            attempts += 1;
            Err(Error::Pkcs11(RvError::DeviceError, Function::Encrypt))
        });
        assert!(failed.is_err() && attempts == 1);
    }
}
