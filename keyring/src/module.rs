//! What a build with a validated cryptographic module does otherwise (docs/fips.md).

use std::sync::OnceLock;

use pagevault_cipher::module;
use pagevault_keystore::protocol::ErrorClass;

use crate::failure::{Failure, refuse};

/// The version of this program, and of its validated module.
pub(crate) fn version() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    let of_program = env!("CARGO_PKG_VERSION");
    match module() {
        None => of_program,
        Some(module) => TEXT.get_or_init(|| {
            let mode = if module.is_in_fips_mode { "in FIPS mode" } else { "not in FIPS mode" };
            let (name, certificate) = (module.name, module.certificate);
            format!("{of_program}, {name} {mode}, certificate {certificate}")
        }),
    }
}

/// Refuses to run a program that has a validated module, but not for TLS: it was not built from
/// keyring/validated.
pub(crate) fn require_validated_tls() -> Result<(), Failure> {
    #[cfg(feature = "network")]
    if module().is_some() && !crate::net::tls::is_validated() {
        return Err(refuse(
            "this pagevault-keyring has a validated cryptographic module, but not for TLS",
        )
        .with_hint("Build it from keyring/validated."));
    }
    Ok(())
}

/// Refuses work for a server that requires a validated module (`pagevault.require_fips`).
pub(crate) fn require_module() -> Result<(), Failure> {
    if module().is_some_and(|module| module.is_in_fips_mode) {
        return Ok(());
    }
    let message = "this pagevault-keyring has no validated cryptographic module";
    Err(Failure::new(ErrorClass::BadRequest, message)
        .with_detail("The server requires one (pagevault.require_fips).")
        .with_hint(
            "Install the package of pagevault for FIPS, and check pagevault.keyring_command.",
        ))
}

/// Refuses bundles: they are age files, whose algorithms (X25519, ChaCha20-Poly1305) no validated
/// module has.
pub(crate) fn refuse_bundles() -> Result<(), Failure> {
    if module().is_none() {
        return Ok(());
    }
    Err(refuse("this pagevault-keyring neither writes nor reads escrow bundles")
        .with_detail("Bundles are age files, and the validated cryptographic module of this build has neither X25519 nor ChaCha20-Poly1305.")
        .with_hint("Have the database keys wrapped by master keys of two providers instead (pagevault.add_cluster_master_key()). A bundle that exists can be restored by the pagevault-keyring of the ordinary package, on another machine."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_names_the_module() {
        assert_eq!(version().contains(", certificate "), module().is_some());
        assert!(version().starts_with(env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn each_build_does_what_it_can() {
        assert_eq!(require_module().is_ok(), module().is_some());
        assert_eq!(refuse_bundles().is_ok(), module().is_none());
    }
}
