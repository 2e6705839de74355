//! Messages about credentials: where they come from, or why there are none.

use std::error::Error;
use std::{env, io};

use aws_credential_types::credential_feature::AwsCredentialFeature;
use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_kms::config::Credentials;
use pagevault_keystore::protocol::ErrorClass;

use crate::failure::Failure;
use crate::net::{Cause, cause_of};
use crate::options::printable;

/// The source of credentials and the access key ID, which is public and in AWS's own logs.
pub(crate) fn describe(credentials: &Credentials) -> String {
    let source = credentials
        .get_property::<Vec<AwsCredentialFeature>>()
        .and_then(|features| features.iter().find_map(source))
        .unwrap_or_else(unmarked);
    format!("from {source}, access key ID {}", printable(credentials.access_key_id()))
}

/// The source of credentials that the SDK does not mark. It marks a web identity only if a profile
/// has it.
fn unmarked() -> &'static str {
    match env::var_os("AWS_WEB_IDENTITY_TOKEN_FILE") {
        Some(path) if !path.is_empty() => "a web identity",
        _ => "the default credential provider chain",
    }
}

fn source(feature: &AwsCredentialFeature) -> Option<&'static str> {
    use AwsCredentialFeature as From;
    Some(match feature {
        From::CredentialsEnvVars => "the environment",
        From::CredentialsStsAssumeRole => "an assumed role",
        From::CredentialsStsAssumeRoleWebId
        | From::CredentialsEnvVarsStsWebIdToken
        | From::CredentialsProfileStsWebIdToken => "a web identity",
        From::CredentialsProfile | From::CredentialsProfileSourceProfile => "a profile",
        From::CredentialsProfileProcess | From::CredentialsProcess => {
            "the credential_process of a profile"
        }
        From::CredentialsSso => "IAM Identity Center",
        From::CredentialsHttp => "the container",
        From::CredentialsImds => "the instance metadata",
        _ => return None,
    })
}

/// Why there are no credentials. `profile` is the one that the options name. Output of a process
/// and lines of a file are not repeated.
pub(crate) fn no_credentials(error: &CredentialsError, profile: Option<&str>) -> Failure {
    let (message, detail, retry) = match error {
        CredentialsError::ProviderTimedOut(_) => (
            "could not get AWS credentials in time",
            "The source of the credentials did not respond.".into(),
            true,
        ),
        CredentialsError::CredentialsNotLoaded(_) => {
            let detail = match profile {
                Some(profile) => format!("{profile} does not exist or has no credentials."),
                None => "Neither the environment nor a profile, a web identity, the container or the instance metadata provides credentials for the server's operating system user."
                    .to_owned(),
            };
            ("there are no AWS credentials", detail, false)
        }
        CredentialsError::InvalidConfiguration(_) => {
            ("invalid configuration of AWS credentials", causes(error), false)
        }
        _ => {
            let (detail, retry) = failed(error);
            ("could not get AWS credentials", detail, retry)
        }
    };
    let error = Failure::new(ErrorClass::Unauthenticated, message).with_detail(detail).with_hint(
        "Attach a role to the instance, or specify a file that belongs to the server's user in the option \
             \"credentials_file\".",
    );
    if retry { error.transient() } else { error }
}

/// The SDK's messages about its configuration: names of files and profiles, line numbers.
fn causes(error: &CredentialsError) -> String {
    let mut texts = Vec::new();
    let mut next = error.source();
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    format!("{}.", printable(&texts.join(": ").replace('\n', " ")))
}

/// A sentence about a source that exists but failed, and whether a retry may help.
fn failed(error: &CredentialsError) -> (String, bool) {
    let mut next = error.source();
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            let lasting =
                matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied);
            let Cause { detail, retry, .. } = cause_of(error);
            return (detail, retry && !lasting);
        }
        next = error.source();
    }
    ("The configured source of credentials did not provide any.".into(), false)
}
