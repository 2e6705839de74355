//! Common code of providers that use the network: the runtime, deadlines, TLS, and causes of
//! failures.

mod body;
mod cause;
pub(crate) mod socket;
pub mod tls;

use crate::failure::Failure;
use std::future::Future;
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::ErrorClass;
use tokio::runtime::{Builder, Runtime};

pub(crate) use body::{REPLY_LIMIT, Unread, read_reply, too_long};
pub(crate) use cause::{Cause, cause_of};
#[cfg(feature = "aws_kms")]
pub(crate) use tls::aws_mode;
pub(crate) use tls::{Trust, client_config, has_native_roots, pem, signing_key, use_cryptography};

/// Time limit for establishing a connection.
pub(crate) const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Time limit for a request, including the connection. It is repeated until the deadline.
pub(crate) const REQUEST_TIME: Duration = Duration::from_secs(20);

/// Requests end this long before the deadline, so that the error can name the server that did not
/// answer. Less than the first pause of `retry`, which then does not start another attempt.
const MARGIN: Duration = Duration::from_millis(40);

/// The result of `work`; `None` if it takes longer than `longest` or until the deadline.
pub(crate) async fn in_time<T>(
    deadline: Option<Instant>,
    longest: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let left = deadline
        .map(|deadline| deadline.saturating_duration_since(Instant::now()).saturating_sub(MARGIN));
    let time = left.map_or(longest, |left| left.min(longest));
    tokio::time::timeout(time, work).await.ok()
}

/// Performs a provider's requests, one at a time, on the calling thread.
pub(crate) struct Network {
    runtime: Runtime,
    deadline: Option<Instant>,
}

impl Network {
    /// Requests of this runtime end by `deadline`.
    pub(crate) fn new(deadline: Option<Instant>) -> Result<Network, Failure> {
        use_cryptography();
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| {
            Failure::new(ErrorClass::Internal, "could not start the network runtime")
                .with_detail(format!("{error}."))
        })?;
        Ok(Network { runtime, deadline })
    }

    /// Runs `work` until it ends or the deadline is reached.
    ///
    /// # Errors
    /// Those of `work`; `deadline` if the deadline is reached first.
    pub(crate) fn run<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let Some(deadline) = self.deadline else { return self.runtime.block_on(work) };
        self.runtime.block_on(async {
            tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| {
                Err(Failure::new(ErrorClass::Deadline, "no answer in time")
                    .with_detail("The reply was not complete before the time limit.")
                    .with_hint(
                        "The provider is slow or does not respond. Try again, or raise pagevault.keyring_timeout.",
                    )
                    .transient())
            })
        })
    }
}
