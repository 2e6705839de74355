//! The directories of a base backup. A manifest lists files only; without some directories a server
//! does not start, and neither if a directory is in the place of a file that it makes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::Findings;
use super::complete::shown;
use super::manifest::Manifest;
use crate::offline::DIRECTORY as KEYSTORE;
use crate::tablespaces;

/// `subdirs` (initdb.c), the same in 15 to 19. Each base backup has them, if empty (basebackup.c,
/// `sendDir`).
const MADE_BY_INITDB: [&str; 20] = [
    "base",
    "global",
    "pg_commit_ts",
    "pg_dynshmem",
    "pg_logical",
    "pg_logical/mappings",
    "pg_logical/snapshots",
    "pg_multixact",
    "pg_multixact/members",
    "pg_multixact/offsets",
    "pg_notify",
    "pg_replslot",
    "pg_serial",
    "pg_snapshots",
    "pg_stat",
    "pg_stat_tmp",
    "pg_subtrans",
    "pg_tblspc",
    "pg_twophase",
    "pg_xact",
];
/// Which the server does not use itself (since 15), and may be missing.
const NOT_NEEDED: &str = "pg_stat_tmp";

/// Within `pg_wal`, which is not compared. A server makes those that are missing, and does not
/// start with anything else in their place (`ValidateXLOGDirectoryStructure`, xlog.c; the second
/// since 17).
const OF_WAL: [&str; 2] = ["pg_wal/archive_status", "pg_wal/summaries"];

/// Files that a server makes, renames or removes when it starts (xlog.c, xlogrecovery.c,
/// postmaster.c, syslogger.c, guc.c), and those with which it does not start.
const FILES: [&str; 15] = [
    "backup_label",
    "backup_label.old",
    "current_logfiles",
    "current_logfiles.tmp",
    "logrotate",
    "postgresql.auto.conf",
    "postgresql.auto.conf.tmp",
    "postmaster.opts",
    "postmaster.pid",
    "promote",
    "recovery.conf",
    "recovery.signal",
    "standby.signal",
    "tablespace_map",
    "tablespace_map.old",
];

/// Directories without which a server does not start.
pub(super) fn needed() -> impl Iterator<Item = &'static str> {
    MADE_BY_INITDB.into_iter().filter(|name| *name != NOT_NEEDED)
}

/// Reports what is in the place of a directory of WAL. Links to directories are not.
pub(super) fn require_of_wal(root: &Path, findings: &mut Findings) {
    for name in OF_WAL {
        let path = root.join(name);
        if fs::symlink_metadata(&path).is_ok() && !path.is_dir() {
            findings
                .damage(format!("{name}: not a directory, and a server does not start with it"));
        }
    }
}

/// Reports directories that are missing, and those in which the manifest lists no file: as damage
/// if they are where a server has files of its own, else as added.
pub(super) fn compare(found: &BTreeSet<Vec<u8>>, manifest: &Manifest, findings: &mut Findings) {
    let made = || MADE_BY_INITDB.iter().map(|name| name.as_bytes());
    for name in needed().filter(|name| !found.contains(name.as_bytes())) {
        findings.damage(format!("{name}: the directory is missing"));
    }
    let is_known = |path: &[u8]| {
        let below = [path, b"/"].concat();
        let next = manifest.files.range(below.clone()..).next();
        made().any(|name| name == path) || next.is_some_and(|(file, _)| file.starts_with(&below))
    };
    for path in found.iter().filter(|path| !is_known(path)) {
        let first = path.split(|byte| *byte == b'/').next().unwrap_or_default();
        let text = std::str::from_utf8(path).unwrap_or_default();
        if first == tablespaces::DIRECTORY.as_bytes() || first == KEYSTORE.as_bytes() {
            // Without files while no relation is there.
        } else if is_database(text)
            || (path != first || !FILES.contains(&text)) && !is_server(first)
        {
            findings.added_directories.push(shown(path));
        } else {
            let what = "an additional directory, where a server has files of its own";
            findings.damage(format!("{}: {what}", shown(path)));
        }
    }
}

/// Interrupted commands leave the directory of a database without files (`createdb`, dbcommands.c).
fn is_database(path: &str) -> bool {
    path.strip_prefix("base/").is_some_and(|name| tablespaces::number(name).is_some())
}

fn is_server(first: &[u8]) -> bool {
    MADE_BY_INITDB.iter().any(|name| name.as_bytes() == first)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn compared(change: impl FnOnce(&mut BTreeSet<Vec<u8>>)) -> Findings {
        let mut found: BTreeSet<Vec<u8>> =
            MADE_BY_INITDB.iter().map(|name| name.as_bytes().to_vec()).collect();
        found.extend(
            ["base/5", "pagevault", "pg_tblspc/1", "pg_tblspc/1/PG_15_1", "log"].map(Vec::from),
        );
        change(&mut found);
        let mut findings = Findings::default();
        let manifest = Manifest::of_files(&["base/5/1259", "log/a"]);
        compare(&found, &manifest, &mut findings);
        findings
    }

    #[test]
    fn directories_that_a_server_needs_are_required() {
        assert_eq!(compared(|_| ()).damaged, 0);
        for name in MADE_BY_INITDB {
            let findings = compared(|found| assert!(found.remove(name.as_bytes())));
            assert_eq!(findings.damaged, u64::from(name != NOT_NEEDED), "{name}");
        }
    }

    #[test]
    fn only_directories_are_in_the_place_of_those_of_wal() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        let damaged = || {
            let mut findings = Findings::default();
            require_of_wal(root.path(), &mut findings);
            findings.damaged
        };
        fs::create_dir(path("pg_wal")).unwrap();
        assert_eq!(damaged(), 0);
        symlink(path("elsewhere"), path(OF_WAL[0])).unwrap();
        fs::write(path(OF_WAL[1]), "").unwrap();
        assert_eq!(damaged(), 2);
        fs::create_dir(path("elsewhere")).unwrap();
        assert_eq!(damaged(), 1);
    }

    #[test]
    fn directories_in_the_place_of_files_are_damage() {
        for (name, is_damage) in [
            ("backup_label.old", true),
            ("standby.signal", true),
            ("pg_replslot/a", true),
            ("pg_xact/0001", true),
            ("base/5/16384", true),
            ("global/pg_internal.init", true),
            ("base/6", false),
            ("lost+found", false),
            ("conf.d", false),
            ("conf.d/backup_label.old", false),
        ] {
            let findings = compared(|found| assert!(found.insert(name.as_bytes().to_vec())));
            let found = (findings.damaged, findings.added_directories.len());
            let expected = if is_damage { (1, 0) } else { (0, 1) };
            assert_eq!(found, expected, "{name}");
        }
    }
}
