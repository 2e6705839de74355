//! The SDK of AWS without its defaults: credentials, from the environment, profiles, the container
//! or the instance, and the HTTP client. For the provider `aws_kms`, and for the login to Vault as
//! a principal of AWS.
//!
//! | file | subject |
//! |---|---|
//! | `source` | the options |
//! | `files` | configuration and credentials files, and the properties forbidden in them |
//! | `config` | region, credentials, HTTP client |
//! | `bounded` | replies of limited size |
//! | `sso` | profiles of IAM Identity Center |
//! | `credentials` | messages about credentials |

pub(crate) mod bounded;
pub(crate) mod config;
pub(crate) mod credentials;
mod files;
pub(crate) mod source;
mod sso;
