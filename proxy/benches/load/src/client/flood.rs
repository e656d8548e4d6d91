//! Calls whose clients do not read the response.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{call, http::Session};

/// Maximum time until a response starts: 2 s. Some servers send the head with the answer only.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time for the other responses if one did not start in that time: 50 ms.
const SHORT: Duration = Duration::from_millis(50);

/// The size of the flood.
#[derive(Clone, Copy)]
pub(crate) struct Flood {
    pub(crate) sessions: usize,
    /// Number of calls of each session.
    pub(crate) calls: usize,
    /// Number of events of each call.
    pub(crate) events: usize,
    /// Size of each event.
    pub(crate) bytes: usize,
}

/// Makes all calls and prints the number of those that were refused.
///
/// Disconnects every second of the others. Keeps the rest unread until the end of stdin.
pub(crate) async fn run(url: &str, flood: Flood) -> Result<()> {
    let mut unread = Vec::new();
    let (mut refused, mut limit) = (0, TIMEOUT);
    for _ in 0..flood.sessions {
        let Ok((session, _first)) = Session::begin(url).await else {
            refused += flood.calls;
            continue;
        };
        for id in 0..flood.calls {
            let Flood { events, bytes, .. } = flood;
            let arguments = format!(r#"{{"events":{events},"bytes":{bytes}}}"#);
            let mut connection = session.connect_small().await?;
            let flooded = call(id, "flood", &arguments);
            match connection.open(&flooded, limit).await {
                Ok(has_started) => {
                    if !has_started {
                        limit = SHORT;
                    }
                    // The connection of the other half is dropped.
                    if id % 2 == 0 {
                        unread.push(connection);
                    }
                }
                Err(_) => refused += 1,
            }
        }
    }
    println!("{}", json!({ "refused": refused }));
    super::until_stdin_ends().await
}
