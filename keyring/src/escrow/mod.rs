//! `pagevault-keyring escrow`: the database keys, encrypted for public keys of the operator (age),
//! for the permanent loss of a provider.
//!
//! A bundle contains only database keys. They unwrap every data key, also those that are created
//! later. So a bundle stays valid until there is another database key; rotating a master key does
//! not matter, as it only wraps the same database keys again.

mod bundle;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pagevault_cipher::{KeyVersion, Secret32};
use pagevault_keystore::escrow::{MARK, Mark, RESTORED, Restored};
use pagevault_keystore::protocol::{
    Action, Base64, ErrorClass, Operation, Outcome, ProviderSpec, SecretBytes,
};
use pagevault_keystore::record::MAX_MASTER_KEYS;
use pagevault_keystore::state::State;
use pagevault_keystore::{CheckValue, DatabaseKey, Record, Scope, Wrapping, master_context};

use self::bundle::{Bundle, Key};
pub use self::bundle::{Form, identities, recipients};
use crate::access::Access;
use crate::audit::tools::TrailEntry;
use crate::failure::{Failure, refuse};
use crate::offline::{
    DIRECTORY, DatabaseKeys, Keystore, failure_of, put, require_not_started, require_stopped,
    unwrapped,
};

/// Writes a bundle of all database keys of a data directory to a new file, and records in the data
/// directory that they are in escrow. The server may be running. Returns the number of keys in the
/// bundle. Keys of dropped databases are left out if they cannot be unwrapped.
///
/// # Errors
/// If another key cannot be unwrapped, or the file exists.
pub fn export(
    data_directory: &Path,
    recipients: &[age::x25519::Recipient],
    output: &Path,
    form: Form,
    access: Access,
) -> Result<usize, Failure> {
    let keystore = Keystore::read_to_write(data_directory, access)?;
    bundle::require_place(&keystore, output)?;
    // Whoever holds the master key of a key group decides on its data: that is what a group is for.
    let all: BTreeSet<_> = keystore
        .state()
        .database_keys()
        .map(|(scope, version, _)| (scope, version))
        .filter(|(scope, _)| scope.key_group().is_none())
        .collect();
    if all.is_empty() {
        return Err(refuse("the keystore does not contain any database key yet"));
    }
    let readers: Vec<_> = recipients.iter().map(ToString::to_string).collect();
    let place = output.display().to_string();
    let entry = TrailEntry::begin(&keystore, "escrow_export", &place, &readers.join(" "))?;
    let mut unlocked = None;
    let done = export_keys(&keystore, all, recipients, output, form, &mut unlocked);
    let outcome = if done.is_ok() { "ok" } else { "failed" };
    with_trail_result(entry.end(&keystore, unlocked.as_ref(), outcome), done)
}

/// The result of an action, or the failure to record its outcome in the audit trail.
pub(crate) fn with_trail_result<T>(
    recorded: std::io::Result<()>,
    done: Result<T, Failure>,
) -> Result<T, Failure> {
    let done = done?;
    recorded.map_err(|error| {
        refuse(format!("the operation succeeded, but its outcome could not be recorded in the audit trail: {error}"))
    })?;
    Ok(done)
}

fn export_keys(
    keystore: &Keystore,
    all: BTreeSet<(Scope, KeyVersion)>,
    recipients: &[age::x25519::Recipient],
    output: &Path,
    form: Form,
    known: &mut Option<DatabaseKeys>,
) -> Result<usize, Failure> {
    let (gone, present) = all.into_iter().partition(|(scope, _)| keystore.is_gone(*scope));
    let unlocked = known.insert(keystore.unlock(&present)?);
    let gone: BTreeSet<(Scope, KeyVersion)> = gone;
    for key in gone {
        if let Ok(unlocked_key) = keystore.unlock(&BTreeSet::from([key])) {
            unlocked.extend(unlocked_key);
        }
    }
    prove(keystore, unlocked, "provider")?;
    let key = |(scope, version, key): (Scope, KeyVersion, &Secret32)| Key {
        scope: scope.number(),
        version: version.get(),
        key: SecretBytes::from_slice(key.expose()),
    };
    let made = now();
    Bundle::new(keystore.id(), made, unlocked.iter().map(key).collect())
        .write(recipients, output, form)?;
    let check = |(scope, version, key): (Scope, KeyVersion, &Secret32)| {
        ((scope, version), CheckValue::of(key, &keystore.id(), scope, version))
    };
    let keys: BTreeMap<_, _> = unlocked.iter().map(check).collect();
    let count = keys.len();
    let mark = Mark { keystore: keystore.id(), made, keys };
    put(keystore, MARK, mark.encode().as_bytes()).map_err(|error| {
        refuse(format!("the bundle was written, but the export could not be recorded: {error}"))
            .with_hint(
                "Until the next export, pagevault.status reports these keys as not in escrow.",
            )
    })?;
    Ok(count)
}

