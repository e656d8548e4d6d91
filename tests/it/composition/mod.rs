//! The layer among other middleware, with any caller and on any runtime.

mod combinations;
mod contract;
mod extremes;
mod middleware;
mod parallelism;
mod replayed;
mod stalled_runtime;
mod trailers;
