//! Puts [`mcp_cancel_on_disconnect`] in front of any MCP server.

fn main() {}
