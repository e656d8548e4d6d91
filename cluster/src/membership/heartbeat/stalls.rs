//! Detects stalls of this process, during which clients may have waited unnoticed.

use std::{convert::Infallible, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::membership::turned_away::TurnedAway;

/// How often this process is checked for stalls.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The longest stall that may remain unreported: two check intervals.
///
/// During a stall, clients may be waiting with unread requests. Longer stalls are recorded, and owners allow for shorter stalls before they
/// rely on a heartbeat.
pub(crate) const MAX_UNREPORTED_STALL: Duration = CHECK_INTERVAL.saturating_mul(2);

/// Counts clients as turned away after each stall of this process, forever.
pub(super) async fn watch(turned_away: &TurnedAway) -> Infallible {
    loop {
        let due = Instant::now() + CHECK_INTERVAL;
        sleep_until(due).await;
        if Instant::now() > due + CHECK_INTERVAL {
            turned_away.record();
        }
    }
}
