//! A network that fails silently, in two real network namespaces.
//!
//! ```sh
//! cargo test --test dead_peer --features axum,socket
//! ```
//!
//! Server and client run in a namespace each, joined by a pair of virtual interfaces. In the middle of every call the
//! client's interface starts to drop all packets. For the server this equals a pulled cable: nothing arrives, and there
//! is no error. The test prints a table of what each handler was notified of, and when.
//!
//! Needs Linux with `unshare` (util-linux), `ip` and `tc` (iproute2). It also needs root, or a kernel that lets a user
//! make namespaces. Where it cannot run it prints a notice and passes, unless `DEAD_PEER_REQUIRED` is set.
//!
//! | process | runs | in |
//! |---|---|---|
//! | the test | [`namespace`] | the namespace it was started in, which it does not change |
//! | `server` | [`server`], this binary again | its own namespace, with the witness of all handlers |
//! | `client` | [`client`], this binary again | a second namespace |
//!
//! The kernel removes a namespace with its last process, so no failure needs a clean-up.

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
        Err(why) if std::env::var_os("DEAD_PEER_REQUIRED").is_none() => {
            let notice = format!(
                "\nNOT RUN: the test of a silent network. It needs two network namespaces:\n{why}\n\n"
            );
            // Written to stderr directly, because the test harness captures the output of a passing test.
            std::io::stderr().write_all(notice.as_bytes()).unwrap();
        }
        Err(why) => panic!("DEAD_PEER_REQUIRED is set, but there are no network namespaces: {why}"),
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
