//! Acts that happen inside a poll of the inner service.

use std::{
    future::poll_fn,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Router,
    body::Body,
    extract::Request,
    middleware::{Next, from_fn},
};

use crate::setup::{EXCHANGE, PolledBody};

/// What happens inside the poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InPoll {
    Panics,
    /// The call is cancelled on the server.
    Cancels,
    /// Another call's connection is dropped.
    DropsAnother,
}

/// The planned act, and the poll of the watched exchange at which it happens.
#[derive(Clone, Default)]
pub(super) struct Inside(Arc<Mutex<Option<Planned>>>);

struct Planned {
    polls_left: usize,
    act: Box<dyn FnOnce() + Send>,
}

// === impl Inside ===

impl Inside {
    pub(super) fn plan(&self, polls: usize, act: impl FnOnce() + Send + 'static) {
        *self.planned() = Some(Planned {
            polls_left: polls,
            act: Box::new(act),
        });
    }

    /// Inserts itself between the layer and the inner service.
    pub(super) fn count(&self, router: Router) -> Router {
        let inside = self.clone();
        router.layer(from_fn(move |request: Request, next: Next| {
            let inside = inside.clone();
            async move {
                if !request.headers().contains_key(EXCHANGE) {
                    return next.run(request).await;
                }
                let mut answering = Box::pin(next.run(request));
                let response = poll_fn(|cx| {
                    inside.polled();
                    answering.as_mut().poll(cx)
                });
                let response = response.await;
                response.map(|body| {
                    let on_poll = move || inside.polled();
                    Body::new(PolledBody { body, on_poll })
                })
            }
        }))
    }

    fn polled(&self) {
        let due = {
            let mut planned = self.planned();
            match planned
                .as_mut()
                .map(|planned| planned.polls_left.checked_sub(1))
            {
                Some(None) => planned.take(),
                Some(Some(left)) => {
                    planned.as_mut().expect("an act is planned").polls_left = left;
                    None
                }
                None => None,
            }
        };
        if let Some(planned) = due {
            (planned.act)();
        }
    }

    fn planned(&self) -> std::sync::MutexGuard<'_, Option<Planned>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
