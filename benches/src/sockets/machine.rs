//! The process and the machine: descriptors, memory, processors, load.

use std::{fs, io};

use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CpuSet, sched_setaffinity},
};

use crate::Failure;

/// Allows itself `count` open files, or says what is missing.
pub fn allow_files(count: u64) -> Result<(), Failure> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= count) {
        return Ok(());
    }
    if maximum.is_some_and(|maximum| maximum < count) {
        let (most, needed) = (maximum.unwrap_or_default(), count);
        return Err(format!("this needs {needed} open files, and the hard limit is {most}: raise it (ulimit -Hn), or run with --quick").into());
    }
    let raised = Rlimit {
        current: Some(count),
        maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}

/// Keeps this process to one processor, if there are two: else the scheduler's choices are in the figures.
pub fn stay_on(processor: usize) -> Result<(), Failure> {
    if std::thread::available_parallelism()?.get() > 1 {
        let mut only = CpuSet::new();
        only.set(processor);
        sched_setaffinity(None, &only)?;
    }
    Ok(())
}

/// The processes that want to run, as a mean of the last minute.
pub fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or("unknown").to_owned()
}

/// For how long the main thread has had a processor, in seconds.
pub fn processor_time() -> Result<f64, Failure> {
    let schedule = fs::read_to_string("/proc/self/schedstat")?;
    let nanos: f64 = schedule.split(' ').next().unwrap_or_default().parse()?;
    Ok(nanos / 1e9)
}

/// The memory of this process, in MiB.
pub fn resident() -> io::Result<f64> {
    status("VmRSS:")
}

/// The most that [`resident`] was since [`forget_peak`], in MiB.
pub fn peak() -> io::Result<f64> {
    status("VmHWM:")
}

pub fn forget_peak() -> io::Result<()> {
    fs::write("/proc/self/clear_refs", "5")
}

fn status(field: &str) -> io::Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    figure(&status, field).ok_or_else(|| io::Error::other(format!("no {field} in /proc")))
}

fn figure(status: &str, field: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_its_line() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 512 kB\n";
        assert_eq!(figure(status, "VmHWM:"), Some(2.0));
        assert_eq!(figure(status, "VmRSS:"), Some(0.5));
        assert_eq!(figure(status, "VmSwap:"), None);
    }
}
