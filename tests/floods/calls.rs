//! Sessions, calls and their records.

use std::time::Duration;

use http::Request;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, Limits, observe::Limit};
use serde_json::json;

use crate::{
    Growth, KIB, MIB, run_alone,
    server::{Server, UNKNOWN, VICTIM, request, resume},
};

const GRACE: Duration = Duration::from_secs(20);

/// The timer ends large numbers of grace periods in several batches. The paused clock does not advance until all of
/// them are done.
const ALL_ENDED: Duration = Duration::from_secs(1);

fn layer() -> CancelOnDisconnectLayer {
    CancelOnDisconnectLayer::new().grace(Grace::After(GRACE))
}

/// Runs spawned tasks.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[test]
fn a_hundred_thousand_unknown_sessions_leave_no_state() {
    run_alone(async || {
        tokio::time::pause();
        let server = Server::new(layer());
        let _victim = server.call(VICTIM.0, VICTIM.1).await;
        let growth = Growth::since_now();

        let cancel = json!({
            "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": VICTIM.1 },
        });
        let call =
            json!({ "jsonrpc": "2.0", "id": VICTIM.1, "method": "tools/call", "params": {} });
        for nth in 0..100_000 {
            let session = format!("{UNKNOWN} {nth}");
            let request: Request<_> = match nth % 4 {
                0 => request("POST", &session, call.to_string()),
                1 => request("POST", &session, cancel.to_string()),
                2 => request("DELETE", &session, String::new()),
                _ => resume(&session, "e-0"),
            };
            assert_eq!(server.send(request).await.status(), 404);
        }

        growth.assert_below(256 * KIB, "after 100,000 unknown sessions");
        assert_eq!(server.calls.len(), 1);
        server.assert_victim_in_flight();
    });
}

#[test]
fn detached_calls_beyond_the_limits_take_up_neither_memory_nor_a_place() {
    run_alone(async || {
        tokio::time::pause();
        let limits = Limits::default().detached(16_384).detached_per_session(256);
        let server = Server::new(layer().limits(limits));
        let of_session = limits.get(Limit::DetachedPerSession);
        let in_all = limits.get(Limit::Detached);
        drop(server.call(VICTIM.0, VICTIM.1).await);
        let growth = Growth::since_now();

        for id in 0..5_000 {
            drop(server.call("flood", id).await);
        }
        assert_eq!(server.calls.detached(), of_session + 1);
        growth.assert_below(2 * MIB, "5,000 calls of one session");

        for nth in 0..in_all + 5_000 {
            drop(server.call(&format!("flood {nth}"), 1).await);
        }
        assert_eq!(server.calls.detached(), in_all);
        growth.assert_below(4 * KIB * in_all, "of 21,384 sessions one each");
        server.assert_victim_in_flight();

        let back = server.send(resume(VICTIM.0, "e-0")).await;
        assert_eq!(
            server.calls.detached(),
            in_all - 1,
            "its client has resumed"
        );
        tokio::time::sleep(GRACE + ALL_ENDED).await;
        assert_eq!(server.calls.len(), 1);
        server.assert_victim_in_flight();
        drop(back);
    });
}

#[test]
fn attached_calls_beyond_the_limit_are_not_tracked() {
    run_alone(async || {
        tokio::time::pause();
        let server = Server::new(layer().limits(Limits::default().calls(1_000)));
        let _victim = server.call(VICTIM.0, VICTIM.1).await;

        let mut open = Vec::new();
        for nth in 0..3_000 {
            open.push(server.call(&format!("flood {nth}"), 1).await);
        }

        assert_eq!(server.calls.len(), 1_000);
        server.assert_victim_in_flight();
        drop(open);
        assert_eq!(server.calls.len(), 1_000, "they wait for their clients");
        tokio::time::sleep(GRACE + ALL_ENDED).await;
        assert_eq!(server.calls.len(), 1);
    });
}

/// The limits are 16 MiB in all and 1 MiB per session. The counted size is roughly the allocated size.
#[test]
fn retained_calls_take_no_more_memory_than_is_counted() {
    run_alone(async || {
        tokio::time::pause();
        let immediate = || CancelOnDisconnectLayer::new().grace(Grace::Immediate);
        let server = Server::new(immediate());
        let _victim = server.call(VICTIM.0, VICTIM.1).await;
        let growth = Growth::since_now();

        for id in 0..20_000 {
            drop(server.call("flood", id).await);
            tokio::task::yield_now().await;
        }
        settle().await;
        growth.assert_below(2 * MIB, "20,000 records of one session");

        for nth in 0..80_000 {
            drop(server.call(&format!("flood {nth}"), 1).await);
            tokio::task::yield_now().await;
        }
        settle().await;
        growth.assert_below(24 * MIB, "80,000 records of as many sessions");
        assert_eq!(server.calls.len(), 1);
        server.assert_victim_in_flight();
    });
}
