//! What a change may cost at most: `gate.toml`.

use std::fs;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::case::Case;

/// By how much a limit is above what was measured: a few times what a count wavers.
pub const MARGIN: f64 = 0.01;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/gate.toml");

/// What the file has.
#[derive(Debug, Deserialize)]
pub struct Limits {
    pub limit: Vec<Limit>,
}

/// Of one case, as a ratio to bare rmcp.
#[derive(Debug, Deserialize)]
pub struct Limit {
    /// In the words of [`Case`].
    pub case: String,
    pub most: f64,
    /// What it should be, where that is known.
    pub target: Option<f64>,
}

// === impl Limits ===

impl Limits {
    pub fn read() -> Result<Self> {
        Ok(toml::from_str(&fs::read_to_string(FILE)?)?)
    }

    /// Leaves everything as it is but the figures.
    pub fn write(&self) -> Result<()> {
        let text = fs::read_to_string(FILE)?;
        let text = self.limit.iter().try_fold(text, Limit::put_into);
        Ok(fs::write(
            FILE,
            text.context("a limit is not in its file")?,
        )?)
    }

    pub fn of(&self, case: Case) -> Result<&Limit> {
        let limit = self
            .limit
            .iter()
            .find(|limit| limit.case == case.to_string());
        limit.with_context(|| format!("no limit for {case}"))
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

    fn put_into(text: String, limit: &Self) -> Option<String> {
        let start = text.find(&format!("case = \"{}\"", limit.case))?;
        let start = start + text[start..].find("most = ")? + "most = ".len();
        let end = start + text[start..].find('\n')?;
        Some(format!("{}{}{}", &text[..start], limit.most, &text[end..]))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_tightened_limit_allows_what_was_measured_and_little_more() {
        let mut limit = Limits::read().unwrap().limit.remove(0);
        limit.tighten(1.2034);
        assert!(limit.allows(1.2034) && limit.allows(1.213));
        assert!(!limit.allows(1.2034 + 0.03));
    }

    #[test]
    fn a_limit_is_written_to_its_own_case() {
        let text = "case = \"a b\"\nmost = 1.2\n\ncase = \"a\"\n# Why.\nmost = 1.5\ntarget = 1\n";
        let (case, most, target) = ("a".to_owned(), 1.375, None);
        let new = Limit::put_into(text.to_owned(), &Limit { case, most, target });
        assert_eq!(new.unwrap(), text.replace("1.5", "1.375"));
    }

    #[test]
    fn every_case_of_the_file_is_known_and_listed_once() {
        let mut cases = BTreeSet::new();
        for limit in Limits::read().unwrap().limit {
            assert!(cases.insert(Case::named(&limit.case).unwrap()));
        }
    }
}
