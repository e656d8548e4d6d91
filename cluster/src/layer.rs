//! An application's outermost layer, which relays requests to their sessions' owners.
//!
//! For a request served here, routing takes only one pass over its head and one in-memory lookup. For any other request it may also
//! allocate, since sending the request to another machine costs far more anyway.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{body::Body, response::IntoResponse};
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::{
    relay::wire::{self, FromPeer},
    routing::{
        fields::Fields,
        plan::Action,
        resume::RewriteOutcome,
        router::Router,
        serving::{RoutedBy, replace_if_relinquished, serve, serve_peer, serve_remote},
    },
    sessions::drain_gate::InFlightGuard,
};

/// Relays each request to its session's owner. Created by [`Cluster::layer`](crate::Cluster::layer).
///
/// It must be the outermost layer, so that inner layers process a relayed request only once, on the instance that serves it:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use axum::{Router, body::Body, routing::get};
/// use http::Request;
/// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
/// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
/// use tower_service::Service;
///
/// let member = Cluster::in_memory(&MemoryDirectory::default()).advertise("127.0.0.1:9000");
/// let cluster = member.connect().await?;
/// let mut app: Router = Router::new()
///     .route("/health", get(async || "well"))
///     .layer(cluster.protect(CancelOnDisconnectLayer::new()))
///     .layer(cluster.layer());
/// let response = app.call(Request::get("/health").body(Body::empty())?).await?;
/// assert_eq!(response.status(), 200, "a request without a session is served here");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ClusterLayer {
    router: Arc<Router>,
}

/// The service created by [`ClusterLayer`].
///
/// The service is ready even while the inner service is not, because requests served by another instance do not need the inner service. Any
/// other request waits for the inner service in its response future. An error from the inner service's `poll_ready` is passed through
/// unchanged.
pub struct ClusterService<S> {
    inner: S,
    is_ready: bool,
    router: Arc<Router>,
}

pin_project! {
    /// The response future returned by [`ClusterService`].
    pub struct ClusterFuture<F, E> {
        #[pin]
        kind: Kind<F, E>,
    }
}

pin_project! {
    #[project = KindProjected]
    enum Kind<F, E> {
        Local { #[pin] future: F, guard: Option<InFlightGuard>, router: Arc<Router> },
        /// The response may open a session.
        Opening { #[pin] future: F, router: Arc<Router> },
        /// The request is relayed, or has to wait before it can be served here.
        Boxed { future: BoxedFuture<E> },
    }
}

type BoxedFuture<E> = Pin<Box<dyn Future<Output = Result<Response<Body>, E>> + Send>>;

// === impl ClusterLayer ===

impl ClusterLayer {
    pub(crate) fn new(router: Arc<Router>) -> Self {
        Self { router }
    }
}

impl<S> Layer<S> for ClusterLayer {
    type Service = ClusterService<S>;

    fn layer(&self, inner: S) -> ClusterService<S> {
        ClusterService {
            inner,
            is_ready: false,
            router: self.router.clone(),
        }
    }
}

impl fmt::Debug for ClusterLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterLayer").finish_non_exhaustive()
    }
}

// === impl ClusterService ===

impl<S: Clone> ClusterService<S> {
    /// Takes the inner service that `poll_ready` polled, leaving a clone for the next request.
    fn take_ready(&mut self) -> S {
        let clone = self.inner.clone();
        mem::replace(&mut self.inner, clone)
    }

    /// Returns a clone of the inner service for a request that may wait or be relayed.
    ///
    /// This releases whatever `poll_ready` has reserved, because other requests need it in the meantime.
    fn release_ready(&mut self) -> S {
        self.take_ready().clone()
    }

