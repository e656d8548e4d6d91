//! Makes room for a new session when the session limit has been reached.
//!
//! Evicts the session that has been unused (no request and no stream) for the longest time, provided that this is longer than
//! [`Options::make_room_after`]. If no session qualifies, the new session is refused. A session with an open call, or whose
//! process is waiting for a client to read, is never evicted.
//!
//! [`Options::make_room_after`]: super::Options::make_room_after

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, timeout},
};

use super::{
    service::{Inner, Live},
    session::{EndReason, Session},
    stop::STOP_TIMEOUT,
};

/// How long to wait for a process to exit.
///
/// This includes some margin: stopping a process takes at most twice [`STOP_TIMEOUT`].
const ROOM_TIMEOUT: Duration = Duration::from_secs(2 * STOP_TIMEOUT.as_secs() + 1);

/// Counts a new session as waiting for a process to exit, until this guard is dropped.
struct WaitingGuard<'a>(&'a Inner);

// === impl Inner ===

impl Inner {
    /// Returns a permit for a new process.
    ///
    /// If the session limit has been reached, this evicts an unused session and waits for its process to exit. Returns `None`
    /// if no session can be evicted, or if no process exits within [`ROOM_TIMEOUT`].
    pub(super) async fn acquire_permit(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = self.wait_for_room()?;
        let permit = timeout(ROOM_TIMEOUT, self.permits.clone().acquire_owned());
        permit.await.ok()?.ok()
    }

    /// Registers a new session waiting for room.
    ///
    /// Evicts an unused session, unless enough processes are already stopping. Returns `None` if no session can be evicted, or
    /// if the proxy is shutting down.
    fn wait_for_room(&self) -> Option<WaitingGuard<'_>> {
        let mut live = self.live();
        if live.is_shutting_down {
            return None;
        }
        // Each stopping process makes room for one new session.
        let ending = self.children().saturating_sub(live.sessions.len());
        if ending <= live.waiting {
            self.evict_longest_unused(&mut live)?;
        }
        live.waiting += 1;
        Some(WaitingGuard(self))
    }

    /// Evicts the session that has been unused for longest. Returns `None` if none can be evicted.
    fn evict_longest_unused(&self, live: &mut Live) -> Option<()> {
        let cutoff = Instant::now().checked_sub(self.options.make_room_after)?;
        let unused = live.sessions.iter().filter_map(|(id, session)| {
            let since = session.unused_since().filter(|since| *since < cutoff)?;
            Some((since, id.clone(), session.clone()))
        });
        let mut unused: Vec<(Instant, Arc<str>, Arc<Session>)> = unused.collect();
        unused.sort_unstable_by_key(|(since, ..)| *since);
        // Check again, because a client may have started to use one of these sessions in the meantime.
        let (_, id, _) = unused
            .iter()
            .find(|(.., session)| session.evict_if_unused(cutoff))?;
        live.sessions.remove(id);
        Some(())
    }
}

// === impl Session ===

impl Session {
    /// Returns when the session was last used, or `None` if it is in use.
    pub(super) fn unused_since(&self) -> Option<Instant> {
        self.unused_since_in(&self.state())
    }

    /// Evicts the session if it was last used before `cutoff`.
    ///
    /// Returns `false` if it has been used more recently, or if it is already ending.
    fn evict_if_unused(&self, cutoff: Instant) -> bool {
        {
            let mut state = self.state();
            let since = self.unused_since_in(&state);
            if state.stopped.is_some() || since.is_none_or(|since| since >= cutoff) {
                return false;
            }
            // Calls are started under the same lock, so none can have started since the check above.
            state.stopped = Some(EndReason::Evicted);
        }
        self.standalone.end();
        self.stop.notify_one();
        true
    }
}

// === impl WaitingGuard ===

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.live().waiting -= 1;
    }
}
