//! Classifies peers' requests while this instance is shutting down.

use axum::body::Bytes;
use http::{HeaderMap, Method};
use serde_json::Value;

use crate::{
    ids::ClusterEventId, refusals::Refusal, relay::replayable_request::ReplayableRequest,
    routing::resume::LAST_EVENT_ID,
};

/// What a request starts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// A call, with its JSON-RPC id. The peer has retained the request and can resend it.
    Call(Value),
    /// A session stream that belongs to no call.
    Stream,
    /// Anything else: a request that starts nothing, or that cannot be treated as a call.
    ///
    /// Notifications, pings, DELETE requests and responses to the server's own requests start nothing. Neither do requests that resume a
    /// call's stream, or that resume after an unknown event id.
    ///
    /// Calls too long to be resent, and bodies that are not JSON-RPC messages, cannot be treated as calls.
    Other,
}

// === impl RequestKind ===

impl RequestKind {
    /// Classifies a request.
    ///
    /// # Errors
    ///
    /// Returns an error if the client disconnects or stalls mid-request.
    pub(crate) async fn classify(replayable: &mut ReplayableRequest) -> Result<Self, Refusal> {
        match replayable.head.method {
            Method::GET => Ok(Self::classify_get(&replayable.head.headers)),
            Method::POST => {
                replayable.read().await?;
                Ok(replayable
                    .bytes()
                    .map_or(Self::Other, Self::classify_message))
            }
            _ => Ok(Self::Other),
        }
    }

    fn classify_get(headers: &HeaderMap) -> Self {
        let Some(last_event_id) = headers.get(&LAST_EVENT_ID) else {
            return Self::Stream;
        };
        let event = last_event_id.to_str().ok().and_then(ClusterEventId::parse);
        match event {
            Some(event) if event.call.is_none() => Self::Stream,
            _ => Self::Other,
        }
    }

    fn classify_message(message: &Bytes) -> Self {
        let mut message: Value = serde_json::from_slice(message).unwrap_or_default();
        let id = message.pointer_mut("/id").map(Value::take);
        let id = id.filter(|id| !id.is_null());
        match (message.get("method").and_then(Value::as_str), id) {
            (Some("ping") | None, _) | (Some(_), None) => Self::Other,
            (Some(_), Some(id)) => Self::Call(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http::Request;
    use serde_json::json;

    use super::*;

    async fn post(body: &str) -> RequestKind {
        let request = Request::post("/mcp").body(Body::from(body.to_owned()));
        RequestKind::classify(&mut ReplayableRequest::new(request.unwrap()))
            .await
            .unwrap()
    }

    async fn get(last_event_id: Option<&str>) -> RequestKind {
        let mut request = Request::get("/mcp");
        if let Some(last_event_id) = last_event_id {
            request = request.header("last-event-id", last_event_id);
        }
        let request = request.body(Body::empty());
        RequestKind::classify(&mut ReplayableRequest::new(request.unwrap()))
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn a_call_has_a_method_and_an_id() {
        for (call, id) in [
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"#,
                json!(1),
            ),
            (
                r#"{"method":"tools/list","params":{},"id":"a"}"#,
                json!("a"),
            ),
        ] {
            assert_eq!(post(call).await, RequestKind::Call(id), "{call}");
        }
        for other in [
            r#"{"jsonrpc":"2.0","method":"notifications/cancelled"}"#,
            r#"{"id":1,"result":{}}"#,
            r#"{"id":1,"error":{}}"#,
            r#"{"id":1,"method":"ping"}"#,
            r#"{"id":null,"method":"tools/call"}"#,
            r#"{"id":1,"method":7}"#,
            "[]",
            "{",
            "",
        ] {
            assert_eq!(post(other).await, RequestKind::Other, "{other}");
        }
    }

    #[tokio::test]
    async fn a_call_that_is_too_long_to_be_sent_again_is_other() {
        let text = "x".repeat(64 * 1024);
        let call = format!(r#"{{"id":1,"method":"tools/call","params":"{text}"}}"#);
        assert_eq!(post(&call).await, RequestKind::Other);
    }

    #[tokio::test]
    async fn a_standalone_stream_is_distinguished_from_the_resume_of_a_call() {
        let generation = "0123456789abcdef";
        assert_eq!(get(None).await, RequestKind::Stream);
        assert_eq!(
            get(Some(&format!("3~{generation}~~"))).await,
            RequestKind::Stream
        );
        assert_eq!(
            get(Some(&format!("3/0~{generation}~4~7"))).await,
            RequestKind::Other
        );
        assert_eq!(get(Some("3/0")).await, RequestKind::Other);
    }
}
