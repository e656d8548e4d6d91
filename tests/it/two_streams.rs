//! A call with several streams at once: it has a client as long as one of them lives, whichever.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Request,
    middleware::{Next, from_fn},
};
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, Method, Response};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, Outcome, TeeBody};
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tower::{Layer as _, ServiceExt as _, service_fn, util::BoxCloneSyncService};

use crate::{
    log::{Log, number},
    setup::{FIRST_STORED, Plan, Server, Setup, StoppedClock, What, for_servers},
    support::*,
};

const GRACE: Duration = Duration::from_secs(20);

/// To which tokio rounds a timer up.
const TICK: Duration = Duration::from_millis(1);

/// The id of the first event of the first stream of a session.
const FIRST_EVENT: &str = "0/0";

for_servers!([wrapped = Wrapped, layer_only = LayerOnly] {
    a_resume_that_is_answered_after_a_newer_one_does_not_end_the_call,
    two_resumes_at_once_keep_their_call,
    the_last_stream_that_goes_starts_the_grace,
});

/// rmcp serves two resumes one after the other, and their heads come out the other way round. The stream of the
/// former has ended by then.
async fn a_resume_that_is_answered_after_a_newer_one_does_not_end_the_call(server: Server) {
    let clock = StoppedClock::stop();
    let go_on = Arc::new(Notify::new());
    let (served, mut was_served) = mpsc::unbounded_channel();
    let waits = go_on.clone();
    let late_heads = move |router: Router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            let (waits, served) = (waits.clone(), served.clone());
            async move {
                let is_late = request.headers().contains_key("x-late");
                let response = next.run(request).await;
                if is_late {
                    served.send(()).expect("the test listens");
                    waits.notified().await;
                }
                response
            }
        }))
    };
    let setup = with_grace(server).inside(late_heads).start().await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(&mcp, 1).await;
    let mut first = mcp.clone().header("x-late", "1").resume(FIRST_EVENT).await;
    within("the first resume", was_served.recv()).await;
    let mut second = mcp.resume(FIRST_EVENT).await;
    assert_eq!(second.head().await.status, 200);

    go_on.notify_one();

    assert_eq!(first.head().await.status, 200);
    while first.event().await.is_some() {}
    goes_on(&setup, &mcp, &clock, "a").await;
    setup.assert_completes("a", &mut second).await;
}

async fn two_resumes_at_once_keep_their_call(server: Server) {
    let setup = Plan::of(server).grace(Grace::Immediate).start().await;
    let mcp = setup.mcp().await;
    for id in 0..40 {
        let label = format!("a{id}");
        let mut call = setup.start_call(&mcp, id, "hold", &label).await;
        call.head().await;
        call.event().await.expect("the priming event");
        // The call that shows that the session is usable has a stream as well.
        let event = format!("0/{}", 2 * id);
        let (mut one, mut other) = tokio::join!(mcp.resume(&event), mcp.resume(&event));
        tokio::join!(one.head(), other.head());
        drop(call);
        setup.assert_usable(&mcp).await;
        assert!(!setup.tokens.of(&label).is_cancelled(), "{label}");
        setup.witness.release(&label);
        // One of the two has it, and the other's stream has ended.
        let answers = tokio::join!(one.answer(), other.answer());
        assert!(answers.0.is_some() || answers.1.is_some(), "{label}");
        assert_eq!(setup.events.ended(&mcp, id).await, Outcome::Completed);
    }
}

async fn the_last_stream_that_goes_starts_the_grace(server: Server) {
    let clock = StoppedClock::stop();
    let setup = with_grace(server)
        .inside(crate::setup::stalled)
        .start()
        .await;
    let mcp = setup.mcp().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    let resumed = mcp.clone().header(crate::setup::EXCHANGE, "resumed");
    let mut resumed = resumed.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    setup.events.resumed(&mcp, 1, 1).await;

    resumed.rst();
    setup.exchanges.over_for("resumed").await;
    goes_on(&setup, &mcp, &clock, "a").await;
    call.rst();

    setup.events.detached(&mcp, 1).await;
    clock.advance(GRACE + TICK).await;
    assert!(setup.witness.ended("a").await.is_cancelled());
}

/// A store replays what there was, and ends.
#[tokio::test]
async fn a_replay_that_ends_does_not_end_a_call_whose_first_stream_lives() {
    let clock = StoppedClock::stop();
    let setup = with_grace(Server::Wrapped).stored().start().await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let primed = call.event().await.expect("the priming event");
    let id = primed.id.expect("an id");
    assert!(id >= FIRST_STORED.to_owned());

    let mut replay = mcp.resume(&id).await;
    assert_eq!(replay.head().await.status, 200);
    while replay.event().await.is_some() {}
    setup.events.resumed(&mcp, 1, 1).await;

    goes_on(&setup, &mcp, &clock, "a").await;
    setup.assert_completes("a", &mut call).await;
}

#[tokio::test(start_paused = true)]
async fn a_replay_of_a_foreign_server_does_not_end_a_call_whose_first_stream_lives() {
    let foreign = Foreign::new();
    let mut stream = foreign.call(1).await;
    foreign.says("id: first\ndata:\n\n");
    frame(&mut stream).await;

    let mut replay = foreign.resume("first").await;
    let progress = r#"{"jsonrpc":"2.0","method":"notifications/progress"}"#;
    foreign.says_to_last(&format!("id: second\ndata: {progress}\n\n"));
    frame(&mut replay).await;
    foreign.ends_last();
    assert!(replay.frame().await.is_none());
    drop(replay);

    tokio::time::sleep(3 * GRACE).await;
    assert_eq!(foreign.layer.calls().len(), 1);
    assert_eq!(foreign.log.ends(&number(1)), []);
    drop(stream);
    tokio::time::sleep(GRACE + TICK).await;
    assert_eq!(foreign.log.cancelled().len(), 1);
}

