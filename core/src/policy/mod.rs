//! Policy: which relations are to be encrypted, and why.
//!
//! [`Policy`] decides. It reads what it needs through [`Catalog`]: facts about relations, their
//! labels, settings, and the cipher of each file.
//!
//! | module | subject |
//! |---|---|
//! | [`label`] | what a security label requires |
//! | [`precedence`] | which of several labels decides |
//! | [`relation`] | the facts about a relation that count |
//! | [`decision`] | the policy for a relation; which relation follows which |
//! | [`catalogs`] | the policy for system catalogs |
//! | [`key_group`] | whose key wraps data keys |
//! | [`storage`] | the cipher for new files, and for files that replace others |
//! | [`enforcement`] | what is refused, with and without `enforce_encryption` |
//! | [`drift`] | differences between policy and actual state |

pub mod catalogs;
pub mod decision;
pub mod drift;
pub mod enforcement;
pub mod key_group;
pub mod label;
pub mod precedence;
pub mod relation;
pub mod storage;

pub use decision::{Decision, Policy, Setting, Source};
pub use drift::Mixture;
pub use key_group::{Named, Sealing};
pub use label::Label;
pub use relation::{Labelled, Oid, Relation, RelationKind};

use pagevault_cipher::CipherId;
use pagevault_keystore::{KeyGroup, RelFile};

/// Facts that the policy needs from a server. Methods that read catalogs are called only where the
/// result matters.
pub trait Catalog {
    /// Why a catalog could not be read.
    type Error;

    /// The relation with this OID; `None` if it does not exist any more.
    ///
    /// # Errors
    /// If the catalogs cannot be read, as for all methods here.
    fn relation(&self, oid: Oid) -> Result<Option<Relation>, Self::Error>;

    /// The label of an object.
    ///
    /// # Errors
    /// Also if the text in the catalog is not a valid label.
    fn label_of(&self, object: Labelled) -> Result<Option<Label>, Self::Error>;

    /// The partitioned table that a partition belongs to.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn parent_of(&self, partition: Oid) -> Result<Option<Oid>, Self::Error>;

    /// The table of an index, for indexes without [`Relation::indexed_table`].
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

    /// Whether a role is a superuser.
    ///
    /// # Errors
    /// See [`Catalog::relation`].
    fn is_superuser(&self, role: Oid) -> Result<bool, Self::Error>;

    /// The cipher of a file for new pages; `None`: plaintext.
    fn cipher_of(&self, file: RelFile) -> Option<CipherId>;

    /// The key group that the label of an object names.
    ///
    /// # Errors
    /// See [`Catalog::label_of`].
    fn key_group_of_label(&self, object: Labelled) -> Result<Option<Named>, Self::Error>;

    /// The error for a label that names a key group which does not exist.
    fn no_such_key_group(&self, of: Labelled) -> Self::Error;

    /// The key group whose key wraps the present data key of a file.
    fn key_group_of(&self, file: RelFile) -> Option<KeyGroup>;

    /// Whether any file of this database is encrypted.
    fn is_anything_encrypted_here(&self) -> bool;

    /// The database that this session is connected to.
    fn my_database(&self) -> Oid;

    /// `pagevault.default_encryption`
    fn default_encryption(&self) -> bool;

    /// `pagevault.data_catalog_encryption`
    fn data_catalog_encryption(&self) -> bool;

    /// `pagevault.shared_catalog_encryption`
    fn shared_catalog_encryption(&self) -> bool;

    /// `pagevault.enforce_encryption`
    fn enforces(&self) -> bool;

    /// `pagevault.cipher`: the cipher of new data keys where none is named.
    fn default_cipher(&self) -> CipherId;

    /// False if a file must not get this cipher only because the file that it replaces has it, or
    /// that of the relation that it follows: the server cannot use it now, and nobody asks for it.
    fn may_inherit(&self, cipher: CipherId) -> bool;
}
