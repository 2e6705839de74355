//! New key material for a key.

use std::time::Duration;

use pagevault_keystore::protocol::ErrorClass;

use super::failure::{Refused, is_unsupported};
use super::session::Session;
use super::wrapping::Wrapping;
use crate::failure::Failure;

/// Interval of checks whether a rotation is complete.
const POLL: Duration = Duration::from_millis(500);

/// Maximum waiting time, if the deadline is later.
const LONGEST: Duration = Duration::from_secs(10 * 60);

/// Rotates `key`, unless it was rotated after `wrapping` was made: its alias may have moved to
/// another key, or it has newer key material by AWS's schedule or by an interrupted attempt. So
/// this can be killed and repeated at any step.
pub(super) async fn rotate(
    session: &Session,
    key: &str,
    wrapping: &Wrapping<'_>,
) -> Result<u64, Failure> {
    let now = session.key(key).await?;
    if now.arn != session.local(wrapping.arn)? || now.version > wrapping.key_version {
        return Ok(now.version);
    }
    // Rotations must be visible before one is started: otherwise its end could not be noticed.
    session.newest_rotation(&now.arn).await.map_err(explain)?;
    let request = session.client.rotate_key_on_demand().key_id(&now.arn);
    match session.ask("RotateKeyOnDemand", &now.arn, request.send()).await {
        Ok(_) => {}
        // A rotation is in progress already.
        Err(refused) if refused.code == "ConflictException" => {}
        Err(refused) => return Err(explain(refused)),
    }
    let wait = async {
        loop {
            if let Some(version) = session.newest_rotation(&now.arn).await?
                && version > now.version
            {
                return Ok::<u64, Refused>(version);
            }
            tokio::time::sleep(POLL).await;
        }
    };
    match session.in_time(LONGEST, wait).await {
        Some(Ok(version)) => Ok(version),
        Some(Err(refused)) if refused.error.class != ErrorClass::Deadline => Err(refused.error),
        _ => Err(Failure::new(
            ErrorClass::Deadline,
            format!("rotation of key \"{}\" has begun and is not complete yet", now.arn),
        )
        .with_detail(
            "AWS KMS completes it by itself. Until then the key wraps with its old material.",
        )
        .with_hint("Rotate again in a minute: this continues the same rotation.")
        .transient()),
    }
}

/// Messages for failures that no permission can fix.
fn explain(refused: Refused) -> Failure {
    let error = refused.error;
    let message = match refused.code.as_str() {
        "LimitExceededException" => "key cannot be rotated on demand any more",
        code if is_unsupported(code) => "key cannot be rotated on demand",
        "KMSInvalidStateException" => "key cannot be rotated in its present state",
        _ => return error,
    };
    Failure::new(ErrorClass::Denied, message).with_detail(error.detail()).with_hint(
        "Create a new key. Then move the alias to it and rotate again, or make it the master key \
         with set_database_master_key() or set_cluster_master_key(). A multi-Region key can be rotated in its \
         primary region.",
    )
}
