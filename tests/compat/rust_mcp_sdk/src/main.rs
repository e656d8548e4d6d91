//! rust-mcp-sdk on axum. Its second version has no sessions.

use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};

use compat::{Mode, PATH, Setup, Tier, Witness};
use rust_mcp_axum::{McpMountOptions, mcp_routes};
use rust_mcp_sdk::{
    McpServer, RequestContext, ServerDetails, ToMcpServerHandler,
    id_generator::{FastIdGenerator, UuidGenerator},
    mcp_http::{DEFAULT_MAX_LISTEN_STREAMS, McpAppState, McpHttpHandler},
    mcp_server::ServerHandler,
    schema::{
        CallToolRequestParams, CallToolResult, Implementation, ServerCapabilities,
        ServerCapabilitiesTools, ServerResult, schema_utils::CallToolError,
    },
};
use tokio::sync::{Mutex, RwLock};

struct Server(Witness);

#[tokio::main]
async fn main() {
    compat::run_cases("rust-mcp-sdk", &[Tier::Layer], &[Mode::Modern], serve).await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let state = McpAppState {
        id_generator: Arc::new(UuidGenerator {}),
        stream_id_gen: Arc::new(FastIdGenerator::new(Some("s_"))),
        server_details: Arc::new(ServerDetails {
            server_info: Implementation {
                name: "compat".into(),
                version: "0".into(),
                title: None,
                description: None,
                icons: Vec::new(),
                website_url: None,
            },
            capabilities: ServerCapabilities {
                tools: Some(ServerCapabilitiesTools { list_changed: None }),
                ..ServerCapabilities::default()
            },
            meta: None,
            instructions: None,
        }),
        handler: Server(setup.witness.clone()).to_mcp_server_handler(),
        ping_interval: Duration::from_secs(12),
        transport_options: Arc::default(),
        enable_json_response: false,
        message_observer: None,
        extensions: Arc::new(RwLock::new(None)),
        active_listen_streams: Arc::new(Mutex::new(Vec::new())),
        max_listen_streams: DEFAULT_MAX_LISTEN_STREAMS,
    };
    let mount = McpMountOptions {
        streamable_http_endpoint: PATH.into(),
        ..McpMountOptions::default()
    };
    let handler = McpHttpHandler::new(None, vec![], None);
    setup
        .serve(mcp_routes(Arc::new(state), &mount, handler))
        .await
}

// === impl Server ===

#[async_trait::async_trait]
impl ServerHandler for Server {
    async fn handle_call_tool_request(
        &self,
        params: CallToolRequestParams,
        _: &RequestContext,
        _: Arc<dyn McpServer>,
    ) -> Result<ServerResult, CallToolError> {
        let arguments = params.arguments.unwrap_or_default().into();
        compat::work(&self.0, compat::label(&arguments), pending(), None).await;
        Ok(CallToolResult::text_content(Vec::new()).into())
    }
}
