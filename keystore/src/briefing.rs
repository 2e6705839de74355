//! Data that `pagevault-keyring exec` passes to the library in one of PostgreSQL's programs: WAL
//! keys and their use. It is in anonymous memory that the program inherits as a file descriptor.
//!
//! ```text
//!  0  magic    "pvbrief\n"
//!  8  version  u16, 1
//! 10  role     u8       1 read, 2 seal, 3 rewind, 4 probe
//! 11  shared   u8       others may still need it
//! 12  program  bytes    file name of the program that it is for
//!     target   bytes    data directory, for rewind
//!     switches u32, then for each: step u32, start u64, version u32, plaintext u8
//!     keys     u32, then for each: version u32, cipher u8, key bytes
//! ```
//!
//! Both sides are of the same release. The version only detects a library that an upgrade left
//! behind.

use pagevault_cipher::{CipherId, DataKey, KeyVersion, Lsn};
use zeroize::Zeroizing;

use crate::error::{FormatError, Problem};
use crate::wal::{Switch, WalPhase};
use crate::wire::{Reader, put_bytes, put_u8, put_u16, put_u32, put_u64};

const MAGIC: [u8; 8] = *b"pvbrief\n";
const VERSION: u16 = 1;

/// The directory, in the data directory, with what `pg_rewind` replaces of the keystore, until it
/// has written the control file.
pub const KEPT: &str = "pagevault.rewinding";
/// The same while it is made or removed.
pub const NOT_KEPT: &str = "pagevault.rewinding.new";
/// In it: the old files.
pub const KEPT_FILES: &str = "files";
/// In it: the names of files that were not there before, each with a byte 0 behind it.
pub const KEPT_MADE: &str = "made";
/// In it: the control file that belongs to the old files.
pub const KEPT_CONTROL: &str = "control";

/// Suffix of the new files of the keystore, until they are renamed.
pub const WAITING: &str = ".rewind";

/// Environment variable that holds the number of the file descriptor.
pub const VARIABLE: &str = "PAGEVAULT_BRIEFING";

/// Environment variable with the number of the process that runs, or ran, `pagevault-keyring exec`.
/// It keeps the number as PostgreSQL's program; children of that have others.
pub const ASKED: &str = "PAGEVAULT_EXEC_BY";

/// The library overwrites the first bytes of a briefing with this when it is active. Differs from
/// the magic number.
pub const AT_WORK: [u8; 8] = *b"at work\n";

/// How a program uses WAL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// Reads segments.
    Read,
    /// Writes segments, which it takes for plaintext, and may read them.
    Seal,
    /// `pg_rewind`: reads segments of the target, and copies those of the source unchanged.
    Rewind {
        /// The target's data directory.
        target: Vec<u8>,
    },
    /// Only shows that the library is loaded.
    Probe,
}

/// All data for the library.
pub struct Briefing {
    /// How the program uses WAL.
    pub role: Role,
    /// The program starts others that need the same memory, so its contents must stay.
    pub shared: bool,
    /// File name of the program for which this is meant. The library does nothing in others, such
    /// as a shell that starts the program.
    pub program: Vec<u8>,
    /// The addresses from which each key is used.
    pub switches: Vec<Switch>,
    /// Keys by version.
    pub keys: Vec<(KeyVersion, DataKey)>,
}

impl Briefing {
    /// Encodes the briefing in memory that is wiped.
    pub fn encode(&self) -> Zeroizing<Vec<u8>> {
        let (role, target) = match &self.role {
            Role::Read => (1, &[][..]),
            Role::Seal => (2, &[][..]),
            Role::Rewind { target } => (3, target.as_slice()),
            Role::Probe => (4, &[][..]),
        };
        // Allocate for all of it, because growing would leave copies of keys behind.
        let room = 64 + self.program.len() + target.len() + self.switches.len() * 17;
        let mut out = Zeroizing::new(Vec::with_capacity(room + self.keys.len() * 73));
        out.extend_from_slice(&MAGIC);
        put_u16(&mut out, VERSION);
        put_u8(&mut out, role);
        put_u8(&mut out, u8::from(self.shared));
        put_bytes(&mut out, &self.program);
        put_bytes(&mut out, target);
        put_u32(&mut out, u32::try_from(self.switches.len()).unwrap_or(u32::MAX));
        for Switch { step, start, phase } in &self.switches {
            put_u32(&mut out, *step);
            put_u64(&mut out, start.0);
            put_u32(&mut out, KeyVersion::get_or_zero(phase.version));
            put_u8(&mut out, u8::from(phase.plaintext));
        }
        put_u32(&mut out, u32::try_from(self.keys.len()).unwrap_or(u32::MAX));
        for (version, key) in &self.keys {
            put_u32(&mut out, version.get());
            put_u8(&mut out, key.cipher() as u8);
            put_bytes(&mut out, key.expose());
        }
        out
    }

