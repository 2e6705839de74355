//! Master keys, outside the server process.
//!
//! `pagevault-keyring serve` reads one request, has each of its operations done by the provider it
//! names, and writes one reply ([`pagevault_keystore::protocol`]). The server starts it as it
//! starts `archive_command`: no network code, no thread and no credential lives in a backend.
//!
//! | module | subject |
//! |---|---|
//! | [`provider`] | what every provider can do |
//! | [`providers`] | one file per provider, and the registry that maps a kind to its constructor |
//! | [`options`] | reading a provider's options; unknown names are refused |
//! | `net` | TLS, deadlines and causes of failure for the providers that use the network |
//! | [`mod@retry`] | trying again under a deadline, written once for all providers |
//! | [`mod@serve`] | one request, one reply, a deadline that holds even if a provider hangs |
//! | `program` | running a program of the operator's, and leaving nothing of it behind |
//! | [`failure`] | why something was not done |
//! | [`findings`] | what was found on looking at a provider |
//! | [`mod@check`] | trying out a provider and a key, in plain words |
//! | [`keyfile`] | the key file of the `file` provider |
//! | [`trust`] | whose files must be that are named somewhere, and who else may read and write them |
//! | [`access`] | what is believed of key files that are read without their server |
//! | `regular` | opening files that anybody may have put there |
//! | [`offline`] | the keystore of a data directory, without its server |
//! | [`escrow`] | database keys under an operator's public key, for the day the provider is lost |
//! | [`mod@audit`] | whether lines of the audit trail were forged or taken away |
//! | `bindir` | where PostgreSQL's own programs are |
//! | [`mod@exec`] | PostgreSQL's own programs, with the keys of WAL |
//! | [`mod@inspect`] | what files say of themselves, without keys |
//! | [`mod@take_back`] | taking back what a start has cut off key files |
//! | [`mod@verify`] | opening everything that a data directory holds |
//! | [`mod@harden`] | no core dumps, no readable files, no secrets in panic messages |
//! | [`cli`] | the command line |

#![forbid(unsafe_code)]

pub mod access;
pub mod audit;
mod bindir;
pub mod check;
pub mod cli;
pub mod escrow;
pub mod exec;
pub mod failure;
pub mod findings;
pub mod harden;
pub mod inspect;
pub mod keyfile;
mod net;
pub mod offline;
pub mod options;
mod program;
pub mod provider;
pub mod providers;
mod regular;
pub mod retry;
pub mod serve;
pub mod take_back;
pub mod trust;
pub mod verify;
mod wire;
