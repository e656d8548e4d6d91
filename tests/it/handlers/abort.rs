//! [`AbortOnCancel`](mcp_cancel_on_disconnect::AbortOnCancel), what it forwards and what it stops.

mod every_method;
mod linked;
mod log_lines;
mod methods_of_rmcp;
mod recorder;
mod stops;
mod wire;
