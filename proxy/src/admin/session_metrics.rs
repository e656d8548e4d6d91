//! Metrics of a command's sessions.

use super::metric;
use crate::server::Server;

/// Returns how many sessions have ended, by reason, in Prometheus' text format. Empty for an upstream.
pub(super) fn render(server: &Server) -> String {
    let Server::Stdio(stdio) = server else {
        return String::new();
    };
    let name = "mcp_sessions_closed_total";
    let mut lines = String::new();
    for (why, count) in stdio.ended_sessions() {
        lines += &format!("{name}{{why=\"{why}\"}} {count}\n");
    }
    metric(
        name,
        "counter",
        "Sessions that have ended, by reason",
        &lines,
    )
}
