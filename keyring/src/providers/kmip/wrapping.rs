//! Wrapping and unwrapping: the server wraps a one-time key, and a key derived from that wraps the
//! secret.

use pagevault_cipher::Secret32;
use pagevault_cipher::secret::fill_random;
use pagevault_cipher::wrap::{self, OVERHEAD};
use pagevault_keystore::protocol::ErrorClass;
use zeroize::Zeroizing;

use super::failure::{NoAnswer, is_about_parameters, is_ambiguous};
use super::format::{Method, ONCE, Parts, associated_data, derived, head, start};
use super::keys::{Decision, Key, decide, undecided};
use super::names::Operation;
use super::operations::{self, Call, Cipher, TAG};
use super::session::Session;
use super::ttlv::Malformed;
use crate::failure::Failure;

/// What a server may be asked to do, the best first: the method, and whether pagevault chooses the
/// initialization vector. Servers in FIPS mode may insist on their own.
const WAYS: [(Method, bool); 4] =
    [(Method::Gcm, true), (Method::Gcm, false), (Method::Cbc, true), (Method::Cbc, false)];

/// A one-time key that the server has wrapped.
struct Wrapped {
    method: Method,
    iv: Vec<u8>,
    once: Vec<u8>,
}

/// A master key with its server.
pub(super) struct Use<'a> {
    pub(super) session: &'a Session,
    /// The master key's name.
    pub(super) name: &'a str,
}

