//! Where the keys are recorded from which interim keys are derived ([`pagevault_cipher::interim`]),
//! and the names of the marks of files that may have pages under them.
//!
//! There is one for each key group. It is recorded as the data key of a relation file that cannot
//! exist, like keys of WAL ([`crate::wal::key_place`]): the cluster's database key wraps it, WAL
//! brings it to every server, and it is never forgotten. It is destroyed with the group.
//!
//! A mark is a file in a folder beside the key files, named after the relation file. It has a line
//! for each key group whose interim keys pages may be under, with its number. Another one, which is
//! empty, says that pages of the visibility map were emptied.

use pagevault_cipher::DataKeyVersion;

use crate::rel_file::RelFile;
use crate::scope::KeyGroup;

/// The file, and the version of its data key, under which the key for a group is recorded. WAL keys
/// do not reach it: their versions end before.
#[must_use]
pub const fn key_place(group: KeyGroup) -> (RelFile, DataKeyVersion) {
    let relation = u32::MAX - group.number();
    (RelFile { tablespace: 0, database: 0, relation }, DataKeyVersion::FIRST)
}

/// The group whose key is recorded under this file.
#[must_use]
pub fn group_at(file: RelFile) -> Option<KeyGroup> {
    let group = KeyGroup::new(u32::MAX - file.relation)?;
    (file == key_place(group).0).then_some(group)
}

/// The folder of the marks.
pub const FOLDER: &str = "interim";

/// The name of the mark that stands for all files of all key groups.
pub const ANY: &str = "any";

/// The name of the mark of a file.
#[must_use]
pub fn mark_of(file: RelFile) -> String {
    let RelFile { tablespace, database, relation } = file;
    format!("{tablespace}_{database}_{relation}")
}

/// The line in the mark of a file with pages under interim keys of this group.
#[must_use]
pub fn line_of_mark(group: KeyGroup) -> String {
    format!("{:05}\n", group.number())
}

/// The groups that a mark names; `None` if it does not say that.
#[must_use]
pub fn groups_of_mark(content: &str) -> Option<Vec<KeyGroup>> {
    let group = |line: &str| {
        let group = KeyGroup::new(line.trim_end().parse().ok()?)?;
        (line_of_mark(group) == line).then_some(group)
    };
    let groups: Option<Vec<_>> = content.split_inclusive('\n').map(group).collect();
    groups.filter(|groups| !groups.is_empty())
}

/// The name of the mark that says that pages of the visibility map of a file were emptied.
#[must_use]
pub fn mark_of_map(file: RelFile) -> String {
    format!("{}_vm", mark_of(file))
}

/// The file whose map the mark with this name is about; `None` if it is no such mark.
#[must_use]
pub fn map_marked_by(name: &str) -> Option<RelFile> {
    marked_by(name.strip_suffix("_vm")?)
}

/// The file of the mark with this name; `None` if it is no mark.
#[must_use]
pub fn marked_by(name: &str) -> Option<RelFile> {
    let mut numbers = name.split('_').map(str::parse);
    let mut next = || numbers.next()?.ok();
    let file = RelFile { tablespace: next()?, database: next()?, relation: next()? };
    (mark_of(file) == name).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wal::{self, is_key_place, version_at};
    use pagevault_cipher::KeyVersion;

    #[test]
    fn names_of_marks() {
        let file = RelFile { tablespace: 1663, database: 5, relation: u32::MAX };
        assert_eq!(mark_of(file), "1663_5_4294967295");
        assert_eq!(marked_by(&mark_of(file)), Some(file));
        assert_eq!(map_marked_by(&mark_of_map(file)), Some(file));
        assert_eq!((marked_by(&mark_of_map(file)), map_marked_by(&mark_of(file))), (None, None));
        for name in
            ["", ANY, "1663_5", "1663_5_7_", "1663_5_7_8", "01663_5_7", "+1_5_7", "1663_5_-7"]
        {
            assert_eq!(marked_by(name), None, "{name}");
        }
    }

    #[test]
    fn marks_name_groups() {
        let group = |number| KeyGroup::new(number).unwrap();
        assert_eq!(line_of_mark(group(100)), "00100\n");
        assert_eq!(groups_of_mark("00100\n"), Some(vec![group(100)]));
        assert_eq!(groups_of_mark("00100\n11999\n"), Some(vec![group(100), group(11_999)]));
        for content in ["", "00100", "100\n", "00001\n", "+0100\n", "00100\n\n", "00100\n001"] {
            assert_eq!(groups_of_mark(content), None, "{content:?}");
        }
    }

    #[test]
    fn they_are_places_of_no_wal_key() {
        for number in [100, 11_999] {
            let group = KeyGroup::new(number).unwrap();
            let (file, version) = key_place(group);
            assert!(is_key_place(file) && version_at(file, version).is_none());
            assert!(wal::key_place(KeyVersion::LAST).0.relation < file.relation);
            assert_eq!(group_at(file), Some(group));
            assert_eq!(group_at(RelFile { database: 5, ..file }), None);
        }
        assert_eq!(group_at(wal::key_place(KeyVersion::FIRST).0), None);
    }
}
