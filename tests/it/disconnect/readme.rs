//! The README's first program, as a reader copies it, and a client that disconnects from it.

use std::time::Duration;

use mcp_cancel_on_disconnect::MIN_GRACE;
use serde_json::json;
use tokio::time::timeout;

use crate::support::{example::Example, *};

const README: &str = include_str!("../../../README.md");
const PROGRAM: &str = include_str!("../../../examples/quick_start.rs");

/// How long a busy machine may delay the end of a grace period.
const MARGIN: Duration = Duration::from_secs(10);

#[test]
fn the_first_program_of_the_readme_is_the_example_quick_start() {
    let (_, block) = README.split_once("```rust").expect("a block of Rust");
    let (_, block) = block.split_once('\n').expect("its first line");
    let (block, _) = block.split_once("```\n").expect("its end");
    assert_eq!(block, PROGRAM);
}

#[tokio::test]
async fn the_first_program_of_the_readme_stops_its_tool_when_the_grace_of_its_client_ends() {
    let mut server = Example::start("quick_start").await;
    let mcp = Mcp::session(server.addr, PATH).await;
    let mut disconnecting = mcp.call(1, "long_sleep", json!({})).await;
    let mut connected = mcp.call(2, "long_sleep", json!({})).await;
    for call in [&mut disconnecting, &mut connected] {
        assert_eq!(call.head().await.status, 200);
        call.event().await.expect("the priming event");
        assert_eq!(server.next_line().await, "long_sleep begins");
    }

    disconnecting.fin();

    assert_eq!(server.next_line().await, "long_sleep is cancelled");
    let received = timeout(Duration::from_millis(100), connected.event()).await;
    assert!(
        received.is_err(),
        "the other client is still waiting: {received:?}"
    );
}

// === impl Example ===

impl Example {
    async fn next_line(&mut self) -> String {
        let line = timeout(MIN_GRACE + MARGIN, self.stdout.next_line()).await;
        let line = line.expect("a line in time").expect("readable");
        line.expect("the process is still running")
    }
}
