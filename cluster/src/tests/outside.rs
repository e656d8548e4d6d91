//! What is outside of the cluster: layers that refuse, delays that the server asks for, stores of events, clients that pause.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::{Calls, CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig,
    session::{
        EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
        local::LocalSessionManager,
    },
};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Served, Tools, Witness, router, serve, within};
use tokio::{net::TcpListener, task::yield_now, time::Instant};

use super::{
    node::{GRACE, Node, SECRET, Setup, pass},
    steps::directory,
};
use crate::{
    Cluster,
    cluster::{Options, join},
    directory::{MemoryDirectory, faulty::Faulty},
    ids::{Incarnation, Owner},
    membership::heartbeat::SETTLE_PERIOD,
    relay::{filter::PeersFilter, wire::Secret},
};

const SECOND: Duration = Duration::from_secs(1);

/// An instance whose service has this configuration, manager and layer.
struct Own {
    me: Owner,
    cluster: Cluster,
    witness: Witness,
    calls: Calls,
    public: Option<Served>,
    peers: tokio::task::JoinHandle<()>,
}

impl Own {
    async fn start(
        directory: &Faulty,
        filter: PeersFilter,
        config: StreamableHttpServerConfig,
        manager: LocalSessionManager,
        layer: CancelOnDisconnectLayer,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = Owner {
            address: listener.local_addr().unwrap(),
            incarnation: Incarnation::random(),
        };
        let secret = Secret::new(SECRET).unwrap();
        let cluster = join(me, directory.clone(), filter, secret, Options::default());
        let witness = Witness::new();
        let manager =
            CancellableSessionManager::new(manager).event_id_key("a key of all instances");
        let sessions = Arc::new(cluster.sessions(manager));
        let mut config = config.with_sse_keep_alive(None);
        config.session_store = Some(Arc::new(cluster.clone()));
        let service = Tools::new(&witness).service_with(config, sessions);
        let layer = cluster.protect(layer);
        let calls = layer.calls();
        let app = router(service).layer(layer).layer(cluster.layer());
        let public = serve(app.clone()).await;
        let member = cluster.clone();
        let peers = tokio::spawn(async move { member.serve_peers(listener, app).await });
        let own = Self {
            me,
            cluster,
            witness,
            calls,
            public: Some(public),
            peers,
        };
        let is_multi_threaded = tokio::runtime::Handle::current().runtime_flavor()
            == tokio::runtime::RuntimeFlavor::MultiThread;
        if !is_multi_threaded {
            own.until_settled().await;
        }
        own
    }

    async fn until_settled(&self) {
        loop {
            let since = self.cluster.router().heartbeat.consistent_since();
            if since.is_some_and(|since| Instant::now() - since >= SETTLE_PERIOD) {
                return;
            }
            pass(Duration::from_millis(250)).await;
        }
    }

    async fn session(&self) -> Mcp {
        Mcp::session(self.public.as_ref().unwrap().addr, PATH).await
    }

    fn client_of(&self, other: &Mcp) -> Mcp {
        Mcp::stateless(self.public.as_ref().unwrap().addr, PATH)
            .in_session(other.session_id().unwrap())
    }

    /// Makes a call whose client hangs up. Returns the id of the last event that the client received.
    async fn detach(&self, mcp: &Mcp, id: u32, label: &str) -> String {
        let before = self.calls.detached();
        let mut call = mcp.call(id, "hold", json!({ "label": label })).await;
        call.head().await;
        let event = call.event().await.unwrap();
        self.witness.started(label).await;
        call.fin();
        while self.calls.detached() == before {
            yield_now().await;
        }
        event.id.unwrap()
    }

    async fn kill(&mut self) {
        self.cluster.stop_heartbeat();
        drop(self.public.take());
        self.peers.abort();
        assert!((&mut self.peers).await.unwrap_err().is_cancelled());
        let _ = self.me;
    }
}

/// Sends a call of 6 MiB, and reads while it writes. Returns the status, if a head arrived.
async fn post_long(node: &Node, session: &str) -> Option<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let stream = tokio::net::TcpStream::connect(node.public.as_ref().unwrap().addr);
    let (mut read, mut write) = stream.await.unwrap().into_split();
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"echo","arguments":{{"text":"{}"}}}}}}"#,
        "x".repeat(6 << 20)
    );
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: localhost\r\nmcp-session-id: {session}\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let writing = tokio::spawn(async move {
        write.write_all(head.as_bytes()).await?;
        write.write_all(body.as_bytes()).await?;
        Ok::<_, std::io::Error>(write)
    });
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    let reading = async {
        while let Ok(length @ 1..) = read.read(&mut buffer).await {
            all.extend_from_slice(&buffer[..length]);
            if all.windows(4).any(|window| window == b"\r\n\r\n") {
                break;
            }
        }
    };
    within("a head", reading).await;
    let _written = writing.await.unwrap();
    let text = String::from_utf8_lossy(&all).into_owned();
    text.lines().next().map(str::to_owned)
}

