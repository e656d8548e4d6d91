//! Idle connections, with a call in flight or after one.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;

use super::{
    call, echo,
    http::{Connection, Session},
    text,
};

/// How long a response may take to start.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Makes all calls and prints how many responses have started.
///
/// Keeps the connections until stdin ends. After `echo`, a line on stdin starts a `hold` on the same connections, and the number of
/// responses that have started is printed again.
pub(crate) async fn run(url: &str, sessions: usize, calls: usize, tool: &str) -> Result<()> {
    let mut connections = Vec::with_capacity(sessions * (1 + calls));
    let (mut started, mut limit) = (0, TIMEOUT);
    for _ in 0..sessions {
        let (session, first) = Session::begin(url).await?;
        connections.push((None, first));
        for id in 0..calls {
            let mut connection = session.connect().await?;
            match tool {
                "hold" => started += hold(&mut connection, id, &mut limit).await?,
                "echo" => {
                    let text = text(0, id);
                    connection.call(&echo(id, &text), text.as_bytes()).await?;
                    started += 1;
                }
                _ => bail!("no such tool: {tool}"),
            }
            connections.push((Some(id), connection));
        }
    }
    println!("{}", json!({ "begun": started }));
    if tool == "echo" && super::read_line().await {
        started = 0;
        for (id, connection) in &mut connections {
            if let Some(id) = *id {
                started += hold(connection, id, &mut limit).await?;
            }
        }
        println!("{}", json!({ "begun": started }));
    }
    super::until_stdin_ends().await
}

/// Starts a call that is never answered.
///
/// Returns 1 if its stream has started in time, and 0 otherwise.
async fn hold(connection: &mut Connection, id: usize, limit: &mut Duration) -> Result<usize> {
    let has_started = connection.open(&call(id, "hold", "{}"), *limit).await?;
    if !has_started {
        // Some servers do not send the head until they have the answer. In that case, do not wait for the other responses.
        *limit = Duration::ZERO;
    }
    Ok(has_started.into())
}
