//! Detects when the process was not running. A thread and a task ask to be woken frequently, and record when they are
//! woken late.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::fact::{Fact, Log};

/// How often to wake up.
const WAKE_INTERVAL: Duration = Duration::from_millis(20);
/// Smaller delays are normal for timers.
const LATE: Duration = Duration::from_millis(50);

/// Records every stall of the machine or the runtime for as long as the process lives. Must be called within the runtime.
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

/// Records a stall if a wake-up was more than [`LATE`] late.
fn record(log: &Log, passed: Duration) {
    let late = passed.saturating_sub(WAKE_INTERVAL);
    if late > LATE {
        let millis = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
        log.write(Fact::Stalled { millis });
    }
}
