//! The sessions that live here, and what of them is still to be written to the directory.
//!
//! 1. A session lives here from when it is opened, or loaded to be restored, until it is closed, deleted or relinquished.
//! 2. It is written by one task only, that of the heartbeat, under the epoch at which this instance owns it. A record that the directory has
//!    with a higher epoch makes it *contested*.
//! 3. A session that was deleted leaves a tombstone in the directory, and is restored by no instance: until the directory has
//!    the tombstone, this instance says that there is none.
//! 4. One that is only closed stays in the directory for its time: its client may come back, and it is restored.
//! 5. What was relinquished, to another owner or to any claimer, is sent once, to be closed.
//! 6. No client gets a session of which the directory was not told: whoever looks for it elsewhere would be told that there is none.

mod contest;
mod contested;
mod lapse;
mod local_session;
mod queues;
mod relinquished;
mod session_index;
mod state;
mod writing;

pub(crate) use self::{
    lapse::Lapse,
    queues::Work,
    relinquished::{Relinquished, RelinquishedTo},
    state::Sessions,
};

#[cfg(test)]
mod tests;
