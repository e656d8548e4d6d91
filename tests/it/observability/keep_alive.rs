//! Clients whose disconnects hyper does not detect.
//!
//! Its buffer holds bytes that it does not need yet.
//!
//! The first write after the client's FIN succeeds and the second one fails, so probes detect the disconnect within two
//! intervals. (No probes are needed behind a `WatchedListener`, see `socket`.)

use std::{convert::Infallible, time::Duration};

use axum::{
    Extension, Router,
    extract::Request as AxumRequest,
    response::{Sse, sse::Event},
    routing::post,
};
use futures_util::stream;
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason, Outcome};
use tokio::{sync::mpsc, time::Instant};

use crate::{
    setup::{Plan, Server, for_servers},
    support::*,
};

const INTERVAL: Duration = Duration::from_millis(200);

/// How much a busy machine may add.
const MARGIN: Duration = Duration::from_secs(3);

for_servers!([wrapped = Wrapped, layer_only = LayerOnly, stateless_sse = StatelessSse] {
    a_pipelined_request_hides_a_fin_for_two_probes_at_most,
    a_stray_line_end_hides_a_fin_for_two_probes_at_most,
    a_pipelined_request_hides_a_half_close_for_two_probes_at_most,
    a_client_that_stays_connected_is_not_affected,
});

async fn a_pipelined_request_hides_a_fin_for_two_probes_at_most(server: Server) {
    let disconnect_call = async |mut call: Connection| {
        call.write(b"GET /next HTTP/1.1\r\nhost: a\r\n\r\n").await;
        call.fin();
    };
    disconnect(server, disconnect_call).await;
}

async fn a_stray_line_end_hides_a_fin_for_two_probes_at_most(server: Server) {
    let disconnect_call = async |mut call: Connection| {
        call.write(b"\r\n").await;
        call.fin();
    };
    disconnect(server, disconnect_call).await;
}

/// The client has stopped reading, so the second probe is answered with a reset.
async fn a_pipelined_request_hides_a_half_close_for_two_probes_at_most(server: Server) {
    let disconnect_call = async |mut call: Connection| {
        call.write(b"GET /next HTTP/1.1\r\nhost: a\r\n\r\n").await;
        call.half_close().await;
    };
    disconnect(server, disconnect_call).await;
}

async fn a_client_that_stays_connected_is_not_affected(server: Server) {
    let (setup, mcp) = probing(server).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    for _ in 0..5 {
        while !matches!(call.item().await, Some(SseItem::Comment(_))) {}
    }
    setup.assert_completes("a", &mut call).await;
}

#[tokio::test]
async fn an_unread_body_hides_a_reset_for_two_probes_at_most() {
    let (hand_out, mut tokens) = mpsc::unbounded_channel();
    let handler = async move |Extension(token): Extension<CallToken>, request: AxumRequest| {
        hand_out.send(token).unwrap();
        // Keeps the request unread for as long as the stream exists.
        let events = stream::unfold(request, async |request| {
            std::future::pending::<()>().await;
            Some((Ok::<_, Infallible>(Event::default()), request))
        });
        Sse::new(events)
    };
    let app = Router::new()
        .route("/", post(handler))
        .layer(CancelOnDisconnectLayer::new().keep_alive(INTERVAL));
    let served = serve(app).await;
    let mut connection = Connection::open(served.addr).await;
    let request = Request::new("POST", "/").body(vec![b'x'; 1_000_000]);
    connection.send(&request).await;
    let token = within("the handler", tokens.recv()).await.unwrap();
    assert!(!token.is_cancelled());

    let disconnected_at = Instant::now();
    connection.rst();

    within("the token to fire", token.cancelled()).await;
    assert!(disconnected_at.elapsed() <= 2 * INTERVAL + MARGIN);
    assert_eq!(token.reason(), Some(CancelReason::ClientDisconnected));
}

// === Helpers ===

fn probing(server: Server) -> Plan {
    Plan::of(server).layer(|layer| layer.keep_alive(INTERVAL))
}

async fn disconnect(server: Server, disconnect_call: impl AsyncFnOnce(Connection)) {
    let (setup, mcp) = probing(server).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;

    let since = Instant::now();
    disconnect_call(call).await;

    let outcome = setup.events.ended(&mcp, 1).await;
    let expected = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(outcome, expected);
    assert!(setup.witness.ended("a").await.at() - since <= 2 * INTERVAL + MARGIN);
}
