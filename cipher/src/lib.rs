//! Cryptography: sealing and opening pages, wrapping and deriving keys.
//!
//! The crate is pure. It does no I/O (except reading random bytes from the operating system), reads
//! no clock, and depends neither on PostgreSQL nor on other crates of this project.
//!
//! | module | subject |
//! |---|---|
//! | [`key`] | ciphers and data keys |
//! | [`PageKey`] | data keys, expanded for use |
//! | [`version`] | versions of keys |
//! | [`page`] | sealing and opening pages of relations, in the format of the cipher |
//! | [`stream`] | stream format version 1: temporary files, accessed at any byte |
//! | [`wal`] | WAL page format version 1 |
//! | [`xts`] | AES-XTS over whole blocks, with its kernels |
//! | [`checksum`] | PostgreSQL's page checksum |
//! | [`wrap`] | AES-256-GCM key wrapping |
//! | [`kdf`] | HKDF-SHA256 |
//! | [`mac`] | HMAC-SHA-256 |
//! | [`secret`] | secrets of 32 bytes that are wiped |
//! | `primitives` | where AES, HMAC, HKDF and random bytes come from: [`module`] |
//! | [`residue`] | wiping copies of keys on the stack and in registers |
//!
//! Sealing, opening, wrapping and the checksum allocate nothing, take no lock and do not panic, so
//! that they can run in PostgreSQL's critical sections.

#![deny(unsafe_code)]

pub mod checksum;
pub mod interim;
pub mod kdf;
pub mod key;
mod layout;
mod lsn;
pub mod mac;
pub mod page;
mod page_key;
mod primitives;
pub mod residue;
pub mod secret;
pub mod stream;
mod tag;
pub mod version;
pub mod wal;
pub mod wrap;
pub mod xts;

pub use key::{CipherId, DataKey, Fork};
pub use layout::{PAGE_SIZE, Page};
pub use lsn::Lsn;
pub use page::PageFormat;
pub use page_key::PageKey;
pub use primitives::{Module, module, reserve};
pub use secret::Secret32;
pub use version::{DataKeyVersion, KeyVersion};
pub use xts::Backend;
