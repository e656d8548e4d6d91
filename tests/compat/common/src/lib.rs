//! The support table's cases, played against a server by clients that disconnect.
//!
//! A server runs in this process, in every [`Tier`] and [`Mode`] that it supports, with a tool that calls [`work`].
//! Each case prints its result to stdout as one line of JSON. All of a server's cases run concurrently with the default
//! grace period, which takes about half a minute.

use std::{convert::Infallible, future::pending, mem, net::SocketAddr, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, MIN_GRACE};
use serde_json::{Value, json};
use test_support::{Connection, End, Mcp, Request, serve, witness::Held};
use tokio::time::{Instant, sleep, timeout};

pub use test_support::{PATH, Witness};

/// The layers around a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Nothing.
    Bare,
    /// The layer.
    Layer,
    /// The layer and rmcp 3's session manager.
    Manager,
    /// Like `Manager`, and the layer probes. For a server that does not detect closed connections.
    Probed,
}

/// What the clients request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Calls in a session.
    Session,
    /// Calls without a session, from a revision that has sessions.
    Stateless,
    /// Calls from revision 2026-07-28, which has no sessions.
    Modern,
    /// Requests that are not MCP.
    Plain,
}

/// A server's set-up.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The layers around it.
    pub tier: Tier,
    /// What its clients request.
    pub mode: Mode,
    /// The witness that its tool reports to.
    pub witness: Witness,
}

/// What became of a call whose client disconnected.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// The server's own token fired, this long after the disconnect.
    Cancelled(Duration),
    /// Only its `CallToken` fired.
    CallTokenFired(Duration),
    /// Its handler's future was dropped.
    Dropped(Duration),
    /// The call was still running when `OBSERVATION_TIME` had passed.
    RunsOn,
}

/// A client that disconnects during its call.
#[derive(Clone, Debug)]
struct Case {
    tier: Tier,
    mode: Mode,
    story: Story,
    server: SocketAddr,
    witness: Witness,
}

/// Whether the client resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Story {
    /// The client never resumes.
    Disconnects,
    /// The client resumes while the call is still running.
    Resumes,
    /// The client resumes after the call has ended.
    ResumesLate,
}

/// How often the layer probes.
pub const PROBE: Duration = Duration::from_secs(1);

/// How long it takes a probed server to detect a disconnect. It does when its second write fails.
const DETECTION_TIME: Duration = Duration::from_secs(2);

/// Tolerance for "at once", and for the end of a grace period.
const SLACK: Duration = Duration::from_millis(1_500);

/// A client's timeout.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How long a call is observed after its client has disconnected.
const OBSERVATION_TIME: Duration = Duration::from_secs(27);

/// What a tool does. Ends when its label is released, when the server's own token fires, or when its future is dropped.
/// Returns `true` if the label was released. If `token` fires, the witness records that under a separate label.
pub async fn work(
    witness: &Witness,
    label: &str,
    cancelled: impl Future<Output = ()>,
    token: Option<CallToken>,
) -> bool {
    let running = witness.begin(label);
    let record_call_token = async {
        match token {
            Some(token) => token.cancelled().await,
            None => pending().await,
        }
        witness.begin(&call_token_label(label)).cancel();
        pending::<Infallible>().await
    };
    let held = tokio::select! {
        held = running.held(cancelled) => held,
        never = record_call_token => match never {},
    };
    match held {
        Held::Released => running.complete(),
        Held::Cancelled => running.cancel(),
    }
    held == Held::Released
}

/// Returns the label from a call's arguments.
pub fn label(arguments: &Value) -> &str {
    arguments["label"].as_str().expect("every call has a label")
}

/// Plays all of a server's cases, bare and in these tiers, and prints the results. `name` is the server's name in the table.
pub async fn run_cases(
    name: &str,
    tiers: &[Tier],
    modes: &[Mode],
    serve: impl AsyncFn(Setup) -> SocketAddr,
) {
    let mut played = Vec::new();
    for &tier in [Tier::Bare].iter().chain(tiers) {
        for &mode in modes {
            let witness = Witness::new();
            let setup = Setup {
                tier,
                mode,
                witness: witness.clone(),
            };
            let server = serve(setup).await;
            for &story in Story::of(tier, mode) {
                let case = Case {
                    tier,
                    mode,
                    story,
                    server,
                    witness: witness.clone(),
                };
                played.push((case.clone(), tokio::spawn(case.play())));
            }
        }
    }
    for (case, what) in played {
        let what = what.await.expect("the case was played");
        let line = json!({
            "server": name,
            "tier": format!("{:?}", case.tier),
            "mode": format!("{:?}", case.mode),
            "story": format!("{:?}", case.story),
            "what": what,
        });
        println!("{line}");
    }
}

// === impl Setup ===

impl Setup {
    /// Returns the layer, if this tier has one.
    pub fn layer(&self) -> Option<CancelOnDisconnectLayer> {
        match self.tier {
            Tier::Bare => None,
            Tier::Layer | Tier::Manager => Some(CancelOnDisconnectLayer::new()),
            Tier::Probed => Some(CancelOnDisconnectLayer::new().keep_alive(PROBE)),
        }
    }

