//! What observers are notified of, about calls and about clients that do not read.

mod admin;
mod calls;
mod keep_alive;
mod limits;
mod observe;
mod stall_timeout;
mod subscriber;
