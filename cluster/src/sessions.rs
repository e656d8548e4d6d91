//! The sessions that live here, and what of them is still to be written to the directory.
//!
//! 1. A session lives here from when it is opened, or loaded to be restored, until it is closed, deleted or lost.
//! 2. It is written by one task only, the heart's. So what is asked of the directory for one session has one order.
//! 3. A session that was deleted is removed from the directory after all that was written of it, and is restored by nobody: until
//!    it is removed, this instance says that there is none.
//! 4. One that is only closed stays in the directory for its time: its client may come back, and it is restored.
//! 5. What was lost to another owner, or handed over, is told once, to be closed.
//! 6. No client gets a session of which the directory was not told: whoever looks for it elsewhere would be told that there is none.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};

pub(crate) use self::lost::{Lost, To};
use self::{here::Here, lost::Losses, roll::Roll};
use crate::{
    door::{Door, Visit},
    ids::{Owner, SessionHash},
};

mod here;
mod lost;
mod roll;

/// Over how many locks the sessions are spread: 64.
const SHARDS: usize = 64;

/// How many deleted sessions are remembered while the directory is away: 4,096. Beyond that the oldest are left to the
/// directory, which forgets them in an hour.
const MAX_DELETED: usize = 4 * 1024;

/// How many sessions are written at once: 128, and not many more than 256 KiB.
const MAX_BATCH: usize = 128;
const MAX_BATCH_BYTES: usize = 256 * 1024;

/// How long after it was written a session is written again: 20 min, a third of the time that the directory keeps it.
const REFRESHED_AFTER: Duration = Duration::from_secs(20 * 60);

/// How long a session may be loaded and not open: 60 s. Then its restoring has failed.
const RESTORED_WITHIN: Duration = Duration::from_secs(60);

/// The sessions that live here.
pub(crate) struct Sessions {
    roll: Arc<Roll>,
    shards: Box<[Mutex<HashMap<SessionHash, Here>>]>,
    work: Mutex<Work>,
    /// There is something to be written.
    wake: Notify,
    /// Something was written.
    written: Notify,
    pub(crate) losses: Losses,
}

/// Sessions to be written at once, with their parameters.
pub(crate) type Batch = Vec<(SessionHash, Arc<[u8]>)>;

/// What is to be written.
#[derive(Default)]
struct Work {
    /// Sessions that the directory has never heard of. They come first: a client waits.
    fresh: VecDeque<SessionHash>,
    /// All others.
    again: VecDeque<SessionHash>,
    deleted: VecDeque<SessionHash>,
}

// === impl Sessions ===

