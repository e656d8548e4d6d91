//! A directory stored in a Redis or Valkey server.
//!
//! | key | value | expires |
//! |---|---|---|
//! | `mcp:s:<session>` | hash: `o` the session's record, `p` the `initialize` parameters | 1 h after it was written |
//! | `mcp:i` | hash: one field per instance, its lease | a day after the last heartbeat |
//! | `mcp:a:<session>:<incarnation>:<call>` | the answer to a call that ended without its client | 10 min after its call ended |
//!
//! `<session>` is a hash of the session id, and `<call>` is a number.
//!
//! A lease lasts 6 s and is written as `<renewed> <number> <run> <marks> <address>`:
//!
//! - `<renewed>` is the time at which the lease's last heartbeat was created, in milliseconds on the backend's clock.
//! - `<number>` increases with each of the instance's heartbeats.
//! - `<run>` is the run of the backend in which the instance has written all of its sessions, or `-` if there is none.
//! - `<marks>` is `settled`, `late-answers`, or both separated by a comma, or `-` if there are no marks.
//! - `<address>` is the instance's address.
//!
//! When another owner replaces one of the instance's records, the word `replaced` is appended to the lease until the instance's next
//! heartbeat.
//!
//! The `turned-away` field of `mcp:i` is not a lease. It holds the time at which an instance last turned a client away or a lease last
//! lapsed. All leases share one key, so they are lost together, and each instance notices the loss at its next heartbeat.
//!
//! Each compare-and-set is a script whose decision depends on a single key. The backend's user needs `~mcp:*` and `+hget +hmget +hset +hdel
//! +hgetall +pexpire +set +get +del +time +info +multi +exec +evalsha +script|load`, and behind Sentinels also `+role`.

