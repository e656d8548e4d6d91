//! A case: a request to a server, and the set-up that watches the server's calls.

use std::{
    fmt,
    hint::black_box,
    iter,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Result, ensure};
use axum::{Router, routing::get};
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use mcp_cancel_on_disconnect::{AbortOnCancel, CancelOnDisconnectLayer};
use serde::Deserialize;
use serde_json::{Value, json};
use strum::{Display, IntoEnumIterator};
use tower::ServiceExt;

use crate::{
    client::{Client, Transport, call},
    common_layers::CommonLayer,
    find_named,
    setup::{Mode, Server, Setup, bare, boxed, clustered, routed},
    stats::Dice,
    tools::Tools,
};

/// Rounds of a four-instruction loop, which together cost about 3 % of a bare 100 B call.
const WASTED_ROUNDS: u32 = 1_100;

/// Locks taken for nothing, about 5 % of such a call's locked instructions. Each is accompanied by four reads that may
/// miss the cache.
const WASTED_LOCKS: usize = 25;

/// One thing to measure. Displays as its own command line: `wrapped session arguments 100`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Case {
    pub candidate: Candidate,
    pub what: Workload,
}

/// The set-up or layer around the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display)]
#[strum(serialize_all = "lowercase")]
pub enum Candidate {
    #[strum(to_string = "{0}")]
    Setup(Setup),
    /// A common layer from outside this crate.
    #[strum(to_string = "{0}")]
    CommonLayer(CommonLayer),
    /// Like [`Setup::Wrapped`], with the handler in `AbortOnCancel`.
    Abortable,
    /// Like [`Setup::Wrapped`], with axum's body type.
    Routed,
    /// Like [`Setup::Wrapped`], but as a cluster's only member. Each call reaches its session's owner directly.
    Clustered,
    /// Like [`Setup::Wrapped`], but about 3 % slower than it needs to be. The gate must reject it.
    Slowed,
    /// Like [`Setup::Wrapped`], but wasteful in everything else the gate counts. The gate must reject it too.
    Sprawling,
}

/// The kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display)]
pub enum Workload {
    /// One tool call.
    #[strum(to_string = "{0} {1}")]
    Call(Mode, Load),
    /// A GET on a route without MCP.
    #[strum(to_string = "plain")]
    Plain,
}

/// A call's payload, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display)]
pub enum Load {
    #[strum(to_string = "arguments {0}")]
    Arguments(usize),
    #[strum(to_string = "result {0}")]
    Result(usize),
}

/// A case that has been started, so its request can be repeated.
pub struct Running {
    client: Client,
    /// A tool and its arguments.
    call: Option<(&'static str, Value)>,
    /// What the answer must start with, and its minimum length.
    expected: (String, usize),
    requests: usize,
}

// === impl Case ===

impl Case {
    pub fn new(candidate: Candidate, what: Workload) -> Self {
        Self { candidate, what }
    }

    /// Returns every request, both for bare rmcp and for the set-ups compared with it.
    pub fn compared() -> impl Iterator<Item = Self> {
        Workload::all().flat_map(|what| {
            let candidates = iter::once(Candidate::BARE).chain(Candidate::COMPARED);
            candidates.map(move |candidate| Self::new(candidate, what))
        })
    }

    /// Returns the case that displays as `words`.
    pub fn named(words: &str) -> Result<Self> {
        find_named(Self::all(), words)
    }

    fn all() -> impl Iterator<Item = Self> {
        let common = CommonLayer::iter().map(Candidate::CommonLayer);
        let others = [
            Candidate::Routed,
            Candidate::Clustered,
            Candidate::Slowed,
            Candidate::Sprawling,
        ];
        let others = others.into_iter().chain(common);
        let calls = || Workload::all().filter(|what| *what != Workload::Plain);
        let others =
            others.flat_map(move |candidate| calls().map(move |what| Self::new(candidate, what)));
        Self::compared().chain(others)
    }

    /// Returns the same request to bare rmcp.
    pub fn bare(self) -> Self {
        Self::new(Candidate::BARE, self.what)
    }

