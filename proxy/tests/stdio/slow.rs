//! Clients that have not read, and calls without an answer, when their session ends.

use std::time::Duration;

use http_body_util::BodyExt as _;
use mcp_cancel_proxy::stdio::Options;
use tokio::time::{sleep, timeout};

use crate::{client::*, server::*};

const CALL: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x"}}"#;

/// Returns the options for a server whose answer has to wait for the client.
///
/// The server sends requests until there is no room left. After its answer it runs the shell command `then`.
fn requesting_server(then: &str) -> Options {
    shell(&format!(
        r#"read line; echo '{{"jsonrpc":"2.0","id":0,"result":{{}}}}'; read line; read line
        i=0; while [ $i -lt 256 ]; do echo '{{"jsonrpc":"2.0","id":"q'$i'","method":"roots/list"}}'; i=$((i+1)); done
        echo '{{"jsonrpc":"2.0","id":1,"result":{{"said":"all"}}}}'; {then}"#
    ))
}

/// Returns what a client reads from a call if it does not start to read until after this time.
async fn read_late(options: Options, after: Duration) -> String {
    let client = Client::begin(&serve(options), WITHOUT_PRIMING).await;
    let response = client.post(CALL).await;
    sleep(after).await;
    let read = timeout(LIMIT, response.into_body().collect()).await;
    let bytes = read.expect("the stream should end").unwrap().to_bytes();
    String::from_utf8(bytes.into()).unwrap()
}

#[tokio::test]
async fn a_client_with_an_unread_answer_gets_an_error_when_the_process_exits() {
    let text = read_late(requesting_server("exit 3"), Duration::from_secs(2)).await;
    let (_, last) = text.trim_end().rsplit_once("\n\n").unwrap();
    assert!(last.contains(r#""id":1,"error""#), "{last}");
}

#[tokio::test]
async fn a_session_is_not_idle_while_an_answer_waits_for_its_client() {
    let mut options = requesting_server("cat > /dev/null");
    options.session_timeout = Some(Duration::from_millis(300));
    let text = read_late(options, Duration::from_secs(2)).await;
    assert!(text.contains(r#""said":"all""#));
}

#[tokio::test]
async fn the_stream_of_a_cancelled_call_ends_with_its_session() {
    let mut options = shell(
        r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'; while read line; do :; done"#,
    );
    options.session_timeout = Some(Duration::from_millis(300));
    let client = Client::begin(&serve(options), WITHOUT_PRIMING).await;
    let response = client.post(CALL).await;
    client.cancel("1").await;
    let read = timeout(LIMIT, response.into_body().collect()).await;
    read.expect("the stream should end").unwrap();
}
