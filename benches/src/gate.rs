//! What a change may cost at most.

use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::case::Case;

/// By how much a limit is above what was measured: a few times what a count wavers.
pub const MARGIN: f64 = 0.01;

/// The head of the file is prose, which survives when it is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    #[serde(skip)]
    head: String,
    pub limit: Vec<Limit>,
}

/// Of one case, as a ratio to bare rmcp.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// In the words of [`Case`].
    pub case: String,
    pub most: f64,
    /// What it should be, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<f64>,
}

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/gate.toml");

// === impl Limits ===

impl Limits {
    pub fn read() -> Result<Self> {
        Ok(Self::parse(&fs::read_to_string(FILE)?)?)
    }

    pub fn write(&self) -> Result<()> {
        Ok(fs::write(FILE, self.text()?)?)
    }

    pub fn of(&self, case: Case) -> Result<&Limit> {
        let case = case.to_string();
        let limit = self.limit.iter().find(|limit| limit.case == case);
        limit.with_context(|| format!("no limit for {case}"))
    }

    fn parse(text: &str) -> Result<Self, toml::de::Error> {
        let mut limits: Self = toml::from_str(text)?;
        let head = text.lines().take_while(|line| line.starts_with('#'));
        limits.head = head.map(|line| format!("{line}\n")).collect();
        Ok(limits)
    }

    fn text(&self) -> Result<String, toml::ser::Error> {
        Ok(format!("{}\n{}", self.head, toml::to_string(self)?))
    }
}

// === impl Limit ===

impl Limit {
    pub fn allows(&self, ratio: f64) -> bool {
        ratio <= self.most
    }

    /// As close to what was measured as it may be.
    pub fn tighten(&mut self, ratio: f64) {
        self.most = ((ratio + MARGIN) * 1_000.0).ceil() / 1_000.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Why.\n# And how.\n\n[[limit]]\ncase = \"layer plain\"\nmost = 1.2\n\n[[limit]]\n\
        case = \"wrapped session arguments 100\"\nmost = 1.5\ntarget = 1.05\n";

    #[test]
    fn limits_are_written_as_they_were_read() {
        assert_eq!(Limits::parse(TEXT).unwrap().text().unwrap(), TEXT);
    }

    #[test]
    fn a_tightened_limit_allows_what_was_measured_and_little_more() {
        let mut limit = Limits::parse(TEXT).unwrap().limit.remove(1);
        limit.tighten(1.2034);
        assert!(limit.allows(1.2034) && limit.allows(1.213));
        assert!(!limit.allows(1.2034 + 0.03));
    }

    #[test]
    fn every_case_of_the_file_is_known_and_listed_once() {
        let limits = Limits::read().unwrap().limit;
        let mut cases: Vec<&str> = limits.iter().map(|limit| &*limit.case).collect();
        for case in &cases {
            case.parse::<Case>().unwrap();
        }
        cases.sort_unstable();
        cases.dedup();
        assert_eq!(cases.len(), limits.len());
    }
}
