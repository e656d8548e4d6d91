//! Thousands of calls whose clients all do the same at the same moment: hang up, come back, never come back.
//!
//! `storm [--quick]`. Each set-up is served by a process of its own, its clients are another one, and pings come from a
//! thread that no runtime can hold up. Ends with an error if the layer cancelled a call that it should not have, or
//! missed one.

use std::{
    ops::Range,
    sync::{Arc, Barrier},
    time::Duration,
};

use mcp_cancel_on_disconnect::{CallInfo, CancelOnDisconnectLayer, Grace, Policy};
use mcp_cancel_on_disconnect_benches::{
    Failure,
    report::{Axis, Bound, Kind, Plot, Section, Series, Target},
    setup::{Mode, Setup},
    sockets::{
        child::{Child, obey},
        crowd::Crowd,
        ledger::{Ledger, Life, Stamp},
        machine,
        pings::Pings,
        serve::{serve, witnessed},
        tools::Tools,
    },
};
use serde::{Deserialize, Serialize};
use tokio::{
    runtime::{Builder, Handle},
    time::{Instant, sleep, sleep_until},
};

const ADDRESSES: u8 = 4;
const SESSIONS: usize = 20;
const WORKERS: usize = 2;

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
#[derive(Debug, Clone, Serialize, Deserialize)]
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
    next: usize,
    groups: usize,
}

/// Calls that do the same.
#[derive(Debug, Clone)]
struct Group {
    number: usize,
    calls: Range<usize>,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let quick = words.contains(&"--quick");
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let size = if quick { QUICK } else { FULL };
    match words.as_slice() {
        ["clients", ..] => {
            machine::allow_files(size.calls as u64 + 2_000)?;
            let mut crowd = Crowd::default();
            runtime.block_on(obey(async |words| crowd.act(words).await))
        }
        ["serve", setup, ..] => {
            machine::allow_files(size.calls as u64 + 2_000)?;
            let setup = Setup::ALL.into_iter().find(|it| it.name() == *setup);
            let setup = setup.ok_or("no such set-up")?;
            let serving = Builder::new_multi_thread()
                .worker_threads(WORKERS)
                .enable_all()
                .build()?;
            let outcomes = runtime.block_on(storms(setup, size, quick, serving.handle()))?;
            serving.shutdown_background();
            println!("{}", serde_json::to_string(&outcomes)?);
            Ok(())
        }
        [] | ["--quick"] => runtime.block_on(compare(size, quick)),
        _ => Err("usage: storm [--quick]".into()),
    }
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

async fn compare(size: Size, quick: bool) -> Result<(), Failure> {
    let load = machine::load();
    let mut found = Vec::new();
    for setup in Setup::ALL {
        eprintln!("{} is next", setup.name());
        let mut arguments = vec!["serve", setup.name()];
        arguments.extend(quick.then_some("--quick"));
        let outcomes = Child::start(&arguments)?.answer().await?;
        let outcomes: Vec<Outcome> = serde_json::from_str(&outcomes)?;
        found.push((setup, outcomes));
    }
    let section = section(&found, size, &load);
    section.publish()?;
    let mut layers = found
        .iter()
        .filter(|(setup, _)| matches!(setup, Setup::Layer | Setup::Wrapped));
    match layers.all(|(_, outcomes)| outcomes.iter().all(Outcome::is_right)) {
        true => Ok(()),
        false => Err("a token or an answer is wrong".into()),
    }
}

async fn storms(
    setup: Setup,
    size: Size,
    quick: bool,
    runtime: &Handle,
) -> Result<Vec<Outcome>, Failure> {
    let mut server = Server::start(setup, size, quick, runtime.clone()).await?;
    Ok(vec![
        server.all_hang_up().await?,
        server.all_come_back().await?,
        server.all_graces_end().await?,
        server.all_come_back_to_busy_workers().await?,
    ])
}

// === impl Server ===

impl Server {
    async fn start(
        setup: Setup,
        size: Size,
        quick: bool,
        runtime: Handle,
    ) -> Result<Self, Failure> {
        let ledger = Ledger::new(6 * size.calls, 16);
        let layer = CancelOnDisconnectLayer::new()
            .policy(policy)
            .observe(ledger.observer());
        let addresses = {
            let _inside = runtime.enter();
            let stack = Tools::new(&ledger).served(setup, Mode::Session, layer);
            let (addresses, serving) = serve(witnessed(stack, &ledger), ADDRESSES)?;
            // For as long as the runtime.
            runtime.spawn(async move { serving.join_all().await });
            addresses
        };
        let mut arguments = vec!["clients"];
        arguments.extend(quick.then_some("--quick"));
        let mut clients = Child::start(&arguments)?;
        let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        clients
            .ask(&format!("open {SESSIONS} {}", list.join(",")))
            .await?;
        Ok(Self {
            setup,
            size,
            pings: Pings::start(addresses[0]).await?,
            ledger,
            clients,
            runtime,
            next: 0,
            groups: 0,
        })
    }

