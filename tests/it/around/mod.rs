//! Does it hold whatever the layer stands in: other middleware, any caller, any runtime?

mod contract;
mod cores;
mod middleware;
mod replayed;
mod starved;
