//! Which cells of a table run, and how.

use std::{any::Any, fmt::Debug, panic::AssertUnwindSafe};

use futures_util::{FutureExt as _, StreamExt as _, stream};

/// What the program is doing when the fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    BeforeInitialize,
    Idle,
    CallInFlight,
    ClientAway,
    AnswerWaits,
    Draining,
}

/// How many cells run at a time. They mostly wait.
const MAX_CONCURRENT: usize = 4;

// === impl Phase ===

impl Phase {
    pub(crate) const ALL: [Self; 6] = [
        Self::BeforeInitialize,
        Self::Idle,
        Self::CallInFlight,
        Self::ClientAway,
        Self::AnswerWaits,
        Self::Draining,
    ];
}

/// Runs these rows' cells, or one from each row, and reports every cell that fails.
pub(crate) async fn run<R: Debug + Copy>(rows: &[R], cell: impl AsyncFn(R, Phase)) {
    let is_all = std::env::var("MCP_PROXY_TEST_CELLS").is_ok_and(|cells| cells == "all");
    let cells = rows.iter().enumerate().flat_map(|(number, row)| {
        Phase::ALL
            .into_iter()
            .enumerate()
            // Consecutive rows run in different phases.
            .filter(move |(column, _)| is_all || (number + 2) % Phase::ALL.len() == *column)
            .map(move |(_, phase)| (*row, phase))
    });
    let outcomes = stream::iter(cells).map(async |(row, phase)| {
        let outcome = AssertUnwindSafe(cell(row, phase)).catch_unwind().await;
        outcome
            .err()
            .map(|panic| format!("{row:?} × {phase:?}: {}", panic_message(&*panic)))
    });
    let failed: Vec<String> = outcomes
        .buffer_unordered(MAX_CONCURRENT)
        .filter_map(async |failed| failed)
        .collect()
        .await;
    assert!(
        failed.is_empty(),
        "{} cells failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

/// Returns a panic's message, or an empty string if it has none.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied())
        .unwrap_or_default()
}
