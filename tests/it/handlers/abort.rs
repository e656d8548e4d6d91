//! [`AbortOnCancel`](mcp_cancel_on_disconnect::AbortOnCancel): what it forwards, and what it stops.

mod every_method;
mod linked;
mod methods_of_rmcp;
mod recorder;
mod said;
mod stops;
mod wire;
