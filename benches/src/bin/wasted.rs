//! Work that continues without a client, and work that is destroyed despite a resume.
//!
//! `wasted [--quick]`. Runs twice: once in process on a paused clock, with 10-minute calls and the default grace period, and once
//! over sockets in real time, with calls of 2 s and a grace period of 100 ms.

use std::fmt;

use benches::prelude::*;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

const SESSIONS: usize = 20;

/// How often each session is pinged. rmcp closes a session that has been idle for 5 minutes.
const PING_INTERVAL: Duration = Duration::from_secs(60);

const SEED: u64 = 20_251_125;

/// The clock, which displays as the duration of the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, Display)]
enum Clock {
    #[strum(to_string = "10 min")]
    Paused,
    #[strum(to_string = "2 s, real time")]
    Real,
}

/// What a client can resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, Display)]
enum Case {
    /// Calls have a grace period, and some clients resume.
    #[strum(to_string = "session")]
    Grace,
    /// Calls have no grace period, and no client resumes.
    #[strum(to_string = "session, no grace")]
    Immediate,
    /// There are no sessions, and no client resumes.
    #[strum(to_string = "stateless")]
    Stateless,
}

/// One combination to measure.
#[derive(Debug, Clone, Copy)]
struct Run {
    clock: Clock,
    case: Case,
    setup: Setup,
    grace: Grace,
    calls: usize,
    /// How long a call takes.
    duration: Duration,
    /// The interval in which all calls start.
    spread: Duration,
    /// The shortest and longest absence of a client that resumes.
    absence: (Duration, Duration),
}

/// How one client behaves, the same in all set-ups.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// How long after the start of the run the call starts.
    starts_after: Duration,
    /// How long after the start of the call the client hangs up.
    disconnects_after: Option<Duration>,
    /// How long after hanging up the client resumes.
    resumes_after: Option<Duration>,
}

/// How things ended for one client.
#[derive(Debug, Clone, Copy, Default)]
struct End {
    call: usize,
    /// When the client disconnected for good.
    disconnected: Option<Duration>,
    resumed_in_time: bool,
    answered: bool,
}

/// What one run has measured.
#[derive(Debug, Clone, Copy)]
struct RunResult {
    run: Run,
    /// How many clients disconnected for good.
    disconnected: usize,
    /// Handler-seconds spent after they had disconnected.
    wasted: f64,
    /// How many clients resumed in time.
    resumed: usize,
    /// How many calls were destroyed even though their clients resumed in time.
    destroyed: usize,
    /// How many clients were still connected at the end but had no answer.
    unanswered: usize,
}

fn main() -> Result<()> {
    let load = machine::load();
    let mut results = Vec::new();
    for clock in Clock::iter() {
        for case in Case::iter() {
            for setup in Setup::iter() {
                let run = Run::new(clock, case, setup);
                eprintln!("{run}");
                results.push(run.measure()?);
            }
        }
    }
    let values = json!({ "calls": results[0].run.calls, "load": load });
    let ours = || results.iter().filter(|result| result.run.setup.is_ours());
    let section = Section {
        rows: results.iter().map(RunResult::row).collect(),
        targets: ours().flat_map(|ours| ours.targets(&results)).collect(),
        ..Section::new("wasted", values)?
    };
    section.publish()?;
    let is_right = ours().all(|result| result.destroyed == 0);
    ensure!(is_right, "a call was destroyed although its client resumed");
    Ok(())
}

// === impl Run ===

