//! `pagevault.enforce_encryption`: nothing becomes plaintext where the policy requires encryption.
//!
//! New storage follows the policy by itself. So two things are refused: removing a policy, and
//! moving a plaintext relation to a place where the policy requires encryption.

use pagevault_core::policy::precedence::Change;
use pagevault_core::policy::{Labelled, Policy, Relation};
use pgrx::PgSqlErrorCode;
use pgrx::pg_sys::Oid;

use super::labels;
use crate::pg::catalog::Database;
use crate::pg::guc;
use crate::pg::inheritance;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts, RelationKind};
use crate::pg::report::{Report, Result};
use crate::policy::label::Label;
use crate::policy::{Decision, Server, Source, describe, described, object_of, policy, root_of};

/// Refuses a plaintext relation for which the policy requires encryption. `schema`: where it was
/// before the command, and will be again.
pub(super) fn refuse_plaintext(facts: &Facts, schema: Oid) -> Result<()> {
    refuse_by(&policy_of(facts), facts, schema)
}

/// The policy for a relation. A partition whose detaching has begun is taken for one that is
/// detached: nothing else can follow.
fn policy_of(facts: &Facts) -> Policy<'static, Server> {
    let table = match facts.kind {
        RelationKind::Sequence => relation::owner_of_sequence(facts.oid),
        _ => Some(facts.oid),
    };
    match table.filter(|_| guc::enforce_encryption()).and_then(inheritance::half_detached) {
        Some(partition) => Policy::if_attached(&Server, partition.to_u32(), None),
        None => policy(),
    }
}

/// Where a relation was before a command has changed that.
#[derive(Clone, Copy)]
pub(super) enum Former {
    /// In this schema and tablespace.
    Place(Oid, Oid),
    /// It, or a table above it, or the owner of the sequence: this table was no partition.
    Detached(Oid),
    /// A sequence had another owner, or none.
    Owned,
}

/// Refuses a relation in plaintext by its own label that has come from elsewhere: the exception was
/// not made for where it is now.
pub(super) fn refuse_moved_exception(facts: &Facts, former: Former) -> Result<()> {
    let relation = described(facts);
    let mut entered = Vec::new();
    let before = match former {
        Former::Place(schema, tablespace) => {
            let (schema, tablespace) = (schema.to_u32(), tablespace.to_u32());
            let new_schema = (relation.schema != schema).then_some(relation.schema);
            let new_tablespace = (relation.tablespace != tablespace).then_some(relation.tablespace);
            entered.extend(new_schema.map(Labelled::Schema));
            entered.extend(new_tablespace.map(Labelled::Tablespace));
            policy_of(facts).required_without_label(&Relation { schema, tablespace, ..relation })?
        }
        Former::Detached(table) => {
            Policy::if_attached(&Server, table.to_u32(), None).required_without_label(&relation)?
        }
        Former::Owned => None,
    };
    match policy_of(facts).against_moving_plaintext(&relation, before, &entered)? {
        None => Ok(()),
        Some(decision) => Err(in_plaintext(facts, facts.schema, decision)?),
    }
}

/// Refuses sequences in plaintext by their own labels, of a table that was moved to another
/// tablespace and is encrypted by that. They keep their files.
pub(super) fn refuse_sequences_of_moved(moved: &Facts) -> Result<()> {
    let entered = [Labelled::Tablespace(moved.tablespace.to_u32())];
    let family = relation::family_unlocked(moved.oid);
    for sequence in family.iter().filter(|member| member.kind == RelationKind::Sequence) {
        let relation = described(sequence);
        let before = policy().required_without_label(&relation)?;
        if let Some(decision) = policy().against_moving_plaintext(&relation, before, &entered)? {
            return Err(in_plaintext(sequence, sequence.schema, decision)?);
        }
    }
    Ok(())
}

/// Refuses partitions in plaintext by their own labels, and such sequences, below a table that was
/// attached.
pub(super) fn refuse_attached_exceptions(table: Oid) -> Result<()> {
    let partitions = inheritance::with_partitions(table).into_iter();
    let mut members = partitions.flat_map(|member| relation::family_unlocked(member.oid));
    members.try_for_each(|member| refuse_moved_exception(&member, Former::Detached(table)))
}

/// Before the first transaction of DETACH ... CONCURRENTLY commits: refuses what is to be detached
/// by it. The names in the statement may mean other tables by now.
pub(super) fn refuse_detaching_begun() -> Result<()> {
    inheritance::half_detached_here().into_iter().try_for_each(refuse_detaching)
}

/// Refuses to remove the label `plaintext` where encryption is required without it.
pub(super) fn refuse_removal(labelled: &Facts) -> Result<()> {
    let oid = labelled.oid;
    let without = Policy::if_labelled(&Server, Labelled::Relation(oid.to_u32()), None);
    let members = with_sequences_of_partitioned(oid);
    members.iter().try_for_each(|member| refuse_by(&without, member, member.schema))
}