impl Use<'_> {
    /// Wraps `plaintext` with a version of the master key, bound to `context` and the name.
    pub(super) fn wrap(
        &self,
        key: &Key,
        context: &str,
        plaintext: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let secret = Secret32::random().map_err(|error| internal(&format!("{error}.")))?;
        let bound = |method| {
            let start = start(key.version, method, &key.id)?;
            Some(associated_data(&start, self.name, context))
        };
        let Wrapped { method, iv, once } =
            self.wrap_once(&key.id, &bound, &secret).map_err(|error| {
                undecided(self.session, error, Operation::Encrypt, self.name, &key.id)
            })?;
        let too_long = || internal("The key server returned too much.");
        let start = start(key.version, method, &key.id).ok_or_else(too_long)?;
        let mut wrapped = head(start, &iv, &once).ok_or_else(too_long)?;
        let bound = associated_data(&wrapped, self.name, context);
        let start = wrapped.len();
        wrapped.resize(start + plaintext.len() + OVERHEAD, 0);
        wrap::wrap(&derived(secret.expose()), &bound, plaintext, &mut wrapped[start..])
            .map_err(|error| internal(&format!("{error}.")))?;
        Ok(wrapped)
    }

    /// Unwraps with the key that wrapped it.
    ///
    /// # Errors
    /// `wrong_ciphertext` if it is damaged, or was wrapped by another key, under another name or in
    /// another context.
    pub(super) fn unwrap(
        &self,
        context: &str,
        parts: &Parts<'_>,
    ) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let once = self.surely(context, parts)?;
        let Ok(once) = <&[u8; ONCE]>::try_from(once.as_slice()) else { return Err(foreign()) };
        let bound = associated_data(parts.head, self.name, context);
        let mut plaintext = Zeroizing::new(vec![0; parts.body.len().saturating_sub(OVERHEAD)]);
        wrap::unwrap(&derived(once), &bound, parts.body, &mut plaintext).map_err(|_| foreign())?;
        Ok(plaintext)
    }

    /// Has the server unwrap the one-time key, and finds out what a refusal means. KMIP has no
    /// reason for a wrong ciphertext. So the key is tried with something that it wraps now: if that
    /// works, and unwrapping fails once more, the fault is in what was to be unwrapped.
    fn surely(&self, context: &str, parts: &Parts<'_>) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let bound = associated_data(parts.start, self.name, context);
        let unwrap = || self.unwrap_once(parts.id, parts.method, &bound, parts.iv, parts.once);
        let error = match unwrap() {
            Ok(once) => return Ok(once),
            Err(error) => error,
        };
        let failed =
            |error| undecided(self.session, error, Operation::Decrypt, self.name, parts.id);
        let error = match decide(self.session, error, self.name, parts.id) {
            Decision::Final(failure) => return Err(failure),
            Decision::Unclear(error) => error,
        };
        let unclear = |error: &NoAnswer| error.reason().is_some_and(is_ambiguous);
        if !unclear(&error) || !self.works(parts.id, parts.method) {
            return Err(failed(error));
        }
        unwrap().map_err(|error| if unclear(&error) { foreign() } else { failed(error) })
    }

    /// Whether the key unwraps what it wraps.
    fn works(&self, id: &str, method: Method) -> bool {
        let Ok(secret) = Secret32::random() else { return false };
        let bound = |chosen| (chosen == method).then(|| b"test".to_vec());
        let Ok(wrapped) = self.wrap_once(id, &bound, &secret) else { return false };
        self.unwrap_once(id, method, b"test", &wrapped.iv, &wrapped.once)
            .is_ok_and(|once| secret.matches(&once))
    }

    /// Has the server wrap a one-time key in the first way that it supports. `bound` is what it is
    /// to authenticate with a method, or that a method is not wanted.
    fn wrap_once(
        &self,
        id: &str,
        bound: &dyn Fn(Method) -> Option<Vec<u8>>,
        secret: &Secret32,
    ) -> Result<Wrapped, NoAnswer> {
        let mut refused = None;
        for (method, chosen) in WAYS {
            let Some(bound) = bound(method) else { continue };
            let mut iv = vec![0; if chosen { method.iv_length() } else { 0 }];
            fill_random(&mut iv).map_err(|error| internal(&format!("{error}.")))?;
            let gcm = (method == Method::Gcm).then_some(bound.as_slice());
            let cipher = Cipher { gcm, iv: chosen.then_some(&iv) };
            let call = Call::Encrypt { id, cipher, data: secret.expose() };
            let encrypted =
                self.session.try_ask(&call, |payload, _| operations::encrypted(payload, id));
            let encrypted = match encrypted {
                Ok(encrypted) => encrypted,
                Err(error) if error.reason().is_some_and(is_about_parameters) => {
                    refused.get_or_insert(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let iv = encrypted.iv.unwrap_or(iv);
            let mut once = encrypted.data;
            once.extend_from_slice(encrypted.tag.as_deref().unwrap_or_default());
            if once.len() == method.length() && !iv.is_empty() {
                return Ok(Wrapped { method, iv, once });
            }
        }
        const UNUSABLE: Malformed =
            Malformed("a ciphertext, an initialization vector or a tag has another length");
        Err(refused.unwrap_or(NoAnswer::Foreign(UNUSABLE)))
    }

    fn unwrap_once(
        &self,
        id: &str,
        method: Method,
        bound: &[u8],
        iv: &[u8],
        once: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, NoAnswer> {
        let split = if method == Method::Gcm { once.len().saturating_sub(TAG) } else { once.len() };
        let (data, tag) = once.split_at(split);
        let gcm = (method == Method::Gcm).then_some(bound);
        let call = Call::Decrypt { id, cipher: Cipher { gcm, iv: Some(iv) }, data, tag };
        self.session.try_ask(&call, |payload, _| operations::decrypted(payload, id))
    }
}

fn foreign() -> Failure {
    refused(
        "It was wrapped by another key, under another name or for another database, or it is damaged.",
    )
}

/// The failure for a wrapped key that cannot be unwrapped.
pub(super) fn refused(cause: &str) -> Failure {
    Failure::new(ErrorClass::WrongCiphertext, "wrapped key cannot be unwrapped")
        .with_detail(cause)
        .with_hint("Use the key server and the master key that wrapped it.")
}

fn internal(cause: &str) -> Failure {
    Failure::new(ErrorClass::Internal, "could not wrap the key")
        .with_detail(cause)
        .with_hint("Report this, with the name and version of the key server.")
}
