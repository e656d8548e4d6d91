//! Ends of calls that neither complete nor lose their clients.

mod call_timeout;
mod confirm;
mod drain;
mod ends;
mod half_sent;
mod reasons;
#[cfg(unix)]
mod shutdown;
