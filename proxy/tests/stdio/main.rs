//! Real processes behind the service: what becomes of calls, and that no process is left.
#![cfg(unix)]

mod client;
mod ends;
mod lines;
mod requests;
mod server;
