//! What does a client get that comes back, and what may it do with several streams?

mod come_back;
mod cycles;
mod kept;
mod polling;
mod stored;
mod streams;
mod two_streams;
