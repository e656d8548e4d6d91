//! Ids and names that are meant to break the log.

use serde_json::{Value, json};

use crate::setup::{Lines, Server, for_servers};

/// In some log, each of these ends a line, or hides or reverses the text before it.
const HOSTILE: [&str; 8] = [
    "a\nERROR forged",
    "a\r\nERROR forged",
    "a\u{1b}[2K\u{1b}[1Gforged",
    "a\u{2028}forged\u{2029}",
    "a\u{85}forged\u{b}\u{c}",
    "a\u{202e}degrof\u{2066}",
    "a\0forged",
    "a\u{9b}31mforged\u{7f}",
];

for_servers!([wrapped = Wrapped, layer_only = LayerOnly, stateless = StatelessSse] {
    no_id_breaks_its_line,
    no_tool_name_breaks_its_line,
    no_method_breaks_its_line,
    a_long_name_is_cut,
});

async fn no_id_breaks_its_line(server: Server) {
    for hostile in HOSTILE {
        let message = message(json!(hostile), "tools/call", "echo");
        assert_harmless(server, &message).await;
    }
}

async fn no_tool_name_breaks_its_line(server: Server) {
    for hostile in HOSTILE {
        assert_harmless(server, &message(json!(1), "tools/call", hostile)).await;
    }
}

async fn no_method_breaks_its_line(server: Server) {
    for hostile in HOSTILE {
        assert_harmless(server, &message(json!(1), hostile, "echo")).await;
    }
}

async fn a_long_name_is_cut(server: Server) {
    let name = "x".repeat(100_000);
    let lines = logged(server, &message(json!(1), "tools/call", &name)).await;
    for line in lines {
        assert!(line.len() < 600, "{} bytes", line.len());
        assert!(line.contains("xxx…"), "{line}");
    }
}

fn message(id: Value, method: &str, tool: &str) -> Value {
    let params = json!({ "name": tool, "arguments": { "text": "hello" } });
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

async fn assert_harmless(server: Server, message: &Value) {
    let lines = logged(server, message).await;
    assert_eq!(lines.len(), 2, "a start and an end: {lines:#?}");
    for line in lines {
        // The call lasts microseconds, so its duration is printed with a `µ`.
        let is_harmless = |text: char| matches!(text, ' '..='~' | 'µ');
        assert!(line.chars().all(is_harmless), "{line:?}");
        assert!(line.contains("a\\\\"), "escaped, not dropped: {line}");
    }
}

/// Returns a call's log, split at every kind of line end.
async fn logged(server: Server, message: &Value) -> Vec<String> {
    let (setup, mcp) = server.client().await;
    // The first call logs the hints about the setup.
    setup.assert_usable(&mcp).await;
    let lines = Lines::all();
    let mut call = mcp.send(&mcp.message_request(message)).await;
    // rmcp answers an unknown request with an error.
    call.answer().await.expect("an answer");
    let text = lines.text();
    let cut = text
        .trim_end()
        .split(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']);
    cut.map(|line| line.trim_start().to_owned()).collect()
}
