//! Many clients in one process, all acting at the same time.

use std::{collections::HashMap, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    client::{Client, Close, Stream, Transport},
    setup::Mode,
    sockets::tools::done,
};

/// How many calls may be starting at the same time. All other operations run without a limit.
const STARTING: usize = 256;

/// Executes commands for many clients.
///
/// - `open SESSIONS ADDRESS,…` adds clients, one per session.
/// - `start GROUP FIRST COUNT TOOL` starts a group's calls.
/// - `cut GROUP` disconnects: even calls with a FIN, odd ones with an RST.
/// - `resume GROUP` resumes them.
/// - `answers GROUP SECONDS` returns the number of correct answers received within that time, and forgets
///   the group.
/// - `forget GROUP` drops the group's calls. It is no error if there is no such group.
#[derive(Default)]
pub struct ConcurrentClients {
    clients: Vec<Client>,
    groups: HashMap<String, Vec<Call>>,
}

/// One of a client's calls.
struct Call {
    number: usize,
    client: Client,
    /// The event id that the client can resume from.
    event: String,
    stream: Option<Stream>,
}

// === impl ConcurrentClients ===

impl ConcurrentClients {
    pub async fn act(&mut self, words: &[&str]) -> Result<String> {
        match words {
            ["open", sessions, addresses] => {
                for address in addresses.split(',').cycle().take(sessions.parse()?) {
                    let transport = Transport::Socket(address.parse()?);
                    self.clients
                        .push(Client::open(transport, Mode::Session).await?);
                }
            }
            ["start", group, first, count, tool] => {
                let first: usize = first.parse()?;
                let calls = first..first + count.parse::<usize>()?;
                let permits = Arc::new(Semaphore::new(STARTING));
                let number: usize = group.parse()?;
                let begin = calls.map(|call| {
                    let client = self.clients[call % self.clients.len()].clone();
                    let (permits, tool) = (permits.clone(), (*tool).to_owned());
                    async move {
                        let _permit = permits.acquire().await?;
                        Call::begin(client, call, number, &tool).await
                    }
                });
                self.groups
                    .insert((*group).to_owned(), run_all(begin).await?);
            }
            ["cut", group] => {
                let calls = self.groups.get_mut(*group).context("no such group")?;
                calls.iter_mut().try_for_each(Call::cut)?;
            }
            ["resume", group] => {
                let calls = run_all(self.take(group)?.map(Call::resume)).await?;
                self.groups.insert((*group).to_owned(), calls);
            }
            ["answers", group, seconds] => {
                let limit = Duration::from_secs(seconds.parse()?);
                let right = run_all(self.take(group)?.map(|call| call.check(limit))).await?;
                let right = right.into_iter().filter(|right| *right).count();
                return Ok(right.to_string());
            }
            ["forget", group] => drop(self.groups.remove(*group)),
            other => bail!("no command {other:?}"),
        }
        Ok("done".to_owned())
    }

    fn take(&mut self, group: &str) -> Result<impl Iterator<Item = Call> + use<>> {
        let calls = self.groups.remove(group).context("no such group")?;
        Ok(calls.into_iter())
    }
}

/// Runs all tasks concurrently. Returns their results in the order they finish.
async fn run_all<T: Send + 'static>(
    tasks: impl Iterator<Item = impl Future<Output = Result<T>> + Send + 'static>,
) -> Result<Vec<T>> {
    let results = tasks.collect::<JoinSet<_>>().join_all().await;
    results.into_iter().collect()
}

// === impl Call ===

impl Call {
    async fn begin(client: Client, number: usize, group: usize, tool: &str) -> Result<Self> {
        let arguments = json!({ "call": number, "group": group });
        let (stream, event) = client.begin(number, tool, arguments).await?;
        Ok(Self {
            number,
            client,
            event: event.context("no event to resume from")?,
            stream: Some(stream),
        })
    }

    /// Closes the connection, with a FIN for an even call and an RST for an odd one.
    fn cut(&mut self) -> Result<()> {
        let is_even = self.number.is_multiple_of(2);
        let close = if is_even { Close::Fin } else { Close::Rst };
        let stream = self.stream.take();
        stream.map_or(Ok(()), |mut stream| stream.before_close(close))
    }

    async fn resume(mut self) -> Result<Self> {
        self.stream = Some(self.client.resume(&self.event).await?);
        Ok(self)
    }

    /// Returns `true` if the stream delivers the answer for completed work within `limit`.
    async fn check(self, limit: Duration) -> Result<bool> {
        let Some(mut stream) = self.stream else {
            return Ok(false);
        };
        let answer = format!("\"{}\"", done(self.number));
        let received = tokio::time::timeout(limit, stream.until(&answer)).await;
        Ok(matches!(received, Ok(Ok(()))))
    }
}
