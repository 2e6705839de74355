//! Servers started by `pg_upgrade` (`postgres -b`): it transfers relation files unchanged, so their
//! keys must have been transferred before.

use std::path::Path;

use pagevault_keystore::upgrade::{Ticket, VARIABLE};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::ForkNumber;

use crate::pg::compat;
use crate::pg::report::{Report, Result};
use crate::shmem::Shared;
use crate::verify;

/// Refuses an upgrade that would leave keys behind. In the postmaster, before anything else.
pub(crate) fn check(shared: &Shared) -> Result<()> {
    let own = shared.control.keystore_id();
    let Some(text) = std::env::var_os(VARIABLE) else { return refuse_sealed_files(shared) };
    match (text.to_str().and_then(Ticket::decode), own) {
        (None, _) => Err(refused(format!("environment variable {VARIABLE} has an unknown value"))),
        (Some(ticket), Some(own)) if ticket.keystore == own => Ok(()),
        (Some(ticket), None) if ticket.only_check => Ok(()),
        (Some(_), Some(_)) => Err(refused(
            "the cluster has a keystore that is not the one of the cluster to be upgraded".into(),
        )),
        (Some(_), None) => {
            Err(refused("the keystore of the cluster to be upgraded is not here".into()))
        }
    }
}

fn refused(message: String) -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, message)
        .detail("pg_upgrade would bring relation files without their keys. Nothing was changed.")
        .hint("Create the new cluster again with initdb, and run: pagevault-keyring exec -- pg_upgrade ...")
}

fn refuse_sealed_files(shared: &Shared) -> Result<()> {
    let mut sealed = 0_u64;
    for known in shared.directory.files()? {
        let file = known?.file;
        let exists = || Path::new(&compat::relation_path(file, ForkNumber::MAIN_FORKNUM)).exists();
        sealed += u64::from(exists() && verify::may_be_sealed(file)?);
    }
    if sealed == 0 {
        return Ok(());
    }
    Err(Report::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        "pg_upgrade alone would leave the keys of encrypted relations behind",
    )
    .detail(format!("The cluster has {sealed} encrypted relation files. Nothing was changed."))
    .hint("Run it through pagevault-keyring, which transfers the keys: pagevault-keyring exec -- pg_upgrade ..."))
}
