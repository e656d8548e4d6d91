//! Signals, which end the program in time, end it at once, or do nothing.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::sleep;

use crate::{
    started::{Setup, Started},
    table::{Phase, run},
};

/// How long a shutdown that does not wait for a client may take on a loaded machine.
const AT_ONCE: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Starts a drain, or ends the program at once if it is already draining.
    Ends(Signal),
    /// The terminal closes.
    HangsUp,
    /// Starts a drain, and then ends the program at once.
    Twice(Signal),
    ChangesNothing(Signal),
    StopsAndContinues,
    /// A SIGHUP to a program started by `nohup`.
    IgnoredHangup,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_the_program_in_time_or_changes_nothing() {
    let faults = [
        Fault::HangsUp,
        Fault::Ends(Signal::QUIT),
        Fault::Ends(Signal::INT),
        Fault::Ends(Signal::TERM),
        Fault::Twice(Signal::TERM),
        Fault::Twice(Signal::INT),
        Fault::Twice(Signal::QUIT),
        Fault::ChangesNothing(Signal::USR1),
        Fault::ChangesNothing(Signal::USR2),
        Fault::ChangesNothing(Signal::PIPE),
        Fault::StopsAndContinues,
        Fault::IgnoredHangup,
    ];
    run(&faults, cell).await;
}

async fn cell(fault: Fault, phase: Phase) {
    let mut setup = Setup {
        // The drain waits for a disconnected client, and for answers.
        options: &["--drain=5s"],
        ..Setup::default()
    };
    if matches!(fault, Fault::IgnoredHangup) {
        setup.preparation = "trap '' HUP";
    }
    let mut started = Started::in_phase(setup, phase).await;
    let is_draining = phase == Phase::Draining;
    match fault {
        Fault::Ends(signal) if is_draining => {
            started.signal(signal);
            started.ends_within(AT_ONCE).await;
        }
        Fault::Ends(signal) => {
            started.signal(signal);
            ends_after_its_calls(&mut started, phase).await;
        }
        Fault::HangsUp => {
            started.signal(Signal::HUP);
            // A program without a call may already have exited, but its log can still be read.
            started.reach_log("waiting up to").await;
            started.signal(Signal::HUP);
            ends_after_its_calls(&mut started, phase).await;
        }
        Fault::Twice(signal) => {
            started.signal(signal);
            if !is_draining {
                started.reach_log("waiting up to").await;
                started.signal(signal);
            }
            started.ends_within(AT_ONCE).await;
        }
        Fault::ChangesNothing(signal) => {
            started.signal(signal);
            keeps_serving(&mut started, phase).await;
        }
        Fault::StopsAndContinues => {
            started.signal(Signal::STOP);
            sleep(Duration::from_millis(500)).await;
            started.signal(Signal::CONT);
            keeps_serving(&mut started, phase).await;
        }
        Fault::IgnoredHangup => {
            started.signal(Signal::HUP);
            keeps_serving(&mut started, phase).await;
        }
    }
}

/// Checks that the program answers the calls in flight before it exits.
///
/// A client that has disconnected can resume to get its answer.
async fn ends_after_its_calls(started: &mut Started, phase: Phase) {
    if matches!(
        phase,
        Phase::CallInFlight | Phase::ClientAway | Phase::Draining
    ) {
        started.client_is_served(phase).await;
    }
    started.drains().await;
    assert!(started.logged().contains("drained"), "{}", started.logged());
}

/// Checks that this phase's client is served, and that only SIGTERM ends the program.
async fn keeps_serving(started: &mut Started, phase: Phase) {
    started.client_is_served(phase).await;
    if phase == Phase::Draining {
        return started.drains().await;
    }
    started.session_leaves_no_state().await;
    started.ends_by_sigterm().await;
}
