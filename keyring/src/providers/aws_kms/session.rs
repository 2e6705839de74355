//! The client of AWS KMS, and its requests.

use std::future::Future;
use std::time::{Duration, Instant};

use aws_config::retry::RetryConfig;
use aws_sdk_kms::Client;
use aws_sdk_kms::config::Credentials;
use aws_sdk_kms::error::{ProvideErrorMetadata, SdkError};
use pagevault_keystore::protocol::ErrorClass;

use super::failure::{Refused, Reply};
use super::settings::Settings;
use crate::aws::config::{AwsConfig, behavior, http_client, timeouts};
use crate::failure::Failure;
use crate::net::{Network, REQUEST_TIME, in_time};

/// A client, and the limits of its requests.
pub(super) struct Session {
    network: Network,
    deadline: Option<Instant>,
    pub(super) client: Client,
    pub(super) region: String,
    /// Name of the server in messages.
    pub(super) place: String,
}

impl Session {
    /// Creates the client, without sending anything.
    pub(super) fn connect(
        ambient: AwsConfig,
        settings: &Settings,
        credentials: Credentials,
    ) -> Result<Session, Failure> {
        // Built from its parts, so that addresses in the environment (AWS_ENDPOINT_URL) are
        // ignored.
        let mut config = aws_sdk_kms::Config::builder()
            .behavior_version(behavior())
            .region(ambient.region.clone())
            .credentials_provider(credentials)
            .http_client(http_client(settings.ca_file.clone())?)
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts());
        config.set_endpoint_url(settings.endpoint.clone());
        config.set_use_fips(ambient.sdk.use_fips());
        config.set_use_dual_stack(ambient.sdk.use_dual_stack());
        Ok(Session {
            network: ambient.network,
            deadline: ambient.deadline,
            client: Client::from_conf(config.build()),
            place: settings.place(&ambient.region),
            region: ambient.region.to_string(),
        })
    }

    /// Runs requests on this thread.
    pub(super) fn run<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.network.run(work)
    }

    /// The result of `work`; `None` if it takes longer than `longest` or until the deadline.
    pub(super) async fn in_time<T>(
        &self,
        longest: Duration,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        in_time(self.deadline, longest, work).await
    }

    /// One request: name of the action, the key, and the SDK's call.
    pub(super) async fn ask<T, E>(
        &self,
        action: &str,
        key: &str,
        call: impl Future<Output = Result<T, SdkError<E, Reply>>>,
    ) -> Result<T, Refused>
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        match self.in_time(REQUEST_TIME, call).await {
            Some(Ok(reply)) => Ok(reply),
            Some(Err(error)) => Err(Refused::new(&self.place, action, key, &error)),
            None => Err(Refused::too_late(&self.place)),
        }
    }

    /// Requires that a reply is about the key that was asked to work. Its other parts are of no use
    /// if it is not.
    pub(super) fn same(&self, told: Option<&str>, asked: &str) -> Result<(), Failure> {
        if told == Some(asked) {
            return Ok(());
        }
        Err(Failure::new(
            ErrorClass::Unreachable,
            format!("{} gave a reply that does not fit the request", self.place),
        )
        .with_detail("It is about another key. Nothing of the reply was used.")
        .with_hint("Check the endpoint, and proxies and load balancers on the way to it.")
        .transient())
    }

    /// The failure for a reply that lacks a required part.
    pub(super) fn incomplete(&self, action: &str) -> Failure {
        Failure::new(
            ErrorClass::Unreachable,
            format!("{} gave an incomplete reply to kms:{action}", self.place),
        )
        .with_detail("A required part of the reply is missing or invalid. The reply may be from a proxy or load balancer.")
        .with_hint("Check that the endpoint is AWS KMS, and check proxies and load balancers on the way to it.")
        .transient()
    }
}
