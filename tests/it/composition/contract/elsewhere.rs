//! Request bodies that are read by a different task from the one that answers.

use std::{
    convert::Infallible,
    future::pending,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::Response;
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CallToken, CancelReason::ClientDisconnected};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
};
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::{
    exchange::{CALL, InnerRequest, Kind, event_stream, immediate, poll_once},
    script::{Script, Scripted},
};
use crate::{log::number, support::within};

/// Reads bodies in its own tasks: a call's body once that is allowed, a replay's at once.
#[derive(Clone)]
struct Reader {
    allowed: Arc<Notify>,
    read: mpsc::UnboundedSender<Bytes>,
    tasks: Arc<Mutex<JoinSet<()>>>,
}

/// The bodies that a reader has read.
struct Bodies(mpsc::UnboundedReceiver<Bytes>);

impl Reader {
    fn new() -> (Self, Bodies) {
        let (read, bodies) = mpsc::unbounded_channel();
        let reader = Self {
            allowed: Arc::default(),
            read,
            tasks: Arc::default(),
        };
        (reader, Bodies(bodies))
    }

    /// Makes a task read the body of `request`, and notifies once it has been read.
    fn hand_over(&self, request: InnerRequest) -> Arc<Notify> {
        let Self { allowed, read, .. } = self.clone();
        let done = Arc::new(Notify::new());
        let notify = done.clone();
        let token = request.extensions().get::<CallToken>();
        let is_replay = token.is_none_or(CallToken::is_replay);
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(async move {
            if !is_replay {
                allowed.notified().await;
            }
            let Ok(body) = request.into_body().collect().await;
            read.send(body.to_bytes()).expect("the test is listening");
            notify.notify_one();
        });
        done
    }
}

impl Bodies {
    async fn next(&mut self) -> Bytes {
        let body = within("a body", self.0.recv()).await;
        body.expect("the reader is alive")
    }

    async fn next_is_a_cancel_of(&mut self, id: i64) {
        let message: serde_json::Value =
            serde_json::from_slice(&self.next().await).expect("a message");
        assert_eq!(message["method"], "notifications/cancelled");
        assert_eq!(message["params"]["requestId"], id);
    }
}

#[tokio::test]
async fn a_call_whose_body_another_task_reads_is_known_with_the_head() {
    let (layer, log) = immediate();
    let (reader, mut bodies) = Reader::new();
    let reading = reader.clone();
    let service = layer.layer(service_fn(move |request: InnerRequest| {
        let read = reading.hand_over(request);
        async move {
            read.notified().await;
            Ok::<_, Infallible>(event_stream(Script::stalled().body()))
        }
    }));
    reader.allowed.notify_one();
    let Ok(response) = service.oneshot(Kind::Session.request()).await;
    assert_eq!(bodies.next().await, CALL);
    assert_eq!(layer.calls().len(), 1);
    drop(response);
    assert_eq!(log.cancelled(), [(number(7), ClientDisconnected)]);
    bodies.next_is_a_cancel_of(7).await;
}

#[tokio::test]
async fn a_call_whose_body_another_task_has_read_is_cancelled_without_a_head() {
    let (layer, log) = immediate();
    let (reader, mut bodies) = Reader::new();
    let reading = reader.clone();
    let service = layer.layer(service_fn(move |request: InnerRequest| {
        // Nothing wakes the future once the body has been read.
        let _read = reading.hand_over(request);
        pending::<Result<Response<Scripted>, Infallible>>()
    }));
    let mut response = Box::pin(service.oneshot(Kind::Session.request()));
    assert!(poll_once(response.as_mut()).is_pending());
    reader.allowed.notify_one();
    assert_eq!(bodies.next().await, CALL);
    drop(response);
    assert_eq!(log.cancelled(), [(number(7), ClientDisconnected)]);
    bodies.next_is_a_cancel_of(7).await;
}

#[tokio::test]
async fn a_body_that_is_read_after_the_disconnect_leaves_no_state() {
    let (layer, log) = immediate();
    let (reader, mut bodies) = Reader::new();
    let reading = reader.clone();
    let service = layer.layer(service_fn(move |request: InnerRequest| {
        let _read = reading.hand_over(request);
        pending::<Result<Response<Scripted>, Infallible>>()
    }));
    let mut response = Box::pin(service.oneshot(Kind::Session.request()));
    assert!(poll_once(response.as_mut()).is_pending());
    drop(response);
    reader.allowed.notify_one();
    assert_eq!(bodies.next().await, CALL);
    assert!(layer.calls().is_empty());
    assert_eq!(log.cancelled(), []);
}