impl Sessions {
    /// None yet, and where it is told which are lost.
    pub(crate) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Lost>) {
        let (losses, told) = Losses::new();
        let sessions = Self {
            roll: Roll::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            work: Mutex::default(),
            wake: Notify::new(),
            written: Notify::new(),
            losses,
        };
        (Arc::new(sessions), told)
    }

    pub(crate) fn is_here(&self, session: SessionHash) -> bool {
        self.shard(session).contains_key(&session)
    }

    /// Whether a session lives here, and is not only loaded to be restored.
    pub(crate) fn is_open(&self, session: SessionHash) -> bool {
        let shard = self.shard(session);
        shard
            .get(&session)
            .is_some_and(|here| here.loaded.is_none())
    }

    /// Whether the parameters of a session that is open here are known. Without them the directory never knows it.
    pub(crate) fn has_params(&self, id: &str) -> Option<bool> {
        let session = SessionHash::of(id);
        let shard = self.shard(session);
        shard.get(&session).map(|here| here.params.is_some())
    }

    /// Goes in at the door of a session that lives here: every request does. `None` if none does, or if its door is shut.
    pub(crate) fn enter(&self, id: &str) -> Option<Visit> {
        self.roll.enter(id)
    }

    pub(crate) fn door(&self, id: &str) -> Option<Arc<Door>> {
        self.roll.door(id)
    }

    /// Shuts all doors, also those of sessions that come yet.
    pub(crate) fn shut(&self) {
        self.roll.shut();
    }

    /// Whether a session lives here, and its door is not shut.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.door(id).is_some_and(|door| !door.is_shut())
    }

    /// All ids.
    pub(crate) fn ids(&self) -> Vec<Arc<str>> {
        let shards = self.shards.iter().map(lock);
        let ids =
            shards.flat_map(|shard| Vec::from_iter(shard.values().map(|here| here.id.clone())));
        ids.collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// A session was opened or restored.
    pub(crate) fn opened(&self, id: &str) {
        self.change(id, |here| here.loaded = None);
    }

    /// The client's parameters are known, as JSON, and the directory is to know the session.
    pub(crate) fn initialized(&self, id: &str, params: Arc<[u8]>) {
        self.change(id, |here| {
            here.loaded = None;
            here.params = Some(params);
        });
    }

    /// Changes a session that is open here, and has it written if it was not.
    fn change(&self, id: &str, change: impl FnOnce(&mut Here)) {
        let session = SessionHash::of(id);
        {
            let mut shard = self.shard(session);
            let here = shard
                .entry(session)
                .or_insert_with(|| Here::new(id, &self.roll));
            change(here);
            if here.params.is_none() || here.written.is_some() || here.is_queued {
                return;
            }
            here.is_queued = true;
        }
        self.work().fresh.push_back(session);
        self.wake.notify_one();
    }

    /// Whether a session that has just opened may be given to its client: the directory knows it, or is not to know it, and its door
    /// is not shut. If not, it is told to be closed.
    pub(crate) fn hand_out(&self, id: &str) -> bool {
        let session = SessionHash::of(id);
        let is_shut = self.door(id).is_some_and(|door| door.is_shut());
        let here = match self.shard(session).entry(session) {
            Entry::Occupied(here) if is_shut || here.get().is_unknown() => here.remove(),
            _ => return true,
        };
        self.work().fresh.retain(|fresh| *fresh != session);
        if here.is_sent {
            // It may become known yet.
            self.remove_later(session);
        }
        self.losses.tell(here.lost(session, To::Nobody));
        false
    }

    /// A session of this instance was found in the directory, and is about to be restored here.
    pub(crate) fn loaded(&self, id: &str, params: Arc<[u8]>) {
        let session = SessionHash::of(id);
        let mut shard = self.shard(session);
        let here = shard
            .entry(session)
            .or_insert_with(|| Here::loaded(id, &self.roll));
        here.params.get_or_insert(params);
    }

    /// A session that was loaded and is not open is not about to be restored any more.
    pub(crate) fn forget_unopened(&self, session: SessionHash) {
        if let Entry::Occupied(here) = self.shard(session).entry(session)
            && here.get().loaded.is_some()
        {
            here.remove();
        }
    }

    /// A session was closed. The directory knows it as long as it knows one of which it hears nothing more.
    pub(crate) fn closed(&self, id: &str) {
        let session = SessionHash::of(id);
        self.shard(session).remove(&session);
    }

    /// The client ended its session. Nobody is to find it any more.
    pub(crate) fn deleted(&self, id: &str) {
        let session = SessionHash::of(id);
        self.shard(session).remove(&session);
        self.remove_later(session);
    }

    /// The directory is to forget a session.
    fn remove_later(&self, session: SessionHash) {
        {
            let mut work = self.work();
            work.deleted.push_back(session);
            if work.deleted.len() > MAX_DELETED {
                work.deleted.pop_front();
            }
        }
        self.wake.notify_one();
    }

    /// Returns when the directory knows a session, or does not live here any more.
    pub(crate) async fn until_written(&self, session: SessionHash) {
        self.until(|| {
            self.shard(session)
                .get(&session)
                .is_none_or(|here| here.written.is_some())
        })
        .await;
    }

    /// Whether a session was deleted of which the directory is still to be told so.
    pub(crate) fn is_deleted(&self, session: SessionHash) -> bool {
        self.work().deleted.contains(&session)
    }

    /// Returns when the directory is not to be told any more that a session was deleted.
    pub(crate) async fn until_removed(&self, session: SessionHash) {
        self.until(|| !self.is_deleted(session)).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        loop {
            let mut written = std::pin::pin!(self.written.notified());
            // Listens before it looks.
            written.as_mut().enable();
            if is_so() {
                return;
            }
            written.await;
        }
    }

    /// Returns when there may be something to be written.
    pub(crate) async fn until_work(&self) {
        self.wake.notified().await;
    }

    /// Everything is to be written again.
    pub(crate) fn write_all_again(&self) {
        self.queue_again(|_| true);
    }

    /// The directory does not know a session that it should.
    pub(crate) fn write_again(&self, session: SessionHash) {
        let is_to_be_written = self.shard(session).get_mut(&session).is_some_and(|here| {
            here.written = None;
            here.params.is_some() && !std::mem::replace(&mut here.is_queued, true)
        });
        if is_to_be_written {
            self.work().again.push_back(session);
            self.wake.notify_one();
        }
    }

    /// What was written long ago is to be written again. What was to be restored and was not is forgotten.
    pub(crate) fn refresh(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            lock(shard).retain(|_, here| {
                here.loaded
                    .is_none_or(|since| now - since < RESTORED_WITHIN)
            });
        }
        self.queue_again(|here| here.written.is_some_and(|at| now - at >= REFRESHED_AFTER));
    }

    fn queue_again(&self, is_due: impl Fn(&Here) -> bool) {
        for shard in &self.shards {
            let mut due = Vec::new();
            for (session, here) in lock(shard).iter_mut() {
                if here.params.is_some() && is_due(here) && !here.is_queued {
                    here.is_queued = true;
                    due.push(*session);
                }
            }
            self.work().again.extend(due);
        }
    }

    /// Whether some of what is to be written again is not yet.
    pub(crate) fn is_behind(&self) -> bool {
        !self.work().again.is_empty()
    }

    /// What is to be written next. It must come back, by [`wrote`](Self::wrote) or [`put_back`](Self::put_back).
    pub(crate) fn take_batch(&self) -> Batch {
        let mut batch = Batch::default();
        let mut bytes = 0;
        while batch.len() < MAX_BATCH && bytes < MAX_BATCH_BYTES {
            let Some(session) = self.work().next() else {
                break;
            };
            if let Some(here) = self.shard(session).get_mut(&session) {
                here.is_queued = false;
                if let Some(params) = &here.params {
                    bytes += params.len();
                    batch.push((session, params.clone()));
                    here.is_sent = true;
                }
            }
        }
        batch
    }

    /// The directory knows these now, but for those that it said are others'.
    pub(crate) fn wrote(&self, batch: &Batch, others: &[(SessionHash, Owner)]) {
        let now = Instant::now();
        let others: HashMap<SessionHash, Owner> = others.iter().copied().collect();
        for (session, _) in batch {
            match others.get(session) {
                Some(owner) => self.lose(*session, *owner),
                None => {
                    if let Some(here) = self.shard(*session).get_mut(session) {
                        here.written = Some(now);
                    }
                }
            }
        }
        self.written.notify_waiters();
    }

    /// Whether the directory knows these now is not known.
    pub(crate) fn put_back(&self, batch: &Batch) {
        let mut again = Vec::new();
        for (session, _) in batch {
            if let Some(here) = self.shard(*session).get_mut(session)
                && !here.is_queued
            {
                here.is_queued = true;
                again.push(*session);
            }
        }
        self.work().again.extend(again);
    }

    /// A session is another's now.
    pub(crate) fn lose(&self, session: SessionHash, owner: Owner) {
        self.lose_to(session, To::Owner(owner));
    }

    /// A session whose door is shut is given up: whoever asks for it next claims it.
    pub(crate) fn give_up(&self, session: SessionHash) {
        let id = self
            .shard(session)
            .get(&session)
            .map(|here| here.id.clone());
        let door = id.and_then(|id| self.door(&id));
        // One that has come back has another.
        if door.is_some_and(|door| door.is_shut()) {
            self.lose_to(session, To::WhoeverAsks);
        }
    }

    fn lose_to(&self, session: SessionHash, to: To) {
        let mut shard = self.shard(session);
        if let Some(here) = shard.remove(&session) {
            // Whoever does not find it here any more finds that it is being closed.
            self.losses.tell(here.lost(session, to));
        }
    }

    /// Deleted sessions of which the directory is to be told. They stay until they are [`removed`](Self::removed).
    pub(crate) fn deleted_sessions(&self) -> Vec<SessionHash> {
        self.work()
            .deleted
            .iter()
            .take(MAX_BATCH)
            .copied()
            .collect()
    }

    /// The directory does not know a deleted session any more.
    pub(crate) fn removed(&self, session: SessionHash) {
        self.work().deleted.retain(|deleted| *deleted != session);
        self.written.notify_waiters();
    }

    fn shard(&self, session: SessionHash) -> MutexGuard<'_, HashMap<SessionHash, Here>> {
        let at = session.spread() % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        lock(&self.shards[at])
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        lock(&self.work)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Debug for Sessions {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

// === impl Work ===

impl Work {
    fn next(&mut self) -> Option<SessionHash> {
        self.fresh.pop_front().or_else(|| self.again.pop_front())
    }
}

#[cfg(test)]
mod tests;
