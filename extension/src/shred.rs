//! Shredding: destroying the data keys of relations, of a schema, a key group or a database, so
//! that their data cannot be read again.
//!
//! The relations are locked as for DROP, before key management is: waiting for their readers holds
//! up nobody who changes keys. Dirty pages are written, and all pages on disk are
//! checked, because destroying keys does not destroy plaintext pages. The pages are dropped from
//! shared buffers, and the keys are destroyed ([`crate::keys::usage::destruction`]). The relations
//! stay in the catalog, with unreadable files: the user chooses between DROP and TRUNCATE, and
//! views and grants survive until then.
//!
//! Nothing of this can be rolled back. Ordinary changes, the deletion of statistics, are committed
//! by another process before the first key is destroyed. What deleted rows leave in the pages of
//! statistics is also cleared before that ([`remnants`]).

pub(crate) mod key_group;

use std::collections::HashSet;
use std::path::Path;

use pagevault_keystore::{DataKeyVersion, RelFile};
use pgrx::pg_sys::{self, Oid};
use pgrx::{PgSqlErrorCode as Code, Spi};

use crate::keys::store::directory;
use crate::keys::usage::destruction::{self, Former, Outcome};
use crate::keys::usage::dropped;
use crate::pg::inheritance;
use crate::pg::locks::KeystoreLock;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::pg::statistics::Sampled;
use crate::pg::survey::{self, Survey};
use crate::pg::text::ServerText;
use crate::pg::{buffers, catalog, compat, locks, process, session};
use crate::rekey::jobs;
use crate::remnants::{self, Cleared};
use crate::verify::{self, PageState};
use crate::writers::{self, Activity};
use crate::{audit, fault, workers};

const LOCK: pg_sys::LOCKMODE = pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE;

/// Result of shredding.
pub(crate) struct Shredded {
    /// Names of the files' relations, if they have any.
    pub(crate) names: Vec<(RelFile, String)>,
    pub(crate) outcome: Outcome,
    /// Number of deleted rows of statistics; `None` if there was nothing to search.
    pub(crate) statistics: Option<i64>,
    /// The files of statistics, and the result of clearing deleted rows in them.
    pub(crate) cleared: Vec<Cleared>,
    /// Number of plaintext files of a database, which are not destroyed.
    pub(crate) plaintext_files: usize,
    /// The files do not exist any more.
    pub(crate) are_gone: bool,
    /// The key group that has ended.
    pub(crate) key_group: Option<String>,
}

impl Shredded {
    fn nothing() -> Shredded {
        Shredded {
            names: Vec::new(),
            outcome: Outcome::nothing(),
            statistics: None,
            cleared: Vec::new(),
            plaintext_files: 0,
            are_gone: true,
            key_group: None,
        }
    }
}

/// Shreds a relation and those that follow it.
pub(crate) fn relation(by: &str, oid: Oid, confirm: &str) -> Result<Shredded> {
    let facts = relation::require(oid)?;
    let name = relation::qualified_name(oid);
    require_confirmation(&name, confirm)?;
    if !facts.user_made {
        return Err(not_supported(&name, "is part of the system"));
    }
    if !leads(&facts) {
        return Err(not_supported(&name, "goes along with another relation, or holds nothing")
            .hint("Shred the table that it belongs to."));
    }
    relations(by, &name, &[oid], |facts| relation::quoted_name(facts) == name, |_| Ok(()))
}

/// True for relations that are not shredded together with another one, partitions excepted.
fn leads(facts: &Facts) -> bool {
    let has_owner = || relation::owner_of_sequence(facts.oid).is_some();
    relation::is_independent(facts) && !(facts.kind == RelationKind::Sequence && has_owner())
}

