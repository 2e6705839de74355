//! Logging in to Vault as a principal of AWS (`pathLoginUpdateIam`, path_login.go in
//! builtin/credential/aws of Vault; not built into OpenBao).
//!
//! This program signs a request to AWS's STS that asks who signed it (GetCallerIdentity), and sends
//! the signed request to Vault. Vault sends it to STS, and compares the answer with the role.
//! Whoever has the signed request can do the same for some minutes, at any Vault server: so it can
//! contain the name of the server that it is for, which that server requires then.

use std::time::{Instant, SystemTime};

use aws_sdk_kms::config::Credentials;
use aws_sigv4::http_request::{SignableBody, SignableRequest, SigningSettings, sign};
use aws_sigv4::sign::v4::SigningParams;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use pagevault_keystore::protocol::ErrorClass;
use serde_json::{Map, Value};
use vaultrs::api::auth::aws::requests::IamLoginRequest;
use zeroize::Zeroizing;

use super::api::{Api, NoAnswer, built};
use crate::aws::config::AwsConfig;
use crate::aws::source::Source;
use crate::failure::Failure;
use crate::options::{Options, bad};
use crate::provider::Environment;

/// The region of STS at which Vault asks unless configured otherwise.
const DEFAULT_REGION: &str = "us-east-1";

/// The request that Vault sends to STS.
const BODY: &str = "Action=GetCallerIdentity&Version=2011-06-15";
const CONTENT_TYPE: &str = "application/x-www-form-urlencoded; charset=utf-8";

/// Names the Vault server that the request is for.
const SERVER_ID: &str = "X-Vault-AWS-IAM-Server-ID";

/// Role and credentials.
pub(super) struct AwsLogin {
    mount: String,
    role: String,
    server_id: Option<String>,
    region: String,
    source: Source,
    deadline: Option<Instant>,
}

/// URL and headers of a signed request, as Vault expects them. The headers are secret.
pub(super) struct SignedRequest {
    url: String,
    headers: Zeroizing<String>,
}

impl AwsLogin {
    pub(super) const OPTIONS: &[&str] =
        &["role", "server_id", "mount", "region", "profile", "credentials_file"];

    pub(super) const ADVICE: &str = "Compare the principal with bound_iam_principal_arn of the role, and the options \"region\" and \"server_id\" with sts_region and iam_server_id_header_value of the method's configuration. If AWS refuses the signature: check whether the credentials have expired, and the clock of this machine.";

    /// From options with these names.
    pub(super) fn read(
        options: &Options<'_>,
        mount: String,
        environment: &Environment,
    ) -> Result<AwsLogin, Failure> {
        let mut source = Source::read(options, environment.programs)?;
        let region = source.region.get_or_insert_with(|| DEFAULT_REGION.to_owned()).clone();
        let server_id = options.text("server_id")?.map(str::to_owned);
        if server_id.as_ref().is_some_and(|id| !id.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(bad("option \"server_id\" is not one word of printable ASCII"));
        }
        let role = options.required_text("role")?.to_owned();
        Ok(AwsLogin { mount, role, server_id, region, source, deadline: environment.deadline })
    }

    /// Description for messages.
    pub(super) fn shown(&self) -> String {
        format!("AWS role \"{}\" at auth/{}, signed for {}", self.role, self.mount, self.region)
    }

    /// Refuses a credentials file that cannot work.
    pub(super) fn check_file(&self) -> Result<(), Failure> {
        self.source.check_file()
    }

    /// Finds credentials and signs the request with them.
    pub(super) fn sign(&self) -> Result<SignedRequest, Failure> {
        let credentials =
            AwsConfig::find(&self.source, self.deadline)?.credentials(&self.source)?;
        self.signed(credentials, SystemTime::now()).ok_or_else(|| {
            Failure::new(ErrorClass::Internal, "could not sign a request to AWS")
                .with_hint("Check the AWS credentials.")
        })
    }

