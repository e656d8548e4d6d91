// A middleware puts a request's user into its extensions. A session manager gets those for a call, but not for a resume.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use futures_util::{Stream, stream};
use rmcp::{
    ServerHandler,
    model::{ClientJsonRpcMessage, GetExtensions, JsonRpcMessage, ServerJsonRpcMessage},
    transport::{
        WorkerTransport,
        streamable_http_server::{
            SessionManager, StreamableHttpService,
            session::{ServerSseMessage, SessionId, local::LocalSessionWorker},
        },
    },
};

struct Tools;

impl ServerHandler for Tools {}

#[derive(Clone)]
struct User(&'static str);

/// Records which user each call and resume is from.
#[derive(Default)]
struct Manager(Mutex<Vec<String>>);

macro_rules! methods {
    ($($name:ident($($arg:ident: $type:ty),*) -> $ok:ty = $body:expr;)*) => {
        $(async fn $name(&self, $($arg: $type),*) -> Result<$ok, Infallible> {
            let body: fn(&Self, $($type),*) -> _ = $body;
            Ok(body(self, $($arg),*))
        })*
    };
}

impl SessionManager for Manager {
    type Error = Infallible;
    type Transport = WorkerTransport<LocalSessionWorker>;

    methods! {
        create_stream(id: &SessionId, message: ClientJsonRpcMessage)
            -> impl Stream<Item = ServerSseMessage> + Send + 'static = |this, _, message| {
                let JsonRpcMessage::Request(message) = message else { unreachable!() };
                let parts = message.request.extensions().get::<http::request::Parts>();
                let user = parts.and_then(|parts| parts.extensions.get::<User>());
                this.0.lock().unwrap().push(format!("call of {:?}", user.map(|user| user.0)));
                stream::empty()
            };
        resume(id: &SessionId, last_event_id: String)
            -> impl Stream<Item = ServerSseMessage> + Send + 'static = |this, _, _| {
                // No argument contains the request or its extensions.
                this.0.lock().unwrap().push("resume of an unknown user".to_owned());
                stream::empty()
            };
        has_session(id: &SessionId) -> bool = |_, _| true;
        create_session() -> (SessionId, Self::Transport) = |_| unreachable!();
        initialize_session(id: &SessionId, message: ClientJsonRpcMessage)
            -> ServerJsonRpcMessage = |_, _, _| unreachable!();
        close_session(id: &SessionId) -> () = |_, _| unreachable!();
        create_standalone_stream(id: &SessionId)
            -> impl Stream<Item = ServerSseMessage> + Send + 'static = |_, _| stream::empty();
        accept_message(id: &SessionId, message: ClientJsonRpcMessage)
            -> () = |_, _, _| unreachable!();
    }
}

pub async fn observe() -> String {
    let manager = Arc::new(Manager::default());
    let server = StreamableHttpService::new(|| Ok(Tools), manager.clone(), Default::default());
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    for (method, message) in [("POST", ping), ("GET", "")] {
        let request = http::Request::builder()
            .method(method)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("mcp-session-id", "a session")
            .header("last-event-id", "0/0")
            .extension(User("alice"))
            .body(message.to_owned());
        server.handle(request.unwrap()).await;
    }
    manager.0.lock().unwrap().join(", ")
}

#[tokio::main]
async fn main() {
    println!("{}", observe().await);
}
