//! Session ids and other secrets, and how much of them the log shows.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancelReason, observe::SessionIds};
use rmcp::transport::streamable_http_server::SessionManager as _;
use tracing::Level;

use crate::{
    setup::{Lines, Plan, Server, Setup},
    support::*,
};

const FIELD: &str = " mcp.session.id=";
const SECRET: &str = "open-sesame";

/// Makes a call in each of two sessions. Returns each call's log lines and session id.
async fn logged(plan: Plan) -> [(Vec<String>, String); 2] {
    let lines = Lines::all();
    let setup = plan.start().await;
    let (one, other) = (setup.mcp().await, setup.mcp().await);
    for (mcp, label) in [(&one, "one"), (&other, "other")] {
        let mcp = mcp.clone().header("authorization", SECRET);
        let mcp = mcp.header("x-api-key", SECRET);
        hang_up(&setup, &mcp, label).await;
    }
    assert!(!lines.text().contains(SECRET), "{lines:?}");
    [(&one, "one"), (&other, "other")].map(|(mcp, label)| {
        let id = format!(r#"jsonrpc.request.id="{label}""#);
        let lines = lines.matching(|line| line.contains(&id));
        assert_eq!(lines.len(), 3, "{lines:?}");
        (lines, mcp.session_id().expect("a session").to_owned())
    })
}

async fn hang_up(setup: &Setup, mcp: &Mcp, label: &str) {
    let call = setup.start_call(mcp, label, "hold", label).await;
    setup.events.started(mcp, label).await;
    call.fin();
    setup.events.ended(mcp, label).await;
}

/// Returns how the lines show the session, which must be the same in all of them.
fn shown(lines: &[String]) -> &str {
    let shown = |line: &'_ String| {
        let at = line.find(FIELD).expect("the field") + FIELD.len();
        let end = line[at..].find(' ').map_or(line.len(), |end| at + end);
        (at, end)
    };
    let (at, end) = shown(&lines[0]);
    for line in lines {
        let (from, to) = shown(line);
        assert_eq!(line[from..to], lines[0][at..end]);
    }
    &lines[0][at..end]
}

#[tokio::test]
async fn sessions_are_shown_by_a_short_hash_that_joins_their_lines() {
    let [(one, one_id), (other, other_id)] = logged(Plan::of(Server::Wrapped)).await;
    let (one, other) = (shown(&one), shown(&other));
    assert_ne!(one, other);
    for (hash, id) in [(one, one_id), (other, other_id)] {
        let hash = hash.trim_matches('"');
        assert_eq!(hash.len(), 8, "{hash}");
        assert!(hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{hash}");
        assert!(!id.contains(hash), "the hash is part of the id");
    }
}

#[tokio::test]
async fn session_ids_may_be_shown_in_plain_text() {
    let plan = Plan::of(Server::LayerOnly);
    let plan = plan.layer(|layer| layer.log_session_ids(SessionIds::Verbatim));
    for (lines, id) in logged(plan).await {
        assert_eq!(shown(&lines), format!("{id:?}"));
    }
}

#[tokio::test]
async fn sessions_may_be_omitted() {
    let plan = Plan::of(Server::Wrapped);
    let plan = plan.layer(|layer| layer.log_session_ids(SessionIds::Omitted));
    for (lines, id) in logged(plan).await {
        let shows = |line: &String| line.contains(FIELD) || line.contains(&id);
        assert!(!lines.iter().any(shows), "{lines:?}");
    }
}

#[tokio::test]
async fn debug_does_not_show_header_values() {
    let plan = Plan::of(Server::LayerOnly);
    let plan = plan.layer(|layer| {
        layer.observe(|event: &mcp_cancel_on_disconnect::Event<'_>| {
            let shown = format!("{event:?}");
            assert!(!shown.contains(SECRET), "{shown}");
        })
    });
    let setup = plan.start().await;
    let mcp = setup.mcp().await.header("authorization", SECRET);
    let _call = setup.start_call(&mcp, 1, "hold", "a").await;
    let token = setup.tokens.of("a");
    let shown = format!("{token:?} {:?}", setup.calls);
    let session = mcp.session_id().expect("a session");
    assert!(
        !shown.contains(SECRET) && !shown.contains(session),
        "{shown}"
    );
}

#[tokio::test]
async fn the_line_of_a_handler_that_was_dropped_names_its_session() {
    let lines = Lines::up_to(Level::INFO);
    let setup = Plan::of(Server::Wrapped).abort_after(Duration::ZERO);
    let (setup, mcp) = setup.client().await;
    setup.start_call(&mcp, 1, "stubborn", "a").await.fin();
    setup.witness.ended("a").await;
    setup.assert_usable(&mcp).await;

    let dropped = lines.matching(|line| line.contains("handler did not stop on its own"));
    assert_eq!(dropped.len(), 1, "{dropped:?}");
    let cancelled = lines.matching(|line| line.contains("call cancelled"));
    assert_eq!(shown(&dropped), shown(&cancelled));
}

/// A signed token might differ from another only at its end.
#[test]
fn a_session_id_is_logged_verbatim_to_its_end() {
    let id = |end| format!("{}.{end}", "a".repeat(1_000));
    for id in [id("one"), id("other")] {
        let shown = SessionIds::Verbatim.display(&id);
        assert_eq!(shown.as_deref(), Some(&*id));
    }
    let endless = SessionIds::Verbatim
        .display(&"a".repeat(5_000))
        .map(|shown| shown.len());
    assert_eq!(endless, Some(4_096 + "…".len()));
}

/// The inner manager's error contains the session id.
#[tokio::test]
async fn no_session_id_is_logged_when_the_manager_inside_has_closed_it() {
    let lines = Lines::all();
    let (setup, mcp) = Plan::of(Server::Wrapped).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    setup.events.started(&mcp, 1).await;
    let session = mcp.session_id().expect("a session").to_owned();
    let closed = setup
        .sessions
        .local()
        .close_session(&session.as_str().into())
        .await;
    closed.expect("the session is closed");

    setup
        .calls
        .cancel_session(&session, CancelReason::Requested);
    setup.events.ended(&mcp, 1).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }

    assert!(!lines.text().contains(&session), "{}", lines.text());
}
