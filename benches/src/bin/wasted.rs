//! The work that is done for nobody, and the work that is thrown away although somebody wants it.
//!
//! `wasted [--quick]`. Once on a paused clock, in process, with calls of 10 minutes and the grace that is the default; once in
//! real time over sockets, with calls of 2 s and a grace of 100 ms.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use mcp_cancel_on_disconnect_benches::{
    Failure, is_quick,
    report::{Axis, Bound, Kind, Plot, Section, Target},
    setup::{Mode, Setup},
    sockets::{
        client::{Client, Stream, Way},
        ledger::Ledger,
        machine,
        serve::serve,
        stats::Dice,
        tools::{Tools, done},
    },
};
use serde_json::json;
use tokio::{
    runtime::{Builder, Runtime},
    task::JoinSet,
    time::sleep,
};

const SESSIONS: usize = 20;

/// Every session is heard of so often that rmcp does not take it for idle, which it does after 5 minutes.
const PING: Duration = Duration::from_secs(60);

const SEED: u64 = 20_251_125;

/// When the paused clock goes by, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clock {
    Paused,
    Real,
}

/// What a client can come back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Case {
    /// A session: some do.
    Grace,
    /// A session, but nobody waits for it: none does.
    Immediate,
    /// Nothing: none does.
    Stateless,
}

/// What is compared.
#[derive(Debug, Clone, Copy)]
struct Run {
    clock: Clock,
    case: Case,
    setup: Setup,
    grace: Grace,
    calls: usize,
    /// How long a call takes.
    lasts: Duration,
    /// In which time all calls start.
    spread: Duration,
    /// After at least and at most how long a client comes back that does.
    back: (Duration, Duration),
}

/// What a client does, the same in all set-ups.
#[derive(Debug, Clone, Copy)]
struct Plan {
    starts: Duration,
    /// After how much of its call it hangs up.
    leaves: Option<Duration>,
    /// How long after that it comes back.
    returns: Option<Duration>,
}

/// What became of it.
#[derive(Debug, Clone, Copy)]
struct End {
    call: usize,
    /// When it was gone for good.
    gone: Option<Duration>,
    came_back: bool,
    answered: bool,
}

#[derive(Debug, Clone, Copy)]
struct Found {
    run: Run,
    /// Clients that left for good.
    left: usize,
    /// Handler-seconds after they had.
    wasted: f64,
    /// Clients that came back, and calls of them that were destroyed.
    back: usize,
    destroyed: usize,
    /// Clients that were there in the end, and had no answer.
    unanswered: usize,
}

fn main() -> Result<(), Failure> {
    let quick = is_quick();
    machine::allow_files(6_000)?;
    let load = machine::load();
    let mut found = Vec::new();
    for run in runs(quick) {
        eprintln!("{}", run.name());
        found.push(run.measure()?);
    }
    section(&found, &load).publish()?;
    let ours = |found: &&Found| matches!(found.run.setup, Setup::Layer | Setup::Wrapped);
    match found.iter().filter(ours).all(Found::is_right) {
        true => Ok(()),
        false => Err("a call was destroyed although its client came back".into()),
    }
}

fn runs(quick: bool) -> Vec<Run> {
    let second = Duration::from_secs(1);
    let mut runs = Vec::new();
    for clock in [Clock::Paused, Clock::Real] {
        for case in Case::ALL {
            let grace = match (case, clock) {
                (Case::Immediate, _) => Grace::Immediate,
                (Case::Grace, Clock::Real) => Grace::After(second / 10),
                (Case::Grace, Clock::Paused) | (Case::Stateless, _) => Grace::Auto,
            };
            runs.extend(Setup::ALL.map(|setup| match clock {
                Clock::Paused => Run {
                    clock,
                    case,
                    setup,
                    grace,
                    calls: if quick { 200 } else { 2_000 },
                    lasts: 600 * second,
                    spread: 60 * second,
                    back: (second / 2, 15 * second),
                },
                Clock::Real => Run {
                    clock,
                    case,
                    setup,
                    grace,
                    calls: if quick { 100 } else { 2_000 },
                    lasts: 2 * second,
                    spread: if quick { second } else { 10 * second },
                    back: (second / 200, second / 40),
                },
            }));
        }
    }
    runs
}

// === impl Case ===

impl Case {
    const ALL: [Self; 3] = [Self::Grace, Self::Immediate, Self::Stateless];

    fn name(self) -> &'static str {
        match self {
            Self::Grace => "session",
            Self::Immediate => "session, nobody waits",
            Self::Stateless => "stateless",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::Grace | Self::Immediate => Mode::Session,
            Self::Stateless => Mode::Stateless,
        }
    }
}

// === impl Clock ===

impl Clock {
    fn name(self) -> &'static str {
        match self {
            Self::Paused => "10 min",
            Self::Real => "2 s, real time",
        }
    }
}

// === impl Run ===

