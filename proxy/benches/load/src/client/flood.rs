//! Calls whose clients do not read what they are sent.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::{call, http::Session};

/// So long a response may take to begin: 2 s. Some only begin with the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// So long the others are waited for if one did not begin in that time: 50 ms.
const SHORT: Duration = Duration::from_millis(50);

/// How much there is of it.
#[derive(Clone, Copy)]
pub(crate) struct Flood {
    pub(crate) sessions: usize,
    /// Of each session.
    pub(crate) calls: usize,
    /// For each call.
    pub(crate) events: usize,
    /// Of each event.
    pub(crate) bytes: usize,
}

/// Prints how many calls were refused when all are made, and lets them be until the end of stdin.
pub(crate) async fn run(url: &str, flood: Flood) -> Result<()> {
    let mut unread = Vec::new();
    let (mut refused, mut patience) = (0, PATIENCE);
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
            match connection.open(&flooded, patience).await {
                Ok(has_begun) => {
                    if !has_begun {
                        patience = SHORT;
                    }
                    // The other half hangs up.
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
