//! The tools that get called.

use std::sync::Arc;

use rmcp::{
    ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars, tool, tool_handler, tool_router,
};

/// A server whose tools cost next to nothing. The router is built only once, because rmcp asks for a new handler
/// for every stateless call.
#[derive(Clone)]
pub struct Tools {
    tool_router: Arc<ToolRouter<Self>>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
pub struct Measure {
    text: String,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
pub struct Produce {
    length: usize,
}

#[tool_router]
impl Tools {
    /// Returns the length of its argument.
    #[tool]
    async fn measure(&self, Parameters(Measure { text }): Parameters<Measure>) -> String {
        text.len().to_string()
    }

    /// Returns a text of this length.
    #[tool]
    async fn produce(&self, Parameters(Produce { length }): Parameters<Produce>) -> String {
        "x".repeat(length)
    }

    /// Never answers.
    #[tool]
    async fn wait(&self) -> String {
        std::future::pending().await
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Tools {}

impl Default for Tools {
    fn default() -> Self {
        Self {
            tool_router: Arc::new(Self::tool_router()),
        }
    }
}
