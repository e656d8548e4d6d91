use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use poem::{Route, endpoint::TowerCompatExt as _};
use rmcp::{ServerHandler, transport::streamable_http_server::StreamableHttpService};
use tower::ServiceBuilder;

/// The layer must probe: `layer.keep_alive(…)`.
pub fn route<H: ServerHandler>(
    layer: CancelOnDisconnectLayer,
    mcp: StreamableHttpService<H, CancellableSessionManager>,
) -> Route {
    let mcp = ServiceBuilder::new().layer(layer).service(mcp);
    Route::new().at("/mcp", mcp.compat())
}
