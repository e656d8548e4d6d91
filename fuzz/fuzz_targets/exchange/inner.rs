//! The inner service, which follows an exchange's plan and receives replayed cancellations.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CallToken, body::TeeBody};
use serde_json::Value;
use tower_service::Service;

use crate::{
    ledger::{Ledger, Side},
    script::{Answer, Broken, End, EndHint, PANIC_MESSAGE, Scripted},
};

#[derive(Clone)]
pub struct Inner {
    pub ledger: Ledger,
}

/// Stored in every request's extensions. A weak reference to it shows whether those have been dropped.
#[derive(Clone)]
pub struct ExchangeSlot(pub Arc<SlotData>);

pub struct SlotData {
    pub number: usize,
    pub answer: Answer,
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<Scripted>, Broken>> + Send>>;

impl Service<Request<TeeBody<Scripted>>> for Inner {
    type Response = Response<Scripted>;
    type Error = Broken;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<TeeBody<Scripted>>) -> Answering {
        let ledger = self.ledger.clone();
        let slot = request
            .extensions()
            .get::<ExchangeSlot>()
            .expect("the slot of the exchange")
            .0
            .clone();
        let token = request.extensions().get::<CallToken>();
        let token = token.expect("a token").clone();
        if token.is_replay() {
            assert!(!token.is_cancelled(), "a cancel is not cancelled");
            return Box::pin(take_cancel(ledger, request));
        }
        ledger.set_token(slot.number, token);
        Box::pin(answer(ledger, slot, request))
    }
}

async fn answer(
    ledger: Ledger,
    slot: Arc<SlotData>,
    request: Request<TeeBody<Scripted>>,
) -> Result<Response<Scripted>, Broken> {
    let mut body = pin!(request.into_body());
    for _ in 0..slot.answer.reads {
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    ledger.record_frame(slot.number, Side::RequestOut, data);
                }
            }
            Some(Err(error)) => return Err(error),
            None => break,
        }
    }
    let mut waits = slot.answer.waits;
    poll_fn(|_| match waits.checked_sub(1) {
        Some(left) => {
            waits = left;
            Poll::Pending
        }
        None => Poll::Ready(()),
    })
    .await;
    match &slot.answer.end {
        End::Fails => Err(Broken),
        End::Panics => std::panic::panic_any(PANIC_MESSAGE),
        End::Answers {
            head,
            body,
            end_hint,
        } => {
            ledger.record_head(slot.number, head.clone());
            let body = Scripted::new(body.clone(), *end_hint);
            Ok(head.response(body.logged(ledger, slot.number, Side::ResponseIn)))
        }
    }
}

async fn take_cancel(
    ledger: Ledger,
    request: Request<TeeBody<Scripted>>,
) -> Result<Response<Scripted>, Broken> {
    let session = request.headers().get("mcp-session-id").cloned();
    let session = session.and_then(|session| session.to_str().map(str::to_owned).ok());
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await?.to_bytes();
    let message: Value = serde_json::from_slice(&body).expect("the layer writes JSON");
    assert_eq!(message["method"], "notifications/cancelled");
    let id = message["params"]["requestId"].clone();
    ledger.record_cancel(path, session.expect("only session calls have one"), id);
    let mut response = Response::new(Scripted::new(Vec::new(), EndHint::Nothing));
    *response.status_mut() = StatusCode::ACCEPTED;
    Ok(response)
}
