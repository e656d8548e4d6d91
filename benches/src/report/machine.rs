//! On what it was measured.

use std::{fs, path::Path, process::Command};

/// What a figure depends on beside the code.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory: String,
    pub kernel: String,
    pub rustc: String,
    /// Names and versions of packages.
    pub packages: Vec<(String, String)>,
    pub date: String,
}

/// Whose versions are told.
const PACKAGES: [&str; 4] = ["rmcp", "axum", "hyper", "tokio"];

// === impl Machine ===

impl Machine {
    /// This one, today. What cannot be found out is unknown.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.lock");
        let lock = fs::read_to_string(lock).unwrap_or_default();
        let versions = PACKAGES.map(|name| (name.to_owned(), version(&lock, name)));
        Self {
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(unknown),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory: memory(&read("/proc/meminfo")).unwrap_or_else(unknown),
            kernel: said_by("uname", &["-sr"]),
            rustc: said_by("rustc", &["--version"]),
            packages: versions.to_vec(),
            date: said_by("date", &["-u", "+%Y-%m-%d"]),
        }
    }

    /// In one line.
    pub fn line(&self) -> String {
        let Self {
            cpu,
            cores,
            memory,
            kernel,
            rustc,
            date,
            ..
        } = self;
        let packages = self
            .packages
            .iter()
            .map(|(name, version)| format!("{name} {version}"));
        let packages = packages.collect::<Vec<_>>().join(", ");
        format!("{date}: {cpu}, {cores} cores, {memory}, {kernel}, {rustc}, {packages}")
    }
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// The value of a line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = fields.find(|(field, _)| field.trim() == name)?;
    Some(value.trim().to_owned())
}

fn memory(meminfo: &str) -> Option<String> {
    let total = field(meminfo, "MemTotal")?;
    let kilobytes: f64 = total.split(' ').next()?.parse().ok()?;
    Some(format!("{:.0} GiB", kilobytes / 1_048_576.0))
}

fn said_by(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => unknown(),
    }
}

/// Of a package in a `Cargo.lock`. If it is there twice, the first.
fn version(lock: &str, name: &str) -> String {
    let mut lines = lock
        .lines()
        .skip_while(|line| *line != format!("name = \"{name}\""));
    let version = lines
        .nth(1)
        .and_then(|line| line.strip_prefix("version = "));
    version.map_or_else(unknown, |version| version.trim_matches('"').to_owned())
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
    fn memory_is_told_in_gibibytes() {
        let meminfo = "MemTotal:       24117248 kB\nMemFree:        1 kB\n";
        assert_eq!(memory(meminfo).as_deref(), Some("23 GiB"));
    }
}
