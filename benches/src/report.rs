//! What a bench found, kept as JSON until all of it is put together.

use std::{
    fmt::{self, Display},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

pub mod page;
mod plot;

/// What one bench found: a paragraph, a table, and plots of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Section {
    /// Of the file and of the plots' files, for instance `latency`. It begins with the bench's.
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Target {
    pub what: String,
    pub bound: Bound,
    pub measured: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// Of the file, for instance `latency-1000`.
    pub name: String,
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    /// If there are any, there is a group of bars for each, in it a bar for each series: its point's `x` is the category's
    /// index. Else there is a line for each series.
    pub categories: Vec<String>,
    pub series: Vec<Series>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    /// With the unit, for instance `time to the token (ms)`.
    pub label: String,
    pub is_logarithmic: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// `target/report` of the crate, wherever the bench is run from.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/report")
}

// === impl Section ===

impl Section {
    /// With the title, the text and the columns that `words` has for it. The text gets these values in place of their
    /// names in braces.
    pub fn new(name: &str, values: &[(&str, &dyn Display)]) -> Result<Self> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("words/{name}.md"));
        let mut words = fs::read_to_string(file)?;
        for (name, value) in values {
            words = words.replace(&format!("{{{name}}}"), &value.to_string());
        }
        ensure!(!words.contains('{'), "{name}.md has names without a value");
        let (text, columns) = words.split_once("\n|").context("words without columns")?;
        let (title, text) = text.split_once("\n\n").context("words without a text")?;
        let paragraphs = text.trim().split("\n\n");
        let column = |cell: &str| cell.trim().to_owned();
        let mut section = Self {
            name: name.to_owned(),
            title: title.trim_start_matches("# ").to_owned(),
            command: String::new(),
            text: Vec::from_iter(paragraphs.map(|lines| lines.replace('\n', " "))).join("\n\n"),
            columns: columns
                .trim()
                .trim_matches('|')
                .split('|')
                .map(column)
                .collect(),
            rows: Vec::new(),
            targets: Vec::new(),
            plots: Vec::new(),
        };
        section.command = format!("benches/run {}", section.bench());
        Ok(section)
    }

    /// What measures it: the first part of its name.
    pub fn bench(&self) -> &str {
        self.name.split('-').next().unwrap_or(&self.name)
    }

    /// Prints the table, and keeps the section for the report.
    pub fn publish(&self) -> Result<()> {
        println!("## {}\n\n{}\n", self.title, self.text);
        println!("{}", self.table());
        for target in &self.targets {
            println!("{target}");
        }
        let folder = folder().join("data");
        fs::create_dir_all(&folder)?;
        let json = serde_json::to_vec_pretty(self)?;
        Ok(fs::write(folder.join(format!("{}.json", self.name)), json)?)
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
    pub fn at_most(most: f64, what: String, measured: f64) -> Self {
        Self::new(Bound::AtMost(most), what, measured)
    }

    pub fn at_least(least: f64, what: String, measured: f64) -> Self {
        Self::new(Bound::AtLeast(least), what, measured)
    }

    fn new(bound: Bound, what: String, measured: f64) -> Self {
        Self {
            what,
            bound,
            measured,
        }
    }

    pub fn holds(&self) -> bool {
        match self.bound {
            Bound::AtMost(most) => self.measured <= most,
            Bound::AtLeast(least) => self.measured >= least,
        }
    }
}

impl Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.holds() { "holds" } else { "MISSED" };
        let (word, bound) = match self.bound {
            Bound::AtMost(most) => ("at most", most),
            Bound::AtLeast(least) => ("at least", least),
        };
        let Self { what, measured, .. } = self;
        write!(f, "- {what}: {measured:.3}, {word} {bound}: {verdict}")
    }
}

// === impl Plot ===

impl Plot {
    /// A line for each series.
    pub fn lines(name: &str, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Self {
        Self {
            name: name.to_owned(),
            title: title.to_owned(),
            x,
            y,
            categories: Vec::new(),
            series,
        }
    }

    /// Bars in place of lines.
    pub fn over<T: Display>(mut self, categories: impl IntoIterator<Item = T>) -> Self {
        let names = categories.into_iter().map(|category| category.to_string());
        self.categories = names.collect();
        self
    }
}

// === impl Axis ===

impl Axis {
    pub fn linear(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            is_logarithmic: false,
        }
    }

    pub fn logarithmic(label: &str) -> Self {
        Self {
            is_logarithmic: true,
            ..Self::linear(label)
        }
    }
}

// === impl Series ===

impl Series {
    pub fn new(name: impl Display, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        Self {
            name: name.to_string(),
            points: points.into_iter().collect(),
        }
    }

    /// Over 0, 1, 2 and so on.
    pub fn of(name: impl Display, figures: impl IntoIterator<Item = f64>) -> Self {
        Self::new(name, (0..).map(f64::from).zip(figures))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn section() -> Section {
        let series = |name| Series::of(name, [1.0, 2.0]);
        Section {
            name: "some".to_owned(),
            title: "A title".to_owned(),
            command: "benches/run some".to_owned(),
            text: "Some text.".to_owned(),
            columns: vec!["set-up".to_owned(), "figure".to_owned()],
            rows: vec![vec!["bare".to_owned(), "1".to_owned()]],
            targets: vec![
                Target::at_most(1.05, "a ratio".to_owned(), 1.2),
                Target::at_least(95.0, "a share".to_owned(), 99.0),
            ],
            plots: vec![Plot::lines(
                "some-plot",
                "A plot",
                Axis::linear("an x"),
                Axis::linear("a y"),
                vec![series("bare"), series("wrapped")],
            )],
        }
    }

    #[test]
    fn a_target_that_was_not_measured_does_not_hold() {
        let mut target = section().targets.remove(0);
        target.measured = f64::NAN;
        assert!(!target.holds());
    }

    #[test]
    fn a_section_has_its_words_with_values_in_them() {
        let section = Section::new("wasted", &[("calls", &7), ("load", &"0.5")]).unwrap();
        assert_eq!(section.title, "Work for nobody, and work destroyed");
        assert_eq!(section.command, "benches/run wasted");
        assert!(
            section
                .text
                .starts_with("7 calls; 30 % of the clients hang up")
        );
        assert!(section.text.ends_with("Load before the run: 0.5."));
        assert_eq!(section.columns[..2], ["calls of", "mode"]);
        assert_eq!(section.columns.len(), 8);
    }

    #[test]
    fn words_with_a_name_that_has_no_value_are_refused() {
        assert!(Section::new("wasted", &[("calls", &7)]).is_err());
    }
}
