//! Calls whose clients do not read what they are sent.

use anyhow::Result;

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

/// Prints a line when all calls are made, and lets them be until the end of stdin.
pub(crate) async fn run(url: &str, flood: Flood) -> Result<()> {
    let mut unread = Vec::new();
    for _ in 0..flood.sessions {
        let (session, _first) = Session::begin(url).await?;
        for id in 0..flood.calls {
            let Flood { events, bytes, .. } = flood;
            let arguments = format!(r#"{{"events":{events},"bytes":{bytes}}}"#);
            let mut connection = session.connect_small().await?;
            connection.open(&call(id, "flood", &arguments)).await?;
            // The other half hangs up.
            if id % 2 == 0 {
                unread.push(connection);
            }
        }
    }
    println!("{{}}");
    super::until_stdin_ends().await
}
