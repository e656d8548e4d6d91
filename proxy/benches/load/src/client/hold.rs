//! Connections that stay: with a call in flight, or after one.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;

use super::{call, echo, http::Session, text};

/// So long a response may take to begin: 2 s.
const PATIENCE: Duration = Duration::from_secs(2);

/// Prints how many responses have begun when all calls are made, and keeps the connections until the end of stdin.
pub(crate) async fn run(url: &str, sessions: usize, calls: usize, tool: &str) -> Result<()> {
    let mut connections = Vec::with_capacity(sessions * (1 + calls));
    let (mut begun, mut patience) = (0, PATIENCE);
    for _ in 0..sessions {
        let (session, first) = Session::begin(url).await?;
        connections.push(first);
        for id in 0..calls {
            let mut connection = session.connect().await?;
            match tool {
                "hold" => match connection.open(&call(id, "hold", "{}"), patience).await? {
                    true => begun += 1,
                    // Some servers only begin with the answer. The others are not waited for.
                    false => patience = Duration::ZERO,
                },
                "echo" => {
                    let text = text(0, id);
                    connection.call(&echo(id, &text), text.as_bytes()).await?;
                    begun += 1;
                }
                _ => bail!("no such tool: {tool}"),
            }
            connections.push(connection);
        }
    }
    println!("{}", json!({ "begun": begun }));
    super::until_stdin_ends().await
}
