//! The local sessions, and which of them have yet to be written to the directory.
//!
//! 1. A session is local from the moment it is opened, or loaded in order to be restored, until it is closed, deleted or relinquished.
//! 2. Only the heartbeat task writes a session, under the epoch at which this instance owns it. If the directory has another
//!    owner's record with a higher epoch, the session is *contested*.
//! 3. A deleted session has a tombstone in the directory, so that no instance restores it. Until the directory has the tombstone, this
//!    instance answers that the session does not exist.
//! 4. A session that has merely been closed stays in the directory until its record expires, and is restored if its client returns.
//! 5. A relinquished session is no longer local. It is sent, once, to the task that closes it.
//! 6. No client is given a session that the directory lacks, because other instances would answer that it does not exist. The exception is
//!    a session whose service has no session store, which is never written.

mod contest;
mod contested;
pub(crate) mod drain_gate;
pub(crate) mod generations;
mod lapse;
mod local_session;
pub(crate) mod pending_restores;
mod queues;
mod relinquished;
pub(crate) mod restore_attempts;
mod session_index;
mod state;
pub(crate) mod store;
mod writing;

pub(crate) use self::{
    lapse::Lapse,
    queues::Work,
    relinquished::{Relinquished, RelinquishedTo},
    state::{RESTORE_TIMEOUT, Sessions},
};

#[cfg(test)]
mod tests;