impl Run {
    fn new(clock: Clock, case: Case, setup: Setup) -> Self {
        let second = Duration::from_secs(1);
        let grace = match (case, clock) {
            (Case::Immediate, _) => Grace::Immediate,
            (Case::Grace, Clock::Real) => Grace::After(second / 10),
            (Case::Grace, Clock::Paused) | (Case::Stateless, _) => Grace::Auto,
        };
        let (quick, duration, spread, absence) = match clock {
            Clock::Paused => (200, 600 * second, 60 * second, (second / 2, 15 * second)),
            Clock::Real if is_quick() => (100, 2 * second, second, (second / 200, second / 40)),
            Clock::Real => (0, 2 * second, 10 * second, (second / 200, second / 40)),
        };
        Self {
            clock,
            case,
            setup,
            grace,
            calls: if is_quick() { quick } else { 2_000 },
            duration,
            spread,
            absence,
        }
    }

    fn measure(self) -> Result<RunResult> {
        let ledger = Ledger::new(self.calls, 1);
        let layer = CancelOnDisconnectLayer::new().grace(self.grace);
        let (tools, mode) = (Tools(ledger.clone()), self.mode());
        if self.clock == Clock::Paused {
            let runtime = paused_runtime()?;
            let _inside = runtime.enter();
            let transport = tools.in_process(self.setup, mode, layer);
            return runtime.block_on(self.play(transport, ledger));
        }
        let server = workers()?;
        let stack = || tools.served(self.setup, mode, layer);
        let transport = Transport::Socket(serve(server.handle(), 1, stack)?[0]);
        let result = runtime()?.block_on(self.play(transport, ledger));
        server.shutdown_background();
        result
    }

    async fn play(self, transport: Transport, ledger: Ledger) -> Result<RunResult> {
        let mut clients = Vec::new();
        let mut pinging = JoinSet::new();
        for _ in 0..SESSIONS {
            let client = Client::open(transport.clone(), self.mode()).await?;
            clients.push(client.clone());
            pinging.spawn(async move {
                while client.session().is_some() && client.ping().await.is_ok() {
                    sleep(PING_INTERVAL).await;
                }
            });
        }
        let mut playing = JoinSet::new();
        for (call, plan) in self.plans().into_iter().enumerate() {
            let client = clients[call % SESSIONS].clone();
            playing.spawn(plan.play(client, call, self, ledger.clone()));
        }
        let mut ends = Vec::new();
        while let Some(end) = playing.join_next().await {
            ends.push(end??);
        }
        // Long enough even for calls whose clients disconnected long ago.
        sleep(self.duration).await;
        let all_ended = ledger.expect_all(0..self.calls, |times_of| &times_of.ended, self.duration);
        all_ended.await?;
        Ok(RunResult::new(self, &ends, &ledger))
    }

    fn plans(self) -> Vec<Plan> {
        let mut dice = Dice(SEED);
        let plan = |_| {
            let starts_after = self.spread.mul_f64(dice.share());
            let disconnects_after = dice.share() < 0.3;
            let after = self.duration.mul_f64(dice.share());
            let resumes_after = dice.share() < 1.0 / 3.0 && self.case == Case::Grace;
            let (least, most) = self.absence;
            let absence = least + (most - least).mul_f64(dice.share());
            Plan {
                starts_after,
                disconnects_after: disconnects_after.then_some(after),
                resumes_after: (disconnects_after && resumes_after).then_some(absence),
            }
        };
        (0..self.calls).map(plan).collect()
    }

    fn mode(self) -> Mode {
        match self.case {
            Case::Grace | Case::Immediate => Mode::Session,
            Case::Stateless => Mode::Stateless,
        }
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (setup, case, clock) = (self.setup, self.case, self.clock);
        write!(f, "{setup}, {case}, calls of {clock}")
    }
}

// === impl Plan ===

