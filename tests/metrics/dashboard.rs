//! The dashboard only uses metrics and labels that exist.

use serde_json::Value;

use crate::script::scripted;

const DASHBOARD: &str = include_str!("../../examples/prometheus/grafana.json");

/// Labels that Prometheus adds, or that histograms have for their buckets.
const LABELS_OF_PROMETHEUS: [&str; 3] = ["job", "instance", "le"];

#[tokio::test]
async fn every_query_names_metrics_and_labels_that_exist() {
    let scrape = scripted().await;
    let queries = queries();
    assert!(queries.len() > 10, "{queries:?}");
    for query in queries {
        let names = names(&query);
        assert!(!names.is_empty(), "{query}");
        let labels: Vec<_> = names
            .iter()
            .flat_map(|name| scrape.labels_of(name))
            .collect();
        for name in &names {
            assert!(scrape.has(name), "no {name} for {query}");
        }
        for label in labels_in(&query) {
            let exists = labels.contains(&label) || LABELS_OF_PROMETHEUS.contains(&&*label);
            assert!(exists, "no label {label} for {query}");
        }
    }
}

#[tokio::test]
async fn every_metric_is_on_the_dashboard() {
    let scrape = scripted().await;
    let queries = queries();
    let shown: Vec<_> = queries.iter().flat_map(|query| names(query)).collect();
    for (metric, _) in scrape.types() {
        let is_it = |name: &String| {
            let name = name.strip_prefix(&*metric);
            name.is_some_and(|rest| ["", "_bucket", "_count", "_sum"].contains(&rest))
        };
        assert!(shown.iter().any(is_it), "{metric} is not on the dashboard");
    }
}

#[test]
fn panels_do_not_overlap() {
    let panels = panels();
    let places: Vec<_> = panels.iter().map(place).collect();
    for (nth, one) in places.iter().enumerate() {
        assert!(one.x + one.w <= 24, "{one:?}");
        for other in &places[nth + 1..] {
            let beside = one.x + one.w <= other.x || other.x + other.w <= one.x;
            let above = one.y + one.h <= other.y || other.y + other.h <= one.y;
            assert!(beside || above, "{one:?} and {other:?}");
        }
    }
}

#[derive(Debug)]
struct Place {
    x: u64,
    y: u64,
    w: u64,
    h: u64,
}

fn place(panel: &Value) -> Place {
    let of = |key: &str| panel["gridPos"][key].as_u64().expect("a number");
    Place {
        x: of("x"),
        y: of("y"),
        w: of("w"),
        h: of("h"),
    }
}

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    dashboard["panels"].as_array().expect("panels").clone()
}

/// All queries, from both panels and variables.
fn queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let panels = panels();
    let targets = panels.iter().flat_map(|panel| {
        let targets = panel["targets"].as_array().expect("targets");
        targets.iter().map(|target| target["expr"].clone())
    });
    let variables = dashboard["templating"]["list"]
        .as_array()
        .expect("variables");
    let variables = variables
        .iter()
        .filter(|variable| variable["type"] == "query");
    let variables = variables.map(|variable| variable["query"]["query"].clone());
    let queries = targets.chain(variables);
    queries
        .map(|query| query.as_str().expect("text").to_owned())
        .collect()
}

/// The metrics in a query, including histogram suffixes.
fn names(query: &str) -> Vec<String> {
    let words = query.split(|text: char| !(text.is_ascii_alphanumeric() || text == '_'));
    let names = words.filter(|word| word.starts_with("mcp_"));
    names.map(str::to_owned).collect()
}

/// The labels in a query: in `{…}`, after `by`, or as the second argument to `label_values` for the started calls.
fn labels_in(query: &str) -> Vec<String> {
    let mut labels = Vec::new();
    for matchers in query.split('{').skip(1) {
        let matchers = matchers.split('}').next().unwrap_or_default();
        let keys = matchers
            .split(',')
            .filter_map(|matcher| matcher.split('=').next());
        labels.extend(keys.map(|key| key.trim().to_owned()));
    }
    let lists = query
        .split(" by (")
        .skip(1)
        .chain(query.strip_prefix("label_values(mcp_calls_started_total,"));
    for list in lists {
        let list = list.split(')').next().unwrap_or_default();
        labels.extend(list.split(',').map(|label| label.trim().to_owned()));
    }
    labels
}
