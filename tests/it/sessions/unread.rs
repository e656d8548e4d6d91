//! A client that is connected but does not read, over real sockets.
//!
//! rmcp's session worker waits for its session's slowest stream, so such a client blocks all other calls in the
//! session, along with their cancels.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome};
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::{
    setup::{DISCONNECTED, Plan, Server, Setup, for_servers},
    support::*,
};

const LIMIT: Duration = Duration::from_secs(1);

/// More events than all of the buffers in between can hold.
const FLOOD: u32 = 10_000_000;

for_servers!([wrapped = Wrapped, layer_only = LayerOnly] (flavor = "multi_thread") {
    an_unread_stream_does_not_delay_the_cancel_of_another_call,
    an_unread_stream_of_an_h2_connection_does_not_delay_it_either,
    a_call_that_times_out_unread_frees_its_session,
});

async fn an_unread_stream_does_not_delay_the_cancel_of_another_call(server: Server) {
    let (setup, mcp) = stalling(server).client().await;
    let other = setup.start_call(&mcp, 1, "hold", "other").await;
    let unread = start_flood(&setup, &mcp).await;

    assert_cancels_in_time(&setup, &mcp, other).await;
    drop(unread);
}

async fn an_unread_stream_of_an_h2_connection_does_not_delay_it_either(server: Server) {
    let (setup, mcp) = stalling(server).client().await;
    let other = setup.start_call(&mcp, 1, "hold", "other").await;
    let request = flood(&mcp);
    let mut connection = H2::open(setup.served.addr).await;
    let mut unread = connection.send(&request).await;
    // The stream's window is never opened again.
    unread.head().await;
    until_blocked(&setup, &mcp).await;

    assert_cancels_in_time(&setup, &mcp, other).await;
}

/// The inner stream is dropped first, which lets the cancellation through.
async fn a_call_that_times_out_unread_frees_its_session(server: Server) {
    let time = Duration::from_secs(3);
    let plan = with_small_buffer(server).grace(Grace::Never);
    let (setup, mcp) = plan.layer(|layer| layer.call_timeout(time)).client().await;
    let unread = start_flood(&setup, &mcp).await;

    assert_eq!(
        setup.events.ended(&mcp, 2).await,
        Outcome::Cancelled(CancelReason::TimedOut)
    );

    setup.assert_usable(&mcp).await;
    assert!(setup.witness.ended("flood").await.is_cancelled());
    drop(unread);
}

// === Helpers ===

/// Plans a server with such a small send buffer that the stream is soon full.
fn with_small_buffer(server: Server) -> Plan {
    Plan::of(server).send_buffer(16 * 1024)
}

fn stalling(server: Server) -> Plan {
    with_small_buffer(server).layer(|layer| layer.stall_timeout(LIMIT))
}

fn flood(mcp: &Mcp) -> Request {
    mcp.call_request(2, "chatty", json!({ "label": "flood", "events": FLOOD }))
}

/// Starts a call whose client does not read, and waits until the session is blocked.
async fn start_flood(setup: &Setup, mcp: &Mcp) -> Connection {
    let mut unread = Connection::open_with_receive_buffer(setup.served.addr, 4096).await;
    unread.send(&flood(mcp)).await;
    until_blocked(setup, mcp).await;
    unread
}

/// Disconnects another call's client.
///
/// The call is cancelled soon after the unread one's stall timeout.
async fn assert_cancels_in_time(setup: &Setup, mcp: &Mcp, other: Connection) {
    let hung_up = Instant::now();
    other.fin();

    let cancelled = setup.witness.ended("other").await;
    assert!(cancelled.is_cancelled());
    assert!(cancelled.at() - hung_up <= LIMIT + Duration::from_secs(1));
    assert_eq!(setup.events.ended(mcp, 2).await, DISCONNECTED);
    setup.assert_usable(mcp).await;
}

/// Waits until the session stops answering.
async fn until_blocked(setup: &Setup, mcp: &Mcp) {
    setup.witness.started("flood").await;
    for ping in 1_000.. {
        let answered = async {
            let mut ping = mcp.request(ping, "ping", json!({})).await;
            ping.answer().await
        };
        if timeout(Duration::from_millis(200), answered).await.is_err() {
            return;
        }
        assert!(
            setup.witness.is_running("flood"),
            "the session was never blocked"
        );
    }
}
