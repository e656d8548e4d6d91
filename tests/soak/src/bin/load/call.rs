//! A raw client's call, which sends, reads, disconnects and resumes, and records each step.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use soak::{
    fact::{Call, CloseKind, Fact, Log, Stream},
    job::{Job, answer},
    setup::Store,
    wire::Item,
};
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    connection::{Connection, Request},
    session::Session,
};

/// A call and its client's current connection.
pub(crate) struct ClientCall {
    pub(crate) session: Arc<Session>,
    pub(crate) key: Call,
    pub(crate) id: u64,
    bytes: usize,
    pub(crate) connection: Option<Connection>,
    pub(crate) last_event_id: Option<String>,
}

/// Why a client has stopped reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadEnd {
    /// It has read the answer, or an error in its place.
    Answer,
    /// The stream has ended without an answer, or there is no connection.
    End,
    /// Its time is up, or it has read the head it was waiting for.
    Time,
}

/// What an item means for its call.
pub(crate) enum ItemKind {
    Head,
    Event(Option<String>),
    Answer,
}

// === impl ClientCall ===

impl ClientCall {
    pub(crate) fn new(session: &Arc<Session>, job: &Job, bytes: usize) -> Self {
        Self {
            session: session.clone(),
            key: job.to_string().into(),
            id: session.next_id(),
            bytes,
            connection: None,
            last_event_id: None,
        }
    }

    /// Returns the same call, for its client's second connection.
    pub(crate) fn second(&self) -> Self {
        Self {
            session: self.session.clone(),
            key: self.key.clone(),
            id: self.id,
            bytes: self.bytes,
            connection: None,
            last_event_id: self.last_event_id.clone(),
        }
    }

    pub(crate) fn request(&self) -> Request {
        let message = json!({
            "jsonrpc": "2.0", "id": self.id, "method": "tools/call",
            "params": {
                "name": "work",
                "arguments": {"cell": &*self.key, "bytes": self.bytes},
                "_meta": {"progressToken": self.id},
            }
        });
        Request::post(&self.session.path(), self.session.id.as_deref(), &message)
    }

    fn log(&self) -> &Log {
        &self.session.world.log
    }

    /// Records that the call is about to be sent on this connection.
    pub(crate) fn record_request(&self, connection: &Connection) {
        self.log().write(Fact::Calling {
            call: self.key.clone(),
            client: self.session.client.clone(),
            route: self.session.setup.route.into(),
            session: self.session.id.clone(),
            id: self.id.to_string(),
            stream: connection.number,
        });
    }

    /// Sends the call. Returns `None` if it could not be sent.
    pub(crate) async fn ask(&mut self, mut connection: Connection) -> Option<()> {
        self.record_request(&connection);
        connection.send(&self.request()).await.ok()?;
        self.on_sent(connection);
        Some(())
    }

    /// Records that the call has been sent on this connection, and keeps the connection.
    pub(crate) fn on_sent(&mut self, connection: Connection) {
        let stream = connection.number;
        self.log().write(Fact::Sent { stream });
        self.connection = Some(connection);
    }

    /// Reads until the answer, but no longer than this.
    pub(crate) async fn read(&mut self, limit: Duration) -> ReadEnd {
        self.read_until(limit, false).await
    }

    /// Reads until the head, but no longer than this.
    pub(crate) async fn head(&mut self, limit: Duration) -> ReadEnd {
        self.read_until(limit, true).await
    }

    async fn read_until(&mut self, limit: Duration, stops_at_head: bool) -> ReadEnd {
        let until = Instant::now() + limit;
        let Some(connection) = &mut self.connection else {
            return ReadEnd::End;
        };
        let stream = connection.number;
        loop {
            let item = match timeout_at(until, connection.next()).await {
                Err(_) => return ReadEnd::Time,
                Ok(None | Some(Item::End)) => break,
                Ok(Some(item)) => item,
            };
            match record(&self.session.world.log, stream, &item) {
                ItemKind::Answer => return ReadEnd::Answer,
                ItemKind::Event(Some(id)) => self.last_event_id = Some(id),
                ItemKind::Head if stops_at_head => return ReadEnd::Time,
                ItemKind::Head | ItemKind::Event(None) => {}
            }
        }
        if let Some(connection) = self.connection.take() {
            connection.record_end();
        }
        ReadEnd::End
    }