/// Result of [`check`].
pub struct Checked {
    /// Number of database keys in the bundle.
    pub database_keys: usize,
    /// Number of data keys of the data directory; all were unwrapped.
    pub data_keys: usize,
    /// Dropped databases that have keys which the bundle does not contain.
    pub passed_over: BTreeSet<Scope>,
}

/// Decrypts a bundle, and unwraps all data keys of a data directory with it. Changes nothing; the
/// server may be running.
///
/// # Errors
/// If none of the identities decrypts the bundle, if it belongs to another keystore, or if it does
/// not unwrap every data key.
pub fn check(
    bundle: &Path,
    identities: &[age::x25519::Identity],
    data_directory: &Path,
) -> Result<Checked, Failure> {
    let keystore = Keystore::read(data_directory, Access::default())?;
    let known = open(&keystore, bundle, identities)?;
    let data_keys = prove(&keystore, &known, "bundle")?;
    let passed_over = lacking(&keystore, &known).map(|(scope, _)| scope).collect();
    Ok(Checked { database_keys: known.iter().count(), data_keys, passed_over })
}

/// The provider that is to hold the keys.
pub struct Holder {
    /// The provider, with its new name.
    pub provider: ProviderSpec,
    /// Name of the master key there.
    pub key: String,
    /// Names of the lost providers, whose keys it is to hold; other providers keep what they wrap.
    /// Empty for all.
    pub instead_of: Vec<String>,
}

/// Decrypts a bundle and has another provider wrap the database keys of a data directory whose
/// server is down. It has this time to wrap all, and then to unwrap all. Returns the number of
/// wrapped keys.
///
/// The result is one file ([`RESTORED`]), which is written atomically: if the process is killed,
/// the data directory is as before or as after. Recovery may replay records of the lost provider,
/// so the server applies the file again after recovery.
///
/// # Errors
/// Those of [`check`]; also if the provider refuses, or the server is running. Then nothing is
/// changed.
pub fn restore(
    bundle: &Path,
    identities: &[age::x25519::Identity],
    data_directory: &Path,
    holder: &Holder,
    time: Duration,
) -> Result<usize, Failure> {
    require_stopped(data_directory)?;
    let keystore = Keystore::read_to_write(data_directory, Access::default().within(time))?;
    let known = open(&keystore, bundle, identities)?;
    let to = format!("provider {}, key {}", holder.provider.name, holder.key);
    let entry = TrailEntry::begin(&keystore, "escrow_restore", &bundle.display().to_string(), &to)?;
    let done = restore_keys(&keystore, &known, holder);
    let outcome = if done.is_ok() { "ok" } else { "failed" };
    with_trail_result(entry.end(&keystore, Some(&known), outcome), done)
}

fn restore_keys(
    keystore: &Keystore,
    known: &DatabaseKeys,
    holder: &Holder,
) -> Result<usize, Failure> {
    prove(keystore, known, "bundle")?;
    require_free_name(keystore, &holder.provider)?;
    let keys = to_move(keystore, known, &holder.instead_of)?;
    if keys.is_empty() {
        return Err(refuse("the bundle contains no key that these providers wrap")
            .with_detail("Nothing was changed.")
            .with_hint("Keys of key groups are in no bundle."));
    }
    let records = with_earlier(keystore, wrap(keystore, &keys, holder)?)?;
    let restored = Restored { keystore: keystore.id(), records };
    let bytes = restored.encode().map_err(|error| refuse(error.to_string()))?;
    // It may have been started while the provider was asked.
    require_stopped(keystore.data_directory())?;
    put(keystore, RESTORED, &bytes).map_err(|error| {
        refuse(format!(
            "could not write to \"{}\": {error}",
            keystore.data_directory().join(DIRECTORY).display()
        ))
        .with_detail("Nothing was changed.")
    })?;
    require_not_started(keystore, RESTORED)?;
    Ok(keys.len())
}

/// A database key with its scope and version.
type Known<'a> = (Scope, KeyVersion, &'a Secret32);

/// The keys that these providers wrap; all if none is named. Keys that only the bundle has are
/// taken to be wrapped like others of their scope.
fn to_move<'a>(
    keystore: &Keystore,
    known: &'a DatabaseKeys,
    lost: &[String],
) -> Result<Vec<Known<'a>>, Failure> {
    let state = keystore.state();
    let wrapped_by = |name: &str, scope: Scope| {
        let mut keys = state.database_keys().filter(|(of, ..)| *of == scope).peekable();
        keys.peek().is_none() || keys.any(|(.., key)| key.wrappings().any(|by| by.provider == name))
    };
    let wraps_any = |name: &String| {
        state.database_keys().any(|(.., key)| key.wrappings().any(|by| by.provider == *name))
    };
    if let Some(other) = lost.iter().find(|name| !wraps_any(name)) {
        return Err(refuse(format!("provider \"{other}\" wraps no database key"))
            .with_detail("Nothing was changed.")
            .with_hint("The names of providers are in pagevault.providers, and in the server's log where it does not start."));
    }
    let is_lost = |scope| lost.is_empty() || lost.iter().any(|name| wrapped_by(name, scope));
    Ok(known.iter().filter(|(scope, ..)| is_lost(*scope)).collect())
}

