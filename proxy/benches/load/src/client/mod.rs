//! Hand-written clients, whose cost is small compared to what they measure.

use anyhow::Result;
use tokio::io::AsyncReadExt as _;

pub(crate) mod calls;
pub(crate) mod flood;
pub(crate) mod hold;
mod http;
mod pipe;
pub(crate) mod upstream;

/// The revision that clients request.
const REVISION: &str = "2025-11-25";

const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

fn initialize() -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":"initialize","method":"initialize","params":{{"protocolVersion":"{REVISION}","capabilities":{{}},"clientInfo":{{"name":"proxy-load","version":"0"}}}}}}"#
    )
}

/// Returns a call of a tool with these arguments, whose id is also its progress token.
fn call(id: usize, tool: &str, arguments: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"{tool}","arguments":{arguments},"_meta":{{"progressToken":{id}}}}}}}"#
    )
}

/// Returns the text for a call: 100 B that differ from those of every other call.
fn text(client: usize, call: usize) -> String {
    format!("{:x<100}", format!("client {client} call {call} "))
}

/// Returns a call that is answered with its text.
fn echo(id: usize, text: &str) -> String {
    call(id, "echo", &format!(r#"{{"text":"{text}"}}"#))
}

/// Waits for an empty line on stdin. Returns `false` if stdin ends instead.
async fn read_line() -> bool {
    matches!(tokio::io::stdin().read_u8().await, Ok(b'\n'))
}

async fn until_stdin_ends() -> Result<()> {
    let mut rest = Vec::new();
    tokio::io::stdin().read_to_end(&mut rest).await?;
    Ok(())
}
