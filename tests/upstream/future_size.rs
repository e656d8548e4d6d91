// `create_stream`'s future is several times as large as the message that it moves.

use rmcp::{
    model::ClientJsonRpcMessage,
    transport::streamable_http_server::{SessionManager, session::local::LocalSessionManager},
};

pub fn sizes() -> [usize; 2] {
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    let message: ClientJsonRpcMessage = serde_json::from_str(ping).unwrap();
    let manager = LocalSessionManager::default();
    let session = "session".into();
    let of_message = size_of_val(&message);
    [
        of_message,
        size_of_val(&manager.create_stream(&session, message)),
    ]
}

fn main() {
    let [message, create_stream] = sizes();
    println!("a message: {message} B, the future of create_stream: {create_stream} B");
}
