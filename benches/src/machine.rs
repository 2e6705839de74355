//! The machine, and its available memory and disk space.

use std::path::Path;

use serde::{Deserialize, Serialize};

/// The machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    /// Code path of the cipher on this machine (`pagevault_cipher::Backend`).
    pub(crate) cipher: String,
    pub(crate) memory_mb: u64,
    /// Free memory when the run began.
    pub(crate) available_mb: u64,
    /// Free disk space for data directories when the run began.
    pub(crate) disk_mb: u64,
    pub(crate) kernel: String,
}

impl Machine {
    /// Describes this machine; data directories will be below `directory`.
    pub(crate) fn here(directory: &Path) -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let memory = read("/proc/meminfo");
        let kib = |name: &str| -> u64 {
            let line = memory.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.trim_matches([':', ' ', 'k', 'B']).parse().ok()).unwrap_or(0)
        };
        let cpu = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned());
        let disk = rustix::fs::statvfs(directory)
            .map_or(0, |disk| disk.f_bavail * disk.f_frsize / 1_048_576);
        Machine {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            cipher: pagevault_cipher::Backend::detect().to_string(),
            memory_mb: kib("MemTotal") / 1024,
            available_mb: kib("MemAvailable") / 1024,
            disk_mb: disk,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        }
    }
}
