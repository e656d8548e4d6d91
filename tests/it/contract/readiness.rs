//! `poll_ready` is the inner service's, and `call` uses the service that was ready.

use std::{
    collections::VecDeque,
    future::{Ready, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, TeeBody};
use tower::{Layer as _, Service};

use super::script::Broken;

type Readiness = Poll<Result<(), Broken>>;

/// Answers `poll_ready` from a list. A clone is never ready, and knows that it is one.
struct Moody {
    answers: Arc<Mutex<VecDeque<Readiness>>>,
    calls: Arc<AtomicUsize>,
    is_clone: bool,
}

impl Clone for Moody {
    fn clone(&self) -> Self {
        Self {
            answers: self.answers.clone(),
            calls: self.calls.clone(),
            is_clone: true,
        }
    }
}

impl Service<Request<TeeBody<Full<Bytes>>>> for Moody {
    type Response = Response<Full<Bytes>>;
    type Error = Broken;
    type Future = Ready<Result<Self::Response, Broken>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Readiness {
        assert!(!self.is_clone, "the layered service itself is asked");
        let mut answers = self.answers.lock().expect("no panic before");
        answers.pop_front().expect("not asked more often")
    }

    fn call(&mut self, _: Request<TeeBody<Full<Bytes>>>) -> Self::Future {
        assert!(!self.is_clone, "the service that was ready is called");
        self.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::default()))
    }
}

fn moody(answers: impl IntoIterator<Item = Readiness>) -> (Moody, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let service = Moody {
        answers: Arc::new(Mutex::new(answers.into_iter().collect())),
        calls: calls.clone(),
        is_clone: false,
    };
    (service, calls)
}

#[test]
fn readiness_is_that_of_the_inner_service() {
    let answers = [Poll::Pending, Poll::Ready(Ok(())), Poll::Ready(Err(Broken))];
    let (inner, _calls) = moody(answers);
    let mut service = CancelOnDisconnectLayer::new().layer(inner);
    let mut cx = Context::from_waker(Waker::noop());
    for answer in answers {
        assert_eq!(service.poll_ready(&mut cx), answer);
    }
}

#[test]
fn the_service_that_was_ready_is_the_one_that_is_called() {
    let (inner, calls) = moody([Poll::Ready(Ok(()))]);
    let mut service = CancelOnDisconnectLayer::new().layer(inner);
    let mut cx = Context::from_waker(Waker::noop());
    assert_eq!(service.poll_ready(&mut cx), Poll::Ready(Ok(())));
    drop(service.call(Request::default()));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}
