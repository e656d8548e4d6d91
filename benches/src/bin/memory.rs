//! How much heap a call in flight takes, and whether all of it is freed.
//!
//! `memory [--quick]`. Runs in process, without sockets, with one process per set-up. A counting allocator measures
//! live bytes, and a paused clock lets grace periods and retained calls expire.

use std::{alloc::System, collections::BTreeMap, ops::Range};

use benches::{child::Child, prelude::*};
use cap::Cap;
use serde::{Deserialize, Serialize};
use tokio::time::advance;

#[global_allocator]
static HEAP: Cap<System> = Cap::new(System, usize::MAX);

const SESSIONS: usize = 100;
const STORMS: usize = 10;

/// The number of storms after which a session's memory has reached its full size.
const FULL_AFTER: usize = 5;

/// The grace period is 20 s.
const GRACE_EXPIRED: Duration = Duration::from_secs(21);

/// Ended calls are retained for 60 s.
const RETENTION: Duration = Duration::from_secs(61);

struct Bench {
    setup: Setup,
    mode: Mode,
    ledger: Ledger,
    sessions: Vec<Client>,
}

/// One set-up's heap, in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Heap {
    /// Per call whose client is connected.
    attached: f64,
    /// Per call whose client has disconnected.
    detached: f64,
    /// Live bytes before the first storm and after each one.
    storms: Vec<usize>,
}

type Heaps = BTreeMap<(Mode, Setup), Heap>;

fn main() -> Result<()> {
    let role = role();
    let Some((setup, mode)) = role.split_once(' ') else {
        return runtime()?.block_on(compare());
    };
    let heap = measure(setup.parse()?, mode.parse()?);
    let heap = paused_runtime()?.block_on(heap)?;
    println!("{}", serde_json::to_string(&heap)?);
    Ok(())
}

/// Returns the number of calls in flight and the number of calls in a storm.
fn sizes() -> (usize, usize) {
    if is_quick() {
        (2_000, 500)
    } else {
        (100_000, 10_000)
    }
}

/// Measures each set-up in a process of its own.
async fn compare() -> Result<()> {
    let (load, (in_flight, of_a_storm)) = (machine::load(), sizes());
    let mut heaps = Heaps::new();
    for mode in Mode::iter() {
        for setup in Setup::iter() {
            eprintln!("{mode}, {setup}");
            let heap = Child::result(&format!("{setup} {mode}")).await?;
            heaps.insert((mode, setup), heap);
        }
    }
    let values = json!({
        "in_flight": in_flight, "sessions": SESSIONS, "storms": STORMS, "of_a_storm": of_a_storm,
        "full_after": FULL_AFTER, "load": load,
    });
    let mut section = Section::new("memory", values)?;
    for (&(mode, setup), heap) in &heaps {
        let bare = &heaps[&(mode, Setup::Bare)];
        let (added, left) = (heap.attached - bare.attached, heap.growth());
        section.rows.push(cells![
            mode,
            setup,
            format!("{:.0}", heap.attached),
            format!("{added:.0}"),
            match mode {
                Mode::Session => format!("{:.0}", heap.detached - bare.detached),
                Mode::Stateless => "–".to_owned(),
            },
            format!("{left:.3}"),
        ]);
        if setup.is_ours() {
            // Without sessions, the session manager is not involved.
            let is_wrapped = (setup, mode) == (Setup::Wrapped, Mode::Session);
            let most = AtMost(if is_wrapped { 1_024.0 } else { 4_096.0 });
            let what = format!("{setup}, {mode}: added to a call in flight (B)");
            section.targets.push(Target::new(most, what, added));
            let what = format!("{setup}, {mode}: left behind by a call (B)");
            section.targets.push(Target::new(AtMost(1.0), what, left));
        }
    }
    section.publish()
}

