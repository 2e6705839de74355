//! Unwrapping a response-wrapped secret id of AppRole into the file from which logins read it.
//!
//! A wrapping token works once, and a second use is how a theft is noticed. But a helper process
//! serves one request, and many run at a time. So logins do not unwrap: the operator does, with
//! this command. Then no request of the server writes a file either, whose path SQL has named.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value};
use tempfile::NamedTempFile;
use vaultrs::api::sys::requests::{UnwrapRequest, WrappingLookupRequest};
use zeroize::Zeroizing;

use super::OPTIONS;
use super::api::{NoAnswer, built};
use super::auth::Auth;
use super::session::Session;
use crate::failure::Failure;
use crate::keyfile::place::Place;
use crate::options::{Options, bad, printable};
use crate::provider::Environment;
use crate::trust::{FileKind, io_error, read};

/// Replaces the file of the option `secret_id_file` by the secret id that the token in `token_file`
/// wraps, and removes `token_file`. Returns the path of the first.
///
/// # Errors
/// If options or files cannot be used, if the token wraps something else, or has been used.
pub(crate) fn unwrap_secret_id(
    options: &Map<String, Value>,
    token_file: &Path,
    environment: &Environment,
) -> Result<PathBuf, Failure> {
    let options = Options::new("vault", options, OPTIONS)?;
    let session = super::session(&options, environment)?;
    let Auth::AppRole { mount, secret_id_file, .. } = session.auth() else {
        return Err(bad("option \"auth\" is not AppRole")
            .with_hint("Only secret ids of AppRole are unwrapped by this command."));
    };
    let token = read::read(token_file, FileKind::Credentials)?;
    // Before the token is used: what is unwrapped then can be written.
    let mut draft = Draft::new(secret_id_file, environment)?;

    let origin = session.without_login(None, async |api| {
        let mut request = WrappingLookupRequest::builder();
        api.ask(built(request.token(token.as_str()).build())?).await
    })?;
    let origin = origin.map_err(|error| refused(error, &session, token_file))?.creation_path;
    if !is_secret_id(&origin, mount) {
        return Err(Failure::new(
            ErrorClass::WrongCiphertext,
            format!("the token in \"{}\" does not wrap a secret id", token_file.display()),
        )
        .with_detail(format!(
            "It was made by \"{}\" instead of auth/{mount}/role/<role>/secret-id. It was not used.",
            printable(&origin)
        ))
        .with_hint("Somebody may have replaced the token. Find out who has handled it."));
    }
    let unwrapped = session
        .without_login(Some(&token), async |api| api.ask(UnwrapRequest { token: None }).await)?;
    let mut unwrapped = unwrapped.map_err(|error| refused(error, &session, token_file))?;
    let Value::String(secret_id) = unwrapped["secret_id"].take() else {
        return Err(Failure::new(ErrorClass::Internal, "there is no secret id in Vault's reply")
            .with_detail("The wrapping token has been used."));
    };
    draft.write(&Zeroizing::new(secret_id))?;
    // Useless now. If it cannot be removed, another call fails and says why.
    let _ = fs::remove_file(token_file);
    Ok(secret_id_file.clone())
}

/// Whether a wrapped reply is from the endpoint that makes secret ids, or accepts given ones.
fn is_secret_id(origin: &str, mount: &str) -> bool {
    let role = origin.strip_prefix(&format!("auth/{mount}/role/"));
    let role = role.and_then(|rest| {
        rest.strip_suffix("/secret-id").or_else(|| rest.strip_suffix("/custom-secret-id"))
    });
    role.is_some_and(|role| !role.is_empty() && !role.contains('/'))
}

fn refused(error: NoAnswer, session: &Session, token_file: &Path) -> Failure {
    let (shown, file) = (session.server.shown(), token_file.display());
    match error {
        NoAnswer::Refused { status: 400 | 403, says } => Failure::new(
            ErrorClass::Unauthenticated,
            format!("{shown} does not accept the wrapping token in \"{file}\""),
        )
        .with_detail(format!(
            "It has expired, or it has been used already. Vault says: {}.",
            printable(&says.join("; "))
        ))
        .with_hint("If you have not used it, somebody else may have the secret id: destroy it in Vault, and find out who has handled the token. Then wrap another secret id."),
        error @ NoAnswer::Lost(_) => super::failure::of_outage(error, &session.server).with_hint(
            "Try again. If the token counts as used then, the reply with the secret id was lost: wrap another secret id.",
        ),
        error => super::failure::of_outage(error, &session.server),
    }
}

/// The new content of a file, which replaces the old when it is complete.
struct Draft {
    file: NamedTempFile,
    place: Place,
}

impl Draft {
    fn new(path: &Path, environment: &Environment) -> Result<Draft, Failure> {
        let place = Place::resolve_as(FileKind::Credentials, path)?;
        crate::providers::file::outside(&place, environment.data_directory.as_deref())?;
        place.check_directories()?;
        // Created with mode 0600.
        let file = NamedTempFile::new_in(place.directory()).map_err(|error| {
            let shown = place.directory().display();
            io_error(&error, &format!("could not create a file in \"{shown}\""))
        })?;
        Ok(Draft { file, place })
    }

    fn write(&mut self, secret_id: &str) -> Result<(), Failure> {
        let path = self.place.path();
        self.file
            .write_all(secret_id.as_bytes())
            .and_then(|()| self.file.as_file().sync_all())
            .and_then(|()| fs::rename(self.file.path(), &path))
            .and_then(|()| fs::File::open(self.place.directory())?.sync_all())
            .map_err(|error| {
                io_error(&error, &format!("could not write \"{}\"", path.display()))
                    .with_hint("The wrapping token has been used. Wrap another secret id.")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_made_a_secret_id_of_this_mount_is_accepted() {
        for good in ["auth/approle/role/db/secret-id", "auth/approle/role/db/custom-secret-id"] {
            assert!(is_secret_id(good, "approle"), "{good}");
        }
        for wrong in [
            "",
            "cubbyhole/response",
            "auth/approle/role//secret-id",
            "auth/approle/role/secret-id",
            "auth/approle/role/db/role-id",
            "auth/approle/role/db/secret-id/lookup",
            "auth/other/role/db/secret-id",
            "auth/approle/role/a/b/secret-id",
            "xauth/approle/role/db/secret-id",
        ] {
            assert!(!is_secret_id(wrong, "approle"), "{wrong}");
        }
    }
}
