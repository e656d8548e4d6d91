//! mcpkit-axum, whose router is an axum router. It serves nothing without a session.

use std::{future::pending, net::SocketAddr};

use compat::{Mode, PATH, Setup, Tier, Witness};
use mcpkit_axum::McpRouter;
use mcpkit_core::{
    capability::{ServerCapabilities, ServerInfo},
    error::McpError,
    types::{GetPromptResult, Prompt, Resource, ResourceContents, Tool, ToolOutput},
};
use mcpkit_server::{Context, PromptHandler, ResourceHandler, ServerHandler, ToolHandler};
use serde_json::{Map, Value};

struct Server(Witness);

#[tokio::main]
async fn main() {
    compat::run_cases("mcpkit-axum", &[Tier::Layer], &[Mode::Session], serve).await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let router = McpRouter::new(Server(setup.witness.clone())).post_path(PATH);
    setup.serve(router.into_router()).await
}

// === impl Server ===

impl ServerHandler for Server {
    fn server_info(&self) -> ServerInfo {
        ServerInfo::new("compat", "0")
    }

    fn capabilities(&self) -> ServerCapabilities {
        ServerCapabilities::new().with_tools()
    }
}

impl ToolHandler for Server {
    async fn list_tools(&self, _: &Context<'_>) -> Result<Vec<Tool>, McpError> {
        Ok(Vec::new())
    }

    async fn call_tool(
        &self,
        _name: &str,
        arguments: Map<String, Value>,
        _: &Context<'_>,
    ) -> Result<ToolOutput, McpError> {
        compat::work(&self.0, compat::label(&arguments.into()), pending(), None).await;
        Ok(ToolOutput::text("done"))
    }
}

impl ResourceHandler for Server {
    async fn list_resources(&self, _: &Context<'_>) -> Result<Vec<Resource>, McpError> {
        Ok(Vec::new())
    }

    async fn read_resource(
        &self,
        _uri: &str,
        _: &Context<'_>,
    ) -> Result<Vec<ResourceContents>, McpError> {
        Ok(Vec::new())
    }
}

impl PromptHandler for Server {
    async fn list_prompts(&self, _: &Context<'_>) -> Result<Vec<Prompt>, McpError> {
        Ok(Vec::new())
    }

    async fn get_prompt(
        &self,
        name: &str,
        _: Option<Map<String, Value>>,
        _: &Context<'_>,
    ) -> Result<GetPromptResult, McpError> {
        unreachable!("there is no prompt {name}")
    }
}
