//! Attacks: everything that one client could try against another's calls, to no effect.
//!
//! `SECURITY.md` lists these tests, along with others that cover the same property.

use mcp_cancel_on_disconnect::{CancelReason, Outcome};
use serde_json::json;

use crate::{
    setup::{EventKind, GRACE, Setup, StoppedClock, TICK},
    support::*,
};

mod auth;
mod bytes;
mod event_ids;
mod order;
mod restored;
mod stored;
mod text;

/// The JSON-RPC id of the victim's call, which every attacker knows.
const ID: u64 = 7;

/// Starts a call and disconnects its client once two events have been delivered.
async fn lose_client(setup: &Setup, mcp: &Mcp) {
    let mut call = setup.start_primed(mcp, ID, "chatty", "victim").await;
    call.event().await.expect("the progress");
    call.fin();
    setup.events.detached(mcp, ID).await;
}

/// Asserts that no client has resumed, cancelled or ended the lost call.
///
/// Its grace period must be unchanged, too.
async fn assert_orphaned_on_time(setup: &Setup, mcp: &Mcp, clock: &StoppedClock) {
    let so_far = [EventKind::Started, EventKind::Detached(Some(GRACE))];
    assert_eq!(setup.events.of(mcp, ID), so_far);
    assert!(setup.witness.is_running("victim"));
    assert!(!setup.tokens.of("victim").is_cancelled());
    clock.advance(GRACE - TICK).await;
    setup.assert_usable(mcp).await;
    assert_eq!(setup.events.of(mcp, ID), so_far);
    clock.advance(TICK * 2).await;
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(setup.events.ended(mcp, ID).await, orphaned);
    assert!(setup.witness.ended("victim").await.is_cancelled());
}

/// Asserts that an attached call is unaffected and gets its answer.
async fn assert_answered(setup: &Setup, mcp: &Mcp, mut call: Connection) {
    setup.assert_usable(mcp).await;
    assert_eq!(setup.events.of(mcp, ID), [EventKind::Started]);
    assert!(setup.witness.is_running("victim"));
    setup.assert_completes("victim", &mut call).await;
    setup.exchanges.over_for("victim").await;
    let expected = [EventKind::Started, EventKind::Ended(Outcome::Completed)];
    assert_eq!(setup.events.of(mcp, ID), expected);
}

/// Returns the whole response to a resume, or `None` if the resume is refused.
async fn try_resume(mcp: &Mcp, last_event_id: &str) -> Option<String> {
    let mut resumed = mcp.resume(last_event_id).await;
    if resumed.head().await.status != 200 {
        return None;
    }
    let body = resumed.body_to_end().await;
    Some(String::from_utf8(body).expect("text"))
}

fn label() -> serde_json::Value {
    json!({ "label": "attacker" })
}
