//! Clients that read slowly, pause or do not read, and how `stall_timeout` judges each.
//!
//! A table over real sockets. Each row has the size of the event, the size of the frames in which the inner service
//! writes it, how the client reads, and the verdict. Each row is played on both HTTP/1.1 and HTTP/2. A sample with
//! short times runs in `cargo test`. All rows run if `MCP_SWEEP=full` is set in the environment.

use std::{cell::Cell, convert::Infallible, net::SocketAddr, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::Path,
    response::Response,
    routing::post,
};
use futures_util::{future::join_all, stream};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, Event, Outcome,
    socket::{Peer, WatchedListener},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::mpsc,
    time::{Instant, sleep, timeout_at},
};

use crate::support::{H2, H2Stream, Request};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// The interval at which a client reads if it reads without pausing.
const TICK: Duration = Duration::from_millis(20);

/// How much of a stream the client receives without reading.
///
/// It is the receive buffer of its socket, or the window of its stream.
const WINDOW: usize = 16 * KIB;

const CALL: &str = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}"#;

/// The end of each stream.
const ANSWER: &str = "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n";

#[derive(Clone, Copy, Debug)]
struct Row {
    event: usize,
    frame: usize,
    reads: Reads,
    stall_timeout: Duration,
    watch_for: Duration,
    verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Http {
    One,
    Two,
}

/// The client's side of the stream.
enum Reader {
    One(TcpStream),
    /// Also holds the bytes that have been received but not read yet.
    Two(Box<(H2, H2Stream)>, Bytes),
}

#[derive(Clone, Copy, Debug)]
enum Reads {
    /// This many bytes per second, without pausing.
    Rate(usize),
    /// This many bytes between pauses of this length.
    Pauses(usize, Duration),
    /// This many bytes, and then nothing more.
    Stops(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The call has ended with its answer.
    Answered,
    /// The layer has treated the client as disconnected.
    Disconnected,
    /// The client is still reading.
    Reading,
}

fn row(event: usize, frame: usize, reads: Reads, stall_timeout: Duration, verdict: Verdict) -> Row {
    Row {
        event,
        frame,
        reads,
        stall_timeout,
        watch_for: 20 * SECOND,
        verdict,
    }
}

fn sample() -> Vec<Row> {
    use Reads::{Pauses, Rate, Stops};
    use Verdict::{Answered, Disconnected};
    let half = 500 * MS;
    vec![
        row(2_000, 1, Rate(10_000), SECOND, Answered),
        row(200 * KIB, KIB, Rate(100_000), 2 * SECOND, Answered),
        row(MIB, MIB, Rate(400_000), half, Answered),
        row(20 * MIB, 20 * MIB, Rate(10_000_000), half, Answered),
        row(MIB, MIB, Pauses(200 * KIB, 600 * MS), SECOND, Answered),
        row(20 * MIB, 20 * MIB, Stops(0), SECOND, Disconnected),
        row(20 * MIB, 64 * KIB, Stops(300 * KIB), SECOND, Disconnected),
        row(20 * MIB, 20 * MIB, Stops(300 * KIB), SECOND, Disconnected),
        row(20 * MIB, KIB, Rate(50), SECOND, Disconnected),
        row(
            20 * MIB,
            MIB,
            Pauses(200 * KIB, 5 * SECOND),
            SECOND,
            Disconnected,
        ),
    ]
}

fn full() -> Vec<Row> {
    use Reads::{Rate, Stops};
    use Verdict::{Answered, Disconnected, Reading};
    let minute = 60 * SECOND;
    let mut rows = sample();
    for frame in [1, KIB, 16 * KIB, 64 * KIB, MIB, 20 * MIB] {
        for rate in [20_000, 50_000, 100_000, 400_000] {
            let slow = row(20 * MIB, frame, Rate(rate), 10 * SECOND, Reading);
            rows.push(Row {
                watch_for: 35 * SECOND,
                ..slow
            });
        }
        rows.push(row(20 * MIB, frame, Stops(MIB), SECOND, Disconnected));
    }
    for (event, rate, verdict, seconds) in [
        (20 * MIB, 10_000, Reading, 150),
        (20_000_000, 300_000, Answered, 90),
        (20 * MIB, 5_000, Reading, 150),
    ] {
        let slow = row(event, event, Rate(rate), minute, verdict);
        rows.push(Row {
            watch_for: seconds * SECOND,
            ..slow
        });
    }
    rows
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_counts_as_disconnected_if_it_does_not_read_and_not_if_it_reads_slowly() {
    let rows = match std::env::var("MCP_SWEEP").as_deref() {
        Ok("full") => full(),
        _ => sample(),
    };
    let plays = rows.iter().flat_map(|row| {
        let https = [Http::One, Http::Two].into_iter();
        https
            .filter(move |http| row.is_possible(*http))
            .map(move |http| async move { (row, http, row.verdict_of(http).await) })
    });
    let wrong: Vec<String> = join_all(plays)
        .await
        .into_iter()
        .filter(|(row, _, verdict)| row.verdict != *verdict)
        .map(|(row, http, verdict)| format!("HTTP/{http:?} {row:?}: {verdict:?}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

// === impl Row ===

impl Row {
    /// Returns `false` for many small frames over HTTP/2.
    ///
    /// The client is h2, which closes a connection if many small DATA frames are unread (`too_many_data_frames`).
    fn is_possible(&self, http: Http) -> bool {
        http == Http::One || self.frame >= KIB || self.event < MIB
    }

    /// Plays the row, and plays it again if the client was late and the verdict is unexpected.
    ///
    /// A client can be late on a busy machine.
    async fn verdict_of(&self, http: Http) -> Verdict {
        let mut plays = 0;
        loop {
            let (verdict, late) = self.play(http).await;
            plays += 1;
            if verdict == self.verdict || late < self.stall_timeout / 4 || plays == 3 {
                return verdict;
            }
        }
    }

    /// Returns the verdict, and how late the client's most delayed read was.
    async fn play(&self, http: Http) -> (Verdict, Duration) {
        let (ended, mut ends) = mpsc::unbounded_channel();
        let layer = CancelOnDisconnectLayer::new()
            .stall_timeout(self.stall_timeout)
            .observe_fn(move |event| {
                if let Event::Ended { outcome, .. } = event {
                    let _the_test_is_over = ended.send(*outcome);
                }
            });
        let addr = serve(layer).await;
        let path = format!("/{}/{}", self.event, self.frame);
        let mut client = Reader::open(http, addr, &path).await;
        let late = Cell::new(Duration::ZERO);
        let reading = async {
            let mut read = 0;
            loop {
                let (bytes, pause) = match self.reads {
                    Reads::Rate(rate) => ((rate / 50).max(1), TICK),
                    Reads::Pauses(bytes, pause) => (bytes, pause),
                    Reads::Stops(at) if read < at => (at - read, TICK),
                    Reads::Stops(_) => return std::future::pending().await,
                };
                let started = Instant::now();
                let mut left = bytes;
                while left > 0 {
                    match client.read(left).await {
                        0 => return std::future::pending::<()>().await,
                        more => left -= more,
                    }
                }
                read += bytes;
                sleep(pause.saturating_sub(started.elapsed())).await;
                late.set(late.get().max(started.elapsed().saturating_sub(pause)));
            }
        };
        let until = Instant::now() + self.watch_for;
        let verdict = tokio::select! {
            () = reading => unreachable!("the client reads until its call has ended"),
            ended = timeout_at(until, ends.recv()) => match ended {
                Err(_) => Verdict::Reading,
                Ok(Some(Outcome::Completed)) => Verdict::Answered,
                Ok(Some(Outcome::Cancelled(CancelReason::ClientDisconnected)
                    | Outcome::Abandoned(CancelReason::ClientDisconnected))) => Verdict::Disconnected,
                Ok(other) => panic!("{self:?}: {other:?}"),
            },
        };
        (verdict, late.get())
    }
}

// === impl Reader ===

impl Reader {
    async fn open(http: Http, addr: SocketAddr, path: &str) -> Self {
        let headers = [
            ("content-type", "application/json"),
            ("accept", "application/json, text/event-stream"),
            ("mcp-protocol-version", "2026-07-28"),
        ];
        match http {
            Http::One => {
                let socket = TcpSocket::new_v4().expect("a socket");
                socket
                    .set_recv_buffer_size(WINDOW as u32)
                    .expect("a receive buffer");
                let mut stream = socket.connect(addr).await.expect("connect");
                let mut head = format!("POST {path} HTTP/1.1\r\nhost: a\r\n");
                for (name, value) in headers {
                    head += &format!("{name}: {value}\r\n");
                }
                let request = format!("{head}content-length: {}\r\n\r\n{CALL}", CALL.len());
                stream.write_all(request.as_bytes()).await.expect("write");
                Self::One(stream)
            }
            Http::Two => {
                let mut connection = H2::open_with_window(addr, WINDOW as u32).await;
                let request = Request::new("POST", path).headers(headers).body(CALL);
                let stream = connection.send(&request).await;
                Self::Two(Box::new((connection, stream)), Bytes::new())
            }
        }
    }

    /// Reads up to `max` bytes. Returns 0 at the end.
    async fn read(&mut self, max: usize) -> usize {
        match self {
            Self::One(stream) => {
                let mut bytes = vec![0; max];
                stream.read(&mut bytes).await.unwrap_or(0)
            }
            Self::Two(connected, rest) => {
                if rest.is_empty() {
                    *rest = connected.1.data().await.unwrap_or_default();
                }
                rest.split_to(max.min(rest.len())).len()
            }
        }
    }
}

/// Starts a server that writes one event and then the answer.
///
/// The path gives the length of the event and the size of its frames.
async fn serve(layer: CancelOnDisconnectLayer) -> SocketAddr {
    let answer = async |Path((event, frame)): Path<(usize, usize)>, _request: Bytes| {
        let mut text = format!("data: {}\n\n", "x".repeat(event)).into_bytes();
        text.extend_from_slice(ANSWER.as_bytes());
        let frames = stream::unfold(Bytes::from(text), move |mut left| async move {
            if left.is_empty() {
                return None;
            }
            let next = left.split_to(frame.min(left.len()));
            Some((Ok::<_, Infallible>(next), left))
        });
        Response::builder()
            .header("content-type", "text/event-stream")
            .body(Body::from_stream(frames))
            .expect("a response")
    };
    let router = Router::new()
        .route("/{event}/{frame}", post(answer))
        .layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("bound");
    let app = router.into_make_service_with_connect_info::<Peer>();
    let server = axum::serve(WatchedListener::new(listener), app);
    #[allow(clippy::disallowed_methods, reason = "the test needs its own server")]
    let _serving = tokio::spawn(async move { server.await });
    addr
}
