//! The whole proxy, in front of either kind of server: half of the clients disconnect, and the others do not read.

use std::{
    ffi::OsString,
    fs,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use mcp_cancel_proxy::{Proxy, config::Config};
use test_support::{
    Connection, Mcp,
    body::{BodyDecoder, Decoded},
    head, within,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::sleep,
};

use crate::{MEMORY, run_alone};

const MIB: usize = 1024 * 1024;
const BUFFER: usize = 16 * MIB;

/// How much more memory connections and the work on them may take.
const MAX_OVERHEAD: usize = BUFFER / 4;

const SESSIONS: usize = 10;
const CALLS: usize = 4;

/// How many events each call gets.
const EVENTS: usize = 64;

/// The size of the text in an event.
const EVENT_SIZE: usize = 16 * 1024;

/// The receive buffer of a client that does not read, so that the kernel buffers little for it.
const SMALL: u32 = 4 * 1024;

/// How long without progress before the flood counts as over, as nothing announces that.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// An HTTP server that answers each call with the flood.
struct Server {
    addr: SocketAddr,
    written: Arc<AtomicUsize>,
}

/// A file with the flood, for a server on stdin and stdout. It is removed on drop.
struct File(PathBuf);

#[test]
fn in_front_of_an_upstream_a_flood_takes_little_more_than_the_buffer() {
    run_alone(async || {
        let server = Server::start().await;
        let url = format!("http://{}/mcp", server.addr);
        let grown =
            growth_under_flood(&["--buffer=16MiB", "--upstream", &url], &server.written).await;
        assert!(grown > BUFFER / 2, "the flood was too small: {grown}");
        assert!(grown <= BUFFER + MAX_OVERHEAD, "{grown}");
    });
}

#[test]
fn without_an_event_store_a_flood_takes_little() {
    run_alone(async || {
        let server = Server::start().await;
        let url = format!("http://{}/mcp", server.addr);
        let grown =
            growth_under_flood(&["--no-resumable", "--upstream", &url], &server.written).await;
        let written = server.written.load(Ordering::Relaxed);
        assert!(written > BUFFER / 2, "the flood was too small: {written}");
        assert!(grown <= MAX_OVERHEAD, "{grown}");
    });
}

#[test]
fn in_front_of_a_command_a_flood_takes_little_more_than_the_buffer() {
    run_alone(async || {
        let file = File::with_flood();
        let result = r#"{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"s","version":"0"}}"#;
        // `initialize`, its notification, and then the calls, whose tokens are 1, 2 and so on.
        let script = format!(
            r#"read -r line; id=${{line#*\"id\":}}; id=${{id%%,*}}; id=${{id%%\}}*}}
            printf '{{"jsonrpc":"2.0","id":%s,"result":%s}}\n' "$id" '{result}'
            read -r line; token=0
            while read -r line; do token=$((token + 1)); sed "s/TOKEN/$token/" '{}'; done"#,
            file.0.display()
        );
        let options = ["--buffer=16MiB", "--", "sh", "-c", &script];
        let grown = growth_under_flood(&options, &AtomicUsize::new(0)).await;
        assert!(grown > BUFFER / 2, "the flood was too small: {grown}");
        assert!(grown <= BUFFER + MAX_OVERHEAD, "{grown}");
    });
}

/// Returns how much the memory of the proxy and this test grows at most.
///
/// `written` counts the bytes that the server has written.
async fn growth_under_flood(options: &[&str], written: &AtomicUsize) -> usize {
    let program_args = ["mcp-cancel-proxy", "--listen=127.0.0.1:0"];
    let options = program_args.iter().chain(options).map(OsString::from);
    let proxy = Proxy::bind(Config::read(options).unwrap()).await.unwrap();
    let addr = proxy.local_addr().unwrap();
    let served = tokio::spawn(proxy.serve(std::future::pending()));
    // A first session, because some allocations are there to stay.
    let _first = open_session(addr).await;
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let mut clients = Vec::new();
    // Opened before the flood, during which a command refuses further sessions.
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(open_session(addr).await);
    }
    for session in &sessions {
        for number in 1..=CALLS {
            let mut client = Connection::open_with_receive_buffer(addr, SMALL).await;
            let call = format!(
                r#"{{"jsonrpc":"2.0","id":{number},"method":"tools/call","params":{{"name":"flood","_meta":{{"progressToken":{number}}}}}}}"#
            );
            client.send(&session.post_request(call)).await;
            client.head().await;
            if number % 2 == 0 {
                clients.push(client);
            }
        }
    }
    let flood_end = async {
        loop {
            let state = || (MEMORY.peak_usage(), written.load(Ordering::Relaxed));
            let before = state();
            sleep(IDLE_TIME).await;
            if state() == before {
                return;
            }
        }
    };
    within("the flood to end", flood_end).await;
    let grown = MEMORY.peak_usage() - before;
    println!("{} KiB", grown / 1024);
    served.abort();
    grown
}

