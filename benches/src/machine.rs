//! The process and the machine: descriptors, memory, processors, load, versions.

use std::{fs, process::Command, thread::available_parallelism};

use anyhow::{Context, Result, bail};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CpuSet, sched_setaffinity},
};

/// The packages whose versions are in the report.
const PACKAGES: [&str; 4] = ["rmcp", "axum", "hyper", "tokio"];

/// What a figure depends on beside the code, in one line. What cannot be found out is unknown.
pub fn line() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let lock = read(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock"));
    let cpu = read("/proc/cpuinfo");
    let memory = mebibytes(&read("/proc/meminfo"), "MemTotal");
    let packages = PACKAGES.map(|name| format!("{name} {}", version(&lock, name)));
    format!(
        "{date}: {cpu}, {cores} cores, {memory:.0} GiB, {kernel}, {rustc}, {packages}",
        date = said_by("date", &["-u", "+%Y-%m-%d"]),
        cpu = field(&cpu, "model name").unwrap_or("unknown"),
        cores = available_parallelism().map_or(1, usize::from),
        memory = memory.unwrap_or(f64::NAN) / 1024.0,
        kernel = said_by("uname", &["-sr"]),
        rustc = said_by("rustc", &["--version"]),
        packages = packages.join(", "),
    )
}

/// Allows this process `count` open files, or says what is missing.
pub fn allow_files(count: u64) -> Result<()> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= count) {
        return Ok(());
    }
    if let Some(most) = maximum.filter(|maximum| *maximum < count) {
        bail!(
            "this needs {count} open files, and the hard limit is {most}: raise it (ulimit -Hn), or run with --quick"
        );
    }
    let current = Some(count);
    Ok(setrlimit(Resource::Nofile, Rlimit { current, maximum })?)
}

/// Keeps this process to one processor, if there are two: else the scheduler's choices are in the figures.
pub fn stay_on(processor: usize) -> Result<()> {
    if available_parallelism()?.get() > 1 {
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
pub fn processor_time() -> Result<f64> {
    let schedule = fs::read_to_string("/proc/self/schedstat")?;
    let nanos: f64 = schedule.split(' ').next().unwrap_or_default().parse()?;
    Ok(nanos / 1e9)
}

/// The memory of this process, in MiB.
pub fn resident() -> Result<f64> {
    status("VmRSS")
}

/// The most that [`resident`] was since [`forget_peak`], in MiB.
pub fn peak() -> Result<f64> {
    status("VmHWM")
}

pub fn forget_peak() -> Result<()> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

fn status(name: &str) -> Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    mebibytes(&status, name).with_context(|| format!("no {name} in /proc"))
}

/// The value of a line `name: value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(field, _)| field.trim() == name)?;
    Some(value.trim())
}

fn mebibytes(text: &str, name: &str) -> Option<f64> {
    let kib: f64 = field(text, name)?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024.0)
}

fn said_by(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    match output.ok().filter(|output| output.status.success()) {
        Some(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        None => "unknown".to_owned(),
    }
}

/// The version of a package in a `Cargo.lock`. If it is there twice, that of the first.
fn version<'a>(lock: &'a str, name: &str) -> &'a str {
    let name = format!("name = \"{name}\"");
    let mut lines = lock.lines().skip_while(|line| *line != name);
    let version = lines
        .nth(1)
        .and_then(|line| line.strip_prefix("version = "));
    version.map_or("unknown", |version| version.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_that_of_the_lock_file() {
        let lock = "[[package]]\nname = \"rmcp-macros\"\nversion = \"1.0.0\"\n\n[[package]]\nname = \"rmcp\"\nversion = \"3.9.0\"\n";
        assert_eq!(version(lock, "rmcp"), "3.9.0");
        assert_eq!(version(lock, "hyper"), "unknown");
    }

    #[test]
    fn memory_is_read_from_its_line() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 512 kB\n";
        assert_eq!(mebibytes(status, "VmHWM"), Some(2.0));
        assert_eq!(mebibytes(status, "VmRSS"), Some(0.5));
        assert_eq!(mebibytes(status, "VmSwap"), None);
    }
}
