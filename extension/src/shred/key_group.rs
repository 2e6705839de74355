//! Shredding a key group.

use std::collections::BTreeSet;
use std::time::Duration;

use pagevault_core::policy::Named;
use pagevault_keystore::{KeyGroup, RelFile};
use pgrx::pg_sys::{ForkNumber, Oid};
use pgrx::{PgSqlErrorCode as Code, Spi};

use super::{
    Shredded, left_behind, relations, require_confirmation, require_directories, require_dropped,
};
use crate::keys::store::{directory, former};
use crate::keys::usage::destruction::{self, Former, Outcome};
use crate::keys::usage::key_groups as groups;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::pg::{buffers, catalog, compat, locks, process, relation_files, session, survey, xact};
use crate::policy::{self, label, memo};
use crate::writers::{self, Activity};
use crate::{audit, fault, verify};

/// Shreds a key group: destroys the keys of its relations in this database, of its files that are
/// gone, and its own key.
///
/// The relations are destroyed by one record, before the key of the group is. If the server stops
/// in between, the function can be called again. Meanwhile no other storage comes into the group.
pub(crate) fn shred(by: &str, name: &str, confirm: &str) -> Result<Shredded> {
    let group = groups::require(name)?;
    require_confirmation(name, confirm)?;
    let _shredding = groups::Shredding::begin(group)?;
    fault::point("shred.group_begun");
    // Wait for processes that have created a key and are about to create its file.
    writers::await_others(Activity::Creating, None)?;
    remove_dropped_files()?;
    let contents = groups::contents_of(group)?;
    let here = process::my_database();
    let is_dropped = former::recorded()?;
    // What does not exist may be on a file system that is not mounted. Here the catalog is asked.
    let elsewhere = |file: &&RelFile| {
        file.database != here
            && (relation_files::may_exist(**file)
                || catalog::database_name(file.database).is_some() && !is_dropped(**file))
    };
    let elsewhere: BTreeSet<u32> =
        contents.files.iter().filter(elsewhere).map(|file| file.database).collect();
    if !elsewhere.is_empty() {
        let name_of = |oid: &u32| match catalog::database_name(*oid) {
            Some(name) => format!("\"{name}\""),
            None => format!("with the OID {oid}"),
        };
        let databases: Vec<_> = elsewhere.iter().map(name_of).collect();
        return Err(Report::new(
            Code::ERRCODE_OBJECT_IN_USE,
            format!("key group \"{name}\" has relations in other databases"),
        )
        .detail(format!("Databases: {}. Nothing was destroyed.", databases.join(", ")))
        .hint("Shred or drop them there first: pagevault.shred_schema() or pagevault.shred_database(). After DROP, use pagevault.shred_former_files() there."));
    }
    require_all_directories(&contents)?;
    let orphans = orphans(name, &contents)?;
    require_as_labelled(group, name)?;
    require_moved_elsewhere(group, name)?;
    let roots = roots_in(group)?;
    groups::require_none_kept(group)?;
    let object = format!("key group \"{name}\"");
    // Waiting for locks takes as long as readers like. Labels may have changed since, or a relation
    // has moved, and those that follow it are where they were.
    let require = |members: &[&Facts]| {
        let is_outside =
            |member: &&&Facts| directory::current_key_group(member.file) != Some(group);
        if let Some(stranger) = members.iter().find(is_outside) {
            return Err(partly(&object, &relation::quoted_name(stranger)));
        }
        if groups::require(name)? != group || !locks::keep_labels() {
            return Err(changing(name, "shredded"));
        }
        memo::forget();
        require_as_labelled(group, name)
    };
    let mut shredded = if roots.is_empty() {
        locks::lock_key_management();
        require(&[])?;
        Shredded::nothing()
    } else {
        relations(by, &object, &roots, |_| true, require)?
    };
    // What was destroyed cannot be rolled back, so a session that is cancelled finishes the rest.
    let ended = process::without_interrupts(|| {
        fault::point("shred.group_relations_destroyed");
        destroy_orphans(&orphans, &mut shredded.outcome)?;
        // Others may have been dropped meanwhile.
        remove_dropped_files()?;
        end(group)
    });
    let outcome = ended.as_ref().map_or_else(Report::message, |_| "ok");
    let files = *ended.as_ref().unwrap_or(&0);
    let destruction = audit::Destruction { object: &object, files, data_keys: 0, outcome };
    audit::log_destruction(&session::identity(), by, &destruction);
    ended.map_err(|report| match shredded.outcome.files.is_empty() {
        true => report,
        false => after_relations(report, &object),
    })?;
    shredded.key_group = Some(name.to_owned());
    Ok(shredded)
}

