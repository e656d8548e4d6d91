use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use poem::{Route, endpoint::TowerCompatExt as _};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{SessionManager, StreamableHttpService},
};
use tower::ServiceBuilder;

/// The layer must probe: `layer.keep_alive(…)`.
pub fn route<H: ServerHandler, M: SessionManager>(
    layer: CancelOnDisconnectLayer,
    mcp: StreamableHttpService<H, M>,
) -> Route {
    let mcp = ServiceBuilder::new().layer(layer).service(mcp);
    Route::new().at("/mcp", mcp.compat())
}
