//! WAL that a base backup without a manifest needs, according to its label and to the archive.

use std::path::Path;

use pagevault_cipher::Lsn;
use pagevault_keystore::anchor::parse_lsn;

use super::Control;
use super::headers::plus;
use super::manifest::Range;
use super::wal_record::HEADER;
use crate::failure::{Failure, unreadable};
use crate::regular::read_if_there;

/// Maximum size of a backup history file in bytes.
const MAX: u64 = 64 << 10;

/// WAL that must be there, and WAL to read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Needed {
    pub(super) required: Vec<Range>,
    pub(super) wanted: Vec<Range>,
}

/// What a backup with a label needs; nothing without one. It ends where its backup history file in
/// the archive says. Of a standby's backup there is none (`do_pg_backup_stop`, xlog.c); it ends at
/// the minimum recovery point. If neither is known, only the checkpoint's record is required, which
/// every server start reads. Without a history file all WAL behind the end is read as well, on this
/// timeline.
pub(super) fn needed(
    control: Control,
    data_directory: &Path,
    archive: &Path,
) -> Result<Needed, Failure> {
    let Some(checkpoint) = control.noted.filter(|_| data_directory.join("backup_label").exists())
    else {
        return Ok(Needed::default());
    };
    let (timeline, start) = (checkpoint.timeline, control.redo);
    let path = archive.join(history_name(timeline, start, control.segment));
    let history = read_if_there(&path, MAX).map_err(|error| unreadable(&path, &error))?;
    let stop = history.and_then(|text| stop_of(&String::from_utf8_lossy(&text), start));
    // `pg_rewind` leaves one of a later timeline.
    let minimum =
        control.minimum.filter(|minimum| control.of_standby && minimum.timeline == timeline);
    let end = stop.or(minimum.map(|minimum| minimum.lsn)).unwrap_or_default();
    let end = end.max(plus(checkpoint.lsn, HEADER));
    let required = vec![Range { timeline, start, end }];
    let mut wanted = required.clone();
    if stop.is_none() {
        wanted.push(Range { timeline, start, end: Lsn(u64::MAX) });
    }
    Ok(Needed { required, wanted })
}

/// `BackupHistoryFileName` (xlog_internal.h).
fn history_name(timeline: u32, start: Lsn, segment: u64) -> String {
    let (high, low) = (start.0 >> 32, start.0 & u64::from(u32::MAX));
    format!("{timeline:08X}{high:08X}{:08X}.{:08X}.backup", low / segment, low % segment)
}

/// The end of the backup that began at `start`.
fn stop_of(history: &str, start: Lsn) -> Option<Lsn> {
    let value = |label| {
        let value = history.lines().find_map(|line: &str| line.strip_prefix(label))?;
        parse_lsn(value.split_whitespace().next()?)
    };
    value("STOP WAL LOCATION:").filter(|_| value("START WAL LOCATION:") == Some(start))
}

#[cfg(test)]
mod tests {
    use pagevault_keystore::anchor::Position;

    use super::*;

    #[test]
    fn the_backup_of_a_standby_ends_at_its_minimum_recovery_point() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let position = |timeline, lsn| Position { timeline, lsn: Lsn(lsn) };
        let (redo, checkpoint) = (Lsn(0x200_0028), position(1, 0x200_0060));
        let control = Control {
            checksums: true,
            segment: 16 << 20,
            timeline: 1,
            checkpoint: None,
            last: checkpoint.lsn,
            redo,
            ended: false,
            system: 1,
            catalog: None,
            transactions: None,
            minimum: Some(position(1, 0x500_0000)),
            of_standby: true,
            incremental: false,
            reached: Some(checkpoint),
            noted: Some(checkpoint),
        };
        let end = |control| {
            let needed = needed(control, directory, directory).unwrap();
            assert_eq!(needed.wanted.len(), 2);
            needed.required[0].end
        };
        assert_eq!(needed(control, directory, directory).unwrap(), Needed::default());
        std::fs::write(directory.join("backup_label"), "").unwrap();
        assert_eq!(end(control), Lsn(0x500_0000));
        let record = plus(checkpoint.lsn, HEADER);
        for (of_standby, minimum) in [
            (false, control.minimum),
            (true, None),
            (true, Some(position(2, 0x500_0000))),
            (true, Some(position(1, 0x200_0060))),
        ] {
            assert_eq!(end(Control { of_standby, minimum, ..control }), record);
        }
    }

    #[test]
    fn the_archive_says_where_a_backup_ended() {
        let start = Lsn(0x1A_2F00_0028);
        let names = [1, 16].map(|megabytes| history_name(3, start, megabytes << 20));
        let expected = ["000000030000001A000002F0", "000000030000001A0000002F"];
        assert_eq!(names, expected.map(|name| format!("{name}.00000028.backup")));
        let text = "START WAL LOCATION: 1A/2F000028 (file 000000030000001A0000002F)\n\
             STOP WAL LOCATION: 1A/2F000138 (file 000000030000001A0000002F)\n\
             CHECKPOINT LOCATION: 1A/2F000060\n";
        assert_eq!(stop_of(text, start), Some(Lsn(0x1A_2F00_0138)));
        assert_eq!(stop_of(text, Lsn(0x1A_2E00_0028)), None);
        assert_eq!(stop_of(&text.replace("STOP", "END"), start), None);
        assert_eq!(stop_of("", start), None);
    }
}