/// A body that is longer than the server accepts.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_long_gets_the_same_answer_through_another_instance() {
    let directory = directory();
    let [a, b] = [Node::start(&directory).await, Node::start(&directory).await];
    tokio::time::sleep(SECOND).await;
    let mcp = a.session().await;
    let mut seen = Vec::new();
    for node in [&a, &b] {
        let mut statuses = Vec::new();
        for _ in 0..8 {
            statuses.push(post_long(node, mcp.session_id().unwrap()).await);
        }
        seen.push(statuses);
    }
    assert_eq!(seen[0], seen[1]);
}

/// Events in memory, under ids that do not show their stream.
#[derive(Default)]
struct Store(Mutex<BTreeMap<usize, (String, ServerSseMessage)>>);

struct Shared(Arc<Store>);

#[async_trait::async_trait]
impl EventStore for Shared {
    async fn store_event(
        &self,
        stream: &str,
        event: &ServerSseMessage,
    ) -> Result<EventId, EventStoreError> {
        let mut events = self.0.0.lock().unwrap();
        let number = events.len();
        let id = format!("event-{number}");
        let mut event = event.clone();
        event.event_id = Some(id.clone());
        events.insert(number, (stream.to_owned(), event));
        Ok(id)
    }

    async fn replay_events_after(&self, last: &str) -> Result<EventStream, EventStoreError> {
        let number: usize = last.strip_prefix("event-").unwrap_or_default().parse()?;
        let events = self.0.0.lock().unwrap();
        let (stream, _) = events.get(&number).ok_or("no such event")?;
        let later = events.range(number + 1..).map(|(_, event)| event);
        let later = later.filter(|(of, _)| of == stream);
        let later: Vec<_> = later.map(|(_, event)| event.clone()).collect();
        Ok(Box::pin(futures_util::stream::iter(later)))
    }
}

/// What a client that resumes a call gets, with a store of events that all instances share.
async fn with_a_store(is_ended: bool, is_killed: bool) -> String {
    let directory = directory();
    let store = Arc::new(Store::default());
    let start = || {
        Own::start(
            &directory,
            PeersFilter::default(),
            Mode::Session.config(),
            LocalSessionManager::default().with_event_store(Arc::new(Shared(store.clone()))),
            CancelOnDisconnectLayer::new().grace(Grace::After(30 * SECOND)),
        )
    };
    let mut a = start().await;
    let b = start().await;
    let mcp = a.session().await;
    let named = a.detach(&mcp, 1, "a").await;
    if is_ended {
        a.witness.release("a");
        a.witness.ended("a").await;
        pass(SECOND).await;
    }
    if is_killed {
        a.kill().await;
        pass(8 * SECOND).await;
    }
    let mut resumed = b.client_of(&mcp).resume(&named).await;
    let status = resumed.head().await.status;
    if !is_ended && !is_killed {
        a.witness.release("a");
    }
    let body = tokio::time::timeout(2 * SECOND, resumed.body_to_end()).await;
    let body = body.map(|body| String::from_utf8(body).unwrap());
    format!("{status} {body:?}")
}

#[tokio::test]
async fn answers_with_a_store_of_events() {
    for (is_ended, is_killed) in [(false, false), (true, false), (false, true), (true, true)] {
        println!(
            "{is_ended} {is_killed} {}",
            with_a_store(is_ended, is_killed).await
        );
    }
}

/// A client is connected, and does not read for 130 s, for example because the lid of its laptop is closed. Its call reports much.
///
/// Neither the layer (`stall_timeout`) nor the public listener of the application has a limit for that, as in the README's program.
/// Takes 140 s of real time.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 140 s"]
async fn a_connected_client_that_pauses_keeps_its_call_through_another_instance() {
    let directory = directory();
    let [a, b] = [
        Setup::with_grace().start(&directory).await,
        Node::start(&directory).await,
    ];
    tokio::time::sleep(8 * SECOND).await;
    let mut paused = Vec::new();
    for (label, node) in [("directly", &a), ("through b", &b)] {
        let mcp = a.session().await;
        let addr = node.public.as_ref().unwrap().addr;
        let mut client = test_support::Connection::open_with_receive_buffer(addr, 16 * 1024).await;
        let arguments = json!({ "label": label, "events": 300_000 });
        client
            .send(
                &node
                    .client_of(&mcp)
                    .call_request(label, "chatty", arguments),
            )
            .await;
        assert_eq!(client.head().await.status, 200);
        client.event().await.unwrap();
        paused.push(client);
    }
    for seconds in 1..=130 {
        tokio::time::sleep(SECOND).await;
        if seconds % 10 == 0 {
            let running = ["directly", "through b"].map(|label| a.witness.is_running(label));
            println!(
                "after {seconds} s: running {running:?}, detached {}",
                a.calls.detached()
            );
        }
    }
    let running = ["directly", "through b"].map(|label| a.witness.is_running(label));
    assert_eq!(running, [true, true]);
}