/// Drops a key group that nothing is in. Labels of transactions that have not ended could bring
/// relations into it, which would not be encrypted then.
pub(crate) fn drop_empty(name: &str) -> Result<()> {
    let group = groups::require(name)?;
    if !locks::keep_labels() {
        return Err(changing(name, "dropped"));
    }
    groups::end(group, &[])
}

/// Ends a group with nothing but keys of files that are gone. Returns the number of these files.
fn end(group: KeyGroup) -> Result<usize> {
    let contents = groups::contents_of(group)?;
    require_all_directories(&contents)?;
    let mut gone = destruction::former_among(contents.files.iter().chain(&contents.left))?;
    gone.retain(Former::is_gone);
    require_dropped(&gone)?;
    groups::end(group, &gone).map(|()| gone.len())
}

/// What prevents the end of a group when its relations have been destroyed.
fn after_relations(report: Report, object: &str) -> Report {
    let detail = report.detail_text().replace(NOTHING, "").replace("Nothing was changed.", "");
    let detail = detail.trim().to_owned();
    let report = report.prefixed(&format!("the relations of {object} are destroyed, not its key"));
    if detail.is_empty() { report } else { report.detail(detail) }
}

/// The sentence of errors that came in time.
const NOTHING: &str = "Nothing was destroyed.";

fn require_all_directories(contents: &groups::Contents) -> Result<()> {
    let all = || contents.files.iter().chain(&contents.left);
    let databases: BTreeSet<u32> = all().map(|file| file.database).collect();
    databases.into_iter().try_for_each(|database| {
        require_directories(database, all().copied().filter(|file| file.database == database))
    })
}

/// Refuses to leave what the label of a tablespace puts into the group and is in another database,
/// where it cannot be seen whether its own labels say otherwise.
fn require_moved_elsewhere(group: KeyGroup, name: &str) -> Result<()> {
    let here = process::my_database();
    for tablespace in catalog::tablespaces() {
        let label = Object::tablespace(tablespace).label();
        let named = label.as_ref().map(label::key_group_in).transpose()?.flatten();
        if named.as_deref() != Some(name) {
            continue;
        }
        for database in catalog::all_databases().into_iter().map(Oid::to_u32) {
            let is_outside = |file: &RelFile| {
                directory::current_key_group(*file) != Some(group)
                    && !directory::is_destroyed(*file)
                    && !relation_files::is_empty(*file)
            };
            if database == here
                || !verify::files_in(database, tablespace.to_u32())?.iter().any(is_outside)
            {
                continue;
            }
            let shown = catalog::database_name(database).unwrap_or_default();
            return Err(Report::new(
                Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                format!("key group \"{name}\" is not what labels say"),
            )
            .detail(format!("{} is labelled with the key group, and database \"{shown}\" has files there that are not in it. {NOTHING}", Object::tablespace(tablespace).describe()))
            .hint("Bring them into the group first: see pagevault.drift in that database, and use pagevault.reconcile(). If they are to stay, remove the label of the tablespace."));
        }
    }
    Ok(())
}

/// Files of relations that were dropped exist until the next checkpoint (`mdunlink`, md.c).
fn remove_dropped_files() -> Result<()> {
    session::as_owner_of_the_cluster(|| Spi::run("CHECKPOINT")).map_err(Report::from)
}

/// The error if it cannot be said what is in the group.
fn changing(name: &str, change: &str) -> Report {
    Report::new(
        Code::ERRCODE_OBJECT_IN_USE,
        format!("labels are being changed while key group \"{name}\" is to be {change}"),
    )
    .detail("A transaction that has not ended has changed labels, or the group was changed. Nothing was destroyed.")
    .hint("Try again when it has ended: see pg_locks, and pg_prepared_xacts.")
}

/// How long the transactions that run may take to end, if one of them may be making a file.
const PATIENCE: Duration = Duration::from_secs(5);

