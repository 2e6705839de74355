//! Whether records can be taken in, before anything is written down about them.

use std::collections::{HashMap, HashSet};

use super::write::key_info;
use super::{Directory, DirectoryError, Result};
use crate::record::Record;
use crate::rel_file::RelFile;
use crate::wal::{self, Switch};

/// What the records before one of them bring along.
#[derive(Default)]
struct Brought {
    keys: HashMap<(RelFile, u16), (u8, usize)>,
    destroyed: HashMap<RelFile, u16>,
    files: HashSet<RelFile>,
}

impl Directory<'_> {
    /// Whether [`apply`](Self::apply) would take in these records, one after the other. Changes
    /// nothing.
    ///
    /// # Errors
    /// Those of `apply` for the first record that it would refuse.
    pub fn check(&self, records: &[Record]) -> Result<()> {
        let mut brought = Brought::default();
        for record in records {
            record.validate().map_err(super::write::invalid)?;
            match record {
                Record::DataKey { file, epoch, .. } => {
                    self.check_key(&mut brought, *file, *epoch, record)?
                }
                Record::Destroyed { file, through, .. } => {
                    if self.find(*file)?.is_none() {
                        brought.files.insert(*file);
                    }
                    let last = brought.destroyed.entry(*file).or_default();
                    *last = (*last).max(*through);
                }
                Record::Current { file, epoch } => self.require(&brought, *file, *epoch)?,
                Record::Plaintext { file, after } => self.require(&brought, *file, *after)?,
                Record::Rewriting { file, phase, .. } => {
                    self.require(&brought, *file, phase.epoch)?;
                }
                Record::WalSwitch(Switch { phase, .. }) => {
                    let (file, epoch) = wal::key_place(phase.generation);
                    self.require(&brought, file, epoch)?;
                }
                Record::Provider { .. }
                | Record::DropProvider { .. }
                | Record::DatabaseKey { .. }
                | Record::Job { .. }
                | Record::JobStep { .. }
                | Record::JobBegun { .. }
                | Record::JobsForgotten { .. } => {}
            }
        }
        let counts = self.counts()?;
        let is_full = |has: u32, more: usize| has as usize + more > counts.capacity as usize;
        if is_full(counts.keys, brought.keys.len()) || is_full(counts.files, brought.files.len()) {
            return Err(DirectoryError::Full { capacity: counts.capacity });
        }
        Ok(())
    }

    fn check_key(
        &self,
        brought: &mut Brought,
        file: RelFile,
        epoch: u16,
        record: &Record,
    ) -> Result<()> {
        let Some(info) = key_info(record) else { return Ok(()) };
        let replaced = DirectoryError::KeyReplaced { file, epoch };
        let slot = self.find(file)?;
        let through =
            slot.map(|slot| self.destroyed(slot)).transpose()?.map_or(0, |(through, _)| through);
        if epoch <= through.max(brought.destroyed.get(&file).copied().unwrap_or(0)) {
            return Ok(());
        }
        let shape = (info.cipher, info.length);
        let known = slot.map(|slot| self.shape_of_epoch(slot, epoch)).transpose()?.flatten();
        if let Some(known) = known.or_else(|| brought.keys.get(&(file, epoch)).copied()) {
            return if known == shape { Ok(()) } else { Err(replaced) };
        }
        if slot.is_none() {
            brought.files.insert(file);
        }
        brought.keys.insert((file, epoch), shape);
        Ok(())
    }

    fn require(&self, brought: &Brought, file: RelFile, epoch: u16) -> Result<()> {
        let is_brought = brought.keys.contains_key(&(file, epoch))
            || brought.destroyed.get(&file).is_some_and(|through| epoch <= *through);
        if is_brought { Ok(()) } else { self.find_with_epoch(file, epoch).map(|_| ()) }
    }
}
