//! Plays a story: a server in process, its clients, and a clock that jumps between times.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, BodyDataStream},
    response::Response,
};
use futures_util::{StreamExt as _, future::join_all};
use http::Request;
use mcp_cancel_on_disconnect::{
    Calls, CancelOnDisconnectLayer, CancellableSessionManager, Confirmation, Event, Outcome,
    RequestId,
};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt as _;

use super::story::{CallStory, How, Loss, Story};
use crate::{
    setup::{Scripted, Server, Sessions, Store, paused_runtime},
    support::{Mode, PATH, handshake},
};

const VERSION: &str = "2025-11-25";

/// Longer than any other time in these tests.
const VERY_LONG: Duration = Duration::from_secs(7 * 24 * 3_600);

/// How long after the expected answer a client stops resuming.
///
/// This applies once all of its losses have happened.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// The record of a story that has been played.
#[derive(Debug)]
pub(super) struct History {
    pub(super) calls: Vec<CallHistory>,
    /// The number of calls that the layer still knows at the end.
    pub(super) left: usize,
    /// The number of sessions that are still open at the end.
    pub(super) sessions: usize,
}

#[derive(Debug)]
pub(super) struct CallHistory {
    pub(super) client: Vec<(Duration, ClientFact)>,
    /// How the handler ended, and when.
    pub(super) handler: Option<(Duration, HandlerEnd)>,
    pub(super) reports: Vec<(Duration, Report)>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ClientFact {
    Called,
    Lost {
        by_server: bool,
        /// The last `retry` sent by the server.
        retry: Option<Duration>,
        /// Whether the client knows an event from which it can resume.
        can_return: bool,
        is_resumed_elsewhere: bool,
    },
    Returned {
        status: u16,
    },
    Answered,
    Refused(Value),
    StoppedResuming,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandlerEnd {
    Completed,
    Cancelled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Report {
    Started,
    Detached(Option<Duration>),
    Resumed,
    Ended(Outcome),
}

type Shared<T> = Arc<Mutex<HashMap<u64, T>>>;

struct World {
    router: Router,
    sessions: Sessions,
    calls: Calls,
    session: String,
    start: Instant,
    retry: Option<Duration>,
}

/// A stream, as its client reads it.
struct Reading {
    body: BodyDataStream,
    text: String,
}

/// What the client knows about a call.
#[derive(Default)]
struct Known {
    event_id: Option<String>,
    retry: Option<Duration>,
}

/// Plays a story to its end.
pub(super) fn play(story: &Story) -> History {
    paused_runtime().block_on(async {
        let handlers = Shared::default();
        let reports = Shared::default();
        let world = World::new(story, &handlers, &reports).await;
        let calls = story.calls.iter().enumerate();
        let clients = calls.map(|(id, call)| world.client(id as u64, call));
        let clients = join_all(clients).await;
        // Let all state that waits for a client expire.
        sleep(VERY_LONG).await;
        let sessions = world.sessions.local().sessions.read().await.len();
        let mut handlers = handlers.lock().expect("no panic");
        let mut reports = reports.lock().expect("no panic");
        let calls = clients
            .into_iter()
            .zip(0..)
            .map(|(client, id)| CallHistory {
                client,
                handler: handlers.remove(&id),
                reports: reports.remove(&id).unwrap_or_default(),
            });
        History {
            calls: calls.collect(),
            left: world.calls.len(),
            sessions,
        }
    })
}

// === impl World ===

impl World {
    async fn new(
        story: &Story,
        handlers: &Shared<(Duration, HandlerEnd)>,
        reports: &Shared<Vec<(Duration, Report)>>,
    ) -> Self {
        let start = Instant::now();
        let mut local = LocalSessionManager::default();
        local.session_config = SessionConfig::default();
        local.session_config.keep_alive = None;
        local.session_config.sse_retry = story.retry;
        if story.is_stored {
            local = local.with_event_store(Arc::new(Store::default()));
        }
        let sessions = match story.server {
            Server::Wrapped => {
                let wrapper = CancellableSessionManager::new(local).idle_timeout(story.idle);
                Sessions::Wrapped(Arc::new(wrapper))
            }
            _ => Sessions::Local(Arc::new(local)),
        };
        let ended = handlers.clone();
        let handler = Scripted::labelled(move |label, context| {
            let ended = ended.clone();
            async move {
                let (id, ms) = label.split_once('/').expect("an id and a time");
                let works = sleep(Duration::from_millis(ms.parse().expect("a number")));
                let how = tokio::select! {
                    biased;
                    () = context.ct.cancelled() => HandlerEnd::Cancelled,
                    () = works => HandlerEnd::Completed,
                };
                let mut ended = ended.lock().expect("no panic");
                let former = ended.insert(id.parse().expect("a number"), (start.elapsed(), how));
                assert_eq!(former, None, "the handler runs once");
                Ok("done".to_owned())
            }
        });
        let recorded = reports.clone();
        let layer = CancelOnDisconnectLayer::new()
            .grace(story.grace)
            .observe_fn(move |event| record(&recorded, start, event));
        let layer = if story.is_exempt {
            layer.exempt(|_| true)
        } else {
            layer
        };
        let layer = match story.confirm {
            Some(confirm) => {
                let postponed: Shared<u32> = Arc::default();
                layer.confirm(move |orphan| {
                    let mut postponed = postponed.lock().expect("no panic");
                    let times = postponed
                        .entry(number(orphan.call().request_id()))
                        .or_default();
                    *times += 1;
                    let answer = if *times > confirm.times {
                        Confirmation::Cancel
                    } else {
                        Confirmation::Postpone(confirm.wait)
                    };
                    async move { answer }
                })
            }
            None => layer,
        };
        let calls = layer.calls();
        let config = Mode::Session.config().with_sse_keep_alive(None);
        let router = sessions.router(handler, config).layer(layer);
        let mut world = Self {
            router,
            sessions,
            calls,
            session: String::new(),
            start,
            retry: story.retry,
        };
        world.connect().await;
        world
    }

    async fn connect(&mut self) {
        let [initialize, initialized] = handshake(VERSION);
        let response = self.send("POST", &[], initialize.to_string()).await;
        let session = response.headers().get("mcp-session-id").expect("a session");
        self.session = session.to_str().expect("visible").to_owned();
        let mut body = response.into_body().into_data_stream();
        while body.next().await.is_some() {}
        let response = self.send("POST", &[], initialized.to_string()).await;
        assert_eq!(response.status(), 202);
    }

    async fn send(&self, method: &str, headers: &[(&str, &str)], body: String) -> Response {
        let mut request = Request::builder()
            .method(method)
            .uri(PATH)
            .header("host", "localhost")
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("mcp-protocol-version", VERSION);
        if !self.session.is_empty() {
            request = request.header("mcp-session-id", &self.session);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body)).expect("a request");
        let Ok(response) = self.router.clone().oneshot(request).await;
        response
    }

    /// Plays one call as its client.
    async fn client(&self, id: u64, call: &CallStory) -> Vec<(Duration, ClientFact)> {
        let mut facts = Vec::new();
        let mut record = |fact| facts.push((self.start.elapsed(), fact));
        sleep(call.starts).await;
        let message = json!({
            "jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {
                "name": "work",
                "arguments": { "label": format!("{id}/{}", call.lasts.as_millis()) },
            },
        });
        record(ClientFact::Called);
        let sent = Instant::now();
        let mut response = self.send("POST", &[], message.to_string()).await;
        let mut known = Known::default();
        let mut losses = call.losses.iter();
        loop {
            let status = response.status().as_u16();
            if status != 200 {
                break;
            }
            let stream = Reading::of(response);
            let loss = losses.next();
            let (answer, by_server, is_resumed_elsewhere) =
                self.connected(id, stream, loss, &mut known).await;
            if let Some(answer) = answer {
                record(match answer.get("error") {
                    None => ClientFact::Answered,
                    Some(error) => ClientFact::Refused(error["code"].clone()),
                });
                break;
            }
            record(ClientFact::Lost {
                by_server,
                retry: known.retry,
                can_return: known.event_id.is_some(),
                is_resumed_elsewhere,
            });
            let stops_resuming =
                call.stops_resuming || sent.elapsed() > call.lasts + REQUEST_TIMEOUT;
            let event_id = match &known.event_id {
                Some(event_id) if !stops_resuming || losses.len() > 0 => event_id,
                _ => {
                    record(ClientFact::StoppedResuming);
                    break;
                }
            };
            // What SDKs wait, if the story does not specify a time for the resume.
            let resume_time = known.retry.or(self.retry).unwrap_or(Duration::from_secs(3));
            sleep(loss.map_or(resume_time, |loss| loss.away)).await;
            let last = [("last-event-id", event_id.as_str())];
            response = self.send("GET", &last, String::new()).await;
            record(ClientFact::Returned {
                status: response.status().as_u16(),
            });
        }
        facts
    }

    /// Reads a stream until its loss.
    ///
    /// Returns the answer, whether the server has ended the stream, and whether the layer keeps the call running
    /// because its client has resumed on another server.
    async fn connected(
        &self,
        id: u64,
        mut stream: Reading,
        loss: Option<&Loss>,
        known: &mut Known,
    ) -> (Option<Value>, bool, bool) {
        let stays = loss.map_or(VERY_LONG, |loss| loss.stays);
        match timeout(stays, stream.read_to_end(known)).await {
            Ok(answer) => return (answer, true, false),
            Err(_) => assert!(loss.is_some(), "a connected client waits forever"),
        }
        match loss.map(|loss| loss.how) {
            Some(How::EndedByServer { retry }) => {
                self.end_stream(id, retry, known).await;
                (stream.read_to_end(known).await, true, false)
            }
            Some(How::ResumedElsewhere { first }) => {
                let event_id = known.event_id.clone().unwrap_or_default();
                let report = || self.calls.resumed_elsewhere(&self.session, &event_id);
                let mut is_kept = first && report();
                drop(stream);
                if !first {
                    is_kept = report();
                }
                (None, false, is_kept)
            }
            Some(How::HangsUp) | None => (None, false, false),
        }
    }

    async fn end_stream(&self, id: u64, retry: Option<Duration>, known: &Known) {
        let number = known.event_id.as_deref().and_then(|id| id.split_once('/'));
        let number = number.map_or(id, |(_, number)| number.parse().expect("a stream"));
        let handle = self.sessions.local().sessions.read().await;
        let handle = handle
            .get(self.session.as_str())
            .expect("a session")
            .clone();
        // This fails if the call is being answered at this moment.
        let _closed = handle.close_sse_stream(number, retry).await;
    }
}

// === impl Reading ===

impl Reading {
    fn of(response: Response) -> Self {
        Self {
            body: response.into_body().into_data_stream(),
            text: String::new(),
        }
    }