    fn signed(&self, credentials: Credentials, time: SystemTime) -> Option<SignedRequest> {
        let url = endpoint(&self.region);
        let mut headers = vec![("Content-Type", CONTENT_TYPE)];
        headers.extend(self.server_id.as_deref().map(|id| (SERVER_ID, id)));
        let identity = credentials.into();
        let parameters = SigningParams::builder()
            .identity(&identity)
            .region(&self.region)
            .name("sts")
            .time(time)
            .settings(SigningSettings::default())
            .build()
            .ok()?
            .into();
        let body = SignableBody::Bytes(BODY.as_bytes());
        let request = SignableRequest::new("POST", &url, headers.iter().copied(), body).ok()?;
        let (instructions, _) = sign(request, &parameters).ok()?.into_parts();
        let (added, _) = instructions.into_parts();
        let mut all: Map<String, Value> =
            headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        all.extend(added.iter().map(|header| (header.name().to_owned(), header.value().into())));
        let headers = Zeroizing::new(Value::Object(all).to_string());
        Some(SignedRequest { url, headers: Zeroizing::new(STANDARD.encode(headers.as_bytes())) })
    }

    /// Logs in with a signed request.
    pub(super) async fn token(
        &self,
        api: &Api,
        signed: &SignedRequest,
    ) -> Result<Zeroizing<String>, NoAnswer> {
        let mut request = IamLoginRequest::builder();
        request.mount(&self.mount).role(&self.role).iam_http_request_method("POST");
        request.iam_request_url(STANDARD.encode(&signed.url));
        request.iam_request_body(STANDARD.encode(BODY));
        request.iam_request_headers(signed.headers.as_str());
        api.log_in(built(request.build())?).await
    }
}

/// STS of a region. That of the default region has a name without it, which is the one that Vault
/// asks unless configured otherwise.
fn endpoint(region: &str) -> String {
    match region {
        DEFAULT_REGION => "https://sts.amazonaws.com/".to_owned(),
        region if region.starts_with("cn-") => format!("https://sts.{region}.amazonaws.com.cn/"),
        region => format!("https://sts.{region}.amazonaws.com/"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn signed(options: Value, token: Option<&str>) -> (String, Value) {
        let options = options.as_object().unwrap();
        let options = Options::new("vault", options, AwsLogin::OPTIONS).unwrap();
        let environment = Environment {
            data_directory: None,
            deadline: None,
            programs: false,
            repeats_programs: false,
        };
        let login = AwsLogin::read(&options, "aws".to_owned(), &environment).unwrap();
        let credentials =
            Credentials::new("AKID", "secret", token.map(str::to_owned), None, "test");
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let signed = login.signed(credentials, time).unwrap();
        let headers = STANDARD.decode(signed.headers.as_bytes()).unwrap();
        (signed.url.clone(), serde_json::from_slice(&headers).unwrap())
    }

    #[test]
    fn the_signature_covers_the_server_and_the_session() {
        let options = json!({"role": "db", "server_id": "vault.example.com"});
        let (url, headers) = signed(options, Some("session"));
        assert_eq!(url, "https://sts.amazonaws.com/");
        assert_eq!(headers[SERVER_ID], "vault.example.com");
        let authorization = headers["authorization"].as_str().unwrap();
        for part in [
            "AWS4-HMAC-SHA256 Credential=AKID/20231114/us-east-1/sts/aws4_request",
            "content-type;host;x-amz-date;x-amz-security-token;x-vault-aws-iam-server-id",
        ] {
            assert!(authorization.contains(part), "{authorization}");
        }
        assert!(!headers.to_string().contains("secret\""));
    }

    #[test]
    fn requests_are_signed_for_the_region_that_vault_asks() {
        for (region, url) in [
            ("eu-central-1", "https://sts.eu-central-1.amazonaws.com/"),
            ("cn-north-1", "https://sts.cn-north-1.amazonaws.com.cn/"),
        ] {
            let (signed_url, headers) = signed(json!({"role": "db", "region": region}), None);
            assert_eq!(signed_url, url);
            let scope = format!("/{region}/sts/aws4_request");
            assert!(headers["authorization"].as_str().unwrap().contains(&scope), "{headers}");
            assert!(headers.get(SERVER_ID).is_none());
        }
    }
}
