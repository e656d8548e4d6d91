//! How long other work waits during bursts.
//!
//! The other work is a task that is due every millisecond, and a thread that looks up a call.
//!
//! `stalls graces | lookups | traffic SETUP SESSIONS CALLS [THREADS]`, to be run by hand. Its longest waits depend on the
//! machine, so no report contains them. Runs in process, without sockets. Without `THREADS`, all tasks share one
//! thread.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use benches::prelude::*;
use mcp_cancel_on_disconnect::{CallInfo, Calls, CancelReason, Limits, Policy, RequestId};
use tokio::{runtime::Builder, time::Instant};

const GRACE: Duration = Duration::from_secs(2);

const LIMIT: Duration = Duration::from_secs(120);

/// A runtime for the server. With 0 threads it runs on the current thread.
fn serving(threads: usize) -> std::io::Result<tokio::runtime::Runtime> {
    match threads {
        0 => Builder::new_current_thread().enable_all().build(),
        _ => Builder::new_multi_thread()
            .worker_threads(threads)
            .enable_all()
            .build(),
    }
}

fn policy(_call: &CallInfo) -> Policy {
    Policy::new().grace(Grace::After(GRACE))
}

/// Limits that no call exceeds.
fn limits(calls: usize) -> Limits {
    Limits::default()
        .calls(4 * calls)
        .detached(4 * calls)
        .detached_of_session(4 * calls)
}

struct Scene {
    ledger: Ledger,
    calls: Calls,
    clients: Vec<Client>,
    group: Group,
    streams: Vec<Stream>,
}

impl Scene {
    async fn set(setup: Setup, sessions: usize, count: usize) -> Result<Self> {
        let ledger = Ledger::new(count, 1);
        let layer = CancelOnDisconnectLayer::new()
            .policy(policy)
            .limits(limits(count));
        let calls = layer.calls();
        let transport = Tools(ledger.clone()).in_process(setup, Mode::Session, layer);
        let clients = Client::open_many(&transport, Mode::Session, sessions).await?;
        let group = ledger.group(count);
        let mut streams = Vec::with_capacity(count);
        for call in group.calls.clone() {
            let arguments = json!({ "call": call, "group": group.number });
            let client = &clients[call % sessions];
            let (mut stream, _) = client.begin(call, "work", arguments).await?;
            stream.forget();
            streams.push(stream);
        }
        ledger
            .all(group.calls.clone(), |times_of| &times_of.started, LIMIT)
            .await?;
        Ok(Self {
            ledger,
            calls,
            clients,
            group,
            streams,
        })
    }
}

/// Runs every millisecond until `stop` is set. Returns how late it ran, in milliseconds, longest first.
async fn tick(stop: Arc<AtomicBool>) -> Vec<f64> {
    let mut waits = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let at = Instant::now() + Duration::from_millis(1);
        tokio::time::sleep_until(at).await;
        waits.push(at.elapsed().as_secs_f64() * 1e3);
    }
    waits.sort_by(|a, b| b.total_cmp(a));
    waits
}

/// Lets all graces of `count` calls end at about the same time.
async fn graces(setup: Setup, sessions: usize, count: usize) -> Result<()> {
    let scene = Scene::set(setup, sessions, count).await?;
    // No other task runs in between.
    let begun = Instant::now();
    drop(scene.streams);
    let dropped = begun.elapsed();
    tokio::time::sleep(GRACE.mul_f64(0.7).saturating_sub(dropped)).await;
    let (stop, first) = (Arc::new(AtomicBool::new(false)), scene.ledger.now());
    let ticking = tokio::spawn(tick(stop.clone()));
    let due = scene.group.calls.clone();
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        if scene.calls.is_empty() || scene.ledger.now() > first + LIMIT {
            break;
        }
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    stop.store(true, Ordering::Relaxed);
    let waits = ticking.await?;
    let cancelled = scene
        .ledger
        .reaches(due.clone(), |times_of| &times_of.token, LIMIT)
        .await;
    let mut tokens = scene.ledger.times(due, |times_of| &times_of.token);
    tokens.sort();
    let from = |at: Duration| (at.saturating_sub(first)).as_secs_f64() * 1e3;
    println!(
        "graces {setup} {sessions} sessions {count} calls: dropped in {:.0} ms, {cancelled} tokens, first {:.0} last {:.0} ms, waits {:.1} {:.1} {:.1} p99 {:.2}",
        dropped.as_secs_f64() * 1e3,
        tokens.first().map_or(0.0, |at| from(*at)),
        tokens.last().map_or(0.0, |at| from(*at)),
        waits[0],
        waits[1],
        waits[2],
        waits[waits.len() / 100],
    );
    Ok(())
}

