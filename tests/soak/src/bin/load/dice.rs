//! Random choices, derived from the seed.

use std::{ops::Range, time::Duration};

use fastrand::Rng;
use serde::Deserialize;

/// The names of the selected routes and stories. Empty selects all of them.
#[derive(Debug, Default, Deserialize)]
#[serde(transparent)]
pub(crate) struct Only(Vec<String>);

/// Returns a client's random numbers for a round.
pub(crate) fn of(seed: u64, round: usize, name: &str) -> Rng {
    // FNV-1a, because it is the same on every machine and with every compiler.
    let mut hash =
        0xcbf2_9ce4_8422_2325_u64 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ round as u64;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    Rng::with_seed(hash)
}

/// Returns a random duration from this range of milliseconds.
pub(crate) fn millis(dice: &mut Rng, range: Range<u64>) -> Duration {
    Duration::from_millis(dice.u64(range))
}

/// Picks one of the choices at random, according to their weights.
pub(crate) fn weighted<T: Copy>(dice: &mut Rng, choices: &[(u32, T)]) -> T {
    let mut left = dice.u32(..choices.iter().map(|(weight, _)| weight).sum::<u32>());
    for &(weight, choice) in choices {
        if left < weight {
            return choice;
        }
        left -= weight;
    }
    unreachable!("the weights add up")
}

// === impl Only ===

impl Only {
    /// Returns the selected choices, or all of them if none is selected.
    pub(crate) fn among<T: Copy, N: AsRef<str>>(
        &self,
        choices: &[(u32, T)],
        name: impl Fn(T) -> N,
    ) -> Vec<(u32, T)> {
        let is_selected = |choice: T| self.0.iter().any(|only| only == name(choice).as_ref());
        let selected = choices.iter().filter(|(_, choice)| is_selected(*choice));
        let selected: Vec<_> = selected.copied().collect();
        if selected.is_empty() {
            choices.to_vec()
        } else {
            selected
        }
    }
}
