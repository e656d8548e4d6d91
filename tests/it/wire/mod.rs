//! Are bytes read right, and do they pass unchanged?

mod bad_bodies;
mod batches;
#[cfg(all(feature = "axum", feature = "socket"))]
mod socket;
mod transparency;
