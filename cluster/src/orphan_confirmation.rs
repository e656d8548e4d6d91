//! Decides whether an orphan may be cancelled or its client may have resumed elsewhere.
//!
//! The instance running a call makes this decision once the call's grace period has ended. Usually, the directory confirms that this
//! instance still owns the session, and no client has been turned away recently, so the call is cancelled. As long as the client may have
//! reached another instance, the cancellation is postponed, and all checks are repeated after the delay.
//!
//! The call waits for another grace period if the directory may have lost leases or reports of turned-away clients:
//!
//! - The directory is not consistent, or loses consistency before the lookup is complete.
//! - The directory does not contain this instance's lease, so it may also have lost others.
//! - The backend's run id has changed since the last heartbeat.
//!
//! The call waits only for as long as necessary in these cases:
//!
//! - If the directory has been consistent for less than the grace period or a lease's lifetime, the call waits until the directory has been
//!   consistent for both.
//! - If the lookup has been queued behind other orphans' lookups for 5 s, or the directory does not answer, the call waits for 1 s.
//! - If another live instance has yet to send a heartbeat created at least 2.15 s after the grace period ended, the call waits until that
//!   heartbeat is due.
//! - If the grace period ended less than 1.15 s ago, the call waits until 1.15 s have passed, because an instance that has yet to obtain a
//!   lease may have turned the client away.
//! - If an instance has recently turned a client away, the call waits until that client's backoff is over.
//!
//! Otherwise, the outcome depends on the session's record in the directory:
//!
//! - If the record names this instance as the owner, the call is cancelled.
//! - If the record is a tombstone, the session has been closed, so the call is cancelled.
//! - If there is no record, the leases prove that none exists, and the session is not local, the call is cancelled.
//! - In all other cases, the session is rewritten, which settles who owns it, and the call waits for another grace period.

use std::time::Duration;

use mcp_cancel_on_disconnect::{Confirmation, Orphan};
use tokio::time::{Instant, timeout};

use crate::{
    directory::{Directory as _, Lease, Leases},
    ids::{Incarnation, Record, SessionHash},
    membership::{
        heartbeat::{
            HEARTBEAT_INTERVAL, MAX_BACKWARD_CLOCK_STEP, MAX_UNREPORTED_STALL, SETTLE_PERIOD,
        },
        turned_away::MAX_RECORD_DELAY,
    },
    metrics,
    routing::router::Router,
};

/// Maximum delay before a heartbeat reports a turned-away client: 1.15 s.
///
/// Recording the client takes up to [`MAX_RECORD_DELAY`], and the instance may also have stalled for up to [`MAX_UNREPORTED_STALL`].
const UNRECORDED_WINDOW: Duration = MAX_RECORD_DELAY.saturating_add(MAX_UNREPORTED_STALL);

/// How long after the end of a grace period a heartbeat must be created to count: 2.15 s.
///
/// This is measured by the directory's clock. If that clock has been set back since the heartbeat, the heartbeat appears newer than it is,
/// by up to [`MAX_BACKWARD_CLOCK_STEP`].
const REPORT_DELAY: Duration = UNRECORDED_WINDOW.saturating_add(MAX_BACKWARD_CLOCK_STEP);

/// How long to wait after a heartbeat is due before checking for it.
const HEARTBEAT_MARGIN: Duration = Duration::from_millis(100);

/// Maximum number of concurrent lookups for orphans.
///
/// They share a connection with the heartbeats, which must not be held up when thousands of grace periods end at once.
pub(crate) const MAX_CONFIRMATIONS: usize = 256;

/// How long a lookup waits for its turn.
///
/// This must be shorter than the library's timeout for confirmations, after which the library postpones the cancellation by an entire grace
/// period.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before retrying a lookup that could not be started or went unanswered.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// How long a call has been waiting for its client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OrphanWait {
    grace: Duration,
    /// Time since the call's last stream ended.
    elapsed: Duration,
    /// How long a turned-away client may take to retry.
    backoff: Duration,
}

// === impl OrphanWait ===

impl OrphanWait {
    pub(crate) fn from_orphan(orphan: &Orphan<'_>, backoff: Duration) -> Self {
        Self {
            backoff,
            grace: orphan.grace(),
            elapsed: orphan.detachment().lasted(),
        }
    }

    #[cfg(test)]
    pub(crate) fn new(grace: Duration, elapsed: Duration, backoff: Duration) -> Self {
        Self {
            grace,
            elapsed,
            backoff,
        }
    }