/// Requires that no other provider has the name: records in WAL may refer to it.
fn require_free_name(keystore: &Keystore, spec: &ProviderSpec) -> Result<(), Failure> {
    let Some(other) = keystore.state().provider(&spec.name) else { return Ok(()) };
    let options = serde_json::from_str(&other.options).ok();
    if other.kind == spec.kind && options.as_ref() == Some(&spec.options) {
        return Ok(());
    }
    Err(refuse(format!("another provider \"{}\" exists already", spec.name))
        .with_hint("Choose another name for the new provider with --provider-name."))
}

/// The keys of a bundle, if it belongs to this keystore.
fn open(
    keystore: &Keystore,
    path: &Path,
    identities: &[age::x25519::Identity],
) -> Result<DatabaseKeys, Failure> {
    let bundle = Bundle::read(path, identities)?;
    if bundle.keystore()? != keystore.id() {
        return Err(refuse(format!(
            "the bundle \"{}\" belongs to another cluster",
            path.display()
        ))
        .with_detail(format!(
            "It contains keys of keystore {}, but the data directory has keystore {}.",
            bundle.keystore,
            bundle::hexadecimal(keystore.id())
        )));
    }
    let mut known = BTreeMap::new();
    for Key { scope, version, key } in &bundle.keys {
        let bytes = key.expose().try_into().map_err(|_| bundle::damaged(path))?;
        let key = Secret32::from_bytes(bytes);
        let version = KeyVersion::new(*version).ok_or_else(|| bundle::damaged(path))?;
        let place = (Scope::from_number(*scope), version);
        keystore.require_matching(place, &key)?;
        if known.insert(place, key).is_some() {
            return Err(bundle::damaged(path));
        }
    }
    Ok(DatabaseKeys::from_known(known))
}

/// Requires that all database keys are present and unwrap every data key, except those of dropped
/// databases. Returns the number of data keys.
fn prove(keystore: &Keystore, known: &DatabaseKeys, source: &str) -> Result<usize, Failure> {
    let have = places(known);
    let missing: Vec<_> =
        lacking(keystore, known).filter(|(scope, _)| !keystore.is_gone(*scope)).collect();
    if !missing.is_empty() {
        return Err(too_old(keystore, &missing));
    }
    let mut opened = 0;
    for (file, entry) in keystore.state().files() {
        for (version, record) in &entry.keys {
            let has_key = have.contains(&(record.scope, record.key_version));
            if !has_key && (record.scope.key_group().is_some() || keystore.is_gone(record.scope)) {
                continue;
            }
            if known.data_key(file, *version, record).is_none() {
                return Err(Failure::new(
                    ErrorClass::WrongCiphertext,
                    format!(
                        "{} from the {source} does not unwrap a data key of the data directory",
                        name(record.scope, record.key_version)
                    ),
                )
                .with_detail(format!(
                    "This is version {version} of the data key of relation file {file}. Nothing was changed."
                )));
            }
            opened += 1;
        }
    }
    Ok(opened)
}

/// Scope and version of each of these keys.
fn places(known: &DatabaseKeys) -> BTreeSet<(Scope, KeyVersion)> {
    known.iter().map(|(scope, version, _)| (scope, version)).collect()
}

/// Database keys of the keystore that are not among these, without those of key groups.
fn lacking(keystore: &Keystore, known: &DatabaseKeys) -> impl Iterator<Item = (Scope, KeyVersion)> {
    let have = places(known);
    let all = keystore.state().database_keys().map(|(scope, version, _)| (scope, version));
    all.filter(move |key| !have.contains(key) && key.0.key_group().is_none())
}

