//! Thousands of calls whose clients all do the same at the same moment: hang up, come back, never come back.
//!
//! `storm [--quick]`. Each set-up is served by a process of its own, its clients are another one, and pings come from a
//! thread that no runtime can hold up. Ends with an error if the layer cancelled a call that it should not have, or
//! missed one.

use std::{
    slice::from_ref,
    sync::{Arc, Barrier},
    time::Duration,
};

use benches::{
    WORKERS,
    child::{Child, obey},
    prelude::*,
    sockets::{
        crowd::Crowd,
        ledger::{Group, Ledger, Life, Stamp},
        pings::Pings,
        serve::{serve, witnessed},
        tools::Tools,
    },
    workers,
};
use mcp_cancel_on_disconnect::{CallInfo, CancelOnDisconnectLayer, Grace, Policy};
use serde::{Deserialize, Serialize};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, sleep_until},
};

const ADDRESSES: u8 = 4;
const SESSIONS: usize = 20;

/// How long one waits for what must happen.
const LIMIT: Duration = Duration::from_secs(60);

/// The longest that a deadline is put off which a starved runtime noticed late, and a margin.
const PUT_OFF: Duration = Duration::from_secs(8);

/// How long one waits for what a set-up without the layer never does.
const NEVER: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy)]
struct Size {
    calls: usize,
    /// Calls that stay, of which none may be cancelled.
    bystanders: usize,
    /// From the first wave's hang-up to the end of all graces.
    grace: Duration,
    /// How long both workers are busy.
    busy: Duration,
}

/// What one storm did to one set-up.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Outcome {
    storm: String,
    /// Tokens that have to fire, and those of them that did.
    due: usize,
    fired: usize,
    /// Tokens that must not fire, and those of them that did.
    spared: usize,
    wrong: usize,
    /// Right answers to clients that are there.
    answers: usize,
    /// Seconds until the last of what had to happen had.
    last: f64,
    /// Resident, in MiB.
    before: f64,
    peak: f64,
    /// The slowest, in milliseconds.
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

const FULL: Size = Size {
    calls: 10_000,
    bystanders: 500,
    grace: Duration::from_secs(40),
    busy: Duration::from_secs(12),
};

const QUICK: Size = Size {
    calls: 400,
    bystanders: 20,
    grace: Duration::from_secs(4),
    busy: Duration::from_secs(4),
};

fn main() -> Result<()> {
    let runtime = runtime()?;
    let size = if is_quick() { QUICK } else { FULL };
    let role = role();
    if role.is_empty() {
        return runtime.block_on(compare(size));
    }
    if role == "clients" {
        let mut crowd = Crowd::default();
        return runtime.block_on(obey(async |words| crowd.act(words).await));
    }
    let serving = workers()?;
    let outcomes = runtime.block_on(storms(role.parse()?, size, serving.handle()))?;
    serving.shutdown_background();
    println!("{}", serde_json::to_string(&outcomes)?);
    Ok(())
}

/// Measures all, each in a process of its own.
async fn compare(size: Size) -> Result<()> {
    let load = machine::load();
    let mut found: Vec<(Setup, [Outcome; 4])> = Vec::new();
    for setup in Setup::iter() {
        eprintln!("{setup} is next");
        found.push((setup, Child::found(&setup.to_string()).await?));
    }
    let mut section = Section::new(
        "storm",
        &[
            ("calls", &size.calls),
            ("sessions", &SESSIONS),
            ("bystanders", &size.bystanders),
            ("twice", &(2 * size.calls)),
            ("grace", &size.grace.as_secs()),
            ("back", &(2 * size.bystanders)),
            ("busy", &size.busy.as_secs()),
            ("load", &load),
        ],
    )?;
    let mut all_right = true;
    for storm in 0..4 {
        for (setup, outcomes) in &found {
            let outcome = &outcomes[storm];
            section.rows.push(outcome.row(*setup));
            if setup.is_ours() {
                section.targets.extend(outcome.targets(*setup));
                all_right &= outcome.is_right();
            }
        }
    }
    section.plots = vec![peaks(&found)];
    section.publish()?;
    ensure!(all_right, "a token or an answer is wrong");
    Ok(())
}

fn peaks(found: &[(Setup, [Outcome; 4])]) -> Plot {
    let series = Setup::series(|setup| {
        let own = found.iter().filter(move |(its, _)| *its == setup);
        own.flat_map(|(_, outcomes)| outcomes.iter().map(|outcome| outcome.peak))
    });
    let storms = found[0].1.iter().map(|outcome| &outcome.storm);
    let title = "Peak memory of the server in a storm";
    let (x, y) = (Axis::linear("storm"), Axis::linear("resident (MiB)"));
    Plot::lines("storm-memory", title, x, y, series).over(storms)
}

