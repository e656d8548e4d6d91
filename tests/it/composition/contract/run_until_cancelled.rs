//! `CallToken::run_until_cancelled`: a cancellation drops the future, but no result is lost.

use std::{
    future::{Future, pending, poll_fn},
    pin::pin,
    task::Poll,
};

use futures_util::poll;
use mcp_cancel_on_disconnect::CancelReason::ClientDisconnected;
use tokio::sync::oneshot;

use super::exchange::{Kind, stalled};

#[tokio::test]
async fn a_result_that_is_ready_together_with_the_cancel_wins() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        let (sender, result) = oneshot::channel();
        let mut running = pin!(token.run_until_cancelled(result));
        assert!(poll!(&mut running).is_pending());
        drop(response);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        sender
            .send("written")
            .expect("the receiver has not been dropped yet");
        assert_eq!(running.await, Ok(Ok("written")), "{kind:?}");
    }
}

#[tokio::test]
async fn a_result_of_the_poll_in_which_the_call_is_cancelled_wins() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        let result = token.run_until_cancelled(async {
            drop(response);
            token.cancelled().await;
            "written"
        });
        assert_eq!(result.await, Ok("written"), "{kind:?}");
        assert!(token.is_cancelled(), "{kind:?}");
    }
}

#[tokio::test]
async fn the_future_is_dropped_before_the_reason_is_returned() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        let (owned, mut dropped) = oneshot::channel::<()>();
        let mut running = pin!(token.run_until_cancelled(async move {
            let _owned = owned;
            pending::<()>().await;
        }));
        assert!(poll!(&mut running).is_pending());
        drop(response);
        assert_eq!(running.await, Err(ClientDisconnected), "{kind:?}");
        assert!(
            dropped
                .try_recv()
                .is_err_and(|error| error == oneshot::error::TryRecvError::Closed)
        );
    }
}

#[tokio::test]
async fn after_a_cancel_the_future_is_not_polled() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        drop(response);
        let started = token.run_until_cancelled(async { panic!("the future was polled") });
        assert_eq!(started.await, Err::<(), _>(ClientDisconnected), "{kind:?}");
    }
}

/// All of tokio's channels return `Pending` to a task that has used up its budget.
///
/// That includes those that hold a value.
#[tokio::test]
async fn a_result_that_is_ready_is_not_lost_to_the_budget_of_the_task() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        let (sender, result) = oneshot::channel();
        let mut running = pin!(token.run_until_cancelled(result));
        assert!(poll!(&mut running).is_pending());
        sender
            .send("written")
            .expect("the receiver has not been dropped yet");
        drop(response);
        let polled = poll_fn(|cx| {
            while pin!(tokio::task::consume_budget()).poll(cx).is_ready() {}
            Poll::Ready(running.as_mut().poll(cx))
        });
        let polled = polled.await;
        assert_eq!(polled, Poll::Ready(Ok(Ok("written"))), "{kind:?}");
    }
}

/// This can happen on a multi-threaded runtime.
#[tokio::test]
async fn a_result_that_is_ready_between_the_poll_and_the_cancel_wins() {
    for kind in Kind::ALL {
        let (_layer, _log, response, token) = stalled(kind);
        let mut response = Some(response);
        let result = token.run_until_cancelled(poll_fn(|_| match response.take() {
            Some(response) => {
                drop(response);
                Poll::Pending
            }
            None => Poll::Ready("written"),
        }));
        assert_eq!(result.await, Ok("written"), "{kind:?}");
    }
}
