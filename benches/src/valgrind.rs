//! Runs the programs in `work`, and counts their instructions with valgrind.
//!
//! The programs say themselves from where to where is counted ([`counted`]), so start-up is not in it.
//!
//! Instructions are what a processor executes; what callgrind simulates besides ([`Count`]) is what it waits for. The
//! caches are of one size on all machines.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, panic,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use crabgrind::callgrind;
use serde::Deserialize;
use strum::{Display, EnumIter};
use tokio::time::Instant;

use crate::{case::Case, locks::Profile};

/// Answers are kept for 60 s. A run that takes about as long may count their end too, which others do not; on an idle
/// machine it takes 5 s.
const BUSY: Duration = Duration::from_secs(45);

/// First-level caches of 32 KiB in 8 ways, as processors have had for long, and 8 MiB behind them.
const SIMULATION: [&str; 5] = [
    "--cache-sim=yes",
    "--branch-sim=yes",
    "--I1=32768,8,64",
    "--D1=32768,8,64",
    "--LL=8388608,16,64",
];

/// Everything by the address of its instruction.
const INSTRUCTIONS: [&str; 4] = [
    "--dump-instr=yes",
    "--dump-line=no",
    "--compress-strings=no",
    "--compress-pos=no",
];

/// What is counted of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter, Deserialize)]
#[strum(serialize_all = "kebab-case")]
#[serde(rename_all = "kebab-case")]
pub enum Count {
    Instructions,
    /// Of the first level.
    InstructionMisses,
    /// Of the first level, too.
    DataMisses,
    LastLevelMisses,
    /// Branches and jumps whose target a simple predictor did not foresee.
    Mispredictions,
    /// See [`locks`](crate::locks).
    LockedInstructions,
}

/// Of one call, on average.
pub type Counts = BTreeMap<(Case, Count), f64>;

/// The same program, with the allocator in its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
#[strum(serialize_all = "lowercase")]
pub enum Allocator {
    Glibc,
    Mimalloc,
    /// Counts what is allocated.
    Counted,
}

// === impl Count ===

impl Count {
    fn is_simulated(self) -> bool {
        !matches!(self, Self::Instructions | Self::LockedInstructions)
    }

    /// By how much a limit is above what was measured: a few times what a count wavers.
    pub fn margin(self) -> f64 {
        match self {
            Self::Instructions | Self::LockedInstructions => 0.01,
            Self::InstructionMisses | Self::DataMisses => 0.025,
            Self::Mispredictions => 0.03,
            Self::LastLevelMisses => 3.0,
        }
    }

    /// As a ratio. A call that is warm misses the last level so rarely that it is the difference that counts.
    pub fn to_bare(self, own: f64, bare: f64) -> f64 {
        match self {
            Self::LastLevelMisses => own - bare,
            _ => own / bare,
        }
    }