/// Refuses to detach a partition in plaintext from a table that allows it.
pub(super) fn refuse_detaching(partition: Oid) -> Result<()> {
    let detached = Policy::if_attached(&Server, partition.to_u32(), None);
    let members = with_sequences_of_partitioned(partition);
    members.iter().try_for_each(|member| refuse_by(&detached, member, member.schema))
}

/// A relation, its partitions on all levels, and the sequences of those that are partitioned and
/// have no file.
pub(super) fn with_sequences_of_partitioned(oid: Oid) -> Vec<Facts> {
    let mut members = inheritance::with_partitions(oid);
    let partitioned = members.iter().filter(|it| it.kind == RelationKind::PartitionedTable);
    let families = partitioned.flat_map(|table| relation::family_unlocked(table.oid));
    let sequences: Vec<Facts> = families.filter(|it| it.kind == RelationKind::Sequence).collect();
    members.extend(sequences);
    members
}

fn refuse_by(policy: &Policy<'_, Server>, facts: &Facts, schema: Oid) -> Result<()> {
    match policy.against_plaintext(&described(facts))? {
        None => Ok(()),
        Some(decision) => Err(in_plaintext(facts, schema, decision)?),
    }
}

/// The error for a relation in plaintext; `schema`: where it can be encrypted.
fn in_plaintext(facts: &Facts, schema: Oid, decision: Decision) -> Result<Report> {
    let (name, mut root) = (relation::quoted_name(facts), root_of(facts)?);
    if root.schema == facts.schema {
        root.schema = schema;
    }
    let message = format!("{name} would be in plaintext where encryption is enforced");
    let encrypt = labels::statement(&root);
    Ok(refused(&message, decision.source).hint(format!("Encrypt it first: {encrypt}.")))
}

/// Refuses a label of a relation that removes encryption from it or from one of its partitions.
pub(super) fn refuse_loss(facts: &Facts, name: &str, label: Option<Label>) -> Result<()> {
    if !guc::enforce_encryption() {
        return Ok(());
    }
    let relations: Vec<_> = inheritance::with_partitions(facts.oid).iter().map(described).collect();
    match policy().against_label(facts.oid.to_u32(), label, &relations)? {
        None => Ok(()),
        Some(present) => {
            Err(refused(&format!("the encryption of {name} is enforced"), present.source)
                .hint(TURN_OFF))
        }
    }
}

const TURN_OFF: &str = "A superuser may SET pagevault.enforce_encryption = off.";

/// The error for a label of a schema, tablespace or database that would remove encryption, in this
/// database or in another one. `otherwise_by` is what requires encryption without that label.
pub(super) fn loss(
    labelled: Labelled,
    change: Change,
    otherwise_by: Option<Source>,
    database: Option<&Database>,
) -> Report {
    let object = object_of(labelled);
    let said = match change.from {
        Some(Label::Encrypted(_)) => Some(Source::Around(labelled)),
        _ => otherwise_by,
    };
    let report = Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("the encryption of {} is enforced", object.describe()),
    );
    let mut detail = said.map(detail_of).unwrap_or_default();
    let other = database.filter(|database| {
        Object::database(database.oid) != object && database.oid != Object::my_database().oid
    });
    if let Some(database) = other {
        detail.push_str(&format!(" Relations of database \"{}\" would lose it.", database.name));
    }
    match database {
        Some(database) if !guc::enforce_encryption() => report.detail(detail).hint(format!(
            "pagevault.enforce_encryption is set for database \"{}\", where a superuser may turn it off with ALTER DATABASE.",
            database.name
        )),
        _ => report.detail(detail).hint(TURN_OFF),
    }
}

/// The error for raw copies of a database's files to a place where the policy requires encryption.
pub(super) fn plaintext_files(database: &str, tablespace: Oid, files: usize) -> Report {
    let tablespace = Object::tablespace(tablespace).describe();
    Report::new(
        PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
        format!("relations of database \"{database}\" would be in plaintext in {tablespace}, where encryption is enforced"),
    )
    .detail(format!("Their files are copied as they are. In plaintext: {files}."))
    .hint("Connect to the database that they are in, and encrypt them first: SELECT * FROM pagevault.encrypt_database().")
}

fn refused(message: &str, source: Source) -> Report {
    Report::new(PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE, message).detail(detail_of(source))
}

fn detail_of(source: Source) -> String {
    match source {
        Source::Own(_) | Source::Around(_) => {
            format!("The label of {} says encrypted.", describe(source))
        }
        Source::Leader(_) => format!("It follows {}, which is encrypted.", describe(source)),
        Source::Setting(setting) => format!("{} is on.", setting.name()),
    }
}