    async fn all_hang_up(&mut self) -> Result<Outcome, Failure> {
        let watch = self.watch("all hang up")?;
        let bystanders = self.begin(self.size.bystanders, "now").await?;
        let crowd = self.begin(self.size.calls, "now").await?;
        let begun = self.ledger.now();
        self.tell("cut", &crowd).await?;
        self.fires(&crowd).await;
        self.judge(watch, &[crowd], &[bystanders], begun).await
    }

    async fn all_come_back(&mut self) -> Result<Outcome, Failure> {
        let watch = self.watch("all come back")?;
        let crowd = self.begin(self.size.calls, "wait-60000").await?;
        self.tell("cut", &crowd).await?;
        self.all(&crowd, |life| &life.dropped).await?;
        let begun = self.ledger.now();
        self.tell("resume", &crowd).await?;
        self.judge(watch, &[], &[crowd], begun).await
    }

    /// Twice as many as there may be sockets, in two waves. Some of each come back in time.
    async fn all_graces_end(&mut self) -> Result<Outcome, Failure> {
        let watch = self.watch("all graces end")?;
        let (mut gone, mut back) = (Vec::new(), Vec::new());
        let mut end = None;
        for grace in [self.size.grace, self.size.grace / 2] {
            let tool = format!("wait-{}", grace.as_millis());
            let some = self.begin(self.size.bystanders, &tool).await?;
            let most = self.begin(self.size.calls, &tool).await?;
            let end = *end.get_or_insert_with(|| Instant::now() + grace);
            if Instant::now() > end - grace + Duration::from_secs(1) {
                return Err("the second wave took longer to start than half of the grace".into());
            }
            sleep_until(end - grace).await;
            self.tell("cut", &some).await?;
            self.tell("cut", &most).await?;
            self.all(&most, |life| &life.dropped).await?;
            back.push(some);
            gone.push(most);
        }
        let end = end.ok_or("no wave")?;
        sleep_until(end - self.size.grace / 8).await;
        for some in &back {
            self.tell("resume", some).await?;
        }
        sleep_until(end).await;
        let begun = self.ledger.now();
        for most in &gone {
            self.fires(most).await;
        }
        self.judge(watch, &gone, &back, begun).await
    }