/// The error for a bundle that lacks newer keys of the data directory.
fn too_old(keystore: &Keystore, missing: &[(Scope, KeyVersion)]) -> Failure {
    let named = |&(scope, version): &(Scope, KeyVersion)| {
        let keys = keystore.state().files().flat_map(|(_, entry)| entry.keys.values());
        let wraps = keys.filter(|key| (key.scope, key.key_version) == (scope, version)).count();
        format!("{}, which wraps {wraps} data keys", name(scope, version))
    };
    let list: Vec<_> = missing.iter().map(named).collect();
    let is_unseen = |(scope, _): &(Scope, _)| scope.is_database() && keystore.databases().is_none();
    let unseen = match missing.iter().any(is_unseen) {
        true => {
            " Only a complete data directory with all its tablespaces shows that a database was dropped, so that its keys are not needed."
        }
        false => "",
    };
    refuse("the bundle is older than keys of the data directory")
        .with_detail(format!("It does not contain {}. Nothing was changed.", list.join("; ")))
        .with_hint(format!(
            "Use a newer bundle, or restore a backup that is not newer than this bundle.{unseen}"
        ))
}

fn name(scope: Scope, version: KeyVersion) -> String {
    if scope.is_cluster() {
        format!("version {version} of the cluster's database key")
    } else {
        format!("version {version} of the key of {}", scope.name())
    }
}

/// The records that make the new provider the holder of these keys. Each new wrapping is unwrapped
/// again as a test.
fn wrap(keystore: &Keystore, keys: &[Known<'_>], holder: &Holder) -> Result<Vec<Record>, Failure> {
    let operation = |scope, action| Operation {
        provider: holder.provider.clone(),
        key: holder.key.clone(),
        context: master_context(&keystore.id(), scope),
        action,
        once: false,
    };
    let wraps = keys.iter().map(|&(scope, _, key)| {
        operation(scope, Action::Wrap { plaintext: SecretBytes::from_slice(key.expose()) })
    });
    let mut wrapped = Vec::new();
    for outcome in keystore.ask(wraps.collect()) {
        match outcome {
            Outcome::Wrapped { wrapped: bytes, key_version } => {
                wrapped.push((bytes.0, key_version));
            }
            other => return Err(failure_of(other)),
        }
    }
    let unwraps = keys.iter().zip(&wrapped).map(|(&(scope, _, _), (bytes, _))| {
        operation(scope, Action::Unwrap { wrapped: Base64(bytes.clone()) })
    });
    let outcomes = keystore.ask(unwraps.collect());
    for (outcome, &(scope, version, key)) in outcomes.into_iter().zip(keys) {
        if !key.matches(unwrapped(outcome)?.expose()) {
            return Err(Failure::new(
                ErrorClass::WrongCiphertext,
                format!("the provider did not return {} unchanged", name(scope, version)),
            ));
        }
    }
    let options = serde_json::to_string(&holder.provider.options).map_err(|_| {
        Failure::new(ErrorClass::Internal, "could not encode the provider's options as JSON")
    })?;
    let provider = &holder.provider;
    let mut records = vec![Record::Provider {
        name: provider.name.clone(),
        kind: provider.kind.clone(),
        options,
        programs: provider.programs,
    }];
    let at = now();
    for (&(scope, version, key), (wrapped, master_version)) in keys.iter().zip(wrapped) {
        let by = (provider.name.as_str(), holder.key.as_str());
        let check = keystore.check_value((scope, version), key);
        let new = DatabaseKey::new(check, Wrapping::new(by, master_version, wrapped, at));
        let made = made_at(keystore, scope, version).unwrap_or(at);
        let key = DatabaseKey { made, others: left(keystore, (scope, version), holder), ..new };
        records.push(Record::DatabaseKey { scope, version, key });
    }
    Ok(records)
}

/// The wrappings of a key by providers that are not lost, if those that are were named.
fn left(
    keystore: &Keystore,
    (scope, version): (Scope, KeyVersion),
    Holder { provider, key, instead_of }: &Holder,
) -> Vec<Wrapping> {
    if instead_of.is_empty() {
        return Vec::new();
    }
    let known = keystore.state().database_key(scope, version);
    let wrappings = known.into_iter().flat_map(DatabaseKey::wrappings);
    let others =
        wrappings.filter(|by| !instead_of.contains(&by.provider) && !by.is_by(&provider.name, key));
    // One place is taken. All are in use only if no lost provider wraps this version.
    others.take(MAX_MASTER_KEYS - 1).cloned().collect()
}

/// New records with those of earlier restores that they do not replace: the server has not applied
/// these yet.
fn with_earlier(keystore: &Keystore, new: Vec<Record>) -> Result<Vec<Record>, Failure> {
    let state = State::from_records(keystore.restored().iter().cloned().chain(new))
        .map_err(|error| refuse(format!("restored keys contradict each other: {error}")))?;
    let mut records = state.records(Scope::CLUSTER);
    records.retain(|record| match record {
        Record::Provider { name, .. } => state.uses_provider(name),
        _ => true,
    });
    Ok(records)
}

/// When a database key was made, if the keystore knows.
fn made_at(keystore: &Keystore, scope: Scope, version: KeyVersion) -> Option<i64> {
    keystore.state().database_key(scope, version).map(|key| key.made)
}

/// Seconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
