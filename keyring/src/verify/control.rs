//! The content of the control file, read by `pg_controldata` because its layout differs between
//! versions.

use std::path::Path;
use std::process::Command;

use pagevault_cipher::Lsn;
use pagevault_keystore::anchor::{
    Position, parse_lsn, position_of_control, position_of_label, start_of_label,
};

use super::headers::plus;
use super::manifest::Range;
use super::wal_record::HEADER;
use crate::bindir::find;
use crate::failure::{Failure, refuse, unreadable};
use crate::regular::{open_regular, read_if_there};

/// Facts about a cluster that are needed to read its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Control {
    /// Pages have checksums.
    pub(crate) checksums: bool,
    /// Size of a WAL segment in bytes.
    pub(crate) segment: u64,
    /// The timeline of the last checkpoint.
    pub(crate) timeline: u32,
    /// LSN of the checkpoint record, if this server wrote it: all WAL before it was on disk. A
    /// cluster in recovery may have incomplete WAL from elsewhere (`pg_rewind` copies WAL before
    /// the control file).
    pub(crate) checkpoint: Option<Lsn>,
    /// LSN of the last checkpoint's record, which a server reads first.
    pub(crate) last: Lsn,
    /// LSN at which recovery will begin.
    pub(crate) redo: Lsn,
    /// The server was shut down, and not in recovery: all pages are on disk, recovery has nothing
    /// to do, open transactions did not commit and never will. A shutdown in recovery writes no
    /// pages if no checkpoint was replayed since the last restart point (`CreateRestartPoint`,
    /// xlog.c), and the next start replays WAL from there (`InitWalRecovery`, xlogrecovery.c).
    pub(crate) ended: bool,
    /// PostgreSQL's system identifier.
    pub(crate) system: u64,
    /// The version of PostgreSQL's catalogs.
    pub(crate) catalog: Option<u32>,
    /// The oldest transaction of which the state is known, and the next one.
    pub(crate) transactions: Option<(u32, u32)>,
    /// Minimum recovery point, if there is one.
    pub(crate) minimum: Option<Position>,
    /// It is the backup of a standby, which ends at the minimum recovery point (`backupEndPoint`,
    /// `InitWalRecovery`, xlogrecovery.c).
    pub(crate) of_standby: bool,
    /// It is an incremental backup, with which no server starts (`read_backup_label`).
    pub(crate) incremental: bool,
    /// What the data directory contains, for comparison with a note; `None` if a backup's label
    /// cannot be read.
    pub(crate) reached: Option<Position>,
    /// The place for a note: the last checkpoint, or that of the backup. `reached` may be the end
    /// of a record, where a timeline that branches off exactly there would own it.
    pub(crate) noted: Option<Position>,
}

impl Control {
    pub(crate) fn ask(data_directory: &Path) -> Result<Control, Failure> {
        // pg_controldata would block on a FIFO.
        let file = data_directory.join("global/pg_control");
        open_regular(&file).map_err(|error| unreadable(&file, &error))?;
        let program = find("pg_controldata".as_ref())?;
        let failed = |cause: &dyn std::fmt::Display| {
            refuse(format!("could not read the control file: {}: {cause}", program.display()))
        };
        let output = Command::new(&program)
            .env("LC_ALL", "C")
            .arg(data_directory)
            .output()
            .map_err(|error| failed(&error))?;
        if !output.status.success() {
            return Err(failed(&String::from_utf8_lossy(&output.stderr).trim()));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        if is_untrustworthy(&text) || is_untrustworthy(&String::from_utf8_lossy(&output.stderr)) {
            return Err(refuse(format!("control file \"{}\" is not valid", file.display()))
                .with_detail(format!("Its checksum or another value is not what \"{}\" expects: the file is damaged, or of another major version.", program.display()))
                .with_hint("Use the programs of the major version that the data directory has. With a damaged control file no server starts: use another copy of the data directory."));
        }
        let control = Control::of(&text).ok_or_else(|| {
            failed(&"the block size is not 8 kB, or the segment size of relations is not 1 GB")
        })?;
        Ok(control.with_label(label(data_directory, "backup_label")?.as_deref()))
    }

    /// In a base backup the control file is of a later moment than the label, which counts
    /// (`read_backup_label`, xlogrecovery.c).
    fn with_label(self, label: Option<&str>) -> Control {
        let Some(label) = label else { return self };
        // Of a label that cannot be read, nothing is believed.
        let redo = start_of_label(label).unwrap_or(Lsn(u64::MAX));
        let reached = position_of_label(label);
        let incremental = label.lines().any(|line| line.starts_with("INCREMENTAL FROM LSN:"));
        let of_standby = label.lines().any(|line| line == "BACKUP FROM: standby");
        let noted = reached;
        Control { redo, ended: false, incremental, of_standby, reached, noted, ..self }
    }

    /// What no server accepts (`read_backup_label`, xlogrecovery.c).
    pub(super) fn fault(&self) -> Option<&'static str> {
        let is_read = self.noted.is_some();
        (!is_read).then_some("backup_label: not valid, and a server does not start with it")
    }