use std::{
    fmt::{self, Debug, Formatter},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use redis::{
    Cmd, ErrorKind, FromRedisValue, Pipeline, RedisError, ScriptInvocation, ServerErrorKind,
    aio::ConnectionManager, cmd, pipe,
};
use tokio::{join, time::timeout};
use tracing::warn;

pub(crate) use self::address::RedisAddress;
use self::{
    connection::Connections,
    format::{
        LATE_ANSWERS, LEASES, MAX_CLOCK_SKEW, NONE, SETTLED, TURNED_AWAY, answer_key, millis,
        session_key,
    },
    inspection::{BackendProperties, Inspection},
    reply::{parse_leases, parse_record, parse_run},
    scripts::Scripts,
    source::Source,
};
use super::{
    BackendRunId, Claim, DIRECTORY_TIMEOUT, Directory, DirectoryError, DirectoryTime, Entry,
    HeartbeatReply, LEASE_TTL, Leases, RECORD_TTL, Registration, SessionSnapshot, Status,
};
use crate::{
    ids::{CallNumber, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone},
    rate_limited_warning::RateLimitedWarning,
};

mod address;
mod connection;
mod format;
mod inspection;
mod reply;
mod scripts;
mod source;

/// How long the leases' key is retained after the last heartbeat from any instance.
///
/// Much longer than the TTLs of the other keys, so that a backend evicting the keys closest to expiry evicts this key last.
const LEASES_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// A directory in Redis or Valkey. Its two connections are reestablished when they break.
pub(crate) struct RedisDirectory {
    connections: Connections,
    inspection: Inspection,
    unreadable_warning: RateLimitedWarning,
    scripts: Scripts,
}

// === impl RedisDirectory ===

impl RedisDirectory {
    /// Creates a directory at this address. The first command connects to it.
    ///
    /// # Errors
    ///
    /// Returns an error if the address cannot be parsed, or cannot be used with this build's features.
    pub(crate) fn new(address: &RedisAddress) -> Result<Self, DirectoryError> {
        let source = address.source()?;
        let inspection = Inspection::new(matches!(source, Source::Sentinels(_)));
        Ok(Self {
            connections: Connections::new(source),
            inspection,
            unreadable_warning: RateLimitedWarning::default(),
            scripts: Scripts::default(),
        })
    }

    /// Inspects the backend if it answers within [`DIRECTORY_TIMEOUT`].
    ///
    /// Otherwise the inspection is left to the first answered heartbeat. A connection error is only logged.
    ///
    /// # Errors
    ///
    /// Returns an error if the backend cannot serve as a directory.
    pub(crate) async fn inspect(&self) -> Result<(), DirectoryError> {
        let properties = async {
            let mut connection = self.connections.source().connect_once().await?;
            BackendProperties::read(&mut connection).await
        };
        match timeout(DIRECTORY_TIMEOUT, properties).await {
            Ok(Ok(properties)) => self.inspection.evaluate(properties),
            // Log the error now: heartbeats will retry, but all they get is a timeout.
            Ok(Err(error)) => {
                warn!(target: "mcp_cancel_cluster", "{error}: cannot use the directory yet");
                Ok(())
            }
            Err(_) => Ok(()),
        }
    }

    async fn connection(&self) -> Result<ConnectionManager, RedisError> {
        self.connections.get().await
    }

    fn lease_script(&self, owner: Owner, status: &Status, mode: &str) -> ScriptInvocation<'_> {
        let turned_away = status
            .turned_away
            .map(|elapsed| millis(elapsed).to_string());
        let run = status.written_in.as_ref().map(BackendRunId::as_str);
        let marks = [
            status.is_settled.then_some(SETTLED),
            status.has_late_answers.then_some(LATE_ANSWERS),
        ];
        let marks = Vec::from_iter(marks.into_iter().flatten()).join(",");
        let mut lease = self.scripts.lease.key(LEASES);
        lease.arg(owner.incarnation.to_string());
        lease.arg(turned_away.as_deref().unwrap_or(NONE));
        lease.arg(run.unwrap_or(NONE));
        lease.arg(if marks.is_empty() { NONE } else { &marks });
        lease.arg(owner.address.to_string());
        lease.arg(millis(LEASE_TTL)).arg(millis(MAX_CLOCK_SKEW));
        lease.arg(mode).arg(millis(LEASES_TTL)).arg(TURNED_AWAY);
        let created_at = status.created_at.map(|DirectoryTime(at)| at.to_string());
        lease.arg(created_at.as_deref().unwrap_or(NONE));
        lease.arg(status.number);
        lease
    }

    async fn renew_lease(
        &self,
        mut connection: ConnectionManager,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError> {
        let mut pipeline = pipe();
        pipeline.load_script(&self.scripts.lease).ignore();
        pipeline.invoke_script(&self.lease_script(owner, status, "renew"));
        pipeline.cmd("INFO").arg("server");
        let reply = pipeline.query_async(&mut connection).await;
        let reply = reply.inspect_err(|error: &RedisError| {
            // The backend may have become a replica, and its name may now resolve to another server. Or the backend is refusing the
            // connection, in which case it is not reestablished automatically.
            if !error.is_io_error() {
                self.connections.renew();
            }
        });
        let ((was_alive, was_replaced, time), info): ((bool, bool, u64), String) = reply?;
        Ok(HeartbeatReply {
            run: parse_run(&info)?,
            was_alive,
            was_replaced,
            time: DirectoryTime(time),
        })
    }

    /// Sends a command on the connection for answers. The command may be executed twice.
    ///
    /// That connection may have been idle for a long time, so the backend or the network may have closed it. The second attempt then uses a
    /// new connection.
    async fn query_answers<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, RedisError> {
        let mut connection = self.connections.for_answers().await?;
        match command.query_async(&mut connection).await {
            Err(error) if error.is_connection_dropped() => {
                command.query_async(&mut connection).await
            }
            result => result,
        }
    }

    /// Writes or removes an answer. If the backend turns out to be a replica or refuses the user, later commands use new connections.
    async fn change_answers(&self, command: &Cmd) -> Result<(), DirectoryError> {
        let result: Result<(), RedisError> = self.query_answers(command).await;
        Ok(result.inspect_err(|error| {
            // Any other refusal, for example because the memory is full, would happen on every connection, so it is no reason to renew the
            // connection used by heartbeats.
            if matches!(
                error.kind(),
                ErrorKind::Server(ServerErrorKind::ReadOnly) | ErrorKind::AuthenticationFailed
            ) {
                self.connections.renew();
            }
        })?)
    }
}

impl Debug for RedisDirectory {
    /// Omits the address, which may contain a password.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisDirectory").finish_non_exhaustive()
    }
}

