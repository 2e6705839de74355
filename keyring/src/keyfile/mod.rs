//! The key file of the `file` provider: named master keys, each with all its versions.
//!
//! | module | subject |
//! |---|---|
//! | [`mod@format`] | the text of the file |
//! | [`place`] | location and permissions of a key file |
//! | `replace` | replacing a file in one step |
//! | [`store`] | reading and replacing it without losing keys |

pub mod format;
pub mod place;
mod replace;
pub mod store;
