//! What observers learn of calls and of stalled clients.

mod admin;
mod calls;
mod keep_alive;
mod limits;
mod observe;
mod stall_timeout;
