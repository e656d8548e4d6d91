//! Sessions: whose a call is, and what the wrapped session manager changes.

mod attempts;
mod forwarding;
mod gated;
mod idle;
mod isolation;
mod paths;
mod told;
mod unread;
mod waiting;
