//! Bench results, stored as JSON until the report is assembled.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub mod page;

pub use self::Bound::{AtLeast, AtMost};

/// A bench result: a text, a table, and targets.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Section {
    /// The file name, such as `latency`. It starts with the bench's name.
    pub name: String,
    pub title: String,
    /// What was measured, and which result would be a bad one. Markdown.
    pub text: String,
    pub columns: Vec<String>,
    pub rows: Vec<Vec<String>>,
    pub targets: Vec<Target>,
}

/// A measured figure and its upper or lower bound.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Target {
    pub bound: Bound,
    pub what: String,
    pub measured: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// Returns the crate's `target/report`, whatever the current directory.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/report")
}

// === impl Section ===

impl Section {
    /// Reads the title, the text and the columns from the section's file in `sections`.
    ///
    /// Replaces each `{name}` in the file with the value of that name, and fails if it has none.
    pub fn new(name: &str, values: Value) -> Result<Self> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("sections/{name}.md"));
        let mut words = fs::read_to_string(file)?;
        for (name, value) in values.as_object().context("the values have no names")? {
            let value = value.to_string();
            words = words.replace(&format!("{{{name}}}"), value.trim_matches('"'));
        }
        ensure!(
            !words.contains('{'),
            "{name}.md contains a name without a value"
        );
        let (text, columns) = words.split_once("\n|").context("no columns")?;
        let (title, text) = text.split_once("\n\n").context("no text")?;
        let paragraphs = text.trim().split("\n\n");
        let columns = columns.trim().trim_matches('|').split('|');
        Ok(Self {
            name: name.to_owned(),
            title: title.trim_start_matches("# ").to_owned(),
            text: Vec::from_iter(paragraphs.map(|lines| lines.replace('\n', " "))).join("\n\n"),
            columns: columns.map(|cell| cell.trim().to_owned()).collect(),
            ..Self::default()
        })
    }

    /// Returns the bench that measures the section, taken from the first part of its name.
    pub fn bench(&self) -> &str {
        self.name.split('-').next().unwrap_or(&self.name)
    }

    /// Prints the section and stores it for the report.
    pub fn publish(&self) -> Result<()> {
        println!("{}", page::part(self));
        let folder = folder().join("data");
        fs::create_dir_all(&folder)?;
        let json = serde_json::to_vec_pretty(self)?;
        Ok(fs::write(folder.join(format!("{}.json", self.name)), json)?)
    }
}

// === impl Target ===

impl Target {
    pub fn new(bound: Bound, what: String, measured: f64) -> Self {
        Self {
            bound,
            what,
            measured,
        }
    }

    pub fn holds(&self) -> bool {
        match self.bound {
            AtMost(most) => self.measured <= most,
            AtLeast(least) => self.measured >= least,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    pub(super) fn section() -> Section {
        Section {
            rows: vec![vec!["bare".to_owned(), "1".to_owned()]],
            targets: vec![
                Target::new(AtMost(1.05), "a ratio".to_owned(), 1.2),
                Target::new(AtLeast(95.0), "a share".to_owned(), 99.0),
            ],
            ..Section::new("wasted", json!({ "calls": 7, "load": "0.5" })).unwrap()
        }
    }

    #[test]
    fn an_unmeasured_target_does_not_hold() {
        let mut target = section().targets.remove(0);
        target.measured = f64::NAN;
        assert!(!target.holds());
    }

    #[test]
    fn a_section_fills_in_the_values() {
        let section = section();
        assert_eq!(section.title, "Work without a client, and destroyed work");
        let text = &section.text;
        assert!(text.starts_with("7 calls; 30 % of the clients hang up"));
        assert!(text.ends_with("Load before the run: 0.5."));
        assert_eq!(section.columns[..2], ["calls of", "mode"]);
        assert_eq!(section.columns.len(), 8);
    }

    #[test]
    fn a_name_without_a_value_is_an_error() {
        assert!(Section::new("wasted", json!({ "calls": 7 })).is_err());
    }
}
