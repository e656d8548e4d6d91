//! The directory in a Redis or a Valkey.
//!
//! | key | value | expires |
//! |---|---|---|
//! | `mcp:s:<session>` | hash: `o` the record of the session, `p` the `initialize` parameters | 1 h after it was written |
//! | `mcp:i` | hash: a field an instance, its lease | a day after the last heartbeat |
//! | `mcp:a:<session>:<incarnation>:<call>` | the answer of a call that ended without its client | 10 min after its call |
//!
//! `<session>` is a hash, `<call>` a number. A lease is `<renewed> <turned away> <run> <address>`: two times of the engine in
//! milliseconds (`-` if it turned no client away), and the run in which all sessions of the instance are written, or `-`. It
//! lasts for 6 s. All leases are in one key, so whatever loses one loses all, and each instance sees that at its next heartbeat.
//!
//! What is compared and set is done by scripts of one key each. A user of the engine needs `~mcp:*`, and `+hget +hmget +hset
//! +hdel +hgetall +pexpire +set +get +time +info +multi +exec +evalsha +script|load`.

use std::{
    fmt::{self, Debug, Display, Formatter},
    str,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use redis::{
    Client, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, RedisError, Script, ScriptInvocation,
    ServerErrorKind, aio::ConnectionManager, cmd, io::tcp::TcpSettings, pipe,
};

use self::connection::Connection;
use super::{
    ANSWERS_LIMIT, Beat, Claim, Directory, DirectoryError, EngineRun, Entry, KEPT, LEASE, LIMIT,
    Lease, Leases, Look, Registration, Status,
};
use crate::{
    ids::{CallNumber, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone},
    warn_rarely::WarnRarely,
};

mod connection;

/// How long what was sent may be on its way before the connection counts as dead: 2 s. After a silent network TCP itself waits
/// about as long again as it was silent.
const DEAD_AFTER: Duration = Duration::from_secs(2);

/// The key of the leases.
const LEASES: &str = "mcp:i";

/// What a lease has where there is no time, or no run.
const NONE: &str = "-";

/// How long the leases are kept that no heartbeat renews: a day. Long, so that an engine that evicts by remaining time takes
/// them last.
const LEASES_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// How far ahead of the engine's clock a lease may be: 1 s. One that is further ahead is from an engine with another clock.
const CLOCK_SKEW: Duration = Duration::from_secs(1);

/// Writes the record of a session, unless the one that is there does not yield to it. Returns the record that is there then. What
/// cannot be read as a record is returned as it is.
const ENTER: &str = "
local is = redis.pcall('HGET', KEYS[1], 'o')
if type(is) == 'table' then return '' end
if is then
    local incarnation, epoch = string.match(is, ' (%x+) (%d+)$')
    if not epoch then return is end
    local its, mine = tonumber(epoch), tonumber(ARGV[3])
    local is_deleted = string.sub(is, 1, 2) == '- '
    local is_same = its == mine and incarnation == ARGV[2]
    if its > mine or (its == mine and incarnation > ARGV[2]) or (is_same and is_deleted) then return is end
end
redis.call('HSET', KEYS[1], 'o', ARGV[1], 'p', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return ARGV[1]
";

/// Puts the second ownership in the place of the first. Returns the record that is there then, if any.
const CLAIM: &str = "
local is = redis.call('HGET', KEYS[1], 'o')
if is == ARGV[1] then
    is = ARGV[2]
    redis.call('HSET', KEYS[1], 'o', is)
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return is
";

/// Puts a tombstone in the place of a record, unless another owner has it at a higher epoch. What is no record is left.
const DELETE: &str = "
local is, epoch = redis.pcall('HGET', KEYS[1], 'o'), ARGV[2]
if type(is) == 'table' then return 0 end
if is then
    local incarnation, its = string.match(is, ' (%x+) (%d+)$')
    if not its then return 0 end
    if incarnation ~= ARGV[1] and tonumber(its) >= tonumber(epoch) then return 0 end
    if tonumber(its) > tonumber(epoch) then epoch = its end
end
redis.call('HDEL', KEYS[1], 'p')
redis.call('HSET', KEYS[1], 'o', '- ' .. ARGV[1] .. ' ' .. epoch)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
";

/// Renews a lease, or makes it if that is asked for, and removes those that have lapsed. Returns whether there was one to renew.
const LEASE_SCRIPT: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, was_alive = redis.call('HGETALL', KEYS[1]), 0
for at = 1, #all, 2 do
    local renewed = tonumber(string.match(all[at + 1], '^%d+')) or 0
    if now - renewed >= tonumber(ARGV[5]) or renewed - now > tonumber(ARGV[6]) then
        redis.call('HDEL', KEYS[1], all[at])
    elseif all[at] == ARGV[1] then
        was_alive = 1
    end
end
if was_alive == 1 or ARGV[7] == 'make' then
    local turned_away = ARGV[2]
    if turned_away ~= '-' then turned_away = string.format('%.0f', now - tonumber(turned_away)) end
    local lease = string.format('%.0f', now) .. ' ' .. turned_away .. ' ' .. ARGV[3] .. ' ' .. ARGV[4]
    redis.call('HSET', KEYS[1], ARGV[1], lease)
    redis.call('PEXPIRE', KEYS[1], ARGV[8])
end
return was_alive
";

/// A Redis or a Valkey, on two connections, which come back by themselves.
pub(crate) struct RedisDirectory {
    connection: Connection,
    /// For answers of calls, so that megabytes of them delay no heartbeat.
    answers: Connection,
    unreadable: WarnRarely,
    enter: Script,
    claim: Script,
    delete: Script,
    lease: Script,
}

// === impl RedisDirectory ===

impl RedisDirectory {
    /// Of an address such as `redis://user:password@cache:6379/0`. It connects with the first command.
    ///
    /// # Errors
    /// The address cannot be read.
    pub(crate) fn new(url: &str) -> Result<Self, DirectoryError> {
        let tcp = TcpSettings::default().set_nodelay(true);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(DEAD_AFTER);
        let client = Client::open(url.into_connection_info()?.set_tcp_settings(tcp))?;
        Ok(Self {
            connection: Connection::new(client.clone(), LIMIT)?,
            answers: Connection::new(client, ANSWERS_LIMIT)?,
            unreadable: WarnRarely::default(),
            enter: Script::new(ENTER),
            claim: Script::new(CLAIM),
            delete: Script::new(DELETE),
            lease: Script::new(LEASE_SCRIPT),
        })
    }

    fn connection(&self) -> ConnectionManager {
        self.connection.get()
    }

    fn lease_of(&self, owner: Owner, status: &Status, how: &str) -> ScriptInvocation<'_> {
        let turned_away = status.turned_away.map(|ago| millis(ago).to_string());
        let run = status.written_in.as_ref().map(EngineRun::as_str);
        let mut lease = self.lease.key(LEASES);
        lease.arg(owner.incarnation.to_string());
        lease.arg(turned_away.as_deref().unwrap_or(NONE));
        lease.arg(run.unwrap_or(NONE));
        lease.arg(owner.address.to_string());
        lease.arg(millis(LEASE)).arg(millis(CLOCK_SKEW));
        lease.arg(how).arg(millis(LEASES_KEPT));
        lease
    }

    /// Begins a new connection where the engine refused: it may have become a replica, and another one answers to its name.
    fn reconnect_if_refused(&self, error: &RedisError) {
        if matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) {
            self.connection.renew();
        }
    }

    /// Writes or removes an answer. A failure is not the heartbeat's.
    async fn change_answers(&self, command: &Cmd) -> Result<(), DirectoryError> {
        let done = command.exec_async(&mut self.answers.get()).await;
        Ok(done.inspect_err(|error| {
            // What else the engine refuses, such as a write when its memory is full, it refuses on every connection.
            if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) {
                self.answers.renew();
            }
        })?)
    }
}

