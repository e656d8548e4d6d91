//! Integration tests: real sockets, real rmcp servers.

mod hang_up;
mod support;
