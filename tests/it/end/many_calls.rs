//! A session with thousands of calls, and what it costs to end them.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CallId, CancelReason};
use serde_json::json;
use tokio::time::Instant;

use crate::{
    setup::{Server, Setup},
    support::*,
};

/// Maximum number of streams that the test opens on one HTTP/2 connection.
const STREAMS: usize = 100;

const FEW: usize = 200;

const MANY: usize = 10 * FEW;

/// Number of calls that are cancelled for each measurement.
const CANCELLED: usize = 100;

/// Number of measurements, of which a busy machine can spoil all but one.
const ATTEMPTS: usize = 5;

/// Starts calls that hold, and waits until all of them have started.
async fn hold(setup: &Setup, mcp: &Mcp, calls: usize) -> Vec<(H2, Vec<H2Stream>)> {
    let mut connections = Vec::new();
    for first in (0..calls).step_by(STREAMS) {
        let mut connection = H2::open(setup.served.addr).await;
        let mut streams = Vec::new();
        for id in first..calls.min(first + STREAMS) {
            let arguments = json!({ "label": id.to_string() });
            let request = mcp.call_request(id as u64, "hold", arguments);
            streams.push(connection.send(&request).await);
        }
        for stream in &mut streams {
            stream.head().await;
        }
        connections.push((connection, streams));
    }
    connections
}

fn cancel(setup: &Setup, ids: &[CallId]) -> Duration {
    let began = Instant::now();
    for id in ids {
        assert!(setup.calls.cancel(*id, CancelReason::Requested));
    }
    began.elapsed()
}

/// Otherwise ending all of a session's calls would take quadratic time, during which no other client is served.
#[tokio::test]
async fn cancelling_a_call_takes_no_longer_if_its_session_has_many_others() {
    let (setup, mcp) = Server::Wrapped.client().await;
    let _many = hold(&setup, &mcp, MANY).await;
    let of_many: Vec<_> = setup
        .calls
        .snapshot()
        .iter()
        .map(|call| call.info().id())
        .collect();
    let mut measured = Vec::new();
    for cancelled in of_many.chunks(CANCELLED).take(ATTEMPTS) {
        let (other, mcp) = Server::Wrapped.client().await;
        let _few = hold(&other, &mcp, FEW).await;
        let of_few: Vec<_> = other
            .calls
            .snapshot()
            .iter()
            .map(|call| call.info().id())
            .collect();
        let few = cancel(&other, &of_few[..CANCELLED]);
        let many = cancel(&setup, cancelled);
        if many < few * 5 / 2 {
            return;
        }
        measured.push((few, many));
    }
    panic!("{CANCELLED} of {FEW} and of {MANY} calls: {measured:?}");
}
