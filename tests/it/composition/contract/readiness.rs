//! `poll_ready` is forwarded to the inner service, and `call` uses the service that is ready.

use std::{
    collections::VecDeque,
    convert::Infallible,
    future::{Ready, pending, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancelReason::ClientDisconnected, body::TeeBody,
};
use tokio::sync::mpsc;
use tower::{Layer as _, Service, ServiceBuilder, ServiceExt as _};

use super::{
    exchange::{InnerRequest, Kind, immediate, poll_once},
    script::{Broken, Script},
};
use crate::{log::number, support::within};

type Readiness = Poll<Result<(), Broken>>;

/// Answers `poll_ready` from a list. A clone is never ready and knows that it is a clone.
struct ScriptedReadiness {
    answers: Arc<Mutex<VecDeque<Readiness>>>,
    calls: Arc<AtomicUsize>,
    is_clone: bool,
}

impl Clone for ScriptedReadiness {
    fn clone(&self) -> Self {
        Self {
            answers: self.answers.clone(),
            calls: self.calls.clone(),
            is_clone: true,
        }
    }
}

impl Service<Request<TeeBody<Full<Bytes>>>> for ScriptedReadiness {
    type Response = Response<Full<Bytes>>;
    type Error = Broken;
    type Future = Ready<Result<Self::Response, Broken>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Readiness {
        assert!(
            !self.is_clone,
            "`poll_ready` must be called on the layered service itself"
        );
        let mut answers = self.answers.lock().expect("no earlier panic");
        answers
            .pop_front()
            .expect("`poll_ready` is not called again")
    }

    fn call(&mut self, _: Request<TeeBody<Full<Bytes>>>) -> Self::Future {
        assert!(
            !self.is_clone,
            "a service that was not ready has been called"
        );
        self.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::default()))
    }
}

fn scripted_readiness(
    answers: impl IntoIterator<Item = Readiness>,
) -> (ScriptedReadiness, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let service = ScriptedReadiness {
        answers: Arc::new(Mutex::new(answers.into_iter().collect())),
        calls: calls.clone(),
        is_clone: false,
    };
    (service, calls)
}

#[test]
fn readiness_is_taken_from_the_inner_service() {
    let answers = [Poll::Pending, Poll::Ready(Ok(())), Poll::Ready(Err(Broken))];
    let (inner, _calls) = scripted_readiness(answers);
    let mut service = CancelOnDisconnectLayer::new().layer(inner);
    let mut cx = Context::from_waker(Waker::noop());
    for answer in answers {
        assert_eq!(service.poll_ready(&mut cx), answer);
    }
}

#[test]
fn the_service_that_was_ready_is_the_one_that_is_called() {
    let (inner, calls) = scripted_readiness([Poll::Ready(Ok(()))]);
    let mut service = CancelOnDisconnectLayer::new().layer(inner);
    let mut cx = Context::from_waker(Waker::noop());
    assert_eq!(service.poll_ready(&mut cx), Poll::Ready(Ok(())));
    drop(service.call(Request::default()));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_replay_waits_until_its_service_is_ready() {
    let (layer, log) = immediate();
    let (replayed, mut replays) = mpsc::unbounded_channel();
    let inner = ServiceBuilder::new()
        // The limiter panics if it is called before it is ready, and the call holds its only permit.
        .concurrency_limit(1)
        .service_fn(move |request: InnerRequest| {
            let replayed = replayed.clone();
            async move {
                let token = request.extensions().get::<CallToken>();
                let is_replay = token.is_none_or(CallToken::is_replay);
                let Ok(_whole) = request.into_body().collect().await;
                if !is_replay {
                    pending::<()>().await;
                }
                replayed.send(()).expect("the test is listening");
                Ok::<_, Infallible>(Response::new(Script::new([]).body()))
            }
        });
    let mut response = Box::pin(layer.layer(inner).oneshot(Kind::Session.request()));
    assert!(poll_once(response.as_mut()).is_pending());
    drop(response);
    let replay = within("the replay to arrive", replays.recv()).await;
    assert!(replay.is_some());
    assert_eq!(log.cancelled(), [(number(7), ClientDisconnected)]);
}