    /// Their resumes wait in the accept queues while their graces end.
    async fn all_come_back_to_busy_workers(&mut self) -> Result<Outcome, Failure> {
        let mut watch = self.watch("all come back to busy workers")?;
        watch.pinged = false;
        let grace = format!("wait-{}", (self.size.busy / 2).as_millis());
        let crowd = self.begin(self.size.calls, &grace).await?;
        self.tell("cut", &crowd).await?;
        self.all(&crowd, |life| &life.dropped).await?;
        let free = self.ledger.now() + self.size.busy;
        self.keep_busy().await;
        self.tell("resume", &crowd).await?;
        watch.last = Some(self.ledger.now().saturating_sub(free));
        // By then whatever was put off is due.
        if matches!(self.setup, Setup::Layer | Setup::Wrapped) {
            sleep(PUT_OFF).await;
        }
        self.judge(watch, &[], &[crowd], free).await
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

    fn watch(&self, storm: &'static str) -> Result<Watch, Failure> {
        eprintln!("{}: {storm}", self.setup.name());
        machine::forget_peak()?;
        self.pings.worst();
        Ok(Watch {
            storm,
            before: machine::resident()?,
            pinged: true,
            last: None,
        })
    }

    /// Starts calls; each has an event id that its client can come back with.
    async fn begin(&mut self, count: usize, tool: &str) -> Result<Group, Failure> {
        let group = Group {
            number: self.groups,
            calls: self.next..self.next + count,
        };
        self.groups += 1;
        self.next += count;
        let Group { number, calls } = &group;
        self.clients
            .ask(&format!("start {number} {} {count} {tool}", calls.start))
            .await?;
        self.all(&group, |life| &life.started).await?;
        Ok(group)
    }

    async fn tell(&mut self, command: &str, group: &Group) -> Result<String, Failure> {
        self.clients
            .ask(&format!("{command} {}", group.number))
            .await
    }

    async fn all(&self, group: &Group, which: fn(&Life) -> &Stamp) -> Result<(), Failure> {
        let (count, calls) = (group.calls.len(), group.calls.clone());
        match self.ledger.reaches(count, calls, which, LIMIT).await {
            come if come == count => Ok(()),
            come => Err(format!("{come} of {count} calls of a group got so far").into()),
        }
    }

    /// Waits for all tokens of a group.
    async fn fires(&self, group: &Group) {
        let limit = match self.setup {
            Setup::Bare => NEVER,
            Setup::Guard | Setup::Layer | Setup::Wrapped => LIMIT,
        };
        let (count, calls) = (group.calls.len(), group.calls.clone());
        self.ledger
            .reaches(count, calls, |life| &life.token, limit)
            .await;
    }

    /// Lets the spared answer, and counts answers and tokens.
    async fn judge(
        &mut self,
        watch: Watch,
        due: &[Group],
        spared: &[Group],
        begun: Duration,
    ) -> Result<Outcome, Failure> {
        let last = match (watch.last, due) {
            (Some(last), _) => last,
            (None, []) => self.ledger.now() - begun,
            (None, due) => {
                let tokens = due.iter().flat_map(|group| self.fired(group));
                tokens.max().unwrap_or_default().saturating_sub(begun)
            }
        };
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
        let fired = |groups: &[Group]| groups.iter().map(|group| self.fired(group).len()).sum();
        let size = |groups: &[Group]| groups.iter().map(|group| group.calls.len()).sum();
        let outcome = Outcome {
            storm: watch.storm.to_owned(),
            due: size(due),
            fired: fired(due),
            spared: size(spared),
            wrong: fired(spared),
            answers,
            last: last.as_secs_f64(),
            before: watch.before,
            peak: machine::peak()?,
            ping: watch.pinged.then_some(ping),
        };
        for group in due.iter().chain(spared) {
            self.ledger.release(group.number).cancel();
            self.tell("forget", group).await?;
            // The next storm finds nothing of this one at work.
            self.all(group, |life| &life.ended).await?;
        }
        Ok(outcome)
    }

    fn fired(&self, group: &Group) -> Vec<Duration> {
        self.ledger.times(group.calls.clone(), |life| &life.token)
    }
}

struct Watch {
    storm: &'static str,
    before: f64,
    pinged: bool,
    /// If it is not simply the last token, or now.
    last: Option<Duration>,
}

// === impl Outcome ===

impl Outcome {
    fn is_right(&self) -> bool {
        self.fired == self.due && self.wrong == 0 && self.answers == self.spared
    }