    /// Returns how much longer the leases require the call to wait, or `None` if they do not.
    fn remaining(self, leases: &Leases, this_instance: Incarnation) -> Option<Duration> {
        let others = leases
            .entries
            .iter()
            .filter(|lease| lease.incarnation != this_instance);
        let remaining = others.filter_map(|lease| self.remaining_for(lease)).max();
        let remaining = remaining.max(self.remaining_for_new_instances());
        let elapsed = leases.turned_away;
        remaining.max(elapsed.and_then(|elapsed| self.remaining_for_client(elapsed)))
    }

    /// Returns how long to wait for a recent enough heartbeat, or `None` if the latest suffices.
    ///
    /// It must be recent enough to report every turned-away client that arrived before the grace period ended.
    fn remaining_for(self, lease: &Lease) -> Option<Duration> {
        let since_grace = self.elapsed.saturating_sub(self.grace);
        let is_early = lease.age + REPORT_DELAY > since_grace;
        let missing = REPORT_DELAY.saturating_sub(since_grace);
        // The next heartbeat may still be too early to report them all.
        let mut next = HEARTBEAT_INTERVAL.saturating_sub(lease.age);
        while next < missing {
            next += HEARTBEAT_INTERVAL;
        }
        is_early.then_some(next + HEARTBEAT_MARGIN)
    }

    /// Returns how much longer to wait for instances without a lease, or `None` if not needed.
    ///
    /// An instance that has yet to obtain a lease may have turned a client away without reporting it.
    fn remaining_for_new_instances(self) -> Option<Duration> {
        let since_grace = self.elapsed.saturating_sub(self.grace);
        let remaining = UNRECORDED_WINDOW.saturating_sub(since_grace);
        (!remaining.is_zero()).then_some(remaining)
    }

    /// Returns how much longer to wait for a turned-away client, or `None` if not needed.
    ///
    /// `elapsed` is the time since it was turned away.
    fn remaining_for_client(self, elapsed: Duration) -> Option<Duration> {
        // Wait even for a client that was turned away before the call was detached, because the disconnect may have been detected late. The
        // margin covers a client that only the next heartbeat will report. If the grace period is longer than the backoff, for example
        // because of a long `retry`, the client may take that long to retry after a 503.
        let backoff = self
            .backoff
            .max(self.grace)
            .saturating_add(HEARTBEAT_INTERVAL + UNRECORDED_WINDOW);
        let remaining = backoff.saturating_sub(elapsed);
        (!remaining.is_zero()).then_some(remaining)
    }
}

/// Decides whether a call whose grace period has ended may be cancelled.
pub(crate) async fn confirm(
    router: &Router,
    session: SessionHash,
    wait: OrphanWait,
) -> Confirmation {
    let confirmation = decide(router, session, wait).await;
    if let Confirmation::Postpone(_) = confirmation {
        metrics::count_postponed_cancel();
    }
    confirmation
}

