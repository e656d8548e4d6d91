//! The heart of an instance: it keeps the lease, knows whether the directory is sound, and writes what lives here.
//!
//! 1. It is the only task that writes sessions, deletes them and holds the lease. Sessions are written in several batches at once,
//!    and heartbeats do not wait for them. What is written of one session needs no order, because its records have one ([`Record`](crate::ids::Record)).
//! 2. It beats every [`BEAT`], also while much is to be written; every [`BEAT_AWAY`] while the directory is away.
//! 3. What is found lost (another run of the engine, a lease that lapsed) is no longer sound before the lease is made anew.
//!    So an instance that reads its own lease, and then finds the directory sound, knows that nothing was lost in between.
//! 4. Each heartbeat carries whether all sessions of this instance are written in this run of the engine, whether answers of its calls are
//!    late, and how long ago this instance turned a client away. "Unknown" proves something once all instances have written ([`Heart::proves`]).
//! 5. A session of which the directory has a record with a higher epoch is *contested*. It serves nothing new. If the owner
//!    there has its lease, the session is lost; if it provably has none, it is claimed back.

use std::{
    convert::Infallible,
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt as _, future::join_all, stream};
use tokio::{
    select,
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

pub(crate) use self::soundness::SETTLED;
use self::{lane::Lane, soundness::Soundness};
use crate::{
    answers::Answers,
    directory::{Claim, Directory, DirectoryError, EngineRun, LIMIT, Leases, Limited, Status},
    ids::{Owner, Ownership, SessionHash},
    log::log,
    meter,
    sessions::{Sessions, Work},
    turned_away::TurnedAway,
    warn_rarely::WarnRarely,
};

mod lane;
mod soundness;

/// How often the lease is renewed: every 2 s, so that it outlives two beats that get lost.
pub(crate) const BEAT: Duration = Duration::from_secs(2);

/// How often a directory that is away is tried: every 500 ms.
const BEAT_AWAY: Duration = Duration::from_millis(500);

/// How often sessions are looked for that were written a while ago, to be written again: every 10 s.
const REFRESH: Duration = Duration::from_secs(10);

/// Maximum number of batches of sessions on their way to the directory at once: 8. A directory 300 ms away then takes 3,000 sessions a second.
const MAX_WRITES: usize = 8;

/// Maximum number of batches of deletions on their way to the directory at once: 4.
const MAX_DELETIONS: usize = 4;

/// How many contested sessions are claimed back at once: 64.
const MAX_CLAIMS_AT_ONCE: usize = 64;

/// Keeps the lease, and writes what lives here.
pub(crate) struct Heart {
    me: Owner,
    directory: Limited,
    sessions: Arc<Sessions>,
    turned_away: Arc<TurnedAway>,
    answers: Arc<Answers>,
    soundness: Mutex<Soundness>,
    away: WarnRarely,
    unwritten: WarnRarely,
    leave: Notify,
    /// A heartbeat is due at once.
    hurry: Notify,
    /// The directory answers again.
    back: Notify,
}

// === impl Heart ===

impl Heart {
    pub(crate) fn new(
        me: Owner,
        directory: Limited,
        sessions: Arc<Sessions>,
        turned_away: Arc<TurnedAway>,
        answers: Arc<Answers>,
        requires_lease: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            me,
            directory,
            sessions,
            turned_away,
            answers,
            soundness: Mutex::new(Soundness::new(requires_lease)),
            away: WarnRarely::default(),
            unwritten: WarnRarely::default(),
            leave: Notify::new(),
            hurry: Notify::new(),
            back: Notify::new(),
        })
    }

    /// Since when the directory is sound, if it is.
    pub(crate) fn sound_since(&self) -> Option<Instant> {
        self.soundness().sound_since(Instant::now())
    }

    /// Whether what the directory did not have, in the look that also found these leases, does not exist.
    pub(crate) fn proves(&self, leases: &Leases) -> bool {
        let now = Instant::now();
        let is_settled = {
            let soundness = self.soundness();
            soundness.is_settled(now)
                || soundness.sound_since(now).is_some() && leases.has_settled()
        };
        is_settled && leases.of(self.me.incarnation).is_some() && self.all_have_written(leases)
    }

    /// Whether the directory has lost nothing that is not written again, as far as that is known here: if it has an owner of a
    /// session, no later owner is forgotten.
    pub(crate) async fn is_up_to_date(&self) -> bool {
        self.proven_leases().await.is_some()
    }

    /// Whether an answer that the directory did not have before this does not exist: it has lost none that is not written again.
    pub(crate) async fn has_all_answers(&self) -> bool {
        let leases = self.proven_leases().await;
        leases.is_some_and(|leases| !leases.owe_answers()) && !self.answers.are_owed()
    }

    /// The leases, if they prove something.
    async fn proven_leases(&self) -> Option<Leases> {
        let leases = self.directory.leases().await.ok()?;
        self.proves(&leases).then_some(leases)
    }

    /// Whether all instances have written all of their sessions in this run of the engine.
    fn all_have_written(&self, leases: &Leases) -> bool {
        self.soundness().run() == Some(&leases.run) && leases.all_have_written(self.me.incarnation)
    }

    /// Whether a session that is open here may serve something new. If not, another instance may have it by now: its record is
    /// to be read first.
    pub(crate) fn may_serve(&self, id: &str) -> bool {
        let lapse = self.soundness().lapse(Instant::now());
        if lapse.is_none() && !self.sessions.has_contested() {
            return true;
        }
        self.sessions.is_verified(SessionHash::of(id), lapse)
    }

    /// Returns when a session that is open here may serve something new, or is closed.
    pub(crate) async fn until_decided(&self, id: &str) {
        let session = SessionHash::of(id);
        let is_decided = || self.may_serve(id) || !self.sessions.is_here(session);
        self.sessions.until(is_decided).await;
        self.sessions.losses.until_closed(session).await;
    }

    /// Beats and writes until the instance leaves. It is to be run once.
    ///
    /// # Cancel safety
    /// Dropped, it leaves the lease to lapse, and nothing is written any more.
    pub(crate) async fn run(self: Arc<Self>) {
        select! {
            biased;
            () = self.beats() => {}
            never = self.writes() => match never {},
            never = self.settles_contested() => match never {},
        }
        // What was opened last is claimed as everything else is, if the directory knows it.
        let _not_written = timeout(LIMIT, self.writes_all()).await;
        // With when this instance turned a client away.
        let _last = self.directory.beat(self.me, &self.status()).await;
        self.soundness().failed();
        meter::sound(false);
        if let Err(error) = self.directory.leave(self.me).await {
            log(|| tracing::debug!(%error, "the lease of this instance is left to lapse"));
        }
    }

    /// Ends [`run`](Self::run): the lease is given up, so that others claim what lives here without delay.
    pub(crate) fn leave(&self) {
        self.leave.notify_one();
    }

    async fn beats(&self) {
        let mut refresh = Instant::now() + REFRESH;
        loop {
            let begun = Instant::now();
            self.beat(begun).await;
            if begun >= refresh {
                self.sessions.refresh();
                refresh = begun + REFRESH;
            }
            let is_away = self.soundness().is_away();
            if !is_away {
                self.back.notify_one();
            }
            self.sessions.changed();
            meter::sound(self.sound_since().is_some());
            let next = if is_away { BEAT_AWAY } else { BEAT };
            select! {
                biased;
                () = self.leave.notified() => return,
                () = sleep_until(begun + next) => {}
                () = self.hurry.notified() => {}
            }
        }
    }

    async fn beat(&self, begun: Instant) {
        if let Err(error) = self.try_beat(begun).await {
            self.soundness().failed();
            let what = "sessions of other instances are not found, and no abandoned call is cancelled, until it answers";
            self.away.warn(&format_args!("{error}: {what}"));
        }
    }

    async fn try_beat(&self, begun: Instant) -> Result<(), DirectoryError> {
        self.soundness().begins(begun);
        let beat = self.directory.beat(self.me, &self.status()).await?;
        if !beat.was_alive {
            self.soundness().has_no_lease();
            let mut status = self.status();
            // A new instance holds up no proof of another.
            status.written_in = (self.sessions.len() == 0).then(|| beat.run.clone());
            self.directory.lease(self.me, &status).await?;
        }
        let takes_epochs = self.may_take_epochs(&beat.run).await?;
        let todo = self.soundness().answered(begun, beat.run);
        if todo.was_lost {
            self.answers.write_again();
        }
        if takes_epochs {
            self.soundness().takes_epochs();
            self.sessions.renew_all();
        } else if todo.write_all {
            self.sessions.write_all_again();
        }
        Ok(())
    }

    /// Whether this instance, whose lease was lost, may take later epochs than the directory has: not while a claim of another may be
    /// lost, which a new epoch would outdo. Then none claims either.
    async fn may_take_epochs(&self, run: &EngineRun) -> Result<bool, DirectoryError> {
        match self.soundness().owed() {
            None => return Ok(false),
            Some(before) if before == run => return Ok(true),
            Some(_) => {}
        }
        let leases = self.directory.leases().await?;
        let is_settled = self.soundness().is_settled(Instant::now()) || leases.has_settled();
        Ok(is_settled && leases.all_have_written(self.me.incarnation))
    }

    fn status(&self) -> Status {
        let owes_answers = self.answers.are_owed();
        let now = Instant::now();
        let soundness = self.soundness();
        Status {
            written_in: soundness.written_in(now).cloned(),
            is_settled: soundness.is_settled(now),
            owes_answers,
            turned_away: self.turned_away.age(now),
        }
    }

    /// Writes what there is to be written, for ever.
    async fn writes(&self) -> Infallible {
        let mut entries = Lane::new(MAX_WRITES, BEAT_AWAY);
        // A deletion that fails or takes long holds up no session.
        let mut deletions = Lane::new(MAX_DELETIONS, BEAT_AWAY);
        loop {
            if !self.soundness().is_away() {
                while entries.has_room()
                    && let Some(work) = self.sessions.next_entries()
                {
                    entries.push(self.write(work));
                }
                while deletions.has_room()
                    && let Some(work) = self.sessions.next_deletions()
                {
                    deletions.push(self.write(work));
                }
                if !self.sessions.is_behind() {
                    self.wrote_all();
                }
            }
            select! {
                () = entries.next_change() => {}
                () = deletions.next_change() => {}
                () = self.sessions.until_work() => {}
                () = self.back.notified() => {}
            }
        }
    }

    /// Writes what there is to be written now.
    async fn writes_all(&self) {
        let next = || {
            self.sessions
                .next_deletions()
                .or_else(|| self.sessions.next_entries())
        };
        while let Some(work) = next() {
            if !self.write(work).await {
                return;
            }
        }
    }

    /// Returns whether the directory took it.
    async fn write(&self, work: Work) -> bool {
        let written = match work {
            Work::Delete(batch) => {
                let deletions = batch.into_iter().map(|(session, tombstone)| async move {
                    let deleted = self.directory.delete(session, tombstone).await;
                    self.sessions.deleted_there(session, deleted.is_ok());
                    deleted
                });
                join_all(deletions).await.into_iter().collect()
            }
            Work::Enter(batch) => match self.directory.enter(self.me, &batch.sessions).await {
                Ok(left) => {
                    self.sessions.wrote(batch, &left);
                    Ok(())
                }
                Err(error) => {
                    self.sessions.put_back(batch);
                    Err(error)
                }
            },
        };
        if let Err(error) = &written {
            self.unwritten.warn(&format_args!(
                "{error}: sessions of this instance are not written yet"
            ));
        }
        written.is_ok()
    }

    fn wrote_all(&self) {
        let was_sound = self.sound_since().is_some();
        self.soundness().wrote_all(Instant::now());
        let is_sound = self.sound_since().is_some();
        if is_sound && !was_sound {
            // Other instances wait to learn that all is written.
            self.hurry.notify_one();
        }
        if is_sound && self.away.is_over() {
            log(|| {
                tracing::info!(
                    "the directory answers again, and knows all sessions of this instance"
                )
            });
        }
    }

    /// Decides whose the contested sessions are, for ever.
    async fn settles_contested(&self) -> Infallible {
        loop {
            self.settle_contested().await;
            let _or_again = timeout(BEAT, self.sessions.until_contested()).await;
        }
    }

    /// Decides whose the contested sessions are, as far as that is known.
    async fn settle_contested(&self) {
        let contested = self.sessions.contested();
        if contested.is_empty() {
            return;
        }
        let Ok(leases) = self.directory.leases().await else {
            return;
        };
        let has_lease = |is: &Ownership| leases.of(is.owner.incarnation).is_some();
        let (living, gone): (Vec<_>, Vec<_>) =
            contested.into_iter().partition(|(_, is)| has_lease(is));
        for (session, is) in living {
            self.sessions.lose(session, is.owner);
        }
        if self.proves(&leases) {
            let claims = stream::iter(gone);
            let claims = claims.for_each_concurrent(MAX_CLAIMS_AT_ONCE, |(session, former)| {
                self.claim_back(session, former)
            });
            claims.await;
        }
    }

    async fn claim_back(&self, session: SessionHash, former: Ownership) {
        let wanted = former.claimed_by(self.me);
        match self.directory.claim(session, former, wanted).await {
            Ok(Claim::Won) => {
                log(
                    || tracing::info!(target: "mcp_cancel_cluster", %session, former = %former.owner.address, "session claimed back: the lease of its owner is over"),
                );
                self.sessions.claimed(session, wanted.epoch);
            }
            Ok(Claim::Lost(record)) => self.sessions.found(session, record),
            Ok(Claim::Unknown) => self.sessions.write_again(session),
            // The next heartbeat tries it again.
            Err(_) => {}
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
