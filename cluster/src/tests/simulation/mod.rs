//! A simulation of several instances, their clients and their directory, in one process and in simulated time.
//!
//! `cargo test -p mcp-cancel-cluster simulation` runs it for a few seconds. These environment variables change that:
//!
//! | variable | meaning |
//! |---|---|
//! | `SIMULATION_SECONDS` | how many seconds to run for; by default 3 s, and at most 60 runs |
//! | `SIMULATION_SEED` | the only seed to run, whose history is printed |
//! | `SIMULATION_FROM` | the first seed, by default 0 |
//! | `SIMULATION_FAULTS` | the kinds of faults to draw from, separated by commas, or all others after a leading `-` |
//! | `SIMULATION_CHECKS` | the checks to make, in the same form |
//! | `SIMULATION_ALL` | report every failing seed on one line, rather than failing at the first |
//!
//! One fault and one check run only if named, because the README states them as limits. The fault is `EvictSession`: a record that the
//! backend has evicted is missing for up to 70 s. The check is `SentAnswer`: an answer that was already sent when its client disconnected
//! is lost if its instance dies.
//!
//! A build with `CARGO_PROFILE_DEV_OPT_LEVEL=1` and its own target folder runs ten times as fast.
//!
//! # Why not turmoil
//!
//! turmoil polls each of its hosts on every tick, by default every millisecond, even if the host is idle. In 100 simulated seconds, six
//! hosts are polled 600,000 times. Hosts can be crashed, and the paths between them held, but no host can be suspended while time moves on,
//! and that fault is the very reason for leases.
//!
//! In this simulation a runtime is polled only when something arrives for it, or every 100 ms. A suspended process is not polled, and its
//! clock jumps when it resumes ([`time`]). The network between instances consists of byte streams with hyper at both ends ([`net`]). A
//! client's request is passed straight to the application ([`ingress`]).
//!
//! | module | job |
//! |---|---|
//! | [`time`] | runtimes, their clocks, and what passes between them |
//! | [`net`] | connections between instances |
//! | [`directory_link`] | how instances reach the directory |
//! | [`ingress`] | client connections |
//! | [`node`], [`handler`] | an instance, and its tool |
//! | [`client`] | clients |
//! | [`faults`] | what is drawn from a seed |
//! | [`watcher`] | what is checked |
//! | [`run`] | one run |

pub(crate) use self::time::wall_clock;

mod client;
mod directory_link;
mod faults;
mod handler;
mod ingress;
mod net;
mod node;
mod run;
mod time;
mod watcher;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    env, fmt, mem,
    panic::{resume_unwind, set_hook, take_hook},
    str::FromStr,
    thread,
};

use seeded::seeded;

use self::{
    faults::{FAULTS, Fault},
    run::{Outcome, Setup},
    watcher::CHECKS,
};

thread_local! {
    /// The panics in this thread's run, or `None` if the thread has no run.
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Faults and checks that are excluded unless requested, because the README states them as limits.
const LIMITS: &str = "-EvictSession,SentAnswer";

/// The maximum number of runs unless `SIMULATION_SECONDS` is set.
///
/// It makes a fast machine get the same result.
const RUNS: u64 = 60;

/// How many seconds to run for unless `SIMULATION_SECONDS` is set.
const SECONDS: u64 = 3;

#[test]
fn simulation() {
    let setup = Setup {
        faults: chosen_items("SIMULATION_FAULTS", &FAULTS.map(|(fault, _)| fault))
            .into_iter()
            .map(|fault| (fault, weight(fault)))
            .collect(),
        checks: chosen_items("SIMULATION_CHECKS", &CHECKS)
            .into_iter()
            .collect(),
    };
    let hook = take_hook();
    set_hook(Box::new(move |info| {
        let is_in_run = PANICS.with_borrow_mut(|panics| {
            let panics = panics.as_mut();
            panics.map(|panics| panics.push(info.to_string())).is_some()
        });
        if !is_in_run {
            hook(info);
        }
    }));
    if let Some(seed) = parsed_variable("SIMULATION_SEED") {
        let outcome = on_own_thread(seed, &setup);
        println!("{outcome}");
        assert!(outcome.failures.is_empty(), "seed {seed} failed");
        return;
    }
    let seconds = parsed_variable("SIMULATION_SECONDS").unwrap_or(SECONDS);
    let from = parsed_variable("SIMULATION_FROM").unwrap_or(0);
    let continues = env::var("SIMULATION_ALL").is_ok();
    let started = now();
    let (mut runs, mut requests) = (0, 0);
    let mut failed: BTreeMap<watcher::Check, usize> = BTreeMap::new();
    let max_runs = parsed_variable("SIMULATION_SECONDS").map_or(RUNS, |_: u64| u64::MAX);
    while started.elapsed().as_secs() < seconds && runs < max_runs {
        let seed = from + runs;
        let outcome = on_own_thread(seed, &setup);
        runs += 1;
        requests += outcome.requests;
        if outcome.failures.is_empty() {
            continue;
        }
        let first = &outcome.failures[0];
        assert!(continues, "{outcome}\nSIMULATION_SEED={seed}");
        *failed.entry(first.check).or_default() += 1;
        println!(
            "{:>4} s seed {seed} {:?} {:?}: {}",
            started.elapsed().as_secs(),
            first.check,
            outcome.faults,
            first.message
        );
    }
    let minute = runs as f64 * 60.0 / started.elapsed().as_secs_f64();
    println!("{runs} runs, {minute:.0} a minute, {requests} requests; failed: {failed:?}");
}

/// Runs a seed on its own thread, because `std` draws its random state once per thread.
fn on_own_thread(seed: u64, setup: &Setup) -> Outcome {
    thread::scope(|scope| {
        let run = move || {
            PANICS.set(Some(Vec::new()));
            seeded(seed, || run::run(seed, setup))
        };
        let run = thread::Builder::new().spawn_scoped(scope, run);
        run.unwrap().join().unwrap_or_else(|panic| {
            eprintln!("the simulation itself panicked in seed {seed}");
            resume_unwind(panic)
        })
    })
}

/// Takes the panics that this thread's run has had since the last call.
fn take_panics() -> Vec<String> {
    PANICS.with_borrow_mut(|panics| panics.as_mut().map(mem::take).unwrap_or_default())
}

#[expect(clippy::disallowed_types, reason = "how long the machine takes")]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}

fn weight(fault: Fault) -> u64 {
    let weight = FAULTS.iter().find(|(known, _)| *known == fault);
    weight.map_or(0, |(_, weight)| *weight)
}

fn parsed_variable<T: FromStr>(variable: &str) -> Option<T> {
    env::var(variable).ok()?.parse().ok()
}

/// Returns the items that a variable lists, or all others if it starts with `-`.
///
/// An unset variable counts as [`LIMITS`].
fn chosen_items<T: fmt::Debug + Copy>(variable: &str, items: &[T]) -> Vec<T> {
    let selection = env::var(variable).unwrap_or_else(|_| LIMITS.to_owned());
    let selection = selection.as_str();
    let (is_excluding, selection) = match selection.strip_prefix('-') {
        Some(selection) => (true, selection),
        None => (false, selection),
    };
    let selection: BTreeSet<&str> = selection.split(',').map(str::trim).collect();
    let items = items.iter().copied();
    items
        .filter(|item| selection.contains(format!("{item:?}").as_str()) != is_excluding)
        .collect()
}
