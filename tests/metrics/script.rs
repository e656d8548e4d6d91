//! Calls with every outcome, each a known number of times.

use std::time::Duration;

use axum::{
    Router,
    body::to_bytes,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use mcp_cancel_on_disconnect::{Grace, Limits, observe::Metrics};
use serde_json::json;
use test_support::{Connection, Mcp, serve};
use tokio::sync::OnceCell;

use crate::{
    endpoint,
    scrape::Scrape,
    setup::{EXCHANGE, EventKind, Plan, Server, Setup, StoppedClock},
};

/// How often the script should have made each thing happen.
pub(crate) struct Script {
    pub(crate) completed: f64,
    pub(crate) failed: f64,
    pub(crate) unknown: f64,
    pub(crate) client_cancelled: f64,
    pub(crate) disconnected: f64,
    pub(crate) orphaned: f64,
    pub(crate) timed_out: f64,
    pub(crate) closed: f64,
    pub(crate) in_flight: f64,
    pub(crate) detached: f64,
    pub(crate) disconnects: f64,
    pub(crate) ended_by_server: f64,
    pub(crate) resumed: f64,
    pub(crate) cancels_failed: f64,
    pub(crate) untracked: f64,
    pub(crate) dropped: f64,
    pub(crate) unparsed: f64,
    pub(crate) other_methods: f64,
    pub(crate) other_tools: f64,
    pub(crate) resumed_after_s: f64,
    pub(crate) orphaned_after_s: f64,
}

/// The counts for the script below, made by hand.
pub(crate) const SCRIPT: Script = Script {
    completed: 5.0,
    failed: 1.0,
    unknown: 1.0,
    client_cancelled: 1.0,
    disconnected: 3.0,
    orphaned: 3.0,
    timed_out: 1.0,
    closed: 1.0,
    in_flight: 2.0,
    detached: 1.0,
    disconnects: 7.0,
    ended_by_server: 1.0,
    resumed: 1.0,
    cancels_failed: 1.0,
    untracked: 1.0,
    dropped: 1.0,
    unparsed: 1.0,
    other_methods: 1.0,
    other_tools: 1.0,
    resumed_after_s: 3.0,
    orphaned_after_s: 60.003,
};

/// Neither a method nor a tool.
pub(crate) const UNKNOWN_NAME: &str = "no-such-name";

const GRACE: Duration = Duration::from_secs(20);
const TIMEOUT: Duration = Duration::from_secs(30);
/// tokio rounds timers up to this.
const TICK: Duration = Duration::from_millis(1);
const ABSENCE: Duration = Duration::from_secs(3);

/// Marks a request that is read and then refused.
const REFUSED: &str = "x-refused";

/// Returns the metrics exported after the script, which runs only once.
pub(crate) async fn scripted() -> &'static Scrape {
    static SCRAPE: OnceCell<Scrape> = OnceCell::const_new();
    SCRAPE.get_or_init(run).await
}

async fn run() -> Scrape {
    let prometheus = endpoint::install().expect("the only recorder");
    let clock = StoppedClock::stop();
    let immediate = counted(Server::Wrapped).start().await;
    let mcp = immediate.mcp().await;
    complete(&immediate, &mcp, 3).await;
    hang_up(&immediate, &mcp, 2).await;
    cancel(&immediate, &mcp).await;
    reuse_an_id(&immediate, &mcp).await;
    send_unknown_requests(&mcp).await;
    close_the_session(&immediate).await;

    let setup = counted(Server::Wrapped).grace(Grace::After(GRACE));
    let setup = setup.start().await;
    let mcp = setup.mcp().await;
    resume(&setup, &mcp, &clock).await;
    become_orphans(&setup, &mcp, &clock, 2).await;

    let limited = counted(Server::Wrapped).layer(|layer| layer.call_timeout(TIMEOUT));
    exceed_timeout(&limited.start().await, &clock).await;

    let full = counted(Server::Wrapped).layer(|layer| layer.limits(Limits::default().calls(0)));
    exceed_limit(&full.start().await).await;

    let without_retention = counted(Server::Wrapped).grace(Grace::After(GRACE));
    let without_retention = without_retention
        .layer(|layer| layer.limits(Limits::default().retained(0).retained_per_session(0)));
    let without_retention = without_retention.start().await;
    let mcp = without_retention.mcp().await;
    become_orphans(&without_retention, &mcp, &clock, 1).await;

    let refusing = counted(Server::LayerOnly).inside(refusing).start().await;
    let mcp = refusing.mcp().await;
    be_refused(&refusing, &mcp).await;
    fail_to_cancel(&refusing, &mcp).await;

    let mcp = setup.mcp().await;
    let _attached = setup.start_call(&mcp, 1, "hold", "attached").await;
    let _detached = start_polled_call(&setup, &mcp, 2).await;

    let served = serve(endpoint::router(prometheus)).await;
    let request = test_support::Request::new("GET", "/metrics");
    let reply = Connection::fetch(served.addr, &request).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4");
    Scrape::parse(reply.text().to_owned())
}

fn counted(server: Server) -> Plan {
    let metrics = Metrics::new().tools(["hold"]);
    Plan::of(server).layer(|layer| layer.observe(metrics))
}

