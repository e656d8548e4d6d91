//! Servers on real sockets, the clients that load them, and records of what the servers see.

pub mod concurrent_clients;
pub mod ledger;
pub mod load;
pub mod serve;
pub mod side;
pub mod tools;
