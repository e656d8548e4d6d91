//! Watching: what is noticed of calls and of silent clients, and who is told.

mod admin;
mod calls;
mod limits;
mod observe;
mod probed;
mod silence;
