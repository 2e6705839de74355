//! The meaning of return values (`CKR_...`, PKCS#11 3.0 section 5.1).
//!
//! Few of them say something about a key, and few tokens return them as the standard says. So only
//! those of a closed list count as a refusal, or as the loss of a key. Everything else is an
//! outage, during which unlocked keys stay unlocked. A refused PIN is never tried again by itself:
//! tokens lock after a few wrong ones.

use cryptoki::error::{Error, RvError};
use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;

/// What was being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doing {
    /// Initializing the module.
    Initialize,
    /// Looking for the token.
    FindToken,
    /// Opening a session.
    OpenSession,
    /// Presenting the PIN.
    Login,
    /// Looking for a key and reading its attributes.
    FindKey,
    /// Wrapping.
    Wrap,
    /// Unwrapping.
    Unwrap,
    /// Making a new key.
    Generate,
}

impl Doing {
    fn name(self) -> &'static str {
        match self {
            Doing::Initialize => "could not initialize the module",
            Doing::FindToken => "could not look for the token",
            Doing::OpenSession => "could not open a session with the token",
            Doing::Login => "could not log in to the token",
            Doing::FindKey => "could not look for the key in the token",
            Doing::Wrap => "token could not wrap",
            Doing::Unwrap => "token could not unwrap",
            Doing::Generate => "token could not make a new version of the key",
        }
    }
}

