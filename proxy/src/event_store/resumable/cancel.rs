//! Sends the layer's cancellation for a call to the server, with the call's own credentials.

use std::{convert::Infallible, future::poll_fn};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use tower_service::Service;

use super::Resumable;
use crate::{
    event_store::{credentials::Credentials, session::Session, stream::Stream},
    message::Message,
};

// === impl Resumable ===

impl<S> Resumable<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    /// Sends the layer's cancellation for a call, with the call's credentials.
    ///
    /// The server may refuse these, for example because a token has expired during the call. The cancellation is then resent
    /// once, with the latest credentials accepted in the session, provided that these are different.
    pub(super) async fn cancel(
        &mut self,
        stream: &Stream,
        session: &Session,
        message: &Message<'_>,
        cancel: Request<Bytes>,
    ) -> Response<Body> {
        let with_credentials = |credentials: Option<&Credentials>| {
            let mut request = cancel.clone();
            if let Some(credentials) = credentials {
                credentials.apply_to(&mut request);
            }
            match stream.call_text() {
                Some(id) => with_request_id(request, message, id),
                None => request,
            }
        };
        let credentials = stream.credentials();
        let request = with_credentials(credentials.as_deref());
        let response = self.forward(request.map(Body::from)).await;
        let is_refused = matches!(
            response.status(),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN
        );
        let other = credentials
            .filter(|_| is_refused)
            .and_then(|refused| session.other_credentials(&refused));
        let Some(other) = other else {
            return response;
        };
        drop(response);
        // The service was only polled ready for the first request.
        let Ok(()) = poll_fn(|cx| self.inner.poll_ready(cx)).await;
        self.forward(with_credentials(Some(&other)).map(Body::from))
            .await
    }
}

/// Replaces the request id in a cancellation with the id as the client wrote it.
///
/// This matters to servers that distinguish `1` from `1.0`. If the id is already the same, the cancellation is left unchanged.
fn with_request_id(mut request: Request<Bytes>, message: &Message<'_>, id: &str) -> Request<Bytes> {
    let Some(body) = message.with_request_id(request.body(), id) else {
        return request;
    };
    let length = body.len().into();
    request.headers_mut().insert(header::CONTENT_LENGTH, length);
    request.map(|_| body)
}
