//! The heap that a call in flight takes, and whether all of it comes back.
//!
//! `memory [--quick]`. In process, without sockets, each set-up in a process of its own. A counting allocator knows what is
//! live; a paused clock lets graces and the memory of ended calls go by.

use std::{alloc::System, ops::Range, time::Duration};

use benches::{
    child::Child,
    client::{Client, Stream},
    paused_runtime,
    prelude::*,
    sockets::{
        ledger::{Group, Ledger},
        tools::{Tools, done},
    },
};
use cap::Cap;
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::advance;

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

struct Bench {
    setup: Setup,
    mode: Mode,
    ledger: Ledger,
    sessions: Vec<Client>,
}

struct Found {
    mode: Mode,
    setup: Setup,
    heap: Heap,
}

/// Bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Heap {
    /// Of a call whose client is there.
    attached: f64,
    /// Of one whose client has gone.
    detached: f64,
    /// Live before the first storm, and after each of them.
    storms: Vec<usize>,
}

fn main() -> Result<()> {
    let (in_flight, of_a_storm) = match is_quick() {
        true => (2_000, 500),
        false => (100_000, 10_000),
    };
    let size = Size {
        in_flight,
        of_a_storm,
    };
    match role().split_once(' ') {
        Some((setup, mode)) => {
            let found = measure(setup.parse()?, mode.parse()?, size);
            let found = paused_runtime()?.block_on(found)?;
            println!("{}", serde_json::to_string(&found)?);
            Ok(())
        }
        None => runtime()?.block_on(compare(size)),
    }
}

/// Measures all, each in a process of its own.
async fn compare(size: Size) -> Result<()> {
    let load = machine::load();
    let mut found: Vec<Found> = Vec::new();
    for mode in Mode::iter() {
        for setup in Setup::iter() {
            eprintln!("{mode}, {setup}");
            let heap = Child::found(&format!("{setup} {mode}")).await?;
            found.push(Found { mode, setup, heap });
        }
    }
    let mut section = Section::new(
        "memory",
        &[
            ("in_flight", &size.in_flight),
            ("sessions", &SESSIONS),
            ("storms", &STORMS),
            ("of_a_storm", &size.of_a_storm),
            ("full_after", &FULL_AFTER),
            ("load", &load),
        ],
    )?;
    for own in &found {
        let is_bare = |its: &&Found| (its.mode, its.setup) == (own.mode, Setup::Bare);
        let bare = found.iter().find(is_bare).context("no bare rmcp")?;
        section.rows.push(own.row(bare, size));
        section.targets.extend(own.targets(bare, size));
    }
    section.plots = Mode::iter().map(|mode| lines(&found, mode)).collect();
    section.publish()
}

fn lines(found: &[Found], mode: Mode) -> Plot {
    let (name, title) = (
        format!("memory-{mode}"),
        format!("Live heap after each storm, {mode}"),
    );
    let series = Setup::series(|setup| {
        let its = move |found: &&Found| (found.mode, found.setup) == (mode, setup);
        let bytes = found
            .iter()
            .filter(its)
            .flat_map(|found| &found.heap.storms);
        bytes.map(|bytes| *bytes as f64 / 1_048_576.0)
    });
    let (x, y) = (Axis::linear("storms"), Axis::linear("live (MiB)"));
    Plot::lines(&name, &title, x, y, series)
}

async fn measure(setup: Setup, mode: Mode, size: Size) -> Result<Heap> {
    let calls = 2 * size.in_flight + STORMS * size.of_a_storm + 2 * SESSIONS;
    let ledger = Ledger::new(calls, 4 * STORMS + 4);
    let layer = CancelOnDisconnectLayer::new();
    let way = Tools::new(&ledger).on_a_paused_clock(setup, mode, layer);
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(Client::open(way.clone(), mode).await?);
    }
    let mut bench = Bench {
        setup,
        mode,
        ledger,
        sessions,
    };
    // What every session allocates with its first call.
    let (group, streams) = bench.begin(SESSIONS).await?;
    bench.answer(&group, streams).await?;
    bench.rest(ALL_IS_FORGOTTEN).await;

    let before = HEAP.allocated();
    let (group, streams) = bench.begin(size.in_flight).await?;
    let attached = HEAP.allocated() - before;
    let own = streams.capacity() * size_of::<Stream>();
    let detached = match mode {
        Mode::Session => {
            drop(streams);
            bench.settle().await;
            HEAP.allocated() - before
        }
        // Without sessions nobody waits for anybody.
        Mode::Stateless => {
            bench.answer(&group, streams).await?;
            0
        }
    };
    bench.ledger.release(group.number).cancel();
    bench.ended(group.calls).await?;
    bench.rest(GRACE_IS_OVER + ALL_IS_FORGOTTEN).await;

    let mut storms = vec![HEAP.allocated()];
    for _ in 0..STORMS {
        bench.storm(size.of_a_storm).await?;
        storms.push(HEAP.allocated());
    }
    let per_call = |bytes: usize| bytes as f64 / size.in_flight as f64;
    Ok(Heap {
        attached: per_call(attached - own),
        detached: per_call(detached),
        storms,
    })
}

