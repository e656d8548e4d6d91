//! Surroundings of the layer: other middleware, any caller, any runtime.

mod compositions;
mod contract;
mod cores;
mod middleware;
mod replayed;
mod starved;
mod trailers;
