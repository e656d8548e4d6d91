//! Calls whose clients do not read what they are sent.

use anyhow::Result;
use serde_json::json;

use super::{call, http::Session};

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
    let mut refused = 0;
    for _ in 0..flood.sessions {
        let Ok((session, _first)) = Session::begin(url).await else {
            refused += flood.calls;
            continue;
        };
        for id in 0..flood.calls {
            let Flood { events, bytes, .. } = flood;
            let arguments = format!(r#"{{"events":{events},"bytes":{bytes}}}"#);
            let mut connection = session.connect_small().await?;
            match connection.open(&call(id, "flood", &arguments)).await {
                // The other half hangs up.
                Ok(()) if id % 2 == 0 => unread.push(connection),
                Ok(()) => {}
                Err(_) => refused += 1,
            }
        }
    }
    println!("{}", json!({ "refused": refused }));
    super::until_stdin_ends().await
}
