//! How does a call end that neither completes nor loses its client?

mod call_timeout;
mod confirm;
mod drain;
mod ends;
mod reasons;
#[cfg(unix)]
mod shutdown;
