//! The heap that a call in flight takes, and whether all of it comes back.
//!
//! `memory [--quick]`. In process, without sockets, each set-up in a process of its own. A counting allocator knows what is
//! live; a paused clock lets graces and the memory of ended calls go by.

use std::{alloc::System, ops::Range, time::Duration};

use cap::Cap;
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use mcp_cancel_on_disconnect_benches::{
    Failure,
    report::{Axis, Bound, Kind, Plot, Section, Series, Target},
    setup::{Mode, Setup},
    sockets::{
        child::Child,
        client::{Client, Stream, Way},
        ledger::Ledger,
        machine,
        tools::{Tools, done},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::{runtime::Builder, time::advance};

#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

const SESSIONS: usize = 100;
const STORMS: usize = 10;

/// After how many storms what is kept as long as a session lives has its full size.
const FULL_AFTER: usize = 5;

/// The grace is 20 s.
const GRACE_IS_OVER: Duration = Duration::from_secs(21);

/// Ended calls are remembered for 60 s.
const ALL_IS_FORGOTTEN: Duration = Duration::from_secs(61);

#[derive(Debug, Clone, Copy)]
struct Size {
    in_flight: usize,
    of_a_storm: usize,
}

const FULL: Size = Size {
    in_flight: 100_000,
    of_a_storm: 10_000,
};

const QUICK: Size = Size {
    in_flight: 2_000,
    of_a_storm: 500,
};

/// Bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Found {
    /// Of a call whose client is there.
    attached: f64,
    /// Of one whose client has gone.
    detached: f64,
    /// Live before the first storm, and after each of them.
    storms: Vec<usize>,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let quick = words.contains(&"--quick");
    let size = if quick { QUICK } else { FULL };
    match words.as_slice() {
        ["serve", setup, mode, ..] => {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build()?;
            let setup = Setup::ALL.into_iter().find(|it| it.name() == *setup);
            let setup = setup.ok_or("no such set-up")?;
            let mode = match *mode {
                "session" => Mode::Session,
                _ => Mode::Stateless,
            };
            let found = runtime.block_on(measure(setup, mode, size))?;
            println!("{}", serde_json::to_string(&found)?);
            Ok(())
        }
        [] | ["--quick"] => {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(compare(size, quick))
        }
        _ => Err("usage: memory [--quick]".into()),
    }
}

async fn compare(size: Size, quick: bool) -> Result<(), Failure> {
    let load = machine::load();
    let mut found = Vec::new();
    for mode in ["session", "stateless"] {
        for setup in Setup::ALL {
            eprintln!("{mode}, {}", setup.name());
            let mut arguments = vec!["serve", setup.name(), mode];
            arguments.extend(quick.then_some("--quick"));
            let answer = Child::start(&arguments)?.answer().await?;
            let bytes: Found = serde_json::from_str(&answer)?;
            found.push((mode, setup, bytes));
        }
    }
    section(&found, size, &load).publish()?;
    Ok(())
}

async fn measure(setup: Setup, mode: Mode, size: Size) -> Result<Found, Failure> {
    let calls = 2 * size.in_flight + STORMS * size.of_a_storm + 2 * SESSIONS;
    let ledger = Ledger::new(calls, 4 * STORMS + 4);
    let server =
        Tools::new(&ledger).served_on_a_paused_clock(setup, mode, CancelOnDisconnectLayer::new());
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(Client::open(Way::Direct(server.clone()), mode).await?);
    }
    let mut bench = Bench {
        setup,
        mode,
        ledger,
        sessions,
        next: 0,
        groups: 0,
    };
    // What every session allocates with its first call.
    let (group, streams) = bench.begin(SESSIONS).await?;
    bench.answer(group, streams).await?;
    bench.rest(ALL_IS_FORGOTTEN).await;

    let before = HEAP.allocated();
    let first = bench.next;
    let (group, streams) = bench.begin(size.in_flight).await?;
    let attached = HEAP.allocated() - before;
    let own = streams.capacity() * size_of::<Stream>();
    let (group, detached) = match mode {
        Mode::Session => {
            drop(streams);
            bench.settle().await;
            (group, HEAP.allocated() - before)
        }
        // Without sessions nobody waits for anybody.
        Mode::Stateless => {
            bench.answer(group, streams).await?;
            (group, 0)
        }
    };
    bench.ledger.release(group).cancel();
    bench.ended(first..bench.next).await?;
    bench.rest(GRACE_IS_OVER + ALL_IS_FORGOTTEN).await;

    let mut storms = vec![HEAP.allocated()];
    for _ in 0..STORMS {
        bench.storm(size.of_a_storm).await?;
        storms.push(HEAP.allocated());
    }
    let per_call = |bytes: usize| bytes as f64 / size.in_flight as f64;
    Ok(Found {
        attached: per_call(attached - own),
        detached: per_call(detached),
        storms,
    })
}

