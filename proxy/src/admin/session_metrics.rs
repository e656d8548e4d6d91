//! Metrics of a command's sessions.

use crate::server::Server;

/// Returns how many sessions have ended, by reason, in Prometheus' text format. Empty for an upstream.
pub(super) fn render(server: &Server) -> String {
    let Server::Stdio(stdio) = server else {
        return String::new();
    };
    let name = "mcp_sessions_closed_total";
    let mut text =
        format!("# HELP {name} Sessions that have ended, by reason\n# TYPE {name} counter\n");
    for (why, count) in stdio.ended_sessions() {
        text += &format!("{name}{{why=\"{why}\"}} {count}\n");
    }
    text
}
