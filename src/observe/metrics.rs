//! Call metrics, through the `metrics` facade.

use std::fmt;

use metrics::{
    Label, SharedString, Unit, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram,
};

use super::{Event, Observer, ToolNames};
use crate::call::{CallInfo, Detachment, Outcome};

const IN_FLIGHT: &str = "mcp_calls_in_flight";
const DETACHED: &str = "mcp_calls_detached";
const STARTED: &str = "mcp_calls_started_total";
const ENDED: &str = "mcp_calls_ended_total";
const DETACHES: &str = "mcp_call_detaches_total";
const RESUMES: &str = "mcp_call_resumes_total";
const CANCELS_FAILED: &str = "mcp_call_cancels_failed_total";
const UNTRACKED: &str = "mcp_calls_untracked_total";
const ANSWERS_EVICTED: &str = "mcp_answers_evicted_total";
const BODIES_UNPARSED: &str = "mcp_request_bodies_unparsed_total";
const DURATION: &str = "mcp_call_duration_seconds";
const DETACHED_FOR: &str = "mcp_call_detached_seconds";
const TO_TOKEN: &str = "mcp_call_disconnect_to_token_seconds";

/// Label value for all unknown names, because a client can make up any name.
const OTHER: &str = "other";

/// An [`Observer`] that counts calls through the [`metrics`](https://docs.rs/metrics) facade (feature `metrics`).
///
/// | name | kind | labels | what |
/// |---|---|---|---|
/// | `mcp_calls_in_flight` | gauge | `method` | calls in flight, attached or detached |
/// | `mcp_calls_detached` | gauge | `method` | detached calls in flight |
/// | `mcp_calls_started_total` | counter | `method` | calls that have started |
/// | `mcp_calls_ended_total` | counter | `method`, `outcome`, and `reason` if cancelled or abandoned | calls that have ended, which is the number started minus the number in flight |
/// | `mcp_call_detaches_total` | counter | `method`, `cause` | detachments, including those of calls cancelled immediately |
/// | `mcp_call_resumes_total` | counter | `method` | times a client has resumed its call |
/// | `mcp_call_cancels_failed_total` | counter | `method` | cancellations that could not be delivered to the server |
/// | `mcp_calls_untracked_total` | counter | `limit` | calls that exceeded a limit, see [`Limits`](crate::Limits) |
/// | `mcp_answers_evicted_total` | counter | `outcome` | answers that were evicted or not retained, even though their clients may resume |
/// | `mcp_request_bodies_unparsed_total` | counter | `why` | request bodies that could not be parsed as JSON-RPC |
/// | `mcp_call_duration_seconds` | histogram | `method`, `outcome` | time from a call's start to its end |
/// | `mcp_call_detached_seconds` | histogram | `method`, `until` | length of a detachment, where `until` is the call's outcome, or `resumed` |
/// | `mcp_call_disconnect_to_token_seconds` | histogram | `method`, `reason` | time from detecting the disconnect to firing the token, for detached calls that were cancelled or abandoned |
///
/// Most label values are variant names in snake case, such as `reason="client_disconnected"`. Every label has only a few values: a `method`
/// that MCP does not define is `other`, and tools have no label unless [`tools`](Self::tools) or [`tool_names`](Self::tool_names) specifies
/// them. Durations use tokio's clock.
///
/// Install the recorder before calling [`new`](Self::new), which describes the metrics to it. If the recorder needs buckets for
/// histograms, pass it [`BUCKETS`](Self::BUCKETS):
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, observe::Metrics};
/// use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let seconds = Matcher::Suffix("_seconds".to_owned());
/// let prometheus = PrometheusBuilder::new()
///     .set_buckets_for_metric(seconds, &Metrics::BUCKETS)?
///     .install_recorder()?;
/// let layer = CancelOnDisconnectLayer::new().observe(Metrics::new());
/// assert_eq!(prometheus.render(), ""); // until there is a call
/// # drop(layer);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Metrics {
    tools: Option<Tools>,
}

/// The tools that may become labels.
#[derive(Debug, Clone)]
enum Tools {
    Fixed(Vec<SharedString>),
    Added(ToolNames),
}

