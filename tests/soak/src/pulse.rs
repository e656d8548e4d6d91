//! Measures when the process did not run: a thread and a task that want to be woken often, and say when they were not.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::fact::{Fact, Log};

const BEAT: Duration = Duration::from_millis(20);
/// Less is what timers do.
const LATE: Duration = Duration::from_millis(50);

/// Writes down every stall, of the machine or of the runtime, as long as the process lives. To be called in the runtime.
pub fn watch(log: &Log) {
    let of_thread = log.clone();
    thread::spawn(move || {
        loop {
            let begun = Instant::now();
            thread::sleep(BEAT);
            note(&of_thread, begun.elapsed());
        }
    });
    let of_task = log.clone();
    tokio::spawn(async move {
        loop {
            let begun = Instant::now();
            tokio::time::sleep(BEAT).await;
            note(&of_task, begun.elapsed());
        }
    });
}

fn note(log: &Log, passed: Duration) {
    let late = passed.saturating_sub(BEAT);
    if late > LATE {
        let millis = u64::try_from(late.as_millis()).unwrap_or(u64::MAX);
        log.write(Fact::Stalled { millis });
    }
}
