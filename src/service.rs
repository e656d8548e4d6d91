//! The service, which tracks each request and its response in an exchange.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, header};
use http_body::Body;
use tower_service::Service;

use crate::{
    exchange::{Exchange, Guard, LayerShared, Registry},
    headers::McpHeaders,
    observe::Hint,
    options::Options,
    request::{Capture, Replay, ServicePrototype, TeeBody},
    response::{ResponseBody, ResponseFuture, ResponseOptions},
    token::CallToken,
};

/// Cancels the calls of clients that disconnect. [`CancelOnDisconnectLayer`](crate::CancelOnDisconnectLayer) creates this
/// service.
///
/// The inner service receives requests with a [`TeeBody`], and can respond with any body.
///
/// A request that already has a [`CallToken`] has passed through another layer of this kind, so this service passes it through unchanged.
/// There is one exception: if a session manager is already tracking the token's call, a handler has copied the head of its own request into
/// a new request, which this service treats like any other.
///
/// ```
/// use axum::body::Body;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, body::TeeBody};
/// use http::{Request, Response};
/// use tower::{ServiceBuilder, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let service = ServiceBuilder::new()
///     .layer(CancelOnDisconnectLayer::new())
///     .service(service_fn(async |_: Request<TeeBody<Body>>| {
///         Ok::<_, std::convert::Infallible>(Response::new(Body::from("hello")))
///     }));
/// let response = service.oneshot(Request::new(Body::empty())).await.unwrap();
/// assert_eq!(axum::body::to_bytes(Body::new(response.into_body()), 10).await.unwrap(), "hello");
/// # }
/// ```
#[derive(Clone)]
pub struct CancelOnDisconnect<S> {
    inner: S,
    shared: Arc<LayerShared>,
    prototype: Arc<ServicePrototype<S>>,
}

// === impl CancelOnDisconnect ===

impl<S: Clone> CancelOnDisconnect<S> {
    pub(crate) fn new(inner: S, options: Options, registry: Arc<Registry>) -> Self {
        Self {
            prototype: Arc::new(ServicePrototype::new(inner.clone())),
            inner,
            shared: Arc::new(LayerShared { options, registry }),
        }
    }
}

impl<S, B, RB> Service<Request<B>> for CancelOnDisconnect<S>
where
    S: Service<Request<TeeBody<B>>, Response = Response<RB>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: From<Bytes>,
    RB: Body + Send + 'static,
    RB::Data: From<Bytes>,
{
    type Response = Response<ResponseBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let outer = request.extensions().get::<CallToken>();
        if outer.is_some_and(|outer| !outer.exchange().is_bound()) {
            self.shared.registry.hints.emit(Hint::Nested);
            let future = self.inner.call(request.map(TeeBody::passthrough));
            return ResponseFuture::passthrough(future);
        }
        self.shared.registry.timer().ensure_on_current_runtime();
        let headers = McpHeaders::from_map(request.headers());
        let exchange = Arc::new(Exchange::new(self.shared.clone(), &request, &headers));
        let capture = Capture::for_request(request.method(), &headers);
        if exchange.may_need_replay() {
            let (prototype, shared) = (self.prototype.clone(), self.shared.clone());
            let replay: Replay<S, B> = Replay::new(prototype, shared, &request);
            exchange.set_replay(Arc::new(replay));
        }
        let token = CallToken::new(exchange.clone());
        request.extensions_mut().insert(token);
        let response_options =
            ResponseOptions::for_request(&request, exchange.may_carry_call(), &self.shared.options);
        if response_options.may_commit() {
            // Prevent the inner service from encoding the answer, which could then not be sent as an event.
            request.headers_mut().remove(header::ACCEPT_ENCODING);
        }
        // Create this before calling the inner service, because `call` itself may panic.
        let guard = Guard::new(exchange.clone());
        let future = {
            let _calling = guard.poll_guard();
            let request = TeeBody::observed(request, exchange, capture);
            self.inner.call(request)
        };
        ResponseFuture::new(guard, future, response_options)
    }
}

impl<S: fmt::Debug> fmt::Debug for CancelOnDisconnect<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelOnDisconnect")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