impl Debug for RedisDirectory {
    /// Without the address, in which a password may be.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisDirectory").finish_non_exhaustive()
    }
}

#[async_trait]
impl Directory for RedisDirectory {
    async fn look(&self, session: SessionHash) -> Result<Look, DirectoryError> {
        let mut look = pipe();
        look.atomic();
        look.cmd("HGET").arg(session_key(session)).arg("o");
        ask_for_leases(&mut look);
        let answer = look.query_async(&mut self.connection()).await?;
        let (record, leases, time, info): (Option<Vec<u8>>, _, _, String) = answer;
        let record = record.map(|text| read_record(session, &text));
        Ok(Look {
            record: record.transpose()?,
            leases: read_leases(leases, time, &info)?,
        })
    }

    async fn leases(&self) -> Result<Leases, DirectoryError> {
        let mut look = pipe();
        look.atomic();
        ask_for_leases(&mut look);
        let answer = look.query_async(&mut self.connection()).await?;
        let (leases, time, info): (_, _, String) = answer;
        read_leases(leases, time, &info)
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        let mut load = cmd("HMGET");
        load.arg(session_key(session)).arg("o").arg("p");
        let answer = load.query_async(&mut self.connection()).await?;
        let (record, params): (Option<Vec<u8>>, Option<Vec<u8>>) = answer;
        let record = record.map(|text| read_record(session, &text));
        Ok(match record.transpose()? {
            Some(Record::Owned(ownership)) => Some(Entry {
                ownership,
                params: params.unwrap_or_default().into(),
            }),
            Some(Record::Deleted(_)) | None => None,
        })
    }

