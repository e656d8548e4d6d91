//! Deliberate faults in the server, which the referee has to find.

use axum::{body::Body, extract::Request, middleware::Next, response::Response};
use futures_util::{StreamExt as _, future::ready};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use tokio::sync::Mutex;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Orphans are cancelled without proof, and answers are not retained.
    Unguarded,
    /// Nothing is relayed, and all that the instances share is the session store.
    Alone,
    /// A client that resumes does not receive the answer.
    Lossy,
    /// A request waits until the previous request's body has been read.
    Serial,
}

// === impl Fault ===

impl Fault {
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        match text {
            "unguarded" => Ok(Self::Unguarded),
            "alone" => Ok(Self::Alone),
            "lossy" => Ok(Self::Lossy),
            "serial" => Ok(Self::Serial),
            _ => Err("no such fault"),
        }
    }
}

/// Ends the streams of clients that resume before the answer.
pub(crate) async fn lose_answers(request: Request, next: Next) -> Response {
    let is_resume = request.method() == Method::GET;
    let response = next.run(request).await;
    if !is_resume {
        return response;
    }
    response.map(|body| {
        let events = body.into_data_stream().take_while(|piece| {
            let has_answer = |bytes: &[u8]| bytes.windows(8).any(|part| part == b"\"result\"");
            ready(!piece.as_ref().is_ok_and(|piece| has_answer(piece)))
        });
        Body::from_stream(events)
    })
}

/// Reads one request body at a time, answering 400 if it cannot be read.
pub(crate) async fn read_in_turn(request: Request, next: Next) -> Result<Response, StatusCode> {
    static TURN: Mutex<()> = Mutex::const_new(());
    let (head, body) = request.into_parts();
    let body = {
        let _turn = TURN.lock().await;
        body.collect().await
    };
    let bytes = body.map_err(|_| StatusCode::BAD_REQUEST)?.to_bytes();
    Ok(next.run(Request::from_parts(head, Body::from(bytes))).await)
}
