//! What is wanted of a relation, and what says so: the nearest label, or the setting.

use pagevault_cipher::CipherId;
use pgrx::pg_sys::Oid;

use super::label::Label;
use super::{catalogs, default_cipher, memo};
use crate::keys::shared;
use crate::pg::guc;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts, Kind};
use crate::pg::report::Result;

/// What is wanted, and why.
#[derive(Clone, Copy)]
pub(crate) struct Decision {
    pub(crate) label: Label,
    pub(crate) source: Source,
    /// The cipher of the relation it follows.
    like: Option<CipherId>,
}

/// What decides.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The label of the relation, or of the one it follows.
    Own(Oid),
    /// The label of something around it: partitioned table, schema, tablespace, database.
    Around(Object),
    /// It follows this relation, which is encrypted.
    Leader(Oid),
    /// The setting of this name.
    Setting(&'static str),
}

impl Source {
    /// Kind and name of what decides.
    pub(crate) fn describe(self) -> String {
        match self {
            Source::Own(oid) | Source::Leader(oid) => Object::relation(oid).describe(),
            Source::Around(object) => object.describe(),
            Source::Setting(name) => format!("setting {name}"),
        }
    }
}

impl Decision {
    pub(super) fn new(label: Label, source: Source) -> Decision {
        Decision { label, source, like: None }
    }

    /// True if the relation is to be sealed.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self.label, Label::Encrypted(_))
    }

    /// True if someone said of this very relation that it is not to be sealed. Anything less does not take
    /// encryption away from a relation that has it.
    pub(crate) fn is_plain_by_own_label(&self) -> bool {
        self.label == Label::Plain && matches!(self.source, Source::Own(_))
    }

    /// True if a relation that is written so is what is wanted.
    pub(crate) fn is_met_by(&self, current: Option<CipherId>) -> bool {
        match (self.label, current) {
            (Label::Encrypted(named), Some(cipher)) => named.is_none_or(|named| named == cipher),
            (Label::Encrypted(_), None) | (Label::Plain, Some(_)) => false,
            (Label::Plain, None) => true,
        }
    }

    /// The cipher that the label names.
    pub(crate) fn named_cipher(&self) -> Option<CipherId> {
        match self.label {
            Label::Encrypted(named) => named,
            Label::Plain => None,
        }
    }

    /// The cipher for a new file: the one that the label names, else that of the file it replaces, of the
    /// relation it follows, or the default.
    pub(crate) fn cipher(&self, replaced: Option<CipherId>) -> Result<CipherId> {
        self.named_cipher().or(replaced).or(self.like).map_or_else(default_cipher, Ok)
    }
}

/// What is wanted of a relation; `None` if nothing says.
pub(crate) fn wanted(facts: &Facts) -> Result<Option<Decision>> {
    wanted_in(facts, facts.tablespace)
}

/// As [`wanted`], for a file in this tablespace: the relation may be on its way there.
pub(crate) fn wanted_in(facts: &Facts, tablespace: Oid) -> Result<Option<Decision>> {
    match own_label(facts)? {
        Some(decision) => Ok(Some(decision)),
        None => wanted_without_own_label(facts, tablespace),
    }
}

/// As [`wanted_in`], as if the relation itself had no label.
pub(crate) fn wanted_without_own_label(facts: &Facts, tablespace: Oid) -> Result<Option<Decision>> {
    let Some(leader) = leader_of(facts)? else { return wanted_around(facts, tablespace) };
    let Some(leader) = relation::facts(leader) else { return Ok(None) };
    let decision = match facts.kind {
        // The original of a transient relation follows nothing, whatever it is called.
        Kind::Table | Kind::MaterializedView => match own_label(&leader)? {
            Some(decision) => Some(decision),
            None => wanted_around(&leader, tablespace)?,
        },
        // Indexes and sequences may lie elsewhere than their table.
        Kind::Index | Kind::Sequence => wanted(&leader)?,
        _ => wanted_in(&leader, tablespace)?,
    };
    Ok(follow(&leader, decision))
}