// === impl Metrics ===

impl Metrics {
    /// Upper bounds of the histogram buckets, in seconds.
    ///
    /// These are the bounds OpenTelemetry defines for `mcp.server.operation.duration`, 10 ms to 5 min, plus 1 ms for tokens that fire
    /// immediately.
    pub const BUCKETS: [f64; 15] = [
        0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    ];

    /// Creates an observer without the label `tool`, and describes its metrics.
    ///
    /// The descriptions are passed to the currently installed recorder.
    pub fn new() -> Self {
        describe();
        Self { tools: None }
    }

    /// Adds the label `tool` to all metrics with the label `method`.
    ///
    /// Its value is one of these tool names, or `other` for any other tool, because a client can make up names. Calls without a tool do not
    /// get the label. Any names set earlier are replaced.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, observe::Metrics};
    ///
    /// let metrics = Metrics::new().tools(["upload", "deploy"]);
    /// assert!(format!("{metrics:?}").contains("deploy"));
    /// let layer = CancelOnDisconnectLayer::new().observe(metrics);
    /// # drop(layer);
    /// ```
    pub fn tools(mut self, names: impl IntoIterator<Item: Into<String>>) -> Self {
        let names = names
            .into_iter()
            .map(|name| SharedString::from(name.into()));
        self.tools = Some(Tools::Fixed(names.collect()));
        self
    }

    /// Adds the label `tool`, for names that can be added later. Replaces any names set earlier.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::observe::{Metrics, ToolNames};
    ///
    /// let names = ToolNames::new();
    /// let metrics = Metrics::new().tool_names(names.clone());
    /// names.add("deploy");
    /// assert!(format!("{metrics:?}").contains("deploy"));
    /// ```
    pub fn tool_names(mut self, names: ToolNames) -> Self {
        self.tools = Some(Tools::Added(names));
        self
    }

    fn labels<const N: usize>(
        &self,
        call: &CallInfo,
        extra: [(&'static str, &'static str); N],
    ) -> Vec<Label> {
        let method = Label::from_static_parts("method", method_label(call.method()));
        let extra = extra.map(|(key, value)| Label::from_static_parts(key, value));
        let tool = self.tool(call).map(|tool| Label::new("tool", tool));
        [method].into_iter().chain(extra).chain(tool).collect()
    }

    fn tool(&self, call: &CallInfo) -> Option<SharedString> {
        let name = call.tool()?;
        let known = match self.tools.as_ref()? {
            Tools::Fixed(known) => known.iter().find(|known| ***known == *name).cloned(),
            Tools::Added(known) => known.label_for(call, name),
        };
        Some(known.unwrap_or(SharedString::const_str(OTHER)))
    }

    fn record_end(&self, call: &CallInfo, outcome: Outcome, detachment: Option<Detachment>) {
        let outcome_label = ("outcome", outcome.name());
        gauge!(IN_FLIGHT, self.labels(call, [])).decrement(1);
        histogram!(DURATION, self.labels(call, [outcome_label])).record(call.age());
        if let Outcome::Cancelled(reason) | Outcome::Abandoned(reason) = outcome {
            let reason_label = ("reason", reason.name());
            counter!(ENDED, self.labels(call, [outcome_label, reason_label])).increment(1);
            if let Some(detachment) = detachment {
                let labels = self.labels(call, [reason_label]);
                histogram!(TO_TOKEN, labels).record(detachment.lasted());
            }
        } else {
            counter!(ENDED, self.labels(call, [outcome_label])).increment(1);
        }
        self.record_detachment(call, outcome_label.1, detachment);
    }