#[async_trait]
impl Directory for RedisDirectory {
    async fn look_up(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError> {
        let mut pipeline = pipe();
        pipeline.atomic();
        pipeline.cmd("HGET").arg(session_key(session)).arg("o");
        append_lease_queries(&mut pipeline);
        let reply = pipeline.query_async(&mut self.connection().await?).await?;
        let (record, leases, time, info): (Option<Vec<u8>>, _, _, String) = reply;
        let record = record.map(|text| parse_record(session, &text));
        Ok(SessionSnapshot {
            record: record.transpose()?,
            leases: parse_leases(leases, time, &info)?,
        })
    }

    async fn leases(&self) -> Result<Leases, DirectoryError> {
        let mut pipeline = pipe();
        pipeline.atomic();
        append_lease_queries(&mut pipeline);
        let reply = pipeline.query_async(&mut self.connection().await?).await?;
        let (leases, time, info): (_, _, String) = reply;
        parse_leases(leases, time, &info)
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        let mut load = cmd("HMGET");
        load.arg(session_key(session)).arg("o").arg("p");
        let reply = load.query_async(&mut self.connection().await?).await?;
        let (record, params): (Option<Vec<u8>>, Option<Vec<u8>>) = reply;
        let record = record.map(|text| parse_record(session, &text));
        Ok(match record.transpose()? {
            Some(Record::Owned(ownership)) => Some(Entry {
                ownership,
                params: params.unwrap_or_default().into(),
            }),
            Some(Record::Deleted(_)) | None => None,
        })
    }

    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError> {
        let mut write = pipe();
        // Load the script every time, because a restarted backend no longer has it.
        write.load_script(&self.scripts.register).ignore();
        for registered in sessions {
            let mut register = self.scripts.register.key(session_key(registered.session));
            register.key(LEASES);
            register.arg(registered.ownership(owner).to_string());
            register.arg(owner.incarnation.to_string());
            register.arg(registered.epoch.to_string());
            register.arg(&*registered.params).arg(millis(RECORD_TTL));
            let epoch = registered.epoch;
            register.arg(Ownership { owner, epoch }.to_string());
            write.invoke_script(register.arg(format!("{owner} ")));
        }
        let records: Vec<Vec<u8>> = write.query_async(&mut self.connection().await?).await?;
        if records.len() != sessions.len() {
            return Err(DirectoryError::unreadable(
                "the number of replies does not match the number of commands",
            ));
        }
        let mut differing = Vec::new();
        for (registered, text) in sessions.iter().zip(records) {
            match parse_record(registered.session, &text) {
                Ok(record) if record == Record::Owned(registered.ownership(owner)) => {}
                Ok(record) => differing.push((registered.session, record)),
                // An unreadable record must not keep the others from being processed.
                Err(error) => self.unreadable_warning.warn(&format_args!("{error}")),
            }
        }
        Ok(differing)
    }

    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError> {
        let mut claim = self.scripts.claim.key(session_key(session));
        claim.arg(previous.to_string()).arg(wanted.to_string());
        claim.arg(millis(RECORD_TTL));
        let stored: Option<Vec<u8>> = claim.invoke_async(&mut self.connection().await?).await?;
        let stored = stored.map(|text| parse_record(session, &text));
        Ok(match stored.transpose()? {
            None => Claim::Unknown,
            Some(record) if record == Record::Owned(wanted) => Claim::Won,
            Some(record) => Claim::Lost(record),
        })
    }

    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError> {
        let mut delete = self.scripts.delete.key(session_key(session));
        delete
            .arg(tombstone.by.to_string())
            .arg(tombstone.epoch.to_string());
        delete.arg(millis(RECORD_TTL));
        let () = delete.invoke_async(&mut self.connection().await?).await?;
        Ok(())
    }

    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError> {
        self.connections.on_heartbeat_started();
        let mut connection = self.connection().await?;
        let renewal = self.renew_lease(connection.clone(), owner, status);
        let (reply, inspected) = join!(renewal, self.inspection.inspect(&mut connection));
        inspected?;
        let reply = reply?;
        self.connections.on_heartbeat_answered();
        self.inspection.on_answered(&reply.run);
        Ok(reply)
    }

    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError> {
        let lease = self.lease_script(owner, status, "acquire");
        let _reply: (bool, bool, u64) = lease.invoke_async(&mut self.connection().await?).await?;
        Ok(())
    }

    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError> {
        let mut release = cmd("HDEL");
        release.arg(LEASES).arg(owner.incarnation.to_string());
        Ok(release.exec_async(&mut self.connection().await?).await?)
    }

    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
        time: Duration,
    ) -> Result<(), DirectoryError> {
        let mut keep = cmd("SET");
        keep.arg(answer_key(session, incarnation, call))
            .arg(&*answer);
        keep.arg("PX").arg(millis(time));
        self.change_answers(&keep).await
    }

    async fn remove_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<(), DirectoryError> {
        let mut remove = cmd("DEL");
        remove.arg(answer_key(session, incarnation, call));
        self.change_answers(&remove).await
    }

    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError> {
        let mut get = cmd("GET");
        get.arg(answer_key(session, incarnation, call));
        let answer: Option<Vec<u8>> = self.query_answers(&get).await?;
        Ok(answer.map(Bytes::from))
    }
}

fn append_lease_queries(pipeline: &mut Pipeline) {
    pipeline.cmd("HGETALL").arg(LEASES);
    pipeline.cmd("TIME");
    pipeline.cmd("INFO").arg("server");
}

impl From<RedisError> for DirectoryError {
    fn from(error: RedisError) -> Self {
        Self::failed(error)
    }
}

#[cfg(test)]
mod tests;
