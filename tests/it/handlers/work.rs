//! After a hang-up the *work* stops: not a flag of ours, but the process, the handler behind, the guard.

mod cells;
mod chain;
mod others;
#[cfg(feature = "axum")]
mod plain;
mod ways;
