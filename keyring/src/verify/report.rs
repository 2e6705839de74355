//! The result of `verify`, as text and as JSON.

use std::io::{self, Write};

use pagevault_keystore::log::unsettled;
use pagevault_keystore::{Record, Scope};
use serde::Serialize;

use super::complete::{Complete, Sealed};
use super::locked_groups::{LockedGroup, conclude};
use super::{Context, Findings, LISTED, Verdict};
use crate::failure::{Failure, unprintable};
use crate::offline::{DIRECTORY, Keystore};
use crate::visible::visible;

/// Everything that `verify` says.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    damage_found: bool,
    /// Those whose database keys could be unwrapped.
    data_keys: usize,
    locked_key_groups: Vec<LockedGroup>,
    unsettled: Vec<Unsettled>,
    relations: Relations,
    tags: Tags,
    wal: Wal,
    manifest: &'a Complete,
    damages: u64,
    /// The first of them.
    damaged: &'a [String],
    /// Files that belong to no relation, created by transactions that did not commit.
    left_over: Vec<&'a str>,
    /// Damaged pages that recovery replaces.
    torn_pages: u64,
    /// Pages of free space and visibility maps that the server reads as empty.
    emptied_map_pages: u64,
    /// Files that end with a part of a block, which PostgreSQL ignores.
    partial_blocks: Vec<String>,
    /// Files of an incremental backup that have only what has changed, and were not verified.
    incremental_files: u64,
    /// What could not be examined.
    unknown: &'a [String],
    /// Directories without files, which are in no new cluster.
    added_directories: &'a [String],
    /// Pages in plaintext, or under former keys, of which recovery decides.
    undecided: u64,
    /// Segments after one that is missing or not full, of which recovery decides.
    undecided_segments: &'a [String],
    /// Files of unlogged relations, which recovery resets.
    skipped: u64,
    /// The server was shut down, and not in recovery: recovery has nothing to do.
    shut_down: bool,
}

#[derive(Serialize)]
struct Unsettled {
    file: String,
    data_keys: usize,
}

#[derive(Serialize)]
struct Relations {
    files: u64,
    encrypted_pages: u64,
    plaintext_pages: u64,
    empty_pages: u64,
    shredded_pages: u64,
    /// Not decrypted: their key groups are locked.
    locked_pages: u64,
}

/// Encrypted pages by the strength of their tags.
#[derive(Serialize)]
struct Tags {
    bits_128: u64,
    bits_20: u64,
}

#[derive(Serialize)]
struct Wal {
    encrypted_pages: u64,
    plaintext_pages: u64,
    records: u64,
}

/// Numbers of data keys that were cut off from key files and are not in them.
fn missing(keystore: &Keystore) -> Result<Vec<Unsettled>, Failure> {
    let is_key = |record: &Record| matches!(record, Record::DataKey { .. });
    let count = |(scope, records): (Scope, Vec<Record>)| {
        let missing = unsettled::missing(keystore.state(), records);
        let data_keys = missing.iter().filter(|record| is_key(record)).count();
        Unsettled { file: unsettled::name(scope), data_keys }
    };
    let mut found: Vec<_> = keystore.unsettled()?.into_iter().map(count).collect();
    found.retain(|unsettled| unsettled.data_keys > 0);
    Ok(found)
}

