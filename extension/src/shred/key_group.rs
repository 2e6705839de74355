//! Shredding a key group.

use std::collections::BTreeSet;

use pagevault_keystore::{KeyGroup, RelFile};
use pgrx::pg_sys::Oid;
use pgrx::{PgSqlErrorCode as Code, Spi};

use super::{Shredded, relations, require_confirmation, require_directories, require_dropped};
use crate::keys::usage::destruction::{self, Former};
use crate::keys::usage::key_groups as groups;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::pg::{catalog, process, relation_files, session};
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
    let elsewhere = |file: &&RelFile| file.database != here && relation_files::may_exist(**file);
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
        .hint("Shred or drop them there first: pagevault.shred_schema() or pagevault.shred_database()."));
    }
    let roots = roots_in(group)?;
    require_whole(&roots, group, name)?;
    groups::require_none_kept(group)?;
    let object = format!("key group \"{name}\"");
    let mut shredded = if roots.is_empty() {
        Shredded::nothing()
    } else {
        let is_meant = |facts: &Facts| stranger_in(facts, group).is_none();
        let require = |member: &Facts| match groups::of_file(member.file) {
            Some(its) if its == group => Ok(()),
            _ => Err(partly(&object, &relation::quoted_name(member))),
        };
        relations(by, &object, &roots, is_meant, require)?
    };
    fault::point("shred.group_relations_destroyed");
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

/// The relations of this database that have files under the key of a group, without those that
/// follow others.
fn roots_in(group: KeyGroup) -> Result<Vec<Oid>> {
    let mut roots = Vec::new();
    for facts in relation::all().into_iter().filter_map(relation::facts) {
        if !facts.is_stored() || groups::of_file(facts.file) != Some(group) {
            continue;
        }
        // That of a partitioned table goes alone: its partitions may be in other groups.
        let owner = match facts.kind {
            RelationKind::Sequence => relation::owner_of_sequence(facts.oid),
            _ => None,
        };
        let is_partitioned = |owner: &Oid| {
            let facts = relation::facts(*owner);
            facts.is_some_and(|facts| facts.kind == RelationKind::PartitionedTable)
        };
        let owner = owner.map(|owner| if is_partitioned(&owner) { facts.oid } else { owner });
        let root = match owner {
            Some(owner) => owner,
            None => policy::root_of(&facts)?.oid,
        };
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
    Ok(roots)
}

/// A relation that is not in a key group, among this one and those that follow it. It would be
/// destroyed together with them.
fn stranger_in(facts: &Facts, group: KeyGroup) -> Option<Facts> {
    let family = relation::family_unlocked(facts.oid).into_iter();
    let mut stored = family.filter(Facts::is_stored);
    stored.find(|member| groups::of_file(member.file) != Some(group))
}

/// Refuses to destroy what is not in the group, and what cannot be destroyed wholly. Labels may
/// have changed, or a relation has moved, and those that follow it are where they were.
fn require_whole(roots: &[Oid], group: KeyGroup, name: &str) -> Result<()> {
    for facts in roots.iter().copied().filter_map(relation::facts) {
        let Some(stranger) = stranger_in(&facts, group) else { continue };
        let (root, stranger) = (relation::quoted_name(&facts), relation::quoted_name(&stranger));
        return Err(partly(&format!("{root}, in key group \"{name}\","), &stranger));
    }
    Ok(())
}

fn partly(what: &str, stranger: &str) -> Report {
    Report::new(
        Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("{what} is partly outside of it"),
    )
    .detail(format!("{stranger} is not, and would be destroyed as well. Nothing was destroyed."))
    .hint("Bring all of it into one key group first: see pagevault.drift, and use pagevault.reconcile().")
}
