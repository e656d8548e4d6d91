//! The client's process, which makes calls and stops its network on command.
//!
//! It writes [`DONE`] once it has started, then reads one order per line from stdin and answers each with [`DONE`]. It
//! exits when its input ends.

use std::{
    io::{Write as _, stdout},
    time::Duration,
};

use serde_json::json;
use test_support::{Connection, H2, H2Stream, Mcp, PATH, Request};
use tokio::io::{AsyncBufReadExt as _, BufReader, stdin};

use crate::{
    calls::{Calls, Kind, Protocol, ROUNDS},
    namespace::CLIENT,
};

/// The line that confirms an order. The test harness writes to the same output.
pub(crate) const DONE: &str = "@ done";

/// The orders. Any other line is the calls to make, as JSON.
pub(crate) const UP: &str = "up";
pub(crate) const SILENCE: &str = "silence";

/// How long to wait between two of a cell's calls. This puts them at different points between two keep-alives.
const STAGGER: Duration = Duration::from_millis(170);

/// Keeps a call's connection open.
#[derive(Debug)]
pub(crate) enum Open {
    Http1 { _connection: Connection },
    Http2 { _connection: H2, _stream: H2Stream },
}

pub(crate) async fn run() {
    let mut orders = BufReader::new(stdin()).lines();
    let mut open = Vec::new();
    done();
    while let Some(order) = orders.next_line().await.unwrap() {
        match order.as_str() {
            UP => CLIENT.up(),
            SILENCE => CLIENT.silence(),
            calls => {
                let calls: Vec<Calls> = serde_json::from_str(calls).unwrap();
                for round in 0..ROUNDS {
                    for cell in &calls {
                        open.push(cell.call(round).await);
                    }
                    tokio::time::sleep(STAGGER).await;
                }
            }
        }
        done();
    }
}

fn done() {
    let mut out = stdout().lock();
    // The harness may have left an incomplete line behind.
    writeln!(out, "\n{DONE}").unwrap();
    out.flush().unwrap();
}

// === impl Calls ===

impl Calls {
    /// Sends one call without reading any of its answer.
    pub(crate) async fn call(&self, round: u32) -> Open {
        let request = self.request(round).await;
        match self.protocol {
            Protocol::Http1 => {
                let mut connection = Connection::open(self.addr).await;
                connection.send(&request).await;
                if self.kind == Kind::Pipelined {
                    connection.send(&request).await;
                }
                Open::Http1 {
                    _connection: connection,
                }
            }
            Protocol::Http2 => {
                let mut connection = H2::open(self.addr).await;
                let stream = connection.send(&request).await;
                Open::Http2 {
                    _connection: connection,
                    _stream: stream,
                }
            }
        }
    }

    async fn request(&self, round: u32) -> Request {
        let label = self.label(round);
        let mcp = match self.kind {
            Kind::Session => Mcp::session(self.addr, PATH).await,
            Kind::Sse | Kind::Json => Mcp::stateless(self.addr, PATH),
            Kind::Pipelined => return Request::new("GET", &format!("/wait/{label}")),
        };
        mcp.call_request(round, "hold", json!({ "label": label }))
    }
}
