//! Counts this instance's attempts to restore each session, so as not to retry forever.
//!
//! 1. An attempt is counted as soon as its session's parameters have been loaded. After three failures, the session is considered
//!    unrestorable.
//! 2. If the client disconnects or a layer answers in place of rmcp, the attempt is given up, which is not a failure. The session manager
//!    and the session store notice this because rmcp drops their futures.
//! 3. When an attempt is given up, rmcp answers 404 to the requests waiting for it (`aborted_restore` in ARCHITECTURE.md, Workarounds). To
//!    recognize these answers, each attempt that has been given up is remembered for [`GIVEN_UP_TTL`].

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
/// If a new deployment cannot restore the old sessions, all of their clients return within a few minutes.
const CAPACITY: usize = 64 * 1024;

/// How long a session's attempts are remembered after the last one.
const TTL: Duration = Duration::from_secs(10 * 60);

/// How long an attempt that has been given up affects other requests.
///
/// One second is enough because rmcp discards the attempt's result as soon as one of its own tasks has run.
const GIVEN_UP_TTL: Duration = Duration::from_secs(1);

/// The attempts to restore each session that has not been restored yet.
#[derive(Debug)]
pub(crate) struct RestoreAttempts(Mutex<TtlCache<Attempts>>);

#[derive(Debug, Clone, Copy, Default)]
struct Attempts {
    /// Number of attempts that have failed or are still running.
    count: u32,
    /// The epoch at which this instance owned the session at the last attempt.
    epoch: Option<Epoch>,
    /// When an attempt was last given up.
    given_up: Option<Instant>,
}

/// A step of a restore attempt, during which rmcp awaits a future.
///
/// If it is dropped before [`complete`](Self::complete), the attempt has been given up.
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

    /// Begins a step of an attempt that has already been counted.
    pub(crate) fn begin_step(&self, session: SessionHash) -> RestoreStep<'_> {
        self.step(session, true)
    }

    /// Called when a session's handler has accepted its `initialize`.
    pub(crate) fn on_restored(&self, session: SessionHash) {
        self.cache().remove(session);
    }

    /// Returns the epoch of the last attempt if the session is unrestorable, otherwise `None`.
    ///
    /// An attempt that is still running counts as failed.
    pub(crate) fn unrestorable_epoch(&self, session: SessionHash) -> Option<Epoch> {
        let cache = self.cache();
        let attempts = cache.get(session, Instant::now())?;
        attempts.epoch.filter(|_| attempts.count >= MAX_ATTEMPTS)
    }

    /// Returns `true` if an attempt has been given up within the last [`GIVEN_UP_TTL`].
    pub(crate) fn was_given_up(&self, session: SessionHash) -> bool {
        let (now, cache) = (Instant::now(), self.cache());
        let given_up = cache
            .get(session, now)
            .and_then(|attempts| attempts.given_up);
        given_up.is_some_and(|at| now.saturating_duration_since(at) < GIVEN_UP_TTL)
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
    /// Completes the step, whether or not it was successful.
    pub(crate) fn complete(mut self) {
        self.is_complete = true;
    }
}

impl Drop for RestoreStep<'_> {
    /// Gives up the attempt unless the step is complete. A panic counts as a failure instead.
    fn drop(&mut self) {
        if self.is_complete || thread::panicking() {
            return;
        }
        self.attempts.update(self.session, |attempts, now| {
            attempts.count = attempts.count.saturating_sub(self.is_counted.into());
            attempts.given_up = Some(now);
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
    fn an_attempt_that_is_given_up_has_not_failed() {
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
    async fn an_attempt_that_was_given_up_is_recorded_for_a_second() {
        let attempts = RestoreAttempts::default();
        attempts.begin_load(session()).complete();
        assert!(!attempts.was_given_up(session()));
        drop(attempts.begin_load(session()));
        assert!(attempts.was_given_up(session()));
        tokio::time::advance(GIVEN_UP_TTL).await;
        assert!(!attempts.was_given_up(session()));
    }
}
