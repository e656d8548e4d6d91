//! Runs the programs in `work`, and counts their instructions with valgrind.
//!
//! The programs say themselves from where to where is counted ([`counted`]), so start-up is not in it.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use crabgrind::callgrind;
use tokio::time::Instant;

/// Answers are kept for 60 s. A run that takes about as long may count their end too, which others do not; on an idle
/// machine it takes 5 s.
const BUSY: Duration = Duration::from_secs(45);

/// The same program, with the allocator in its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Allocator {
    Glibc,
    Mimalloc,
    /// Counts what is allocated.
    Counted,
}

// === impl Allocator ===

impl Allocator {
    fn program(self) -> Result<PathBuf> {
        let program = env::current_exe()?.with_file_name(format!("work-{self}"));
        ensure!(
            program.exists(),
            "{program:?} is not built: use benches/run"
        );
        Ok(program)
    }
}

/// What the program prints, without valgrind.
pub fn printed(allocator: Allocator, arguments: &str) -> Result<String> {
    let mut command = Command::new(allocator.program()?);
    Ok(String::from_utf8(finish(&mut command, arguments)?.stdout)?)
}

/// Runs the program under a tool of valgrind. Neither addresses nor the size of the environment differ from run to run.
pub fn run(tool: &str, options: &[&str], allocator: Allocator, arguments: &str) -> Result<Output> {
    let mut command = Command::new("setarch");
    command
        .args(["-R", "valgrind", &format!("--tool={tool}")])
        .args(options)
        .arg(allocator.program()?)
        .env_clear()
        .env("PATH", env::var_os("PATH").unwrap_or_default());
    finish(&mut command, arguments)
}

fn finish(command: &mut Command, arguments: &str) -> Result<Output> {
    let output = command.args(arguments.split(' ')).output()?;
    let report = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments}: {report}");
    Ok(output)
}

/// Does `work` with a folder of its own, which is gone afterwards.
pub fn in_scratch<T>(work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let folder = env::temp_dir().join(format!("benches-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let done = work(&folder);
    fs::remove_dir_all(&folder)?;
    done
}

/// The instructions of what the program counts.
pub fn instructions(allocator: Allocator, arguments: &str) -> Result<u64> {
    let options = ["--instr-atstart=no", "--callgrind-out-file=/dev/null"];
    let start = Instant::now();
    let output = run("callgrind", &options, allocator, arguments)?;
    let took = start.elapsed();
    if took > BUSY {
        eprintln!("{arguments:?} took {took:?}: the machine is too busy for a good count");
    }
    let report = String::from_utf8_lossy(&output.stderr);
    let figure = report
        .lines()
        .find_map(|line| line.split_once("Collected : "));
    let (_, figure) = figure.with_context(|| format!("no count of {arguments:?} in:\n{report}"))?;
    Ok(figure.trim().parse()?)
}

/// The instructions of each part of what the program counts, by the part's name.
pub fn parts(allocator: Allocator, arguments: &str) -> Result<BTreeMap<String, u64>> {
    in_scratch(|folder| {
        let file = format!("--callgrind-out-file={}", folder.join("part").display());
        let options = ["--instr-atstart=no", "--collect-atstart=no", &file];
        run("callgrind", &options, allocator, arguments)?;
        let mut parts = BTreeMap::new();
        for file in fs::read_dir(folder)? {
            let text = fs::read_to_string(file?.path())?;
            parts.extend(part(&text)?);
        }
        Ok(parts)
    })
}

/// What a file of callgrind is about, if the program asked for it.
fn part(text: &str) -> Result<Option<(String, u64)>> {
    let after = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
    let total = after("totals: ").or_else(|| after("summary: "));
    let part = after("desc: Trigger: Client Request: ").zip(total);
    let part = part.map(|(name, total)| Ok((name.to_owned(), total.trim().parse()?)));
    part.transpose()
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
    fn a_part_has_the_name_that_the_program_gave_it_and_else_is_none() {
        let text = "desc: Trigger: Client Request: find\n\nsummary: 7\nfn=x\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), Some(("find".to_owned(), 41)));
        let text = "desc: Trigger: Program termination\n\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), None);
    }
}
