//! No value of what is encrypted is anywhere on disk.

mod everywhere;
mod paths;
mod tables;
mod values;
mod workload;