/// Existing files that no relation has: a crash has left them. Those under the key of the group,
/// which cannot end without them; and those under no group's. Storage of which it is not known to
/// which group it belongs is under the key of the database until its command ends
/// ([`crate::commands::altered`]), so one of them may hold rows of this group.
///
/// # Errors
/// If a transaction may be making one of those under the key of the group.
fn orphans(name: &str, contents: &groups::Contents) -> Result<Vec<RelFile>> {
    let is_under = |file: &RelFile| contents.files.contains(file) || contents.left.contains(file);
    let is_in_none = |file: &RelFile| directory::current_key_group(*file).is_none();
    let mut found = left_behind()?;
    found.retain(|file| is_under(file) || directory::is_sealed(*file) && is_in_none(file));
    if found.is_empty() {
        return Ok(found);
    }
    // Whoever has created a file by now has its row in the catalog, or has ended.
    let running = xact::running_in_database();
    let have_ended = process::is_so_within(PATIENCE, || running.have_ended());
    let known = survey::files_in_catalog();
    let may_be_made = |file: &RelFile| !have_ended || known.contains(file);
    let Some(file) = found.iter().copied().find(|file| is_under(file) && may_be_made(file)) else {
        // The others are named in the result.
        found.retain(|file| !may_be_made(file));
        return Ok(found);
    };
    let path = compat::relation_path(file, ForkNumber::MAIN_FORKNUM);
    Err(Report::new(
        Code::ERRCODE_OBJECT_IN_USE,
        format!("key group \"{name}\" has a file that no relation has"),
    )
    .detail(format!(
        "A transaction that has not ended may be making {path}. Nothing was destroyed."
    ))
    .hint("Try again when other transactions in this database, prepared ones too, have ended: see xact_start in pg_stat_activity, and pg_prepared_xacts."))
}

/// Destroys the keys of files that no relation has.
fn destroy_orphans(found: &[RelFile], outcome: &mut Outcome) -> Result<()> {
    if found.is_empty() {
        return Ok(());
    }
    buffers::drop_files(found);
    let mut destroyed = destruction::destroy(process::my_database(), found, &[], false)?;
    let failure = destroyed.failure();
    outcome.files.extend(destroyed.files);
    outcome.wrapped_by.extend(destroyed.wrapped_by);
    outcome.same_keys.extend(destroyed.same_keys);
    outcome.perhaps_same_keys.extend(destroyed.perhaps_same_keys);
    outcome.lsn = destroyed.lsn;
    failure.map_or(Ok(()), Err)
}

/// Refuses to destroy what no label puts into the group, and to leave what labels put into it and
/// is somewhere else. The first may be in it by a label that was removed, the second has not been
/// moved.
fn require_as_labelled(group: KeyGroup, name: &str) -> Result<()> {
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if !facts.is_stored() || facts.temporary || directory::is_destroyed(facts.file) {
            continue;
        }
        let is_in_it = directory::current_key_group(facts.file) == Some(group);
        let is_named = policy::named_key_group(&facts)? == Some(Named::Group(group));
        let (problem, hint) = match (is_in_it, is_named) {
            (true, false) => (
                "is in it, and no label says so",
                "If it is to be destroyed, say so by a label with the key group on the relation or its schema. If not, bring it out of the group: SECURITY LABEL ... IS 'encrypted'.",
            ),
            (false, true) if policy::wanted_encrypted(&facts)?.is_some() => (
                "is not in it yet, though a label says that it is to be",
                "Bring it into the group first: see pagevault.drift, and use pagevault.reconcile(). Or change the label.",
            ),
            _ => continue,
        };
        let shown = relation::quoted_name(&policy::root_of(&facts)?);
        return Err(Report::new(
            Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("key group \"{name}\" is not what labels say"),
        )
        .detail(format!("{shown} {problem}. Nothing was destroyed."))
        .hint(hint));
    }
    Ok(())
}

/// The relations of this database that have files under the key of a group, without those that
/// follow others.
fn roots_in(group: KeyGroup) -> Result<Vec<Oid>> {
    let mut roots = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if !facts.is_stored() || directory::current_key_group(facts.file) != Some(group) {
            continue;
        }
        let owner = match facts.kind {
            RelationKind::Sequence => relation::owner_of_sequence(facts.oid),
            _ => None,
        };
        let root = match owner.and_then(relation::facts) {
            // Its partitions may be in other groups.
            Some(owner) if owner.kind == RelationKind::PartitionedTable => facts.oid,
            Some(owner) => owner.oid,
            None => policy::root_of(&facts)?.oid,
        };
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
    Ok(roots)
}

/// The error for what would be destroyed together with relations of a key group.
fn partly(group: &str, stranger: &str) -> Report {
    Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("relations of {group} are partly outside of it"),
    )
    .detail(format!("{stranger} is not in it, and would be destroyed as well. Nothing was destroyed."))
    .hint("Bring all of it into one key group first: see pagevault.drift, and use pagevault.reconcile().")
}