async fn complete(setup: &Setup, mcp: &Mcp, times: usize) {
    for nth in 0..times {
        let label = format!("complete-{nth}");
        let mut call = setup.start_call(mcp, &*label, "hold", &label).await;
        setup.assert_completes(&label, &mut call).await;
        setup.events.ended(mcp, &*label).await;
    }
}

async fn hang_up(setup: &Setup, mcp: &Mcp, times: usize) {
    for nth in 0..times {
        let label = format!("hang-up-{nth}");
        let call = setup.start_call(mcp, &*label, "hold", &label).await;
        call.fin();
        setup.events.ended(mcp, &*label).await;
    }
}

async fn cancel(setup: &Setup, mcp: &Mcp) {
    let _call = setup.start_call(mcp, "cancel", "hold", "cancel").await;
    assert_eq!(mcp.cancel("cancel").await, 202);
    setup.events.ended(mcp, "cancel").await;
}

/// The layer stops tracking the older call, and the newer one completes.
async fn reuse_an_id(setup: &Setup, mcp: &Mcp) {
    let _older = setup.start_call(mcp, "again", "hold", "older").await;
    let mut newer = setup.start_call(mcp, "again", "hold", "newer").await;
    setup.assert_completes("newer", &mut newer).await;
    let is_end = |kind| matches!(kind, EventKind::Ended(_));
    setup.events.count(mcp, "again", 2, is_end).await;
}

/// Sends an unknown tool, an unknown method, and a body that is not JSON. Each is answered with an
/// error.
async fn send_unknown_requests(mcp: &Mcp) {
    let mut call = mcp.call("tool", UNKNOWN_NAME, json!({})).await;
    call.messages().await;
    let mut call = mcp.request("method", UNKNOWN_NAME, json!({})).await;
    call.messages().await;
    assert_eq!(mcp.post_raw("no JSON at all", &[]).await.status, 415);
}

async fn close_the_session(setup: &Setup) {
    let mcp = setup.mcp().await;
    let _call = setup.start_call(&mcp, "close", "hold", "close").await;
    assert_eq!(mcp.delete().await, 202);
    setup.events.ended(&mcp, "close").await;
}

async fn resume(setup: &Setup, mcp: &Mcp, clock: &StoppedClock) {
    let first = cut(setup, mcp, "back").await;
    clock.advance(ABSENCE).await;
    let mut resumed = mcp.resume(&first).await;
    resumed.head().await;
    setup.events.resumed(mcp, "back", 1).await;
    setup.assert_completes("back", &mut resumed).await;
    setup.events.ended(mcp, "back").await;
}

async fn become_orphans(setup: &Setup, mcp: &Mcp, clock: &StoppedClock, count: usize) {
    for nth in 0..count {
        cut(setup, mcp, &format!("orphan-{nth}")).await;
    }
    clock.advance(GRACE + TICK).await;
    for nth in 0..count {
        setup.events.ended(mcp, format!("orphan-{nth}")).await;
    }
}

async fn exceed_timeout(setup: &Setup, clock: &StoppedClock) {
    let mcp = setup.mcp().await;
    let _call = setup.start_call(&mcp, "late", "hold", "late").await;
    setup.events.started(&mcp, "late").await;
    clock.advance(TIMEOUT + TICK).await;
    setup.events.ended(&mcp, "late").await;
}

async fn exceed_limit(setup: &Setup) {
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, "beyond", "hold", "beyond").await;
    setup.assert_completes("beyond", &mut call).await;
}

async fn be_refused(setup: &Setup, mcp: &Mcp) {
    let refused = mcp.clone().header(REFUSED, "1");
    let arguments = json!({ "label": "refused" });
    let mut call = refused.call("refused", "hold", arguments).await;
    assert_eq!(call.head().await.status, 401);
    setup.events.ended(mcp, "refused").await;
}

async fn fail_to_cancel(setup: &Setup, mcp: &Mcp) {
    let call = setup.start_call(mcp, "failed", "hold", "failed").await;
    call.fin();
    let is_failed = |kind| matches!(kind, EventKind::CancelFailed(_));
    setup.events.count(mcp, "failed", 1, is_failed).await;
}

/// Starts a call whose stream the server then ends.
async fn start_polled_call(setup: &Setup, mcp: &Mcp, id: u64) -> Connection {
    let mut call = setup.start_call(mcp, id, "hold", "polled").await;
    call.head().await;
    // The second stream of its session.
    setup.sessions.end_stream(mcp, 1, None).await;
    while call.event().await.is_some() {}
    setup.events.detached(mcp, id).await;
    call
}

/// Disconnects after the first event, and returns its id.
async fn cut(setup: &Setup, mcp: &Mcp, label: &str) -> String {
    let mut call = setup.start_call(mcp, label, "hold", label).await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(mcp, label).await;
    first.id.expect("an id")
}

/// Refuses requests with the `REFUSED` header, and replayed cancellations, after reading them.
fn refusing(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("a whole body");
        let is_call = head.headers.contains_key(EXCHANGE);
        let is_cancel = String::from_utf8_lossy(&body).contains("notifications/cancelled");
        if head.headers.contains_key(REFUSED) || is_call && is_cancel {
            return StatusCode::UNAUTHORIZED.into_response();
        }
        next.run(Request::from_parts(head, body.into())).await
    }))
}
