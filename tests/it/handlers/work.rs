//! After a disconnect the *work* itself stops: the process, the handler on another server, and the guard.

mod cells;
mod chain;
mod modes;
mod others;
#[cfg(feature = "axum")]
mod plain;
