//! Clients that come back: what they get, and what they may do with several streams.

mod alone;
mod come_back;
mod cycles;
mod failing_store;
mod kept;
mod polling;
mod stored;
mod streams;
mod two_streams;
