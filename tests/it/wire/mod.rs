//! Bytes that are read correctly and passed on unchanged.

mod bad_bodies;
mod batches;
#[cfg(all(feature = "axum", feature = "socket"))]
mod partial;
#[cfg(all(feature = "axum", feature = "socket"))]
mod slow;
#[cfg(all(feature = "axum", feature = "socket"))]
mod socket;
mod transparency;
mod unparsed;
