//! The HTTP layer of the client, which asks nobody else than it was told to, and holds no more of an answer than it may
//! have.
//!
//! A redirection is an answer like others, which fails: where it leads, what a request has for this store, such as a
//! session's token, is nobody's business.
//!
//! The client reads what a server says of an error, lists and results into memory before anybody sees them. Only the
//! answers that are marked are handed on as they arrive, to whoever counts their bytes.

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use isobath_qcow2::text::Shown;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use reqwest::ClientBuilder;
use reqwest::header::{HeaderValue, LOCATION};
use reqwest::redirect::Policy;
use std::time::Duration;

/// Most bytes of an answer that is read as a whole. The longest are pages of lists: of 1000 names, or 5000, with up to
/// 1024 characters.
const MOST: usize = 16 << 20;

/// Most bytes of what a server says of an error.
const MOST_OF_ERROR: usize = 64 << 10;

/// Marks a request whose successful answer is received piece by piece, by somebody who counts the bytes.
#[derive(Clone, Copy)]
pub(super) struct InPieces;

/// How long a connection to the metadata service of a host may take to be made, where there may be none; and how the
/// client says so.
const METADATA: (Duration, &str) = (Duration::from_secs(1), "1s");

/// Connects with clients that begin as this function says.
pub(super) struct Connector<F> {
    pub(super) begin: F,
    /// How long a connection may take to be made.
    pub(super) connect: Duration,
}

impl<F> std::fmt::Debug for Connector<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("connect", &self.connect).finish_non_exhaustive()
    }
}

impl<F: Fn() -> ClientBuilder + Send + Sync + 'static> HttpConnector for Connector<F> {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let given = |key| options.get_config_value(&key);
        let allows_http = given(ClientConfigKey::AllowHttp).is_some_and(|allow| allow == "true");
        let (of_metadata, shown) = METADATA;
        let connect = match given(ClientConfigKey::ConnectTimeout) {
            Some(limit) if limit == shown => of_metadata.min(self.connect),
            _ => self.connect,
        };
        let client = (self.begin)()
            .user_agent(concat!("isobath/", env!("CARGO_PKG_VERSION")))
            .redirect(Policy::none())
            .connect_timeout(connect)
            .https_only(!allows_http)
            .build();
        let client = client.map_err(|error| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(error),
        })?;
        Ok(HttpClient::new(Service(HttpClient::new(client))))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let in_pieces = request.extensions().get::<InPieces>().is_some();
        let (parts, body) = self.0.execute(request).await?.into_parts();
        if parts.status.is_redirection()
            && let Some(place) = parts.headers.get(LOCATION)
        {
            return Err(redirected(place));
        }
        let body = if !parts.status.is_success() {
            explanation(body).await?.into()
        } else if in_pieces {
            body
        } else {
            HttpResponseBody::new(Limited::new(body, MOST).map_err(|error| {
                error.downcast().map_or_else(
                    |_| {
                        let text = format!("the answer has more than {MOST} bytes");
                        HttpError::new_boxed(HttpErrorKind::Decode, text.into())
                    },
                    |error| *error,
                )
            }))
        };
        Ok(HttpResponse::from_parts(parts, body))
    }
}

/// The error of a redirection, which is not followed.
fn redirected(place: &HeaderValue) -> HttpError {
    const MOST: usize = 200;
    let place = String::from_utf8_lossy(place.as_bytes());
    let text = format!(
        "it redirects to '{}', which is not followed: is the endpoint or the region wrong?",
        Shown(&place.chars().take(MOST).collect::<String>())
    );
    HttpError::new_boxed(HttpErrorKind::Unknown, text.into())
}

/// What a server says of an error. One that says too much is not heard, so that the status remains.
async fn explanation(body: HttpResponseBody) -> Result<String, HttpError> {
    match Limited::new(body, MOST_OF_ERROR).collect().await {
        Ok(text) => Ok(String::from_utf8_lossy(&text.to_bytes()).into_owned()),
        Err(error) => match error.downcast::<HttpError>() {
            Ok(error) => Err(*error),
            Err(_) => Ok(format!("(a text of more than {MOST_OF_ERROR} bytes)")),
        },
    }
}
