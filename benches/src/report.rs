//! What a bench found, kept as JSON until all of it is put together.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

pub mod machine;
pub mod page;
mod plot;

/// What one bench found: a paragraph, a table, and plots of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Section {
    /// Of the file and of the plots' files, for instance `latency`.
    pub name: String,
    pub title: String,
    /// The command that measures it again.
    pub command: String,
    /// What was measured, and what would be a bad result. Markdown.
    pub text: String,
    pub columns: Vec<String>,
    pub rows: Vec<Vec<String>>,
    pub targets: Vec<Target>,
    pub plots: Vec<Plot>,
}

/// What a figure should be at most, or at least.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Target {
    pub what: String,
    pub bound: Bound,
    pub measured: f64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plot {
    /// Of the file, for instance `latency-1000`.
    pub name: String,
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub kind: Kind,
    pub series: Vec<Series>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Axis {
    /// With the unit, for instance `time to the token (ms)`.
    pub label: String,
    pub scale: Scale,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scale {
    Linear,
    Logarithmic,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Kind {
    /// A line for each series.
    Lines,
    /// A group of bars for each of these categories, in it a bar for each series: its point's `x` is the
    /// category's index.
    Bars { categories: Vec<String> },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// `target/report` of the crate, wherever the bench is run from.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/report")
}

// === impl Axis ===

impl Axis {
    pub fn linear(label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            scale: Scale::Linear,
        }
    }

    pub fn logarithmic(label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            scale: Scale::Logarithmic,
        }
    }
}

// === impl Section ===

impl Section {
    /// Prints the table, and keeps the section for the report.
    pub fn publish(&self) -> io::Result<()> {
        println!("## {}\n\n{}\n", self.title, self.text);
        println!("{}", self.table());
        for target in &self.targets {
            println!("{target}");
        }
        let folder = folder().join("data");
        fs::create_dir_all(&folder)?;
        let json = serde_json::to_vec_pretty(self)?;
        fs::write(folder.join(format!("{}.json", self.name)), json)
    }

    /// The table, in Markdown.
    pub fn table(&self) -> String {
        let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule: Vec<String> = self.columns.iter().map(|_| "---".to_owned()).collect();
        let rows: String = self.rows.iter().map(|cells| row(cells)).collect();
        row(&self.columns) + &row(&rule) + &rows
    }
}

// === impl Target ===

impl Target {
    pub fn holds(&self) -> bool {
        match self.bound {
            Bound::AtMost(most) => self.measured <= most,
            Bound::AtLeast(least) => self.measured >= least,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let verdict = if self.holds() { "holds" } else { "MISSED" };
        let (word, bound) = match self.bound {
            Bound::AtMost(most) => ("at most", most),
            Bound::AtLeast(least) => ("at least", least),
        };
        let Self { what, measured, .. } = self;
        write!(f, "- {what}: {measured:.3}, {word} {bound}: {verdict}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn section() -> Section {
        let target = |what: &str, bound, measured| Target {
            what: what.to_owned(),
            bound,
            measured,
        };
        let axis = |label: &str| Axis {
            label: label.to_owned(),
            scale: Scale::Linear,
        };
        let series = |name: &str| Series {
            name: name.to_owned(),
            points: vec![(0.0, 1.0), (1.0, 2.0)],
        };
        Section {
            name: "some".to_owned(),
            title: "A title".to_owned(),
            command: "benches/run some".to_owned(),
            text: "Some text.".to_owned(),
            columns: vec!["set-up".to_owned(), "figure".to_owned()],
            rows: vec![vec!["bare".to_owned(), "1".to_owned()]],
            targets: vec![
                target("a ratio", Bound::AtMost(1.05), 1.2),
                target("a share", Bound::AtLeast(95.0), 99.0),
            ],
            plots: vec![Plot {
                name: "some-plot".to_owned(),
                title: "A plot".to_owned(),
                x: axis("an x"),
                y: axis("a y"),
                kind: Kind::Lines,
                series: vec![series("bare"), series("wrapped")],
            }],
        }
    }

    #[test]
    fn a_target_that_was_not_measured_does_not_hold() {
        let mut target = section().targets.remove(0);
        target.measured = f64::NAN;
        assert!(!target.holds());
    }
}
