//! What the providers that use the network share: one runtime, one deadline, one way to trust
//! servers, one way to say why they cannot be reached.

mod body;
mod cause;
pub(crate) mod socket;
mod tls;

use crate::failure::Failure;
use std::future::Future;
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::ErrorClass;
use tokio::runtime::{Builder, Runtime};

pub(crate) use body::{REPLY_LIMIT, Unread, read_reply, too_long};
pub(crate) use cause::{Cause, cause_of};
pub(crate) use tls::{Trust, client_config, has_native_roots, pem, use_ring};

/// Longest time for one connection to come about.
pub(crate) const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Longest time for one request to be answered, the connection included. A provider that is slower
/// is asked again while the deadline lasts.
pub(crate) const REQUEST_TIME: Duration = Duration::from_secs(20);

/// Runs a provider's requests, one at a time, on the thread that asks.
pub(crate) struct Network {
    runtime: Runtime,
    deadline: Option<Instant>,
}

impl Network {
    /// A runtime whose requests end by `deadline`.
    pub(crate) fn new(deadline: Option<Instant>) -> Result<Network, Failure> {
        use_ring();
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| {
            Failure::new(ErrorClass::Internal, "could not start the network runtime")
                .with_detail(format!("{error}."))
        })?;
        Ok(Network { runtime, deadline })
    }

    /// Runs `work` to its end or to the deadline.
    ///
    /// # Errors
    /// Those of `work`; `deadline` when time runs out first.
    pub(crate) fn run<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let Some(deadline) = self.deadline else { return self.runtime.block_on(work) };
        self.runtime.block_on(async {
            tokio::time::timeout_at(deadline.into(), work).await.unwrap_or_else(|_| {
                Err(Failure::new(ErrorClass::Deadline, "no answer in time")
                    .with_detail("The answer had not come, or not all of it, when its time was up.")
                    .with_hint(
                        "The provider is slow or hangs. Try again, or raise pagevault.keyring_timeout.",
                    )
                    .transient())
            })
        })
    }
}
