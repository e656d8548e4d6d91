//! Finds a call's token in its handler's context.

use http::request::Parts;
use rmcp::{RoleServer, model::Extensions, service::RequestContext};

use crate::token::CallToken;

impl CallToken {
    /// Returns the token for the call that an rmcp handler is serving.
    ///
    /// Returns `None` if the request did not pass through the layer, for example because it arrived over a transport other than
    /// HTTP. For rmcp versions before 3.9, see [`CallToken`](Self#in-handlers-of-older-versions-of-rmcp).
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CallToken;
    /// use rmcp::{RoleServer, service::RequestContext};
    ///
    /// async fn upload(context: RequestContext<RoleServer>) -> &'static str {
    ///     let Some(token) = CallToken::of(&context) else {
    ///         return "not over HTTP";
    ///     };
    ///     tokio::select! {
    ///         () = token.cancelled() => "stopped: the client disconnected",
    ///         () = std::future::ready(()) => "uploaded",
    ///     }
    /// }
    /// # use std::sync::Arc;
    /// # use axum::{Router, body::{Body, to_bytes}};
    /// # use http::Request;
    /// # use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
    /// # use rmcp::{ErrorData, ServerHandler, model::{CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock}};
    /// # use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
    /// # use tower::ServiceExt;
    /// # struct MyServer;
    /// # impl ServerHandler for MyServer {
    /// #     async fn call_tool(
    /// #         &self,
    /// #         _: CallToolRequestParams,
    /// #         context: RequestContext<RoleServer>,
    /// #     ) -> Result<CallToolResponse, ErrorData> {
    /// #         Ok(CallToolResult::success(vec![ContentBlock::text(upload(context).await)]).into())
    /// #     }
    /// # }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # let config = StreamableHttpServerConfig::default().with_legacy_session_mode(false);
    /// # let sessions = Arc::new(CancellableSessionManager::default());
    /// # let mcp = StreamableHttpService::new(|| Ok(MyServer), sessions, config);
    /// # let app: Router = Router::new().nest_service("/mcp", mcp).layer(CancelOnDisconnectLayer::new());
    /// # let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
    /// # let request = Request::post("/mcp")
    /// #     .header("host", "localhost")
    /// #     .header("content-type", "application/json")
    /// #     .header("accept", "application/json, text/event-stream");
    /// # let response = app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
    /// # let answer = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    /// # let answer = String::from_utf8_lossy(&answer);
    /// # assert!(answer.contains("uploaded"), "{answer}");
    /// # }
    /// ```
    pub fn of(context: &RequestContext<RoleServer>) -> Option<Self> {
        let token = Self::in_message(&context.extensions).cloned()?;
        token.exchange().signal.mark_observed();
        Some(token)
    }

    /// Finds the token in the HTTP request head, which rmcp stores in the message's extensions.
    pub(super) fn in_message(extensions: &Extensions) -> Option<&Self> {
        extensions.get::<Parts>()?.extensions.get()
    }
}
