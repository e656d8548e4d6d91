//! Servers in this process, clients in another, and real sockets between them.

pub mod child;
pub mod client;
pub mod crowd;
pub mod ledger;
pub mod load;
pub mod machine;
pub mod pings;
pub mod serve;
pub mod stats;
pub mod tools;
