//! Reproducible random choices.

use std::{
    collections::hash_map::RandomState,
    env,
    hash::{BuildHasher as _, Hasher as _},
};

/// The environment variable that sets the seed, in decimal or in hexadecimal with `0x`.
const SEED: &str = "TEST_SEED";

/// A small generator (splitmix64) that prints its seed if the test fails.
#[derive(Debug)]
pub struct Dice {
    seed: u64,
    state: u64,
}

// === impl Dice ===

impl Dice {
    /// Returns a generator with the seed in [`SEED`], or with a random seed if that is not set.
    pub fn new() -> Self {
        let given = env::var(SEED).ok().map(|seed| parse(&seed));
        Self::seeded(given.unwrap_or_else(|| RandomState::new().build_hasher().finish()))
    }

    /// Returns a generator with this seed.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, state: seed }
    }

    /// Returns the seed, which reproduces the choices.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns a uniformly random number.
    pub fn roll(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns `true` with probability 1/2.
    pub fn coin(&mut self) -> bool {
        self.one_in(2)
    }

    /// Returns `true` with probability 1/`sides`.
    pub fn one_in(&mut self, sides: u64) -> bool {
        self.roll().is_multiple_of(sides)
    }

    /// Shuffles the items (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = self.roll() % (last as u64 + 1);
            items.swap(last, other as usize);
        }
    }
}

impl Default for Dice {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Dice {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to repeat these choices, set {SEED}={:#x}", self.seed);
        }
    }
}

fn parse(seed: &str) -> u64 {
    let parsed = match seed.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => seed.parse(),
    };
    parsed.unwrap_or_else(|error| panic!("{SEED}={seed}: {error}"))
}
