//! A raw client's session, or what stands in for one without sessions.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use soak::{fact::Fact, setup::Setup, wire::Item};
use tokio::time::timeout;

use crate::{
    call::record,
    connection::{Connection, Request, World},
};

pub(crate) struct Session {
    pub(crate) world: Arc<World>,
    pub(crate) setup: &'static Setup,
    pub(crate) client: Arc<str>,
    pub(crate) id: Option<Arc<str>>,
    port: u16,
    next: AtomicU64,
    /// How many requests have been made so far.
    turn: AtomicUsize,
    watched: bool,
}

// === impl Session ===

impl Session {
    /// Opens a session if the set-up has sessions. Returns `None` if the server does not open it.
    pub(crate) async fn open(
        world: &Arc<World>,
        setup: &'static Setup,
        client: &str,
        watched: bool,
    ) -> Option<Self> {
        let mut session = Self {
            world: world.clone(),
            setup,
            client: client.into(),
            id: None,
            port: world.port(setup, watched),
            next: AtomicU64::new(1),
            turn: AtomicUsize::new(0),
            watched: watched && !setup.is_drained,
        };
        if setup.has_sessions {
            let hello = json!({
                "jsonrpc": "2.0", "id": 0, "method": "initialize",
                "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": client, "version": "0"}}
            });
            let (_, id, _) = session
                .exchange(&Request::post(&session.path(), None, &hello))
                .await?;
            session.id = Some(id?.into());
            let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
            session.post(&ready).await?;
        }
        Some(session)
    }

    /// Returns the next request's path. The route's paths take turns.
    pub(crate) fn path(&self) -> String {
        let mut paths = self.setup.paths();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % paths.len();
        paths
            .nth(turn)
            .expect("the index is below the number of paths")
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns `true` if the server detects every disconnect immediately.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched
    }

    pub(crate) async fn connect(&self) -> io::Result<Connection> {
        Connection::open(&self.world, self.port).await
    }

    pub(crate) async fn connect_small(&self) -> io::Result<Connection> {
        Connection::open_small(&self.world, self.port).await
    }

    /// Sends a message. Returns the response's status, or `None` unless the response is complete.
    pub(crate) async fn post(&self, message: &Value) -> Option<u16> {
        let request = Request::post(&self.path(), self.id.as_deref(), message);
        self.exchange(&request).await.map(|(status, ..)| status)
    }

    /// Sends one request on a connection of its own. Returns the status and the session id if the response is complete.
    pub(crate) async fn exchange(&self, request: &Request) -> Option<(u16, Option<String>, ())> {
        let mut connection = self.connect().await.ok()?;
        connection.send(request).await.ok()?;
        let (status, session, _) = connection.reply().await?;
        Some((status, session, ()))
    }

    /// Sends a request that is not a call, and records its status.
    pub(crate) async fn probe(&self, what: &str, request: &Request) {
        // If it opens a stream, the stream may stay open.
        let status = timeout(Duration::from_secs(2), self.exchange(request)).await;
        self.world.log.write(Fact::Probed {
            what: what.to_owned(),
            status: status.ok().flatten().map(|(status, ..)| status),
        });
    }

    /// Reads the standalone stream until it ends or this future is dropped.
    pub(crate) async fn listen(self: Arc<Self>) {
        let Ok(mut connection) = self.connect().await else {
            return;
        };
        let stream = connection.number;
        let session = self.id.clone();
        self.world.log.write(Fact::Listening { session, stream });
        let request = Request::get(&self.path(), self.id.as_deref(), None);
        if connection.send(&request).await.is_err() {
            return;
        }
        while let Some(item) = connection.next().await {
            match item {
                Item::End => return,
                item => drop(record(&self.world.log, stream, &item)),
            }
        }
    }

    /// Ends the session, if there is one, and records that.
    pub(crate) async fn delete(&self) {
        let Some(session) = self.id.clone() else {
            return;
        };
        let request = Request::delete(&self.path(), &session);
        self.world.log.write(Fact::Deleting {
            session: session.clone(),
        });
        if let Some((status, ..)) = self.exchange(&request).await {
            self.world.log.write(Fact::Deleted { session, status });
        }
    }
}