    /// Decodes what [`Briefing::encode`] wrote. The caller wipes `bytes`.
    ///
    /// # Errors
    /// If it is anything else.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut from = Reader::new(bytes, 0);
        if from.array::<8>()? != MAGIC {
            return Err(FormatError { offset: 0, problem: Problem::Magic });
        }
        let version = from.u16()?;
        if version != VERSION {
            return Err(from.error(Problem::Version(version)));
        }
        let role = from.u8()?;
        let shared = from.u8()? != 0;
        let program = from.bytes()?.to_vec();
        let target = from.bytes()?.to_vec();
        let role = match role {
            1 => Role::Read,
            2 => Role::Seal,
            3 => Role::Rewind { target },
            4 => Role::Probe,
            _ => return Err(from.error(Problem::Field("role", "unknown"))),
        };
        let mut switches = Vec::new();
        for _ in 0..from.u32()? {
            let (step, start) = (from.u32()?, Lsn(from.u64()?));
            let version = KeyVersion::new(from.u32()?);
            let phase = WalPhase { version, plaintext: from.u8()? != 0 };
            switches.push(Switch { step, start, phase });
        }
        let count = from.u32()?;
        // Allocate for all of them, because growing would leave copies of keys behind.
        let mut keys = Vec::with_capacity((count as usize).min(bytes.len()));
        for _ in 0..count {
            let version = KeyVersion::new(from.u32()?)
                .ok_or_else(|| from.error(Problem::Field("key version", "must not be 0")))?;
            let cipher = from.u8()?;
            let bytes = from.bytes()?;
            let wrong = |_| from.error(Problem::Field("key", "unknown cipher"));
            let cipher = CipherId::try_from(cipher).map_err(wrong)?;
            let wrong = |_| from.error(Problem::Field("key", "wrong length"));
            keys.push((version, DataKey::from_bytes(cipher, bytes).map_err(wrong)?));
        }
        if !from.is_empty() {
            return Err(from.error(Problem::Trailing));
        }
        Ok(Self { role, shared, program, switches, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn briefing() -> Briefing {
        let key = |cipher: CipherId| {
            let bytes: Vec<u8> = (0..cipher.key_len() as u8).collect();
            DataKey::from_bytes(cipher, &bytes).expect("right length")
        };
        let second = KeyVersion::new(2).expect("not 0");
        Briefing {
            role: Role::Rewind { target: b"/data".to_vec() },
            shared: true,
            program: b"pg_rewind".to_vec(),
            switches: vec![Switch {
                step: 3,
                start: Lsn(0x0100_0000),
                phase: WalPhase::under(second),
            }],
            keys: vec![
                (KeyVersion::FIRST, key(CipherId::Aes256Xts)),
                (second, key(CipherId::Aes128Xts)),
            ],
        }
    }

    #[test]
    fn an_encoded_briefing_is_decoded() {
        let sent = briefing();
        let received = Briefing::decode(&sent.encode()).unwrap();
        assert_eq!(received.encode().as_slice(), sent.encode().as_slice());
        assert_eq!(received.role, sent.role);
        assert_eq!(received.keys.len(), 2);
    }

    #[test]
    fn incomplete_and_longer_bytes_are_refused() {
        let bytes = briefing().encode();
        for length in 0..bytes.len() {
            assert!(Briefing::decode(&bytes[..length]).is_err(), "{length} bytes");
        }
        let mut long = bytes.to_vec();
        long.push(0);
        assert!(Briefing::decode(&long).is_err());
        assert!(Briefing::decode(&AT_WORK).is_err());
    }
}
