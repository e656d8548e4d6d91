//! Counts the instructions of the programs in `work`, with valgrind.
//!
//! The programs say themselves from where to where is counted ([`counted`]), so start-up is not in it.

use std::{collections::BTreeMap, env, fs, path::PathBuf, process::Command, time::Duration};

use crabgrind::callgrind;
use tokio::time::Instant;

use crate::Failure;

/// Answers are kept for 60 s. A run that takes about as long may count their end too, which others do not; on an idle
/// machine it takes 5 s.
const BUSY: Duration = Duration::from_secs(45);

/// The same program, with the allocator in its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocator {
    Glibc,
    Mimalloc,
}

// === impl Allocator ===

impl Allocator {
    pub fn name(self) -> &'static str {
        match self {
            Self::Glibc => "glibc",
            Self::Mimalloc => "mimalloc",
        }
    }
}

/// Where a program of this crate is.
pub fn program(name: &str) -> Result<PathBuf, Failure> {
    let program = env::current_exe()?.with_file_name(name);
    match program.exists() {
        true => Ok(program),
        false => Err(format!("{} is not built: use benches/run", program.display()).into()),
    }
}

/// A program under valgrind. Neither addresses nor the size of the environment differ from run to run.
pub fn valgrind(tool: &str, options: &[String], program: PathBuf) -> Command {
    let mut command = Command::new("setarch");
    command
        .args(["-R", "valgrind", &format!("--tool={tool}")])
        .args(options)
        .arg(program)
        .env_clear()
        .env("PATH", env::var_os("PATH").unwrap_or_default());
    command
}

/// The instructions of what the program counts.
pub fn instructions(allocator: Allocator, arguments: &str) -> Result<u64, Failure> {
    let options = ["--instr-atstart=no", "--callgrind-out-file=/dev/null"].map(str::to_owned);
    let program = program(&format!("work-{}", allocator.name()))?;
    let mut command = valgrind("callgrind", &options, program);
    let start = Instant::now();
    let output = command.args(arguments.split(' ')).output()?;
    if start.elapsed() > BUSY {
        eprintln!(
            "{arguments:?} took {:?}: the machine is too busy for a good count",
            start.elapsed()
        );
    }
    let report = String::from_utf8_lossy(&output.stderr);
    let mut figures = report
        .lines()
        .filter_map(|line| line.split_once("Collected : "));
    match figures.next() {
        Some((_, figure)) if output.status.success() => Ok(figure.trim().parse()?),
        _ => Err(format!("no count of {arguments:?} in:\n{report}").into()),
    }
}

/// The instructions of each part of what the program counts, by the part's name.
pub fn parts(allocator: Allocator, arguments: &str) -> Result<BTreeMap<String, u64>, Failure> {
    let out = env::temp_dir().join(format!("callgrind-{}", std::process::id()));
    fs::create_dir_all(&out)?;
    let counted = parts_into(&out, allocator, arguments);
    fs::remove_dir_all(&out)?;
    counted
}

fn parts_into(
    out: &std::path::Path,
    allocator: Allocator,
    arguments: &str,
) -> Result<BTreeMap<String, u64>, Failure> {
    let file = format!("--callgrind-out-file={}", out.join("part").display());
    let options = [
        "--instr-atstart=no".to_owned(),
        "--collect-atstart=no".to_owned(),
        file,
    ];
    let program = program(&format!("work-{}", allocator.name()))?;
    let mut command = valgrind("callgrind", &options, program);
    let output = command.args(arguments.split(' ')).output()?;
    if !output.status.success() {
        let report = String::from_utf8_lossy(&output.stderr);
        return Err(format!("no count of {arguments:?} in:\n{report}").into());
    }
    let mut parts = BTreeMap::new();
    for file in fs::read_dir(out)? {
        let text = fs::read_to_string(file?.path())?;
        parts.extend(part(&text)?);
    }
    Ok(parts)
}

/// What a file of callgrind is about, if the program asked for it.
fn part(text: &str) -> Result<Option<(String, u64)>, Failure> {
    let after = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
    let name = after("desc: Trigger: Client Request: ");
    let total = after("totals: ").or_else(|| after("summary: "));
    match (name, total) {
        (Some(name), Some(total)) => Ok(Some((name.to_owned(), total.trim().parse()?))),
        _ => Ok(None),
    }
}

/// Does `work` and counts it, if this runs under callgrind.
pub fn counted<T>(work: impl FnOnce() -> T) -> T {
    callgrind::start_instrumentation();
    let done = work();
    callgrind::stop_instrumentation();
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_name_that_the_program_gave_it() {
        let text =
            "version: 1\ndesc: Trigger: Client Request: find\n\nsummary: 7\nfn=x\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), Some(("find".to_owned(), 41)));
    }

    #[test]
    fn what_the_program_did_not_ask_for_is_no_part() {
        let text = "desc: Trigger: Program termination\n\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), None);
    }
}
