//! A store of notes in the KV engine, version 2, of Vault or OpenBao. Its check-and-set makes sure
//! that no server writes over a note that it does not know.
//!
//! | option | meaning |
//! |---|---|
//! | `mount` | mount path of the engine; `secret` if not given |
//! | `path` | path of the secret; its field `note` is the note |
//!
//! The other options are those of the provider `vault`.

use serde_json::json;
use vaultrs::api::kv2::requests::{ReadSecretRequest, SetSecretRequest, SetSecretRequestOptions};

use super::api::built;
use super::session::Session;
use super::{failure, path, session};
use crate::failure::Failure;
use crate::options::{INSECURE_HTTP, Options};
use crate::provider::Environment;
use crate::store::{Store, StoredNote, Written};

/// Names of all options.
pub(crate) const OPTIONS: &[&str] =
    &["address", "addresses", INSECURE_HTTP, "mount", "path", "namespace", "ca_file", "auth"];

/// The field of the secret.
const FIELD: &str = "note";

struct Kv {
    mount: String,
    path: String,
    session: Session,
}

/// Creates the store from its options.
pub(crate) fn build(
    options: &Options<'_>,
    environment: &Environment,
) -> Result<Box<dyn Store>, Failure> {
    Ok(Box::new(Kv {
        mount: path("mount", options.text("mount")?.unwrap_or("secret"))?,
        path: path("path", options.required_text("path")?)?,
        session: session(options, environment)?,
    }))
}

impl Kv {
    /// The path in Vault's policies.
    fn shown(&self) -> String {
        format!("{}/data/{}", self.mount, self.path)
    }
}

impl Store for Kv {
    /// A secret that was deleted is answered with a reply of another form, which counts as an
    /// outage: nobody deletes the note in the course of things.
    fn read(&self) -> Result<Option<StoredNote>, Failure> {
        let found = self.session.find("read", &self.shown(), async |api| {
            let mut request = ReadSecretRequest::builder();
            api.ask(built(request.mount(&self.mount).path(&self.path).build())?).await
        })?;
        Ok(found.map(|secret| StoredNote {
            // Without the field it is not a note, which the reader finds out.
            note: secret.data[FIELD].as_str().unwrap_or_default().to_owned(),
            version: secret.metadata.version,
        }))
    }

    fn write(&self, note: &str, replaces: Option<u64>) -> Result<Written, Failure> {
        // The versions of a secret count from 1; 0 demands that there is none.
        let Ok(cas) = u32::try_from(replaces.unwrap_or(0)) else { return Ok(Written::Overtaken) };
        self.session.run("update", &self.shown(), async |api| {
            let mut request = SetSecretRequest::builder();
            request.mount(&self.mount).path(&self.path).data(json!({ FIELD: note }));
            request.options(SetSecretRequestOptions { cas });
            match api.ask(built(request.build())?).await {
                Ok(written) => Ok(Written::Done(written.version)),
                Err(error) if failure::is_overtaken(&error) => Ok(Written::Overtaken),
                Err(error) => Err(error),
            }
        })
    }
}