async fn open_session(addr: SocketAddr) -> Mcp {
    Mcp::stateless(addr, "/mcp")
        .version("2025-11-25")
        .connect()
        .await
}

/// Returns the JSON of one event.
fn progress(token: &str) -> String {
    let padding = "x".repeat(EVENT_SIZE);
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":1,"message":"{padding}"}}}}"#
    )
}

// === impl Server ===

impl Server {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let event = format!("data: {}\n\n", progress("1"));
        let chunk = Bytes::from(format!("{:x}\r\n{event}\r\n", event.len()));
        let written = Arc::new(AtomicUsize::new(0));
        let counter = written.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answering = answer(stream, chunk.clone(), counter.clone());
                tokio::spawn(answering);
            }
        });
        Self { addr, written }
    }
}

/// Answers one request. Returns `None` if its client disconnects early.
async fn answer(mut stream: TcpStream, chunk: Bytes, written: Arc<AtomicUsize>) -> Option<()> {
    let mut received = BytesMut::new();
    let (_, headers) = loop {
        match head::take(&mut received) {
            Some(head) => break head,
            None => stream
                .read_buf(&mut received)
                .await
                .ok()
                .filter(|read| *read > 0)?,
        };
    };
    let (mut decoder, mut body) = (BodyDecoder::announced(&headers), Vec::new());
    loop {
        match decoder.decode(&mut received) {
            Decoded::Data(data) => body.extend_from_slice(&data),
            Decoded::End => break,
            Decoded::More => {
                stream
                    .read_buf(&mut received)
                    .await
                    .ok()
                    .filter(|read| *read > 0)?;
            }
        }
    }
    let message: serde_json::Value = serde_json::from_slice(&body).ok()?;
    let id = message.get("id").cloned().unwrap_or_default();
    let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n";
    match message.get("method")?.as_str()? {
        "initialize" => {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            let session = NEXT.fetch_add(1, Ordering::Relaxed);
            let body = format!(
                r#"{{"jsonrpc":"2.0","id":{id},"result":{{"protocolVersion":"2025-11-25","capabilities":{{}},"serverInfo":{{"name":"s","version":"0"}}}}}}"#
            );
            let head = format!(
                "{head}mcp-session-id: {session}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all((head + &body).as_bytes()).await.ok()
        }
        "tools/call" => {
            let head = format!(
                "{head}content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await.ok()?;
            for _ in 0..EVENTS {
                stream.write_all(&chunk).await.ok()?;
                written.fetch_add(chunk.len(), Ordering::Relaxed);
            }
            // The server never answers the call, and waits for the connection to close.
            stream.read_u8().await.ok().map(drop)
        }
        _ => {
            let head = "HTTP/1.1 202 Accepted\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(head.as_bytes()).await.ok()
        }
    }
}

// === impl File ===

impl File {
    fn with_flood() -> Self {
        let name = format!("mcp-cancel-proxy-flood-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let line = progress("TOKEN") + "\n";
        fs::write(&path, line.repeat(EVENTS)).unwrap();
        Self(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // It may already have been removed.
        let _ = fs::remove_file(&self.0);
    }
}
