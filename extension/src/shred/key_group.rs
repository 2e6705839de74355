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
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::pg::{buffers, catalog, compat, process, relation_files, session, survey, xact};
use crate::writers::{self, Activity};
use crate::{audit, fault, policy};

/// Shreds a key group: destroys the keys of its relations in this database, of its files that are
/// gone, and its own key.
///
/// The relations are destroyed by one record, before the key of the group is. If the server stops
/// in between, the function can be called again.
pub(crate) fn shred(by: &str, name: &str, confirm: &str) -> Result<Shredded> {
    let group = groups::require(name)?;
    require_confirmation(name, confirm)?;
    // Files dropped since the last checkpoint may still exist.
    session::as_owner_of_the_cluster(|| Spi::run("CHECKPOINT"))?;
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
    let orphans = orphans(name, &contents)?;
    require_as_labelled(group, name)?;
    let roots = roots_in(group)?;
    groups::require_none_kept(group)?;
    let object = format!("key group \"{name}\"");
    let mut shredded = if roots.is_empty() {
        Shredded::nothing()
    } else {
        // Labels may have changed, or a relation has moved, and those that follow it are where they
        // were.
        let require = |member: &Facts| match directory::current_key_group(member.file) {
            Some(its) if its == group => Ok(()),
            _ => Err(partly(&object, &relation::quoted_name(member))),
        };
        relations(by, &object, &roots, |_| true, require)?
    };
    fault::point("shred.group_relations_destroyed");
    destroy_orphans(&orphans, &mut shredded.outcome)?;
    let contents = groups::contents_of(group)?;
    let left = || contents.files.iter().chain(&contents.left);
    let databases: BTreeSet<u32> = left().map(|file| file.database).collect();
    for database in databases {
        require_directories(database, left().copied().filter(|file| file.database == database))?;
    }
    let mut gone = destruction::former_among(left())?;
    // Wait for processes that have created a key and are about to create its file.
    writers::await_others(Activity::Creating, None)?;
    gone.retain(Former::is_gone);
    require_dropped(&gone)?;
    let ended = groups::end(group, &gone);
    let outcome = ended.as_ref().map_or_else(Report::message, |()| "ok");
    let destruction =
        audit::Destruction { object: &object, files: gone.len(), data_keys: 0, outcome };
    audit::log_destruction(&session::identity(), by, &destruction);
    ended?;
    shredded.key_group = Some(name.to_owned());
    Ok(shredded)
}

/// How long the transactions that run may take to end, if one of them may be making a file.
const PATIENCE: Duration = Duration::from_secs(5);

/// Existing files under the key of the group that no relation has: a crash has left them. The group
/// cannot end without them.
///
/// # Errors
/// If a transaction may be making one of them.
fn orphans(name: &str, contents: &groups::Contents) -> Result<Vec<RelFile>> {
    let is_under = |file: &RelFile| contents.files.contains(file) || contents.left.contains(file);
    let mut found = left_behind()?;
    found.retain(is_under);
    let Some(&first) = found.first() else { return Ok(found) };
    // Whoever has created a file by now has its row in the catalog, or has ended.
    let running = xact::running_in_database();
    let have_ended = process::is_so_within(PATIENCE, || running.have_ended());
    let known = survey::files_in_catalog();
    let made = found.iter().find(|file| known.contains(file)).copied();
    let Some(file) = made.or((!have_ended).then_some(first)) else { return Ok(found) };
    let path = compat::relation_path(file, ForkNumber::MAIN_FORKNUM);
    Err(Report::new(
        Code::ERRCODE_OBJECT_IN_USE,
        format!("key group \"{name}\" has a file that no relation has"),
    )
    .detail(format!(
        "A transaction that has not ended may be making {path}. Nothing was destroyed."
    ))
    .hint("Try again when other transactions in this database, prepared ones too, have ended."))
}

/// Destroys the keys of files that no relation has.
fn destroy_orphans(found: &[RelFile], outcome: &mut Outcome) -> Result<()> {
    if found.is_empty() {
        return Ok(());
    }
    buffers::drop_files(found);
    let destroyed = destruction::destroy(process::my_database(), found, &[], false)?;
    outcome.files.extend(destroyed.files);
    outcome.wrapped_by.extend(destroyed.wrapped_by);
    outcome.same_keys.extend(destroyed.same_keys);
    outcome.lsn = destroyed.lsn;
    destroyed.not_compacted.map_or(Ok(()), Err)
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
        return Err(Report::new(
            Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            format!("key group \"{name}\" is not what labels say"),
        )
        .detail(format!("{} {problem}. Nothing was destroyed.", relation::quoted_name(&facts)))
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