/// `<counter>/<constant>`, which is rmcp's form and means something else.
#[tokio::test(start_paused = true)]
async fn ids_that_only_look_like_rmcps_join_no_two_calls() {
    for ids in [["1/7", "2/7"], ["1/0", "1/1"], ["a/0", "b/0"]] {
        let foreign = Foreign::new();
        let mut streams = Vec::new();
        for (call, id) in [1, 2].into_iter().zip(ids) {
            let mut stream = foreign.call(call).await;
            foreign.says_to_last(&format!("id: {id}\ndata:\n\n"));
            frame(&mut stream).await;
            streams.push(stream);
        }
        let connected = streams.pop();
        drop(streams);

        // Its client comes back for the first call and is lost again.
        let resumed = foreign.resume(ids[0]).await;
        drop(resumed);

        tokio::time::sleep(2 * GRACE).await;
        assert_eq!(foreign.log.cancelled().len(), 1, "{ids:?}");
        assert_eq!(foreign.log.ends(&number(2)), [], "{ids:?}");
        assert_eq!(foreign.layer.calls().len(), 1, "{ids:?}");
        drop(connected);
    }
}

/// Its client is there, and has not noticed anything.
async fn goes_on(setup: &Setup, mcp: &Mcp, clock: &StoppedClock, label: &str) {
    let before = setup.events.of(mcp, 1);
    clock.advance(2 * GRACE).await;
    setup.assert_usable(mcp).await;
    assert!(setup.witness.is_running(label));
    assert!(!setup.tokens.of(label).is_cancelled());
    assert_eq!(setup.events.of(mcp, 1), before);
    let ended = |what: &What| matches!(what, What::Ended(_));
    assert!(!before.iter().any(ended), "{before:?}");
}

fn with_grace(server: Server) -> Plan {
    Plan::of(server).grace(Grace::After(GRACE))
}

// --- A server that is not rmcp ---

/// Each request that wants a stream gets one, whose events the test writes.
struct Foreign {
    layer: CancelOnDisconnectLayer,
    log: Log,
    service: Service,
    feeds: std::sync::Mutex<mpsc::UnboundedReceiver<Feed>>,
    open: std::sync::Mutex<Vec<Feed>>,
}

type Feed = mpsc::UnboundedSender<Bytes>;
type Service = BoxCloneSyncService<http::Request<Body>, Response<Body>, Infallible>;

impl Foreign {
    fn new() -> Self {
        let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::After(GRACE)));
        let (give, feeds) = mpsc::unbounded_channel();
        let service = layer.layer(service_fn(move |request: http::Request<TeeBody<Body>>| {
            let give = give.clone();
            async move {
                let is_post = request.method() == Method::POST;
                let body = request.into_body().collect().await.expect("a body");
                let message: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
                let mut response = Response::new(Body::empty());
                if is_post && message["method"] != "tools/call" {
                    *response.status_mut() = http::StatusCode::ACCEPTED;
                    return Ok::<_, Infallible>(response);
                }
                let (feed, events) = mpsc::unbounded_channel::<Bytes>();
                give.send(feed).expect("the test lives");
                let events = stream::unfold(events, async |mut events| {
                    let event = events.recv().await?;
                    Some((Ok::<_, Infallible>(event), events))
                });
                *response.body_mut() = Body::from_stream(events.boxed());
                let headers: &mut HeaderMap = response.headers_mut();
                headers.insert(
                    "content-type",
                    "text/event-stream".parse().expect("a value"),
                );
                Ok(response)
            }
        }));
        let service = service.map_response(|response| response.map(Body::new));
        Self {
            layer,
            log,
            service: BoxCloneSyncService::new(service),
            feeds: feeds.into(),
            open: Vec::new().into(),
        }
    }

    async fn call(&self, id: i64) -> Body {
        let message = json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": { "name": "t" } });
        let request = http::Request::post("/mcp").header("content-type", "application/json");
        self.send(request, Body::from(message.to_string())).await
    }

    async fn resume(&self, id: &str) -> Body {
        let request = http::Request::get("/mcp").header("last-event-id", id);
        self.send(request, Body::empty()).await
    }

    async fn send(&self, request: http::request::Builder, body: Body) -> Body {
        let request = request.header("mcp-session-id", "s").body(body);
        let service = self.service.clone();
        let Ok(response) = service.oneshot(request.expect("a request")).await;
        let feed = self.feeds.lock().unwrap().try_recv();
        self.open.lock().unwrap().push(feed.expect("a stream"));
        response.into_body()
    }

    /// Writes into the first stream.
    fn says(&self, event: &str) {
        self.write(0, event);
    }

    fn says_to_last(&self, event: &str) {
        let last = self.open.lock().unwrap().len() - 1;
        self.write(last, event);
    }

    fn write(&self, nth: usize, event: &str) {
        let open = self.open.lock().unwrap();
        open[nth]
            .send(Bytes::from(event.to_owned()))
            .expect("it is read");
    }

    fn ends_last(&self) {
        self.open.lock().unwrap().pop();
    }
}

async fn frame(body: &mut Body) {
    body.frame().await.expect("a frame").expect("it is whole");
}
