//! Metrics through the `metrics` facade (feature `metrics`). Without the feature nothing is recorded.
//!
//! | name | kind | label `outcome` | what |
//! |---|---|---|---|
//! | `mcp_cluster_directory_consistent` | gauge | | 1 while heartbeats are answered and all local sessions have been written, else 0 |
//! | `mcp_cluster_lookups_total` | counter | `owner`, `unowned`, `no_answer` | lookups of owners, cached ones too |
//! | `mcp_cluster_relays_total` | counter | `answered`, `refused`, `moved`, `misdirected`, `unreachable`, `silent`, `broken`, `stalled` | requests sent to peers |
//! | `mcp_calls_postponed_total` | counter | | number of times the cancel of an orphaned call was postponed, because its client might have resumed elsewhere |
//! | `mcp_cluster_claims_total` | counter | `won`, `lost`, `unowned`, `no_answer` | claims of sessions that were requested here, and whose owner relinquished them or has no lease |

/// Describes the metrics to the currently installed recorder.
pub(crate) fn describe() {
    #[cfg(feature = "metrics")]
    {
        use metrics::{Unit, describe_counter, describe_gauge};
        describe_gauge!(
            "mcp_cluster_directory_consistent",
            Unit::Count,
            "Whether heartbeats are answered and all local sessions have been written"
        );
        describe_counter!(
            "mcp_cluster_lookups_total",
            Unit::Count,
            "Lookups of owners, by outcome"
        );
        describe_counter!(
            "mcp_cluster_relays_total",
            Unit::Count,
            "Requests sent to peers, by outcome"
        );
        describe_counter!(
            "mcp_calls_postponed_total",
            Unit::Count,
            "Number of times the cancel of an orphaned call was postponed"
        );
        describe_counter!(
            "mcp_cluster_claims_total",
            Unit::Count,
            "Claims of sessions that were relinquished or whose owner has no lease, by outcome"
        );
    }
}

/// Records whether the directory is consistent.
pub(crate) fn set_directory_consistent(is_consistent: bool) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("mcp_cluster_directory_consistent").set(f64::from(u8::from(is_consistent)));
    #[cfg(not(feature = "metrics"))]
    let _ = is_consistent;
}

/// Counts a lookup of an owner by its outcome.
pub(crate) fn count_lookup(outcome: &'static str) {
    count("mcp_cluster_lookups_total", outcome);
}

/// Counts a relay by its outcome.
pub(crate) fn count_relay(outcome: &'static str) {
    count("mcp_cluster_relays_total", outcome);
}

/// Counts a postponed cancel of an orphaned call.
pub(crate) fn count_postponed_cancel() {
    #[cfg(feature = "metrics")]
    metrics::counter!("mcp_calls_postponed_total").increment(1);
}

/// Counts a claim by its outcome.
pub(crate) fn count_claim(outcome: &'static str) {
    count("mcp_cluster_claims_total", outcome);
}

#[cfg(feature = "metrics")]
fn count(name: &'static str, outcome: &'static str) {
    metrics::counter!(name, "outcome" => outcome).increment(1);
}

#[cfg(not(feature = "metrics"))]
fn count(_name: &'static str, _outcome: &'static str) {}
