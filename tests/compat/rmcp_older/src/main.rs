//! rmcp 0.8, 1 and 2, which have no session manager and no `CallToken::of`.
//!
//! Without sessions, rmcp does not notify these handlers of a disconnect, as `RequestContext::ct` never fires. Instead
//! they find their token in the head of the HTTP request, which rmcp copies into the context.

use std::{net::SocketAddr, sync::Arc};

use axum::Router;
use compat::{Mode, PATH, Setup, Tier, Witness};
use mcp_cancel_on_disconnect::CallToken;

/// A server on one version of rmcp.
macro_rules! on_rmcp {
    ($version:ident: $rmcp:ident, $params:ident) => {
        mod $version {
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

            #[derive(Clone)]
            struct Server(Witness);

            impl ServerHandler for Server {
                async fn call_tool(
                    &self,
                    request: $params,
                    context: RequestContext<RoleServer>,
                ) -> Result<CallToolResult, ErrorData> {
                    let head = context.extensions.get::<http::request::Parts>();
                    let token = head.and_then(|head| head.extensions.get::<CallToken>());
                    let arguments = request.arguments.unwrap_or_default().into();
                    let label = compat::label(&arguments);
                    let cancelled = context.ct.cancelled();
                    if compat::work(&self.0, label, cancelled, token.cloned()).await {
                        Ok(CallToolResult::success(Vec::new()))
                    } else {
                        Err(ErrorData::internal_error("cancelled", None))
                    }
                }
            }

            pub(super) async fn serve(setup: Setup) -> SocketAddr {
                let mut config = StreamableHttpServerConfig::default();
                config.stateful_mode = setup.mode == Mode::Session;
                let handler = Server(setup.witness.clone());
                let sessions = Arc::new(LocalSessionManager::default());
                let service =
                    StreamableHttpService::new(move || Ok(handler.clone()), sessions, config);
                setup.serve(Router::new().nest_service(PATH, service)).await
            }
        }
    };
}

on_rmcp!(on_2: rmcp_2, CallToolRequestParams);
on_rmcp!(on_1: rmcp_1, CallToolRequestParams);
on_rmcp!(on_0_8: rmcp_0_8, CallToolRequestParam);

#[tokio::main]
async fn main() {
    let modes = [Mode::Session, Mode::Stateless];
    tokio::join!(
        compat::run_cases("rmcp 2", &[Tier::Layer], &modes, on_2::serve),
        compat::run_cases("rmcp 1", &[Tier::Layer], &modes, on_1::serve),
        compat::run_cases("rmcp 0.8", &[Tier::Layer], &modes, on_0_8::serve),
    );
}
