//! Connections that stay: with a call in flight, or after one.

use anyhow::{Result, bail};

use super::{call, echo, http::Session, text};

/// Prints a line when all are there, and keeps them until the end of stdin.
pub(crate) async fn run(url: &str, sessions: usize, calls: usize, tool: &str) -> Result<()> {
    let mut connections = Vec::with_capacity(sessions * (1 + calls));
    for _ in 0..sessions {
        let (session, first) = Session::begin(url).await?;
        connections.push(first);
        for id in 0..calls {
            let mut connection = session.connect().await?;
            match tool {
                "hold" => connection.open(&call(id, "hold", "{}")).await?,
                "echo" => {
                    let text = text(0, id);
                    connection.call(&echo(id, &text), text.as_bytes()).await?;
                }
                _ => bail!("no such tool: {tool}"),
            }
            connections.push(connection);
        }
    }
    println!("{{}}");
    super::until_stdin_ends().await
}
