//! Finds the owners of remote sessions, looking up any that are not cached.
//!
//! 1. The cache is bounded. Unowned sessions are cached separately, so that made-up ids cannot evict owners.
//! 2. Concurrent requests share one lookup per session. At most [`MAX_LOOKUPS`] lookups run at a time, and none takes longer than
//!    [`DIRECTORY_TIMEOUT`], including the wait for a permit.
//! 3. This instance's own sessions are not cached. While they are local, they need no lookup, and once they are no longer local, another
//!    instance may already own them.
//! 4. A lookup is dropped once no request is waiting for it. Its result is cached only if the session's entry has not been updated or
//!    invalidated in the meantime.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{BoxFuture, Shared, WeakShared},
};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};

use crate::{
    directory::{DIRECTORY_TIMEOUT, Directory, DirectoryError, Limited, SessionSnapshot},
    ids::{Incarnation, Ownership, Record, SessionHash},
    lock::lock,
    ttl_cache::TtlCache,
};

/// Maximum number of cached owners.
const MAX_OWNERS: usize = 16 * 1024;

/// How long an owner is cached.
const OWNER_TTL: Duration = Duration::from_secs(60);

/// Maximum number of sessions cached as unowned.
const MAX_UNOWNED: usize = 4 * 1024;

/// How long a session is cached as unowned.
const UNOWNED_TTL: Duration = Duration::from_secs(1);

/// Maximum number of concurrent lookups, which are pipelined on one connection.
///
/// This is enough for a directory with a latency of 300 ms to answer in time when hundreds of clients reconnect at once.
const MAX_LOOKUPS: usize = 1024;

/// A cache of session owners. Clones share it.
#[derive(Clone)]
pub(crate) struct OwnerCache(Arc<Inner>);

struct Inner {
    this_instance: Incarnation,
    directory: Limited,
    lookup_permits: Semaphore,
    state: Mutex<CacheState>,
}

struct CacheState {
    owners: TtlCache<Ownership>,
    /// Sessions without an owner, each with the snapshot that showed this.
    unowned: TtlCache<SessionSnapshot>,
    /// The lookups in progress, with their numbers.
    lookups: HashMap<SessionHash, (u64, WeakShared<Lookup>)>,
    next_number: u64,
}

type Lookup = BoxFuture<'static, Result<SessionSnapshot, Arc<DirectoryError>>>;

/// The result of a lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    Owner(Ownership),
    /// According to this snapshot, no instance owns the session.
    Unowned(SessionSnapshot),
}

/// A lookup in progress. Dropping it removes it from the cache.
struct PendingLookup {
    cache: Arc<Inner>,
    session: SessionHash,
    number: u64,
}

// === impl OwnerCache ===

impl OwnerCache {
    pub(crate) fn new(this_instance: Incarnation, directory: Limited) -> Self {
        Self(Arc::new(Inner {
            this_instance,
            directory,
            lookup_permits: Semaphore::new(MAX_LOOKUPS),
            state: Mutex::new(CacheState {
                owners: TtlCache::new(MAX_OWNERS, OWNER_TTL),
                unowned: TtlCache::new(MAX_UNOWNED, UNOWNED_TTL),
                lookups: HashMap::new(),
                next_number: 0,
            }),
        }))
    }

    /// Returns a session's owner, looking it up unless it is cached.
    ///
    /// # Errors
    ///
    /// Returns an error if the directory fails or does not answer in time.
    pub(crate) async fn find(&self, session: SessionHash) -> Result<Found, Arc<DirectoryError>> {
        let lookup = {
            let mut state = self.0.state();
            if let Some(found) = state.cached(session) {
                return Ok(found);
            }
            self.shared_lookup(&mut state, session)
        };
        lookup.await.map(Found::from)
    }

    /// Caches a session's current owner, unless it is this instance.
    ///
    /// Any pending lookup for the session will then no longer cache its result.
    pub(crate) fn insert(&self, session: SessionHash, ownership: Ownership) {
        let mut state = self.0.state();
        state.lookups.remove(&session);
        state.store(session, Found::Owner(ownership), self.0.this_instance);
    }

    /// Evicts a session, because this instance now owns it.
    ///
    /// Any pending lookup for the session will then no longer cache its result.
    pub(crate) fn mark_own(&self, session: SessionHash) {
        let mut state = self.0.state();
        state.lookups.remove(&session);
        state.remove(session);
    }