    async fn enter(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError> {
        let mut write = pipe();
        // An engine that was started again does not know it any more.
        write.load_script(&self.enter).ignore();
        for Registration {
            session,
            epoch,
            params,
        } in sessions
        {
            let ownership = Ownership {
                owner,
                epoch: *epoch,
            };
            let mut enter = self.enter.key(session_key(*session));
            enter.arg(ownership.to_string());
            enter
                .arg(owner.incarnation.to_string())
                .arg(epoch.to_string());
            write.invoke_script(enter.arg(&**params).arg(millis(KEPT)));
        }
        let records: Vec<Vec<u8>> = write.query_async(&mut self.connection()).await?;
        if records.len() != sessions.len() {
            return Err(DirectoryError::unreadable(
                "another number of answers than of questions",
            ));
        }
        let mut left = Vec::new();
        for (Registration { session, epoch, .. }, text) in sessions.iter().zip(records) {
            let epoch = *epoch;
            match read_record(*session, &text) {
                Ok(record) if record == Record::Owned(Ownership { owner, epoch }) => {}
                Ok(record) => left.push((*session, record)),
                // One such record does not keep the others waiting.
                Err(error) => self.unreadable.warn(&format_args!("{error}")),
            }
        }
        Ok(left)
    }

    async fn claim(
        &self,
        session: SessionHash,
        former: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError> {
        let mut claim = self.claim.key(session_key(session));
        claim.arg(former.to_string()).arg(wanted.to_string());
        claim.arg(millis(KEPT));
        let is: Option<Vec<u8>> = claim.invoke_async(&mut self.connection()).await?;
        let is = is.map(|is| read_record(session, &is)).transpose()?;
        Ok(match is {
            None => Claim::Unknown,
            Some(is) if is == Record::Owned(wanted) => Claim::Won,
            Some(is) => Claim::Lost(is),
        })
    }

    async fn delete(&self, session: SessionHash, by: Tombstone) -> Result<(), DirectoryError> {
        let mut delete = self.delete.key(session_key(session));
        delete.arg(by.by.to_string()).arg(by.epoch.to_string());
        delete.arg(millis(KEPT));
        let () = delete.invoke_async(&mut self.connection()).await?;
        Ok(())
    }

    async fn beat(&self, owner: Owner, status: &Status) -> Result<Beat, DirectoryError> {
        let mut beat = pipe();
        beat.load_script(&self.lease).ignore();
        beat.invoke_script(&self.lease_of(owner, status, "renew"));
        beat.cmd("INFO").arg("server");
        let answer = beat.query_async(&mut self.connection()).await;
        let answer = answer.inspect_err(|error| self.reconnect_if_refused(error))?;
        let (was_alive, info): (bool, String) = answer;
        Ok(Beat {
            run: read_run(&info)?,
            was_alive,
        })
    }

    async fn lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError> {
        let lease = self.lease_of(owner, status, "make");
        let _was_alive: bool = lease.invoke_async(&mut self.connection()).await?;
        Ok(())
    }

    async fn leave(&self, owner: Owner) -> Result<(), DirectoryError> {
        let mut leave = cmd("HDEL");
        leave.arg(LEASES).arg(owner.incarnation.to_string());
        Ok(leave.exec_async(&mut self.connection()).await?)
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
        let answer: Option<Vec<u8>> = get.query_async(&mut self.answers.get()).await?;
        Ok(answer.map(Bytes::from))
    }
}

fn session_key(session: SessionHash) -> String {
    format!("mcp:s:{session}")
}

fn answer_key(session: SessionHash, incarnation: Incarnation, call: CallNumber) -> String {
    format!("mcp:a:{session}:{incarnation}:{call}")
}

/// The engine's unit of time.
fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The leases, and what is needed to read them.
fn ask_for_leases(look: &mut Pipeline) {
    look.cmd("HGETALL").arg(LEASES);
    look.cmd("TIME");
    look.cmd("INFO").arg("server");
}

fn read_leases(
    fields: Vec<(String, String)>,
    (seconds, micros): (u64, u64),
    info: &str,
) -> Result<Leases, DirectoryError> {
    let now = Duration::from_secs(seconds) + Duration::from_micros(micros);
    // What cannot be read is the lease of no instance of this version.
    let all = fields
        .iter()
        .filter_map(|(incarnation, text)| read_lease(incarnation, text, now));
    Ok(Leases {
        run: read_run(info)?,
        all: all.collect(),
    })
}

/// Reads a lease. `None` if it has lapsed, or cannot be read.
fn read_lease(incarnation: &str, text: &str, now: Duration) -> Option<Lease> {
    let mut parts = text.split(' ');
    let renewed = Duration::from_millis(parts.next()?.parse().ok()?);
    let turned_away = parts.next()?;
    let run = parts.next()?;
    let age = now.saturating_sub(renewed);
    let lasts = age < LEASE && renewed.saturating_sub(now) <= CLOCK_SKEW;
    let turned_away = turned_away.parse().ok().map(Duration::from_millis);
    lasts.then_some(Lease {
        incarnation: incarnation.parse().ok()?,
        age,
        written_in: (run != NONE).then(|| EngineRun::new(run)),
        turned_away: turned_away.map(|at| now.saturating_sub(at)),
    })
}

fn read_record(session: SessionHash, text: &[u8]) -> Result<Record, DirectoryError> {
    let record = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    record.ok_or_else(|| {
        unreadable(&format_args!(
            "{} is no record of a session",
            session_key(session)
        ))
    })
}

/// The number of the engine's start, from what it says of itself.
fn read_run(info: &str) -> Result<EngineRun, DirectoryError> {
    let run = info.lines().find_map(|line| line.strip_prefix("run_id:"));
    let run = run.map(str::trim).filter(|run| !run.is_empty());
    run.map(EngineRun::new)
        .ok_or_else(|| unreadable(&"INFO names no run_id"))
}

fn unreadable(what: &dyn Display) -> DirectoryError {
    DirectoryError::unreadable(what.to_string())
}

impl From<RedisError> for DirectoryError {
    fn from(error: RedisError) -> Self {
        Self::failed(error)
    }
}

#[cfg(test)]
mod tests;
