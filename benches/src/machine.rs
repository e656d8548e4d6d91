//! The process and the machine: memory, processors, load.

use std::{fs, ops::Range, thread::available_parallelism};

use anyhow::{Context, Result};
use rustix::{
    thread::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
};

/// Restricts this thread, and the threads it starts later, to one processor, see [`pin_to_any_of`].
///
/// Otherwise the scheduler would affect the figures.
pub fn pin_to(processor: usize) -> Result<()> {
    pin_to_any_of(processor..processor + 1)
}

/// Restricts this thread, and threads it starts later, to the processors among these that exist.
///
/// Does nothing if none of them exists.
pub fn pin_to_any_of(processors: Range<usize>) -> Result<()> {
    let available = available_parallelism()?.get();
    let mut only = CpuSet::new();
    for processor in processors.start..processors.end.min(available) {
        only.set(processor);
    }
    if only.count() > 0 {
        sched_setaffinity(None, &only)?;
    }
    Ok(())
}

/// Returns the mean number of runnable processes over the last minute, or `unknown`.
pub fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or("unknown").to_owned()
}

/// Returns the processor time used by this process, in seconds.
pub fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns this process's resident memory, in MiB.
pub fn resident() -> Result<f64> {
    status("VmRSS:")
}

/// Returns the highest [`resident`] since the last [`reset_peak`], in MiB.
pub fn peak() -> Result<f64> {
    status("VmHWM:")
}

pub fn reset_peak() -> Result<()> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

fn status(name: &str) -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    mebibytes(&status, name).with_context(|| format!("no {name} in /proc"))
}

/// Parses a line `name: figure kB`.
fn mebibytes(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line?.strip_suffix("kB")?.trim();
    Some(kib.parse::<f64>().ok()? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_its_line() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 512 kB\n";
        assert_eq!(mebibytes(status, "VmHWM:"), Some(2.0));
        assert_eq!(mebibytes(status, "VmRSS:"), Some(0.5));
        assert_eq!(mebibytes(status, "VmSwap:"), None);
    }
}