/// What follows an encrypted relation is encrypted, unless the label of that relation says otherwise.
fn follow(leader: &Facts, decision: Option<Decision>) -> Option<Decision> {
    let like = shared::current_cipher(leader.file).filter(|_| leader.kind.has_storage());
    let firm = decision.is_some_and(|d| d.is_encrypted() || d.is_plain_by_own_label());
    if like.is_some() && !firm {
        let decision = Decision::new(Label::Encrypted(None), Source::Leader(leader.oid));
        return Some(Decision { like, ..decision });
    }
    decision.map(|decision| Decision { like: like.or(decision.like), ..decision })
}

fn own_label(facts: &Facts) -> Result<Option<Decision>> {
    if !facts.user_made || !takes_labels(facts.kind) {
        return Ok(None);
    }
    let label = memo::label_of(Object::relation(facts.oid))?;
    Ok(label.map(|label| Decision::new(label, Source::Own(facts.oid))))
}

fn wanted_around(facts: &Facts, tablespace: Oid) -> Result<Option<Decision>> {
    let parent = if facts.is_partition { memo::parent_of(facts.oid)? } else { None };
    wanted_below(parent, facts, tablespace)
}

/// What is said around a relation that follows no other: by the partitioned table `parent` and those above
/// it, schema, tablespace, database, setting.
pub(crate) fn wanted_below(
    mut parent: Option<Oid>,
    facts: &Facts,
    tablespace: Oid,
) -> Result<Option<Decision>> {
    if !facts.user_made {
        return catalogs::wanted(facts);
    }
    while let Some(oid) = parent {
        if let Some(decision) = label_around(Object::relation(oid))? {
            return Ok(Some(decision));
        }
        parent = match relation::facts(oid) {
            Some(table) if table.is_partition => memo::parent_of(oid)?,
            _ => None,
        };
    }
    match label_around(Object::schema(facts.schema))? {
        Some(decision) => Ok(Some(decision)),
        None => wanted_of_place(tablespace),
    }
}

/// What tablespace, database and setting say.
pub(crate) fn wanted_of_place(tablespace: Oid) -> Result<Option<Decision>> {
    match label_around(Object::tablespace(tablespace))? {
        Some(decision) => Ok(Some(decision)),
        None => wanted_of_database(),
    }
}

/// What database and setting say.
pub(crate) fn wanted_of_database() -> Result<Option<Decision>> {
    Ok(label_around(Object::my_database())?.or_else(setting))
}

/// What `pagevault.default_encryption` says: on, or nothing.
pub(crate) fn setting() -> Option<Decision> {
    guc::default_encryption().then(|| {
        Decision::new(Label::Encrypted(None), Source::Setting("pagevault.default_encryption"))
    })
}

fn label_around(object: Object) -> Result<Option<Decision>> {
    let label = memo::label_of(object)?;
    Ok(label.map(|label| Decision::new(label, Source::Around(object))))
}

/// The kinds of relations that labels are put on.
pub(crate) fn takes_labels(kind: Kind) -> bool {
    matches!(kind, Kind::Table | Kind::MaterializedView | Kind::Sequence | Kind::PartitionedTable)
}

/// The relation whose choice a relation follows.
pub(crate) fn leader_of(facts: &Facts) -> Result<Option<Oid>> {
    Ok(match facts.kind {
        Kind::Index => facts.indexed_table.or_else(|| relation::table_of_index(facts.oid)),
        Kind::Toast => oid_after(&facts.name, "pg_toast_"),
        Kind::Sequence => memo::owner_of(facts.oid)?,
        Kind::Table => facts.rewrites.or_else(|| repacked(facts)),
        Kind::MaterializedView => facts.rewrites,
        Kind::PartitionedTable | Kind::WithoutStorage => None,
    })
}

/// The table that pg_repack fills anew, or logs the changes of, in a relation of its schema. In the end the two
/// exchange their files, and no command tells that to anyone; so what is filled must be as the original from
/// the start. Only who may create tables in that schema, a superuser, can make use of the name.
fn repacked(facts: &Facts) -> Option<Oid> {
    let oid = oid_after(&facts.name, "table_").or_else(|| oid_after(&facts.name, "log_"))?;
    (relation::schema_name(facts) == "repack").then_some(oid)
}

fn oid_after(name: &str, prefix: &str) -> Option<Oid> {
    name.strip_prefix(prefix)?.parse::<u32>().ok().map(Oid::from)
}
