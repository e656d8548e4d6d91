//! Clients that call slow tools. Some hang up.

use std::{error::Error, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::sleep,
};

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{
    "protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"busy","version":"0"}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;

pub(super) async fn run(addr: &str) -> Result<(), Box<dyn Error>> {
    let session = open_session(addr).await?;
    let _report = call(addr, &session, json!(1), "report").await?;
    let _upload = call(addr, &session, json!(2), "upload").await?;
    let other = open_session(addr).await?;
    // Text for the page, as any client may send it.
    let script = "<script>alert(1)</script>";
    let _odd = call(addr, &other, json!("\"><b>7"), script).await?;
    loop {
        // Goes away, and does not come back: the call waits 20 s for it.
        drop(call(addr, &other, json!(8), "deploy").await?);
        sleep(Duration::from_secs(60)).await;
    }
}

async fn open_session(addr: &str) -> Result<String, Box<dyn Error>> {
    let (_, head) = post(addr, "", INITIALIZE).await?;
    let mut lines = head.lines();
    let session = lines.find_map(|line| line.strip_prefix("mcp-session-id: "));
    let session = session.ok_or("no session was opened")?.to_owned();
    post(addr, &session, INITIALIZED).await?;
    Ok(session)
}

async fn call(
    addr: &str,
    session: &str,
    id: Value,
    tool: &str,
) -> Result<TcpStream, Box<dyn Error>> {
    let params = json!({ "name": tool, "arguments": {} });
    let call = json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params });
    let (connection, _) = post(addr, session, &call.to_string()).await?;
    Ok(connection)
}

/// The connection, and the head of the answer.
async fn post(
    addr: &str,
    session: &str,
    body: &str,
) -> Result<(TcpStream, String), Box<dyn Error>> {
    let session = match session {
        "" => String::new(),
        id => format!("mcp-session-id: {id}\r\n"),
    };
    let length = body.len();
    let request = format!(
        "POST /mcp HTTP/1.1\r\nhost: {addr}\r\n{session}accept: application/json, text/event-stream\r\n\
         mcp-protocol-version: 2025-06-18\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    let mut connection = TcpStream::connect(addr).await?;
    connection.write_all(request.as_bytes()).await?;
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        let mut byte = [0];
        connection.read_exact(&mut byte).await?;
        head.extend(byte.map(char::from));
    }
    Ok((connection, head))
}
