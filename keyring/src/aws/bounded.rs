//! An HTTP client for the SDK that limits the size of replies.
//!
//! The SDK reads complete replies, from AWS KMS and from sources of credentials. So the client
//! below it enforces the limit.

use aws_sdk_kms::config::http::HttpRequest;
use aws_sdk_kms::config::{HttpClient, RuntimeComponents, SharedHttpClient};
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_types::body::SdkBody;
use aws_smithy_types::byte_stream::ByteStream;

use crate::net::{REPLY_LIMIT, too_long};

/// Wraps `client`; reads at most [`REPLY_LIMIT`] bytes of a reply.
pub(crate) fn bounded(client: SharedHttpClient) -> SharedHttpClient {
    http_client_fn(move |settings: &HttpConnectorSettings, components: &RuntimeComponents| {
        SharedHttpConnector::new(Bounded(client.http_connector(settings, components)))
    })
}

#[derive(Debug)]
struct Bounded(SharedHttpConnector);

impl HttpConnector for Bounded {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let answer = self.0.call(request);
        HttpConnectorFuture::new(async move {
            let mut answer = answer.await?;
            let body = std::mem::replace(answer.body_mut(), SdkBody::taken());
            *answer.body_mut() = SdkBody::from(whole(body).await?);
            Ok(answer)
        })
    }
}

async fn whole(body: SdkBody) -> Result<Vec<u8>, ConnectorError> {
    let mut pieces = ByteStream::new(body);
    let mut whole = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| ConnectorError::io(error.into()))?;
        if whole.len() + piece.len() > REPLY_LIMIT {
            return Err(ConnectorError::io(too_long().into()));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole)
}
