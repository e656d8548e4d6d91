//! Requests the rest of a server's answer after its event stream has been cut off.

use std::{convert::Infallible, future::poll_fn, time::Duration};

use axum::body::Body;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use tower_service::Service;

use super::credentials::{Credentials, is_harmless};
use crate::{
    headers::{EVENT_STREAM, LAST_EVENT_ID, has_content_type},
    origin::ClientConnection,
};

/// How long to wait for the server's response head.
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

/// Headers that describe a call's own body or the responses it accepts.
const CALL_ONLY_HEADERS: [HeaderName; 5] = [
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::EXPECT,
    header::ACCEPT,
];

/// The head of a request for the rest of the answer, copied from the call's request.
pub(super) struct UpstreamResume<S> {
    service: S,
    uri: Uri,
    /// All headers except [`CALL_ONLY_HEADERS`] and the credentials, which the stream stores.
    ///
    /// Stored as a list, which is smaller than a map, because every call in flight has its own copy.
    headers: Vec<(HeaderName, HeaderValue)>,
    /// The client's connection, needed because a server may only accept certain hosts or schemes.
    connection: Option<ClientConnection>,
}

/// The server's response to a request for the rest of the answer.
pub(super) enum ResumeResponse {
    /// The rest of the events.
    Events(Body),
    /// The server refused the credentials.
    Unauthorized,
    /// The server sent any other response, or none in time.
    Failed,
}

// === impl UpstreamResume ===

impl<S> UpstreamResume<S> {
    pub(super) fn new(service: S, call: &Request<Body>) -> Self {
        let mut headers = Vec::with_capacity(call.headers().len());
        let copied = call
            .headers()
            .iter()
            .filter(|(name, _)| is_harmless(name) && !CALL_ONLY_HEADERS.contains(name));
        headers.extend(copied.map(|(name, value)| (name.clone(), value.clone())));
        Self {
            service,
            uri: call.uri().clone(),
            headers,
            connection: call.extensions().get().cloned(),
        }
    }

    fn request(
        &self,
        last_event_id: &HeaderValue,
        credentials: Option<&Credentials>,
    ) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = Method::GET;
        *request.uri_mut() = self.uri.clone();
        let headers = request.headers_mut();
        for (name, value) in &self.headers {
            headers.append(name.clone(), value.clone());
        }
        headers.insert(
            header::ACCEPT,
            HeaderValue::from_static("text/event-stream"),
        );
        headers.insert(LAST_EVENT_ID, last_event_id.clone());
        if let Some(credentials) = credentials {
            credentials.apply_to(&mut request);
        }
        if let Some(connection) = &self.connection {
            request.extensions_mut().insert(connection.clone());
        }
        request
    }
}

impl<S> UpstreamResume<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    /// Requests the events after the event with this id.
    pub(super) async fn send(
        &mut self,
        last_event_id: &HeaderValue,
        credentials: Option<&Credentials>,
    ) -> ResumeResponse {
        let request = self.request(last_event_id, credentials);
        let response =
            tokio::time::timeout(RESUME_TIMEOUT, call_when_ready(&mut self.service, request)).await;
        let Ok(Ok(response)) = response else {
            return ResumeResponse::Failed;
        };
        match response.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ResumeResponse::Unauthorized,
            status if status.is_success() && has_content_type(response.headers(), EVENT_STREAM) => {
                ResumeResponse::Events(response.into_body())
            }
            _ => ResumeResponse::Failed,
        }
    }
}

async fn call_when_ready<S: Service<Request<Body>>>(
    service: &mut S,
    request: Request<Body>,
) -> Result<S::Response, S::Error> {
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}
