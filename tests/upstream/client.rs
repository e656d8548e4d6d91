
/// A request from a client.
fn request(method: &str, headers: &[(&str, &str)], message: &str) -> http::Request<String> {
    let mut request = http::Request::builder()
        .method(method)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(message.to_owned()).unwrap()
}

/// Opens a session and returns its id.
async fn open(server: &StreamableHttpService<Tools, LocalSessionManager>) -> String {
    let initialize = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":
        "2025-06-18","capabilities":{},"clientInfo":{"name":"client","version":"1"}}}"#;
    let response = server.handle(request("POST", &[], initialize)).await;
    let session = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
    let initialized = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
    let headers = [("mcp-session-id", &*session)];
    server.handle(request("POST", &headers, initialized)).await;
    session
}
