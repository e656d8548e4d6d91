//! What a gateway between the layer and its server reports about an answer.

use super::CallToken;

// === impl CallToken ===

impl CallToken {
    /// Marks the call as answered.
    ///
    /// For a gateway that keeps reading after the client has disconnected, and replays the answer to a client that resumes. The gateway,
    /// which is between the layer and its server, calls this when it has the answer.
    ///
    /// The call ends as completed. Its grace and its pending resumes end, no cancel is injected, the token does not fire, and
    /// clean-ups are dropped. A later resume is passed on unchanged, and the gateway decides what its client receives. An
    /// earlier cancel still stands, even if the token has yet to fire.
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
    /// let (handed_out, mut tokens) = tokio::sync::mpsc::unbounded_channel();
    /// let gateway = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
    ///     handed_out.send(request.extensions().get::<CallToken>().cloned()).unwrap();
    ///     async {
    ///         axum::body::to_bytes(Body::new(request.into_body()), 1024).await.unwrap();
    ///         // The events from another server, which a task of the gateway reads.
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
    /// This method may be called at any time, and more than once.
    ///
    /// - If the layer has not parsed the request's body yet, the call is reported as started and completed once the body is
    ///   parsed. The call is never in flight.
    /// - If the request has no call, the token no longer fires, and nothing else changes. Such a request is a plain route,
    ///   `initialize`, a notification, a resume, or a body that cannot be parsed.
    /// - If the call has ended, nothing changes. An answer that a session manager observed first stays retained.
    pub fn answered(&self) {
        self.0.on_answered_externally();
    }

    /// Marks the answer of the call as lost: no client can get it, now or later.
    ///
    /// For a gateway whose connection to its server was cut. It calls this before it sends an error in place of the answer.
    ///
    /// The call is cancelled like that of a client that has disconnected and cannot resume, with the reason
    /// [`ResponseDropped`](crate::CancelReason::ResponseDropped). A connected client gets only what the gateway sends. If no
    /// disconnect cancels the call, or it has ended, nothing changes.
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
    /// let (handed_out, mut tokens) = tokio::sync::mpsc::unbounded_channel();
    /// let gateway = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
    ///     handed_out.send(request.extensions().get::<CallToken>().cloned()).unwrap();
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
