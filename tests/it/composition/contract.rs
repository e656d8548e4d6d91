//! The layer's promises to the services inside and outside it, tested without a socket.

mod answered;
mod clean_up;
mod doubtful;
mod elsewhere;
mod endings;
mod exchange;
mod options;
mod readiness;
mod request_body;
mod response_body;
mod response_future;
mod run_until_cancelled;
mod runtimes;
mod script;
mod stacked;
mod types;

#[cfg(feature = "axum")]
mod extractor;
#[cfg(feature = "serde")]
mod serialized;
