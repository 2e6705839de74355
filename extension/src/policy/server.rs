//! Implements the policy's [`Catalog`] with PostgreSQL's catalogs, and converts decisions to
//! PostgreSQL's objects. The decisions are made in `pagevault_core::policy`.

use pagevault_cipher::CipherId;
use pagevault_core::policy::relation::{named_for, squeezes};
use pagevault_core::policy::{Catalog, Labelled, Named, Policy, Relation, Sealing};
use pagevault_keystore::{KeyGroup, RelFile, Scope};
use pgrx::pg_sys::{self, Oid};

use super::label::{self, Label};
use super::memo;
use crate::keys::store::{directory, key_groups};
use crate::keys::usage::authenticated;
use crate::pg::labels::Object;
use crate::pg::relation::{self, Facts};
use crate::pg::report::{Report, Result};
use crate::pg::text::ServerText;
use crate::pg::{catalog, guc, process};

pub(crate) use pagevault_core::policy::{Decision, Setting, Source};

/// This server, as the session sees it.
pub(crate) struct Server;

/// The policy of this database.
pub(crate) fn policy() -> Policy<'static, Server> {
    Policy::of(&Server)
}

/// The facts about a relation that the policy needs.
pub(crate) fn described(facts: &Facts) -> Relation {
    Relation {
        oid: facts.oid.to_u32(),
        kind: facts.kind,
        user_made: facts.user_made,
        temporary: facts.temporary,
        owner: facts.owner.to_u32(),
        schema: facts.schema.to_u32(),
        tablespace: facts.tablespace.to_u32(),
        file: facts.file,
        is_partition: facts.is_partition,
        rewrites: facts.rewrites.map(Oid::to_u32),
        indexed_table: facts.indexed_table.map(Oid::to_u32),
        named_for: named_for(facts.kind, facts.name.bytes()),
        squeezes: squeezes(facts.kind, facts.name.bytes()),
    }
}

fn number(oid: Option<Oid>) -> Option<u32> {
    oid.map(Oid::to_u32)
}

impl Catalog for Server {
    type Error = Report;

    fn relation(&self, oid: u32) -> Result<Option<Relation>> {
        Ok(relation::facts(oid.into()).as_ref().map(described))
    }

    fn label_of(&self, object: Labelled) -> Result<Option<Label>> {
        memo::label_of(object_of(object))
    }

    fn key_group_of_label(&self, object: Labelled) -> Result<Option<Named>> {
        let named = memo::key_group_at(object_of(object))?;
        Ok(named.map(|group| group.map_or(Named::Missing(object), Named::Group)))
    }

    fn no_such_key_group(&self, of: Labelled) -> Report {
        let object = object_of(of);
        let name = object.label().and_then(|text| label::key_group_in(&text).ok().flatten());
        key_groups::missing(&name.unwrap_or_default())
            .detail(format!("The label of {} names it.", object.describe()))
            .hint("Change the label, or create the key group again with pagevault.create_key_group().")
    }

    fn key_group_of(&self, file: RelFile) -> Option<KeyGroup> {
        directory::current_key_group(file)
    }

    fn parent_of(&self, partition: u32) -> Result<Option<u32>> {
        memo::parent_of(partition.into()).map(number)
    }

    fn table_of_index(&self, index: u32) -> Result<Option<u32>> {
        Ok(number(relation::table_of_index(index.into())))
    }

    fn owner_of_sequence(&self, sequence: u32) -> Result<Option<u32>> {
        memo::owner_of(sequence.into()).map(number)
    }

    fn is_schema_of_pg_repack(&self, schema: u32) -> Result<bool> {
        Ok(catalog::is_schema_of_extension(schema.into(), c"pg_repack"))
    }

    fn is_superuser(&self, role: u32) -> Result<bool> {
        Ok(catalog::is_superuser(role.into()))
    }

    fn cipher_of(&self, file: RelFile) -> Option<CipherId> {
        directory::current_cipher(file)
    }

