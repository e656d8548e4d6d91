//! A handler served over a pair of channels instead of HTTP.

use rmcp::{
    RoleServer, ServerHandler,
    model::ClientJsonRpcMessage,
    service::{RunningService, RxJsonRpcMessage, TxJsonRpcMessage, serve_directly},
    transport::Transport,
};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, error::SendError, unbounded_channel};

use super::recorder::modern;
use crate::support::within;

/// The client's end of the channels.
pub(super) struct Wire<H: ServerHandler> {
    to_server: UnboundedSender<ClientJsonRpcMessage>,
    from_server: UnboundedReceiver<TxJsonRpcMessage<RoleServer>>,
    _service: RunningService<RoleServer, H>,
}

struct ServerEnd {
    from_client: UnboundedReceiver<ClientJsonRpcMessage>,
    to_client: UnboundedSender<TxJsonRpcMessage<RoleServer>>,
}

// === impl Wire ===

impl<H: ServerHandler> Wire<H> {
    pub(super) fn to(handler: H) -> Self {
        let (to_server, from_client) = unbounded_channel();
        let (to_client, from_server) = unbounded_channel();
        let transport = ServerEnd {
            from_client,
            to_client,
        };
        Self {
            to_server,
            from_server,
            _service: serve_directly(handler, transport, None),
        }
    }

    pub(super) fn request(&self, id: i64, method: &str, params: Value) {
        self.send(json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }));
    }

    /// Starts call 1, which calls the tool `stubborn`.
    pub(super) async fn start_stubborn(&self, witness: &crate::support::Witness, label: &str) {
        let arguments = json!({ "label": label });
        let call = json!({ "name": "stubborn", "arguments": arguments });
        self.request(1, "tools/call", call);
        witness.started(label).await;
    }

    pub(super) fn notify(&self, method: &str, params: Value) {
        self.send(json!({ "jsonrpc": "2.0", "method": method, "params": params }));
    }

    pub(super) fn cancel(&self, id: i64) {
        self.notify("notifications/cancelled", json!({ "requestId": id }));
    }

    /// Makes the server answer a request, by which time earlier messages have been processed.
    pub(super) async fn assert_usable(&mut self) {
        // That revision has no ping.
        self.request(99, "ping", modern(json!({})));
        assert_eq!(self.answer().await["id"], 99);
    }

    /// Returns the next message from the server.
    pub(super) async fn next(&mut self) -> Value {
        let message = within("a message", self.from_server.recv()).await;
        json!(message.expect("the server is running"))
    }

    /// Returns the next answer, skipping other messages.
    pub(super) async fn answer(&mut self) -> Value {
        loop {
            let message = self.next().await;
            if message.get("method").is_none() {
                return message;
            }
        }
    }

    fn send(&self, message: Value) {
        let message = serde_json::from_value(message).expect("a message in the protocol");
        self.to_server.send(message).expect("the server is running");
    }
}

// === impl ServerEnd ===

impl Transport<RoleServer> for ServerEnd {
    type Error = SendError<TxJsonRpcMessage<RoleServer>>;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleServer>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        std::future::ready(self.to_client.send(item))
    }

    fn receive(&mut self) -> impl Future<Output = Option<RxJsonRpcMessage<RoleServer>>> + Send {
        self.from_client.recv()
    }

    fn close(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send {
        self.from_client.close();
        std::future::ready(Ok(()))
    }
}
