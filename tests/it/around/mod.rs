//! Surroundings of the layer: other middleware, any caller, any runtime.

mod compositions;
mod contract;
mod cores;
mod extremes;
mod middleware;
mod replayed;
mod starved;
mod trailers;
