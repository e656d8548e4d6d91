//! Servers in this process, clients in another, and real sockets between them.

pub mod crowd;
pub mod ledger;
pub mod load;
pub mod serve;
pub mod side;
pub mod tools;
