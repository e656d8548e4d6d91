//! A disconnect on a watched socket while hyper is not reading.

use std::{convert::Infallible, net::SocketAddr};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::Request as AxumRequest,
    response::{Response, Sse, sse::Event},
    routing::any,
};
use futures_util::{StreamExt as _, stream};
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancelReason, Event as LayerEvent,
    observe::DetachCause,
    socket::{Peer, WatchedListener},
};
use tokio::{net::TcpListener, sync::mpsc};

use crate::support::{Connection, Request, within};

/// A server behind the layer whose handler neither reads a body nor answers.
struct NonReadingServer {
    callers: mpsc::UnboundedReceiver<Caller>,
    connection: Connection,
}

/// What such a server's handler knows about its client.
struct Caller {
    token: CallToken,
}

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_fin() {
    let mut server = NonReadingServer::serve().await;
    let caller = server.ask(&Request::new("GET", "/")).await;
    server.connection.send(&Request::new("GET", "/next")).await;
    server.connection.fin();
    caller.disconnected().await;
}

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_reset() {
    let mut server = NonReadingServer::serve().await;
    let caller = server.ask(&Request::new("GET", "/")).await;
    server.connection.send(&Request::new("GET", "/next")).await;
    server.connection.rst();
    caller.disconnected().await;
}

#[tokio::test]
async fn a_stray_line_end_does_not_hide_a_fin() {
    let mut server = NonReadingServer::serve().await;
    let request = Request::new("POST", "/").body("{}");
    let caller = server.ask(&request).await;
    server.connection.write(b"\r\n").await;
    server.connection.fin();
    caller.disconnected().await;
}

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_half_close() {
    let mut server = NonReadingServer::serve().await;
    let caller = server.ask(&Request::new("GET", "/")).await;
    server.connection.send(&Request::new("GET", "/next")).await;
    server.connection.half_close().await;
    caller.disconnected().await;
}

#[tokio::test]
async fn an_unread_body_does_not_hide_a_reset() {
    let mut server = NonReadingServer::serve().await;
    let request = Request::new("POST", "/").body(vec![b'x'; 1_000_000]);
    let caller = server.ask(&request).await;
    server.connection.rst();
    caller.disconnected().await;
}

/// If the stream kept going, hyper would hold the rest of the response forever.
///
/// It would hold the connection, too.
#[tokio::test]
async fn an_event_stream_ends_with_the_connection() {
    let (hand_out, mut tokens) = mpsc::unbounded_channel();
    let handler = async move |Extension(token): Extension<CallToken>| {
        hand_out.send(token).unwrap();
        Sse::new(stream::pending::<Result<Event, Infallible>>())
    };
    let app = Router::new()
        .route("/", any(handler))
        .layer(CancelOnDisconnectLayer::new());
    let mut connection = Connection::open(serve(app).await).await;
    connection.send(&Request::new("GET", "/")).await;
    connection.head().await;
    let token = within("the handler to start", tokens.recv()).await.unwrap();
    connection.write(b"GET /next HTTP/1.1\r\n").await;
    connection.fin();
    within("the token to fire", token.cancelled()).await;
}

#[tokio::test]
async fn a_detach_has_the_kernel_as_its_cause() {
    let (hand_out, mut calls) = mpsc::unbounded_channel();
    let handler = async move |_whole: String| {
        hand_out.send(()).unwrap();
        std::future::pending::<()>().await;
    };
    let (sender, mut causes) = mpsc::unbounded_channel();
    let layer = CancelOnDisconnectLayer::new().observe(move |event: &LayerEvent<'_>| {
        if let LayerEvent::Detached { cause, .. } = event {
            sender.send(*cause).unwrap();
        }
    });
    let app = Router::new().route("/", any(handler)).layer(layer);
    let mut connection = Connection::open(serve(app).await).await;
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a"}}"#;
    let request = Request::new("POST", "/").header("content-type", "application/json");
    connection.send(&request.body(call)).await;
    within("the handler to start", calls.recv()).await.unwrap();
    connection.write(b"GET /next HTTP/1.1\r\n").await;
    connection.fin();
    let cause = within("the detach to be reported", causes.recv())
        .await
        .unwrap();
    assert_eq!(cause, DetachCause::PeerClosed);
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let make = app.into_make_service_with_connect_info::<Peer>();
    let listener = WatchedListener::new(listener);
    spawn(async move { axum::serve(listener, make).await.unwrap() });
    addr
}

#[allow(
    clippy::disallowed_methods,
    reason = "a test's server needs its own task"
)]
fn spawn(server: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(server);
}

// === impl NonReadingServer ===

impl NonReadingServer {
    async fn serve() -> Self {
        let (hand_out, callers) = mpsc::unbounded_channel();
        let handler = async move |Extension(token): Extension<CallToken>, request: AxumRequest| {
            hand_out.send(Caller { token }).unwrap();
            std::future::pending::<()>().await;
            drop(request);
        };
        let app = Router::new()
            .route("/", any(handler))
            .layer(CancelOnDisconnectLayer::new());
        let connection = Connection::open(serve(app).await).await;
        Self {
            callers,
            connection,
        }
    }

    /// Sends a request whose body the server may never read, and waits for its handler to run.
    async fn ask(&mut self, request: &Request) -> Caller {
        self.connection.send(request).await;
        let caller = within("the handler to start", self.callers.recv())
            .await
            .unwrap();
        assert!(!caller.token.is_cancelled());
        caller
    }
}

// === impl Caller ===

impl Caller {
    /// Waits until the token notifies the handler of the disconnect.
    async fn disconnected(self) {
        within("the token to fire", self.token.cancelled()).await;
        assert_eq!(self.token.reason(), Some(CancelReason::ClientDisconnected));
    }
}

// === Bodies that are not event streams ===

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_disconnect_from_a_download() {
    assert_fires_on_disconnect("application/octet-stream", None).await;
}

#[tokio::test]
async fn a_pipelined_request_does_not_hide_a_disconnect_from_an_answer() {
    assert_fires_on_disconnect("application/json", None).await;
    assert_fires_on_disconnect("application/json", Some("100")).await;
}

/// Disconnects a client mid-response, after it has sent the first bytes of another request.
///
/// Asserts that the token fires.
async fn assert_fires_on_disconnect(content_type: &'static str, length: Option<&'static str>) {
    let (hand_out, mut tokens) = mpsc::unbounded_channel();
    let handler = async move |Extension(token): Extension<CallToken>, _whole: Bytes| {
        hand_out.send(token).unwrap();
        let half = stream::iter([Ok::<_, Infallible>("{")]).chain(stream::pending());
        let mut response = Response::new(Body::from_stream(half));
        let headers = response.headers_mut();
        headers.insert("content-type", content_type.parse().unwrap());
        if let Some(length) = length {
            headers.insert("content-length", length.parse().unwrap());
        }
        response
    };
    let app = Router::new().route("/", any(handler));
    let addr = serve(app.layer(CancelOnDisconnectLayer::new())).await;
    let mut connection = Connection::open(addr).await;
    let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}"#;
    let request = Request::new("POST", "/").header("content-type", content_type);
    connection.send(&request.body(call)).await;
    connection.head().await;
    connection.data().await;
    let token = tokens.recv().await.unwrap();

    connection.write(b"GET /next HTTP/1.1\r\n").await;
    connection.fin();

    within("the token to fire", token.cancelled()).await;
}