    /// What callgrind calls it. Misses of data have one name for reads and one for writes, mispredictions one for
    /// branches and one for jumps.
    fn events(self) -> &'static [&'static str] {
        match self {
            Self::Instructions => &["Ir"],
            Self::InstructionMisses => &["I1mr"],
            Self::DataMisses => &["D1mr", "D1mw"],
            Self::LastLevelMisses => &["ILmr", "DLmr", "DLmw"],
            Self::Mispredictions => &["Bcm", "Bim"],
            Self::LockedInstructions => &[],
        }
    }
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
    static FOLDERS: AtomicU32 = AtomicU32::new(0);
    let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
    let folder = env::temp_dir().join(format!("benches-{}-{number}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let done = work(&folder);
    fs::remove_dir_all(&folder)?;
    done
}

/// So many of these are in one call. Runs as many programs at a time as there are processors: a count does not mind what
/// else runs.
pub fn counts(allocator: Allocator, wanted: BTreeSet<(Case, Count)>) -> Result<Counts> {
    let mut cases: BTreeMap<Case, Vec<Count>> = BTreeMap::new();
    for (case, count) in wanted {
        cases.entry(case).or_default().push(count);
    }
    let left = Mutex::new(cases.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> Result<Counts> {
        let mut found = Counts::new();
        while let Some((case, counts)) = next() {
            eprintln!("counting with {allocator}: {case}");
            found.extend(counts_of(allocator, case, &counts)?);
        }
        Ok(found)
    };
    thread::scope(|scope| {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let workers = Vec::from_iter((0..processors).map(|_| scope.spawn(work)));
        let found = workers.into_iter().map(|worker| match worker.join() {
            Ok(found) => found,
            Err(panic) => panic::resume_unwind(panic),
        });
        let all = found.collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().flatten().collect())
    })
}

fn counts_of(allocator: Allocator, case: Case, counts: &[Count]) -> Result<Counts> {
    let is_simulated = counts.iter().any(|count| count.is_simulated());
    let options: &[_] = if is_simulated { &SIMULATION } else { &[] };
    let is_locked = counts.contains(&Count::LockedInstructions);
    let (report, profile) = profile(allocator, case, options, is_locked)?;
    let events = events(&report).with_context(|| format!("no counts in:\n{report}"))?;
    let each = |count: &Count| {
        let total: u64 = match count {
            Count::LockedInstructions => profile.executed(),
            _ => count.events().iter().map(|name| events[name]).sum(),
        };
        ((case, *count), total as f64 / case.calls())
    };
    Ok(counts.iter().map(each).collect())
}

/// The locked instructions of so many calls as are counted.
pub fn locked(case: Case) -> Result<Profile> {
    Ok(profile(Allocator::Glibc, case, &[], true)?.1)
}

/// What callgrind prints about the calls, and the locked instructions, if these are asked for.
fn profile(
    allocator: Allocator,
    case: Case,
    options: &[&'static str],
    is_locked: bool,
) -> Result<(String, Profile)> {
    in_scratch(|folder| {
        let file = folder.join("profile");
        let out = format!("--callgrind-out-file={}", file.display());
        let mut options = Vec::from_iter(options.iter().map(|option| &**option));
        options.extend(["--instr-atstart=no", "--collect-atstart=no", &out]);
        if is_locked {
            options.extend(INSTRUCTIONS);
        }
        let arguments = format!("calls {case}");
        let start = Instant::now();
        let output = run("callgrind", &options, allocator, &arguments)?;
        let took = start.elapsed();
        if took > BUSY {
            eprintln!("{arguments:?} took {took:?}: the machine is too busy for a good count");
        }
        let profile = if is_locked {
            Profile::read(&fs::read_to_string(file)?)?
        } else {
            Profile::default()
        };
        Ok((
            String::from_utf8_lossy(&output.stderr).into_owned(),
            profile,
        ))
    })
}

/// What callgrind says that it has counted, by the names of its events.
fn events(report: &str) -> Option<BTreeMap<&str, u64>> {
    let line = |name| {
        let mut lines = report.lines();
        lines.find_map(|line| Some(line.split_once(name)?.1.split_whitespace()))
    };
    let figures = line("Collected :")?.map(str::parse);
    let events = line("Events    :")?.zip(figures);
    events
        .map(|(name, figure)| Some((name, figure.ok()?)))
        .collect()
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

/// Does `work` a few times to fill the simulated caches, and then so often that it is counted, if this runs under
/// callgrind.
pub fn counted(times: u32, mut work: impl FnMut(u32) -> Result<()>) -> Result<()> {
    callgrind::start_instrumentation();
    work(times.div_ceil(10))?;
    callgrind::toggle_collect();
    work(times)?;
    callgrind::stop_instrumentation();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_the_figure_below_its_name() {
        let report = "==1== Events    : Ir I1mr\n==1== Collected : 412 7\n==1== I refs: 412\n";
        assert_eq!(events(report), Some([("Ir", 412), ("I1mr", 7)].into()));
        assert_eq!(events("==1== Events    : Ir\n"), None);
    }

    #[test]
    fn a_part_has_the_name_that_the_program_gave_it_and_else_is_none() {
        let text = "desc: Trigger: Client Request: find\n\nsummary: 7\nfn=x\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), Some(("find".to_owned(), 41)));
        let text = "desc: Trigger: Program termination\n\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), None);
    }
}
