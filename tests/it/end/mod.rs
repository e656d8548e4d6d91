//! Calls that end neither by completing nor by a disconnect.

mod call_timeout;
mod confirm;
mod drain;
mod ends;
mod half_sent;
mod many_calls;
mod reasons;
#[cfg(unix)]
mod shutdown;
