//! Recovery bundles: files in the age format (<https://age-encryption.org/v1>, recipients of type
//! X25519), binary or armored, that contain one JSON object:
//!
//! ```json
//! {"format": "pagevault escrow", "version": 1, "keystore": "<32 hexadecimal digits>",
//!  "made": 1767225599,
//!  "keys": [{"scope": 0, "version": 1, "key": "<base64 of 32 bytes>"}]}
//! ```
//!
//! So `age -d` can decrypt it without this program. Error messages of the library are not shown,
//! because they need a language to be configured.

use std::fs::{self, File, Permissions};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use age::armor::{ArmoredReader, ArmoredWriter, Format};
use age::x25519::{Identity, Recipient};
use age::{DecryptError, Decryptor, Encryptor};
use pagevault_keystore::protocol::SecretBytes;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::failure::{Failure, refuse, unreadable};
use crate::offline::Keystore;
use crate::trust::{FileKind, read};

const FORMAT: &str = "pagevault escrow";
const VERSION: u32 = 1;
/// Largest bundle that is read, in bytes: some 100,000 database keys.
const LARGEST: u64 = 16 << 20;
/// Space for one key in JSON, in bytes.
const KEY: usize = 128;

/// Encoding of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Binary.
    Binary,
    /// Text, for mail and paper.
    Armored,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Bundle {
    format: String,
    version: u32,
    pub(super) keystore: String,
    made: i64,
    pub(super) keys: Vec<Key>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Key {
    pub(super) scope: u32,
    pub(super) version: u32,
    pub(super) key: SecretBytes,
}

/// Fields that all versions of the format have.
#[derive(Deserialize)]
struct Kind {
    format: String,
    version: u32,
}

impl Bundle {
    pub(super) fn new(keystore: [u8; 16], made: i64, keys: Vec<Key>) -> Self {
        let keystore = hexadecimal(keystore);
        Self { format: FORMAT.to_owned(), version: VERSION, keystore, made, keys }
    }

    /// The identity of the keystore whose keys these are.
    pub(super) fn keystore(&self) -> Result<[u8; 16], Failure> {
        u128::from_str_radix(&self.keystore, 16)
            .map(u128::to_be_bytes)
            .map_err(|_| refuse("the bundle does not contain a valid keystore identity"))
    }

    /// Writes the bundle to a new file, which appears complete and durable or not at all.
    pub(super) fn write(
        &self,
        recipients: &[Recipient],
        output: &Path,
        form: Form,
    ) -> Result<(), Failure> {
        // With enough capacity: a vector that grows leaves copies of keys behind.
        let mut text = Zeroizing::new(Vec::with_capacity(self.keys.len() * KEY + 512));
        serde_json::to_writer(&mut *text, self)
            .map_err(|_| refuse("could not encode the bundle as JSON"))?;
        let recipients = recipients.iter().map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = Encryptor::with_recipients(recipients)
            .map_err(|_| refuse("a bundle needs at least one recipient"))?;
        place(encryptor, &text, output, form).map_err(|error| {
            let shown = output.display();
            refuse(format!("could not write the bundle \"{shown}\": {error}"))
        })
    }

    /// Decrypts the file with one of the identities and parses all of it.
    pub(super) fn read(path: &Path, identities: &[Identity]) -> Result<Self, Failure> {
        let file = read::open(path, FileKind::Bundle)?;
        let metadata = file.metadata().map_err(|error| unreadable(path, &error))?;
        if metadata.len() > LARGEST {
            return Err(no_bundle(path, "It is too large for a bundle."));
        }
        let armored = ArmoredReader::new(BufReader::new(file.take(LARGEST)));
        let decryptor = Decryptor::new(armored).map_err(|error| match error {
            DecryptError::UnknownFormat => {
                no_bundle(path, "Its version of the age format is not supported.")
            }
            DecryptError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                damaged(path)
            }
            _ => no_bundle(path, "It is not an age file, or its header is damaged."),
        })?;
        let identities = identities.iter().map(|identity| identity as &dyn age::Identity);
        let mut reader = decryptor.decrypt(identities).map_err(|error| match error {
            DecryptError::NoMatchingKeys => {
                refuse(format!("no identity can decrypt the bundle \"{}\"", path.display()))
                    .with_detail("It was encrypted for other recipients.")
                    .with_hint("Specify a file with the private key of one of its recipients.")
            }
            _ => damaged(path),
        })?;
        let room = usize::try_from(metadata.len()).unwrap_or_default();
        let mut text = Zeroizing::new(Vec::with_capacity(room));
        // Success means that the text is complete: the last chunk is marked as the last.
        reader.read_to_end(&mut text).map_err(|_| damaged(path))?;
        // serde quotes input in its errors, which may be a key.
        let kind: Kind = serde_json::from_slice(&text)
            .map_err(|_| no_bundle(path, "It does not contain database keys."))?;
        if kind.format != FORMAT {
            return Err(no_bundle(path, "It does not contain database keys."));
        }
        if kind.version != VERSION {
            return Err(no_bundle(
                path,
                &format!(
                    "It has version {}; this program supports version {VERSION}.",
                    kind.version
                ),
            ));
        }
        serde_json::from_slice(&text)
            .map_err(|_| no_bundle(path, "It does not contain database keys."))
    }
}

