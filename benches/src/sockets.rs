//! Servers in this process, clients in another, and real sockets between them.

pub mod concurrent_clients;
pub mod ledger;
pub mod load;
pub mod serve;
pub mod side;
pub mod tools;