    /// Evicts `ownership`, which is wrong or outdated, unless another owner is already cached.
    ///
    /// Any pending lookup for the session will then no longer cache its result.
    pub(crate) fn invalidate(&self, session: SessionHash, ownership: Ownership) {
        let mut state = self.0.state();
        state.lookups.remove(&session);
        if state.owners.get(session, Instant::now()) == Some(&ownership) {
            state.owners.remove(session);
        }
    }

    /// Returns the session's pending lookup, or starts one.
    fn shared_lookup(&self, state: &mut CacheState, session: SessionHash) -> Shared<Lookup> {
        if let Some(lookup) = state
            .lookups
            .get(&session)
            .and_then(|(_, lookup)| lookup.upgrade())
        {
            return lookup;
        }
        let number = state.next_number;
        state.next_number += 1;
        let pending = PendingLookup {
            cache: self.0.clone(),
            session,
            number,
        };
        let lookup = pending.look_up().boxed().shared();
        if let Some(weak) = lookup.downgrade() {
            state.lookups.insert(session, (number, weak));
        }
        lookup
    }
}

impl Debug for OwnerCache {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerCache")
            .field("this_instance", &self.0.this_instance)
            .finish_non_exhaustive()
    }
}

// === impl Inner ===

impl Inner {
    async fn query(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError> {
        let lookup = async {
            let _permit = self
                .lookup_permits
                .acquire()
                .await
                .map_err(DirectoryError::failed)?;
            self.directory.look_up(session).await
        };
        timeout(DIRECTORY_TIMEOUT, lookup)
            .await
            .unwrap_or_else(|_| Err(DirectoryError::timed_out()))
    }

    fn state(&self) -> MutexGuard<'_, CacheState> {
        lock(&self.state)
    }
}

// === impl Found ===

impl From<SessionSnapshot> for Found {
    fn from(snapshot: SessionSnapshot) -> Self {
        match snapshot.record {
            Some(Record::Owned(ownership)) => Self::Owner(ownership),
            Some(Record::Deleted(_)) | None => Self::Unowned(snapshot),
        }
    }
}

// === impl CacheState ===

impl CacheState {
    fn cached(&self, session: SessionHash) -> Option<Found> {
        let now = Instant::now();
        if let Some(ownership) = self.owners.get(session, now) {
            return Some(Found::Owner(*ownership));
        }
        self.unowned.get(session, now).cloned().map(Found::Unowned)
    }

    fn remove(&mut self, session: SessionHash) {
        self.unowned.remove(session);
        self.owners.remove(session);
    }

    fn store(&mut self, session: SessionHash, found: Found, this_instance: Incarnation) {
        let now = Instant::now();
        match found {
            Found::Owner(ownership) if ownership.owner.incarnation == this_instance => {
                self.remove(session)
            }
            Found::Owner(ownership) => {
                self.unowned.remove(session);
                self.owners.insert(session, ownership, now);
            }
            Found::Unowned(snapshot) => {
                self.owners.remove(session);
                self.unowned.insert(session, snapshot, now);
            }
        }
    }
}

// === impl PendingLookup ===

impl PendingLookup {
    async fn look_up(self) -> Result<SessionSnapshot, Arc<DirectoryError>> {
        let snapshot = self.cache.query(self.session).await;
        // Cache the result only if this lookup is still registered. Updating or invalidating the session's entry unregisters it.
        if let Ok(snapshot) = &snapshot {
            let mut state = self.cache.state();
            if state
                .lookups
                .get(&self.session)
                .is_some_and(|(number, _)| *number == self.number)
            {
                state.store(
                    self.session,
                    Found::from(snapshot.clone()),
                    self.cache.this_instance,
                );
            }
        }
        snapshot.map_err(Arc::new)
    }
}

impl Drop for PendingLookup {
    fn drop(&mut self) {
        let mut state = self.cache.state();
        // A newer lookup may have been registered in the meantime.
        if let Entry::Occupied(lookup) = state.lookups.entry(self.session)
            && lookup.get().0 == self.number
        {
            lookup.remove();
        }
    }
}

#[cfg(test)]
mod tests;
