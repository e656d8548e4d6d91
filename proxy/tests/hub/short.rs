//! Where room is short: what goes first, and what must not.

use mcp_cancel_on_disconnect::Outcome;
use mcp_cancel_proxy::hub::Limits;

use crate::{NEW, scripted::*};

fn log_of(size: usize) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"info","data":"{}"}}}}"#,
        "x".repeat(size)
    )
}

fn large_answer(id: u32, size: usize) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"text":"{}"}}}}"#,
        "x".repeat(size)
    )
}

#[tokio::test(start_paused = true)]
async fn log_lines_go_before_an_answer_whatever_its_length() {
    for size in [1_000, 20_000] {
        let mut setup = Setup::begun(NEW).await;
        let mut calls = Vec::new();
        for id in 1..11 {
            let (mut client, server) = setup.call(id).await;
            let primed = client.event().await.unwrap();
            drop(client);
            calls.push((primed, server));
        }
        for (_, server) in &calls {
            for _ in 0..300 {
                server.message(&log_of(1_900)).await;
            }
        }
        settle().await;
        let (primed, server) = calls.remove(0);
        let whole = large_answer(1, size);
        server.message(&whole).await;
        drop(server);
        settle().await;
        let rest = setup.resumed(&primed).await.rest().await;
        let last = rest.last().unwrap();
        assert!(*last == whole, "{size}: {last:.200}");
        assert_eq!(setup.outcome().await, Outcome::Completed);
    }
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