async fn decide(router: &Router, session: SessionHash, mut wait: OrphanWait) -> Confirmation {
    let (grace, this_instance) = (wait.grace, router.this_instance.incarnation);
    let Some(since) = router.heartbeat.consistent_since() else {
        return Confirmation::Postpone(grace);
    };
    let remaining = grace
        .max(SETTLE_PERIOD)
        .saturating_sub(Instant::now() - since);
    if !remaining.is_zero() {
        return Confirmation::Postpone(remaining);
    }
    let snapshot = {
        let started = Instant::now();
        let permit = timeout(PERMIT_TIMEOUT, router.confirmation_permits.acquire()).await;
        let Ok(_permit) = permit else {
            return Confirmation::Postpone(RETRY_DELAY);
        };
        if router.heartbeat.consistent_since() != Some(since) {
            return Confirmation::Postpone(grace);
        }
        wait.elapsed += started.elapsed();
        // Bypass the cache, which may predate a claim.
        router.directory.look_up(session).await
    };
    if router.heartbeat.consistent_since() != Some(since) {
        return Confirmation::Postpone(grace);
    }
    let Ok(snapshot) = snapshot else {
        return Confirmation::Postpone(RETRY_DELAY);
    };
    // After a failover, the backend may have lost leases and reports without this instance having noticed yet.
    let has_lease = snapshot.leases.get(this_instance).is_some();
    let is_current = has_lease && router.heartbeat.is_in_run(&snapshot.leases);
    if !is_current {
        return Confirmation::Postpone(grace);
    }
    let own_turned_away = router.turned_away.age(Instant::now());
    let remaining = wait.remaining(&snapshot.leases, this_instance);
    let own_remaining = own_turned_away.and_then(|elapsed| wait.remaining_for_client(elapsed));
    if let Some(remaining) = remaining.max(own_remaining) {
        return Confirmation::Postpone(remaining);
    }
    match snapshot.record {
        Some(Record::Owned(ownership)) if ownership.owner == router.this_instance => {
            Confirmation::Cancel
        }
        Some(Record::Deleted(_)) => {
            router.sessions.write_again(session);
            Confirmation::SessionClosed
        }
        // The session does not belong to the cluster, so no other instance can own it.
        None if !router.sessions.is_local(session)
            && router.heartbeat.proves_absence(&snapshot.leases) =>
        {
            Confirmation::Cancel
        }
        Some(Record::Owned(_)) | None => {
            router.sessions.write_again(session);
            Confirmation::Postpone(grace)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::BackendRunId;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns how much longer a call has to wait if its grace period of 20 s ended 4 s ago.
    fn remaining(age: u32, turned_away: Option<u32>) -> Option<Duration> {
        let [me, other] = [(); 2].map(|()| Incarnation::random());
        let lease = |incarnation, age: u32| Lease {
            incarnation,
            age: age * SECOND,
            written_in: None,
            is_settled: false,
            has_late_answers: false,
        };
        let leases = Leases {
            run: BackendRunId::new("run"),
            entries: vec![lease(me, 5), lease(other, age)],
            turned_away: turned_away.map(|ago| ago * SECOND),
        };
        let wait = OrphanWait {
            grace: 20 * SECOND,
            elapsed: 24 * SECOND,
            backoff: 40 * SECOND,
        };
        wait.remaining(&leases, me)
    }

    #[test]
    fn an_orphan_waits_for_a_heartbeat_after_the_end_of_its_grace() {
        assert_eq!(
            remaining(5, None),
            Some(HEARTBEAT_MARGIN),
            "the heartbeat is late"
        );
        assert_eq!(
            remaining(2, None),
            Some(HEARTBEAT_MARGIN),
            "the heartbeat may not cover the end of the grace"
        );
        assert_eq!(remaining(1, None), None);
    }

    #[test]
    fn an_orphan_waits_for_the_first_complete_heartbeat() {
        for (since_grace, age, next) in [
            (0, 0, 4_000),
            (0, 1_000, 3_000),
            (0, 900, 3_100),
            (0, 500, 3_500),
            (1_000, 1_500, 2_500),
            (2_000, 1_500, 500),
        ] {
            let [since_grace, age, next] = [since_grace, age, next].map(Duration::from_millis);
            let wait = OrphanWait {
                grace: 20 * SECOND,
                elapsed: 20 * SECOND + since_grace,
                backoff: 40 * SECOND,
            };
            let lease = Lease {
                incarnation: Incarnation::random(),
                age,
                written_in: None,
                is_settled: false,
                has_late_answers: false,
            };
            assert_eq!(wait.remaining_for(&lease), Some(next + HEARTBEAT_MARGIN));
        }
    }

    #[test]
    fn an_orphan_waits_for_a_turned_away_client_even_if_detached_later() {
        let longest = 40 * SECOND + HEARTBEAT_INTERVAL + UNRECORDED_WINDOW;
        for ago in [0, 23, 25] {
            assert_eq!(remaining(1, Some(ago)), Some(longest - ago * SECOND));
        }
        assert_eq!(remaining(1, Some(44)), None, "the backoff is over");
    }

    #[test]
    fn a_turned_away_client_may_return_as_late_as_within_its_grace() {
        let wait = |grace: u32| OrphanWait {
            grace: grace * SECOND,
            elapsed: grace * SECOND,
            backoff: 40 * SECOND,
        };
        let remaining = |grace| wait(grace).remaining_for_client(42 * SECOND);
        let delay = HEARTBEAT_INTERVAL + UNRECORDED_WINDOW;
        assert_eq!(remaining(20), Some(delay - 2 * SECOND));
        assert_eq!(remaining(65), Some(delay + 23 * SECOND));
    }

    #[test]
    fn a_backoff_may_be_of_any_length() {
        for backoff in [Duration::ZERO, Duration::MAX] {
            let wait = OrphanWait {
                grace: SECOND,
                elapsed: SECOND,
                backoff,
            };
            assert!(wait.remaining_for_client(Duration::ZERO) > Some(backoff.min(SECOND)));
        }
    }
}
