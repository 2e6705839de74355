//! Which relations are to be encrypted, and why: the nearest label, what follows what, settings.
//!
//! [`Policy`] decides. What it has to know it asks through [`Catalog`]: facts about relations,
//! their labels, settings, and how files are written now.
//!
//! | module | subject |
//! |---|---|
//! | [`label`] | what a security label asks for |
//! | [`precedence`] | which of several labels decides |
//! | [`relation`] | what has to be known of a relation, and what follows what |
//! | [`decision`] | what is wanted of a relation |
//! | [`catalogs`] | the same of system catalogs |
//! | [`storage`] | how new files are written, also those that replace others |
//! | [`enforcement`] | what is refused while encryption is enforced, and what nobody may decrypt |
//! | [`drift`] | what is not as it is wanted |

pub mod catalogs;
pub mod decision;
pub mod drift;
pub mod enforcement;
pub mod label;
pub mod precedence;
pub mod relation;
pub mod storage;

pub use decision::{Decision, Policy, Setting, Source};
pub use label::Label;
pub use relation::{Labelled, Oid, Relation, RelationKind};

use pagevault_cipher::CipherId;
use pagevault_keystore::RelFile;

/// What is asked of a server. Answers are as of one moment; what takes a look into a catalog is
/// asked only where it matters.
pub trait Catalog {
    /// Why a question has no answer.
    type Error;

    /// A relation; `None` if it is gone.
    ///
    /// # Errors
    /// When the catalogs cannot be read, as all these.
    fn relation(&self, oid: Oid) -> Result<Option<Relation>, Self::Error>;

    /// The label of an object.
    ///
    /// # Errors
    /// Also when it is not a label.
    fn label_of(&self, object: Labelled) -> Result<Option<Label>, Self::Error>;

    /// The partitioned table that a partition belongs to.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn parent_of(&self, partition: Oid) -> Result<Option<Oid>, Self::Error>;

    /// The table of an index of which [`Relation::indexed_table`] does not say it.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn table_of_index(&self, index: Oid) -> Result<Option<Oid>, Self::Error>;

    /// The table that owns a sequence.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn owner_of_sequence(&self, sequence: Oid) -> Result<Option<Oid>, Self::Error>;

    /// Whether a schema is a member of the extension `pg_repack`.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn is_schema_of_pg_repack(&self, schema: Oid) -> Result<bool, Self::Error>;

    /// Whether a role is superuser.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn is_superuser(&self, role: Oid) -> Result<bool, Self::Error>;

    /// With which cipher a file is written now; `None`: in plaintext.
    fn cipher_of(&self, file: RelFile) -> Option<CipherId>;

    /// Whether any file of this database is written encrypted.
    fn is_anything_encrypted_here(&self) -> bool;

    /// The database that is asked from.
    fn my_database(&self) -> Oid;

    /// `pagevault.default_encryption`
    fn default_encryption(&self) -> bool;

    /// `pagevault.data_catalog_encryption`
    fn data_catalog_encryption(&self) -> bool;

    /// `pagevault.shared_catalog_encryption`
    fn shared_catalog_encryption(&self) -> bool;

    /// `pagevault.enforce_encryption`
    fn enforces(&self) -> bool;

    /// The cipher of new data keys where none is named: `pagevault.cipher`.
    fn default_cipher(&self) -> CipherId;
}
