//! The stories that a call can play out.

use std::{mem, sync::Arc, time::Duration};

use fastrand::Rng;
use futures_util::future::join;
use serde_json::json;
use soak::{
    clock::{MILLI, SECOND},
    fact::{CloseKind, Fact},
    job::{Job, Reaction},
    setup::{GRACE, Setup},
};
use tokio::time::sleep;

use crate::{
    call::{ClientCall, ReadEnd},
    connection::Request,
    dice::{Only, millis, weighted},
    session::Session,
};

/// What a client does during its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Story {
    StaysConnected,
    NeverResumes,
    Resumes,
    ResumesLate,
    ResumesTwice,
    ResumesWhileConnected,
    /// Resumes on two connections at once, and stays on one of them.
    ResumesOnTwoConnections,
    /// Resumes on a second connection, then closes that one again.
    ResumesBriefly,
    TriesWrongIds,
    Polls,
    /// The server ends its stream while the client is disconnected.
    StreamEndedWhileDisconnected,
    Cancels,
    DoesNotRead,
    SendsSlowly,
    ReusesItsId,
    SendsGarbage,
}

use Story::*;

const IN_SESSIONS: &[(u32, Story)] = &[
    (24, StaysConnected),
    (16, NeverResumes),
    (18, Resumes),
    (7, ResumesLate),
    (5, ResumesTwice),
    (5, ResumesWhileConnected),
    (6, ResumesOnTwoConnections),
    (5, ResumesBriefly),
    (5, TriesWrongIds),
    (6, Polls),
    (4, StreamEndedWhileDisconnected),
    (4, Cancels),
    (2, DoesNotRead),
    (3, SendsSlowly),
    (1, ReusesItsId),
    (3, SendsGarbage),
];

const WITHOUT_SESSIONS: &[(u32, Story)] = &[
    (40, StaysConnected),
    (45, NeverResumes),
    (8, SendsSlowly),
    (7, SendsGarbage),
];

/// Longer than any handler works, and longer than any grace period.
const LONG: Duration = Duration::from_secs(9);
/// A client that resumes within this many milliseconds is in time on any machine.
const IN_TIME: u64 = GRACE / MILLI - 800;
/// A client that resumes later than this is too late.
const LATE: u64 = (GRACE + SECOND) / MILLI + 1_200;

// === impl Story ===

impl Story {
    /// Returns a random story that this set-up allows.
    pub(crate) fn any(dice: &mut Rng, setup: &Setup, only: &Only) -> Self {
        let stories = if setup.has_sessions {
            IN_SESSIONS
        } else {
            WITHOUT_SESSIONS
        };
        weighted(dice, &only.among(stories, |story| format!("{story:?}")))
    }

    /// Returns how long the story's handler works.
    fn work(self, dice: &mut Rng, setup: &Setup) -> Duration {
        match self {
            StaysConnected | SendsSlowly => millis(dice, 0..2_500),
            NeverResumes if !setup.has_sessions => millis(dice, 2_500..4_500),
            // Some are answered while their client could still resume.
            NeverResumes if dice.u8(..3) == 0 => millis(dice, 100..2_000),
            NeverResumes => millis(dice, 5_500..7_000),
            ResumesLate if dice.u8(..4) > 0 => millis(dice, 5_500..7_000),
            Cancels => millis(dice, 2_000..4_000),
            TriesWrongIds | DoesNotRead => millis(dice, 5_000..6_500),
            ResumesLate => millis(dice, 600..1_800),
            // Many are answered while their client is disconnected.
            StreamEndedWhileDisconnected => millis(dice, 300..2_000),
            // One connection outlasts the grace period, and receives the answer.
            ResumesOnTwoConnections | ResumesBriefly => millis(dice, 3_500..5_500),
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
            reaction: match self {
                DoesNotRead => Reaction::Floods,
                _ if session.setup.abort.is_some() && dice.bool() => Reaction::IgnoresToken,
                _ => Reaction::EndsOnToken,
            },
        };
        let large = self == StaysConnected && dice.u8(..20) == 0;
        let bytes = if large {
            300_000
        } else {
            dice.usize(100..4_000)
        };
        let mut call = ClientCall::new(session, &job, bytes);
        let _gave_up = self.run_steps(&mut call, &job, dice).await;
        call.close(CloseKind::Fin).await;
    }

