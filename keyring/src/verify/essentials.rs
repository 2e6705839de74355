//! Files and directories without which no server starts, whatever a manifest says.

use std::path::Path;

use super::control::Control;
use super::{Findings, directories};

/// Reports those that are missing.
pub(super) fn require(root: &Path, control: Control, findings: &mut Findings) {
    for name in directories::needed().filter(|name| !root.join(name).is_dir()) {
        findings.damage(format!("{name}: the directory is missing"));
    }
    // `checkDataDir` (miscinit.c)
    if !root.join("PG_VERSION").is_file() {
        findings.damage("PG_VERSION: missing; a server needs it".to_owned());
    }
    // Before recovery the last ones may not be there yet.
    if control.ended
        && root.join("pg_xact").is_dir()
        && let Some((oldest, next)) = control.transactions
    {
        let is_there = |name: &str| root.join("pg_xact").join(name).is_file();
        for name in missing_states(oldest, next, is_there) {
            let what = "missing; it says which transactions were committed";
            findings.damage(format!("pg_xact/{name}: {what}"));
        }
    }
}

/// Files with the states of transactions (clog.c) that are missing, from the oldest transaction to
/// the last. The first may be missing: a server that was killed after it had removed them may take
/// the oldest transaction from its last checkpoint (`vac_truncate_clog`, vacuum.c; `clog_redo`).
fn missing_states(oldest: u32, next: u32, is_there: impl Fn(&str) -> bool) -> Vec<String> {
    /// Two bits for a transaction, 32 pages in a file.
    const IN_A_FILE: u32 = 32 * 8192 * 4;
    const FILES: u32 = (1 << 31) / (IN_A_FILE / 2);
    let (first, last) = (oldest / IN_A_FILE, next.wrapping_sub(1) / IN_A_FILE);
    let count = (last + FILES - first) % FILES;
    let name = |at: u32| format!("{:04X}", (first + at) % FILES);
    let known = (0..count).find(|at| is_there(&name(*at))).unwrap_or(count);
    (known..=count).map(name).filter(|name| !is_there(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_all_transactions_must_be_there() {
        let missing = |oldest, next, there: &[&str]| {
            missing_states(oldest, next, |name| there.contains(&name)).join(" ")
        };
        assert_eq!(missing(722, 745, &["0000"]), "");
        assert_eq!(missing(722, 745, &[]), "0000");
        assert_eq!(missing(722, 1 << 20, &["0000"]), "");
        assert_eq!(missing(722, (1 << 20) + 1, &["0000"]), "0001");
        assert_eq!(missing(722, 3 << 20, &["0000", "0002"]), "0001");
        // Removed already.
        assert_eq!(missing(722, 3 << 20, &["0002"]), "");
        // After the last number comes the first.
        assert_eq!(missing(0xFFF0_0000, 745, &["0FFF", "0000"]), "");
        assert_eq!(missing(0xFFF0_0000, 745, &["0FFF"]), "0000");
    }
}