async fn storms(setup: Setup, size: Size, runtime: &Handle) -> Result<[Outcome; 4]> {
    let mut server = Server::start(setup, size, runtime.clone()).await?;
    Ok([
        server.all_hang_up().await?,
        server.all_come_back().await?,
        server.all_graces_end().await?,
        server.all_come_back_to_busy_workers().await?,
    ])
}

/// `now`, or `wait-` and the milliseconds of the grace.
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
        let addresses = {
            let _inside = runtime.enter();
            let stack = Tools::new(&ledger).served(setup, Mode::Session, layer);
            serve(witnessed(stack, &ledger), ADDRESSES)?
        };
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

    async fn all_hang_up(&mut self) -> Result<Outcome> {
        let storm = self.storm("all hang up")?;
        let bystanders = self.begin(self.size.bystanders, "now").await?;
        let crowd = [self.begin(self.size.calls, "now").await?];
        let begun = self.ledger.now();
        self.tell("cut", &crowd).await?;
        let last = self.last_token(&crowd, begun).await;
        self.judge(storm, last, &crowd, &[bystanders]).await
    }

    async fn all_come_back(&mut self) -> Result<Outcome> {
        let storm = self.storm("all come back")?;
        let crowd = [self.begin(self.size.calls, "wait-60000").await?];
        self.tell("cut", &crowd).await?;
        self.all(&crowd, |life| &life.dropped).await?;
        let begun = self.ledger.now();
        self.tell("resume", &crowd).await?;
        let last = self.ledger.now() - begun;
        self.judge(storm, last, &[], &crowd).await
    }

    /// Twice as many as there may be sockets, in two waves. Some of each come back in time.
    async fn all_graces_end(&mut self) -> Result<Outcome> {
        let storm = self.storm("all graces end")?;
        let (mut gone, mut back) = (Vec::new(), Vec::new());
        let mut end = None;
        for grace in [self.size.grace, self.size.grace / 2] {
            let tool = format!("wait-{}", grace.as_millis());
            let some = [self.begin(self.size.bystanders, &tool).await?];
            let most = [self.begin(self.size.calls, &tool).await?];
            let end = *end.get_or_insert_with(|| Instant::now() + grace);
            let late = Instant::now().saturating_duration_since(end - grace);
            ensure!(
                late.as_secs() < 1,
                "a wave took longer to start than half of the grace"
            );
            sleep_until(end - grace).await;
            self.tell("cut", &some).await?;
            self.tell("cut", &most).await?;
            self.all(&most, |life| &life.dropped).await?;
            back.extend(some);
            gone.extend(most);
        }
        let end = end.context("no wave")?;
        sleep_until(end - self.size.grace / 8).await;
        self.tell("resume", &back).await?;
        sleep_until(end).await;
        let begun = self.ledger.now();
        let last = self.last_token(&gone, begun).await;
        self.judge(storm, last, &gone, &back).await
    }

    /// Their resumes wait in the accept queues while their graces end.
    async fn all_come_back_to_busy_workers(&mut self) -> Result<Outcome> {
        let storm = self.storm("all come back to busy workers")?;
        let grace = format!("wait-{}", (self.size.busy / 2).as_millis());
        let crowd = [self.begin(self.size.calls, &grace).await?];
        self.tell("cut", &crowd).await?;
        self.all(&crowd, |life| &life.dropped).await?;
        let free = self.ledger.now() + self.size.busy;
        self.keep_busy().await;
        self.tell("resume", &crowd).await?;
        let last = self.ledger.now().saturating_sub(free);
        // By then whatever was put off is due.
        if self.setup.is_ours() {
            sleep(PUT_OFF).await;
        }
        let outcome = self.judge(storm, last, &[], &crowd).await?;
        // No ping is answered by workers that are busy.
        let ping = None;
        Ok(Outcome { ping, ..outcome })
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "to block the workers is what this is for"
    )]
    async fn keep_busy(&self) {
        let all = Arc::new(Barrier::new(WORKERS));
        let busy = self.size.busy;
        for _ in 0..WORKERS {
            let all = all.clone();
            self.runtime.spawn(async move {
                all.wait();
                std::thread::sleep(busy);
            });
        }
        sleep(Duration::from_millis(500)).await;
    }

    /// What is known when it begins.
    fn storm(&self, storm: &str) -> Result<Outcome> {
        eprintln!("{}: {storm}", self.setup);
        machine::forget_peak()?;
        self.pings.worst();
        Ok(Outcome {
            storm: storm.to_owned(),
            before: machine::resident()?,
            ..Outcome::default()
        })
    }

    /// Starts calls; each has an event id that its client can come back with.
    async fn begin(&mut self, count: usize, tool: &str) -> Result<Group> {
        let group = self.ledger.group(count);
        let (number, first) = (group.number, group.calls.start);
        let command = format!("start {number} {first} {count} {tool}");
        self.clients.ask(&command).await?;
        self.all(from_ref(&group), |life| &life.started).await?;
        Ok(group)
    }

    async fn tell(&mut self, command: &str, groups: &[Group]) -> Result<()> {
        for group in groups {
            let command = format!("{command} {}", group.number);
            self.clients.ask(&command).await?;
        }
        Ok(())
    }

    async fn all(&self, groups: &[Group], which: fn(&Life) -> &Stamp) -> Result<()> {
        for group in groups {
            self.ledger.all(group.calls.clone(), which, LIMIT).await?;
        }
        Ok(())
    }

    /// Waits for all tokens. How long after this moment the last has fired.
    async fn last_token(&self, groups: &[Group], begun: Duration) -> Duration {
        let limit = match self.setup {
            Setup::Bare => NEVER,
            Setup::Guard | Setup::Layer | Setup::Wrapped => LIMIT,
        };
        for group in groups {
            let calls = group.calls.clone();
            self.ledger.reaches(calls, |life| &life.token, limit).await;
        }
        let last = self.fired(groups).into_iter().max();
        last.unwrap_or_default().saturating_sub(begun)
    }

    fn fired(&self, groups: &[Group]) -> Vec<Duration> {
        let calls = groups.iter().map(|group| group.calls.clone());
        let fired = |calls| self.ledger.times(calls, |life| &life.token);
        calls.flat_map(fired).collect()
    }

    /// Lets the spared answer, and counts answers and tokens.
    async fn judge(
        &mut self,
        storm: Outcome,
        last: Duration,
        due: &[Group],
        spared: &[Group],
    ) -> Result<Outcome> {
        let patience = match self.setup {
            // To some of its clients no answer comes.
            Setup::Guard => NEVER,
            Setup::Bare | Setup::Layer | Setup::Wrapped => LIMIT,
        };
        let ping = self.pings.worst().as_secs_f64() * 1e3;
        let mut answers = 0;
        for group in spared {
            self.ledger.release(group.number).cancel();
            let command = format!("answers {} {}", group.number, patience.as_secs());
            answers += self.clients.ask(&command).await?.parse::<usize>()?;
        }
        let size = |groups: &[Group]| groups.iter().map(|group| group.calls.len()).sum();
        let outcome = Outcome {
            due: size(due),
            fired: self.fired(due).len(),
            spared: size(spared),
            wrong: self.fired(spared).len(),
            answers,
            last: last.as_secs_f64(),
            peak: machine::peak()?,
            ping: Some(ping),
            ..storm
        };
        for groups in [due, spared] {
            let numbers = groups.iter().map(|group| group.number);
            numbers.for_each(|number| self.ledger.release(number).cancel());
            self.tell("forget", groups).await?;
            // The next storm finds nothing of this one at work.
            self.all(groups, |life| &life.ended).await?;
        }
        Ok(outcome)
    }
}

// === impl Outcome ===

impl Outcome {
    fn is_right(&self) -> bool {
        self.fired == self.due && self.wrong == 0 && self.answers == self.spared
    }

    fn row(&self, setup: Setup) -> Vec<String> {
        let ping = self.ping.map(|ping| format!("{ping:.1}"));
        cells![
            self.storm,
            setup,
            format!("{} of {}", self.fired, self.due),
            format!("{} of {}", self.wrong, self.spared),
            format!("{} of {}", self.answers, self.spared),
            format!("{:.2}", self.last),
            format!("{:.0}", self.before),
            format!("{:.0}", self.peak),
            ping.unwrap_or_else(|| "–".to_owned()),
        ]
    }

    fn targets(&self, setup: Setup) -> impl Iterator<Item = Target> {
        let missed = self.due - self.fired + self.wrong + self.spared - self.answers;
        let wrong = format!("{setup}, {}: wrong tokens and answers", self.storm);
        let slowest = format!("{setup}, {}: slowest ping (ms)", self.storm);
        let ping = self.ping.map(|ping| Target::at_most(100.0, slowest, ping));
        [Target::at_most(0.0, wrong, missed as f64)]
            .into_iter()
            .chain(ping)
    }
}