struct Bench {
    setup: Setup,
    mode: Mode,
    ledger: Ledger,
    sessions: Vec<Client>,
    next: usize,
    groups: usize,
}

// === impl Bench ===

impl Bench {
    /// Starts calls, each with an event id where there are any, and waits until all are at work.
    async fn begin(&mut self, count: usize) -> Result<(usize, Vec<Stream>), Failure> {
        let group = self.groups;
        let first = self.next;
        self.groups += 1;
        self.next += count;
        let mut streams = Vec::with_capacity(count);
        for call in first..self.next {
            let client = &self.sessions[call % SESSIONS];
            let arguments = json!({ "call": call, "group": group });
            let mut stream = client.call(call, "work", arguments).await?;
            if self.mode == Mode::Session {
                stream.event_id().await?;
            }
            stream.forget();
            streams.push(stream);
        }
        self.settle().await;
        let started = self.ledger.times(first..self.next, |life| &life.started);
        match started.len() == count {
            true => Ok((group, streams)),
            false => Err("not all calls have started".into()),
        }
    }

    async fn answer(&mut self, group: usize, streams: Vec<Stream>) -> Result<(), Failure> {
        self.ledger.release(group).cancel();
        for mut stream in streams {
            stream.until(&done(0)[..5]).await?;
        }
        Ok(())
    }

    /// A third hangs up and does not come back, a third stays, a third hangs up and comes back.
    async fn storm(&mut self, count: usize) -> Result<(), Failure> {
        let first = self.next;
        let (lost, leaving) = self.begin(count / 3).await?;
        drop(leaving);
        let (stays, staying) = self.begin(count / 3).await?;
        let from = self.next;
        let (returns, cut) = self.begin(count - 2 * (count / 3)).await?;
        drop(cut);
        self.settle().await;
        if self.mode == Mode::Session {
            let mut back = Vec::new();
            for call in from..self.next {
                let client = &self.sessions[call % SESSIONS];
                back.push(client.resume(&self.event(call)).await?);
            }
            match self.setup {
                // It has destroyed these calls.
                Setup::Guard => drop(back),
                _ => self.answer(returns, back).await?,
            }
        }
        self.answer(stays, staying).await?;
        self.rest(GRACE_IS_OVER).await;
        // Who nobody cancels.
        self.ledger.release(lost).cancel();
        self.ledger.release(returns).cancel();
        self.ended(first..self.next).await?;
        self.rest(ALL_IS_FORGOTTEN).await;
        Ok(())
    }

    /// The first event of a call, as rmcp counts.
    fn event(&self, call: usize) -> String {
        format!("0/{}", call / SESSIONS)
    }

    async fn ended(&self, calls: Range<usize>) -> Result<(), Failure> {
        self.settle().await;
        let ended = self.ledger.times(calls.clone(), |life| &life.ended).len();
        match ended == calls.len() {
            true => Ok(()),
            false => Err(format!("{ended} of {} calls have ended", calls.len()).into()),
        }
    }

