//! Facts about all relations at once, from the rows of `pg_class`.
//!
//! A session that has each of them in its relation cache keeps some 3 kB for each until it ends. So
//! who goes through all of them reads the rows, takes no lock on any, and keeps nothing.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use pagevault_keystore::RelFile;
use pgrx::pg_sys::{self, FormData_pg_class, Oid};

use super::process::ProcessLocal;
use super::relation::{self, Facts, RelationKind};
use super::text::ServerText;
use super::{catalog, compat, process};

/// What every relation was when it was made. While it is there, [`relation::facts`] answers from
/// it.
pub(crate) struct Survey(Rc<ByOid>);

type ByOid = BTreeMap<u32, Facts>;

static PRESENT: ProcessLocal<Option<Rc<ByOid>>> = ProcessLocal::new(None);

impl Survey {
    /// In a transaction, as it is by now. Nothing may be changed meanwhile by this session.
    pub(crate) fn make() -> Survey {
        let all = Rc::new(read().into_iter().map(|facts| (facts.oid.to_u32(), facts)).collect());
        PRESENT.set(Some(Rc::clone(&all)));
        Survey(all)
    }

    /// All of them, by OID.
    pub(crate) fn relations(&self) -> impl Iterator<Item = &Facts> {
        self.0.values()
    }
}

/// An ERROR comes by here as well, as a panic.
impl Drop for Survey {
    fn drop(&mut self) {
        PRESENT.set(None);
    }
}

/// What the present survey says of a relation.
pub(super) fn known(oid: Oid) -> Option<Facts> {
    PRESENT.with(|present| present.as_ref()?.get(&oid.to_u32()).cloned())
}

fn read() -> Vec<Facts> {
    // SAFETY: rows of pg_index have this structure, and the scan holds them while they are read.
    let table_of = |row| unsafe {
        let index = &*pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_index>();
        Some((index.indexrelid, index.indrelid))
    };
    let tables: HashMap<Oid, Oid> =
        catalog::scan(pg_sys::IndexRelationId, table_of).into_iter().collect();
    // SAFETY: rows of pg_class have this structure, and the scan holds them while they are read.
    catalog::scan(pg_sys::RelationRelationId, |row| unsafe {
        let class = &*pg_sys::GETSTRUCT(row).cast::<FormData_pg_class>();
        Some(facts_of(class, tables.get(&class.oid).copied()))
    })
}

/// # Safety
/// In a transaction, with the row where the server has it.
unsafe fn facts_of(class: &FormData_pg_class, indexed_table: Option<Oid>) -> Facts {
    let kind = RelationKind::of(class.relkind as u8);
    // SAFETY: the row stands where the caller read it, so its name is whole; a plain global of this
    // process.
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