/// Shreds all relations of a schema.
pub(crate) fn schema(by: &str, oid: Oid, confirm: &str) -> Result<Shredded> {
    let name = catalog::schema_name(oid).ok_or_else(|| {
        Report::new(
            Code::ERRCODE_INVALID_SCHEMA_NAME,
            format!("schema with OID {} does not exist", oid.to_u32()),
        )
    })?;
    require_confirmation(&name, confirm)?;
    const PUBLIC: u32 = 2200;
    let of_the_system = oid.to_u32() < pg_sys::FirstNormalObjectId && oid.to_u32() != PUBLIC;
    if of_the_system {
        return Err(not_supported(&format!("schema {name}"), "is part of the system"));
    }
    let members = relation::all().into_iter().filter_map(relation::facts);
    let roots: Vec<Oid> = members
        .filter(|facts| facts.schema == oid && !facts.temporary && leads(facts))
        .map(|facts| facts.oid)
        .collect();
    if roots.is_empty() {
        return Err(Report::new(
            Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("schema {name} holds no relation to shred"),
        ));
    }
    let is_there =
        |root: &Facts| root.schema == oid && catalog::schema_name(oid).as_ref() == Some(&name);
    relations(by, &format!("schema {name}"), &roots, is_there, |_| Ok(()))
}

/// `is_meant` checks, under the lock, whether one of the `roots` is still what was confirmed;
/// `require` whether they, and what follows them, may be destroyed.
fn relations(
    by: &str,
    object: &str,
    roots: &[Oid],
    is_meant: impl Fn(&Facts) -> bool,
    require: impl Fn(&[&Facts]) -> Result<()>,
) -> Result<Shredded> {
    let members = lock_members(roots)?;
    locks::lock_key_management();
    let is_other = |facts: &&Facts| roots.contains(&facts.oid) && !is_meant(facts);
    if let Some(other) = members.iter().find(is_other) {
        return Err(changed(&relation::quoted_name(other)));
    }
    let oids: Vec<Oid> = members.iter().map(|facts| facts.oid).collect();
    if let Some(job) = jobs::any_unfinished(&with_ancestors(&oids))? {
        return Err(Report::new(
            Code::ERRCODE_OBJECT_IN_USE,
            format!("{object} is being rekeyed"),
        )
        .detail(format!("Rekey job {job} is not finished."))
        .hint(format!("Wait with pagevault.wait_for_rekey({job}), or end it with pagevault.cancel_rekey({job}).")));
    }
    let stored: Vec<&Facts> = members.iter().filter(|facts| facts.kind.has_storage()).collect();
    if stored.is_empty() {
        return Err(not_supported(object, "holds nothing"));
    }
    require(&stored)?;
    for facts in &stored {
        buffers::flush_relation(facts.oid);
        require_sealed(facts)?;
    }
    // Looking at all pages may have taken long.
    require(&stored)?;
    let statistics = delete_statistics(&oids)?;
    fault::point("shred.forgotten");
    let cleared = remnants::clear_statistics()?;
    let files: Vec<RelFile> = stored.iter().map(|facts| facts.file).collect();
    buffers::drop_files(&files);
    let outcome =
        destruction::destroy(process::my_database(), &files, &former_keys(&cleared), false);
    let names = stored.iter().map(|facts| (facts.file, relation::quoted_name(facts))).collect();
    finish(by, object, outcome, |outcome| Shredded {
        names,
        outcome,
        statistics: Some(statistics),
        cleared,
        plaintext_files: 0,
        are_gone: false,
        key_group: None,
    })
}

/// The former key versions of cleared files.
fn former_keys(cleared: &[Cleared]) -> Vec<(RelFile, DataKeyVersion)> {
    cleared.iter().filter_map(|one| Some((one.file, one.last_former_version()?))).collect()
}

