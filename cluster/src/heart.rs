//! The heart of an instance: it keeps the lease, knows whether the directory is sound, and writes what lives here.
//!
//! 1. It is the only task that writes sessions, removes them and holds the lease, one thing after the other.
//! 2. It beats every [`BEAT`], also while much is to be written; every [`BEAT_AWAY`] while the directory is away, or does not take
//!    what is written.
//! 3. What is found lost (another start of the engine, a lease that lapsed) is no longer sound before the lease is made anew.
//!    So whoever is told that this instance has its lease, and then finds the directory sound, knows that nothing was lost
//!    in between ([`Heart::proves`]).
//! 4. New sessions come before those that are written again, and those that were deleted before all.

use std::{
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    select,
    sync::Notify,
    time::{Instant, sleep_until},
};

use self::soundness::Soundness;
use crate::{
    directory::{Absence, Directory, DirectoryError, LIMIT, Limited},
    ids::Owner,
    meter,
    sessions::Sessions,
    warn_rarely::WarnRarely,
};

mod soundness;

/// How often the lease is renewed: every 2 s, so that it outlives two beats that get lost.
const BEAT: Duration = Duration::from_secs(2);

/// How often a directory that is away is tried: every 500 ms.
const BEAT_AWAY: Duration = Duration::from_millis(500);

/// How often old entries are looked for, to be written again: once a minute.
const REFRESH: Duration = Duration::from_secs(60);

/// For how long the directory must have been sound for what it does not know to be unknown to all: 5 s. Every instance that
/// lives has written its sessions by then: it beats every 2 s, and sees an engine that comes back within 1 s.
pub(crate) const SETTLED: Duration = Duration::from_secs(5);

/// Keeps the lease, and writes what lives here.
pub(crate) struct Heart {
    me: Owner,
    directory: Limited,
    sessions: Arc<Sessions>,
    soundness: Mutex<Soundness>,
    away: WarnRarely,
    unwritten: WarnRarely,
    leave: Notify,
}

/// Why [`Heart::until`] returned.
#[derive(Debug, PartialEq, Eq)]
enum Woken {
    /// It is time for a beat.
    Beat,
    Leave,
}

// === impl Heart ===

impl Heart {
    pub(crate) fn new(me: Owner, directory: Limited, sessions: Arc<Sessions>) -> Arc<Self> {
        Arc::new(Self {
            me,
            directory,
            sessions,
            soundness: Mutex::new(Soundness::new()),
            away: WarnRarely::default(),
            unwritten: WarnRarely::default(),
            leave: Notify::new(),
        })
    }

    /// Since when the directory is sound, if it is.
    pub(crate) fn sound_since(&self) -> Option<Instant> {
        self.soundness().sound_since(Instant::now())
    }

    /// Whether what the directory does not know does not exist: it was sound for [`SETTLED`] when it said so, and has been since.
    pub(crate) fn proves(&self, absence: &Absence) -> bool {
        let now = Instant::now();
        let soundness = self.soundness();
        let is_settled = soundness
            .sound_since(now)
            .is_some_and(|since| now - since >= SETTLED);
        is_settled && absence.asker_is_alive && soundness.run() == Some(&absence.run)
    }

    /// Beats until the instance leaves. It is to be run once.
    ///
    /// # Cancel safety
    /// Dropped, it leaves the lease to lapse, and nothing is written any more.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut refresh = Instant::now() + REFRESH;
        loop {
            let begun = Instant::now();
            self.beat(begun).await;
            if begun >= refresh {
                self.sessions.refresh();
                refresh = begun + REFRESH;
            }
            meter::sound(self.sound_since().is_some());
            let is_away = self.soundness().is_away();
            let next = if is_away { BEAT_AWAY } else { BEAT };
            if self.until(begun + next).await == Woken::Leave {
                break;
            }
        }
        // What was opened last is claimed as everything else is, if the directory knows it.
        self.write(Instant::now() + LIMIT).await;
        self.soundness().failed();
        meter::sound(false);
        if let Err(error) = self.directory.leave(self.me).await {
            tracing::debug!(%error, "the lease of this instance is left to lapse");
        }
    }

    /// Ends [`run`](Self::run): the lease is given up, so that others claim what lives here without delay.
    pub(crate) fn leave(&self) {
        self.leave.notify_one();
    }

    async fn beat(&self, begun: Instant) {
        if let Err(error) = self.try_beat(begun).await {
            self.soundness().failed();
            let what = "sessions of other instances are not found, and no abandoned call is cancelled, until it answers";
            self.away.warn(&format_args!("{error}: {what}"));
        }
    }

    async fn try_beat(&self, begun: Instant) -> Result<(), DirectoryError> {
        let beat = self.directory.beat(self.me).await?;
        let todo = self.soundness().answered(begun, beat);
        if todo.write_all {
            self.sessions.write_all_again();
        }
        if todo.lease {
            self.directory.lease(self.me).await?;
        }
        Ok(())
    }

    /// Writes what there is to be written until the next beat.
    async fn until(&self, mut next: Instant) -> Woken {
        let mut may_write = !self.soundness().is_away();
        loop {
            if may_write {
                may_write = self.write(next).await;
                if !may_write {
                    // Clients wait for what is not written.
                    next = next.min(Instant::now() + BEAT_AWAY);
                }
            }
            select! {
                biased;
                () = self.leave.notified() => return Woken::Leave,
                () = sleep_until(next) => return Woken::Beat,
                () = self.sessions.until_work() => {}
            }
        }
    }

    /// Says whether the directory answered.
    async fn write(&self, until: Instant) -> bool {
        while Instant::now() < until {
            match self.write_some().await {
                Ok(true) => {}
                Ok(false) => return true,
                Err(error) => {
                    self.unwritten.warn(&format_args!(
                        "{error}: sessions of this instance are not written yet"
                    ));
                    return false;
                }
            }
        }
        true
    }

    /// Says whether there was something.
    async fn write_some(&self) -> Result<bool, DirectoryError> {
        let deleted = self.sessions.deleted_sessions();
        let removed = join_all(deleted.iter().map(async |session| {
            self.directory.remove(*session, self.me).await?;
            self.sessions.removed(*session);
            Ok::<_, DirectoryError>(())
        }));
        removed.await.into_iter().collect::<Result<(), _>>()?;
        let batch = self.sessions.take_batch();
        if !batch.is_empty() {
            match self.directory.enter(self.me, &batch).await {
                Ok(mut others) => {
                    others.retain(|(_, owner)| owner.incarnation != self.me.incarnation);
                    self.sessions.wrote(&batch, &others);
                }
                Err(error) => {
                    self.sessions.put_back(&batch);
                    return Err(error);
                }
            }
        }
        if !self.sessions.is_behind() {
            self.wrote_all();
        }
        Ok(!deleted.is_empty() || !batch.is_empty())
    }

    fn wrote_all(&self) {
        self.soundness().wrote_all(Instant::now());
        let is_sound = self.sound_since().is_some();
        if is_sound && self.away.is_over() {
            tracing::info!("the directory answers again, and knows all sessions of this instance");
        }
    }

    fn soundness(&self) -> MutexGuard<'_, Soundness> {
        self.soundness
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Debug for Heart {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let since = self.sound_since();
        f.debug_struct("Heart")
            .field("me", &self.me)
            .field("sound_since", &since)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
