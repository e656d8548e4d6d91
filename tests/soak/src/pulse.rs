//! Detects when the process did not run. A thread and a task request frequent wake-ups, and record when these are late.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::fact::{Fact, Log};

/// Interval of the wake-ups.
const WAKE_INTERVAL: Duration = Duration::from_millis(20);
/// Smaller delays are normal for timers.
const LATE: Duration = Duration::from_millis(50);

/// Records every stall of the machine or of the runtime for the lifetime of the process. Must be called in the runtime.
pub fn watch(log: &Log) {
    let thread_log = log.clone();
    thread::spawn(move || {
        loop {
            let started = Instant::now();
            thread::sleep(WAKE_INTERVAL);
            record(&thread_log, started.elapsed());
        }
    });
    let task_log = log.clone();
    tokio::spawn(async move {
        loop {
            let started = Instant::now();
            tokio::time::sleep(WAKE_INTERVAL).await;
            record(&task_log, started.elapsed());
        }
    });
}

/// Records a stall if a wake-up was late by more than [`LATE`].
fn record(log: &Log, passed: Duration) {
    let late = passed.saturating_sub(WAKE_INTERVAL);
    if late > LATE {
        let millis = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
        log.write(Fact::Stalled { millis });
    }
}
