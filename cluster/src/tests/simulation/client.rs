//! Clients that follow the protocol the way the SDKs do.
//!
//! After a 503 they wait, after the retry delay they resume with the last event id, and after a 404 they open a new session. Sometimes they
//! delete their session or never resume.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, Method, Request, StatusCode};
use serde_json::Value;
use test_support::{
    Dice,
    sse::{SseItem, SseReader},
};
use tokio::select;

use super::{
    faults::ClientProfile,
    ingress::{End, Exchange, Ingress},
    node::RETRY,
    time::{HostId, Ms, Post, WORLD},
    watcher::{self, Answer, Check, Watcher},
};
use crate::manager::messages::NOT_STARTED;

/// How long a request may wait for its head, unless its call has started.
///
/// Covers the head timeout, a lease, and the time to claim.
const HEAD_LIMIT: Ms = 25_000;

/// How soon after the faults a session has to answer.
const PROBE_LIMIT: Ms = 10_000;

/// How long a client may wait for a head before it may count as turned away.
const WAITED: Ms = 100;

const PARAMS: &str = r#"{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"sim","version":"0"}}"#;

/// The load balancer, which picks an instance for each request. Clones share its state.
#[derive(Clone, Default)]
pub(super) struct Balancer(Arc<Mutex<BalancerState>>);

#[derive(Default)]
struct BalancerState {
    ingresses: Vec<Ingress>,
    preferred: Option<HostId>,
}

/// A client. Clones share its state.
#[derive(Clone)]
pub(super) struct Client(Arc<Inner>);

struct Inner {
    number: usize,
    post: Post,
    watcher: Watcher,
    balancer: Balancer,
    profile: ClientProfile,
    dice: Mutex<Dice>,
    session: Mutex<Option<Arc<str>>>,
    next_number: AtomicU64,
    open_calls: AtomicU64,
}

/// What a client does during a call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Plan {
    StaysConnected,
    /// Disconnects after `after` and resumes `absence` later.
    Resumes {
        after: Ms,
        absence: Ms,
    },
    /// Disconnects after `after` and never resumes.
    Disconnects {
        after: Ms,
    },
}

/// How reading a stream ended.
enum Read {
    Answer(Answer),
    /// The stream ended or broke.
    Ended,
    Disconnected,
}

/// A call's stream, as its client reads it.
struct Stream {
    exchange: Exchange,
    reader: SseReader,
}

// === impl Balancer ===

impl Balancer {
    pub(super) fn add(&self, ingress: Ingress) {
        self.0.lock().unwrap().ingresses.push(ingress);
    }

    pub(super) fn remove(&self, host: HostId) {
        let mut state = self.0.lock().unwrap();
        state.ingresses.retain(|ingress| ingress.host != host);
    }

    /// Sends all requests to one instance while it exists, or to any for `None`.
    pub(super) fn prefer(&self, host: Option<HostId>) {
        self.0.lock().unwrap().preferred = host;
    }

    pub(super) fn ingresses(&self) -> Vec<Ingress> {
        self.0.lock().unwrap().ingresses.clone()
    }

    fn pick(&self, number: u64) -> Option<Ingress> {
        let state = self.0.lock().unwrap();
        let preferred = state
            .ingresses
            .iter()
            .find(|ingress| Some(ingress.host) == state.preferred);
        let any_ingress = || {
            state
                .ingresses
                .get(number as usize % state.ingresses.len().max(1))
        };
        preferred.or_else(any_ingress).cloned()
    }
}

// === impl Client ===

impl Client {
    pub(super) fn new(
        number: usize,
        post: Post,
        watcher: Watcher,
        balancer: Balancer,
        profile: ClientProfile,
        dice: Dice,
    ) -> Self {
        Self(Arc::new(Inner {
            number,
            post,
            watcher,
            balancer,
            profile,
            dice: Mutex::new(dice),
            session: Mutex::new(None),
            next_number: AtomicU64::new(1),
            open_calls: AtomicU64::new(0),
        }))
    }