    fn is_anything_encrypted_here(&self) -> bool {
        directory::anything_sealed_in(Scope::database(process::my_database()))
    }

    fn my_database(&self) -> u32 {
        process::my_database()
    }

    fn default_encryption(&self) -> bool {
        guc::default_encryption()
    }

    fn data_catalog_encryption(&self) -> bool {
        guc::data_catalog_encryption()
    }

    fn shared_catalog_encryption(&self) -> bool {
        guc::shared_catalog_encryption()
    }

    fn enforces(&self) -> bool {
        guc::enforce_encryption()
    }

    fn default_cipher(&self) -> CipherId {
        authenticated::default_cipher()
    }

    fn may_inherit(&self, cipher: CipherId) -> bool {
        authenticated::may_inherit(cipher)
    }
}

/// The catalog object of a labelled object.
pub(crate) fn object_of(labelled: Labelled) -> Object {
    match labelled {
        Labelled::Relation(oid) => Object::relation(oid.into()),
        Labelled::Schema(oid) => Object::schema(oid.into()),
        Labelled::Tablespace(oid) => Object::tablespace(oid.into()),
        Labelled::Database(oid) => Object::database(oid.into()),
    }
}

/// The labelled object of a catalog object; `None` for kinds that cannot have a label.
pub(crate) fn labelled(object: Object) -> Option<Labelled> {
    let oid = object.oid.to_u32();
    match object.class {
        pg_sys::RelationRelationId => Some(Labelled::Relation(oid)),
        pg_sys::NamespaceRelationId => Some(Labelled::Schema(oid)),
        pg_sys::TableSpaceRelationId => Some(Labelled::Tablespace(oid)),
        pg_sys::DatabaseRelationId => Some(Labelled::Database(oid)),
        _ => None,
    }
}

/// Kind and name of the object or setting that decides.
pub(crate) fn describe(source: Source) -> ServerText {
    match source {
        Source::Own(oid) | Source::Leader(oid) => Object::relation(oid.into()).describe(),
        Source::Around(object) => object_of(object).describe(),
        Source::Setting(setting) => ServerText::join(&[b"setting ", setting.name().as_bytes()]),
    }
}

/// The decision for a relation; `None` if no label or setting applies.
pub(crate) fn wanted(facts: &Facts) -> Result<Option<Decision>> {
    policy().wanted(&described(facts))
}

/// Like [`wanted`], if the decision requires encryption.
pub(crate) fn wanted_encrypted(facts: &Facts) -> Result<Option<Decision>> {
    Ok(wanted(facts)?.filter(Decision::is_encrypted))
}

/// The table at the end of the chain from an index or TOAST table.
pub(crate) fn root_of(facts: &Facts) -> Result<Facts> {
    let root = policy().root_of(&described(facts))?;
    Ok(relation::facts(root.oid.into()).unwrap_or_else(|| facts.clone()))
}

/// The relations that a relation follows, as a table that it belongs to, and the partitioned tables
/// above it and them.
pub(crate) fn leaders(facts: &Facts) -> Result<Vec<Oid>> {
    let leaders = policy().leaders(&described(facts))?;
    Ok(leaders.into_iter().map(Oid::from).collect())
}

/// The cipher for a relation where the command names none: that of its label, or the default.
pub(crate) fn cipher_wanted_of(facts: &Facts) -> Result<CipherId> {
    policy().cipher_wanted_of(&described(facts))
}

/// How a relation is to be encrypted that gets a new key with this cipher.
pub(crate) fn sealing_with(facts: &Facts, cipher: CipherId) -> Result<Sealing> {
    policy().for_rekeying(&described(facts), cipher)
}

/// The key group that labels name for a relation where it is.
pub(crate) fn named_key_group(facts: &Facts) -> Result<Option<Named>> {
    policy().named_key_group(&described(facts), facts.tablespace.to_u32())
}

/// Whether a relation that is encrypted has a key of another key group than it should.
pub(crate) fn is_in_other_key_group(facts: &Facts) -> Result<bool> {
    policy().is_in_other_key_group(&described(facts))
}