async fn measure(setup: Setup, mode: Mode) -> Result<Heap> {
    let (in_flight, of_a_storm) = sizes();
    let calls = 2 * in_flight + STORMS * of_a_storm + 2 * SESSIONS;
    let ledger = Ledger::new(calls, 4 * STORMS + 4);
    let layer = CancelOnDisconnectLayer::new();
    let transport = Tools(ledger.clone()).in_process(setup, mode, layer);
    let sessions = Client::open_many(&transport, mode, SESSIONS).await?;
    let mut bench = Bench {
        setup,
        mode,
        ledger,
        sessions,
    };
    // A session's first call allocates some memory for the session.
    let (group, streams) = bench.begin(SESSIONS).await?;
    bench.answer(&group, streams).await?;
    bench.advance_by(RETENTION).await;

    let before = HEAP.allocated();
    let (group, streams) = bench.begin(in_flight).await?;
    let attached = HEAP.allocated() - before;
    let of_client = streams.capacity() * size_of::<Stream>();
    let detached = match mode {
        Mode::Session => {
            drop(streams);
            bench.settle().await;
            HEAP.allocated() - before
        }
        // Without sessions, there is no grace period.
        Mode::Stateless => {
            bench.answer(&group, streams).await?;
            0
        }
    };
    bench.ledger.release(group.number).cancel();
    bench
        .expect_all(group.calls, |times_of| &times_of.ended)
        .await?;
    bench.advance_by(GRACE_EXPIRED + RETENTION).await;

    let mut storms = vec![HEAP.allocated()];
    for _ in 0..STORMS {
        bench.storm(of_a_storm).await?;
        storms.push(HEAP.allocated());
    }
    let per_call = |bytes: usize| bytes as f64 / in_flight as f64;
    Ok(Heap {
        attached: per_call(attached - of_client),
        detached: per_call(detached),
        storms,
    })
}

// === impl Bench ===

impl Bench {
    /// Starts calls and waits until all their handlers are running. Frees what the clients have read.
    async fn begin(&mut self, count: usize) -> Result<(Group, Vec<Stream>)> {
        let group = self.ledger.group(count);
        let mut streams = Vec::with_capacity(count);
        for call in group.calls.clone() {
            let client = &self.sessions[call % SESSIONS];
            let arguments = json!({ "call": call, "group": group.number });
            let (mut stream, _) = client.begin(call, "work", arguments).await?;
            stream.forget();
            streams.push(stream);
        }
        self.expect_all(group.calls.clone(), |times_of| &times_of.started)
            .await?;
        Ok((group, streams))
    }

    /// Releases a group's handlers. Returns once each client has received the start of its answer.
    async fn answer(&mut self, group: &Group, streams: Vec<Stream>) -> Result<()> {
        self.ledger.release(group.number).cancel();
        for mut stream in streams {
            stream.until(&done(0)[..5]).await?;
        }
        Ok(())
    }

    /// A third of the clients disconnect for good, a third stay, and a third resume.
    ///
    /// In stateless mode, the last third disconnect for good too. Returns once no call is retained any more.
    async fn storm(&mut self, count: usize) -> Result<()> {
        let (never_return, disconnecting) = self.begin(count / 3).await?;
        drop(disconnecting);
        let (stays, connected) = self.begin(count / 3).await?;
        let (returns, cut) = self.begin(count - 2 * (count / 3)).await?;
        drop(cut);
        self.settle().await;
        if self.mode == Mode::Session {
            let mut back = Vec::new();
            for call in returns.calls.clone() {
                // The id of its first event, as rmcp numbers them.
                let event = format!("0/{}", call / SESSIONS);
                back.push(self.sessions[call % SESSIONS].resume(&event).await?);
            }
            // The guard has already destroyed these calls.
            if self.setup != Setup::Guard {
                self.answer(&returns, back).await?;
            }
        }
        self.answer(&stays, connected).await?;
        self.advance_by(GRACE_EXPIRED).await;
        // This ends the calls that the set-up has not cancelled.
        self.ledger.release(never_return.number).cancel();
        self.ledger.release(returns.number).cancel();
        let calls = never_return.calls.start..returns.calls.end;
        self.expect_all(calls, |times_of| &times_of.ended).await?;
        self.advance_by(RETENTION).await;
        Ok(())
    }

    /// Fails unless every call has reached this moment.
    async fn expect_all(&self, calls: Range<usize>, which: SelectStamp) -> Result<()> {
        self.settle().await;
        self.ledger.expect_all(calls, which, Duration::ZERO).await
    }

    /// Runs all tasks until none is ready.
    async fn settle(&self) {
        // A paused clock only moves while the runtime is idle.
        tokio::time::sleep(Duration::from_millis(1)).await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    /// Advances the clock in steps, because a deadline that is handled late gets postponed.
    async fn advance_by(&self, time: Duration) {
        let step = Duration::from_millis(500);
        for _ in 0..time.as_millis() / step.as_millis() {
            self.settle().await;
            advance(step).await;
        }
        self.settle().await;
    }
}

// === impl Heap ===

impl Heap {
    /// Returns how many bytes each call has added since memory reached its full size.
    fn growth(&self) -> f64 {
        let (full, last) = (self.storms[FULL_AFTER], self.storms[STORMS]);
        let calls = (STORMS - FULL_AFTER) * sizes().1;
        (last as f64 - full as f64) / calls as f64
    }
}