    /// Serves a request here, first waiting for the inner service if it is not ready.
    fn serve(
        &mut self,
        request: Request<Body>,
        rewritten: RewriteOutcome,
        guard: Option<InFlightGuard>,
        is_ready: bool,
    ) -> ClusterFuture<S::Future, S::Error>
    where
        S: Service<Request<Body>, Response: IntoResponse, Future: Send + 'static> + Send + 'static,
    {
        let router = self.router.clone();
        if is_ready && rewritten == RewriteOutcome::Unchanged {
            return ClusterFuture::local(self.inner.call(request), guard, router);
        }
        let mut inner = self.take_ready();
        ClusterFuture::boxed(
            async move { serve(&router, &mut inner, request, rewritten, guard).await },
        )
    }
}

impl<S: Clone> Clone for ClusterService<S> {
    /// A clone is not ready, even if the original is.
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            is_ready: false,
            router: self.router.clone(),
        }
    }
}

impl<S> Service<Request<Body>> for ClusterService<S>
where
    S: Service<Request<Body>, Response: IntoResponse, Future: Send + 'static>
        + Clone
        + Send
        + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = ClusterFuture<S::Future, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.is_ready = self.inner.poll_ready(cx)?.is_ready();
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let is_ready = mem::take(&mut self.is_ready);
        // If layers are nested, only the outermost one routes the request.
        let routed_by = request.extensions().get::<RoutedBy>();
        if routed_by == Some(&RoutedBy(self.router.this_instance.incarnation)) {
            return self.serve(request, RewriteOutcome::Unchanged, None, is_ready);
        }
        if request.extensions().get::<FromPeer>().is_some() {
            let (router, mut inner) = (self.router.clone(), self.release_ready());
            return ClusterFuture::boxed(
                async move { serve_peer(&router, &mut inner, request).await },
            );
        }
        let fields = Fields::parse(request.headers());
        let (action, guard) = self.router.classify(fields.session);
        let has_session = fields.session.is_some();
        if fields.has_internal {
            wire::strip(request.headers_mut());
        }
        if action != Action::Serve {
            let (router, mut inner) = (self.router.clone(), self.release_ready());
            return ClusterFuture::boxed(async move {
                serve_remote(&router, &mut inner, request).await
            });
        }
        if has_session {
            let rewritten = self.router.rewrite_event_id(&mut request);
            return self.serve(request, rewritten, guard, is_ready);
        }
        if is_ready {
            let future = self.inner.call(request);
            return ClusterFuture::opening(future, self.router.clone());
        }
        let (router, mut inner) = (self.router.clone(), self.take_ready());
        ClusterFuture::boxed(async move {
            let unchanged = RewriteOutcome::Unchanged;
            let response = serve(&router, &mut inner, request, unchanged, None).await?;
            Ok(router.admit_new_session(response))
        })
    }
}

impl<S: fmt::Debug> fmt::Debug for ClusterService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterService")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

// === impl ClusterFuture ===

impl<F, E> ClusterFuture<F, E> {
    fn local(future: F, guard: Option<InFlightGuard>, router: Arc<Router>) -> Self {
        let kind = Kind::Local {
            future,
            guard,
            router,
        };
        Self { kind }
    }

    fn opening(future: F, router: Arc<Router>) -> Self {
        let kind = Kind::Opening { future, router };
        Self { kind }
    }

    fn boxed(future: impl Future<Output = Result<Response<Body>, E>> + Send + 'static) -> Self {
        let future = Box::pin(future);
        let kind = Kind::Boxed { future };
        Self { kind }
    }
}

impl<F, R, E> Future for ClusterFuture<F, E>
where
    F: Future<Output = Result<R, E>>,
    R: IntoResponse,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProjected::Local {
                future,
                guard,
                router,
            } => {
                let response = ready!(future.poll(cx))?.into_response();
                Poll::Ready(Ok(replace_if_relinquished(
                    router,
                    response,
                    guard.as_ref(),
                )))
            }
            KindProjected::Opening { future, router } => {
                let response = ready!(future.poll(cx))?;
                Poll::Ready(Ok(router.admit_new_session(response.into_response())))
            }
            KindProjected::Boxed { future } => future.as_mut().poll(cx),
        }
    }
}

impl<F, E> fmt::Debug for ClusterFuture<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterFuture").finish_non_exhaustive()
    }
}
