//! The request for the rest of a server's answer to a call.

use std::{convert::Infallible, future::poll_fn, time::Duration};

use axum::body::Body;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use tower_service::Service;

use super::credentials::{Credentials, is_harmless};
use crate::{
    headers::{EVENT_STREAM, LAST_EVENT_ID, is_of_type},
    origin::ClientConnection,
};

/// Time for the head of the server's response: 10 s.
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

/// Headers of a call that describe its body, or the responses that it accepts.
const CALL_ONLY_HEADERS: [HeaderName; 5] = [
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::EXPECT,
    header::ACCEPT,
];

/// The head of the request for the rest, copied from the head of the call's request.
pub(super) struct UpstreamResume<S> {
    service: S,
    uri: Uri,
    /// Without the headers of the body, and without the credentials, which the stream has. There is one list for each call in
    /// flight, and a list is smaller than a map.
    headers: Vec<(HeaderName, HeaderValue)>,
    /// A server may serve only the clients of some hosts or schemes.
    connection: Option<ClientConnection>,
}

/// The server's answer to the request for the rest.
pub(super) enum ResumeAnswer {
    /// The rest of the events.
    Events(Body),
    /// The server does not accept the credentials.
    Unauthorized,
    /// Any other answer, or none.
    Refused,
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

    fn request(&self, last: &HeaderValue, credentials: Option<&Credentials>) -> Request<Body> {
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
        headers.insert(LAST_EVENT_ID, last.clone());
        if let Some(credentials) = credentials {
            credentials.put_on(&mut request);
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
    /// Requests the events after the one with this id.
    pub(super) async fn send(
        &mut self,
        last: &HeaderValue,
        credentials: Option<&Credentials>,
    ) -> ResumeAnswer {
        let request = self.request(last, credentials);
        let answer = tokio::time::timeout(RESUME_TIMEOUT, call(&mut self.service, request)).await;
        let Ok(Ok(answer)) = answer else {
            return ResumeAnswer::Refused;
        };
        match answer.status() {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ResumeAnswer::Unauthorized,
            status if status.is_success() && is_of_type(answer.headers(), EVENT_STREAM) => {
                ResumeAnswer::Events(answer.into_body())
            }
            _ => ResumeAnswer::Refused,
        }
    }
}

/// Calls a service once it is ready.
async fn call<S: Service<Request<Body>>>(
    service: &mut S,
    request: Request<Body>,
) -> Result<S::Response, S::Error> {
    poll_fn(|cx| service.poll_ready(cx)).await?;
    service.call(request).await
}