impl Run {
    fn measure(self) -> Result<Found, Failure> {
        let own = match self.clock {
            Clock::Paused => Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build()?,
            Clock::Real => Builder::new_current_thread().enable_all().build()?,
        };
        let found = match self.clock {
            Clock::Paused => own.block_on(self.play(&own))?,
            Clock::Real => {
                let server = Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()?;
                let found = own.block_on(self.play(&server))?;
                server.shutdown_background();
                found
            }
        };
        Ok(found)
    }

    async fn play(self, server: &Runtime) -> Result<Found, Failure> {
        let ledger = Ledger::new(self.calls, 1);
        let layer = CancelOnDisconnectLayer::new().grace(self.grace);
        let (tools, mode) = (Tools::new(&ledger), self.case.mode());
        let way = match self.clock {
            Clock::Paused => Way::Direct(tools.served_on_a_paused_clock(self.setup, mode, layer)),
            Clock::Real => {
                let stack = tools.served(self.setup, mode, layer);
                let _inside = server.enter();
                let (addresses, serving) = serve(stack, 1)?;
                server.spawn(async move { drop(serving.join_all().await) });
                Way::Socket(*addresses.first().ok_or("no address")?)
            }
        };
        let mut clients = Vec::new();
        let mut pinging = JoinSet::new();
        for _ in 0..SESSIONS {
            let client = Client::open(way.clone(), self.case.mode()).await?;
            clients.push(client.clone());
            if self.case.mode() == Mode::Session {
                pinging.spawn(async move {
                    while client.ping().await.is_ok() {
                        sleep(PING).await;
                    }
                });
            }
        }
        let mut playing = JoinSet::new();
        for (call, plan) in self.plans().into_iter().enumerate() {
            let client = clients[call % SESSIONS].clone();
            playing.spawn(plan.play(client, call, self.lasts, ledger.clone()));
        }
        let mut ends = Vec::new();
        while let Some(end) = playing.join_next().await {
            ends.push(end??);
        }
        // Also those whose clients have long gone.
        sleep(self.lasts).await;
        let over = ledger
            .reaches(self.calls, 0..self.calls, |life| &life.ended, self.lasts)
            .await;
        if over < self.calls {
            return Err(format!("{over} of {} calls have ended", self.calls).into());
        }
        Ok(Found::new(self, &ends, &ledger))
    }

    fn plans(self) -> Vec<Plan> {
        let mut dice = Dice::new(SEED);
        let plan = |_| {
            let starts = self.spread.mul_f64(dice.share());
            let leaves = dice.share() < 0.3;
            let after = self.lasts.mul_f64(dice.share());
            let returns = dice.share() < 1.0 / 3.0;
            let (least, most) = self.back;
            let away = least + (most - least).mul_f64(dice.share());
            let returns = returns && self.case == Case::Grace;
            Plan {
                starts,
                leaves: leaves.then_some(after),
                returns: (leaves && returns).then_some(away),
            }
        };
        (0..self.calls).map(plan).collect()
    }

    fn name(&self) -> String {
        let (clock, case) = (self.clock.name(), self.case.name());
        format!("{}, {case}, calls of {clock}", self.setup.name())
    }
}

// === impl Plan ===

impl Plan {
    async fn play(
        self,
        client: Client,
        call: usize,
        lasts: Duration,
        ledger: Ledger,
    ) -> Result<End, Failure> {
        sleep(self.starts).await;
        let arguments = json!({ "call": call, "lasts": lasts.as_millis() as u64 });
        let mut stream = client.call(call, "work", arguments).await?;
        let mut end = End {
            call,
            gone: None,
            came_back: false,
            answered: false,
        };
        let Some(after) = self.leaves else {
            end.answered = is_answered(&mut stream, call, lasts).await;
            return Ok(end);
        };
        // As hyper does, and as a client must that wants to come back.
        let event = match client.has_session() {
            true => Some(stream.event_id().await?),
            false => None,
        };
        sleep(after).await;
        stream.drain();
        let gone = ledger.now();
        stream.close();
        match (self.returns, event) {
            (Some(away), Some(event)) => {
                sleep(away).await;
                // One that had its answer before it left would not.
                if ledger.life(call).ended.get().is_some_and(|at| at < gone) {
                    return Ok(end);
                }
                // A client that a busy machine held up may be too late.
                end.came_back = ledger.now() - gone <= 2 * away;
                let mut stream = client.resume(&event).await?;
                end.answered = is_answered(&mut stream, call, lasts).await;
            }
            _ => end.gone = Some(gone),
        }
        Ok(end)
    }
}

async fn is_answered(stream: &mut Stream, call: usize, lasts: Duration) -> bool {
    let answer = format!("\"{}\"", done(call));
    // A client gives up at some time.
    let limit = lasts * 2;
    matches!(
        tokio::time::timeout(limit, stream.wait_for(&answer)).await,
        Ok(Ok(()))
    )
}

// === impl Found ===

