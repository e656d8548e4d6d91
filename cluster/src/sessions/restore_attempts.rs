//! Counts this instance's attempts to restore each session, so as not to retry forever.
//!
//! 1. An attempt is counted as soon as its session's parameters have been loaded. After three failures, the session is considered
//!    unrestorable.
//! 2. If the client disconnects or a layer responds instead of rmcp, the attempt is abandoned, which does not count as a failure. The
//!    session manager and the session store notice this because rmcp drops their futures.
//! 3. When an attempt is abandoned, rmcp responds with 404 to the requests waiting for it (`aborted_restore` in ARCHITECTURE.md,
//!    Workarounds). So that these responses can be recognized, each abandoned attempt is remembered for [`ABANDONED_TTL`].

use std::{
    sync::{Mutex, MutexGuard},
    thread,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    ids::{Epoch, SessionHash},
    lock::lock,
    ttl_cache::TtlCache,
};

/// Number of failed attempts after which a session is considered unrestorable.
const MAX_ATTEMPTS: u32 = 3;

/// Maximum number of sessions whose attempts are counted.
///
/// This has to cover a new deployment that cannot restore any of the old sessions, whose clients all reconnect within a few minutes.
const CAPACITY: usize = 64 * 1024;

/// How long a session's attempts are remembered after the last attempt.
const TTL: Duration = Duration::from_secs(10 * 60);

/// How long an abandoned attempt affects other requests.
///
/// One second is enough because rmcp discards the attempt's result as soon as one of its own tasks has run.
const ABANDONED_TTL: Duration = Duration::from_secs(1);

/// Attempts to restore each session that has yet to be restored.
#[derive(Debug)]
pub(crate) struct RestoreAttempts(Mutex<TtlCache<Attempts>>);

#[derive(Debug, Clone, Copy, Default)]
struct Attempts {
    /// Number of attempts that have failed or are still running.
    count: u32,
    /// The epoch at which this instance owned the session at the last attempt.
    epoch: Option<Epoch>,
    /// When an attempt was last abandoned.
    abandoned_at: Option<Instant>,
}

/// A step of a restore attempt, during which rmcp awaits a future.
///
/// Dropping it before [`complete`](Self::complete) marks the attempt as abandoned.
pub(crate) struct RestoreStep<'a> {
    attempts: &'a RestoreAttempts,
    session: SessionHash,
    is_counted: bool,
    is_complete: bool,
}

// === impl RestoreAttempts ===

impl RestoreAttempts {
    /// Counts an attempt whose parameters have been loaded.
    pub(crate) fn add(&self, session: SessionHash, epoch: Epoch) {
        self.update(session, |attempts, _| {
            attempts.count += 1;
            attempts.epoch = Some(epoch);
        });
    }

    /// Begins to load a session's parameters. The attempt is counted only once they are loaded.
    pub(crate) fn begin_load(&self, session: SessionHash) -> RestoreStep<'_> {
        self.step(session, false)
    }

    /// Begins a step of an already counted attempt.
    pub(crate) fn begin_step(&self, session: SessionHash) -> RestoreStep<'_> {
        self.step(session, true)
    }

    /// Called when a session's handler has accepted its `initialize`.
    pub(crate) fn on_restored(&self, session: SessionHash) {
        self.cache().remove(session);
    }

    /// Returns the epoch of the last attempt if the session is unrestorable, or `None` otherwise.
    ///
    /// An attempt still in progress counts as failed.
    pub(crate) fn unrestorable_epoch(&self, session: SessionHash) -> Option<Epoch> {
        let cache = self.cache();
        let attempts = cache.get(session, Instant::now())?;
        attempts.epoch.filter(|_| attempts.count >= MAX_ATTEMPTS)
    }

    /// Returns `true` if an attempt was abandoned within the last [`ABANDONED_TTL`].
    pub(crate) fn was_abandoned(&self, session: SessionHash) -> bool {
        let (now, cache) = (Instant::now(), self.cache());
        let abandoned_at = cache
            .get(session, now)
            .and_then(|attempts| attempts.abandoned_at);
        abandoned_at.is_some_and(|at| now.saturating_duration_since(at) < ABANDONED_TTL)
    }

    fn step(&self, session: SessionHash, is_counted: bool) -> RestoreStep<'_> {
        RestoreStep {
            attempts: self,
            session,
            is_counted,
            is_complete: false,
        }
    }

    fn update(&self, session: SessionHash, update: impl FnOnce(&mut Attempts, Instant)) {
        let (now, mut cache) = (Instant::now(), self.cache());
        let mut attempts = cache.get(session, now).copied().unwrap_or_default();
        update(&mut attempts, now);
        cache.insert(session, attempts, now);
    }

    fn cache(&self) -> MutexGuard<'_, TtlCache<Attempts>> {
        lock(&self.0)
    }
}

impl Default for RestoreAttempts {
    fn default() -> Self {
        Self(Mutex::new(TtlCache::new(CAPACITY, TTL)))
    }
}

// === impl RestoreStep ===

impl RestoreStep<'_> {
    /// Marks the step as complete, whether or not it succeeded.
    pub(crate) fn complete(mut self) {
        self.is_complete = true;
    }
}

impl Drop for RestoreStep<'_> {
    /// Abandons the attempt unless the step is complete. A panic counts as a failure instead.
    fn drop(&mut self) {
        if self.is_complete || thread::panicking() {
            return;
        }
        self.attempts.update(self.session, |attempts, now| {
            attempts.count = attempts.count.saturating_sub(self.is_counted.into());
            attempts.abandoned_at = Some(now);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    fn session() -> SessionHash {
        SessionHash::of("a")
    }

    #[test]
    fn each_of_many_sessions_that_cannot_be_restored_is_unrestorable() {
        let attempts = RestoreAttempts::default();
        let sessions: Vec<_> = (0..10_000)
            .map(|n| SessionHash::of(&n.to_string()))
            .collect();
        for _ in 0..3 {
            for session in &sessions {
                assert!(attempts.unrestorable_epoch(*session).is_none());
                attempts.add(*session, Epoch::now());
            }
        }
        assert!(
            sessions
                .iter()
                .all(|session| attempts.unrestorable_epoch(*session).is_some())
        );
    }

    #[test]
    fn an_abandoned_attempt_has_not_failed() {
        let attempts = RestoreAttempts::default();
        for _ in 0..3 {
            attempts.add(session(), Epoch::now());
            drop(attempts.begin_step(session()));
        }
        drop(attempts.begin_load(session()));
        assert!(attempts.unrestorable_epoch(session()).is_none());
        iter::repeat_n((), 3).for_each(|()| attempts.add(session(), Epoch::now()));
        attempts.begin_step(session()).complete();
        assert!(attempts.unrestorable_epoch(session()).is_some());
        attempts.on_restored(session());
        assert!(attempts.unrestorable_epoch(session()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_attempt_is_recorded_for_a_second() {
        let attempts = RestoreAttempts::default();
        attempts.begin_load(session()).complete();
        assert!(!attempts.was_abandoned(session()));
        drop(attempts.begin_load(session()));
        assert!(attempts.was_abandoned(session()));
        tokio::time::advance(ABANDONED_TTL).await;
        assert!(!attempts.was_abandoned(session()));
    }
}