/// Locks the relations, their partitions and followers against all access. Partitioned tables are
/// locked first, so that no partition can be attached meanwhile.
fn lock_members(roots: &[Oid]) -> Result<Vec<Facts>> {
    let mut members: Vec<Facts> = Vec::new();
    let mut locked = HashSet::new();
    for &root in roots {
        let mut known = 0;
        loop {
            let tables = inheritance::with_partitions(root);
            if tables.len() == known {
                break;
            }
            known = tables.len();
            for table in tables {
                process::check_for_interrupts();
                if locked.insert(table.oid) {
                    members.extend(relation::family(table.oid, LOCK));
                }
            }
        }
    }
    let now: HashSet<Oid> = roots
        .iter()
        .flat_map(|&root| inheritance::with_partitions(root))
        .flat_map(|table| relation::family_unlocked(table.oid))
        .map(|facts| facts.oid)
        .collect();
    // An earlier holder of a lock may have detached a partition, or changed the owner of a
    // sequence.
    if let Some(other) = members.iter().find(|facts| !now.contains(&facts.oid)) {
        return Err(changed(&relation::quoted_name(other)));
    }
    if let Some(temporary) = members.iter().find(|facts| facts.temporary) {
        return Err(not_supported(
            &temporary.name.to_string(),
            "is temporary, and gone when its session ends",
        ));
    }
    Ok(members)
}

/// Adds all ancestors, of which there may be several: a job may concern a partitioned table above,
/// and statistics of tables above contain samples of those below.
fn with_ancestors(oids: &[Oid]) -> Vec<Oid> {
    let mut all: HashSet<Oid> = oids.iter().copied().collect();
    let mut next = oids.to_vec();
    while let Some(child) = next.pop() {
        next.extend(inheritance::parents(child).into_iter().filter(|parent| all.insert(*parent)));
    }
    all.into_iter().collect()
}

/// Checks that no page on disk is plaintext.
fn require_sealed(facts: &Facts) -> Result<()> {
    let plaintext: i64 = verify::count_pages_of(facts)?
        .iter()
        .filter(|count| count.state == PageState::Plaintext)
        .map(|count| count.pages)
        .sum();
    if directory::is_sealed(facts.file) && plaintext == 0 {
        return Ok(());
    }
    let name = relation::quoted_name(facts);
    let detail = match plaintext {
        0 => "It has no data key.".to_owned(),
        1 => "1 page of it is in plaintext on disk, and would stay readable.".to_owned(),
        pages => format!("{pages} pages of it are in plaintext on disk, and would stay readable."),
    };
    Err(Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("cannot shred {name}: it is not wholly encrypted"),
    )
    .detail(detail)
    .hint("Encrypt it first with pagevault.encrypt(). What was in plaintext once may still be found on the disk."))
}

/// Deletes statistics that contain sampled values. The deletion is committed before any key is
/// destroyed, because this session's transaction may still be rolled back by an error later in its
/// statement, or if its client disconnects.
fn delete_statistics(relations: &[Oid]) -> Result<i64> {
    let relations: HashSet<Oid> = relations.iter().copied().collect();
    let above = with_ancestors(&relations.iter().copied().collect::<Vec<_>>());
    let sampled = Sampled { relations, above: above.into_iter().collect() };
    let before = sampled.rows();
    if before == 0 {
        return Ok(0);
    }
    workers::statistics::delete_for_this_session()?;
    match sampled.rows() {
        0 => Ok(before as i64),
        rows => Err(Report::new(
            Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("{rows} rows of statistics could not be deleted"),
        )
        .detail("The background worker that was to do it has failed. Nothing was destroyed.")
        .hint("The server log tells why.")),
    }
}

