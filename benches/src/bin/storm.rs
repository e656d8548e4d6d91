//! Thousands of calls whose clients disconnect or resume at the same moment.
//!
//! `storm [--quick]`. Each set-up has a server process, whose clients share a second process. Pings are sent from a
//! thread that no runtime can block. Fails if the layer has wrongly cancelled a call or failed to cancel one, or if
//! an answer is missing.

use std::sync::{Arc, Barrier};

use benches::{
    WORKERS,
    child::{Child, run_commands},
    prelude::*,
    sockets::{concurrent_clients::ConcurrentClients, load::Pings},
};
use mcp_cancel_on_disconnect::{CallInfo, Policy};
use serde::{Deserialize, Serialize};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, sleep_until},
};

const ADDRESSES: u8 = 4;
const SESSIONS: usize = 20;

/// Timeout for anything that must happen.
const LIMIT: Duration = Duration::from_secs(60);

/// How far a deadline that a stalled runtime has handled late may be postponed, plus a margin.
const MAX_POSTPONE: Duration = Duration::from_secs(8);

/// How long to wait for what a set-up without the layer never does.
const NEVER: Duration = Duration::from_secs(3);

const STORMS: [&str; 4] = [
    "all hang up",
    "all resume",
    "all graces end",
    "all resume at busy workers",
];

#[derive(Debug, Clone, Copy)]
struct Size {
    calls: usize,
    /// How many calls have clients that stay connected. None of them may be cancelled.
    bystanders: usize,
    /// The time from the first wave's hang-up until all grace periods have ended.
    grace: Duration,
    /// How long both workers are blocked.
    busy: Duration,
}

/// One set-up's result in one storm.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Outcome {
    /// How many tokens must fire.
    due: usize,
    /// How many of these tokens have fired.
    fired: usize,
    /// How many tokens must not fire.
    unaffected: usize,
    /// How many of these tokens fired nonetheless.
    wrong: usize,
    /// How many correct answers connected clients have received.
    answers: usize,
    /// Seconds until the last expected event.
    last: f64,
    /// Resident memory before the storm, in MiB.
    before: f64,
    /// Peak resident memory during the storm, in MiB.
    peak: f64,
    /// The slowest ping, in milliseconds.
    ping: Option<f64>,
}

struct Server {
    setup: Setup,
    size: Size,
    ledger: Ledger,
    clients: Child,
    runtime: Handle,
    pings: Pings,
}

/// The time until the last expected event, and two lists of groups.
///
/// The first list's tokens must fire, the second's must not.
type StormResult = (Duration, Vec<Group>, Vec<Group>);

fn main() -> Result<()> {
    let runtime = runtime()?;
    let (calls, bystanders, grace, busy) = if is_quick() {
        (400, 20, 4, 4)
    } else {
        (10_000, 500, 40, 12)
    };
    let (grace, busy) = (Duration::from_secs(grace), Duration::from_secs(busy));
    let size = Size {
        calls,
        bystanders,
        grace,
        busy,
    };
    match role().as_str() {
        "" => runtime.block_on(compare(size)),
        "clients" => {
            let mut clients = ConcurrentClients::default();
            runtime.block_on(run_commands(async |words| clients.act(words).await))
        }
        setup => {
            let serving = workers()?;
            let storms = storms(setup.parse()?, size, serving.handle().clone());
            println!("{}", serde_json::to_string(&runtime.block_on(storms)?)?);
            serving.shutdown_background();
            Ok(())
        }
    }
}

/// Measures each set-up in a process of its own.
async fn compare(size: Size) -> Result<()> {
    let load = machine::load();
    let mut results: Vec<(Setup, Vec<Outcome>)> = Vec::new();
    for setup in Setup::iter() {
        eprintln!("{setup} is next");
        results.push((setup, Child::result(&setup.to_string()).await?));
    }
    let values = json!({
        "calls": size.calls, "sessions": SESSIONS, "bystanders": size.bystanders, "twice": 2 * size.calls,
        "grace": size.grace.as_secs(), "back": 2 * size.bystanders, "busy": size.busy.as_secs(), "load": load,
    });
    let mut section = Section::new("storm", values)?;
    let mut is_right = true;
    for (index, storm) in STORMS.into_iter().enumerate() {
        let bare = results.iter().find(|(setup, _)| *setup == Setup::Bare);
        let bare = bare.and_then(|(_, outcomes)| outcomes[index].ping);
        for (setup, outcomes) in &results {
            let outcome = &outcomes[index];
            section.rows.push(outcome.row(storm, *setup));
            if setup.is_ours() {
                let name = format!("{setup}, {storm}");
                section.targets.extend(outcome.targets(&name, bare));
                is_right &= outcome.missed() == 0;
            }
        }
    }
    section.publish()?;
    ensure!(is_right, "a token or an answer is wrong");
    Ok(())
}

