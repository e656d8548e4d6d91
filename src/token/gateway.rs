//! Lets a gateway between the layer and its server report what happened to an answer.

use super::CallToken;

// === impl CallToken ===

impl CallToken {
    /// Marks the call as answered.
    ///
    /// This is for a gateway between the layer and its server that keeps reading after the client has disconnected, and replays the answer
    /// to a resuming client. Call it as soon as the gateway has the answer.
    ///
    /// The call is recorded as completed: its grace period and its pending resumes end, no cancellation is injected, the token does not
    /// fire, and its clean-ups are dropped. A later resume is passed through unchanged, so that the gateway decides what the client
    /// receives. A call that has already been cancelled stays cancelled, even if its token has yet to fire.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use axum::body::Body;
    /// use http::{Request, Response};
    /// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, body::TeeBody};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let layer = CancelOnDisconnectLayer::new();
    /// let (token_tx, mut tokens) = tokio::sync::mpsc::unbounded_channel();
    /// let gateway = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
    ///     token_tx.send(request.extensions().get::<CallToken>().cloned()).unwrap();
    ///     async {
    ///         axum::body::to_bytes(Body::new(request.into_body()), 1024).await.unwrap();
    ///         // Events from another server, which one of the gateway's tasks is reading.
    ///         let events = Body::from_stream(futures_util::stream::pending::<Result<&str, Infallible>>());
    ///         let head = Response::builder().header("content-type", "text/event-stream");
    ///         Ok::<_, Infallible>(head.body(events).unwrap())
    ///     }
    /// }));
    ///
    /// let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"report"}}"#;
    /// let request = Request::post("/mcp").header("content-type", "application/json");
    /// let request = request.body(Body::from(call)).unwrap();
    /// let response = gateway.oneshot(request).await.unwrap();
    /// let token = tokens.recv().await.unwrap().expect("the layer's token");
    /// assert_eq!(layer.calls().len(), 1);
    ///
    /// token.answered(); // the task has read the answer
    /// assert!(layer.calls().is_empty());
    /// drop(response); // the client disconnects
    /// assert!(!token.is_cancelled());
    /// # }
    /// ```
    ///
    /// # Edge cases
    ///
    /// This method can be called at any time, and more than once.
    ///
    /// - If the layer has not parsed the request body yet, the call is never in flight. It is reported as started and completed once the
    ///   body has been parsed.
    /// - If the request has no call, its token can no longer fire, and nothing else changes. This applies to plain routes, `initialize`,
    ///   notifications, resumes and bodies that cannot be parsed.
    /// - If the call has already ended, nothing changes. An answer that a session manager has already observed stays retained.
    pub fn answered(&self) {
        self.0.on_answered_externally();
    }

    /// Marks the call's answer as lost: no client can receive it, now or later.
    ///
    /// This is for a gateway that has lost its connection to the server. Call it before the gateway sends an error in place of the answer.
    ///
    /// The call is cancelled as if its client had disconnected and could not resume, with the reason
    /// [`ResponseDropped`](crate::CancelReason::ResponseDropped). A client that is still connected receives only what the gateway sends.
    /// Nothing changes if the call has already ended, or if disconnects never cancel it.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use axum::body::Body;
    /// use http::{Request, Response};
    /// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason, body::TeeBody};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let layer = CancelOnDisconnectLayer::new();
    /// let (token_tx, mut tokens) = tokio::sync::mpsc::unbounded_channel();
    /// let gateway = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
    ///     token_tx.send(request.extensions().get::<CallToken>().cloned()).unwrap();
    ///     async {
    ///         axum::body::to_bytes(Body::new(request.into_body()), 1024).await.unwrap();
    ///         let events = Body::from_stream(futures_util::stream::pending::<Result<&str, Infallible>>());
    ///         let head = Response::builder().header("content-type", "text/event-stream");
    ///         Ok::<_, Infallible>(head.body(events).unwrap())
    ///     }
    /// }));
    ///
    /// let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"report"}}"#;
    /// let request = Request::post("/mcp").header("content-type", "application/json");
    /// let request = request.body(Body::from(call)).unwrap();
    /// let response = gateway.oneshot(request).await.unwrap();
    /// let token = tokens.recv().await.unwrap().expect("the layer's token");
    ///
    /// token.answer_lost(); // the connection to the server was cut
    /// assert_eq!(token.reason(), Some(CancelReason::ResponseDropped));
    /// assert!(layer.calls().is_empty());
    /// # drop(response);
    /// # }
    /// ```
    pub fn answer_lost(&self) {
        self.0.on_answer_lost();
    }
}
