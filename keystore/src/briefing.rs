//! What `pagevault-keyring exec` tells the library in a program of PostgreSQL: the keys of WAL and
//! what they are for. It is passed in anonymous memory that the program inherits as a descriptor.
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
//! Both sides are of one release: the version only tells a library that was left behind.

use pagevault_cipher::{CipherId, DataKey, KeyVersion, Lsn};
use zeroize::Zeroizing;

use crate::error::{FormatError, Problem};
use crate::wal::{Switch, WalPhase};
use crate::wire::{Reader, put_bytes, put_u8, put_u16, put_u32, put_u64};

const MAGIC: [u8; 8] = *b"pvbrief\n";
const VERSION: u16 = 1;

/// Name of the environment variable that holds the number of the descriptor.
pub const VARIABLE: &str = "PAGEVAULT_BRIEFING";

/// What the library writes over a briefing's first bytes when it is at work. Not the beginning of
/// one.
pub const AT_WORK: [u8; 8] = *b"at work\n";

/// What a program does with WAL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Role {
    /// It reads segments.
    Read,
    /// It writes segments, in plaintext as it means, and may read them.
    Seal,
    /// `pg_rewind`: reads segments of the target, and copies those of the source as they are.
    Rewind {
        /// The target's data directory.
        target: Vec<u8>,
    },
    /// It only shows that the library is loaded.
    Probe,
}

/// All that the library is told.
pub struct Briefing {
    /// What the program does.
    pub role: Role,
    /// The program runs others, which need the same memory; so it is left as it is.
    pub shared: bool,
    /// File name of the program that the library works in. In others, such as a shell in between,
    /// it does nothing.
    pub program: Vec<u8>,
    /// From where each key is used.
    pub switches: Vec<Switch>,
    /// Keys by version.
    pub keys: Vec<(KeyVersion, DataKey)>,
}

impl Briefing {
    /// As bytes, in memory that is wiped.
    pub fn encode(&self) -> Zeroizing<Vec<u8>> {
        let (role, target) = match &self.role {
            Role::Read => (1, &[][..]),
            Role::Seal => (2, &[][..]),
            Role::Rewind { target } => (3, target.as_slice()),
            Role::Probe => (4, &[][..]),
        };
        // With room for all of it, so that it does not grow and leave copies behind.
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

    /// Reads what [`Briefing::encode`] wrote. `bytes` are the caller's to wipe.
    ///
    /// # Errors
    /// When it is anything else.
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
        // With room for all of them: a vector that grows leaves copies of keys behind.
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
    fn what_is_told_is_understood() {
        let told = briefing();
        let heard = Briefing::decode(&told.encode()).unwrap();
        assert_eq!(heard.encode().as_slice(), told.encode().as_slice());
        assert_eq!(heard.role, told.role);
        assert_eq!(heard.keys.len(), 2);
    }

    #[test]
    fn a_part_of_it_is_not() {
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