    /// Closes the connection.
    pub(crate) async fn close(&mut self, how: CloseKind) {
        if let Some(connection) = self.connection.take() {
            connection.close(how).await;
        }
    }

    /// Resumes after the last event that was read. Returns `None` if there was none, or if the request could not be sent.
    pub(crate) async fn resume(&mut self) -> Option<()> {
        let id = self.last_event_id.clone()?;
        let mut connection = self.session.connect().await.ok()?;
        let request = Request::get(&self.session.path(), self.session.id.as_deref(), Some(&id));
        self.log().write(Fact::Resuming {
            call: self.key.clone(),
            session: self.session.id.clone(),
            last_event_id: id,
            stream: connection.number,
        });
        connection.send(&request).await.ok()?;
        self.connection = Some(connection);
        Some(())
    }

    /// Sends the client's own cancellation.
    pub(crate) async fn cancel(&self) {
        self.log().write(Fact::Cancelling {
            call: self.key.clone(),
        });
        let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": self.id}});
        if self.session.post(&cancel).await == Some(202) {
            self.log().write(Fact::Cancelled {
                call: self.key.clone(),
            });
        }
    }

    /// Has the server end the stream. Returns `None` if the stream's number is unknown or the server does not answer.
    pub(crate) async fn poll(&self) -> Option<()> {
        let (_, stream) = self.last_event_id.as_deref()?.split_once('/')?;
        let session = self.session.id.as_deref()?;
        self.log().write(Fact::Polling {
            call: self.key.clone(),
        });
        let request = Request::poll(self.session.setup, session, stream);
        self.session.exchange(&request).await.map(drop)
    }

    /// Reads up to the answer, resuming whenever the stream ends without one, then closes.
    ///
    /// The limit applies to each read. There are at most four resumes, or with a store that only replays, any number within the
    /// limit.
    pub(crate) async fn stay(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        let ends_always = self.session.setup.store == Some(Store::Replays);
        let mut resumes = 0;
        while self.read(limit).await == ReadEnd::End {
            let is_enough = if ends_always {
                Instant::now() > until
            } else {
                resumes == 4
            };
            resumes += 1;
            sleep(Duration::from_millis(200)).await;
            if is_enough || self.resume().await.is_none() {
                break;
            }
        }
        self.close(CloseKind::Fin).await;
    }
}

/// Records an item from a stream, and returns what it means for the call.
pub(crate) fn record(log: &Log, stream: Stream, item: &Item) -> ItemKind {
    let event = match item {
        Item::Head { status, .. } => {
            let status = *status;
            log.write(Fact::Head { stream, status });
            return ItemKind::Head;
        }
        Item::Event(event) => event,
        Item::End => return ItemKind::Event(None),
    };
    let message = event.message.as_ref();
    let id = || message.map_or_else(String::new, |message| message["id"].to_string());
    if let Some(code) = message.and_then(|message| message["error"]["code"].as_i64()) {
        log.write(Fact::Error {
            stream,
            id: id(),
            code,
        });
        return ItemKind::Answer;
    }
    if let Some(result) = message
        .and_then(|message| message.get("result"))
        .filter(|result| result.get("content").is_some())
    {
        let text = result["content"][0]["text"].as_str().unwrap_or_default();
        let of = text.trim_end_matches('.').to_owned();
        let whole = text == answer(&of, text.len()) && result["isError"] != Value::Bool(true);
        log.write(Fact::Answer {
            stream,
            id: id(),
            of,
            whole,
        });
        return ItemKind::Answer;
    }
    log.write(Fact::Event {
        stream,
        id: event.id.clone(),
    });
    ItemKind::Event(event.id.clone())
}
