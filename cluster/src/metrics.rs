//! Metrics through the `metrics` facade (feature `metrics`). Without the feature nothing is recorded.
//!
//! | name | kind | label `outcome` | what |
//! |---|---|---|---|
//! | `mcp_cluster_sound` | gauge | | 1 while heartbeats are answered and all local sessions are written, else 0 |
//! | `mcp_cluster_lookups_total` | counter | `owner`, `unowned`, `no_answer` | look-ups of owners, cached ones too |
//! | `mcp_cluster_relays_total` | counter | `answered`, `refused`, `moved`, `misdirected`, `unreachable`, `silent`, `broken`, `stalled` | requests sent to peers |
//! | `mcp_calls_postponed_total` | counter | | abandoned calls that were not cancelled yet, for want of proof from the directory |
//! | `mcp_cluster_claims_total` | counter | `won`, `lost`, `unowned`, `no_answer` | claims of sessions, relinquished or with a lapsed lease |

use crate::routing_plan::{Claimed, Failure, Known};

/// Describes the metrics to the recorder that is installed at this time.
pub(crate) fn describe() {
    #[cfg(feature = "metrics")]
    {
        use metrics::{Unit, describe_counter, describe_gauge};
        describe_gauge!(
            "mcp_cluster_sound",
            Unit::Count,
            "Whether heartbeats are answered and all local sessions are written"
        );
        describe_counter!(
            "mcp_cluster_lookups_total",
            Unit::Count,
            "Look-ups of owners, by outcome"
        );
        describe_counter!(
            "mcp_cluster_relays_total",
            Unit::Count,
            "Requests sent to peers, by outcome"
        );
        describe_counter!(
            "mcp_calls_postponed_total",
            Unit::Count,
            "Abandoned calls that were not cancelled yet for want of proof"
        );
        describe_counter!(
            "mcp_cluster_claims_total",
            Unit::Count,
            "Claims of sessions whose lease is over or that were given up, by outcome"
        );
    }
}

/// Records whether the directory is consistent.
pub(crate) fn directory_consistent(is_consistent: bool) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("mcp_cluster_sound").set(f64::from(u8::from(is_consistent)));
    #[cfg(not(feature = "metrics"))]
    let _ = is_consistent;
}

pub(crate) fn looked_up(known: Known) {
    count(
        "mcp_cluster_lookups_total",
        match known {
            Known::Owner(_) => "owner",
            Known::Unowned => "unowned",
            Known::NoAnswer => "no_answer",
        },
    );
}

/// Counts a relay by its outcome.
pub(crate) fn relayed(failure: Option<Failure>) {
    count(
        "mcp_cluster_relays_total",
        match failure {
            None => "answered",
            Some(Failure::Refused) => "refused",
            Some(Failure::Moved) => "moved",
            Some(Failure::Misdirected) => "misdirected",
            Some(Failure::Unreachable) => "unreachable",
            Some(Failure::Silent) => "silent",
            Some(Failure::Broken) => "broken",
            Some(Failure::Stalled) => "stalled",
        },
    );
}

/// Counts an abandoned call that was not cancelled yet.
pub(crate) fn confirmation_postponed() {
    #[cfg(feature = "metrics")]
    metrics::counter!("mcp_calls_postponed_total").increment(1);
}

pub(crate) fn claimed(claimed: Claimed) {
    count(
        "mcp_cluster_claims_total",
        match claimed {
            Claimed::Won => "won",
            Claimed::Lost(_) => "lost",
            Claimed::Unowned => "unowned",
            Claimed::NoAnswer => "no_answer",
        },
    );
}

#[cfg(feature = "metrics")]
fn count(name: &'static str, outcome: &'static str) {
    metrics::counter!(name, "outcome" => outcome).increment(1);
}

#[cfg(not(feature = "metrics"))]
fn count(_name: &'static str, _outcome: &'static str) {}