    /// Records the end of a detachment. Does nothing if the call was attached.
    fn record_detachment(
        &self,
        call: &CallInfo,
        until: &'static str,
        detachment: Option<Detachment>,
    ) {
        if let Some(detachment) = detachment {
            gauge!(DETACHED, self.labels(call, [])).decrement(1);
            let labels = self.labels(call, [("until", until)]);
            histogram!(DETACHED_FOR, labels).record(detachment.lasted());
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Observer for Metrics {
    fn on_event(&self, event: &Event<'_>) {
        match event {
            Event::Started { call } => {
                if let Some(Tools::Added(names)) = &self.tools {
                    names.on_started(call);
                }
                let labels = self.labels(call, []);
                gauge!(IN_FLIGHT, labels.clone()).increment(1);
                counter!(STARTED, labels.clone()).increment(1);
                // Register the counter at the start, so that its first increment shows up as an increase.
                counter!(CANCELS_FAILED, labels).increment(0);
            }
            Event::Detached { call, cause, .. } => {
                gauge!(DETACHED, self.labels(call, [])).increment(1);
                let cause = ("cause", cause.name());
                counter!(DETACHES, self.labels(call, [cause])).increment(1);
            }
            Event::Resumed { call, detachment } => {
                counter!(RESUMES, self.labels(call, [])).increment(1);
                self.record_detachment(call, "resumed", *detachment);
            }
            Event::Ended {
                call,
                outcome,
                detachment,
            } => self.record_end(call, *outcome, *detachment),
            Event::CancelFailed { call, .. } => {
                counter!(CANCELS_FAILED, self.labels(call, [])).increment(1);
            }
            Event::Untracked { limit, .. } => {
                counter!(UNTRACKED, "limit" => limit.name()).increment(1);
            }
            Event::AnswerEvicted { outcome, .. } => {
                counter!(ANSWERS_EVICTED, "outcome" => outcome.name()).increment(1);
            }
            Event::UnparsedBody { reason } => {
                counter!(BODIES_UNPARSED, "why" => snake_case(reason)).increment(1);
            }
        }
    }
}

fn describe() {
    for (name, description) in [
        (IN_FLIGHT, "Calls in flight"),
        (DETACHED, "Detached calls in flight"),
    ] {
        describe_gauge!(name, Unit::Count, description);
    }
    for (name, description) in [
        (STARTED, "Calls that have started"),
        (ENDED, "Calls that have ended, by outcome"),
        (DETACHES, "Call detachments"),
        (RESUMES, "Number of times a client has resumed its call"),
        (
            CANCELS_FAILED,
            "Cancellations that could not be delivered to the server",
        ),
        (
            UNTRACKED,
            "Calls over a limit, which keep running untracked",
        ),
        (
            ANSWERS_EVICTED,
            "Answers that were evicted or not retained, even though their clients may resume",
        ),
        (
            BODIES_UNPARSED,
            "Request bodies that could not be parsed as JSON-RPC",
        ),
    ] {
        describe_counter!(name, Unit::Count, description);
    }
    for (name, description) in [
        (DURATION, "Time from the start of a call until it ends"),
        (DETACHED_FOR, "Duration of a detachment"),
        (
            TO_TOKEN,
            "Time from a disconnect until the cancelled call's token fires",
        ),
    ] {
        describe_histogram!(name, Unit::Seconds, description);
    }
}

/// Returns the name if a revision or an extension of MCP defines it, or [`OTHER`] otherwise.
fn method_label(name: &str) -> &'static str {
    const KNOWN: [&str; 22] = [
        "tools/call",
        "tools/list",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        "resources/directory/read",
        "resources/subscribe",
        "resources/unsubscribe",
        "skills/list",
        "skills/get",
        "prompts/list",
        "prompts/get",
        "completion/complete",
        "logging/setLevel",
        "ping",
        "server/discover",
        "subscriptions/listen",
        "tasks/get",
        "tasks/result",
        "tasks/list",
        "tasks/update",
        "tasks/cancel",
    ];
    KNOWN
        .into_iter()
        .find(|known| *known == name)
        .unwrap_or(OTHER)
}

/// Converts a variant's name to snake case.
fn snake_case(variant: &impl fmt::Debug) -> SharedString {
    let mut name = String::new();
    for letter in format!("{variant:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_extensions_have_their_own_names_and_made_up_ones_have_none() {
        for name in [
            "tasks/update",
            "skills/list",
            "skills/get",
            "resources/directory/read",
        ] {
            assert_eq!(method_label(name), name);
        }
        assert_eq!(method_label("tools/made-up"), OTHER);
    }
}