impl<'a> Report<'a> {
    pub(super) fn new(
        context: &Context<'_>,
        findings: &'a Findings,
        manifest: &'a Complete,
        locked_key_groups: Vec<LockedGroup>,
    ) -> Result<Self, Failure> {
        let keystore = context.keystore;
        let mut needed = keystore.needed();
        needed.retain(|place| !context.locked.has(*place));
        let keys = keystore.state().files().flat_map(|(_, entry)| entry.keys.values());
        let keys = keys.filter(|key| needed.contains(&(key.scope, key.key_version)));
        Ok(Report {
            damage_found: findings.damaged > 0,
            data_keys: keys.count(),
            locked_key_groups,
            unsettled: missing(keystore)?,
            relations: Relations {
                files: findings.files,
                encrypted_pages: findings.sealed,
                plaintext_pages: findings.plaintext,
                empty_pages: findings.empty,
                shredded_pages: findings.shredded,
                locked_pages: findings.locked,
            },
            tags: Tags { bits_128: findings.full_tags, bits_20: findings.short_tags },
            wal: Wal {
                encrypted_pages: findings.wal_sealed,
                plaintext_pages: findings.wal_plaintext,
                records: findings.records,
            },
            manifest,
            damages: findings.damaged,
            damaged: &findings.listed,
            left_over: findings.left_over.iter().map(String::as_str).collect(),
            torn_pages: findings.torn,
            emptied_map_pages: findings.emptied,
            partial_blocks: findings.partial.iter().map(|place| visible(place)).collect(),
            incremental_files: findings.incremental,
            unknown: &findings.unknown,
            added_directories: &findings.added_directories,
            undecided: findings.undecided,
            undecided_segments: &findings.undecided_gaps,
            skipped: findings.skipped,
            shut_down: context.control.ended,
        })
    }

    pub(super) fn verdict(&self) -> Verdict {
        match self.locked_key_groups.iter().all(|group| group.accepted) {
            _ if self.damage_found => Verdict::Damaged,
            true => Verdict::Sound,
            false => Verdict::NotAll,
        }
    }

    /// Prints it for programs.
    pub(super) fn print_json(&self, out: &mut impl Write) -> Result<(), Failure> {
        let written = serde_json::to_writer_pretty(&mut *out, self).map_err(io::Error::from);
        written.and_then(|()| writeln!(out)).map_err(unprintable)
    }

    /// Prints it for people.
    pub(super) fn print(&self, out: &mut impl Write) -> Result<(), Failure> {
        self.counts(out).and_then(|()| self.faults(out)).map_err(unprintable)
    }

    fn counts(&self, out: &mut impl Write) -> io::Result<()> {
        let Report { data_keys, relations, tags, wal, .. } = self;
        let others = if self.locked_key_groups.is_empty() { "" } else { "; others are locked" };
        writeln!(
            out,
            "keys         {data_keys} data keys; all their database keys could be unwrapped{others}"
        )?;
        self.locked_key_groups.iter().try_for_each(|group| group.print(out))?;
        for Unsettled { file, data_keys } in &self.unsettled {
            writeln!(
                out,
                "unsettled    {data_keys} data keys in {DIRECTORY}/{file}, cut off at a server start and not in the key files. Replay of\n             WAL restores them. If WAL is permanently lost, use: pagevault-keyring restore-unsettled",
            )?;
        }
        writeln!(
            out,
            "relations    {} files: {} pages encrypted, {} in plaintext, {} empty, {} whose keys were destroyed",
            relations.files,
            relations.encrypted_pages,
            relations.plaintext_pages,
            relations.empty_pages,
            relations.shredded_pages
        )?;
        if relations.locked_pages > 0 {
            writeln!(
                out,
                "             {} encrypted pages were not decrypted: their key groups are locked",
                relations.locked_pages
            )?;
        }
        if tags.bits_128 + tags.bits_20 > 0 {
            writeln!(
                out,
                "authentic    {} encrypted pages, by tags of 128 bits; {} by tags of 20 bits",
                tags.bits_128, tags.bits_20
            )?;
        }
        writeln!(
            out,
            "WAL          {} pages encrypted, {} in plaintext; {} records",
            wal.encrypted_pages, wal.plaintext_pages, wal.records
        )?;
        match self.manifest {
            Complete::None => {
                writeln!(out, "manifest     none: that no file is missing was not checked")
            }
            Complete::Started => {
                writeln!(
                    out,
                    "manifest     not compared: a server was started here after the backup"
                )
            }
            Complete::Damaged => writeln!(out, "manifest     not compared: it is damaged"),
            Complete::Compared { files, ranges, seal } => {
                writeln!(
                    out,
                    "manifest     compared with {files} files and {} ranges of WAL",
                    ranges.len()
                )?;
                match seal {
                    Sealed::No => writeln!(
                        out,
                        "seal         none: who can write to the backup can have written the manifest"
                    ),
                    Sealed::Invalid => writeln!(out, "seal         not valid"),
                    Sealed::Yes { time, key_version } => writeln!(
                        out,
                        "seal         valid, made {time} with version {key_version} of the cluster's key"
                    ),
                }
            }
        }
    }

