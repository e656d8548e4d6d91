//! Parses as much of Prometheus' text format as these tests need.

use std::collections::BTreeMap;

/// The endpoint's response.
#[derive(Clone, Debug)]
pub(crate) struct Scrape {
    text: String,
    /// By name and labels.
    samples: BTreeMap<(String, Labels), f64>,
}

/// Sorted by name.
type Labels = BTreeMap<String, String>;

// === impl Scrape ===

impl Scrape {
    pub(crate) fn parse(text: String) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let samples = lines.filter(|line| !line.is_empty()).map(sample).collect();
        Self { text, samples }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns one sample, or 0 if there is none.
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let labels = labels.iter();
        let labels = labels.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let sample = self.samples.get(&(name.to_owned(), labels.collect()));
        sample.copied().unwrap_or(0.0)
    }

    /// Returns the sum of all of a metric's samples.
    pub(crate) fn sum(&self, name: &str) -> f64 {
        self.of(name).map(|(_, value)| value).sum()
    }

    /// Returns the names of the labels on a metric's samples, with repeats.
    pub(crate) fn labels_of(&self, name: &str) -> Vec<String> {
        self.of(name)
            .flat_map(|(labels, _)| labels.keys().cloned())
            .collect()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.of(name).next().is_some()
    }

    /// Returns the metrics and their types.
    pub(crate) fn types(&self) -> Vec<(String, String)> {
        let types = self
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "));
        let types = types.filter_map(|line| line.split_once(' '));
        types
            .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
            .collect()
    }

    pub(crate) fn is_described(&self, name: &str) -> bool {
        let help = format!("# HELP {name} ");
        self.text
            .lines()
            .any(|line| line.len() > help.len() && line.starts_with(&help))
    }

    fn of(&self, name: &str) -> impl Iterator<Item = (&Labels, f64)> {
        let samples = self.samples.iter().filter(move |((of, _), _)| of == name);
        samples.map(|((_, labels), value)| (labels, *value))
    }
}

/// Parses a line's name, labels and value. The labels contain neither quotes nor commas.
fn sample(line: &str) -> ((String, Labels), f64) {
    let (series, value) = line.rsplit_once(' ').expect("a value");
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}').expect("the end of the labels");
    let labels = labels.split_terminator(',').map(|label| {
        let (key, value) = label.split_once('=').expect("a label");
        (key.to_owned(), value.trim_matches('"').to_owned())
    });
    let value = value.parse().expect("a number");
    ((name.to_owned(), labels.collect()), value)
}