/// Runs all storms against one set-up, one after another.
async fn storms(setup: Setup, size: Size, runtime: Handle) -> Result<Vec<Outcome>> {
    let mut server = Server::start(setup, size, runtime).await?;
    let mut outcomes = Vec::new();
    for storm in STORMS {
        eprintln!("{setup}: {storm}");
        machine::reset_peak()?;
        server.pings.worst();
        let before = machine::resident()?;
        let result = match outcomes.len() {
            0 => server.all_hang_up().await?,
            1 => server.all_resume().await?,
            2 => server.all_graces_end().await?,
            _ => server.all_resume_at_busy_workers().await?,
        };
        outcomes.push(server.judge(before, result).await?);
    }
    // Blocked workers cannot answer pings.
    outcomes[3].ping = None;
    Ok(outcomes)
}

/// Reads the grace period from the tool's name, which is `wait-` and milliseconds. Other tools have no grace period.
fn policy(call: &CallInfo) -> Policy {
    let millis = call.tool().and_then(|tool| tool.strip_prefix("wait-"));
    let grace = match millis.and_then(|millis| millis.parse().ok()) {
        Some(millis) => Grace::After(Duration::from_millis(millis)),
        None => Grace::Immediate,
    };
    Policy::new().grace(grace)
}

// === impl Server ===

impl Server {
    async fn start(setup: Setup, size: Size, runtime: Handle) -> Result<Self> {
        let ledger = Ledger::new(6 * size.calls, 16);
        let layer = CancelOnDisconnectLayer::new()
            .policy(policy)
            .observe(ledger.observer());
        let tools = Tools(ledger.clone());
        let stack = || record_drops(tools.served(setup, Mode::Session, layer), &ledger);
        let addresses = serve(&runtime, ADDRESSES, stack)?;
        let mut clients = Child::start("clients")?;
        let list = Vec::from_iter(addresses.iter().map(ToString::to_string)).join(",");
        clients.ask(&format!("open {SESSIONS} {list}")).await?;
        Ok(Self {
            setup,
            size,
            pings: Pings::start(addresses[0]).await?,
            ledger,
            clients,
            runtime,
        })
    }

    async fn all_hang_up(&mut self) -> Result<StormResult> {
        let bystanders = self.begin(self.size.bystanders, "now").await?;
        let calls = vec![self.begin(self.size.calls, "now").await?];
        let started = self.ledger.now();
        self.command("cut", &calls).await?;
        let last = self.last_token(&calls, started).await;
        Ok((last, calls, vec![bystanders]))
    }

    async fn all_resume(&mut self) -> Result<StormResult> {
        let calls = vec![self.begin(self.size.calls, "wait-60000").await?];
        self.cut(&calls).await?;
        let started = self.ledger.now();
        self.command("resume", &calls).await?;
        Ok((self.ledger.now() - started, Vec::new(), calls))
    }

    /// Two waves, which together take twice the sockets available. Some of each wave's clients resume in time.
    async fn all_graces_end(&mut self) -> Result<StormResult> {
        let (mut never_return, mut return_in_time) = (Vec::new(), Vec::new());
        let mut end = None;
        for grace in [self.size.grace, self.size.grace / 2] {
            let tool = format!("wait-{}", grace.as_millis());
            let returning = [self.begin(self.size.bystanders, &tool).await?];
            let lost = [self.begin(self.size.calls, &tool).await?];
            let end = *end.get_or_insert_with(|| Instant::now() + grace);
            let late = Instant::now().saturating_duration_since(end - grace);
            let is_late = late.as_secs() >= 1;
            ensure!(!is_late, "a wave took longer to start than half the grace");
            sleep_until(end - grace).await;
            self.command("cut", &returning).await?;
            self.cut(&lost).await?;
            return_in_time.extend(returning);
            never_return.extend(lost);
        }
        let end = end.context("no wave")?;
        sleep_until(end - self.size.grace / 8).await;
        self.command("resume", &return_in_time).await?;
        sleep_until(end).await;
        let started = self.ledger.now();
        Ok((
            self.last_token(&never_return, started).await,
            never_return,
            return_in_time,
        ))
    }

    /// Lets the resumes wait in the accept queues while the grace periods end, so the layer sees them late.
    async fn all_resume_at_busy_workers(&mut self) -> Result<StormResult> {
        let grace = format!("wait-{}", (self.size.busy / 2).as_millis());
        let calls = vec![self.begin(self.size.calls, &grace).await?];
        self.cut(&calls).await?;
        let free = self.ledger.now() + self.size.busy;
        self.block_workers().await;
        self.command("resume", &calls).await?;
        let last = self.ledger.now().saturating_sub(free);
        // By then, every postponed deadline has passed.
        if self.setup.is_ours() {
            sleep(MAX_POSTPONE).await;
        }
        Ok((last, Vec::new(), calls))
    }

