//! Runs the programs in `work` under valgrind and counts their instructions.
//!
//! The programs mark the section to count themselves ([`counted`]), so start-up is not included.
//!
//! Instructions are what a processor executes. The other counts ([`Count`]) are what it waits for, as simulated by
//! callgrind. The simulated caches have the same size on all machines.

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

/// A run longer than this is reported as unreliable. On an idle machine it takes 5 s.
///
/// Answers are retained for 60 s, so a run of about that length may also count their removal, which shorter runs do not.
const BUSY: Duration = Duration::from_secs(45);

/// First-level caches of 32 KiB with 8 ways, which is common, backed by 8 MiB.
const SIMULATION: [&str; 5] = [
    "--cache-sim=yes",
    "--branch-sim=yes",
    "--I1=32768,8,64",
    "--D1=32768,8,64",
    "--LL=8388608,16,64",
];

/// Attributes every count to its instruction's address.
const INSTRUCTIONS: [&str; 4] = [
    "--dump-instr=yes",
    "--dump-line=no",
    "--compress-strings=no",
    "--compress-pos=no",
];

/// The kind of event being counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter, Deserialize)]
#[strum(serialize_all = "kebab-case")]
#[serde(rename_all = "kebab-case")]
pub enum Count {
    Instructions,
    /// First-level instruction cache misses.
    InstructionMisses,
    /// First-level data cache misses.
    DataMisses,
    LastLevelMisses,
    /// Branches and jumps whose target a simple predictor got wrong.
    Mispredictions,
    /// See [`locks`](crate::locks).
    LockedInstructions,
}

/// Averages per call.
pub type Counts = BTreeMap<(Case, Count), f64>;

/// The same program once per allocator, which is part of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
#[strum(serialize_all = "lowercase")]
pub enum Allocator {
    Glibc,
    Mimalloc,
    /// Counts allocations.
    Counted,
}

// === impl Count ===

impl Count {
    fn is_simulated(self) -> bool {
        !matches!(self, Self::Instructions | Self::LockedInstructions)
    }

    /// Returns how far a limit may exceed its measured value: a few times the count's noise.
    pub fn margin(self) -> f64 {
        match self {
            Self::Instructions | Self::LockedInstructions => 0.01,
            Self::InstructionMisses | Self::DataMisses => 0.025,
            Self::Mispredictions => 0.03,
            Self::LastLevelMisses => 3.0,
        }
    }

    /// Compares with bare rmcp as a ratio. A warm call's last-level misses are rare, so those are compared as a
    /// difference instead.
    pub fn to_bare(self, measured: f64, bare: f64) -> f64 {
        match self {
            Self::LastLevelMisses => measured - bare,
            _ => measured / bare,
        }
    }

    /// Returns callgrind's event names for this count, of which locked instructions have none.
    ///
    /// Data misses have one name for reads and one for writes; mispredictions have one for branches and one for jumps.
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

/// Runs the program without valgrind and returns its output.
pub fn run_natively(allocator: Allocator, arguments: &str) -> Result<String> {
    let mut command = Command::new(allocator.program()?);
    Ok(String::from_utf8(finish(&mut command, arguments)?.stdout)?)
}

/// Runs the program under a valgrind tool. Addresses and the environment's size are the same in every run.
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

/// Calls `work` with a temporary directory that is removed afterwards.
pub fn in_scratch<T>(work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    static FOLDERS: AtomicU32 = AtomicU32::new(0);
    let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
    let folder = env::temp_dir().join(format!("benches-{}-{number}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let done = work(&folder);
    fs::remove_dir_all(&folder)?;
    done
}

/// Counts these events per call. Runs one program per processor at the same time, since other load does not affect counts.
pub fn counts(allocator: Allocator, wanted: BTreeSet<(Case, Count)>) -> Result<Counts> {
    let mut cases: BTreeMap<Case, Vec<Count>> = BTreeMap::new();
    for (case, count) in wanted {
        cases.entry(case).or_default().push(count);
    }
    let left = Mutex::new(cases.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> Result<Counts> {
        let mut counted = Counts::new();
        while let Some((case, counts)) = next() {
            eprintln!("counting with {allocator}: {case}");
            counted.extend(counts_of(allocator, case, &counts)?);
        }
        Ok(counted)
    };
    thread::scope(|scope| {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let workers = Vec::from_iter((0..processors).map(|_| scope.spawn(work)));
        let results = workers.into_iter().map(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => panic::resume_unwind(panic),
        });
        let counts = results.collect::<Result<Vec<_>>>()?;
        Ok(counts.into_iter().flatten().collect())
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

/// Returns the locked instructions of all counted calls.
pub fn locked(case: Case) -> Result<Profile> {
    Ok(profile(Allocator::Glibc, case, &[], true)?.1)
}

/// Returns the callgrind output for the calls, and their locked instructions if requested.
///
/// Prints a warning if the run took longer than [`BUSY`].
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
            Profile::parse(&fs::read_to_string(file)?)?
        } else {
            Profile::default()
        };
        Ok((
            String::from_utf8_lossy(&output.stderr).into_owned(),
            profile,
        ))
    })
}

/// Parses callgrind's totals, by event name.
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

/// Returns the instructions of each part that the program counts, by the part's name.
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

/// Parses a callgrind output file. Returns `None` if the program did not request it.
fn part(text: &str) -> Result<Option<(String, u64)>> {
    let after = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
    let total = after("totals: ").or_else(|| after("summary: "));
    let part = after("desc: Trigger: Client Request: ").zip(total);
    let part = part.map(|(name, total)| Ok((name.to_owned(), total.trim().parse()?)));
    part.transpose()
}

/// Warms up the simulated caches, then has callgrind count `times` repetitions of `work`.
///
/// Counts nothing if the program is not running under callgrind.
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
    fn each_event_gets_the_figure_below_its_name() {
        let report = "==1== Events    : Ir I1mr\n==1== Collected : 412 7\n==1== I refs: 412\n";
        assert_eq!(events(report), Some([("Ir", 412), ("I1mr", 7)].into()));
        assert_eq!(events("==1== Events    : Ir\n"), None);
    }

    #[test]
    fn only_a_requested_part_has_a_name() {
        let text = "desc: Trigger: Client Request: find\n\nsummary: 7\nfn=x\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), Some(("find".to_owned(), 41)));
        let text = "desc: Trigger: Program termination\n\ntotals: 41\n";
        assert_eq!(part(text).unwrap(), None);
    }
}
