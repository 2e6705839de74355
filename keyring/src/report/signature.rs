//! Signatures of reports, in the format of minisign (<https://jedisct1.github.io/minisign/>).

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use minisign::{PublicKey, SecretKey, SecretKeyBox};
use zeroize::Zeroizing;

use crate::failure::{Failure, refuse};
use crate::trust::FileKind;
use crate::trust::read::read_whole;

/// Maximum size of a file with a secret key.
const LARGEST: usize = 4096;

/// The first bytes of a secret key that is not encrypted: its algorithm, and none for that.
const PLAIN: [u8; 4] = [b'E', b'd', 0, 0];

/// The bytes of a key that has no password.
fn without_password(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    let key = Zeroizing::new(STANDARD.decode(text.lines().nth(1)?.trim()).ok()?);
    key.starts_with(&PLAIN).then_some(key)
}

/// A secret key.
pub(crate) struct Signer(SecretKey);

impl Signer {
    /// Reads a secret key; asks for its password, if it has one, on the terminal.
    ///
    /// # Errors
    /// If others can read or replace the file, if it is not a key of minisign, or its password is
    /// wrong or cannot be asked for; in builds for FIPS, whose module does not sign in this format.
    pub(crate) fn read(path: &Path) -> Result<Signer, Failure> {
        if cfg!(feature = "fips") {
            return Err(refuse("this build does not sign reports").with_detail(
                "Signatures are of minisign, by Ed25519 and BLAKE2b, which are not of the validated module.",
            ));
        }
        let no_key = |detail: String| {
            refuse(format!("could not use the key in \"{}\"", path.display())).with_detail(detail)
        };
        let bytes = read_whole(path, FileKind::Credentials)?;
        if bytes.len() > LARGEST {
            return Err(no_key(format!("It has more than {LARGEST} bytes.")));
        }
        let text = std::str::from_utf8(&bytes);
        let text = text.map_err(|_| no_key("It is not text.".to_owned()))?;
        let open = |password| SecretKeyBox::from_string(text)?.into_secret_key(password);
        let opened = match without_password(text) {
            Some(key) => SecretKey::from_bytes(&key),
            None if io::stdin().is_terminal() => open(None),
            None => open(Some(String::new())),
        };
        opened.map(Signer).map_err(|error| {
            no_key(format!("{error}.")).with_hint(
                "Specify a secret key that \"minisign -G\" has made. Without a terminal it must have no password: \"minisign -G -W\".",
            )
        })
    }

    /// The signature of a file with this content and name, and the path where programs expect it.
    /// `made_at` and the file's name are signed as well.
    ///
    /// # Errors
    /// If there is no randomness.
    pub(crate) fn sign(
        &self,
        path: &Path,
        content: &[u8],
        made_at: &str,
    ) -> Result<(PathBuf, String), Failure> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let comment = format!("file:{name}\tmade:{made_at}\thashed");
        // A damaged key is noticed by its public key.
        let signature = PublicKey::from_secret_key(&self.0).and_then(|public| {
            let title = "signature from pagevault-keyring report";
            minisign::sign(Some(&public), &self.0, content, Some(&comment), Some(title))
        });
        let signature = signature.map_err(|error| {
            refuse(format!("could not sign \"{}\"", path.display()))
                .with_detail(format!("{error}."))
        })?;
        let mut beside = path.as_os_str().to_owned();
        beside.push(".minisig");
        Ok((beside.into(), signature.into_string()))
    }
}

#[cfg(all(test, not(feature = "fips")))]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use pagevault_keystore::protocol::ErrorClass;

    use super::*;

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("report.key");
        let pair = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
        // As `minisign -G -W` makes it.
        let mut key = pair.sk.to_bytes();
        key[2..4].fill(0);
        write(&path, format!("untrusted comment: a key\n{}\n", STANDARD.encode(&key))).unwrap();
        for (mode, is_accepted) in [(0o600, true), (0o640, true), (0o644, false), (0o660, false)] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let class = Signer::read(&path).map(drop).map_err(|failure| failure.class);
            let expected = if is_accepted { Ok(()) } else { Err(ErrorClass::Insecure) };
            assert_eq!(class, expected, "{mode:o}");
        }
    }
}
