//! Connections that keep sending half a request and closing.

use std::net::SocketAddr;

use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use serde_json::json;
use test_support::{Connection, within};

use crate::{run_alone, wrapped};

#[cfg(target_os = "linux")]
#[test]
fn a_thousand_incomplete_requests_leave_no_state() {
    run_alone(async || {
        let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
        let calls = layer.calls();
        let (witness, served, mcp) = wrapped(layer).await;
        let mut victim = mcp.call(7, "hold", json!({ "label": "victim" })).await;
        witness.started("victim").await;
        let before = sockets(served.addr);

        let request = mcp.call_request(7, "hold", json!({ "label": "flood" }));
        for nth in 0..1_000 {
            let mut connection = Connection::open(served.addr).await;
            match nth % 4 {
                0 => connection.write(b"POST /mcp HTTP/1.1\r\nmcp-sess").await,
                1 => {
                    let mut half = request.clone();
                    half.body.truncate(half.body.len() / 2);
                    connection.send_cut(&half, request.body.len()).await;
                }
                2 => {
                    connection.send_chunked_head(&request).await;
                    connection.chunk(&request.body).await;
                }
                // A whole request and part of the next one.
                _ => {
                    let text = json!({ "text": "hi" });
                    connection
                        .send(&mcp.call_request(nth.to_string(), "echo", text))
                        .await;
                    connection.write(b"GET /mcp HT").await;
                }
            }
            match nth % 2 {
                0 => connection.rst(),
                _ => connection.fin(),
            }
        }

        let back = async {
            while sockets(served.addr) > before {
                tokio::task::yield_now().await;
            }
        };
        within(format!("no more than {before} sockets"), back).await;
        let ended = async {
            while calls.len() > 1 {
                tokio::task::yield_now().await;
            }
        };
        within("the calls to end", ended).await;
        assert_eq!(witness.starts("flood"), 0);
        witness.release("victim");
        assert!(victim.answer().await.is_some(), "it was never cancelled");
        assert!(witness.ended("victim").await.is_completed());
    });
}

/// How many IPv4 sockets are open on the server's port, including the listening one.
fn sockets(server: SocketAddr) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("the kernel's table");
    let local = format!(":{:04X}", server.port());
    let of_server = table.lines().filter(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // A socket without an inode has already been closed by its process.
        fields[1].ends_with(&local) && fields[9] != "0"
    });
    of_server.count()
}