    /// Returns the number of requests that are counted.
    pub fn calls(self) -> f64 {
        f64::from(self.what.repetitions().1)
    }

    /// Starts the server and a client, with a session if the case has one.
    pub async fn run(self) -> Result<Running> {
        let transport = Transport::Direct(self.server().await?);
        let client = match self.what {
            Workload::Call(mode, _) => Client::open(transport, mode).await?,
            Workload::Plain => Client::new(transport),
        };
        let (call, start, length) = match self.what {
            Workload::Plain => (None, "hello".to_owned(), 0),
            Workload::Call(_, Load::Arguments(bytes)) => {
                let arguments = json!({ "text": "x".repeat(bytes) });
                let start = format!("\"text\":\"{bytes}\"");
                (Some(("measure", arguments)), start, 0)
            }
            Workload::Call(_, Load::Result(bytes)) => {
                let arguments = json!({ "length": bytes });
                let start = "\"text\":\"xxx".to_owned();
                (Some(("produce", arguments)), start, bytes)
            }
        };
        Ok(Running {
            client,
            call,
            expected: (start, length),
            requests: 0,
        })
    }

    async fn server(self) -> Result<Server<Full<Bytes>>> {
        let layer = CancelOnDisconnectLayer::new();
        let tools = Tools::default();
        let setup = match self.candidate {
            Candidate::Setup(setup) => setup,
            _ => Setup::Wrapped,
        };
        Ok(match (self.what, self.candidate) {
            (Workload::Plain, _) => {
                let route = Router::new().route("/", get(async || "hello"));
                setup.around(route, layer)
            }
            (Workload::Call(mode, _), Candidate::Setup(_)) => {
                setup.serve(mode.config(), tools, layer)
            }
            (Workload::Call(mode, _), Candidate::CommonLayer(common)) => {
                common.around(bare(mode.config(), tools))
            }
            (Workload::Call(mode, _), Candidate::Abortable) => {
                setup.serve(mode.config(), AbortOnCancel::new(tools), layer)
            }
            (Workload::Call(mode, _), Candidate::Routed) => {
                boxed(routed(setup.serve(mode.config(), tools, layer)))
            }
            (Workload::Call(mode, _), Candidate::Clustered) => {
                clustered(mode.config(), tools, layer).await?
            }
            (Workload::Call(mode, _), Candidate::Slowed) => boxed(
                setup
                    .serve(mode.config(), tools, layer)
                    .map_request(waste_instructions),
            ),
            (Workload::Call(mode, _), Candidate::Sprawling) => boxed(
                setup
                    .serve(mode.config(), tools, layer)
                    .map_request(waste_everything_else),
            ),
        })
    }
}

impl TryFrom<String> for Case {
    type Error = anyhow::Error;

    fn try_from(words: String) -> Result<Self> {
        Self::named(&words)
    }
}

/// Wastes instructions.
fn waste_instructions<A>(request: Request<A>) -> Request<A> {
    for round in 0..WASTED_ROUNDS {
        black_box(round);
    }
    request
}

/// Wastes everything else: locks, unpredictable reads and branches, and code that nothing else uses.
fn waste_everything_else<A>(request: Request<A>) -> Request<A> {
    static WASTE: Mutex<Dice> = Mutex::new(Dice(1));
    static CELLS: [u8; 1 << 18] = [1; 1 << 18];
    let mut odd = 0;
    for _ in 0..WASTED_LOCKS {
        let mut dice = WASTE.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..4 {
            let place = (dice.share() * CELLS.len() as f64) as usize;
            odd += usize::from(black_box(&CELLS)[place]);
            if place.is_multiple_of(2) {
                odd = black_box(odd);
            }
        }
    }
    for figure in [1.5e300, 0.1, odd as f64] {
        let text = format!(
            "{figure:e} {figure:?} {:?}",
            Duration::from_secs(odd as u64)
        );
        let _ = black_box(text.parse::<f64>());
        let _ = black_box("-1.25e-7".parse::<f64>());
    }
    let address = "[fe80::1%3]:80, 10.0.0.1:7"
        .split(", ")
        .map(str::parse::<SocketAddr>);
    black_box(Vec::from_iter(address));
    request
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.candidate, self.what)
    }
}