    /// Returns `None` if the story could not continue.
    async fn run_steps(self, call: &mut ClientCall, job: &Job, dice: &mut Rng) -> Option<()> {
        let session = call.session.clone();
        let connection = match self {
            DoesNotRead => session.connect_small().await,
            _ => session.connect().await,
        };
        let mut connection = connection.ok()?;
        if self == SendsSlowly {
            call.record_request(&connection);
            let bytes = call.request().bytes();
            let cut = dice.usize(1..bytes.len());
            connection.write(&bytes[..cut]).await.ok()?;
            sleep(millis(dice, 20..700)).await;
            if dice.u8(..4) == 0 {
                connection.close(close_kind(dice, &session)).await;
                return None;
            }
            connection.write(&bytes[cut..]).await.ok()?;
            call.on_sent(connection);
        } else {
            call.ask(connection).await?;
        }
        let while_it_works = |dice: &mut Rng| millis(dice, 0..job.work.as_millis() as u64 + 1);
        match self {
            StaysConnected | SendsSlowly => call.stay(LONG).await,
            NeverResumes => {
                if call
                    .read(while_it_works(dice).min(Duration::from_millis(1_500)))
                    .await
                    == ReadEnd::Time
                {
                    call.close(close_kind(dice, &session)).await;
                }
            }
            Resumes => {
                for _ in 0..dice.u8(1..4) {
                    if call.read(while_it_works(dice)).await != ReadEnd::Time {
                        break;
                    }
                    call.close(close_kind(dice, &session)).await;
                    sleep(millis(dice, 0..IN_TIME)).await;
                    call.resume().await?;
                }
                call.stay(LONG).await;
            }
            ResumesLate => {
                call.read(millis(dice, 100..600)).await;
                call.close(close_kind(dice, &session)).await;
                sleep(millis(dice, LATE..LATE + 1_000)).await;
                call.resume().await?;
                call.read(Duration::from_secs(4)).await;
            }
            ResumesTwice => {
                call.read(millis(dice, 100..500)).await;
                call.close(close_kind(dice, &session)).await;
                sleep(millis(dice, 0..IN_TIME)).await;
                call.resume().await?;
                call.head(LONG).await;
                let first = call.connection.take();
                call.resume().await?;
                call.head(LONG).await;
                if let Some(first) = first {
                    first.close(close_kind(dice, &session)).await;
                }
                call.stay(LONG).await;
            }
            ResumesWhileConnected => {
                call.read(millis(dice, 100..500)).await;
                let first = call.connection.take();
                call.resume().await?;
                call.head(LONG).await;
                sleep(millis(dice, 0..200)).await;
                if let Some(first) = first {
                    first.close(close_kind(dice, &session)).await;
                }
                call.stay(LONG).await;
            }
            ResumesOnTwoConnections => {
                call.read(millis(dice, 100..500)).await;
                call.close(close_kind(dice, &session)).await;
                sleep(millis(dice, 0..IN_TIME)).await;
                let mut other = call.second();
                let (one, two) = join(call.resume(), other.resume()).await;
                one.and(two)?;
                let together = millis(dice, 50..1_500);
                let ends = join(call.read(together), other.read(together)).await;
                if ends.0 == ReadEnd::Answer || ends.1 == ReadEnd::Answer {
                    return None;
                }
                if dice.bool() {
                    mem::swap(call, &mut other);
                }
                other.close(close_kind(dice, &session)).await;
                call.stay(LONG).await;
            }
            ResumesBriefly => {
                call.head(LONG).await;
                call.read(millis(dice, 50..500)).await;
                let mut other = call.second();
                other.resume().await?;
                let together = millis(dice, 50..1_000);
                let ends = join(call.read(together), other.read(together)).await;
                if ends.0 == ReadEnd::Answer || ends.1 == ReadEnd::Answer {
                    return None;
                }
                other.close(close_kind(dice, &session)).await;
                call.stay(LONG).await;
            }
            TriesWrongIds => {
                call.read(millis(dice, 100..1_000)).await;
                call.close(close_kind(dice, &session)).await;
                sleep(millis(dice, 0..400)).await;
                try_wrong_ids(call).await;
                if dice.bool() {
                    call.resume().await?;
                    call.stay(LONG).await;
                }
            }
            Polls => {
                for _ in 0..dice.u8(1..4) {
                    if call.read(millis(dice, 50..1_000)).await != ReadEnd::Time {
                        break;
                    }
                    call.poll().await?;
                    // Without a resume, the story is the same as `NeverResumes`.
                    if call.read(LONG).await != ReadEnd::End || dice.u8(..5) == 0 {
                        return None;
                    }
                    sleep(millis(dice, 0..IN_TIME)).await;
                    call.resume().await?;
                }
                call.stay(LONG).await;
            }
            StreamEndedWhileDisconnected => {
                if call.read(millis(dice, 50..500)).await == ReadEnd::Time {
                    call.close(close_kind(dice, &session)).await;
                    let absence = millis(dice, 0..IN_TIME);
                    let before = millis(dice, 0..absence.as_millis() as u64 + 1);
                    sleep(before).await;
                    call.poll().await?;
                    sleep(absence - before).await;
                    call.resume().await?;
                    call.stay(LONG).await;
                }
            }
            Cancels => {
                if call.read(millis(dice, 0..1_000)).await == ReadEnd::Time {
                    call.cancel().await;
                    call.read(Duration::from_secs(1)).await;
                }
            }
            DoesNotRead => {
                call.head(LONG).await;
                let stream = call.connection.as_ref()?.number;
                session.world.log.write(Fact::Stops { stream });
                sleep(millis(dice, 1_000..3_500)).await;
                call.close(close_kind(dice, &session)).await;
            }
            ReusesItsId => {
                call.head(LONG).await;
                let mut other = ClientCall::new(
                    &session,
                    &Job {
                        name: format!("{}t", job.name),
                        ..job.clone()
                    },
                    100,
                );
                other.id = call.id;
                let (call_key, by) = (call.key.clone(), other.key.clone());
                session.world.log.write(Fact::Reused { call: call_key, by });
                other.ask(session.connect().await.ok()?).await?;
                other.read(millis(dice, 100..2_000)).await;
                other.close(close_kind(dice, &session)).await;
            }
            SendsGarbage => {}
        }
        Some(())
    }
}

/// Returns a random way to disconnect.
///
/// Only watched connections get the bytes of a further request, because elsewhere hyper does not detect such a disconnect.
fn close_kind(dice: &mut Rng, session: &Session) -> CloseKind {
    let pipelined = if session.is_watched() { 2 } else { 0 };
    weighted(
        dice,
        &[
            (4, CloseKind::Fin),
            (4, CloseKind::Reset),
            (1, CloseKind::Half),
            (pipelined, CloseKind::Pipelined),
        ],
    )
}

/// Tries unknown ids, and the call's own ids in another session. None of them may affect the call.
async fn try_wrong_ids(call: &ClientCall) {
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

/// Sends requests that are invalid or that make no call.
async fn send_garbage(session: &Session, dice: &mut Rng) {
    // A new id, because reusing a concurrent call's id is a story of its own.
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
