//! Facts about all relations at once, from the rows of `pg_class`.
//!
//! Loading every relation into the relation cache would cost a session some 3 kB each until it
//! ends. So code that examines all relations reads the rows of `pg_class` and takes no locks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use pagevault_keystore::RelFile;
use pgrx::pg_sys::{self, FormData_pg_class, Oid};

use super::process::ProcessLocal;
use super::relation::{self, Facts, RelationKind};
use super::text::ServerText;
use super::{catalog, compat, process};

/// Facts about every relation at one moment. While a survey exists, [`relation::facts`] answers
/// from it.
pub(crate) struct Survey(Rc<ByOid>);

type ByOid = BTreeMap<u32, Facts>;

static PRESENT: ProcessLocal<Option<Rc<ByOid>>> = ProcessLocal::new(None);

impl Survey {
    /// Makes a survey, in a transaction. The session must change no relation while the survey
    /// exists.
    pub(crate) fn make() -> Survey {
        let all = Rc::new(read().into_iter().map(|facts| (facts.oid.to_u32(), facts)).collect());
        PRESENT.set(Some(Rc::clone(&all)));
        Survey(all)
    }

    /// All relations, by OID.
    pub(crate) fn relations(&self) -> impl Iterator<Item = &Facts> {
        self.0.values()
    }
}

/// Also runs when an ERROR, as a panic, unwinds the stack.
impl Drop for Survey {
    fn drop(&mut self) {
        PRESENT.set(None);
    }
}

/// Facts about a relation from the current survey.
pub(super) fn known(oid: Oid) -> Option<Facts> {
    PRESENT.with(|present| present.as_ref()?.get(&oid.to_u32()).cloned())
}

fn read() -> Vec<Facts> {
    // SAFETY: rows of pg_index have this structure, and stay valid while the scan calls this.
    let table_of = |row| unsafe {
        let index = &*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_index>();
        Some((index.indexrelid, index.indrelid))
    };
    let tables: HashMap<Oid, Oid> =
        catalog::scan(pg_sys::IndexRelationId, table_of).into_iter().collect();
    // SAFETY: rows of pg_class have this structure, and stay valid while the scan calls this.
    catalog::scan(pg_sys::RelationRelationId, |row| unsafe {
        let class = &*pg_sys::GETSTRUCT(row).cast::<FormData_pg_class>();
        Some(facts_of(class, tables.get(&class.oid).copied()))
    })
}

/// The files of all relations of this database and of those that are shared, also of relations that
/// other transactions are making or dropping, prepared ones too. In a transaction.
///
/// Rows that are committed come from a snapshot, which misses none of them; others from what the
/// table contains now.
pub(crate) fn files_in_catalog() -> HashSet<RelFile> {
    // SAFETY: rows of pg_class have this structure, and stay valid while the scan calls this.
    let file = |row| unsafe {
        let class = &*pg_sys::GETSTRUCT(row).cast::<FormData_pg_class>();
        Some(facts_of(class, None).file)
    };
    // First, so that what commits meanwhile is in the snapshot.
    let mut files: HashSet<RelFile> =
        catalog::scan_uncommitted(pg_sys::RelationRelationId, file).into_iter().collect();
    files.extend(catalog::scan(pg_sys::RelationRelationId, file));
    files
}

/// # Safety
/// In a transaction; `class` is in a whole row of pg_class, held by the server.
unsafe fn facts_of(class: &FormData_pg_class, indexed_table: Option<Oid>) -> Facts {
    let kind = RelationKind::of(class.relkind as u8);
    // SAFETY: the row is whole, so its name is NUL-terminated; a plain global of this process.
    let (name, own_tablespace) =
        unsafe { (ServerText::copied(class.relname.data.as_ptr()), pg_sys::MyDatabaseTableSpace) };
    let tablespace = match class.reltablespace {
        Oid::INVALID => own_tablespace,
        named => named,
    };
    Facts {
        oid: class.oid,
        name: name.unwrap_or_default(),
        owner: class.relowner,
        kind,
        temporary: class.relpersistence as u8 == b't',
        file: file_of(class, kind, tablespace),
        toast: Some(class.reltoastrelid).filter(|toast| *toast != Oid::INVALID),
        user_made: class.oid.to_u32() >= pg_sys::FirstNormalObjectId
            && !relation::is_ours(class.relnamespace, indexed_table.unwrap_or(class.oid)),
        schema: class.relnamespace,
        tablespace,
        is_partition: class.relispartition,
        rewrites: Some(class.relrewrite).filter(|original| *original != Oid::INVALID),
        indexed_table,
    }
}

/// As `RelationInitPhysicalAddr` (relcache.c).
fn file_of(class: &FormData_pg_class, kind: RelationKind, tablespace: Oid) -> RelFile {
    const GLOBAL: u32 = 1664; // GLOBALTABLESPACE_OID
    if !kind.has_storage() {
        return RelFile { tablespace: 0, database: 0, relation: 0 };
    }
    let tablespace = tablespace.to_u32();
    RelFile {
        tablespace,
        database: if tablespace == GLOBAL { 0 } else { process::my_database() },
        relation: match class.relfilenode {
            Oid::INVALID => compat::mapped_file(class.oid, class.relisshared),
            number => number.to_u32(),
        },
    }
}