// === impl Candidate ===

impl Candidate {
    pub const BARE: Self = Self::Setup(Setup::Bare);

    /// The set-ups that the tables compare with [`Self::BARE`].
    pub const COMPARED: [Self; 4] = [
        Self::Setup(Setup::Guard),
        Self::Setup(Setup::Layer),
        Self::Setup(Setup::Wrapped),
        Self::Abortable,
    ];
}

// === impl Workload ===

impl Workload {
    pub fn all() -> impl Iterator<Item = Self> {
        use Load::{Arguments, Result};
        let loads = [
            Arguments(100),
            Arguments(10_000),
            Arguments(1_000_000),
            Result(1_000_000),
        ];
        let calls = Mode::iter().flat_map(move |mode| loads.map(|load| Self::Call(mode, load)));
        calls.chain([Self::Plain])
    }

    /// Returns a description of the request.
    pub fn request(self) -> &'static str {
        match self {
            Self::Call(Mode::Session, _) => "call in a session",
            Self::Call(Mode::Stateless, _) => "call without a session",
            Self::Plain => "GET without MCP",
        }
    }

    /// Returns a description of the payload. Empty for [`Workload::Plain`].
    pub fn load(self) -> String {
        let (of, bytes) = match self {
            Self::Call(_, Load::Arguments(bytes)) => ("arguments", bytes),
            Self::Call(_, Load::Result(bytes)) => ("result", bytes),
            Self::Plain => return String::new(),
        };
        match bytes {
            1_000_000.. => format!("{} MB {of}", bytes / 1_000_000),
            1_000.. => format!("{} kB {of}", bytes / 1_000),
            _ => format!("{bytes} B {of}"),
        }
    }

    /// Returns the number of warm-up requests and the number of counted requests.
    ///
    /// By the end of the warm-up, the queue of retained calls has reached its full size.
    pub fn repetitions(self) -> (u32, u32) {
        match self {
            Self::Call(_, Load::Arguments(1_000_000..) | Load::Result(1_000_000..)) => (20, 20),
            Self::Call(_, Load::Arguments(10_000..)) => (1_000, 500),
            Self::Call(..) | Self::Plain => (6_000, 1_000),
        }
    }
}

// === impl Running ===

impl Running {
    /// Repeats the request `times` times.
    pub async fn run(&mut self, times: u32) -> Result<()> {
        for _ in 0..times {
            self.ask().await?;
        }
        Ok(())
    }

    /// Sends the request once and checks the answer.
    pub async fn ask(&mut self) -> Result<()> {
        let request = match &self.call {
            Some((tool, arguments)) => {
                let message = call(self.requests, tool, arguments.clone());
                self.client.post(&message)?
            }
            None => Request::get("http://localhost/")
                .header("host", "localhost")
                .header("user-agent", "bench")
                .body(Full::default())?,
        };
        self.requests += 1;
        let answer = self.client.ask(request).await?;
        // A large result is at the start of its answer, so there is no need to search all of it.
        let start = String::from_utf8_lossy(&answer[..answer.len().min(1_000)]);
        let (expected, least) = &self.expected;
        let is_right = start.contains(expected) && answer.len() >= *least;
        ensure!(is_right, "wrong answer of {} bytes: {start}", answer.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_parsed_from_its_display_form_only() {
        for case in Case::all() {
            assert_eq!(Case::named(&case.to_string()).unwrap(), case);
        }
        assert!(Case::named("bare session arguments").is_err());
    }

    #[tokio::test]
    async fn every_case_gets_correct_answers() {
        for case in Case::all() {
            let answer = case.run().await.unwrap().ask().await;
            answer.unwrap_or_else(|failure| panic!("{case}: {failure}"));
        }
    }
}