    /// Lets all tasks run until none has anything to do.
    async fn settle(&self) {
        // A paused clock moves only when the runtime is idle.
        tokio::time::sleep(Duration::from_millis(1)).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    /// Lets time go by, in steps: a deadline that is noticed late is put off.
    async fn rest(&self, time: Duration) {
        let step = Duration::from_millis(500);
        for _ in 0..time.as_millis() / step.as_millis() {
            self.settle().await;
            advance(step).await;
        }
        self.settle().await;
    }
}

fn section(found: &[(&str, Setup, Found)], size: Size, load: &str) -> Section {
    let bare = |mode: &str| {
        let mut bare = found.iter().filter(|(its, ..)| *its == mode);
        bare.find(|(_, setup, _)| *setup == Setup::Bare)
            .map(|(.., found)| found)
    };
    let mut rows = Vec::new();
    let mut targets = Vec::new();
    for (mode, setup, own) in found {
        let Some(bare) = bare(mode) else { continue };
        let added = own.attached - bare.attached;
        let detached = own.detached - bare.detached;
        let session = *mode == "session";
        let span = own.growth(size);
        rows.push(vec![
            (*mode).to_owned(),
            setup.name().to_owned(),
            format!("{:.0}", own.attached),
            format!("{added:.0}"),
            if session {
                format!("{detached:.0}")
            } else {
                "–".to_owned()
            },
            format!("{span:.3}"),
        ]);
        let name = format!("{}, {mode}", setup.name());
        let most = match setup {
            Setup::Wrapped if session => 1_024.0,
            // Without sessions the session manager is not in the way.
            Setup::Layer | Setup::Wrapped => 4_096.0,
            Setup::Bare | Setup::Guard => continue,
        };
        targets.push(Target {
            what: format!("{name}: added to a call in flight (B)"),
            bound: Bound::AtMost(most),
            measured: added,
        });
        targets.push(Target {
            what: format!("{name}: left behind by a call (B)"),
            bound: Bound::AtMost(1.0),
            measured: span,
        });
    }
    let columns = [
        "mode",
        "set-up",
        "a call in flight (B)",
        "beyond bare (B)",
        "beyond bare, client gone (B)",
        "left behind by a call (B)",
    ];
    let Size {
        in_flight,
        of_a_storm,
    } = size;
    Section {
        name: "memory".to_owned(),
        title: "Heap of a call, and what stays of it".to_owned(),
        command: "benches/run memory".to_owned(),
        text: format!(
            "Bytes that a counting allocator knows to be live, in process, with {in_flight} calls of {SESSIONS} sessions in flight, each \
             divided by their number: the maps' spare room is in it. The response's body is held by the client and was read up to \
             the first event. Then {STORMS} storms of {of_a_storm} calls: a third of the clients hang up and do not come back (what \
             nobody cancels is released later), a third get their answer, a third come back and get theirs. After each the grace and the \
             60 s for which ended calls are remembered go by, on a paused clock. What is live then must not grow: the last column is the \
             slope from the end of storm {FULL_AFTER} to the last's, divided by the calls between. By then a session has room for all that \
             it remembers of its cancelled calls: 256, as long as it lives. Load before the run: {load}."
        ),
        columns: columns.map(str::to_owned).to_vec(),
        rows,
        targets,
        plots: ["session", "stateless"]
            .map(|mode| lines(found, mode))
            .to_vec(),
    }
}

fn lines(found: &[(&str, Setup, Found)], mode: &str) -> Plot {
    let series = found.iter().filter(|(its, ..)| *its == mode);
    Plot {
        name: format!("memory-{mode}"),
        title: format!("Live heap after each storm, {mode}"),
        x: Axis::linear("storms"),
        y: Axis::linear("live (MiB)"),
        kind: Kind::Lines,
        series: series
            .map(|(_, setup, found)| Series {
                name: setup.name().to_owned(),
                points: (0..)
                    .map(f64::from)
                    .zip(found.storms.iter().map(|bytes| *bytes as f64 / 1_048_576.0))
                    .collect(),
            })
            .collect(),
    }
}

// === impl Found ===

impl Found {
    /// Bytes a call, from when all has its full size to the end of the last storm.
    fn growth(&self, size: Size) -> f64 {
        let (Some(full), Some(last)) = (self.storms.get(FULL_AFTER), self.storms.last()) else {
            return f64::NAN;
        };
        let calls = (STORMS - FULL_AFTER) * size.of_a_storm;
        (*last as f64 - *full as f64) / calls as f64
    }
}
