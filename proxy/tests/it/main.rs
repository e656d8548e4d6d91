//! The proxy over real sockets, in front of servers that a test controls.
//!
//! | module | question |
//! |---|---|
//! | `passing` | Do requests and responses pass unchanged? |
//! | `disconnecting` | What does the server receive when a client disconnects? |
//! | `http_2` | What does the server receive if calls share a connection? |
//! | `failing` | What does a client get if the server fails? |
//! | `redirecting` | Where does a redirect lead? |
//! | `public_url` | What does the server learn about its clients' connections, and which URL do clients read? |
//! | `cors` | Which pages of other origins may call? |
//! | `refused` | What does not pass? |
//! | `admin` | What do operators see? |
//! | `draining` | Does the program shut down in time? |
//! | `command_line` | Does the program read its options, and name what is wrong with them? |
//! | `subcommands` | Do health, man and completions do what they promise, and leave servers of the same name alone? |
//! | `log_lines` | Does the README list the log lines of the program? |
//! | `end_to_end` | Does the program cancel and keep answers, in front of either kind of server? |
//! | `support` | The code that these share. |

#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
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
