//! The door of a session: how many are inside, and whether it is shut, in one state.
//!
//! 1. Whoever has a request served goes in, and comes out when that has an answer. Nobody comes in once the door is shut.
//! 2. It is shut behind the last if nobody came in since this was seen to be the last: what is looked at in between, such as the
//!    calls whose clients have gone, cannot have changed unseen.
//! 3. It stays shut. A session that comes back gets a door of its own.

use std::{
    fmt,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::Notify;

/// It is shut.
const SHUT: u64 = 1 << 63;

/// Somebody waits for it to be shut, and is told who comes out.
const WATCHED: u64 = 1 << 62;

/// One who is inside. Below it is counted how often somebody came in, which may begin anew.
const ONE: u64 = 1 << 32;

const ENTRIES: u64 = ONE - 1;

#[derive(Debug, Default)]
pub(crate) struct Door {
    state: AtomicU64,
    changed: Notify,
}

/// Somebody is inside until this is dropped.
pub(crate) struct Visit(Arc<Door>);

// === impl Door ===

impl Door {
    /// Goes in, unless it is shut.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Visit> {
        let enters = |state: u64| {
            let entries = (state + 1) & ENTRIES;
            (state & SHUT == 0).then_some(((state & !ENTRIES) + ONE) | entries)
        };
        let entered = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, enters);
        entered.ok().map(|_| Visit(self.clone()))
    }

    pub(crate) fn is_shut(&self) -> bool {
        is_shut(self.state.load(Ordering::Acquire))
    }

    /// Shuts it if nobody is inside, `is_idle` says so as well, and nobody came in meanwhile. Says whether it is shut.
    pub(crate) fn shut_if_empty(&self, is_idle: impl FnOnce() -> bool) -> bool {
        let seen = self.watch();
        if is_shut(seen) {
            return true;
        }
        if !is_empty(seen) || !is_idle() {
            return false;
        }
        let shut =
            self.state
                .compare_exchange(seen, seen | SHUT, Ordering::AcqRel, Ordering::Acquire);
        self.changed();
        shut.is_ok()
    }

    /// Returns when it is shut, be it behind the last or by somebody else.
    pub(crate) async fn shut_behind_the_last(&self, is_idle: impl Fn() -> bool) {
        self.until(|| self.shut_if_empty(&is_idle)).await;
    }

    /// Returns when it is shut, or nobody is inside and `is_idle` says so as well. It stays as it is.
    pub(crate) async fn until_empty(&self, is_idle: impl Fn() -> bool) {
        let is_over = || {
            let seen = self.watch();
            is_shut(seen) || is_empty(seen) && is_idle()
        };
        self.until(is_over).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            // Listens before it looks.
            changed.as_mut().enable();
            if is_so() {
                return;
            }
            changed.await;
        }
    }

    /// How it is, from now on watched.
    fn watch(&self) -> u64 {
        self.state.fetch_or(WATCHED, Ordering::AcqRel) | WATCHED
    }

    /// Shuts it, whoever is inside.
    pub(crate) fn shut(&self) {
        self.state.fetch_or(SHUT, Ordering::AcqRel);
        self.changed();
    }

    /// Something has changed for those who wait for it to be shut.
    pub(crate) fn changed(&self) {
        self.changed.notify_waiters();
    }
}

fn is_shut(state: u64) -> bool {
    state & SHUT != 0
}

fn is_empty(state: u64) -> bool {
    state & !(SHUT | WATCHED | ENTRIES) == 0
}

// === impl Visit ===

impl Visit {
    /// Whether the door is shut, for example because the session is lost.
    pub(crate) fn is_shut(&self) -> bool {
        self.0.is_shut()
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let before = self.0.state.fetch_sub(ONE, Ordering::AcqRel);
        if before & WATCHED != 0 {
            self.0.changed();
        }
    }
}

impl fmt::Debug for Visit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Visit")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn nobody_comes_in_once_it_is_shut() {
        let door = Arc::new(Door::default());
        let [first, second] = [(); 2].map(|()| door.enter().unwrap());
        assert!(!door.shut_if_empty(|| true));
        drop(first);
        assert!(!door.shut_if_empty(|| true));
        drop(second);
        assert!(!door.shut_if_empty(|| false) && !door.is_shut());
        assert!(door.shut_if_empty(|| true) && door.is_shut());
        assert!(door.enter().is_none() && door.shut_if_empty(|| false));
    }

    #[test]
    fn who_comes_and_goes_while_it_is_looked_at_keeps_it_open() {
        let door = Arc::new(Door::default());
        let comes_and_goes = || {
            drop(door.enter().unwrap());
            true
        };
        assert!(!door.shut_if_empty(comes_and_goes) && !door.is_shut());
        // Also if somebody comes in for the four billionth time.
        door.state.fetch_or(ENTRIES, Ordering::AcqRel);
        assert!(!door.shut_if_empty(comes_and_goes) && !door.is_shut());
        assert!(door.shut_if_empty(|| true));
    }

    #[test]
    fn it_is_shut_behind_the_last_for_all_who_wait() {
        let door = Arc::new(Door::default());
        let inside = door.enter().unwrap();
        let mut waiting = [(); 2].map(|()| Box::pin(door.shut_behind_the_last(|| true)));
        assert!(
            waiting
                .iter_mut()
                .all(|waits| waits.now_or_never().is_none())
        );
        drop(inside);
        assert!(
            waiting
                .iter_mut()
                .all(|waits| waits.now_or_never().is_some())
        );
    }

    #[test]
    fn it_can_be_shut_on_those_inside() {
        let door = Arc::new(Door::default());
        let inside = door.enter().unwrap();
        let mut waits = Box::pin(door.shut_behind_the_last(|| true));
        assert!((&mut waits).now_or_never().is_none());
        door.shut();
        assert!(waits.now_or_never().is_some() && door.enter().is_none());
        drop(inside);
        assert!(door.is_shut());
    }

    /// Two threads, one that goes in and one that shuts: whoever is in was in before.
    #[test]
    fn nobody_is_inside_a_door_that_was_shut_behind_the_last() {
        for _ in 0..2_000 {
            let door = Arc::new(Door::default());
            let other = door.clone();
            let goes_in = std::thread::spawn(move || {
                let mut entered = 0;
                while let Some(visit) = other.enter() {
                    assert!(!other.is_shut());
                    entered += 1;
                    drop(visit);
                }
                entered
            });
            while !door.shut_if_empty(|| true) {
                std::hint::spin_loop();
            }
            assert!(is_empty(door.state.load(Ordering::Acquire)));
            goes_in.join().unwrap();
        }
    }
}
