//! Region, credentials and HTTP client.
//!
//! None of the SDK's network defaults is used. Connections go where the options say, without a
//! proxy, with the same TLS as everywhere in this program, and are attempted once (`retry` repeats
//! them).

use std::path::PathBuf;
use std::time::Instant;

use aws_config::profile::ProfileFileCredentialsProvider;
use aws_config::provider_config::ProviderConfig;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_credential_types::provider::error::CredentialsError;
use aws_runtime::env_config::file::EnvConfigFiles;
use aws_sdk_kms::config::{Credentials, ProvideCredentials, SharedHttpClient};
use aws_smithy_http_client::Builder;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use pagevault_keystore::protocol::ErrorClass;

use super::bounded::bounded;
use super::credentials::no_credentials;
use super::source::{Source, check_region};
use super::sso::Sso;
use crate::failure::Failure;
use crate::net::{
    CONNECT_TIME, Network, REQUEST_TIME, Trust, aws_mode, client_config, has_native_roots, in_time,
    pem,
};
use crate::options::bad;
use crate::trust::FileKind;

/// Fixes the SDK's behaviour to that of this date, for all its versions.
pub(crate) fn behavior() -> BehaviorVersion {
    BehaviorVersion::v2026_01_12()
}

/// Configuration from the environment and the options.
pub(crate) struct AwsConfig {
    pub(crate) network: Network,
    pub(crate) deadline: Option<Instant>,
    pub(crate) sdk: SdkConfig,
    files: EnvConfigFiles,
    http: SharedHttpClient,
    pub(crate) region: Region,
}

impl AwsConfig {
    /// Reads the environment, the profile and, if neither names a region, the instance's metadata.
    pub(crate) fn find(source: &Source, deadline: Option<Instant>) -> Result<AwsConfig, Failure> {
        let network = Network::new(deadline)?;
        // For requests for credentials, which go to AWS itself, whatever the endpoint.
        let http = http_client(None)?;
        let mut loader = aws_config::defaults(behavior())
            .http_client(http.clone())
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts());
        if let Some(region) = &source.region {
            loader = loader.region(Region::new(region.clone()));
        }
        if let Some(profile) = &source.profile {
            loader = loader.profile_name(profile);
        }
        let files = source.profile_files()?;
        loader = loader.profile_files(files.clone());
        let loaded =
            network.run(async { Ok(in_time(deadline, REQUEST_TIME, loader.load()).await) })?;
        let sdk = loaded.ok_or_else(|| {
            Failure::new(ErrorClass::Deadline, "could not determine the AWS region in time")
                .with_detail("The instance metadata service did not respond.")
                .with_hint("Set the option \"region\".")
                .transient()
        })?;
        let region = sdk.region().filter(|region| !region.as_ref().is_empty());
        let Some(region) = region.cloned() else {
            return Err(bad("no AWS region is set")
                .with_detail(
                    "Neither the option \"region\" nor AWS_REGION in the server's environment, a profile or the instance metadata specifies one.",
                )
                .with_hint("Set it in the provider's options: {\"region\": \"eu-central-1\"}."));
        };
        check_region(region.as_ref())?;
        Ok(AwsConfig { network, deadline, sdk, files, http, region })
    }

    /// Requests credentials: from the profile that the options name, else from the standard chain
    /// (environment, profile, web identity, container, instance).
    pub(crate) fn credentials(&self, source: &Source) -> Result<Credentials, Failure> {
        if let Some(sso) = self.sso(source)? {
            return sso.credentials(self.deadline);
        }
        let named = source.named_profile();
        let timed = self.network.run(async {
            let asked = async {
                match (&named, self.sdk.credentials_provider()) {
                    (None, Some(chain)) => chain.provide_credentials().await,
                    _ => self.profile(source).provide_credentials().await,
                }
            };
            Ok(in_time(self.deadline, REQUEST_TIME, asked).await)
        })?;
        timed
            .unwrap_or_else(|| Err(CredentialsError::provider_timed_out(REQUEST_TIME)))
            .map_err(|error| no_credentials(&error, named.as_deref()))
    }

    /// The selected profile, if it is one of SSO, and nothing takes precedence over profiles.
    fn sso(&self, source: &Source) -> Result<Option<Sso>, Failure> {
        let is_set = std::env::var_os("AWS_ACCESS_KEY_ID").is_some_and(|id| !id.is_empty());
        if source.named_profile().is_none() && is_set {
            return Ok(None);
        }
        self.network.run(Sso::find(&self.files, source.profile.clone()))
    }

    fn profile(&self, source: &Source) -> ProfileFileCredentialsProvider {
        let config = ProviderConfig::without_region()
            .with_behavior_version(Some(behavior()))
            .with_http_client(self.http.clone())
            .with_region(Some(self.region.clone()))
            .with_retry_config(RetryConfig::disabled())
            .with_timeout_config(timeouts());
        let mut builder = ProfileFileCredentialsProvider::builder().configure(&config);
        if let Some(profile) = &source.profile {
            builder = builder.profile_name(profile);
        }
        builder.profile_files(self.files.clone()).build()
    }
}

/// Limits for each request.
pub(crate) fn timeouts() -> TimeoutConfig {
    TimeoutConfig::builder()
        .connect_timeout(CONNECT_TIME)
        .read_timeout(REQUEST_TIME)
        .operation_attempt_timeout(REQUEST_TIME)
        .operation_timeout(REQUEST_TIME)
        .build()
}

/// An HTTP client that trusts `ca_file`, or else the system's authorities.
pub(crate) fn http_client(ca_file: Option<PathBuf>) -> Result<SharedHttpClient, Failure> {
    let trust = match &ca_file {
        // Without native roots in the system the SDK would report an internal error.
        None => TrustStore::empty().with_native_roots(has_native_roots()?),
        Some(path) => {
            // The SDK panics on files that this refuses.
            client_config(&Trust { ca_file: ca_file.clone(), identity: None })?;
            TrustStore::empty().with_pem_certificate(pem(path, FileKind::Trusted)?.to_vec())
        }
    };
    let context = TlsContext::builder().with_trust_store(trust).build().map_err(|error| {
        Failure::new(ErrorClass::Internal, "could not initialize TLS")
            .with_detail(format!("{error}."))
    })?;
    let builder = Builder::new().tls_provider(Provider::Rustls(aws_mode()));
    Ok(bounded(builder.tls_context(context).build_https()))
}
