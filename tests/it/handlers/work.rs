//! After a disconnect the *work* itself stops.
//!
//! This covers processes, handlers on another server, and clean-ups.

mod cells;
mod chain;
mod modes;
mod others;
#[cfg(feature = "axum")]
mod plain;