impl Found {
    fn new(run: Run, ends: &[End], ledger: &Ledger) -> Self {
        let after = |end: &End| {
            let over = ledger.life(end.call).ended.get()?;
            Some(over.saturating_sub(end.gone?).as_secs_f64())
        };
        let back = || ends.iter().filter(|end| end.came_back);
        let is_cancelled = |end: &&End| ledger.life(end.call).token.get().is_some();
        let there = ends.iter().filter(|end| end.gone.is_none());
        Self {
            run,
            left: ends.iter().filter(|end| end.gone.is_some()).count(),
            wasted: ends.iter().filter_map(after).sum(),
            back: back().count(),
            destroyed: back().filter(is_cancelled).count(),
            unanswered: there.filter(|end| !end.answered).count(),
        }
    }

    fn is_right(&self) -> bool {
        self.destroyed == 0
    }

    /// Seconds for nobody, a client that left for good.
    fn each(&self) -> f64 {
        self.wasted / self.left.max(1) as f64
    }

    fn row(&self) -> Vec<String> {
        vec![
            self.run.clock.name().to_owned(),
            self.run.case.name().to_owned(),
            self.run.setup.name().to_owned(),
            self.left.to_string(),
            format!("{:.3}", self.wasted),
            format!("{:.4}", self.each()),
            format!("{} of {}", self.destroyed, self.back),
            self.unanswered.to_string(),
        ]
    }
}

fn section(found: &[Found], load: &str) -> Section {
    let columns = [
        "calls of",
        "mode",
        "set-up",
        "clients that left for good",
        "handler-seconds for nobody",
        "of each of them (s)",
        "calls destroyed whose clients came back",
        "clients there in the end without an answer",
    ];
    let calls = found.first().map_or(0, |found| found.run.calls);
    Section {
        name: "wasted".to_owned(),
        title: "Work for nobody, and work destroyed".to_owned(),
        command: "benches/run wasted".to_owned(),
        text: format!(
            "{calls} calls; 30 % of the clients hang up at a random moment, a third of those come back. Handler-seconds for nobody are \
             those between the moment at which a client left for good and the moment at which its handler stopped. Calls of 10 minutes \
             run on a paused clock in process, with the grace that is the default (20 s) and clients that come back after 0.5 to 15 s; \
             calls of 2 s run in real time over sockets, with a grace of 100 ms and clients that come back after 5 to 25 ms. Where \
             nobody waits (`Grace::Immediate`, or no sessions) nobody comes back. Bare rmcp cancels stateless calls by itself, so \
             there is nothing to win there: the factors compare with bare rmcp in session mode, its default, and count no less than the \
             1 ms to which the paused clock is exact. A call is destroyed if its token fired although its client came back within the \
             grace. A client that comes back after its call has ended finds an answer only if somebody kept it. Load before the run: {load}."
        ),
        columns: columns.map(str::to_owned).to_vec(),
        rows: found.iter().map(Found::row).collect(),
        targets: found.iter().flat_map(|own| targets(own, found)).collect(),
        plots: vec![bars(found, Clock::Paused), bars(found, Clock::Real)],
    }
}

fn targets(own: &Found, found: &[Found]) -> Vec<Target> {
    let Run {
        clock, case, setup, ..
    } = own.run;
    let session = match case {
        Case::Grace => Case::Grace,
        Case::Immediate | Case::Stateless => Case::Immediate,
    };
    let is_reference = |other: &&Found| {
        let run = other.run;
        (run.clock, run.case, run.setup) == (clock, session, Setup::Bare)
    };
    let (Setup::Layer | Setup::Wrapped, Some(bare)) = (setup, found.iter().find(is_reference))
    else {
        return Vec::new();
    };
    let least = match (case, clock) {
        (Case::Grace, Clock::Paused) => Some(12.0),
        // 100 ms against a mean of 1 s.
        (Case::Grace, Clock::Real) => None,
        (Case::Immediate | Case::Stateless, _) => Some(500.0),
    };
    let mut targets: Vec<_> = least
        .map(|least| Target {
            what: format!("{}: times less for nobody than bare", own.run.name()),
            bound: Bound::AtLeast(least),
            measured: bare.each() / own.each().max(1e-3),
        })
        .into_iter()
        .collect();
    if case == Case::Grace {
        targets.push(Target {
            what: format!("{}: calls destroyed", own.run.name()),
            bound: Bound::AtMost(0.0),
            measured: own.destroyed as f64,
        });
    }
    targets
}

fn bars(found: &[Found], clock: Clock) -> Plot {
    let of = |setup: Setup| {
        let seconds = Case::ALL.iter().filter_map(move |case| {
            let is_it = |found: &&Found| {
                let run = found.run;
                (run.clock, run.case, run.setup) == (clock, *case, setup)
            };
            // A logarithm has no zero.
            Some(found.iter().find(is_it)?.each().max(1e-4))
        });
        (0..).map(f64::from).zip(seconds).collect()
    };
    Plot {
        name: match clock {
            Clock::Paused => "wasted",
            Clock::Real => "wasted-real",
        }
        .to_owned(),
        title: format!("Work for nobody, calls of {}", clock.name()),
        x: Axis::linear("mode"),
        y: Axis::logarithmic("seconds for each client that left for good"),
        kind: Kind::Bars {
            categories: Case::ALL.map(|case| case.name().to_owned()).to_vec(),
        },
        series: Setup::series(of),
    }
}