    /// What is no damage.
    fn notes(&self, out: &mut impl Write) -> io::Result<()> {
        if self.emptied_map_pages > 0 {
            let pages = self.emptied_map_pages;
            writeln!(
                out,
                "maps         {pages} damaged pages of free space or visibility maps, which PostgreSQL reads as empty"
            )?;
        }
        for place in self.partial_blocks.iter().take(LISTED) {
            writeln!(
                out,
                "partial      {place}: the file ends within it, as after a full disk; PostgreSQL ignores the rest"
            )?;
        }
        if self.partial_blocks.len() > LISTED {
            writeln!(out, "             and {} more", self.partial_blocks.len() - LISTED)?;
        }
        if self.incremental_files > 0 {
            let files = self.incremental_files;
            writeln!(
                out,
                "incremental  {files} files have only what has changed since an earlier backup. Their pages were not verified:\n             verify what pg_combinebackup makes of the backups"
            )?;
        }
        for what in self.unknown {
            writeln!(out, "unknown      {what}")?;
        }
        for path in self.added_directories.iter().take(LISTED) {
            writeln!(out, "added        {path}: a directory without files")?;
        }
        Ok(())
    }

    fn faults(&self, out: &mut impl Write) -> io::Result<()> {
        for damage in self.damaged {
            writeln!(out, "damaged      {damage}")?;
        }
        let listed = self.damaged.len() as u64;
        if self.damages > listed {
            writeln!(out, "             and {} more", self.damages - listed)?;
        }
        for file in self.left_over.iter().take(LISTED) {
            writeln!(
                out,
                "left over    {file}: belongs to no relation; created by a transaction that did not commit"
            )?;
        }
        if self.left_over.len() > LISTED {
            writeln!(out, "             and {} more", self.left_over.len() - LISTED)?;
        }
        if self.torn_pages > 0 {
            let pages = self.torn_pages;
            writeln!(
                out,
                "torn         {pages} pages that were being written; recovery replaces them"
            )?;
        }
        self.notes(out)?;
        if self.undecided > 0 {
            writeln!(
                out,
                "undecided    {} pages in plaintext or under former keys, in files that WAL encrypts, decrypts or rekeys: a server\n             that has replayed it refuses those that it does not explain. Verify again then",
                self.undecided
            )?;
        }
        for what in self.undecided_segments.iter().take(LISTED) {
            writeln!(
                out,
                "undecided    {what}. WAL makes the relation larger or smaller, or removes it. Verify again when it is\n             replayed"
            )?;
        }
        if self.undecided_segments.len() > LISTED {
            writeln!(out, "             and {} more", self.undecided_segments.len() - LISTED)?;
        }
        if self.skipped > 0 {
            let files = self.skipped;
            writeln!(
                out,
                "skipped      {files} files of unlogged relations, which recovery resets"
            )?;
        }
        if self.damages > 0 && !self.shut_down {
            writeln!(
                out,
                "             This is a backup or a standby, or its server was not shut down cleanly. Recovery replaces pages\n             that were being written, if all of its WAL is there. Start the server, shut it down, and verify again."
            )?;
        }
        conclude(&self.locked_key_groups, self.damages, out)
    }
}
