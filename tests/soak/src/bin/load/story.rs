//! The stories of a call.

use std::{mem, sync::Arc, time::Duration};

use fastrand::Rng;
use futures_util::future::join;
use serde_json::json;
use soak::{
    clock::{MILLI, SECOND},
    fact::{Fact, Leave},
    job::{Job, Manner},
    setup::{GRACE, Setup},
};
use tokio::time::sleep;

use crate::{
    call::{Calling, Seen},
    connection::Request,
    dice::{Only, millis, weighted},
    session::Session,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Story {
    Stays,
    LeavesForGood,
    ComesBack,
    ComesBackLate,
    ComesBackTwice,
    ComesBackWhileThere,
    /// Resumes on two connections at once, one of which stays.
    ComesBackDoubly,
    /// Resumes on a second connection, and closes that one again.
    LooksAgain,
    TriesWrongIds,
    Polls,
    /// The server ends its stream while the client is disconnected.
    IsPolledWhileAway,
    Cancels,
    DoesNotRead,
    SendsSlowly,
    ReusesItsId,
    SendsGarbage,
}

use Story::*;

const IN_SESSIONS: &[(u32, Story)] = &[
    (24, Stays),
    (16, LeavesForGood),
    (18, ComesBack),
    (7, ComesBackLate),
    (5, ComesBackTwice),
    (5, ComesBackWhileThere),
    (6, ComesBackDoubly),
    (5, LooksAgain),
    (5, TriesWrongIds),
    (6, Polls),
    (4, IsPolledWhileAway),
    (4, Cancels),
    (2, DoesNotRead),
    (3, SendsSlowly),
    (1, ReusesItsId),
    (3, SendsGarbage),
];

const WITHOUT: &[(u32, Story)] = &[
    (40, Stays),
    (45, LeavesForGood),
    (8, SendsSlowly),
    (7, SendsGarbage),
];

/// Longer than the work of any handler, and than any grace.
const LONG: Duration = Duration::from_secs(9);
/// A client that resumes within this time, in milliseconds, is in time on any machine.
const IN_TIME: u64 = GRACE / MILLI - 800;
/// A client that resumes after this time is too late.
const LATE: u64 = (GRACE + SECOND) / MILLI + 1_200;

// === impl Story ===

impl Story {
    pub(crate) fn any(dice: &mut Rng, setup: &Setup, only: &Only) -> Self {
        let stories = if setup.sessions { IN_SESSIONS } else { WITHOUT };
        weighted(dice, &only.among(stories, |story| format!("{story:?}")))
    }

    /// How long its handler works.
    fn work(self, dice: &mut Rng, setup: &Setup) -> Duration {
        match self {
            Stays | SendsSlowly => millis(dice, 0..2_500),
            LeavesForGood if !setup.sessions => millis(dice, 2_500..4_500),
            // Some are answered while their client could still resume.
            LeavesForGood if dice.u8(..3) == 0 => millis(dice, 100..2_000),
            LeavesForGood => millis(dice, 5_500..7_000),
            ComesBackLate if dice.u8(..4) > 0 => millis(dice, 5_500..7_000),
            Cancels => millis(dice, 2_000..4_000),
            TriesWrongIds | DoesNotRead => millis(dice, 5_000..6_500),
            ComesBackLate => millis(dice, 600..1_800),
            // Many are answered while their client is disconnected.
            IsPolledWhileAway => millis(dice, 300..2_000),
            // One connection stays longer than the grace, and receives the answer.
            ComesBackDoubly | LooksAgain => millis(dice, 3_500..5_500),
            _ => millis(dice, 500..4_500),
        }
    }

    /// Plays the story from the first byte to the last.
    pub(crate) async fn play(self, session: &Arc<Session>, name: String, mut dice: Rng) {
        let dice = &mut dice;
        if self == SendsGarbage {
            return send_garbage(session, dice).await;
        }
        let job = Job {
            name,
            work: self.work(dice, session.setup),
            steps: if self == DoesNotRead {
                60
            } else {
                dice.u32(..4)
            },
            manner: match self {
                DoesNotRead => Manner::Floods,
                _ if session.setup.abort.is_some() && dice.bool() => Manner::Deaf,
                _ => Manner::Heeds,
            },
        };
        let large = self == Stays && dice.u8(..20) == 0;
        let bytes = if large {
            300_000
        } else {
            dice.usize(100..4_000)
        };
        let mut call = Calling::new(session, &job, bytes);
        let _gave_up = self.tell(&mut call, &job, dice).await;
        call.leave(Leave::Fin).await;
    }

    /// Returns `None` if the story could not continue.
    async fn tell(self, call: &mut Calling, job: &Job, dice: &mut Rng) -> Option<()> {
        let session = call.session.clone();
        let connection = match self {
            DoesNotRead => session.connect_small().await,
            _ => session.connect().await,
        };
        let mut connection = connection.ok()?;
        if self == SendsSlowly {
            call.asks(&connection);
            let bytes = call.request().bytes();
            let cut = dice.usize(1..bytes.len());
            connection.write(&bytes[..cut]).await.ok()?;
            sleep(millis(dice, 20..700)).await;
            if dice.u8(..4) == 0 {
                connection.leave(how(dice, &session)).await;
                return None;
            }
            connection.write(&bytes[cut..]).await.ok()?;
            call.sent(connection);
        } else {
            call.ask(connection).await?;
        }
        let while_it_works = |dice: &mut Rng| millis(dice, 0..job.work.as_millis() as u64 + 1);
        match self {
            Stays | SendsSlowly => call.stay(LONG).await,
            LeavesForGood => {
                if call
                    .read(while_it_works(dice).min(Duration::from_millis(1_500)))
                    .await
                    == Seen::Time
                {
                    call.leave(how(dice, &session)).await;
                }
            }
            ComesBack => {
                for _ in 0..dice.u8(1..4) {
                    if call.read(while_it_works(dice)).await != Seen::Time {
                        break;
                    }
                    call.leave(how(dice, &session)).await;
                    sleep(millis(dice, 0..IN_TIME)).await;
                    call.resume().await?;
                }
                call.stay(LONG).await;
            }
            ComesBackLate => {
                call.read(millis(dice, 100..600)).await;
                call.leave(how(dice, &session)).await;
                sleep(millis(dice, LATE..LATE + 1_000)).await;
                call.resume().await?;
                call.read(Duration::from_secs(4)).await;
            }
            ComesBackTwice => {
                call.read(millis(dice, 100..500)).await;
                call.leave(how(dice, &session)).await;
                sleep(millis(dice, 0..IN_TIME)).await;
                call.resume().await?;
                call.head(LONG).await;
                let first = call.connection.take();
                call.resume().await?;
                call.head(LONG).await;
                if let Some(first) = first {
                    first.leave(how(dice, &session)).await;
                }
                call.stay(LONG).await;
            }
            ComesBackWhileThere => {
                call.read(millis(dice, 100..500)).await;
                let first = call.connection.take();
                call.resume().await?;
                call.head(LONG).await;
                sleep(millis(dice, 0..200)).await;
                if let Some(first) = first {
                    first.leave(how(dice, &session)).await;
                }
                call.stay(LONG).await;
            }
            ComesBackDoubly => {
                call.read(millis(dice, 100..500)).await;
                call.leave(how(dice, &session)).await;
                sleep(millis(dice, 0..IN_TIME)).await;
                let mut other = call.again();
                let (one, two) = join(call.resume(), other.resume()).await;
                one.and(two)?;
                let together = millis(dice, 50..1_500);
                let seen = join(call.read(together), other.read(together)).await;
                if seen.0 == Seen::Answer || seen.1 == Seen::Answer {
                    return None;
                }
                if dice.bool() {
                    mem::swap(call, &mut other);
                }
                other.leave(how(dice, &session)).await;
                call.stay(LONG).await;
            }
            LooksAgain => {
                call.head(LONG).await;
                call.read(millis(dice, 50..500)).await;
                let mut other = call.again();
                other.resume().await?;
                let together = millis(dice, 50..1_000);
                let seen = join(call.read(together), other.read(together)).await;
                if seen.0 == Seen::Answer || seen.1 == Seen::Answer {
                    return None;
                }
                other.leave(how(dice, &session)).await;
                call.stay(LONG).await;
            }
            TriesWrongIds => {
                call.read(millis(dice, 100..1_000)).await;
                call.leave(how(dice, &session)).await;
                sleep(millis(dice, 0..400)).await;
                try_wrong_ids(call).await;
                if dice.bool() {
                    call.resume().await?;
                    call.stay(LONG).await;
                }
            }
            Polls => {
                for _ in 0..dice.u8(1..4) {
                    if call.read(millis(dice, 50..1_000)).await != Seen::Time {
                        break;
                    }
                    call.poll().await?;
                    // Without a resume, the story is the same as `LeavesForGood`.
                    if call.read(LONG).await != Seen::End || dice.u8(..5) == 0 {
                        return None;
                    }
                    sleep(millis(dice, 0..IN_TIME)).await;
                    call.resume().await?;
                }
                call.stay(LONG).await;
            }
            IsPolledWhileAway => {
                if call.read(millis(dice, 50..500)).await == Seen::Time {
                    call.leave(how(dice, &session)).await;
                    let away = millis(dice, 0..IN_TIME);
                    let before = millis(dice, 0..away.as_millis() as u64 + 1);
                    sleep(before).await;
                    call.poll().await?;
                    sleep(away - before).await;
                    call.resume().await?;
                    call.stay(LONG).await;
                }
            }
            Cancels => {
                if call.read(millis(dice, 0..1_000)).await == Seen::Time {
                    call.cancel().await;
                    call.read(Duration::from_secs(1)).await;
                }
            }
            DoesNotRead => {
                call.head(LONG).await;
                let stream = call.connection.as_ref()?.number;
                session.world.log.write(Fact::Stops { stream });
                sleep(millis(dice, 1_000..3_500)).await;
                call.leave(how(dice, &session)).await;
            }
            ReusesItsId => {
                call.head(LONG).await;
                let mut twin = Calling::new(
                    &session,
                    &Job {
                        name: format!("{}t", job.name),
                        ..job.clone()
                    },
                    100,
                );
                twin.id = call.id;
                let (call_key, by) = (call.key.clone(), twin.key.clone());
                session.world.log.write(Fact::Reused { call: call_key, by });
                twin.ask(session.connect().await.ok()?).await?;
                twin.read(millis(dice, 100..2_000)).await;
                twin.leave(how(dice, &session)).await;
            }
            SendsGarbage => {}
        }
        Some(())
    }
}

/// How it disconnects. Pipelining is chosen on watched connections only, because hyper does not notice it elsewhere.
fn how(dice: &mut Rng, session: &Session) -> Leave {
    let pipelined = if session.is_watched() { 2 } else { 0 };
    weighted(
        dice,
        &[
            (4, Leave::Fin),
            (4, Leave::Reset),
            (1, Leave::Half),
            (pipelined, Leave::Pipelined),
        ],
    )
}

/// Tries unknown ids, and its own ids in another session. None of them may affect the call.
async fn try_wrong_ids(call: &Calling) {
    let session = &call.session;
    for id in ["77/7777", "garbage", "0/", "-1/-1"] {
        let request = Request::get(&session.path(), session.id.as_deref(), Some(id));
        session.probe("a wrong event id", &request).await;
    }
    let Some(id) = &call.last_event_id else {
        return;
    };
    let Some(other) = Session::open(&session.world, session.setup, &session.client, false).await
    else {
        return;
    };
    let request = Request::get(&session.path(), other.id.as_deref(), Some(id));
    session
        .probe("an event id of another session", &request)
        .await;
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": call.id}});
    let request = Request::post(&session.path(), other.id.as_deref(), &cancel);
    session
        .probe("a cancel from another session", &request)
        .await;
    other.delete().await;
}

async fn send_garbage(session: &Session, dice: &mut Rng) {
    // A new id, because the id of a concurrent call would be a reused id, which is another story.
    let id = session.next_id();
    let call = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": {"name": "work", "arguments": {}}});
    let (what, body) = weighted(
        dice,
        &[
            (
                1,
                ("half a message", b"{\"jsonrpc\":".to_vec().leak() as &[u8]),
            ),
            (1, ("no JSON", b"\xff\xfe\x00")),
            (1, ("an empty batch", b"[]")),
            (1, ("nothing", b"")),
            (1, ("no method", b"{\"jsonrpc\":\"2.0\",\"id\":1}")),
        ],
    );
    let id = session.id.as_deref();
    session
        .probe(what, &Request::raw(&session.path(), id, body.to_vec()))
        .await;
    session
        .probe(
            "a batch",
            &Request::post(&session.path(), id, &json!([call, call])),
        )
        .await;
    let mut doubled = Request::post(&session.path(), id, &call);
    doubled.head += "mcp-session-id: other\r\n";
    session.probe("two sessions", &doubled).await;
    let mut missing = call.clone();
    missing["params"]["name"] = json!("no such tool");
    session
        .probe(
            "no such tool",
            &Request::post(&session.path(), id, &missing),
        )
        .await;
}
