//! Detects stalls of this process, which may leave clients waiting whose requests were not read.

use std::{convert::Infallible, time::Duration};

use tokio::time::{Instant, sleep_until};

use crate::membership::turned_away::TurnedAway;

/// Interval at which this process is checked for stalls: 200 ms.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Maximum length of a stall that is not reported: 400 ms. A longer stall may leave clients waiting whose requests were not read.
///
/// Chosen as two check intervals. Owners allow for it before they rely on a heartbeat.
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