/// Shreds a database without sessions: all data keys that it ever had.
pub(crate) fn database(by: &str, name: &ServerText, confirm: &str) -> Result<Shredded> {
    let found = catalog::database_oid(name);
    let name = &name.to_string();
    let oid = found.ok_or_else(|| {
        Report::new(
            Code::ERRCODE_INVALID_CATALOG_NAME,
            format!("database \"{name}\" does not exist"),
        )
    })?;
    require_confirmation(name, confirm)?;
    if oid.to_u32() == process::my_database() {
        return Err(in_use(name, "You are connected to it; connect to another one.".to_owned()));
    }
    let (sessions, prepared) = locks::lock_database(oid);
    if sessions + prepared > 0 {
        let detail = format!("Sessions: {sessions}. Prepared transactions: {prepared}.");
        return Err(in_use(name, detail));
    }
    locks::lock_key_management();
    let files = destruction::files_of_database(oid.to_u32())?;
    if files.is_empty() {
        return Err(Report::new(
            Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("database \"{name}\" has no data keys"),
        ));
    }
    buffers::flush_and_drop_database(oid);
    require_directories(oid.to_u32(), files.iter().copied())?;
    for &file in files.iter().filter(|file| directory::is_sealed(**file)) {
        let counts = verify::count_pages(file)?;
        if counts.iter().any(|count| count.state == PageState::Plaintext) {
            return Err(Report::new(
                Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!(
                    "cannot shred database \"{name}\": relation file {file} is not wholly encrypted"
                ),
            )
            .detail("Some of its pages are in plaintext on disk, and would stay readable.")
            .hint("Let its rekey job end: see pagevault.rekey_jobs in that database."));
        }
    }
    let plaintext_files = verify::plaintext_files(oid.to_u32())?;
    let outcome = destruction::destroy(oid.to_u32(), &files, &[], true);
    finish(by, &format!("database {name}"), outcome, |outcome| Shredded {
        names: Vec::new(),
        outcome,
        statistics: None,
        cleared: Vec::new(),
        plaintext_files,
        are_gone: false,
        key_group: None,
    })
}

/// Shreds the former files of this database: those of dropped relations, and those of relations
/// before they were rewritten. It is not known any more to which relations they belonged.
pub(crate) fn former_files(by: &str, confirm: &str) -> Result<Shredded> {
    let database = process::my_database();
    let name = catalog::database_name(database).unwrap_or_default().to_string();
    require_confirmation(&name, confirm)?;
    locks::lock_key_management();
    // Asked again when keys are destroyed; this is before anything is changed.
    destruction::require_no_backup(&KeystoreLock::acquire())?;
    // Files dropped since the last checkpoint may still exist.
    session::as_owner_of_the_cluster(|| Spi::run("CHECKPOINT"))?;
    let mut found = destruction::former_files(database)?;
    require_directories(database, found.iter().map(|former| former.file))?;
    // Wait for processes that have created a key and are about to create its file.
    writers::await_others(Activity::Creating, None)?;
    found.retain(Former::is_gone);
    require_dropped(&found)?;
    found.retain(Former::has_keys_of_its_own);
    if found.is_empty() {
        return Err(Report::new(
            Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("database \"{name}\" has no keys of files that are gone"),
        ));
    }
    // DROP has deleted the statistics of dropped relations.
    let cleared = remnants::clear_statistics()?;
    // Their pages left shared buffers when the files were removed.
    let outcome = destruction::destroy_former(database, &found, &former_keys(&cleared));
    finish(by, &format!("former files of database {name}"), outcome, |outcome| Shredded {
        names: Vec::new(),
        outcome,
        statistics: None,
        cleared,
        plaintext_files: 0,
        are_gone: true,
        key_group: None,
    })
}

/// Files of this database that no relation has: left by transactions that a crash aborted, which
/// may be copies of shredded data, or being created now.
pub(crate) fn left_behind() -> Result<Vec<RelFile>> {
    let known = Survey::make().relations().map(|facts| facts.file).collect();
    destruction::files_besides(process::my_database(), &known)
}

/// If a file system is not mounted, all its files would seem to be gone, with their pages.
fn require_directories(database: u32, files: impl Iterator<Item = RelFile>) -> Result<()> {
    let known: HashSet<u32> = catalog::tablespaces().into_iter().map(Oid::to_u32).collect();
    for tablespace in files.map(|file| file.tablespace).collect::<HashSet<_>>() {
        let directory = compat::database_path(database, tablespace);
        let of_all = Path::new(&directory).parent();
        if known.contains(&tablespace) && !of_all.is_some_and(Path::is_dir) {
            return Err(unknown_files(tablespace, "does not exist")
                .hint("Mount it, or drop the tablespace."));
        }
    }
    Ok(())
}