/// Encrypts into a temporary file in the same directory, and renames it.
fn place(encryptor: Encryptor, text: &[u8], output: &Path, form: Form) -> io::Result<()> {
    let directory = directory_of(output);
    let mut file = tempfile::Builder::new()
        .prefix(".escrow-")
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(directory)?;
    let format = match form {
        Form::Binary => Format::Binary,
        Form::Armored => Format::AsciiArmor,
    };
    let armored = ArmoredWriter::wrap_output(file.as_file_mut(), format)?;
    let mut writer = encryptor.wrap_output(armored)?;
    writer.write_all(text)?;
    writer.finish()?.finish()?;
    file.as_file().sync_all()?;
    file.persist_noclobber(output).map_err(|failed| failed.error)?;
    File::open(directory)?.sync_all()
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."))
}

/// Requires that a bundle may be created there: no file is overwritten, and it is outside the data
/// directory, where it would be lost with the data.
pub(super) fn require_place(keystore: &Keystore, output: &Path) -> Result<(), Failure> {
    if fs::symlink_metadata(output).is_ok() {
        return Err(refuse(format!("file \"{}\" already exists", output.display())).with_hint(
            "Existing files are not overwritten. Use another name, for example one with the date.",
        ));
    }
    let directory = directory_of(output);
    let directory = fs::canonicalize(directory).map_err(|error| unreadable(directory, &error))?;
    if directory.starts_with(keystore.data_directory()) {
        return Err(refuse("a bundle must not be inside the data directory")
            .with_detail("It would be lost with the data.")
            .with_hint("Write it to another directory."));
    }
    Ok(())
}

/// Parses public keys from a command line, each `age1...`.
///
/// # Errors
/// If one is not a public key.
pub fn recipients(texts: &[String]) -> Result<Vec<Recipient>, Failure> {
    texts.iter().map(|text| text.parse().map_err(|_| no_recipient(text))).collect()
}

fn no_recipient(text: &str) -> Failure {
    // The text is not repeated: it may be a private key.
    refuse("recipient is not an age public key of type X25519").with_hint(
        if text.to_ascii_uppercase().starts_with("AGE-SECRET-KEY") {
            "This is a private key: keep it in a safe place. The public key begins with age1."
        } else {
            "A public key begins with age1; age-keygen generates a key pair."
        },
    )
}

/// Reads private keys from a file as `age-keygen` writes it, which others must not be able to read;
/// `-` is standard input.
///
/// # Errors
/// If the file cannot be read or has other content.
pub fn identities(path: &Path) -> Result<Vec<Identity>, Failure> {
    const LIMIT: u64 = 64 << 10;
    let mut text = Zeroizing::new(String::with_capacity(LIMIT as usize + 1));
    let read = if path == Path::new("-") {
        io::stdin().lock().take(LIMIT + 1).read_to_string(&mut text)
    } else {
        read::open(path, FileKind::Credentials)?.take(LIMIT + 1).read_to_string(&mut text)
    };
    let other = || {
        refuse(format!("\"{}\" is not an age identity file", path.display())).with_hint(
            "It must contain lines that begin with AGE-SECRET-KEY-1. If it is protected by a passphrase, use: age -d FILE | pagevault-keyring escrow ... --identity -",
        )
    };
    read.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => other(),
        _ => unreadable(path, &error),
    })?;
    if text.len() as u64 > LIMIT {
        return Err(other());
    }
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
    let identities: Vec<Identity> =
        lines.map(str::parse).collect::<Result<_, _>>().map_err(|_| other())?;
    if identities.is_empty() { Err(other()) } else { Ok(identities) }
}

fn no_bundle(path: &Path, detail: &str) -> Failure {
    refuse(format!("\"{}\" is not an escrow bundle", path.display())).with_detail(detail)
}

pub(super) fn damaged(path: &Path) -> Failure {
    refuse(format!("the bundle \"{}\" is damaged", path.display()))
        .with_detail("It was changed or truncated after it was written. Nothing was changed.")
        .with_hint("Use another copy of it.")
}

pub(super) fn hexadecimal(id: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}