    /// Blocks all workers for `Size::busy`. Returns once they are blocked.
    #[allow(
        clippy::disallowed_methods,
        reason = "blocking the workers is the point"
    )]
    async fn block_workers(&self) {
        let (barrier, busy) = (Arc::new(Barrier::new(WORKERS)), self.size.busy);
        for _ in 0..WORKERS {
            let barrier = barrier.clone();
            self.runtime.spawn(async move {
                barrier.wait();
                std::thread::sleep(busy);
            });
        }
        sleep(Duration::from_millis(500)).await;
    }

    /// Starts calls and waits until all their handlers are running. Each client has an event id to resume from.
    async fn begin(&mut self, count: usize, tool: &str) -> Result<Group> {
        let group = self.ledger.group(count);
        let (number, calls) = (group.number, group.calls.clone());
        let command = format!("start {number} {} {count} {tool}", calls.start);
        self.clients.ask(&command).await?;
        self.ledger
            .expect_all(calls, |times_of| &times_of.started, LIMIT)
            .await?;
        Ok(group)
    }

    /// Disconnects the clients and waits until hyper has dropped the responses.
    async fn cut(&mut self, groups: &[Group]) -> Result<()> {
        self.command("cut", groups).await?;
        self.expect_all(groups, |times_of| &times_of.dropped).await
    }

    async fn command(&mut self, command: &str, groups: &[Group]) -> Result<()> {
        for group in groups {
            let command = format!("{command} {}", group.number);
            self.clients.ask(&command).await?;
        }
        Ok(())
    }

    async fn expect_all(&self, groups: &[Group], which: SelectStamp) -> Result<()> {
        for group in groups {
            self.ledger
                .expect_all(group.calls.clone(), which, LIMIT)
                .await?;
        }
        Ok(())
    }

    /// Waits for all tokens, but only for [`NEVER`] with bare rmcp.
    ///
    /// Returns how long after `started` the last one fired, or zero if none did.
    async fn last_token(&self, groups: &[Group], started: Duration) -> Duration {
        let is_bare = self.setup == Setup::Bare;
        let limit = if is_bare { NEVER } else { LIMIT };
        for group in groups {
            let calls = group.calls.clone();
            self.ledger
                .reaches(calls, |times_of| &times_of.token, limit)
                .await;
        }
        let last = self.fired(groups).into_iter().max();
        last.unwrap_or_default().saturating_sub(started)
    }

    fn fired(&self, groups: &[Group]) -> Vec<Duration> {
        let calls = groups.iter().map(|group| group.calls.clone());
        let fired = |calls| self.ledger.times(calls, |times_of| &times_of.token);
        calls.flat_map(fired).collect()
    }

    /// Releases the handlers that must not be cancelled, then counts answers and tokens.
    ///
    /// Ends all of the storm's calls afterwards.
    async fn judge(
        &mut self,
        before: f64,
        (last, due, unaffected): StormResult,
    ) -> Result<Outcome> {
        // With the guard, some clients never receive an answer.
        let is_guard = self.setup == Setup::Guard;
        let limit = if is_guard { NEVER } else { LIMIT };
        let ping = self.pings.worst().as_secs_f64() * 1e3;
        let mut answers = 0;
        for group in &unaffected {
            self.ledger.release(group.number).cancel();
            let command = format!("answers {} {}", group.number, limit.as_secs());
            answers += self.clients.ask(&command).await?.parse::<usize>()?;
        }
        let size = |groups: &[Group]| groups.iter().map(|group| group.calls.len()).sum();
        let outcome = Outcome {
            due: size(&due),
            fired: self.fired(&due).len(),
            unaffected: size(&unaffected),
            wrong: self.fired(&unaffected).len(),
            answers,
            last: last.as_secs_f64(),
            before,
            peak: machine::peak()?,
            ping: Some(ping),
        };
        for groups in [due, unaffected] {
            for group in &groups {
                self.ledger.release(group.number).cancel();
            }
            self.command("forget", &groups).await?;
            // No handler from this storm may still be running during the next one.
            self.expect_all(&groups, |times_of| &times_of.ended).await?;
        }
        Ok(outcome)
    }
}

// === impl Outcome ===

impl Outcome {
    /// Returns how many tokens and answers are missing, plus how many tokens fired wrongly.
    fn missed(&self) -> usize {
        self.due - self.fired + self.wrong + self.unaffected - self.answers
    }

    fn row(&self, storm: &str, setup: Setup) -> Vec<String> {
        let ping = self.ping.map(|ping| format!("{ping:.1}"));
        cells![
            storm,
            setup,
            format!("{} of {}", self.fired, self.due),
            format!("{} of {}", self.wrong, self.unaffected),
            format!("{} of {}", self.answers, self.unaffected),
            format!("{:.2}", self.last),
            format!("{:.0}", self.before),
            format!("{:.0}", self.peak),
            ping.unwrap_or_else(|| "–".to_owned()),
        ]
    }

    /// Returns the targets. `bare` is bare rmcp's slowest ping in the same storm.
    fn targets(&self, name: &str, bare: Option<f64>) -> impl Iterator<Item = Target> {
        let (wrong, slowest) = ("wrong tokens and answers", "slowest ping, to bare's");
        let wrong = Target::new(
            AtMost(0.0),
            format!("{name}: {wrong}"),
            self.missed() as f64,
        );
        let ping = self.ping.zip(bare).map(|(ping, bare)| ping / bare);
        let ping = ping.map(|ping| Target::new(AtMost(1.2), format!("{name}: {slowest}"), ping));
        [wrong].into_iter().chain(ping)
    }
}
