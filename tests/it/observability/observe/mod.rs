//! Reports about calls, both to observers and in the log.

mod causes;
mod injection;
mod lifecycle;
mod observers;
mod sessions;
mod setup_hints;
mod spans;
