//! Whose call is it, in which session, and what does the wrapped session manager change?

mod forwarding;
mod gated;
mod idle;
mod isolation;
mod paths;
mod told;
mod unread;
