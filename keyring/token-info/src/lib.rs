//! Reads the description of a PKCS#11 token (`C_GetTokenInfo`, PKCS#11 3.0 section 5.5.4).
//!
//! The crate `cryptoki` does that, too, but fails if a token's clock is not written as the standard
//! says, as that of opencryptoki, which writes `12:34:56`. The clock is not needed, and the label
//! is. This is the only unsafe code of the key provider helper.

use std::path::Path;

use cryptoki_sys::{CK_FUNCTION_LIST, CK_TOKEN_INFO, CKR_OK, Pkcs11};

/// The description of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenInfo {
    /// Label, without padding.
    pub label: String,
    /// Model, without padding.
    pub model: String,
    /// Serial number, without padding.
    pub serial: String,
    /// Flags (`CKF_...`).
    pub flags: u64,
}

/// Why a token cannot be described.
#[derive(Debug, PartialEq, Eq)]
pub enum NoInfo {
    /// The module cannot be loaded, or lacks a function.
    Module(String),
    /// The return value of the module (`CKR_...`).
    Value(u64),
}

/// Describes the token in `slot` of the module at `module`, which this process must have loaded and
/// initialized before: this is only another reference to it.
///
/// # Errors
/// [`NoInfo`].
pub fn token_info(module: &Path, slot: u64) -> Result<TokenInfo, NoInfo> {
    let missing = |what: &str| NoInfo::Module(format!("the module has no {what}"));
    // SAFETY: the caller has loaded the module already, so no initializer runs. That it is a module
    // of PKCS#11 whose functions have the types of the standard, and whose list of functions stays
    // valid while it is loaded, is what everybody who uses a module relies on. All pointers are
    // checked, and those that are passed are valid during the call.
    unsafe {
        let module = Pkcs11::new(module).map_err(|error| NoInfo::Module(error.to_string()))?;
        if module.C_GetFunctionList.is_err() {
            return Err(missing("C_GetFunctionList"));
        }
        let mut list: *mut CK_FUNCTION_LIST = std::ptr::null_mut();
        let value = module.C_GetFunctionList(&mut list);
        if value != CKR_OK {
            return Err(NoInfo::Value(value));
        }
        let get = list.as_ref().and_then(|list| list.C_GetTokenInfo);
        let get = get.ok_or_else(|| missing("C_GetTokenInfo"))?;
        let mut info = CK_TOKEN_INFO::default();
        match get(slot, &mut info) {
            CKR_OK => Ok(TokenInfo {
                label: text(&info.label),
                model: text(&info.model),
                serial: text(&info.serialNumber),
                flags: info.flags,
            }),
            value => Err(NoInfo::Value(value)),
        }
    }
}

/// A text padded with spaces, or with zeros, as some tokens do.
fn text(padded: &[u8]) -> String {
    String::from_utf8_lossy(padded).trim_end_matches(['\0', ' ']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_removed() {
        assert_eq!(text(b"a token       "), "a token");
        assert_eq!(text(b"SW   TPM\0\0\0\0"), "SW   TPM");
        assert_eq!(text(&[b' '; 32]), "");
        assert_eq!(text(b"a\xff"), "a\u{fffd}");
    }

    #[test]
    fn what_is_no_module_is_refused() {
        let missing = token_info(Path::new("/nowhere/module.so"), 0);
        assert!(matches!(missing, Err(NoInfo::Module(_))));
    }
}