/// Class, whether another attempt may help, and advice.
type Meaning = (ErrorClass, bool, &'static str);

const CHECK_PIN: &str = "Check the PIN where the options say that it is. pagevault does not try it again by itself in this request, and never uses the last attempt. Many tokens lock after a few wrong PINs.";
const AWAY: &str = "Check that the token is connected and works, for example with: pkcs11-tool --module MODULE --list-slots";
const UNSUPPORTED: &str =
    "The token does not support what pagevault needs. See docs/pkcs11.md, \"Mechanisms\".";
const NOT_ALLOWED: &str =
    "Give the key, or the token's user, the right to do this; see docs/pkcs11.md.";

fn meaning(value: RvError, doing: Doing) -> Meaning {
    use ErrorClass::{
        BadOptions, Denied, Throttled, Unauthenticated, Unreachable, WrongCiphertext,
    };
    match value {
        RvError::PinIncorrect | RvError::PinInvalid | RvError::PinLenRange => {
            (Unauthenticated, false, CHECK_PIN)
        }
        RvError::PinExpired => {
            (Unauthenticated, false, "Set a new PIN with the tools of the token's vendor.")
        }
        RvError::PinLocked => (
            Unauthenticated,
            false,
            "Correct the PIN where the options say that it is, then have the security officer unlock the token's user PIN.",
        ),
        RvError::UserPinNotInitialized => (
            Unauthenticated,
            false,
            "Have the security officer set the user PIN: pkcs11-tool --module MODULE --login --login-type so --init-pin",
        ),
        RvError::UserNotLoggedIn if doing != Doing::Login => (
            Unauthenticated,
            false,
            "The key requires a login. Specify the option \"pin_file\" or \"pin_command\"; keys that require the PIN for each use (CKA_ALWAYS_AUTHENTICATE) are not supported.",
        ),
        RvError::SessionCount => {
            (Throttled, true, "Close sessions of other programs, or raise the token's limit.")
        }
        RvError::KeyFunctionNotPermitted
        | RvError::ActionProhibited
        | RvError::FunctionRejected => (Denied, false, NOT_ALLOWED),
        RvError::TokenWriteProtected | RvError::SessionReadOnly if doing == Doing::Generate => {
            (Denied, false, NOT_ALLOWED)
        }
        RvError::TemplateInconsistent
        | RvError::TemplateIncomplete
        | RvError::AttributeValueInvalid
        | RvError::AttributeTypeInvalid
        | RvError::AttributeReadOnly
        | RvError::UserNotLoggedIn
            if doing == Doing::Generate =>
        {
            (
                Denied,
                false,
                "Make the new version with the tools of the token's vendor; see docs/pkcs11.md, \"Rotation\".",
            )
        }
        RvError::MechanismInvalid
        | RvError::MechanismParamInvalid
        | RvError::FunctionNotSupported => (BadOptions, false, UNSUPPORTED),
        RvError::EncryptedDataInvalid
        | RvError::EncryptedDataLenRange
        | RvError::WrappedKeyInvalid
        | RvError::WrappedKeyLenRange
            if doing == Doing::Unwrap =>
        {
            (WrongCiphertext, false, "Use the master key that wrapped it.")
        }
        _ => (Unreachable, true, AWAY),
    }
}

/// The failure for an error of a module.
pub(super) fn of(error: &Error, doing: Doing) -> Failure {
    let (class, retry, hint) = match error {
        Error::Pkcs11(value, _) => meaning(*value, doing),
        Error::NullFunctionPointer => (ErrorClass::BadOptions, false, UNSUPPORTED),
        _ => (ErrorClass::Unreachable, false, AWAY),
    };
    let detail = match error {
        Error::Pkcs11(value, function) => format!("C_{function:?} returned {}.", name(*value)),
        other => format!("{other}."),
    };
    let failure = Failure::new(class, doing.name()).with_detail(detail).with_hint(hint);
    if retry { failure.transient() } else { failure }
}

/// The name of a return value in the standard.
fn name(value: RvError) -> String {
    match value {
        RvError::VendorDefined(number) | RvError::UnknownErrorCode(number) => {
            format!("0x{number:08x}, which only the module's vendor defines")
        }
        known => {
            let mut name = "CKR".to_owned();
            for letter in format!("{known:?}").chars() {
                if letter.is_ascii_uppercase() {
                    name.push('_');
                }
                name.push(letter.to_ascii_uppercase());
            }
            name
        }
    }
}

/// Whether a token means by this, as some do, that it does not accept the ciphertext, or that it
/// has a defect.
pub(super) fn is_ambiguous(error: &Error) -> bool {
    matches!(
        error,
        Error::Pkcs11(
            RvError::GeneralError
                | RvError::FunctionFailed
                | RvError::DataInvalid
                | RvError::DataLenRange
                | RvError::ArgumentsBad
                | RvError::BufferTooSmall
                | RvError::DeviceError
                | RvError::MechanismParamInvalid
                | RvError::SignatureInvalid
                | RvError::EncryptedDataInvalid
                | RvError::EncryptedDataLenRange
                | RvError::WrappedKeyInvalid
                | RvError::WrappedKeyLenRange
                | RvError::VendorDefined(_)
                | RvError::UnknownErrorCode(_),
            _
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryptoki::context::Function;

    fn class(value: RvError, doing: Doing) -> (ErrorClass, bool) {
        let failure = of(&Error::Pkcs11(value, Function::Login), doing);
        assert!(!failure.hint().is_empty() && !failure.detail().is_empty());
        (failure.class, failure.retry)
    }

    #[test]
    fn a_refused_pin_is_never_tried_again() {
        for value in [
            RvError::PinIncorrect,
            RvError::PinInvalid,
            RvError::PinLenRange,
            RvError::PinExpired,
            RvError::PinLocked,
            RvError::UserPinNotInitialized,
        ] {
            assert_eq!(class(value, Doing::Login), (ErrorClass::Unauthenticated, false));
        }
    }

    #[test]
    fn what_says_nothing_about_the_key_is_an_outage() {
        for value in [
            RvError::GeneralError,
            RvError::FunctionFailed,
            RvError::DeviceError,
            RvError::DeviceRemoved,
            RvError::TokenNotPresent,
            RvError::SessionHandleInvalid,
            RvError::KeyHandleInvalid,
            RvError::ObjectHandleInvalid,
            RvError::VendorDefined(0x8000_0001),
            RvError::UnknownErrorCode(0x1234),
        ] {
            for doing in [Doing::Login, Doing::FindKey, Doing::Wrap, Doing::Unwrap] {
                assert_eq!(class(value, doing), (ErrorClass::Unreachable, true), "{value:?}");
            }
        }
        // Only in an answer to unwrapping does it concern what was wrapped.
        let wrap = class(RvError::EncryptedDataInvalid, Doing::Wrap);
        assert_eq!(wrap, (ErrorClass::Unreachable, true));
        let unwrap = class(RvError::EncryptedDataInvalid, Doing::Unwrap);
        assert_eq!(unwrap, (ErrorClass::WrongCiphertext, false));
    }

    #[test]
    fn names_are_those_of_the_standard() {
        assert_eq!(name(RvError::PinIncorrect), "CKR_PIN_INCORRECT");
        assert_eq!(name(RvError::SessionReadOnly), "CKR_SESSION_READ_ONLY");
        let failure =
            of(&Error::Pkcs11(RvError::VendorDefined(0x8000_0001), Function::Login), Doing::Login);
        assert!(failure.detail().contains("C_Login returned 0x80000001"), "{}", failure.detail());
    }
}