    /// Whether keys are forgotten that the data directory may need, or WAL that is replayed from
    /// there on. `forgotten`: the last address at which their files were gone.
    pub(super) fn lacks_keys(&self, forgotten: Lsn) -> Option<String> {
        let redo = self.redo;
        (forgotten > redo).then(|| {
            format!(
                "pagevault: of a later time than the data directory, and a server does not start with it: the directory is of {redo}, and keys that were not needed any more at {forgotten} are forgotten"
            )
        })
    }

    /// WAL that a server start needs in `pg_wal`: from where recovery begins to the record of the
    /// last checkpoint, which is read even if recovery has nothing to do (`InitWalRecovery`,
    /// xlogrecovery.c). `None` if the label of a backup says what is needed, or if recovery may
    /// fetch it from elsewhere.
    pub(super) fn required(&self, data_directory: &Path) -> Option<Range> {
        let files = ["backup_label", "recovery.signal", "standby.signal"];
        let is_there = |name: &str| data_directory.join(name).exists();
        let Control { timeline, redo: start, last, .. } = *self;
        let end = plus(last, HEADER);
        (!files.into_iter().any(is_there)).then_some(Range { timeline, start, end })
    }

    fn of(text: &str) -> Option<Control> {
        let value = |label: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(label))?;
            line.trim_start_matches(':').trim().parse().ok()
        };
        let usual = value("Database block size")? == 8192
            && value("Blocks per segment of large relation")? == u64::from(super::pages::SEGMENT)
            && value("WAL block size")? == 8192;
        let checksums = value("Data page checksum version")? != 0;
        let segment = value("Bytes per WAL segment")?;
        let usual = usual && segment.is_power_of_two();
        let timeline = u32::try_from(value("Latest checkpoint's TimeLineID")?).ok()?;
        let location =
            |label| parse_lsn(text.lines().find_map(|line| line.strip_prefix(label))?.trim());
        let checkpoint = location("Latest checkpoint location:")?;
        let redo = location("Latest checkpoint's REDO location:")?;
        let state = text.lines().find_map(|line| line.strip_prefix("Database cluster state:"));
        let minimum = Position {
            timeline: u32::try_from(value("Min recovery ending loc's timeline")?).ok()?,
            lsn: location("Minimum recovery ending location:")?,
        };
        let noted = Position { timeline, lsn: checkpoint };
        let reached = Some(position_of_control(noted, minimum));
        let system = value("Database system identifier")?;
        let catalog = value("Catalog version number").and_then(|it| u32::try_from(it).ok());
        let number = |label: &str| {
            let text = text.lines().find_map(|line| line.strip_prefix(label))?.trim();
            text.rsplit(':').next()?.parse().ok()
        };
        let oldest = number("Latest checkpoint's oldestXID:");
        // epoch:number
        let transactions = oldest.zip(number("Latest checkpoint's NextXID:"));
        let recovers = state.is_none_or(|state| state.contains("recovery"));
        let (last, checkpoint) = (checkpoint, (!recovers).then_some(checkpoint));
        let ended = state.is_some_and(|state| state.trim() == "shut down");
        usual.then_some(Control {
            checksums,
            segment,
            timeline,
            checkpoint,
            last,
            redo,
            ended,
            system,
            catalog,
            transactions,
            minimum: Some(minimum).filter(|minimum| minimum.timeline > 0),
            of_standby: false,
            incremental: false,
            reached,
            noted: Some(noted),
        })
    }
}

/// Whether `pg_controldata` warns of what it prints: on standard output up to PostgreSQL 17.
fn is_untrustworthy(said: &str) -> bool {
    said.contains("results below are untrustworthy") || said.contains("WARNING:")
}

/// Where recovery began when a server was started in a backup, the last time. It renames the label
/// then (`StartupXLOG`, xlog.c), which stays. Anything else in its place says nothing.
pub(super) fn recovered_from(data_directory: &Path) -> Option<Lsn> {
    start_of_label(&label(data_directory, "backup_label.old").ok()??)
}

