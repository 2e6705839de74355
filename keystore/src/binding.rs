//! Data to which wrapped keys are bound, so that a wrapped key does not unwrap in the place of
//! another.

use pagevault_cipher::DataKeyVersion;

use crate::rel_file::RelFile;
use crate::scope::Scope;

/// Associated data of a wrapped data key (AES-256-GCM under a database key).
///
/// ```text
///  0  "PVDK"      4  format version, 1      5  cipher      6  version u16
///  8  database u32                         12  relation file number u32       little-endian
/// ```
///
/// The tablespace is not bound: ALTER DATABASE SET TABLESPACE (`movedb` in dbcommands.c) copies the
/// files of a database raw and keeps their numbers, and the keys must remain valid without
/// rewrapping. The scope and version of the database key are not bound either: unwrapping with
/// another database key fails anyway.
pub fn data_key_aad(file: RelFile, version: DataKeyVersion, cipher: u8) -> [u8; 16] {
    let [v0, v1] = version.get().to_le_bytes();
    let [d0, d1, d2, d3] = file.database.to_le_bytes();
    let [r0, r1, r2, r3] = file.relation.to_le_bytes();
    [b'P', b'V', b'D', b'K', 1, cipher, v0, v1, d0, d1, d2, d3, r0, r1, r2, r3]
}

/// Context of a wrapped database key, which providers bind as associated data: keystore and scope
/// (database OID, 0 for the cluster).
///
/// Printable ASCII, because providers take text: `pagevault/1/<keystore id in hex>/<scope>`.
pub fn master_context(keystore_id: &[u8; 16], scope: Scope) -> String {
    format!("pagevault/1/{:032x}/{scope}", u128::from_be_bytes(*keystore_id))
}
