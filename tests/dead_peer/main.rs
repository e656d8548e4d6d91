//! A network that fails silently, in two real network namespaces.
//!
//! ```sh
//! cargo test --test dead_peer --features axum,socket
//! ```
//!
//! Server and client each run in a namespace of their own, joined by a pair of virtual interfaces. Mid-call, the
//! client's interface starts to drop all packets, which to the server is the same as a pulled cable: nothing arrives,
//! and there is no error. The test prints a table of what each handler was notified of, and when.
//!
//! Needs Linux with `unshare` (util-linux), `ip` and `tc` (iproute2), and either root or a kernel that lets users
//! create namespaces. Where it cannot run, it prints a notice and passes, unless `DEAD_PEER_REQUIRED` is set.
//!
//! | process | runs | in |
//! |---|---|---|
//! | the test | [`namespace`] | the namespace it was started in, which it does not change |
//! | `server` | [`server`], this binary again | a namespace of its own, with the witness for all handlers |
//! | `client` | [`client`], this binary again | another one |
//!
//! The kernel removes a namespace along with its last process, so there is nothing to clean up after a failure.

#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod calls;
mod client;
mod namespace;
mod server;

use std::io::Write as _;

use self::namespace::{Role, Unshare};

#[test]
fn a_silent_network_is_detected_only_with_the_options() {
    match Unshare::find() {
        Ok(unshare) => {
            let status = unshare.command(Role::Server).status().unwrap();
            assert!(status.success(), "see above");
        }
        Err(reason) if std::env::var_os("DEAD_PEER_REQUIRED").is_none() => {
            let notice = format!(
                "\nNOT RUN: the test of a silent network. It needs two network namespaces:\n{reason}\n\n"
            );
            // Written straight to stderr, because the test harness captures what a passing test prints.
            std::io::stderr().write_all(notice.as_bytes()).unwrap();
        }
        Err(reason) => {
            panic!("DEAD_PEER_REQUIRED is set, but there are no network namespaces: {reason}")
        }
    }
}

#[test]
#[ignore = "the server of the test above, which starts it"]
fn server() {
    if Role::Server.is_ours() {
        runtime().block_on(server::run());
    }
}

#[test]
#[ignore = "the client of the test above, which starts it"]
fn client() {
    if Role::Client.is_ours() {
        runtime().block_on(client::run());
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}
