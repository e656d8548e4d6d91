//! Local sessions, including those that have yet to be written to the directory.
//!
//! 1. A session becomes local when it is opened, or when it is loaded to be restored, and stays local until it is closed, deleted or
//!    relinquished.
//! 2. Only the heartbeat task writes sessions, each at the epoch at which this instance owns it. A session is *contested* if the directory
//!    has another owner's record for it, with a higher epoch.
//! 3. A deleted session has a tombstone in the directory, so that no instance restores it. Until the tombstone has been written, this
//!    instance itself responds that the session does not exist.
//! 4. A session that was merely closed stays in the directory until its record expires, and is restored if its client reconnects.
//! 5. A relinquished session is no longer local. It is sent once to the task that closes it.
//! 6. A new session is withheld from its client until the directory has it, because otherwise the other instances would respond that it
//!    does not exist. The exception is a session whose service has no session store, which is never written.

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