/// What does not exist, and has a relation, is somewhere else: on a file system that is not
/// mounted.
fn require_dropped(found: &[Former]) -> Result<()> {
    dropped::require_not_moved(found.iter().map(|former| former.file))?;
    let known = survey::files_in_catalog();
    let Some(missing) = found.iter().find(|former| known.contains(&former.file)) else {
        return Ok(());
    };
    Err(Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("relation file {} does not exist, though a relation has it", missing.file),
    )
    .detail("It is lost, or on a file system that is not mounted. Nothing was destroyed.")
    .hint("Mount it, or drop the relation."))
}

fn unknown_files(tablespace: u32, directory: &str) -> Report {
    Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the directory of tablespace {tablespace} {directory}"),
    )
    .detail("So it is not known which of its files are gone, and what the others hold. Nothing was destroyed.")
}

fn changed(name: &str) -> Report {
    Report::new(Code::ERRCODE_OBJECT_IN_USE, format!("{name} was changed meanwhile"))
        .detail("It is no part any more of what is to be shredded, or not under that name. Nothing was destroyed.")
        .hint("Check what is to be destroyed, and try again.")
}

fn in_use(name: &str, detail: String) -> Report {
    Report::new(
        Code::ERRCODE_OBJECT_IN_USE,
        format!("cannot shred database \"{name}\": it is in use"),
    )
    .detail(detail)
    .hint("Shred it as you would drop it: when nobody is connected to it.")
}

/// Writes the audit line, and raises an error if the key file still contains the keys.
fn finish(
    by: &str,
    object: &str,
    outcome: Result<Outcome>,
    shredded: impl FnOnce(Outcome) -> Shredded,
) -> Result<Shredded> {
    let who = session::identity();
    let (files, keys, result) = match &outcome {
        Ok(outcome) => {
            let keys = outcome.files.iter().map(|file| u64::from(file.keys)).sum();
            let failure = outcome.not_compacted.as_ref().or(outcome.not_overwritten.as_ref());
            let result = failure.map_or("ok", Report::message);
            (outcome.files.len(), keys, result)
        }
        Err(report) => (0, 0, report.message()),
    };
    let destruction = audit::Destruction { object, files, data_keys: keys, outcome: result };
    audit::log_destruction(&who, by, &destruction);
    let mut outcome = outcome?;
    match (outcome.not_compacted.take(), outcome.not_overwritten.take()) {
        (None, None) => Ok(shredded(outcome)),
        (None, Some(report)) => Err(Report::new(
            Code::ERRCODE_IO_ERROR,
            format!(
                "the keys of {object} are destroyed, but pages under interim keys are left: {}",
                report.message()
            ),
        )
        .detail("Recovery has written them while the key of a key group was locked. This server refuses them, but has the key that they are under.")
        .hint("Remove the cause. The server overwrites them within seconds then.")),
        (Some(report), _) => Err(Report::new(
            Code::ERRCODE_IO_ERROR,
            format!(
                "the keys of {object} are destroyed, but the key file still holds them: {}",
                report.message()
            ),
        )
        .detail("Nothing can be read with them by this server any more. Their wrapped copies are still in the file.")
        .hint("Remove the cause, then shred once more.")),
    }
}

/// Compares names as messages show them, so that users can type what a message says.
fn require_confirmation(name: &str, confirm: &str) -> Result<()> {
    if confirm == name {
        return Ok(());
    }
    Err(Report::new(
        Code::ERRCODE_INVALID_PARAMETER_VALUE,
        format!("{name} was not confirmed: nothing was destroyed"),
    )
    .detail("What is shredded can never be read again, so its name must be given twice.")
    .hint(format!("If that is what you want, use confirm => '{}'.", name.replace('\'', "''"))))
}

fn not_supported(name: &str, why: &str) -> Report {
    Report::new(Code::ERRCODE_WRONG_OBJECT_TYPE, format!("cannot shred {name}: it {why}"))
}
