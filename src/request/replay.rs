//! Cancels calls by replaying an HTTP POST into the inner service.
//!
//! This is how calls are cancelled without a session manager. The POST carries the original request's URI, extensions and most of
//! its headers, so that everything inside the layer (routing, auth, limits) treats it just like the call. Headers that belong to
//! the original body, or that would change what the POST does, are left out.

use std::{
    future::poll_fn,
    marker::PhantomData,
    sync::{Arc, Mutex},
};

use http::{Extensions, HeaderName, HeaderValue, Method, Request, Response, Uri, Version, header};
use tower_service::Service;

use super::TeeBody;
use crate::{
    call::{CallInfo, CancelReason, Scope},
    cancel::{CancelError, Canceller, Injection},
    exchange::{Exchange, LayerShared},
    headers::LAST_EVENT_ID,
    jsonrpc,
    lock::lock,
    token::CallToken,
};

/// Names of the headers left out of a replay.
///
/// They describe the original body or connection, make a request conditional or partial, or resume a stream.
const NOT_REPLAYED: [HeaderName; 15] = [
    header::CONTENT_LENGTH,
    header::CONTENT_ENCODING,
    header::CONTENT_RANGE,
    header::TRANSFER_ENCODING,
    header::TRAILER,
    header::EXPECT,
    header::CONNECTION,
    header::UPGRADE,
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::IF_RANGE,
    header::RANGE,
    HeaderName::from_static(LAST_EVENT_ID),
];

/// Name prefixes of other headers left out of a replay.
///
/// These are body digests, signatures over the body (RFC 9421), and idempotency keys, as well as the headers `Mcp-Method`,
/// `Mcp-Name` and `Mcp-Param-*`, which repeat parts of the body (SEP-2243).
const NOT_REPLAYED_PREFIXES: [&str; 11] = [
    "mcp-method",
    "mcp-name",
    "mcp-param-",
    "content-digest",
    "content-md5",
    "digest",
    "repr-digest",
    "signature",
    "x-signature",
    "idempotency-key",
    "x-idempotency-key",
];

/// The inner service. It is never called directly: every replay clones it and waits for the clone to be ready.
pub(crate) type ServicePrototype<S> = Mutex<S>;

/// The original request without its body.
pub(crate) struct Replay<S, B> {
    service: Arc<ServicePrototype<S>>,
    shared: Arc<LayerShared>,
    uri: Uri,
    version: Version,
    /// A list, because it is smaller than a map and faster to copy.
    headers: Vec<(HeaderName, HeaderValue)>,
    extensions: Extensions,
    body: PhantomData<fn(B)>,
}

// === impl Replay ===

impl<S, B> Replay<S, B> {
    /// Copies a request's head.
    ///
    /// The request's extensions must not contain the link to the exchange yet; otherwise, the exchange and the replay would form
    /// a reference cycle.
    pub(crate) fn new(
        service: Arc<ServicePrototype<S>>,
        shared: Arc<LayerShared>,
        request: &Request<B>,
    ) -> Self {
        let mut headers = Vec::with_capacity(request.headers().len());
        headers.extend(
            request
                .headers()
                .iter()
                .map(|(name, value)| (name.clone(), value.clone())),
        );
        Self {
            service,
            shared,
            uri: request.uri().clone(),
            version: request.version(),
            headers,
            extensions: request.extensions().clone(),
            body: PhantomData,
        }
    }

    /// Returns the POST that cancels a call.
    fn request(&self, call: &CallInfo, reason: CancelReason) -> Request<TeeBody<B>> {
        let content = jsonrpc::cancel_notification(call.request_id(), reason);
        let length = content.len();
        let mut request = Request::new(TeeBody::replay(content));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.version_mut() = self.version;
        *request.extensions_mut() = self.extensions.clone();
        // The token lets handlers that extract a token accept this request too, and makes an inner layer pass it through.
        let replayed = Arc::new(Exchange::for_replay(self.shared.clone()));
        request.extensions_mut().insert(CallToken::new(replayed));
        let headers = request.headers_mut();
        for (name, value) in self.headers.iter().filter(|(name, _)| is_replayed(name)) {
            headers.append(name.clone(), value.clone());
        }
        headers.insert(header::CONTENT_LENGTH, length.into());
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        request
    }
}

impl<S, B, RB> Canceller for Replay<S, B>
where
    S: Service<Request<TeeBody<B>>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: Send + 'static,
    RB: Send + 'static,
{
    fn scope(&self) -> Scope {
        Scope::of_request(&self.uri, &self.extensions)
    }

    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection {
        let request = self.request(call, reason);
        Box::pin(async move {
            let mut service = lock(&self.service).clone();
            let ready = poll_fn(|cx| service.poll_ready(cx)).await.is_ok();
            let response = if ready {
                service.call(request).await.ok()
            } else {
                None
            };
            match response.map(|response| response.status()) {
                Some(status) if status.is_success() => Ok(()),
                Some(status) => Err(CancelError::refused(status)),
                None => Err(CancelError::SERVICE_FAILED),
            }
        })
    }
}

fn is_replayed(name: &HeaderName) -> bool {
    let mut prefixes = NOT_REPLAYED_PREFIXES.into_iter();
    !NOT_REPLAYED.contains(name) && !prefixes.any(|prefix| name.as_str().starts_with(prefix))
}