/// A layer of the application removes secrets from all events of its responses.
fn redacting(app: Router) -> Router {
    use futures_util::StreamExt as _;
    app.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = next.run(request).await.into_parts();
        let events = body.into_data_stream().map(|data| {
            let data: Result<_, axum::Error> = data;
            data.map(|data| String::from_utf8_lossy(&data).replace("done:a", "*****"))
        });
        let body = axum::body::Body::from_stream(events);
        Ok::<_, Infallible>(axum::response::Response::from_parts(head, body))
    }))
}

/// Returns the body that a client gets that resumes a call that has ended, from its living owner or after the owner has died.
async fn redacted(is_killed: bool) -> String {
    let directory = directory();
    let setup = || Setup {
        inner_layers: redacting,
        ..Setup::with_grace()
    };
    let mut a = setup().start(&directory).await;
    let b = setup().start(&directory).await;
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let named = a.detach(&mcp, 1, "a").await;
    a.witness.release("a");
    a.witness.ended("a").await;
    pass(2 * SECOND).await;
    if is_killed {
        a.kill_and_expire().await;
        pass(2 * SECOND).await;
    }
    let mut resumed = b.client_of(&mcp).resume(&named).await;
    assert_eq!(resumed.head().await.status, 200);
    String::from_utf8(within("a body", resumed.body_to_end()).await).unwrap()
}

#[tokio::test]
async fn a_kept_answer_passes_the_layers_of_the_application() {
    for is_killed in [false, true] {
        let body = redacted(is_killed).await;
        println!("{is_killed} {body}");
        assert!(body.contains("result"), "{is_killed} {body}");
        assert!(!body.contains("done:a"), "{is_killed} {body}");
    }
}

/// What the application's own acceptor knows of a connection, for example the certificate of the client.
#[derive(Clone)]
struct Certificate;

/// Refuses clients without a certificate.
fn certified(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let info: Option<&axum::extract::ConnectInfo<Certificate>> = request.extensions().get();
        if info.is_none() && request.headers().contains_key("mcp-session-id") {
            return Ok::<_, Infallible>(StatusCode::UNAUTHORIZED.into_response());
        }
        Ok(next.run(request).await)
    }))
}

/// A server with a `Connected` of its own (`into_make_service_with_connect_info::<Certificate>()`).
#[tokio::test]
async fn what_the_acceptor_knows_of_a_client_reaches_the_owner() {
    use tower_service::Service as _;
    let directory = directory();
    let [a, b] = Setup::start_pair(&directory, certified).await;
    let connection = a.initialize().await;
    let mut connection = connection;
    let session = connection
        .head()
        .await
        .header("mcp-session-id")
        .unwrap()
        .to_owned();
    let mut statuses = Vec::new();
    for node in [&a, &b] {
        let mcp = node.client(&session);
        let mut request = super::steps::post_echo(&mcp, 1);
        request
            .extensions_mut()
            .insert(axum::extract::ConnectInfo(Certificate));
        let answered: Result<_, Infallible> = node.app.clone().call(request).await;
        statuses.push(answered.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [200, 200]);
}

/// Which end keeps the connections of ended relays in TIME_WAIT.
#[tokio::test(flavor = "multi_thread")]
async fn ended_relays_take_no_ports_of_the_relaying_instance() {
    let directory = directory();
    let [a, b] = [Node::start(&directory).await, Node::start(&directory).await];
    tokio::time::sleep(SECOND).await;
    let mcp = a.session().await;
    let client = b.client_of(&mcp);
    for id in 0..300 {
        let mut call = client.call(id, "echo", json!({ "text": "x" })).await;
        within("an answer", call.answer()).await.unwrap();
        let _end = within("the end", call.body_to_end()).await;
    }
    let port = format!("{:04X}", a.me.address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let waiting = table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
        (state == "06").then(|| (local.ends_with(&port), remote.ends_with(&port)))
    });
    let (mut of_owner, mut of_relay) = (0, 0);
    for (is_owner, is_relay) in waiting {
        of_owner += u32::from(is_owner);
        of_relay += u32::from(is_relay);
    }
    println!("in TIME_WAIT: at the owner {of_owner}, at the relay {of_relay}");
    assert!(of_relay < 30, "{of_relay}");
}
