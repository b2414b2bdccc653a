//! The HTTP layer of the client, which holds no more of an answer than it may have.
//!
//! The client reads what a server says of an error, lists and results into memory before anybody sees them. Only the
//! answers that are marked are handed on as they arrive, to whoever counts their bytes.

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};

/// Most bytes of an answer that is read as a whole. The longest are pages of lists: of 1000 names, or 5000, with up to
/// 1024 characters.
const MOST: usize = 16 << 20;

/// Most bytes of what a server says of an error.
const MOST_OF_ERROR: usize = 64 << 10;

/// Marks a request whose successful answer is received piece by piece, by somebody who counts the bytes.
#[derive(Clone, Copy)]
pub(super) struct InPieces;

/// Connects as `C` does, and bounds the answers.
#[derive(Debug)]
pub(super) struct Bounded<C>(pub(super) C);

impl<C: HttpConnector> HttpConnector for Bounded<C> {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Service(self.0.connect(options)?)))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let in_pieces = request.extensions().get::<InPieces>().is_some();
        let (parts, body) = self.0.execute(request).await?.into_parts();
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
