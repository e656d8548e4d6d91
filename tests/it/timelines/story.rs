//! A story: a server's setup, and what its clients and handlers are going to do.
//!
//! It lasts several hours.

use std::time::Duration;

use mcp_cancel_on_disconnect::Grace;
use test_support::Dice;

use crate::setup::Server;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(super) struct Story {
    pub(super) server: Server,
    pub(super) grace: Grace,
    pub(super) is_exempt: bool,
    pub(super) confirm: Option<Confirm>,
    /// How long a session may be idle, if its manager is wrapped.
    pub(super) idle: Duration,
    /// The `retry` with which every stream starts.
    ///
    /// Without it, no event before the first message has an id.
    pub(super) retry: Option<Duration>,
    /// Whether all calls' events are stored.
    ///
    /// The store also ends each resumed stream.
    pub(super) is_stored: bool,
    pub(super) calls: Vec<CallStory>,
}

/// How often an orphan's cancellation is postponed, and for how long each time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Confirm {
    pub(super) times: u32,
    pub(super) wait: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct CallStory {
    pub(super) starts: Duration,
    /// How long the handler works.
    pub(super) lasts: Duration,
    /// The client's losses, in order.
    pub(super) losses: Vec<Loss>,
    /// Whether the client does not resume after the last loss.
    pub(super) stops_resuming: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Loss {
    /// How long the client stays connected before the loss.
    pub(super) stays: Duration,
    pub(super) how: How,
    /// How long the client stays disconnected.
    pub(super) away: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    HangsUp,
    /// The server ends the stream and may send a `retry` (SEP-1699).
    EndedByServer {
        retry: Option<Duration>,
    },
    /// The client disconnects and resumes on another server.
    ///
    /// That server reports the resume either before (`first`) or after the old connection is dropped.
    ResumedElsewhere {
        first: bool,
    },
}

// === impl Story ===

impl Story {
    /// Returns a story with default options and no calls.
    pub(super) fn of(server: Server, grace: Grace) -> Self {
        Self {
            server,
            grace,
            is_exempt: false,
            confirm: None,
            idle: 300 * SECOND,
            retry: Some(3 * SECOND),
            is_stored: false,
            calls: Vec::new(),
        }
    }

    /// Adds a call that works for this long and loses its client in these ways.
    pub(super) fn call(mut self, lasts: Duration, losses: &[Loss]) -> Self {
        self.calls.push(CallStory {
            starts: Duration::ZERO,
            lasts,
            losses: losses.to_vec(),
            stops_resuming: false,
        });
        self
    }

    /// Makes the last call's client give up after its last loss.
    pub(super) fn stops_resuming(mut self) -> Self {
        if let Some(call) = self.calls.last_mut() {
            call.stops_resuming = true;
        }
        self
    }

    pub(super) fn roll(dice: &mut Dice) -> Self {
        let server = pick(dice, &[Server::Wrapped, Server::Wrapped, Server::LayerOnly]);
        let is_wrapped = server == Server::Wrapped;
        let graces = [
            Grace::Auto,
            Grace::Auto,
            Grace::Immediate,
            Grace::Never,
            Grace::After(time(dice, 8 * SECOND, 7_200 * SECOND)),
            Grace::After(time(dice, 8 * SECOND, 7_200 * SECOND)),
        ];
        let grace = pick(dice, &graces);
        let confirm = Confirm {
            times: (dice.roll() % 4) as u32,
            wait: time(dice, SECOND, 3_600 * SECOND),
        };
        let is_stored = is_wrapped && dice.one_in(4);
        let retry = time(dice, SECOND, 900 * SECOND);
        let calls = 1 + dice.roll() % 3;
        let mut story = Self {
            server,
            grace,
            is_exempt: dice.one_in(8),
            confirm: dice.one_in(4).then_some(confirm),
            idle: time(dice, 10 * SECOND, 1_200 * SECOND),
            retry: Some(pick(dice, &[3 * SECOND, retry])),
            is_stored,
            calls: Vec::new(),
        };
        // An unused session must not expire before its first call.
        let latest = story.idle.mul_f64(0.8);
        story.calls = (0..calls)
            .map(|_| CallStory::roll(dice, latest, &story))
            .collect();
        story
    }

    /// Returns roughly how long a client may stay disconnected.
    fn max_absence(&self) -> Duration {
        let retry = self.retry.unwrap_or_default();
        match self.grace {
            Grace::After(grace) => grace.max(retry),
            _ => 5 * retry + 60 * SECOND,
        }
    }
}

// === impl CallStory ===

impl CallStory {
    fn roll(dice: &mut Dice, latest: Duration, story: &Story) -> Self {
        let losses = 1 + dice.roll() % 4;
        let losses: Vec<_> = (0..losses).map(|_| Loss::roll(dice, story)).collect();
        let ends_in = &losses[..=(dice.roll() % losses.len() as u64) as usize];
        let lasts = match dice.roll() % 4 {
            // The call completes while its client is disconnected.
            0 | 1 => {
                let passed: Duration = ends_in.iter().map(|loss| loss.stays + loss.away).sum();
                let away = ends_in.last().map_or(Duration::ZERO, |loss| loss.away);
                passed.saturating_sub(away.mul_f64(part(dice)))
            }
            2 => (6 * 3_600 * SECOND).mul_f64(part(dice)),
            _ => time(dice, SECOND, 4 * 3_600 * SECOND),
        };
        Self {
            starts: time(dice, SECOND / 100, latest),
            lasts,
            losses,
            stops_resuming: dice.one_in(3),
        }
    }
}

// === impl Loss ===

impl Loss {
    fn roll(dice: &mut Dice, story: &Story) -> Self {
        let retry = dice.coin().then(|| time(dice, SECOND, 900 * SECOND));
        let is_wrapped = story.server == Server::Wrapped;
        let how = match dice.roll() % 5 {
            // A store's event ids do not reveal which stream to end.
            0 | 1 if !story.is_stored => How::EndedByServer { retry },
            2 if is_wrapped => How::ResumedElsewhere { first: dice.coin() },
            _ => How::HangsUp,
        };
        // Five times the `retry` sent by the server, as in the manual.
        let sent_retry = match (how, story.grace) {
            (_, Grace::After(_)) => Duration::ZERO,
            (How::EndedByServer { retry }, _) => 5 * retry.unwrap_or_default(),
            _ => Duration::ZERO,
        };
        let away = if dice.one_in(4) {
            time(dice, SECOND / 10, 7_200 * SECOND)
        } else {
            story.max_absence().max(sent_retry).mul_f64(part(dice))
        };
        Self {
            stays: time(dice, SECOND / 10, 900 * SECOND),
            how,
            away,
        }
    }

    /// Returns the loss of a client that has been connected for a second.
    pub(super) fn after_a_second(how: How, away: Duration) -> Self {
        Self {
            stays: SECOND,
            how,
            away,
        }
    }
}

/// Returns a number between 0 and 1.
fn part(dice: &mut Dice) -> f64 {
    (dice.roll() >> 11) as f64 / (1_u64 << 53) as f64
}

/// Returns a time between two others. Short times are as likely as long ones.
fn time(dice: &mut Dice, least: Duration, most: Duration) -> Duration {
    least.mul_f64((most.as_secs_f64() / least.as_secs_f64()).powf(part(dice)))
}

fn pick<T: Copy>(dice: &mut Dice, among: &[T]) -> T {
    among[(dice.roll() % among.len() as u64) as usize]
}
