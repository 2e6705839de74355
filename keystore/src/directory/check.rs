//! Checking whether records can be applied, before they are written anywhere.

use std::collections::{HashMap, HashSet};

use pagevault_cipher::DataKeyVersion;

use super::write::key_info;
use super::{Directory, DirectoryError, Result};
use crate::record::Record;
use crate::rel_file::RelFile;
use crate::wal::{self, Switch};

/// What the preceding records add.
#[derive(Default)]
struct Additions {
    keys: HashMap<(RelFile, DataKeyVersion), (u8, usize)>,
    destroyed: HashMap<RelFile, DataKeyVersion>,
    files: HashSet<RelFile>,
}

impl Directory<'_> {
    /// Whether [`apply`](Self::apply) would accept these records, one after the other. Changes
    /// nothing.
    ///
    /// # Errors
    /// Those of `apply` for the first record that it would refuse.
    pub fn check(&self, records: &[Record]) -> Result<()> {
        let mut additions = Additions::default();
        for record in records {
            record.validate().map_err(super::write::invalid)?;
            match record {
                Record::DataKey { file, version, .. } => {
                    self.check_key(&mut additions, *file, *version, record)?
                }
                Record::Destroyed { file, through, .. } => {
                    if self.find(*file)?.is_none() {
                        additions.files.insert(*file);
                    }
                    let last = additions.destroyed.entry(*file).or_insert(*through);
                    *last = (*last).max(*through);
                }
                Record::Current { file, version } => self.require(&additions, *file, *version)?,
                Record::Plaintext { file, after } => self.require(&additions, *file, *after)?,
                Record::Rewriting { file, phase, .. }
                | Record::Switched { file, phase, .. }
                | Record::SealedOnly { file, phase } => {
                    if let Some(version) = phase.version {
                        self.require(&additions, *file, version)?;
                    }
                }
                Record::WalSwitch(Switch { phase, .. }) => {
                    if let Some(version) = phase.version {
                        let (file, data_key_version) = wal::key_place(version);
                        self.require(&additions, file, data_key_version)?;
                    }
                }
                Record::Provider { .. }
                | Record::DropProvider { .. }
                | Record::DatabaseKey { .. }
                | Record::Job { .. }
                | Record::JobStep { .. }
                | Record::JobBegun { .. }
                | Record::JobsForgotten { .. }
                | Record::FormerFiles(_)
                | Record::KeysForgotten { .. }
                | Record::KeyGroup { .. }
                | Record::EndedKeyGroup { .. } => {}
            }
        }
        let counts = self.counts()?;
        let is_full = |has: u32, more: usize| has as usize + more > counts.capacity as usize;
        if is_full(counts.keys, additions.keys.len())
            || is_full(counts.files, additions.files.len())
        {
            return Err(DirectoryError::Full { capacity: counts.capacity });
        }
        Ok(())
    }

    fn check_key(
        &self,
        additions: &mut Additions,
        file: RelFile,
        version: DataKeyVersion,
        record: &Record,
    ) -> Result<()> {
        let Some(info) = key_info(record) else { return Ok(()) };
        let replaced = DirectoryError::KeyReplaced { file, version };
        let slot = self.find(file)?;
        let through =
            slot.map(|slot| self.destroyed(slot)).transpose()?.and_then(|(through, _)| through);
        if Some(version) <= through.max(additions.destroyed.get(&file).copied()) {
            return Ok(());
        }
        let shape = (info.cipher, info.length);
        let known = slot.map(|slot| self.shape_of_version(slot, version)).transpose()?.flatten();
        if let Some(known) = known.or_else(|| additions.keys.get(&(file, version)).copied()) {
            return if known == shape { Ok(()) } else { Err(replaced) };
        }
        if slot.is_none() {
            additions.files.insert(file);
        }
        additions.keys.insert((file, version), shape);
        Ok(())
    }

    fn require(&self, additions: &Additions, file: RelFile, version: DataKeyVersion) -> Result<()> {
        let is_brought = additions.keys.contains_key(&(file, version))
            || additions.destroyed.get(&file).is_some_and(|through| version <= *through);
        if is_brought { Ok(()) } else { self.find_with_version(file, version).map(|_| ()) }
    }
}