    /// Opens sessions and makes calls until `deadline`.
    pub(super) async fn run(self, deadline: Ms) {
        self.pause(self.roll(1_500)).await;
        while self.now() < deadline {
            let Some(session) = self.session().await else {
                self.pause(RETRY).await;
                continue;
            };
            if self.0.open_calls.load(Ordering::Relaxed) < 4 {
                self.act(session);
            }
            self.pause(300 + self.roll(self.0.profile.pause)).await;
        }
    }

    /// Starts a random action: a DELETE, half a body, or a call with its plan.
    #[allow(
        clippy::disallowed_methods,
        reason = "a client does several things at once"
    )]
    fn act(&self, session: Arc<str>) {
        let profile = &self.0.profile;
        let this = self.clone();
        let is_rolled = |weight: u64| weight > 0 && self.roll(1_000) < weight;
        if is_rolled(profile.delete) {
            tokio::spawn(async move { this.delete(&session).await });
        } else if is_rolled(profile.half_body) {
            tokio::spawn(async move { this.half_body(&session).await });
        } else {
            let (ms, plan) = match self.roll(20) {
                0..=9 => (self.roll(800), Plan::StaysConnected),
                10..=12 => (1_000 + self.roll(10_000), Plan::StaysConnected),
                17 => {
                    let plan = Plan::Resumes {
                        after: self.roll(1_000),
                        absence: 12_000 + self.roll(13_000),
                    };
                    (300 + self.roll(4_500), plan)
                }
                13..=16 => {
                    let plan = Plan::Resumes {
                        after: self.roll(1_500),
                        absence: self.roll(4_000),
                    };
                    (500 + self.roll(8_000), plan)
                }
                _ => {
                    let after = self.roll(1_500);
                    (2_000 + self.roll(20_000), Plan::Disconnects { after })
                }
            };
            tokio::spawn(async move { this.call(&session, ms, plan).await });
        }
    }

    /// Returns the current session, or opens one.
    ///
    /// Returns `None` if that fails.
    async fn session(&self) -> Option<Arc<str>> {
        let session = self.0.session.lock().unwrap().clone();
        match session {
            Some(session) => Some(session),
            None => self.open().await,
        }
    }

    async fn open(&self) -> Option<Arc<str>> {
        let number = self.next_number();
        let message =
            format!(r#"{{"jsonrpc":"2.0","id":{number},"method":"initialize","params":{PARAMS}}}"#);
        let exchange = self.send(self.request(Method::POST, None, message))?;
        let (status, headers) = self.head(&exchange, "initialize", None).await?;
        if status != StatusCode::OK {
            self.expect(status, "initialize", &[503, 502]);
            return None;
        }
        let session: Arc<str> = headers.get("mcp-session-id")?.to_str().ok()?.into();
        self.0.watcher.opened(exchange.host, &session);
        let mut stream = Stream::new(exchange);
        // The session is open even if the stream breaks.
        while let Ok(events) = stream.next().await {
            if events.iter().any(|(_, data)| !data.is_empty()) {
                break;
            }
        }
        drop(stream);
        let message = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
        for _ in 0..20 {
            let request = self.request(Method::POST, Some(&session), message.to_owned());
            let status = match self.send(request) {
                Some(exchange) => {
                    let head = self.head(&exchange, "initialized", None).await;
                    head.map(|(status, _)| (status, exchange.host))
                }
                None => None,
            };
            match status {
                Some((StatusCode::ACCEPTED, _)) => {
                    *self.0.session.lock().unwrap() = Some(session.clone());
                    return Some(session);
                }
                Some((StatusCode::NOT_FOUND, by)) => {
                    self.0.watcher.not_found(&session, by);
                    return None;
                }
                Some((status, by)) => {
                    self.expect(status, "initialized", &[503, 502]);
                    self.0.watcher.refused(by);
                }
                None => {}
            }
            self.pause(RETRY).await;
        }
        None
    }

    /// Makes a call and follows `plan`.
    pub(super) async fn call(&self, session: &str, ms: Ms, plan: Plan) {
        self.0.open_calls.fetch_add(1, Ordering::Relaxed);
        self.try_call(session, ms, plan).await;
        self.0.open_calls.fetch_sub(1, Ordering::Relaxed);
    }

    async fn try_call(&self, session: &str, ms: Ms, plan: Plan) -> Option<()> {
        let number = self.next_number();
        let label = format!("c{}.{number}", self.0.number);
        self.0.watcher.called(&label, session);
        self.0.watcher.note(format!(
            "{label} for {ms} ms in {}: {plan:?}",
            watcher::short(session)
        ));
        let mut exchange = self.begin(session, &label, number, ms).await?;
        let mut event = None;
        let mut disconnect_after = match plan {
            Plan::StaysConnected => None,
            Plan::Resumes { after, .. } | Plan::Disconnects { after } => Some(after),
        };
        loop {
            let by = exchange.host;
            let since = self.now();
            self.set_client(&label, watcher::Client::Attached { by, since });
            let mut stream = Stream::new(exchange);
            let read = match disconnect_after.take() {
                None => self.read(&mut stream, number, &label, &mut event).await,
                Some(after) => select! {
                    biased;
                    read = self.read(&mut stream, number, &label, &mut event) => read,
                    () = self.pause(after) => Read::Disconnected,
                },
            };
            drop(stream);
            let since = self.now();
            match (read, plan) {
                (Read::Answer(answer), _) => {
                    self.0.watcher.answered(&label, answer);
                    return Some(());
                }
                (Read::Disconnected, Plan::Disconnects { .. }) => {
                    self.set_client(&label, watcher::Client::NeverResumes { since });
                    return None;
                }
                (Read::Disconnected, Plan::Resumes { absence, .. }) if event.is_some() => {
                    self.set_client(&label, watcher::Client::Disconnected { since });
                    self.pause(absence).await;
                }
                (Read::Ended, _) if event.is_some() => {
                    self.set_client(&label, watcher::Client::Disconnected { since });
                    self.pause(RETRY).await;
                }
                _ => {
                    // Without an event id the client cannot resume.
                    self.set_client(&label, watcher::Client::NeverResumes { since });
                    return None;
                }
            }
            let resumes = watcher::Client::Resuming {
                since: self.now(),
                disconnected: since,
            };
            self.set_client(&label, resumes);
            exchange = self.resume(session, &label, event.as_deref()?).await?;
        }
    }

    /// Sends a call until an instance accepts it.
    async fn begin(&self, session: &str, label: &str, number: u64, ms: Ms) -> Option<Exchange> {
        let message = format!(
            r#"{{"jsonrpc":"2.0","id":{number},"method":"tools/call","params":{{"name":"work","arguments":{{"label":"{label}","ms":{ms}}}}}}}"#
        );
        loop {
            let request = self.request(Method::POST, Some(session), message.clone());
            let Some(exchange) = self.send(request) else {
                self.pause(100).await;
                continue;
            };
            let head = self.head(&exchange, label, Some(label)).await;
            match head.map(|head| head.0.as_u16()) {
                Some(200) => return Some(exchange),
                Some(503) => {
                    self.0.watcher.turned_away(label, exchange.host);
                    self.pause(RETRY).await;
                }
                Some(404) => {
                    self.session_not_found(session, &exchange);
                    self.set_client(label, watcher::Client::Done);
                    return None;
                }
                status => {
                    if let Some(status) = status {
                        self.expect_code(status, label, &[502]);
                    }
                    // There is no telling whether the call has started, and it cannot be resumed.
                    self.set_client(label, watcher::Client::NeverResumes { since: 0 });
                    return None;
                }
            }
        }
    }

    /// Resumes a call until an instance accepts the resume.
    async fn resume(&self, session: &str, label: &str, event: &str) -> Option<Exchange> {
        loop {
            let mut request = self.request(Method::GET, Some(session), String::new());
            let event = event.parse().unwrap();
            request.headers_mut().insert("last-event-id", event);
            let Some(exchange) = self.send(request) else {
                self.pause(100).await;
                continue;
            };
            let head = self.head(&exchange, label, None).await;
            match head.map(|head| head.0.as_u16()) {
                Some(200) => return Some(exchange),
                Some(503) => self.0.watcher.turned_away(label, exchange.host),
                Some(404) => {
                    self.session_not_found(session, &exchange);
                    self.set_client(label, watcher::Client::Done);
                    return None;
                }
                Some(400) => {
                    self.0.watcher.answered(label, Answer::Lost);
                    return None;
                }
                Some(status) => self.expect_code(status, label, &[502]),
                None => {}
            }
            self.pause(RETRY).await;
        }
    }

    /// Reads a stream up to the answer, keeping the id of the last event in `event`.
    async fn read(
        &self,
        stream: &mut Stream,
        number: u64,
        label: &str,
        event: &mut Option<String>,
    ) -> Read {
        loop {
            let events = match stream.next().await {
                Ok(events) => events,
                Err(_) => return Read::Ended,
            };
            for (id, data) in events {
                if let Some(id) = id {
                    *event = Some(id);
                }
                if let Some(answer) = answer(&data, number, label) {
                    return Read::Answer(answer);
                }
            }
        }
    }

    /// Ends a session, retrying up to ten times until the DELETE is confirmed or gets a 404.
    async fn delete(&self, session: &str) {
        {
            let mut current = self.0.session.lock().unwrap();
            if current.as_deref() == Some(session) {
                *current = None;
            }
        }
        self.0.watcher.deleted(session);
        for _ in 0..10 {
            let request = self.request(Method::DELETE, Some(session), String::new());
            if let Some(exchange) = self.send(request)
                && let Some((status, _)) = self.head(&exchange, "delete", None).await
            {
                if status.is_success() {
                    self.0.watcher.deletion_confirmed(session, exchange.host);
                    return;
                }
                if status == StatusCode::NOT_FOUND {
                    return;
                }
                self.expect(status, "delete", &[503, 502]);
            }
            self.pause(RETRY).await;
        }
    }

    /// Sends half of a call, but never the rest.
    async fn half_body(&self, session: &str) {
        self.0
            .watcher
            .note(format!("half a body for {}", watcher::short(session)));
        let half = Bytes::from_static(br#"{"jsonrpc":"2.0","id":1,"method":"tools/"#);
        let half = stream::iter([Ok::<_, Infallible>(half)]).chain(stream::pending());
        let mut request = self.request(Method::POST, Some(session), String::new());
        *request.body_mut() = Body::from_stream(half);
        let exchange = self.send(request);
        self.pause(40_000 + self.roll(40_000)).await;
        drop(exchange);
    }

    /// Sends half of a call in the current session, if there is one.
    #[allow(
        clippy::disallowed_methods,
        reason = "a client does several things at once"
    )]
    pub(super) fn send_half_a_body(&self) {
        let session = self.0.session.lock().unwrap().clone();
        if let Some(session) = session {
            let this = self.clone();
            tokio::spawn(async move { this.half_body(&session).await });
        }
    }

    /// Makes `calls` calls at once, all of which end while the client is disconnected.
    ///
    /// Returns the session they were made in, or `None` if the client has none.
    #[allow(
        clippy::disallowed_methods,
        reason = "a client does several things at once"
    )]
    pub(super) fn burst(&self, calls: usize, ms: Ms, absence: Ms) -> Option<Arc<str>> {
        let session = self.0.session.lock().unwrap().clone()?;
        for _ in 0..calls {
            let (this, session) = (self.clone(), session.clone());
            let plan = Plan::Resumes {
                after: ms.saturating_sub(300),
                absence: absence + self.roll(2_000),
            };
            tokio::spawn(async move { this.call(&session, ms, plan).await });
        }
        Some(session)
    }

    /// Requests sessions that do not exist.
    #[allow(
        clippy::disallowed_methods,
        reason = "a client does several things at once"
    )]
    pub(super) fn request_unknown_sessions(&self, ingress: &Ingress, count: usize) {
        for _ in 0..count {
            let id = format!("made-up-{:x}", self.roll(u64::MAX));
            let request = self.request(Method::GET, Some(&id), String::new());
            let Some(exchange) = ingress.send(request) else {
                return;
            };
            let this = self.clone();
            tokio::spawn(async move {
                if let Some((StatusCode::SERVICE_UNAVAILABLE, _)) =
                    this.head(&exchange, "made up", None).await
                {
                    this.0.watcher.refused(exchange.host);
                }
            });
        }
    }

    /// Checks that the session, if there is one, answers through every instance within `PROBE_LIMIT`.
    #[allow(
        clippy::disallowed_methods,
        reason = "a client does several things at once"
    )]
    pub(super) fn probe(&self) {
        let Some(session) = self.0.session.lock().unwrap().clone() else {
            return;
        };
        for ingress in self.0.balancer.ingresses() {
            let (this, session) = (self.clone(), session.clone());
            tokio::spawn(async move {
                let (limit, host) = (this.now() + PROBE_LIMIT, ingress.host);
                let mut last_failure = "no head".to_owned();
                let is_answered = select! {
                    biased;
                    () = this.until_answered(&session, &ingress, &mut last_failure) => true,
                    () = this.pause(limit - this.now()) => false,
                };
                if !is_answered {
                    let session = watcher::short(&session);
                    let message =
                        format!("{session} does not answer through {host}: {last_failure}");
                    this.0.watcher.fail(Check::Recovery, message);
                }
            });
        }
    }

    /// Makes calls until one of them gets its answer, or an instance answers 404.
    ///
    /// `last_failure` is the reason why the previous call got no answer.
    async fn until_answered(&self, session: &str, ingress: &Ingress, last_failure: &mut String) {
        loop {
            let number = self.next_number();
            let label = format!("c{}.{number}", self.0.number);
            self.0.watcher.called(&label, session);
            self.0
                .watcher
                .note(format!("{label} probes {}", ingress.host));
            let message = format!(
                r#"{{"jsonrpc":"2.0","id":{number},"method":"tools/call","params":{{"name":"work","arguments":{{"label":"{label}","ms":0}}}}}}"#
            );
            let request = self.request(Method::POST, Some(session), message);
            let Some(exchange) = ingress.send(request) else {
                *last_failure = "connections are refused".into();
                self.pause(100).await;
                continue;
            };
            self.0.watcher.requested();
            let since = self.now();
            let head = exchange.head().await;
            self.record_wait(since);
            let Ok((status, _)) = head else {
                *last_failure = "the connection broke".into();
                self.pause(100).await;
                continue;
            };
            *last_failure = status.to_string();
            match status.as_u16() {
                200 => {
                    let mut stream = Stream::new(exchange);
                    let read = self.read(&mut stream, number, &label, &mut None).await;
                    if let Read::Answer(answer) = read {
                        self.0.watcher.answered(&label, answer);
                        return;
                    }
                    *last_failure = "the stream ended".into();
                }
                404 => {
                    self.session_not_found(session, &exchange);
                    return;
                }
                503 => self.0.watcher.refused(ingress.host),
                _ => {}
            }
            self.pause(RETRY).await;
        }
    }

    // --- requests ---

    fn request(&self, method: Method, session: Option<&str>, body: String) -> Request<Body> {
        let mut request = Request::builder()
            .method(method)
            .uri("/mcp")
            .header("host", "localhost")
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json");
        if let Some(session) = session {
            request = request.header("mcp-session-id", session);
        }
        request.body(Body::from(body)).unwrap()
    }

    /// Sends a request to the instance that the balancer picks.
    ///
    /// Returns `None` if connections are refused.
    fn send(&self, request: Request<Body>) -> Option<Exchange> {
        self.0.watcher.requested();
        let ingress = self.0.balancer.pick(self.roll(u64::MAX))?;
        ingress.send(request)
    }

    /// Returns a response head, or `None` if the connection broke. An overdue head fails the run.
    async fn head(
        &self,
        exchange: &Exchange,
        purpose: &str,
        label: Option<&str>,
    ) -> Option<(StatusCode, HeaderMap)> {
        let since = self.now();
        loop {
            select! {
                biased;
                head = exchange.head() => {
                    self.record_wait(since);
                    return head.ok();
                }
                () = self.pause(HEAD_LIMIT) => {}
            }
            let may_wait = label.is_some_and(|label| self.0.watcher.may_wait(label, HEAD_LIMIT));
            if !may_wait && self.0.watcher.was_running_since(exchange.host, since) {
                let message = format!(
                    "{purpose} has been waiting at {} since {since}",
                    exchange.host
                );
                self.0.watcher.fail(Check::HeadTimeout, message);
            }
        }
    }

    /// Records that a response has its head.
    ///
    /// If that took more than `WAITED`, the client may have counted as turned away in the meantime.
    fn record_wait(&self, since: Ms) {
        if self.now() - since > WAITED {
            self.0.watcher.on_waited();
        }
    }

    fn session_not_found(&self, session: &str, exchange: &Exchange) {
        self.0.watcher.not_found(session, exchange.host);
        let mut current = self.0.session.lock().unwrap();
        if current.as_deref() == Some(session) {
            *current = None;
        }
    }

    fn expect(&self, status: StatusCode, purpose: &str, expected: &[u16]) {
        self.expect_code(status.as_u16(), purpose, expected);
    }

    /// Records a status, which fails the run if it is not expected.
    fn expect_code(&self, status: u16, purpose: &str, expected: &[u16]) {
        if expected.contains(&status) {
            self.0.watcher.note(format!("{status} for {purpose}"));
        } else {
            self.0
                .watcher
                .fail(Check::Status, format!("{status} for {purpose}"));
        }
    }

    fn set_client(&self, label: &str, client: watcher::Client) {
        self.0.watcher.set_client(label, client);
    }

    fn next_number(&self) -> u64 {
        self.0.next_number.fetch_add(1, Ordering::Relaxed)
    }

    fn roll(&self, sides: u64) -> u64 {
        self.0.dice.lock().unwrap().roll() % sides.max(1)
    }

    fn now(&self) -> Ms {
        self.0.post.now()
    }

    async fn pause(&self, time: Ms) {
        self.0.post.pause(WORLD, time).await;
    }
}

