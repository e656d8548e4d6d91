//! Clients that resume, what they receive, and what they can do with several streams.

mod cycles;
mod failing_store;
mod layer_only;
mod many_events;
mod polling;
mod reconnect;
mod retained;
mod stored;
mod streams;
mod two_streams;