/// The label of a base backup: `backup_label` if no server was started in it.
fn label(data_directory: &Path, name: &str) -> Result<Option<String>, Failure> {
    const MAX: u64 = 64 << 10;
    let path = data_directory.join(name);
    let label = read_if_there(&path, MAX).map_err(|error| unreadable(&path, &error))?;
    Ok(label.map(|label| String::from_utf8_lossy(&label).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::{Control, Lsn, Position, is_untrustworthy, recovered_from};

    #[test]
    fn what_pg_controldata_shows_is_understood() {
        let text = "pg_control version number:            1300\n\
             Catalog version number:               202209061\n\
             Database system identifier:           7311862375203018373\n\
             Minimum recovery ending location:     0/0\n\
             Min recovery ending loc's timeline:   0\n\
             Database cluster state:               in production\n\
             Latest checkpoint location:           1A/2F000028\n\
             Latest checkpoint's REDO location:    1A/2E0000F8\n\
             Latest checkpoint's TimeLineID:       3\n\
             Latest checkpoint's NextXID:          2:745\n\
             Latest checkpoint's oldestXID:        722\n\
             Database block size:                  8192\n\
             Blocks per segment of large relation: 131072\n\
             WAL block size:                       8192\n\
             Bytes per WAL segment:                16777216\n\
             Data page checksum version:           1\n";
        let control = Control {
            checksums: true,
            segment: 16 << 20,
            timeline: 3,
            checkpoint: Some(Lsn(0x1A_2F00_0028)),
            last: Lsn(0x1A_2F00_0028),
            redo: Lsn(0x1A_2E00_00F8),
            ended: false,
            system: 7_311_862_375_203_018_373,
            catalog: Some(202_209_061),
            transactions: Some((722, 745)),
            minimum: None,
            of_standby: false,
            incremental: false,
            reached: Some(Position { timeline: 3, lsn: Lsn(0x1A_2F00_0028) }),
            noted: Some(Position { timeline: 3, lsn: Lsn(0x1A_2F00_0028) }),
        };
        assert_eq!(Control::of(text), Some(control));
        let promoted = text.replace("location:     0/0", "location:     1A/30000000");
        let promoted = promoted.replace("loc's timeline:   0", "loc's timeline:   4");
        let reached = Some(Position { timeline: 4, lsn: Lsn(0x1A_3000_0000) });
        let minimum = reached;
        assert_eq!(Control::of(&promoted), Some(Control { minimum, reached, ..control }));
        for state in ["shut down", "shut down in recovery"] {
            let ended = state == "shut down";
            let checkpoint = control.checkpoint.filter(|_| ended);
            let control = Control { checkpoint, ended, ..control };
            assert_eq!(Control::of(&text.replace("in production", state)), Some(control));
        }
        assert_eq!(Control::of(&text.replace("in production", "shutting down")), Some(control));
        let recovering = Control { checkpoint: None, ..control };
        let text_then = text.replace("in production", "in archive recovery");
        assert_eq!(Control::of(&text_then), Some(recovering));
        assert_eq!(Control::of(&text.replace("1A/2F000028", "1A")), None);
        assert_eq!(Control::of(&text.replace("size:                  8192", "size: 4096")), None);
        assert_eq!(Control::of(""), None);
    }

    #[test]
    fn warnings_of_pg_controldata_are_heeded() {
        let before_18 = "WARNING: Calculated CRC checksum does not match value stored in file.\n\
             Either the file is corrupt, or it has a different layout than this program\n\
             is expecting.  The results below are untrustworthy.\n\npg_control version";
        let since_18 = "pg_controldata: warning: calculated CRC checksum does not match value \
             stored in control file\npg_controldata: detail: Either the control file is corrupt, \
             or it has a different layout than this program is expecting.  The results below are \
             untrustworthy.\n";
        assert!(is_untrustworthy(before_18) && is_untrustworthy(since_18));
        assert!(!is_untrustworthy("pg_control version number:            1300\n"));
    }

    #[test]
    fn a_backup_begins_where_its_label_says() {
        let text = "Database cluster state: shut down\nDatabase system identifier: 1\n\
             Minimum recovery ending location: 0/0\nMin recovery ending loc's timeline: 0\n\
             Latest checkpoint location: 1/2000028\nLatest checkpoint's REDO location: 1/2000000\n\
             Latest checkpoint's TimeLineID: 1\nDatabase block size: 8192\n\
             Blocks per segment of large relation: 131072\nWAL block size: 8192\n\
             Bytes per WAL segment: 16777216\nData page checksum version: 0\n";
        let control = Control::of(text).unwrap();
        assert_eq!(control.with_label(None), control);
        let label = "START WAL LOCATION: 0/7000028 (file 000000010000000000000007)\nCHECKPOINT";
        let labelled = control.with_label(Some(label));
        assert_eq!((labelled.redo, labelled.ended), (Lsn(0x700_0028), false));
        assert_eq!(labelled.reached, None);
        assert!(labelled.fault().is_some() && control.fault().is_none());
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(recovered_from(directory.path()), None);
        std::fs::write(directory.path().join("backup_label.old"), label).unwrap();
        assert_eq!(recovered_from(directory.path()), Some(Lsn(0x700_0028)));
        let label = format!("{label} LOCATION: 0/7000060\nSTART TIMELINE: 1\n");
        let reached = Some(Position { timeline: 1, lsn: Lsn(0x700_0060) });
        let labelled = control.with_label(Some(&label));
        assert_eq!((labelled.reached, labelled.fault()), (reached, None));
        assert!(control.with_label(Some("")).fault().is_some());
        assert_eq!(control.with_label(Some("START")).redo, Lsn(u64::MAX));
        assert!(!labelled.incremental && !labelled.of_standby);
        let of_standby = format!("{label}BACKUP FROM: standby\n");
        assert!(control.with_label(Some(&of_standby)).of_standby);
        let incremental = format!("{label}INCREMENTAL FROM LSN: 0/6000028\n");
        assert!(control.with_label(Some(&incremental)).incremental);
    }
}
