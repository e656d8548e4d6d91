//! The proxy over real sockets, in front of servers controlled by the tests.
//!
//! | module | question |
//! |---|---|
//! | `passing` | Are requests and responses passed through unchanged? |
//! | `disconnecting` | What does the server receive when a client disconnects? |
//! | `http_2` | What does the server receive when calls share a connection? |
//! | `failing` | What does a client get when the server fails? |
//! | `redirecting` | Where does a redirect lead? |
//! | `public_url` | What does the server learn about its clients' connections, and which URL do clients see? |
//! | `cors` | Which pages from other origins may send requests? |
//! | `refused` | What is not let through? |
//! | `admin` | What do operators get to see? |
//! | `draining` | Does the program shut down in time? |
//! | `command_line` | Does the program read its options, and report what is wrong with them? |
//! | `subcommands` | Do health, man and completions work, without getting in the way of servers with those names? |
//! | `log_lines` | Does the README list the program's log lines? |
//! | `end_to_end` | Does the program cancel calls and keep answers, in front of either kind of server? |
//! | `support` | Code shared by the above. |

#![allow(
    clippy::restriction,
    reason = "a failed expectation ends the test; clippy only spares functions marked #[test]"
)]

mod admin;
mod command_line;
mod cors;
mod disconnecting;
mod draining;
mod end_to_end;
mod failing;
mod http_2;
mod log_lines;
mod passing;
mod public_url;
mod redirecting;
mod refused;
mod subcommands;
mod support;