impl Plan {
    async fn play(self, client: Client, call: usize, run: Run, ledger: Ledger) -> Result<End> {
        sleep(self.starts_after).await;
        let arguments = json!({ "call": call, "lasts": run.duration.as_millis() as u64 });
        // Reads up to the first event. hyper does the same, and a client needs the event id to resume.
        let (mut stream, event) = client.begin(call, "work", arguments).await?;
        let mut end = End {
            call,
            ..End::default()
        };
        let Some(after) = self.disconnects_after else {
            end.answered = is_answered(stream, call, run).await;
            return Ok(end);
        };
        sleep(after).await;
        stream.before_close(Close::Fin)?;
        let disconnected = ledger.now();
        drop(stream);
        let (Some(absence), Some(event)) = (self.resumes_after, event) else {
            end.disconnected = Some(disconnected);
            return Ok(end);
        };
        sleep(absence).await;
        // A client whose answer was complete before it disconnected does not resume.
        let ended = ledger.times_of(call).ended.get();
        if ended.is_none_or(|at| *at >= disconnected) {
            // On a busy machine, a client may be delayed and resume too late.
            end.resumed_in_time = ledger.now() - disconnected <= 2 * absence;
            end.answered = is_answered(client.resume(&event).await?, call, run).await;
        }
        Ok(end)
    }
}

async fn is_answered(mut stream: Stream, call: usize, run: Run) -> bool {
    let answer = format!("\"{}\"", done(call));
    // A client does not wait forever.
    let received = timeout(2 * run.duration, stream.wait_for(&answer)).await;
    matches!(received, Ok(Ok(())))
}

// === impl RunResult ===

impl RunResult {
    fn new(run: Run, ends: &[End], ledger: &Ledger) -> Self {
        let after = |end: &End| {
            let ended = ledger.times_of(end.call).ended.get()?;
            Some(ended.saturating_sub(end.disconnected?).as_secs_f64())
        };
        let is_destroyed =
            |end: &End| end.resumed_in_time && ledger.times_of(end.call).token.get().is_some();
        let count = |counts: &dyn Fn(&End) -> bool| ends.iter().filter(|end| counts(end)).count();
        Self {
            run,
            disconnected: count(&|end| end.disconnected.is_some()),
            wasted: ends.iter().filter_map(after).sum(),
            resumed: count(&|end| end.resumed_in_time),
            destroyed: count(&is_destroyed),
            unanswered: count(&|end| end.disconnected.is_none() && !end.answered),
        }
    }

    /// Returns how many seconds were wasted per client that disconnected for good.
    fn wasted_per_client(&self) -> f64 {
        self.wasted / self.disconnected.max(1) as f64
    }

    fn row(&self) -> Vec<String> {
        cells![
            self.run.clock,
            self.run.case,
            self.run.setup,
            self.disconnected,
            format!("{:.3}", self.wasted),
            format!("{:.4}", self.wasted_per_client()),
            format!("{} of {}", self.destroyed, self.resumed),
            self.unanswered,
        ]
    }

    /// Returns the targets.
    ///
    /// A run without a grace period is compared with bare rmcp in session mode, where no client resumes.
    fn targets(&self, results: &[Self]) -> Vec<Target> {
        let Run { clock, case, .. } = self.run;
        let (least, reference) = match (case, clock) {
            (Case::Grace, Clock::Paused) => (Some(12.0), Case::Grace),
            // A grace period of 100 ms, compared with a mean of 1 s.
            (Case::Grace, Clock::Real) => (None, Case::Grace),
            (Case::Immediate | Case::Stateless, _) => (Some(500.0), Case::Immediate),
        };
        let is_reference =
            |run: Run| (run.setup, run.clock, run.case) == (Setup::Bare, clock, reference);
        let bare = results.iter().find(|result| is_reference(result.run));
        let factor =
            bare.map_or(f64::NAN, Self::wasted_per_client) / self.wasted_per_client().max(1e-3);
        let what = format!("{}: times less without a client than bare", self.run);
        let factor = least.map(|least| Target::new(AtLeast(least), what, factor));
        let what = format!("{}: calls destroyed", self.run);
        let destroyed = Target::new(AtMost(0.0), what, self.destroyed as f64);
        let destroyed = (case == Case::Grace).then_some(destroyed);
        factor.into_iter().chain(destroyed).collect()
    }
}
