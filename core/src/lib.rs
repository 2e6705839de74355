//! What pagevault decides, without a server: what is to be encrypted, and how a file that is in use
//! comes to be written as it is to be.
//!
//! Pure code: what it has to know it asks through traits, what is to be done it says or has done
//! through them. The extension implements these with PostgreSQL, the tests with models that try all
//! that there is, or let everything happen in between.
//!
//! | module | subject |
//! |---|---|
//! | [`page`] | how pages of a file are written, and how they are to be |
//! | [`policy`] | which relations are to be encrypted, and why |
//! | [`rekey`] | jobs, and the steps by which a file gets another key |

#![forbid(unsafe_code)]

pub mod page;
pub mod policy;
pub mod rekey;
