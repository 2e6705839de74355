//! The cause of a failed connection, found in a chain of errors.
//!
//! HTTP clients wrap errors many times. Only the kinds of errors below are repeated in messages:
//! others may contain parts of requests.

use crate::failure::Failure;
use std::error::Error;
use std::io;

use pagevault_keystore::protocol::ErrorClass;

/// The innermost error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cause {
    /// `tls`, `deadline`, `unreachable`.
    pub(crate) class: ErrorClass,
    /// A complete sentence.
    pub(crate) detail: String,
    /// Whether a retry may help.
    pub(crate) retry: bool,
}

impl Cause {
    /// There was no reply in time.
    pub(crate) fn too_late() -> Cause {
        let detail = "There was no reply before the time limit.".to_owned();
        Cause { class: ErrorClass::Deadline, detail, retry: true }
    }

    /// The failure to reach `server`, an address.
    pub(crate) fn about(self, server: &str) -> Failure {
        let (message, hint) = match self.class {
            ErrorClass::Tls => (
                format!("could not establish a trusted connection to {server}"),
                "Check the address, the server's certificate and the option \"ca_file\".",
            ),
            ErrorClass::Deadline => (
                format!("{server} did not answer in time"),
                "The provider is slow or does not respond. Try again, or raise pagevault.keyring_timeout.",
            ),
            _ => (
                format!("could not reach {server}"),
                "Check that the provider runs, its address, name resolution and firewalls.",
            ),
        };
        let error = Failure::new(self.class, message).with_detail(self.detail).with_hint(hint);
        if self.retry { error.transient() } else { error }
    }
}

/// Searches an error and its sources for the cause.
pub(crate) fn cause_of(error: &(dyn Error + 'static)) -> Cause {
    let mut next = Some(error);
    let mut found = None;
    while let Some(error) = next {
        next = error.source();
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return refused(error);
        }
        if error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_timeout) {
            return Cause::too_late();
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            found = Some(broken(error));
            // The error inside an io::Error is not its source; `source()` returns the source of the
            // inner one.
            if let Some(inner) = error.get_ref() {
                next = Some(inner);
            }
        }
    }
    found.unwrap_or_else(|| Cause {
        class: ErrorClass::Unreachable,
        detail: "The connection failed.".to_owned(),
        retry: true,
    })
}

fn refused(error: &rustls::Error) -> Cause {
    Cause { class: ErrorClass::Tls, detail: format!("TLS: {error}."), retry: false }
}

fn broken(error: &io::Error) -> Cause {
    let class = match error.kind() {
        io::ErrorKind::TimedOut => ErrorClass::Deadline,
        _ => ErrorClass::Unreachable,
    };
    Cause { class, detail: format!("{}.", upper_first(&error.to_string())), retry: true }
}

fn upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Wrapper(Box<dyn Error + 'static>);

    impl std::fmt::Display for Wrapper {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("secret request")
        }
    }

    impl Error for Wrapper {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(self.0.as_ref())
        }
    }

    #[test]
    fn the_cause_is_found_below_wrappers_which_are_not_repeated() {
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        let cause = cause_of(&Wrapper(Box::new(Wrapper(Box::new(refused)))));
        assert_eq!((cause.class, cause.retry), (ErrorClass::Unreachable, true));
        assert_eq!(cause.detail, "Connection refused.");

        let untrusted = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        for error in [
            Wrapper(Box::new(untrusted.clone())),
            Wrapper(Box::new(io::Error::new(io::ErrorKind::InvalidData, untrusted.clone()))),
            Wrapper(Box::new(io::Error::other(io::Error::other(untrusted)))),
        ] {
            let cause = cause_of(&error);
            assert_eq!((cause.class, cause.retry), (ErrorClass::Tls, false));
            assert!(cause.detail.contains("UnknownIssuer"), "{}", cause.detail);
        }
        let nothing = Wrapper(Box::new(std::fmt::Error));
        assert!(!cause_of(&nothing).detail.contains("secret"));
    }
}