// === impl Bench ===

impl Bench {
    /// Starts calls, each with an event id where there are any, and waits until all are at work.
    async fn begin(&mut self, count: usize) -> Result<(Group, Vec<Stream>)> {
        let group = self.ledger.group(count);
        let mut streams = Vec::with_capacity(count);
        for call in group.calls.clone() {
            let client = &self.sessions[call % SESSIONS];
            let arguments = json!({ "call": call, "group": group.number });
            let mut stream = client.begin(call, "work", arguments).await?;
            if self.mode == Mode::Session {
                stream.event_id().await?;
            }
            stream.forget();
            streams.push(stream);
        }
        self.settle().await;
        let calls = group.calls.clone();
        let started = self.ledger.all(calls, |life| &life.started, Duration::ZERO);
        started.await?;
        Ok((group, streams))
    }

    async fn answer(&mut self, group: &Group, streams: Vec<Stream>) -> Result<()> {
        self.ledger.release(group.number).cancel();
        for mut stream in streams {
            stream.until(&done(0)[..5]).await?;
        }
        Ok(())
    }

    /// A third hangs up and does not come back, a third stays, a third hangs up and comes back.
    async fn storm(&mut self, count: usize) -> Result<()> {
        let (lost, leaving) = self.begin(count / 3).await?;
        drop(leaving);
        let (stays, staying) = self.begin(count / 3).await?;
        let (returns, cut) = self.begin(count - 2 * (count / 3)).await?;
        drop(cut);
        self.settle().await;
        if self.mode == Mode::Session {
            let mut back = Vec::new();
            for call in returns.calls.clone() {
                // Its first event, as rmcp counts.
                let event = format!("0/{}", call / SESSIONS);
                back.push(self.sessions[call % SESSIONS].resume(&event).await?);
            }
            match self.setup {
                // It has destroyed these calls.
                Setup::Guard => drop(back),
                _ => self.answer(&returns, back).await?,
            }
        }
        self.answer(&stays, staying).await?;
        self.rest(GRACE_IS_OVER).await;
        // Who nobody cancels.
        self.ledger.release(lost.number).cancel();
        self.ledger.release(returns.number).cancel();
        self.ended(lost.calls.start..returns.calls.end).await?;
        self.rest(ALL_IS_FORGOTTEN).await;
        Ok(())
    }

    async fn ended(&self, calls: Range<usize>) -> Result<()> {
        self.settle().await;
        let ended = self.ledger.all(calls, |life| &life.ended, Duration::ZERO);
        ended.await
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

// === impl Found ===

impl Found {
    fn row(&self, bare: &Self, size: Size) -> Vec<String> {
        let detached = match self.mode {
            Mode::Session => format!("{:.0}", self.heap.detached - bare.heap.detached),
            Mode::Stateless => "–".to_owned(),
        };
        cells![
            self.mode,
            self.setup,
            format!("{:.0}", self.heap.attached),
            format!("{:.0}", self.heap.attached - bare.heap.attached),
            detached,
            format!("{:.3}", self.growth(size)),
        ]
    }

    fn targets(&self, bare: &Self, size: Size) -> Vec<Target> {
        let Self { mode, setup, .. } = self;
        let most = match (setup, mode) {
            (Setup::Wrapped, Mode::Session) => 1_024.0,
            // Without sessions the session manager is not in the way.
            (Setup::Layer | Setup::Wrapped, _) => 4_096.0,
            (Setup::Bare | Setup::Guard, _) => return Vec::new(),
        };
        let added = format!("{setup}, {mode}: added to a call in flight (B)");
        let left = format!("{setup}, {mode}: left behind by a call (B)");
        vec![
            Target::at_most(most, added, self.heap.attached - bare.heap.attached),
            Target::at_most(1.0, left, self.growth(size)),
        ]
    }

    /// Bytes a call, from when all has its full size to the end of the last storm.
    fn growth(&self, size: Size) -> f64 {
        let (full, last) = (self.heap.storms[FULL_AFTER], self.heap.storms[STORMS]);
        let calls = (STORMS - FULL_AFTER) * size.of_a_storm;
        (last as f64 - full as f64) / calls as f64
    }
}
