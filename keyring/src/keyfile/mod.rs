//! The key file of the `file` provider: named master keys, each with all its versions.
//!
//! | module | subject |
//! |---|---|
//! | [`mod@format`] | the text of the file |
//! | [`place`] | where a key file may lie and who may reach it |
//! | [`store`] | reading it, and replacing it so that no crash and no second writer loses a key |

pub mod format;
pub mod place;
pub mod store;
