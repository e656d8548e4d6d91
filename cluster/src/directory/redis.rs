//! The directory in a Redis or a Valkey.
//!
//! | key | value | lives for |
//! |---|---|---|
//! | `mcp:s:<session>` | hash: `o` the owner and the version of its ownership, `p` the `initialize` parameters | 1 h |
//! | `mcp:i:<incarnation>` | the lease: the address of the instance | 6 s |
//! | `mcp:d:<session>` | a client of the session is at the door of an instance that does not reach the owner | 2 s or 40 s |
//! | `mcp:a:<session>:<incarnation>:<call>` | the answer of a call that ended without its client | 10 min |
//!
//! `<session>` is a hash, `<call>` a number. What is compared and set is done by scripts of one key each, so that engines which
//! spread their keys can run them. A user of the engine needs `~mcp:*`, and `+hget +hmget +hset +pexpire +del +set +get +exists
//! +pttl +info +evalsha +script|load`.

use std::{
    fmt::{self, Debug, Display, Formatter},
    str,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use redis::{
    Client, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, RedisError, Script, ServerErrorKind,
    aio::ConnectionManager, cmd, io::tcp::TcpSettings, pipe,
};

use self::connection::Connection;
use super::{
    ANSWERS_LIMIT, Absence, Alive, Beat, Claim, Directory, DirectoryError, EngineRun, Entry, Found,
    KEPT, LEASE, LIMIT, Standing, TURNED_AWAY,
};
use crate::{
    ids::{CallNumber, Incarnation, Owner, Ownership, SessionHash},
    warn_rarely::WarnRarely,
};

mod connection;

/// How long what was sent may be on its way before the connection counts as dead: 2 s. After a silent network TCP itself waits
/// about as long again as it was silent.
const DEAD_AFTER: Duration = Duration::from_secs(2);

/// Writes a session, with this ownership if there is none, unless somebody else owns it, and says whose it is. What is no owner's is
/// told as it is.
const ENTER: &str = "
local ownership = redis.pcall('HGET', KEYS[1], 'o')
if type(ownership) == 'table' then return '' end
local owner = ARGV[4] .. ' '
if ownership and string.sub(ownership, 1, #owner) ~= owner then return ownership end
ownership = ownership or ARGV[1]
redis.call('HSET', KEYS[1], 'o', ownership, 'p', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return ownership
";

/// Puts the second ownership in the place of the first. Says which there is then, if any.
const CLAIM: &str = "
local ownership = redis.call('HGET', KEYS[1], 'o')
if ownership == ARGV[1] then
    ownership = ARGV[2]
    redis.call('HSET', KEYS[1], 'o', ownership)
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return ownership
";

/// Removes a session of this owner. What is no session is left.
const REMOVE: &str = "
local ownership, owner = redis.pcall('HGET', KEYS[1], 'o'), ARGV[1] .. ' '
if type(ownership) ~= 'string' or string.sub(ownership, 1, #owner) ~= owner then return 0 end
return redis.call('DEL', KEYS[1])
";

/// Notes a client at the door, for this long or for as long as it is known already.
const KNOCK: &str = "
if redis.call('PTTL', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
return 1
";

/// A Redis or a Valkey, on two connections, which come back by themselves.
pub(crate) struct RedisDirectory {
    connection: Connection,
    /// For answers of calls, so that megabytes of them delay no heartbeat.
    answers: Connection,
    unreadable: WarnRarely,
    enter: Script,
    claim: Script,
    remove: Script,
    knock: Script,
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
            remove: Script::new(REMOVE),
            knock: Script::new(KNOCK),
        })
    }

    fn connection(&self) -> ConnectionManager {
        self.connection.get()
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
    async fn owner(
        &self,
        session: SessionHash,
        asker: Incarnation,
    ) -> Result<Found, DirectoryError> {
        let look = look_for_owner(session, asker);
        let answer = look.query_async(&mut self.connection()).await?;
        let (owner, asker_is_alive, info) = answer;
        read_found(session, owner, asker_is_alive, info)
    }

    async fn knock(&self, session: SessionHash, time: Duration) -> Result<(), DirectoryError> {
        let mut knock = self.knock.key(door_key(session));
        knock.arg(millis(time));
        let () = knock.invoke_async(&mut self.connection()).await?;
        Ok(())
    }

    async fn standing(
        &self,
        session: SessionHash,
        asker: Incarnation,
    ) -> Result<Standing, DirectoryError> {
        let mut look = look_for_owner(session, asker);
        look.cmd("PTTL").arg(door_key(session));
        let answer = look.query_async(&mut self.connection()).await?;
        let (owner, asker_is_alive, info, left): (_, _, _, i64) = answer;
        // Negative: there is no such key, or one that no instance wrote.
        let left = u64::try_from(left).ok().map(Duration::from_millis);
        Ok(Standing {
            found: read_found(session, owner, asker_is_alive, info)?,
            at_the_door: left.map(|left| left.min(TURNED_AWAY)),
        })
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        let mut load = cmd("HMGET");
        load.arg(session_key(session)).arg("o").arg("p");
        let answer = load.query_async(&mut self.connection()).await?;
        let (owner, params): (Option<Vec<u8>>, Option<Vec<u8>>) = answer;
        let Some(owner) = owner else {
            return Ok(None);
        };
        Ok(Some(Entry {
            owner: read_ownership(session, &owner)?.owner,
            params: params.unwrap_or_default().into(),
        }))
    }

    async fn enter(
        &self,
        owner: Owner,
        sessions: &[(SessionHash, Arc<[u8]>)],
    ) -> Result<Vec<(SessionHash, Owner)>, DirectoryError> {
        let me = owner.to_string();
        let mut write = pipe();
        // An engine that was started again does not know it any more.
        write.load_script(&self.enter).ignore();
        for (session, params) in sessions {
            let mut enter = self.enter.key(session_key(*session));
            let ownership = Ownership::begin(owner).to_string();
            enter.arg(ownership).arg(&**params).arg(millis(KEPT));
            write.invoke_script(enter.arg(&me));
        }
        let owners: Vec<Vec<u8>> = write.query_async(&mut self.connection()).await?;
        if owners.len() != sessions.len() {
            return Err(DirectoryError::unreadable(
                "another number of answers than of questions",
            ));
        }
        let mut others = Vec::new();
        for ((session, _), text) in sessions.iter().zip(owners) {
            match read_ownership(*session, &text) {
                Ok(is) if is.owner != owner => others.push((*session, is.owner)),
                Ok(_) => {}
                // It is not for one such entry that the others wait.
                Err(error) => self.unreadable.warn(&format_args!("{error}")),
            }
        }
        Ok(others)
    }

    async fn claim(
        &self,
        session: SessionHash,
        former: Ownership,
        owner: Owner,
    ) -> Result<Claim, DirectoryError> {
        let wanted = Ownership::begin(owner);
        let mut claim = self.claim.key(session_key(session));
        claim
            .arg(former.to_string())
            .arg(wanted.to_string())
            .arg(millis(KEPT));
        let is: Option<Vec<u8>> = claim.invoke_async(&mut self.connection()).await?;
        let is = is.map(|is| read_ownership(session, &is)).transpose()?;
        Ok(match is {
            None => Claim::Unknown,
            Some(is) if is == wanted => Claim::Won,
            Some(is) => Claim::Lost(is),
        })
    }

    async fn remove(&self, session: SessionHash, owner: Owner) -> Result<(), DirectoryError> {
        let mut remove = self.remove.key(session_key(session));
        remove.arg(owner.to_string());
        let () = remove.invoke_async(&mut self.connection()).await?;
        Ok(())
    }

    async fn beat(&self, owner: Owner) -> Result<Beat, DirectoryError> {
        let mut beat = pipe();
        beat.cmd("SET")
            .arg(lease_key(owner.incarnation))
            .arg(owner.address.to_string());
        beat.arg("PX").arg(millis(LEASE)).arg("XX");
        beat.cmd("INFO").arg("server");
        let answer = beat.query_async(&mut self.connection()).await;
        let answer = answer.inspect_err(|error| self.reconnect_if_refused(error))?;
        let (set, info): (Option<String>, String) = answer;
        Ok(Beat {
            run: read_run(&info)?,
            was_alive: set.is_some(),
        })
    }

    async fn lease(&self, owner: Owner) -> Result<(), DirectoryError> {
        let mut lease = cmd("SET");
        lease
            .arg(lease_key(owner.incarnation))
            .arg(owner.address.to_string());
        lease.arg("PX").arg(millis(LEASE));
        Ok(lease.exec_async(&mut self.connection()).await?)
    }

    async fn is_alive(
        &self,
        incarnation: Incarnation,
        asker: Incarnation,
    ) -> Result<Alive, DirectoryError> {
        let mut look = pipe();
        look.cmd("EXISTS").arg(lease_key(incarnation));
        look.cmd("EXISTS").arg(lease_key(asker));
        look.cmd("INFO").arg("server");
        let answer = look.query_async(&mut self.connection()).await?;
        let (is_alive, asker_is_alive, info): (bool, bool, String) = answer;
        let run = read_run(&info)?;
        Ok(if is_alive {
            Alive::Yes
        } else {
            Alive::No(Absence {
                run,
                asker_is_alive,
            })
        })
    }

    async fn leave(&self, owner: Owner) -> Result<(), DirectoryError> {
        let mut leave = cmd("DEL");
        leave.arg(lease_key(owner.incarnation));
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

fn lease_key(incarnation: Incarnation) -> String {
    format!("mcp:i:{incarnation}")
}

fn door_key(session: SessionHash) -> String {
    format!("mcp:d:{session}")
}

fn answer_key(session: SessionHash, incarnation: Incarnation, call: CallNumber) -> String {
    format!("mcp:a:{session}:{incarnation}:{call}")
}

/// The engine's unit of time.
fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The question who owns a session.
fn look_for_owner(session: SessionHash, asker: Incarnation) -> Pipeline {
    let mut look = pipe();
    look.cmd("HGET").arg(session_key(session)).arg("o");
    look.cmd("EXISTS").arg(lease_key(asker));
    look.cmd("INFO").arg("server");
    look
}

fn read_found(
    session: SessionHash,
    owner: Option<Vec<u8>>,
    asker_is_alive: bool,
    info: String,
) -> Result<Found, DirectoryError> {
    Ok(match owner {
        Some(owner) => Found::Owner(read_ownership(session, &owner)?),
        None => Found::Nobody(Absence {
            run: read_run(&info)?,
            asker_is_alive,
        }),
    })
}

fn read_ownership(session: SessionHash, text: &[u8]) -> Result<Ownership, DirectoryError> {
    let ownership = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    ownership.ok_or_else(|| unreadable(&format_args!("{} names no owner", session_key(session))))
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
