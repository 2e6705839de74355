//! How relations that are in use are encrypted, decrypted and given new data keys.
//!
//! | module | subject |
//! |---|---|
//! | [`mod@file`] | one file, step by step, until every page on disk is as it is to be |
//! | [`run`] | all files of a job, and how far it is |
//! | [`plan`] | what a job does to the file that a relation has |
//! | [`life`] | jobs: asked for, claimed, ordered about, ended |

pub mod file;
pub mod life;
pub mod plan;
pub mod run;