    /// Serves an axum router until the process exits, with the layer if this tier has one.
    pub async fn serve(&self, router: Router) -> SocketAddr {
        let served = serve(match self.layer() {
            Some(layer) => router.layer(layer),
            None => router,
        })
        .await;
        let address = served.addr;
        mem::forget(served);
        address
    }
}

// === impl Story ===

impl Story {
    /// The stories to play. A client without a session cannot resume, and resuming from a bare server is not tested.
    fn of(tier: Tier, mode: Mode) -> &'static [Self] {
        match (tier, mode) {
            (Tier::Layer | Tier::Manager | Tier::Probed, Mode::Session) => {
                &[Self::Disconnects, Self::Resumes, Self::ResumesLate]
            }
            _ => &[Self::Disconnects],
        }
    }
}

// === impl Case ===

impl Case {
    /// Returns the result in words.
    async fn play(self) -> String {
        let label = format!("{:?}", self.story);
        let mcp = match self.mode {
            Mode::Session => Mcp::session(self.server, PATH).await,
            Mode::Stateless | Mode::Plain => Mcp::stateless(self.server, PATH),
            Mode::Modern => Mcp::sessionless(self.server, PATH),
        };
        let mut call = match self.mode {
            Mode::Plain => mcp.send(&Request::new("GET", PATH)).await,
            _ => mcp.call(1, "hold", json!({ "label": label })).await,
        };
        if timeout(TIMEOUT, self.witness.started(&label))
            .await
            .is_err()
        {
            return "not served".to_owned();
        }
        let event = timeout(Duration::from_secs(1), first_event_id(&mut call));
        let event = event.await.ok().flatten();
        let disconnected = Instant::now();
        call.fin();
        match (self.story, event) {
            (Story::Disconnects, _) => self
                .outcome(&label, disconnected)
                .await
                .describe(self.detection_time()),
            (_, None) => "no event ids".to_owned(),
            (story, Some(event)) => self.resume(&mcp, &label, &event, story).await,
        }
    }

    /// Resumes the call after the server has detected the disconnect. Returns what the client gets, in words.
    async fn resume(&self, mcp: &Mcp, label: &str, event: &str, story: Story) -> String {
        let absence = self.detection_time() + Duration::from_millis(500);
        sleep(absence).await;
        if story == Story::ResumesLate {
            self.witness.release(label);
            self.witness.ended(label).await;
            sleep(absence).await;
        }
        let mut resumed = mcp.resume(event).await;
        let Ok(head) = timeout(TIMEOUT, resumed.head()).await else {
            return "gets nothing".to_owned();
        };
        if head.status != 200 {
            return "is refused".to_owned();
        }
        self.witness.release(label);
        let answer = timeout(TIMEOUT, resumed.answer()).await.ok().flatten();
        match answer {
            Some(answer) if answer.get("result").is_some() => "gets its answer".to_owned(),
            Some(_) => "gets an error".to_owned(),
            None => "gets nothing".to_owned(),
        }
    }

    /// Returns what becomes of a call in the `OBSERVATION_TIME` after its client disconnects.
    async fn outcome(&self, label: &str, disconnected: Instant) -> Outcome {
        loop {
            let left = OBSERVATION_TIME
                .saturating_sub(disconnected.elapsed())
                .min(TIMEOUT);
            match timeout(left, self.witness.ended(label)).await {
                Ok(End::Cancelled { at }) => return Outcome::Cancelled(at - disconnected),
                Ok(End::Dropped { at }) => return Outcome::Dropped(at - disconnected),
                Ok(End::Completed { .. }) => unreachable!("it was not released"),
                Err(_) if left.is_zero() => break,
                Err(_) => {}
            }
        }
        let call_token_end = self
            .witness
            .find(&call_token_label(label))
            .and_then(|it| it.end);
        call_token_end.map_or(Outcome::RunsOn, |it| {
            Outcome::CallTokenFired(it.at() - disconnected)
        })
    }

    /// How long it takes the server to detect a disconnect.
    fn detection_time(&self) -> Duration {
        match self.tier {
            Tier::Probed => DETECTION_TIME,
            _ => Duration::ZERO,
        }
    }
}

// === impl Outcome ===

impl Outcome {
    fn describe(self, detection_time: Duration) -> String {
        let when = |after: Duration| {
            let after = after.saturating_sub(detection_time);
            if after < SLACK {
                "at once".to_owned()
            } else if after + SLACK > MIN_GRACE && after < MIN_GRACE + SLACK {
                "after its grace".to_owned()
            } else {
                format!("after {after:.1?}")
            }
        };
        match self {
            Self::Cancelled(after) => format!("cancelled {}", when(after)),
            Self::CallTokenFired(after) => format!("only its `CallToken` fires, {}", when(after)),
            Self::Dropped(after) => format!("dropped {}", when(after)),
            Self::RunsOn => "runs on".to_owned(),
        }
    }
}

/// Reads up to the first event id. Returns `None` if the answer is not a stream with ids.
async fn first_event_id(call: &mut Connection) -> Option<String> {
    if !call.head().await.is_event_stream() {
        return None;
    }
    loop {
        if let Some(id) = call.event().await?.id {
            return Some(id);
        }
    }
}

/// The label under which a call's `CallToken` is recorded.
fn call_token_label(label: &str) -> String {
    format!("{label}, its CallToken")
}
