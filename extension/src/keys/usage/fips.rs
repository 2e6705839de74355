//! Builds with a validated cryptographic module (docs/fips.md): what the server requires of it, and
//! what is refused because the module does not have it.
//!
//! In such a build no key is made for a cipher that the module does not have. Data that is under
//! one already can be read, so that it can be encrypted again, until `pagevault.require_fips` is
//! on.

use std::io;

use pagevault_cipher::{CipherId, module};
use pgrx::PgSqlErrorCode;
use pgrx::prelude::PgLogLevel;

use super::{cache, temporary};
use crate::keys::store::directory;
use crate::pg::report::{Report, Result};
use crate::pg::{guc, mapping};

/// Refuses to start a server that requires a validated module, and has none; from `_PG_init`.
pub(crate) fn require_module() -> Result<()> {
    if !guc::require_fips() {
        return Ok(());
    }
    let (detail, hint) = match module() {
        Some(module) if module.is_in_fips_mode => return Ok(()),
        Some(module) => (
            format!("{} says that it is not in FIPS mode.", module.name),
            "Install the package of pagevault for FIPS (postgresql-NN-pagevault-fips) again: this library was not built as that is.",
        ),
        None => (
            "This build of pagevault encrypts by implementations without a certificate.".to_owned(),
            "Install the package of pagevault for FIPS (postgresql-NN-pagevault-fips) in place of this one, or turn pagevault.require_fips off.",
        ),
    };
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_CONFIG_FILE_ERROR,
        "pagevault.require_fips is on, but there is no validated cryptographic module",
    )
    .detail(detail)
    .hint(hint))
}

/// Refuses to make a key that the validated module of this build could not use.
pub(super) fn require_usable_by_module(cipher: CipherId) -> Result<()> {
    if cipher.is_for_new_keys() {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_FEATURE_NOT_SUPPORTED,
        format!(
            "cannot encrypt with {cipher}: the validated cryptographic module does not have it"
        ),
    )
    .detail("This build of pagevault makes keys for aes-256-xts and aes-256-xts-hmac only.")
    .hint("Choose one of these (pagevault.cipher, or the label), or set pagevault.cipher to auto."))
}

/// Whether data under this cipher is refused.
pub(super) fn refuses(cipher: CipherId) -> bool {
    guc::require_fips() && !cipher.is_approved()
}

/// Logs a warning if there is data that is refused; when the keystore has been read.
pub(crate) fn warn_of_refused() {
    if guc::require_fips() && directory::any_of(|cipher| !cipher.is_approved()) {
        Report::new(
            PgSqlErrorCode::ERRCODE_WARNING,
            "pagevault: there are relations that pagevault.require_fips refuses",
        )
        .detail("They are, or were until they were dropped, encrypted with aes-128-xts or aes-256-xts-auth, which the validated cryptographic module does not have.")
        .hint("The view pagevault.relations names them, for each database. Start the server without pagevault.require_fips to encrypt them with another cipher.")
        .send(PgLogLevel::WARNING);
    }
}

/// The report of data that [`refuses`] means. `what` is the data, `place` a further sentence.
pub(crate) fn refused(what: &str, place: &str, cipher: CipherId) -> Report {
    Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{what} is encrypted with {cipher}, which pagevault.require_fips refuses"),
    )
    .detail(format!("The validated cryptographic module does not have this cipher.{place}"))
    .hint("Start the server without pagevault.require_fips, encrypt the data with another cipher (pagevault.encrypt(), or pagevault.rotate_data_key() where no label names one), and turn the setting on again.")
}

/// Makes room for the expanded keys of this process's caches in advance, and keeps it out of core
/// dumps: a validated module has them in memory of its own, and cannot allocate any in a critical
/// section. In the postmaster, so that all processes have it.
pub(crate) fn reserve_keys() -> io::Result<()> {
    let mut done = Ok(());
    pagevault_cipher::reserve(cache::KEYS + temporary::KEYS, |memory, length| {
        if done.is_ok() {
            done = mapping::exclude_bytes_from_core_dumps(memory, length);
        }
    });
    done
}
