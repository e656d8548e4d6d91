//! Locked instructions, which make a processor claim a cache line from all others. How many of them a call executes and
//! which locks it takes are the same on every machine; only their cost differs. The C library's are not counted.
//!
//! callgrind counts how often each instruction is executed, `objdump` identifies the locked ones, and `addr2line` maps
//! them to functions, including inlined ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, ensure};

use crate::attribution::{Owner, owner, root};

/// How often each locked instruction was executed, by file and address.
#[derive(Debug, Default)]
pub struct Profile(BTreeMap<(String, u64), u64>);

/// Locked instructions, grouped by the code that executes them.
#[derive(Debug, Default)]
pub struct Attributed {
    /// By location in the crate, or by another package's name.
    pub places: BTreeMap<String, u64>,
    /// How often each lock was taken, by the type it guards.
    pub locks: BTreeMap<String, u64>,
}

/// Addresses of a file's locked instructions.
type Addresses = Arc<BTreeSet<u64>>;

/// What [`locked`] has returned so far, by file.
static KNOWN: Mutex<BTreeMap<String, Addresses>> = Mutex::new(BTreeMap::new());

// === impl Profile ===

impl Profile {
    /// Parses callgrind output written with `--dump-instr=yes`, uncompressed and without lines.
    pub fn parse(text: &str) -> Result<Self> {
        let (mut profile, mut file, mut is_call) = (Self::default(), String::new(), false);
        let mut addresses = Addresses::default();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("ob=") {
                file = name.to_owned();
                addresses = if is_libc(name) {
                    Addresses::default()
                } else {
                    locked(name)?
                };
            } else if line.starts_with("calls=") {
                // The next line is what the called function cost.
                is_call = true;
            } else if let Some(cost) = line.strip_prefix("0x")
                && !std::mem::take(&mut is_call)
            {
                let mut words = cost.split(' ');
                let address = u64::from_str_radix(words.next().unwrap_or_default(), 16)?;
                if addresses.contains(&address) {
                    let executed: u64 = words.next().context("no count")?.parse()?;
                    *profile.0.entry((file.clone(), address)).or_default() += executed;
                }
            }
        }
        Ok(profile)
    }

    pub fn executed(&self) -> u64 {
        self.0.values().sum()
    }

    /// Attributes each locked instruction to a location and, if it takes a lock, to that lock.
    pub fn resolve(&self) -> Result<Attributed> {
        let mut by_file: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
        for ((file, address), executed) in &self.0 {
            by_file.entry(file).or_default().push((*address, *executed));
        }
        let (mut attributed, root) = (Attributed::default(), root()?);
        for (file, instructions) in by_file {
            let addresses = instructions
                .iter()
                .map(|(address, _)| format!("{address:#x}"));
            let arguments = ["-a", "-i", "-f", "-C", "-e", file].map(str::to_owned);
            let text = output("addr2line", arguments.into_iter().chain(addresses))?;
            let stacks = text.split("0x").skip(1);
            for (stack, (_, executed)) in stacks.zip(instructions) {
                attributed.add(stack, executed, &root);
            }
        }
        Ok(attributed)
    }
}

// === impl Attributed ===

impl Attributed {
    /// Adds one stack: an address, then a function and a location per frame, innermost first.
    fn add(&mut self, stack: &str, executed: u64, root: &str) {
        let lines = Vec::from_iter(stack.lines().skip(1));
        let frames = || lines.chunks_exact(2).map(|frame| (frame[0], frame[1]));
        let mut owners = frames().map(|(_, place)| owner(place, root));
        let name = match owners.find(|owner| *owner != Owner::Container) {
            Some(Owner::Layer(place)) => {
                format!("src/{}", place.split(" (").next().unwrap_or(place))
            }
            Some(Owner::Other(name)) => name.to_owned(),
            Some(Owner::Container) | None => "std, tokio and others".to_owned(),
        };
        *self.places.entry(name).or_default() += executed;
        if let Some(lock) = frames().find_map(|(function, place)| guarded_type(function, place)) {
            *self.locks.entry(lock).or_default() += executed;
        }
    }
}

