//! Servers in this process, clients in another, connected by real sockets.

pub mod concurrent_clients;
pub mod ledger;
pub mod load;
pub mod serve;
pub mod side;
pub mod tools;
