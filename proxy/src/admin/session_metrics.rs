//! Metrics for a command's sessions.

use super::metric;
use crate::server::Server;

/// Renders the number of ended sessions by reason, in the Prometheus text format.
///
/// Returns an empty string for an upstream.
pub(super) fn render(server: &Server) -> String {
    let Server::Stdio(stdio) = server else {
        return String::new();
    };
    let name = "mcp_sessions_closed_total";
    let mut lines = String::new();
    for (reason, count) in stdio.ended_sessions() {
        lines += &format!("{name}{{why=\"{reason}\"}} {count}\n");
    }
    metric(
        name,
        "counter",
        "Number of closed sessions, by reason",
        &lines,
    )
}