    fn row(&self, setup: Setup) -> Vec<String> {
        let ping = self.ping.map(|ping| format!("{ping:.1}"));
        vec![
            self.storm.clone(),
            setup.name().to_owned(),
            format!("{} of {}", self.fired, self.due),
            format!("{} of {}", self.wrong, self.spared),
            format!("{} of {}", self.answers, self.spared),
            format!("{:.2}", self.last),
            format!("{:.0}", self.before),
            format!("{:.0}", self.peak),
            ping.unwrap_or_else(|| "–".to_owned()),
        ]
    }
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

fn section(found: &[(Setup, Vec<Outcome>)], size: Size, load: &str) -> Section {
    let columns = [
        "storm",
        "set-up",
        "tokens that had to fire, and did",
        "tokens that must not fire, and did",
        "right answers",
        "until the last (s)",
        "memory before (MiB)",
        "peak (MiB)",
        "slowest ping (ms)",
    ];
    let storms = found.first().map_or(0, |(_, outcomes)| outcomes.len());
    let in_order = (0..storms).flat_map(|storm| {
        found
            .iter()
            .filter_map(move |(setup, outcomes)| Some((*setup, outcomes.get(storm)?)))
    });
    let ours = in_order
        .clone()
        .filter(|(setup, _)| matches!(setup, Setup::Layer | Setup::Wrapped));
    let targets = ours.flat_map(|(setup, outcome)| {
        let name = format!("{}, {}", setup.name(), outcome.storm);
        let missed = outcome.due - outcome.fired + outcome.wrong + outcome.spared - outcome.answers;
        let wrong = Target {
            what: format!("{name}: wrong tokens and answers"),
            bound: Bound::AtMost(0.0),
            measured: missed as f64,
        };
        let ping = outcome.ping.map(|measured| Target {
            what: format!("{name}: slowest ping (ms)"),
            bound: Bound::AtMost(100.0),
            measured,
        });
        [wrong].into_iter().chain(ping)
    });
    let Size {
        calls,
        bystanders,
        grace,
        busy,
    } = size;
    let (twice, grace, busy) = (2 * calls, grace.as_secs(), busy.as_secs());
    Section {
        name: "storm".to_owned(),
        title: "Thousands of clients that do the same at once".to_owned(),
        command: "benches/run storm".to_owned(),
        text: format!(
            "{calls} calls of {SESSIONS} sessions on real sockets, each on a connection of its own. First all hang up at once, \
             half with a FIN and half with an RST, where nobody waits for them (`Grace::Immediate`), while {bystanders} others stay. Then \
             all hang up and come back at once, and get their answers. Then {twice} are without a client when all their graces \
             end at once ({grace} s after the first of them); {} more come back shortly before. At last {calls} come back while both \
             workers of the server are blocked for {busy} s: their resumes wait in the accept queue, and their graces are long \
             over when the server gets to read them. The time until the last is counted from the moment at which all could have \
             happened: the hang-up, the return, the end of the first grace, the end of the block. Server and clients are processes of \
             their own; the memory is the server's, sockets and rmcp and all. Load before the run: {load}.",
            2 * bystanders
        ),
        columns: columns.map(str::to_owned).to_vec(),
        rows: in_order
            .clone()
            .map(|(setup, outcome)| outcome.row(setup))
            .collect(),
        targets: targets.collect(),
        plots: vec![peaks(found)],
    }
}

fn peaks(found: &[(Setup, Vec<Outcome>)]) -> Plot {
    let all = found.first().map(|(_, outcomes)| outcomes.as_slice());
    let categories = all.unwrap_or_default().iter();
    let points = |outcomes: &[Outcome]| {
        let peaks = outcomes.iter().map(|outcome| outcome.peak);
        (0..).map(f64::from).zip(peaks).collect()
    };
    Plot {
        name: "storm-memory".to_owned(),
        title: "Peak memory of the server in a storm".to_owned(),
        x: Axis::linear("storm"),
        y: Axis::linear("resident (MiB)"),
        kind: Kind::Bars {
            categories: categories.map(|outcome| outcome.storm.clone()).collect(),
        },
        series: found
            .iter()
            .map(|(setup, outcomes)| Series {
                name: setup.name().to_owned(),
                points: points(outcomes),
            })
            .collect(),
    }
}
