//! The `CallToken` in handlers of older versions of rmcp, for which `CallToken::of` does not exist.
//!
//! Without sessions nothing of rmcp tells these handlers that their client has gone: `RequestContext::ct` stays
//! silent. Their token is in the head of the HTTP request, which rmcp copies into the context.

use std::{net::SocketAddr, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};

/// A server on one version of rmcp, without sessions.
macro_rules! on_rmcp {
    ($version:ident: $rmcp:ident, $params:ident) => {
        mod $version {
            use std::{future::pending, sync::Arc};

            use $rmcp::{
                ErrorData, RoleServer, ServerHandler,
                model::{CallToolResult, $params},
                service::RequestContext,
                transport::streamable_http_server::{
                    StreamableHttpServerConfig, StreamableHttpService,
                    session::local::LocalSessionManager,
                },
            };

            use super::*;

            /// Works for ever, and hands out the tokens of its calls.
            #[derive(Clone)]
            struct Works(mpsc::UnboundedSender<CallToken>);

            impl ServerHandler for Works {
                async fn call_tool(
                    &self,
                    _request: $params,
                    context: RequestContext<RoleServer>,
                ) -> Result<CallToolResult, ErrorData> {
                    let head = context.extensions.get::<http::request::Parts>();
                    let token = head.and_then(|head| head.extensions.get::<CallToken>());
                    self.0.send(token.expect("behind the layer").clone()).ok();
                    pending().await
                }
            }

            #[tokio::test]
            async fn the_token_fires_when_the_client_hangs_up() {
                let (tokens, handed_out) = mpsc::unbounded_channel();
                let mut config = StreamableHttpServerConfig::default();
                config.stateful_mode = false;
                let handler = move || Ok(Works(tokens.clone()));
                let sessions = Arc::new(LocalSessionManager::default());
                let service = StreamableHttpService::new(handler, sessions, config);
                hangs_up(Router::new().nest_service("/mcp", service), handed_out).await;
            }
        }
    };
}

on_rmcp!(on_0_8: rmcp_0_8, CallToolRequestParam);
on_rmcp!(on_1_8: rmcp_1, CallToolRequestParams);
on_rmcp!(on_2_2: rmcp_2, CallToolRequestParams);

async fn hangs_up(app: Router, mut tokens: mpsc::UnboundedReceiver<CallToken>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let app = app.layer(CancelOnDisconnectLayer::new());
    let server = axum::serve(listener, app).into_future();

    let client = async {
        let connection = call(address).await;
        let token = tokens.recv().await.expect("the handler works");
        assert!(!token.is_cancelled(), "its client waits");

        drop(connection);
        token.cancelled().await;
        assert_eq!(token.reason(), Some(CancelReason::ClientDisconnected));
    };
    tokio::select! {
        () = async { timeout(Duration::from_secs(20), client).await.expect("in time") } => {}
        ended = server => panic!("the server has ended: {ended:?}"),
    }
}

/// Sends a call, whose answer never comes.
async fn call(address: SocketAddr) -> TcpStream {
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"work"}}"#;
    let request = format!(
        "POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json, text/event-stream\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut connection = TcpStream::connect(address).await.expect("it listens");
    let written = connection.write_all(request.as_bytes()).await;
    written.expect("it reads");
    connection
}