    /// Returns the answer, or `None` if the stream ends without one.
    async fn read_to_end(&mut self, known: &mut Known) -> Option<Value> {
        while let Some(Ok(bytes)) = self.body.next().await {
            self.text += str::from_utf8(&bytes).expect("whole characters");
            while let Some((event, rest)) = self.text.split_once("\n\n") {
                let answer = known.on_event(event);
                self.text = rest.to_owned();
                if answer.is_some() {
                    return answer;
                }
            }
        }
        None
    }
}

// === impl Known ===

impl Known {
    fn on_event(&mut self, event: &str) -> Option<Value> {
        let mut answer = None;
        for line in event.lines() {
            match line.split_once(": ") {
                Some(("id", id)) => self.event_id = Some(id.to_owned()),
                Some(("retry", ms)) => {
                    let ms = ms.parse().expect("a number");
                    self.retry = Some(Duration::from_millis(ms));
                }
                Some(("data", data)) if !data.is_empty() => {
                    let message: Value = serde_json::from_str(data).expect("JSON");
                    let is_answer = message.get("method").is_none();
                    answer = is_answer.then_some(message);
                }
                _ => {}
            }
        }
        answer
    }
}

fn record(reports: &Shared<Vec<(Duration, Report)>>, start: Instant, event: &Event<'_>) {
    let (call, report) = match event {
        Event::Started { call, .. } => (call, Report::Started),
        Event::Detached { call, grace, .. } => (call, Report::Detached(*grace)),
        Event::Resumed { call, .. } => (call, Report::Resumed),
        Event::Ended { call, outcome, .. } => (call, Report::Ended(*outcome)),
        _ => return,
    };
    let mut reports = reports.lock().expect("no panic");
    let call_reports = reports.entry(number(call.request_id())).or_default();
    call_reports.push((start.elapsed(), report));
}

fn number(id: &RequestId) -> u64 {
    match id {
        RequestId::Number(number) => (*number).cast_unsigned(),
        other => panic!("{other} is not one of our calls"),
    }
}
