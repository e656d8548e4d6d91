//! The parts of the program `mcp-cancel-proxy`.
