//! A row for each subject, and their kinds of services. Those of Google and Azure are beside their
//! own tests.

mod aws_kms;
mod command;
mod file;
mod kmip;
mod pkcs11;
mod vault;

use anyhow::Result;
use pagevault_tests::key_servers::gcp::Gcp;
use serde_json::Value;

use super::{Group, Point, Subject, tests_of};
use crate::Test;
use crate::azure_key_vault::{ManagedHsm, RsaVault};

/// A subject without its type.
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) lacks: &'static [(Point, &'static str)],
    pub(super) tests: fn() -> Vec<Test>,
    pub(super) home: fn() -> Result<Home>,
}

/// A place for the keys of a server.
pub(super) struct Home {
    pub(super) name: &'static str,
    pub(super) kind: String,
    pub(super) options: Value,
    pub(super) key: String,
    /// The service, which ends with this.
    _service: Box<dyn Send>,
}

/// All subjects.
pub(super) fn all() -> [Row; 11] {
    [
        row::<file::OfFile>(),
        row::<command::OfProgram>(),
        row::<vault::OfVault>(),
        row::<aws_kms::OfAws>(),
        row::<Gcp>(),
        row::<RsaVault>(),
        row::<ManagedHsm>(),
        row::<pkcs11::Gcm>(),
        row::<pkcs11::KeyWrap>(),
        row::<kmip::Gcm>(),
        row::<kmip::Cbc>(),
    ]
}

fn row<S: Subject>() -> Row {
    Row { name: S::NAME, lacks: S::LACKS, tests: tests_of::<S>, home: home::<S> }
}

fn home<S: Subject>() -> Result<Home> {
    let subject = S::start(Group::Moved)?;
    let provider = subject.provider();
    Ok(Home {
        name: S::NAME,
        kind: provider.kind,
        options: provider.options,
        key: subject.key(),
        _service: Box::new(subject),
    })
}
