//! Rekeying of relations that are in use: encryption, decryption, new data keys.
//!
//! | module | subject |
//! |---|---|
//! | [`mod@file`] | one file, step by step, until every page on disk is in the target state |
//! | [`run`] | all files of a job, and its progress |
//! | [`pace`] | how fast a job goes, by what others do |
//! | [`plan`] | what a job does to a relation's present file |
//! | [`life`] | the life of a job: request, claim, commands, end |

pub mod file;
pub mod life;
pub mod pace;
pub mod plan;
pub mod run;
