//! New versions of a key.

use std::time::Duration;

use pagevault_keystore::protocol::ErrorClass;

use super::key::check_state;
use super::names::version_of;
use super::session::Session;
use crate::failure::Failure;

/// Interval of checks whether a version has its key material.
const POLL: Duration = Duration::from_millis(500);

/// Makes a version newer than `than` the primary one, unless there is one: Cloud KMS rotates by its
/// own schedule, and an administrator may have done it. A version that an interrupted attempt left
/// behind is used. So this can be killed and repeated at any step.
pub(super) fn rotate(session: &Session, key: &str, than: u64) -> Result<u64, Failure> {
    let now = session.key(key)?.primary_number()?;
    if now > than {
        return Ok(now);
    }
    let versions = session.versions(key)?;
    let numbers = versions.iter().filter_map(|version| {
        let number = version_of(key, &version.name)?;
        (number > now && (version.is_enabled() || version.is_coming())).then_some(number)
    });
    let next = match numbers.max() {
        Some(number) => number,
        None => session.create_version(key)?,
    };
    wait(session, key, next)?;
    // Another server may have rotated it meanwhile.
    let now = session.key(key)?.primary_number()?;
    if now > than {
        return Ok(now);
    }
    session.make_primary(key, next)?;
    match session.key(key)?.primary_number()? {
        now if now > than => Ok(now),
        _ => Err(session.service.wrong("The primary version is still the former one.")),
    }
}

/// Waits until a version is enabled: key material in an HSM takes some seconds.
fn wait(session: &Session, key: &str, number: u64) -> Result<(), Failure> {
    let not_yet = |error: &Failure| {
        Failure::new(
            ErrorClass::Deadline,
            format!("version {number} of key {key} has no key material yet"),
        )
        .with_detail(error.detail())
        .with_hint("Rotate again in a minute: this continues the same rotation.")
        .transient()
    };
    let mut version = session.version(key, number)?;
    while version.is_coming() {
        session.pause(POLL).map_err(|error| not_yet(&error))?;
        // The deadline may end a question as well as a pause.
        version = session.version(key, number).map_err(|error| match error.class {
            ErrorClass::Deadline => not_yet(&error),
            _ => error,
        })?;
    }
    check_state(key, &version)
}
