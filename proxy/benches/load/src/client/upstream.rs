//! The memory that a connection to a server takes in a program that does nothing else. Like the proxy, it uses hyper's client.

use anyhow::{Result, ensure};
use bytes::Bytes;
use http::{Request, header};
use http_body_util::Full;
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioTimer},
};
use serde_json::json;

use super::call;

/// Makes one call that is never answered, and `calls` more after a line on stdin.
///
/// Each time, it prints how many streams have started, and keeps them until stdin ends.
pub(crate) async fn run(url: &str, calls: usize) -> Result<()> {
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .build_http::<Full<Bytes>>();
    let mut streams = Vec::with_capacity(1 + calls);
    for id in 0..=calls {
        let request = Request::post(url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .body(Full::from(call(id, "hold", "{}")))?;
        let response = client.request(request).await?;
        ensure!(response.status() == 200, "{} to a call", response.status());
        streams.push(response.into_body());
        if id == 0 {
            println!("{}", json!({ "begun": 1 }));
            if !super::read_line().await {
                return Ok(());
            }
        }
    }
    println!("{}", json!({ "begun": calls }));
    super::until_stdin_ends().await
}
