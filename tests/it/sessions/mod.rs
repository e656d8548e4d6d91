//! Sessions: whom a call belongs to, and what the wrapped session manager changes.

mod attempts;
mod controlled_server;
mod forwarding;
mod idle;
mod isolation;
mod listening;
mod lost;
mod notifications;
mod paths;
mod unread;
mod waiting;
