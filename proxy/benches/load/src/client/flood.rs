//! Calls whose clients do not read the response.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{call, http::Session};

/// How long a response may take to start. Some servers do not send the head until they have the answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long the other responses may take once one has not started in that time.
const SHORT: Duration = Duration::from_millis(50);

/// The size of the flood.
#[derive(Clone, Copy)]
pub(crate) struct Flood {
    pub(crate) sessions: usize,
    /// The number of calls per session.
    pub(crate) calls: usize,
    /// The number of events per call.
    pub(crate) events: usize,
    /// The size of each event.
    pub(crate) bytes: usize,
}

/// Makes all calls and prints how many of them were refused.
///
/// Half of the others are disconnected at once, and the rest are left unread until stdin ends.
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
                    // The other half are disconnected by being dropped.
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