/// Returns the type that a lock guards. `None` unless this frame takes one of std's or parking_lot's locks.
fn guarded_type(function: &str, place: &str) -> Option<String> {
    let is_lock = ["/poison/mutex.rs", "/poison/rwlock.rs", "/lock_api-"];
    is_lock.iter().find(|path| place.contains(**path))?;
    let (name, guarded) = function.split_once('<')?;
    let takes = ["lock", "try_lock", "read", "write", "try_read", "try_write"];
    takes.iter().find(|take| **take == name)?;
    let guarded = guarded.strip_suffix('>')?;
    // parking_lot's functions are also generic over the raw lock.
    let is_raw = guarded.starts_with("parking_lot::");
    let raw = guarded.split_once(", ").filter(|_| is_raw);
    Some(raw.map_or(guarded, |(_, guarded)| guarded).to_owned())
}

/// Returns `true` for the C library.
///
/// Its allocator executes ten locked instructions whenever it consolidates free memory, and how often it does depends
/// on the heap layout.
fn is_libc(file: &str) -> bool {
    file.rsplit('/')
        .next()
        .is_some_and(|name| name.starts_with("libc.so"))
}

/// Returns the addresses of a file's locked instructions. Disassembles each file only once.
fn locked(file: &str) -> Result<Addresses> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(addresses) = known.get(file) {
        return Ok(addresses.clone());
    }
    let arguments = ["-d", "--no-show-raw-insn", file].map(str::to_owned);
    let text = output("objdump", arguments)?;
    let addresses: Addresses = Arc::new(text.lines().filter_map(locked_at).collect());
    known.insert(file.to_owned(), addresses.clone());
    Ok(addresses)
}

/// Returns the instruction's address if it is locked. `xchg` with memory is locked even without a prefix.
fn locked_at(line: &str) -> Option<u64> {
    let (address, instruction) = line.split_once(":\t")?;
    let is_exchange = instruction.starts_with("xchg ") && instruction.contains('(');
    let is_locked = is_exchange || instruction.starts_with("lock ");
    let address = is_locked.then_some(address)?;
    u64::from_str_radix(address.trim(), 16).ok()
}

fn output(program: &str, arguments: impl IntoIterator<Item = String>) -> Result<String> {
    let output = Command::new(program).args(arguments).output()?;
    ensure!(output.status.success(), "{program} has failed");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_prefix_or_an_exchange_with_memory_locks_an_instruction() {
        let locked = "  1f0:\tlock cmpxchg %ecx,(%rdi)";
        assert_eq!(locked_at(locked), Some(0x1f0));
        assert_eq!(locked_at("  1f4:\txchg   %eax,(%rdi)"), Some(0x1f4));
        assert_eq!(locked_at("  1f6:\txchg   %ax,%ax"), None);
        assert_eq!(locked_at("  1f8:\tmov    %eax,(%rdi)"), None);
    }

    #[test]
    fn a_lock_is_attributed_to_its_guarded_type_and_its_caller() {
        let std = "/rustc/59/library/std/src/sync/poison/mutex.rs:492";
        let stack = format!(
            "5c\ncompare_exchange\n/rustc/59/library/core/src/sync/atomic.rs:3\nlock<a::B>\n{std}\nseen\n/me/src/slot.rs:9\n"
        );
        let mut attributed = Attributed::default();
        attributed.add(&stack, 3, "/me/src/");
        assert_eq!(attributed.places, [("src/slot.rs:9".to_owned(), 3)].into());
        assert_eq!(attributed.locks, [("a::B".to_owned(), 3)].into());
        assert_eq!(guarded_type("drop<a::B>", std), None);
    }
}