/// Returns the answer to a request, or `None` if the message is anything else.
fn answer(data: &str, number: u64, label: &str) -> Option<Answer> {
    if data.is_empty() {
        return None;
    }
    let message: Value = serde_json::from_str(data).ok()?;
    if message["id"].as_u64() != Some(number) {
        return None;
    }
    if message["result"]["content"][0]["text"] == format!("done:{label}") {
        return Some(Answer::Done);
    }
    let error = message["error"]["message"].as_str().unwrap_or_default();
    if error.contains("without leaving an answer") {
        return Some(Answer::Lost);
    }
    if error == NOT_STARTED {
        return Some(Answer::NotStarted);
    }
    Some(Answer::Other(message.to_string()))
}

// === impl Stream ===

impl Stream {
    fn new(exchange: Exchange) -> Self {
        Self {
            exchange,
            reader: SseReader::default(),
        }
    }

    /// Returns the ids and data of the next events.
    async fn next(&mut self) -> Result<Vec<(Option<String>, String)>, End> {
        let data = self.exchange.data().await?;
        self.reader.push(&data);
        let mut events = Vec::new();
        while let Some(item) = self.reader.pop() {
            if let SseItem::Event(event) = item {
                events.push((event.id, event.data));
            }
        }
        Ok(events)
    }
}
