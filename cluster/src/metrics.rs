//! Metrics, recorded through the `metrics` facade if the `metrics` feature is enabled.
//!
//! | name | kind | label `outcome` | meaning |
//! |---|---|---|---|
//! | `mcp_cluster_directory_consistent` | gauge | | 1 while heartbeats are being answered and all local sessions have been written, otherwise 0 |
//! | `mcp_cluster_lookups_total` | counter | `owner`, `unowned`, `no_answer` | owner lookups, including cached ones |
//! | `mcp_cluster_relays_total` | counter | `answered`, `refused`, `moved`, `misdirected`, `unreachable`, `silent`, `broken`, `stalled` | requests sent to peers |
//! | `mcp_calls_postponed_total` | counter | | times the cancellation of an orphaned call was postponed because its client might have resumed elsewhere |
//! | `mcp_cluster_claims_total` | counter | `won`, `lost`, `unowned`, `no_answer` | attempts to claim a session requested here, after its owner relinquished it or lost its lease |

/// Describes the metrics to the currently installed recorder.
pub(crate) fn describe() {
    #[cfg(feature = "metrics")]
    {
        use metrics::{Unit, describe_counter, describe_gauge};
        describe_gauge!(
            "mcp_cluster_directory_consistent",
            Unit::Count,
            "Whether heartbeats are being answered and all local sessions have been written"
        );
        describe_counter!(
            "mcp_cluster_lookups_total",
            Unit::Count,
            "Owner lookups, by outcome"
        );
        describe_counter!(
            "mcp_cluster_relays_total",
            Unit::Count,
            "Requests sent to peers, by outcome"
        );
        describe_counter!(
            "mcp_calls_postponed_total",
            Unit::Count,
            "Number of times the cancellation of an orphaned call was postponed"
        );
        describe_counter!(
            "mcp_cluster_claims_total",
            Unit::Count,
            "Claims on sessions that were relinquished or whose owner lost its lease, by outcome"
        );
    }
}

pub(crate) fn set_directory_consistent(is_consistent: bool) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("mcp_cluster_directory_consistent").set(f64::from(u8::from(is_consistent)));
    #[cfg(not(feature = "metrics"))]
    let _ = is_consistent;
}

pub(crate) fn count_lookup(outcome: &'static str) {
    count("mcp_cluster_lookups_total", outcome);
}

pub(crate) fn count_relay(outcome: &'static str) {
    count("mcp_cluster_relays_total", outcome);
}

pub(crate) fn count_postponed_cancel() {
    #[cfg(feature = "metrics")]
    metrics::counter!("mcp_calls_postponed_total").increment(1);
}

pub(crate) fn count_claim(outcome: &'static str) {
    count("mcp_cluster_claims_total", outcome);
}

#[cfg(feature = "metrics")]
fn count(name: &'static str, outcome: &'static str) {
    metrics::counter!(name, "outcome" => outcome).increment(1);
}

#[cfg(not(feature = "metrics"))]
fn count(_name: &'static str, _outcome: &'static str) {}
