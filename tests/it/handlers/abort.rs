//! What [`AbortOnCancel`](mcp_cancel_on_disconnect::AbortOnCancel) forwards and stops.

mod every_method;
mod linked;
mod log_lines;
mod methods_of_rmcp;
mod recorder;
mod stops;
mod wire;
