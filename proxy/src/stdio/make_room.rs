//! Makes room for a new session at the session limit.
//!
//! The session that has been without a request and a stream for longest ends if that time exceeds [`Options::make_room_after`].
//! Otherwise the new session is refused. A session with an open call, or whose process waits until a client reads, is never ended
//! to make room.
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

/// Maximum wait for the end of a process that makes room: 5 s. Its stop takes at most twice [`STOP_TIMEOUT`].
const ROOM_TIMEOUT: Duration = Duration::from_secs(2 * STOP_TIMEOUT.as_secs() + 1);

/// A new session that waits for the end of a process, until it is dropped.
struct Waiting<'a>(&'a Inner);

// === impl Inner ===

impl Inner {
    /// Returns the permit for a new process. At the session limit, ends an unused session and waits for its process to end.
    ///
    /// Returns `None` if no session can make room, or no process ends within [`ROOM_TIMEOUT`].
    pub(super) async fn acquire_permit(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Some(permit);
        }
        let _waiting = self.wait_for_room()?;
        let permit = timeout(ROOM_TIMEOUT, self.permits.clone().acquire_owned());
        permit.await.ok()?.ok()
    }

    /// Registers a new session that waits.
    ///
    /// Ends an unused session unless enough processes are stopping. Returns `None` if no session may end, and during the shutdown.
    fn wait_for_room(&self) -> Option<Waiting<'_>> {
        let mut live = self.live();
        if live.is_shutting_down {
            return None;
        }
        // The process of an ended session makes room for one new session.
        let ending = self.children().saturating_sub(live.sessions.len());
        if ending <= live.waiting {
            self.end_longest_unused(&mut live)?;
        }
        live.waiting += 1;
        Some(Waiting(self))
    }

    /// Ends the session that has been unused for longest. Returns `None` if none may end.
    fn end_longest_unused(&self, live: &mut Live) -> Option<()> {
        let before = Instant::now().checked_sub(self.options.make_room_after)?;
        let unused = live.sessions.iter().filter_map(|(id, session)| {
            let since = session.unused_since().filter(|since| *since < before)?;
            Some((since, id.clone(), session.clone()))
        });
        let mut unused: Vec<(Instant, Arc<str>, Arc<Session>)> = unused.collect();
        unused.sort_unstable_by_key(|(since, ..)| *since);
        // A client may have started to use one of them.
        let (_, id, _) = unused
            .iter()
            .find(|(.., session)| session.end_if_unused(before))?;
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

    /// Ends the session if it has been unused since `before`. Returns `false` if it has not, or if it ends already.
    fn end_if_unused(&self, before: Instant) -> bool {
        {
            let mut state = self.state();
            let since = self.unused_since_in(&state);
            if state.stopped.is_some() || since.is_none_or(|since| since >= before) {
                return false;
            }
            // Calls are started under the same lock, so none starts in between.
            state.stopped = Some(EndReason::MadeRoom);
        }
        self.standalone.end();
        self.stop.notify_one();
        true
    }
}

// === impl Waiting ===

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.live().waiting -= 1;
    }
}
