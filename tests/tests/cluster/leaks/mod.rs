//! No value of encrypted data occurs anywhere on disk.

mod everywhere;
mod paths;
mod tables;
mod values;
mod workload;
