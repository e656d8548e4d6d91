//! Limits on what a call may cost, from `gate.toml`.

use std::fs;

use anyhow::Result;
use serde::Deserialize;

use crate::{case::Case, valgrind::Count};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/gate.toml");

/// The file's contents.
#[derive(Debug, Deserialize)]
pub struct Limits {
    pub limit: Vec<Limit>,
}

/// One case's limit: a ratio to bare rmcp, or a difference for last-level misses.
#[derive(Debug, Deserialize)]
pub struct Limit {
    pub case: Case,
    pub count: Count,
    pub most: f64,
    /// The intended ratio, if one is defined.
    pub target: Option<f64>,
}

// === impl Limits ===

impl Limits {
    pub fn read() -> Result<Self> {
        Ok(toml::from_str(&fs::read_to_string(FILE)?)?)
    }

    /// Writes the limits, keeping the rest of the file.
    pub fn write(&self) -> Result<()> {
        Ok(fs::write(FILE, self.put_into(&fs::read_to_string(FILE)?))?)
    }

    /// Replaces the limits in `text`. They are in this order, with each `most` on a line of its
    /// own.
    fn put_into(&self, text: &str) -> String {
        let mut limits = self.limit.iter();
        let line = |line: &str| {
            if line.starts_with("most = ") {
                limits
                    .next()
                    .map(|limit| format!("most = {}\n", limit.most))
            } else {
                Some(format!("{line}\n"))
            }
        };
        text.lines().filter_map(line).collect()
    }
}

// === impl Limit ===

impl Limit {
    pub fn allows(&self, ratio: f64) -> bool {
        ratio <= self.most
    }

    /// Sets the limit to the measured ratio plus the margin, rounded up to three decimals.
    pub fn tighten(&mut self, ratio: f64) {
        self.most = ((ratio + self.count.margin()) * 1_000.0).ceil() / 1_000.0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_tightened_limit_barely_allows_the_measured_value() {
        let mut limit = Limits::read().unwrap().limit.remove(0);
        limit.tighten(1.2034);
        assert!(limit.allows(1.2034) && limit.allows(1.213));
        assert!(!limit.allows(1.2034 + 0.03));
    }

    #[test]
    fn each_limit_replaces_its_own_line() {
        let file = |last| {
            let case = "[[limit]]\ncase = \"bare plain\"\n";
            format!(
                "{case}count = \"instructions\"\n# Why.\nmost = 1.2\n\n{case}count = \"data-misses\"\nmost = {last}\n"
            )
        };
        let mut limits: Limits = toml::from_str(&file("1.5")).unwrap();
        limits.limit[1].most = 1.375;
        assert_eq!(limits.put_into(&file("1.5")), file("1.375"));
    }

    #[test]
    fn each_case_has_at_most_one_limit_per_count() {
        let mut counted = BTreeSet::new();
        for limit in Limits::read().unwrap().limit {
            assert!(counted.insert((limit.case, limit.count)));
        }
    }
}
