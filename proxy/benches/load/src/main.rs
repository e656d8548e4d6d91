//! The servers and clients for `proxy/benches/run`, which describes what they are for.
//!
//! ```text
//! proxy-load serve-stdio                  a server on stdin and stdout
//! proxy-load serve-http                   the same on a port, which it prints
//! proxy-load calls TARGET N SECONDS       N clients with a session each, making one call after another
//! proxy-load hold TARGET SESSIONS CALLS TOOL
//!                                         CALLS per session in flight (TOOL is hold), or answered on connections that
//!                                         stay open (echo), and in flight on those after a line on stdin
//! proxy-load upstream URL CALLS           a call in flight from hyper's client, and CALLS more after a line on stdin
//! proxy-load flood TARGET SESSIONS CALLS EVENTS BYTES
//!                                         calls with EVENTS events each, half of them left unread, half disconnected
//! ```
//!
//! TARGET is a URL, or `pipe` for its own server behind a pipe. The result is one line of JSON. After printing it, `hold`, `upstream` and
//! `flood` run until stdin ends. Each command uses one thread.

use std::env;

use anyhow::{Result, bail};
use tokio::runtime::Builder;

mod client;
mod server;

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    match words[..] {
        ["serve-stdio"] => server::stdio::serve(),
        ["serve-http"] => runtime.block_on(server::http::serve()),
        ["calls", target, clients, seconds] => runtime.block_on(client::calls::run(
            target,
            clients.parse()?,
            seconds.parse()?,
        )),
        ["hold", url, sessions, calls, tool] => runtime.block_on(client::hold::run(
            url,
            sessions.parse()?,
            calls.parse()?,
            tool,
        )),
        ["upstream", url, calls] => runtime.block_on(client::upstream::run(url, calls.parse()?)),
        ["flood", url, sessions, calls, events, bytes] => {
            let flood = client::flood::Flood {
                sessions: sessions.parse()?,
                calls: calls.parse()?,
                events: events.parse()?,
                bytes: bytes.parse()?,
            };
            runtime.block_on(client::flood::run(url, flood))
        }
        _ => bail!("src/main.rs lists its arguments"),
    }
}
