//! Master keys, outside the server process.
//!
//! `pagevault-keyring serve` reads one request, has the providers perform its operations, and
//! writes one reply ([`pagevault_keystore::protocol`]). The server starts it like
//! `archive_command`, so backends contain no network code, no threads and no credentials.
//!
//! | module | subject |
//! |---|---|
//! | [`provider`] | the interface of all providers |
//! | [`providers`] | one module per provider, and the table of kinds and constructors |
//! | [`store`] | the interface of all stores of notes |
//! | `stores` | one module per store of notes, and reading the file that describes one |
//! | [`options`] | reading a provider's options; unknown names are refused |
//! | `aws` | credentials of AWS, for its KMS and for logging in to Vault |
//! | [`envelope`] | one-time keys that wrap here, for providers that cannot bind |
//! | `rest` | JSON over HTTPS and access tokens, for Google Cloud KMS, Azure and logins of AWS |
//! | `net` | TLS, deadlines and causes of failures, for providers that use the network |
//! | [`mod@retry`] | repeating failed operations until the deadline, for all providers |
//! | [`mod@serve`] | one request, one reply, within the deadline even if providers hang |
//! | `program` | running a program of the operator, and ending all its processes |
//! | [`failure`] | errors |
//! | [`findings`] | results of examining a provider |
//! | [`mod@check`] | testing a provider and a key |
//! | [`keyfile`] | the key file of the `file` provider |
//! | [`trust`] | required owners and permissions of files that are named in options |
//! | [`access`] | which key files are trusted by commands without a server |
//! | `clock` | the time |
//! | `regular` | opening files that anybody may have put there |
//! | `tablespaces` | where the files of tablespaces are |
//! | [`offline`] | the keystore of a data directory, without its server |
//! | [`escrow`] | database keys encrypted for public keys of the operator |
//! | [`mod@audit`] | verifying the audit trail |
//! | `server` | what a running server tells, through `psql` |
//! | `doctor` | what is missing, risky or forgotten in a running server |
//! | `report` | reports about a running server: a document, and a page made of it |
//! | `init` | the steps until a server encrypts |
//! | `bindir` | finding PostgreSQL's own programs |
//! | [`mod@exec`] | running PostgreSQL's own programs with the WAL keys |
//! | [`mod@inspect`] | what can be read from files without keys |
//! | [`mod@accept_restore`] | telling the anchor which data directory is the cluster |
//! | [`mod@give_up_key_group`] | destroying a key group whose key recovery needs, and cannot get |
//! | [`mod@restore_unsettled`] | restoring records that a failed start cut off from key files |
//! | `visible` | text that anybody may have written, for terminals |
//! | [`mod@verify`] | decrypting all pages and WAL records of a data directory |
//! | [`mod@harden`] | no core dumps, no readable files, no secrets in panic messages |
//! | [`cli`] | the command line |

#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "default"),
    allow(
        dead_code,
        unused_imports,
        reason = "some parts are used by providers that are not built in"
    )
)]

pub mod accept_restore;
pub mod access;
pub mod audit;
#[cfg(feature = "aws_kms")]
mod aws;
mod bindir;
pub mod check;
pub mod cli;
mod clock;
mod doctor;
pub mod envelope;
pub mod escrow;
pub mod exec;
pub mod failure;
pub mod findings;
pub mod give_up_key_group;
pub mod harden;
mod init;
pub mod inspect;
pub mod keyfile;
mod module;
#[cfg(feature = "network")]
mod net;
#[cfg(feature = "network")]
pub use net::tls;
pub mod offline;
pub mod options;
mod program;
pub mod provider;
pub mod providers;
mod quoting;
mod regular;
mod report;
#[cfg(feature = "rest")]
mod rest;
pub mod restore_unsettled;
pub mod retry;
pub mod serve;
mod server;
pub mod store;
mod stores;
mod tablespaces;
pub mod trust;
pub mod verify;
mod visible;
mod wire;