/// Runs `act`. Also returns how long look-ups by another thread took meanwhile.
fn beside<R>(calls: &Calls, session: &str, act: impl FnOnce() -> R) -> (R, Vec<f64>) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let mut waits = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                // No call has this event id. The look-up still locks the session.
                calls.resumed_elsewhere(session, "nothing");
                waits.push(begun.elapsed().as_secs_f64() * 1e3);
                thread::yield_now();
            }
            waits.sort_by(|a, b| b.total_cmp(a));
            waits
        });
        let result = act();
        stop.store(true, Ordering::Relaxed);
        (result, looking.join().unwrap_or_default())
    })
}

async fn lookups(setup: Setup, sessions: usize, count: usize) -> Result<()> {
    let scene = Scene::set(setup, sessions, count).await?;
    let session = scene.clients[0].session().context("a session")?.to_owned();
    let calls = &scene.calls;
    let show = |what: &str, took: Duration, waits: Vec<f64>| {
        println!(
            "lookups {setup} {sessions} sessions {count} calls: {what} {:.2} ms, waits {:.2?}",
            took.as_secs_f64() * 1e3,
            waits.iter().take(4).collect::<Vec<_>>(),
        );
    };
    for _ in 0..3 {
        let (took, waits) = beside(calls, &session, || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(100) {}
            begun.elapsed()
        });
        show("nothing", took, waits);
        let (took, waits) = beside(calls, &session, || {
            let begun = Instant::now();
            let seen = calls.snapshot().len();
            assert_eq!(seen, count);
            begun.elapsed()
        });
        show("snapshot", took, waits);
        let (took, waits) = beside(calls, &session, || {
            let begun = Instant::now();
            let id = RequestId::String("no".into());
            let _ = calls.find(&session, &id);
            begun.elapsed()
        });
        show("find", took, waits);
    }
    let (took, waits) = beside(calls, &session, || {
        let begun = Instant::now();
        calls.cancel_session(&session, CancelReason::Requested);
        begun.elapsed()
    });
    show("cancel_session", took, waits);
    Ok(())
}

/// Starts `count` calls, then releases all. Prints the longest starts, and the longest look-ups beside them.
async fn traffic(setup: Setup, sessions: usize, count: usize) -> Result<()> {
    let ledger = Ledger::new(count, 1);
    let layer = CancelOnDisconnectLayer::new().limits(limits(count));
    let calls = layer.calls();
    let transport = Tools(ledger.clone()).in_process(setup, Mode::Session, layer);
    let clients = Client::open_many(&transport, Mode::Session, sessions).await?;
    let group = ledger.group(count);
    let mut streams = Vec::with_capacity(count);
    let mut longest = [0.0_f64; 4];
    let session = clients[0].session().context("a session")?.to_owned();
    let begun = Instant::now();
    let runtime = tokio::runtime::Handle::current();
    let (done, mut waits) = beside(&calls, &session, || {
        tokio::task::block_in_place(|| {
            runtime.block_on(async {
                for call in group.calls.clone() {
                    let arguments = json!({ "call": call, "group": group.number });
                    let begun = Instant::now();
                    let (mut stream, _) = clients[call % sessions]
                        .begin(call, "work", arguments)
                        .await?;
                    longest[3] = begun.elapsed().as_secs_f64() * 1e3;
                    longest.sort_by(|a, b| b.total_cmp(a));
                    stream.forget();
                    streams.push(stream);
                }
                ledger.release(group.number).cancel();
                anyhow::Ok(())
            })
        })
    });
    done?;
    waits.truncate(4);
    println!(
        "traffic {setup} {sessions} sessions {count} calls: {:.1} s, longest starts {:.2?}, look-ups beside {:.2?}",
        begun.elapsed().as_secs_f64(),
        longest,
        waits,
    );
    Ok(())
}

fn main() -> Result<()> {
    let role = role();
    let mut words = role.split(' ');
    let what = words.next().context("what?")?;
    let setup: Setup = words.next().context("which set-up?")?.parse()?;
    let sessions = words.next().context("how many sessions?")?.parse()?;
    let count = words.next().context("how many calls?")?.parse()?;
    let threads = words.next().unwrap_or("0").parse()?;
    let runtime = serving(threads)?;
    let done = async move {
        match what {
            "graces" => graces(setup, sessions, count).await,
            "lookups" => lookups(setup, sessions, count).await,
            "traffic" => traffic(setup, sessions, count).await,
            _ => bail!("what is {what:?}?"),
        }
    };
    runtime.block_on(done)?;
    std::process::exit(0)
}
