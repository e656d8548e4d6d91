//! Where room is short: what goes first, and what must not.

use mcp_cancel_proxy::hub::Limits;

use crate::{NEW, scripted::*};

fn log_of(size: usize) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":"{}"}}}}"#,
        "x".repeat(size)
    )
}

#[tokio::test(start_paused = true)]
async fn a_log_line_of_three_kilobytes_is_read_where_there_is_no_room() {
    let limits = Limits {
        session_bytes: 9_200,
        ..Limits::default()
    };
    let mut setup = Setup::begun_with(NEW, limits).await;
    let (mut client, server) = setup.call(1).await;
    let primed = client.event().await.unwrap();
    drop(client);
    server.message(&log_of(3_000)).await;
    settle().await;
    assert!(!server.is_let_go(), "the call goes on");
    drop(primed);
}
