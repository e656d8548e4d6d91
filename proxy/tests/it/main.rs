//! The proxy over real sockets, in front of servers that do what a test says.
//!
//! | module | question |
//! |---|---|
//! | `passing` | Do requests and responses pass as they are? |
//! | `leaving` | What does the server hear of a hang-up? |
//! | `http_2` | And of one where calls share a connection? |
//! | `failing` | What does a client get if the server fails? |
//! | `redirecting` | Where does a redirect lead? |
//! | `refused` | What does not pass? |
//! | `admin` | What do operators see? |
//! | `draining` | Does it end in time? |
//! | `told` | Does the program understand what it is told, and say what is wrong with it? |
//! | `whole` | Does the program do what it is for, in front of either kind of server? |
//! | `support` | What do these share? |

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod admin;
mod draining;
mod failing;
mod http_2;
mod leaving;
mod passing;
mod redirecting;
mod refused;
mod support;
mod told;
mod whole;
