//! Thousands of calls that are cut off and resumed at random.
//!
//! A call whose client resumes is never cancelled. A call whose client does not resume ends, and no state remains.
//!
//! A failure prints its seed, which can be repeated by setting `TEST_SEED`. With the stopped clock, the same seed also
//! reproduces the deadlines. In real time with two threads, it only reproduces the clients.

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::{Grace, Outcome};
use std::time::Duration;

use crate::{
    setup::{
        EventKind, Ledger, ORPHANED, Plan, Server, Setup, StoppedClock, arguments, for_servers,
    },
    support::*,
};

/// Long enough in real time for clients that resume at once, even on a busy machine.
const GRACE: Duration = Duration::from_secs(2);

const SESSIONS: usize = 8;

/// The number of calls that each session has in flight at once.
///
/// Both ends of a socket are in this process, and a call may have three sockets, which makes at most 480 descriptors.
const IN_FLIGHT: usize = 10;

/// The number of calls in a round.
const CALLS: usize = SESSIONS * IN_FLIGHT;

for_servers!(sessions {
    two_thousand_cycles_with_a_stopped_clock,
});

async fn two_thousand_cycles_with_a_stopped_clock(server: Server) {
    run_cycles(server, Clock::Stopped(StoppedClock::stop())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_cycles_on_two_threads_with_the_wrapper() {
    run_cycles(Server::Wrapped, Clock::Real).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_cycles_on_two_threads_with_the_layer_alone() {
    run_cycles(Server::LayerOnly, Clock::Real).await;
}

enum Clock {
    Stopped(StoppedClock),
    Real,
}

/// What a client does with its call.
struct Call {
    mcp: Mcp,
    id: usize,
    label: String,
    cuts: u32,
    /// Whether it reads the head and the first event before it is cut off.
    ///
    /// Without that event it cannot resume.
    reads: bool,
    returns: bool,
    answer: Answer,
    resets: bool,
    connection: Option<Connection>,
    last_event_id: Option<String>,
}

/// When the handler returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    BeforeTheCut,
    AfterTheCut,
    WhileAway,
    InTheEnd,
    Never,
}

async fn run_cycles(server: Server, clock: Clock) {
    let mut dice = Dice::new();
    let ledger = Ledger::default();
    let setup = Plan::of(server)
        .grace(Grace::After(GRACE))
        .sessions(|mut local| {
            // A grace period is never shorter than the `retry` that the server sends.
            local.session_config.sse_retry = Some(GRACE / 2);
            local
        })
        .layer(|layer| layer.observe(ledger.observer()))
        .start()
        .await;
    let mut sessions = join_all((0..SESSIONS).map(|_| setup.mcp())).await;
    for round in 0..clock.rounds() {
        // In real time rounds are short, so a DELETE ends orphans from several rounds.
        let one_in = if clock.is_real() { 50 } else { 8 };
        let deleted: Vec<bool> = sessions.iter().map(|_| dice.one_in(one_in)).collect();
        let mut calls = start(&setup, &sessions, round, &mut dice).await;
        join_all(calls.iter_mut().map(|call| call.cut(&setup))).await;
        clock.pass(dice.roll() % 1_800).await;
        join_all(calls.iter_mut().map(|call| call.resume_if_wanted(&setup))).await;
        for (session, _) in sessions
            .iter()
            .zip(&deleted)
            .filter(|(_, is_deleted)| **is_deleted)
        {
            // A later resume in this session gets a 404.
            assert_eq!(session.delete().await, 202);
        }
        clock.pass(dice.roll() % 1_800).await;
        join_all(calls.iter_mut().map(|call| {
            let is_gone = |at: usize| deleted[at];
            let is_deleted = sessions
                .iter()
                .position(|mcp| call.is_of(mcp))
                .is_some_and(is_gone);
            call.finish(&setup, is_deleted)
        }))
        .await;
        for (session, _) in sessions
            .iter_mut()
            .zip(&deleted)
            .filter(|(_, is_deleted)| **is_deleted)
        {
            *session = setup.mcp().await;
        }
        if !clock.is_real() {
            settle(&setup, &sessions, &clock).await;
        }
    }
    settle(&setup, &sessions, &clock).await;
    assert_each_ended_once(&setup, &clock);
    assert_eq!(ledger.balance(), (0, 0));
}

async fn start(setup: &Setup, sessions: &[Mcp], round: usize, dice: &mut Dice) -> Vec<Call> {
    let mut calls = Vec::new();
    for id in round * IN_FLIGHT..(round + 1) * IN_FLIGHT {
        for (session, mcp) in sessions.iter().enumerate() {
            let label = format!("call {id} in session {session}");
            calls.push(Call::new(mcp, id, label, dice));
        }
    }
    dice.shuffle(&mut calls);
    join_all(calls.iter_mut().map(|call| call.start(setup))).await;
    calls
}

/// Waits until no handler is running.
///
/// At this point, the only ones still running are orphans and calls that a DELETE left to rmcp.
async fn settle(setup: &Setup, sessions: &[Mcp], clock: &Clock) {
    // A jump of the clock makes deadlines late, and a late deadline is postponed once.
    for _ in 0..8 {
        clock.pass(1_900).await;
        setup.assert_usable(&sessions[0]).await;
    }
    setup.witness.running_reaches(0).await;
    within("the registry to be empty", async {
        while !setup.calls.is_empty() {
            clock.pass(1_000).await;
            setup.assert_usable(&sessions[0]).await;
        }
    })
    .await;
}

fn assert_each_ended_once(setup: &Setup, clock: &Clock) {
    let events = setup.events.all();
    let count =
        |is_counted: fn(&EventKind) -> bool| events.iter().filter(|kind| is_counted(kind)).count();
    // The echoes that `assert_usable` makes are calls, too.
    let calls = CALLS * clock.rounds();
    let started = count(|kind| *kind == EventKind::Started);
    assert!(started > calls, "{started}");
    assert_eq!(count(|kind| matches!(kind, EventKind::Ended(_))), started);
    // Both outcomes have occurred. In real time, how often depends on the speed of the machine.
    let some = |of: usize| if clock.is_real() { 0 } else { calls / of };
    assert!(count(|kind| *kind == EventKind::Ended(ORPHANED)) > some(20));
    assert!(count(|kind| *kind == EventKind::Resumed) > some(5));
    assert_eq!(count(|kind| matches!(kind, EventKind::UnparsedBody(_))), 0);
    // In real time, a DELETE can overtake an orphan's cancellation.
    let failed = count(|kind| matches!(kind, EventKind::CancelFailed(_)));
    assert!(failed == 0 || clock.is_real(), "{failed} cancels failed");
}

// === impl Clock ===

impl Clock {
    fn rounds(&self) -> usize {
        match self {
            Self::Stopped(_) => 25,
            Self::Real => 13,
        }
    }

    fn is_real(&self) -> bool {
        matches!(self, Self::Real)
    }

    /// Advances the stopped clock by this many milliseconds. It does nothing in real time.
    async fn pass(&self, millis: u64) {
        match self {
            Self::Stopped(clock) => clock.advance(Duration::from_millis(millis)).await,
            Self::Real => {}
        }
    }
}

// === impl Call ===

impl Call {
    fn new(mcp: &Mcp, id: usize, label: String, dice: &mut Dice) -> Self {
        let cuts = (dice.roll() % 3) as u32;
        let reads = cuts == 0 || !dice.one_in(5);
        let returns = cuts > 0 && reads && !dice.one_in(3);
        let answer = match dice.roll() % 5 {
            _ if cuts == 0 => Answer::InTheEnd,
            0 => Answer::BeforeTheCut,
            1 => Answer::AfterTheCut,
            2 => Answer::WhileAway,
            _ if returns => Answer::InTheEnd,
            _ => Answer::Never,
        };
        Self {
            mcp: mcp.clone(),
            id,
            label,
            cuts,
            reads,
            returns,
            answer,
            resets: dice.coin(),
            connection: None,
            last_event_id: None,
        }
    }

    fn is_of(&self, mcp: &Mcp) -> bool {
        self.mcp.session_id() == mcp.session_id()
    }

    async fn start(&mut self, setup: &Setup) {
        let arguments = arguments(&self.label);
        let mut call = self.mcp.call(self.id, "hold", arguments).await;
        setup.witness.started(&self.label).await;
        if self.reads {
            call.head().await;
            self.last_event_id = call.event().await.expect("the priming event").id;
        }
        self.connection = Some(call);
    }

    /// Cuts the call off for the first time, unless it is not to be cut off at all.
    async fn cut(&mut self, setup: &Setup) {
        if self.cuts == 0 {
            return;
        }
        if self.answer == Answer::BeforeTheCut {
            setup.witness.release(&self.label);
        }
        self.hang_up();
        if self.answer == Answer::AfterTheCut {
            setup.witness.release(&self.label);
        }
    }

    /// Resumes if the client wants to, and cuts the call off again if that is planned.
    async fn resume_if_wanted(&mut self, setup: &Setup) {
        if self.answer == Answer::WhileAway {
            setup.witness.release(&self.label);
            assert!(setup.witness.ended(&self.label).await.is_completed());
        }
        if self.reads && (self.returns || self.cuts == 2) && self.cuts > 0 {
            self.resume().await;
        }
        if self.cuts == 2 && self.reads {
            self.hang_up();
        }
    }

    /// Reads the answer, unless the session has been closed (`is_deleted`).
    async fn finish(&mut self, setup: &Setup, is_deleted: bool) {
        if is_deleted {
            self.connection = None;
            return;
        }
        if self.cuts == 2 && self.returns {
            self.resume().await;
        }
        if self.answer == Answer::InTheEnd {
            setup.witness.release(&self.label);
        }
        if let Some(mut connection) = self.connection.take() {
            let answer = connection.answer().await;
            self.assert_answered(setup, answer.is_some()).await;
        }
        if self.answer != Answer::Never {
            assert!(
                setup.witness.ended(&self.label).await.is_completed(),
                "{self:?}"
            );
        }
    }

    async fn assert_answered(&self, setup: &Setup, answered: bool) {
        // Without the wrapper, an answer is lost if it arrives while no client is connected.
        let lost = self.answer != Answer::InTheEnd && setup.server != Server::Wrapped;
        assert!(answered || lost, "no answer for {self:?}");
        if answered {
            let outcome = setup.events.ended(&self.mcp, self.id).await;
            assert_eq!(outcome, Outcome::Completed, "{self:?}");
            assert!(!setup.tokens.of(&self.label).is_cancelled(), "{self:?}");
        }
    }

    async fn resume(&mut self) {
        let id = self
            .last_event_id
            .as_deref()
            .expect("the first event has been read");
        let mut resumed = self.mcp.resume(id).await;
        assert_eq!(resumed.head().await.status, 200, "{self:?}");
        self.connection = Some(resumed);
    }

    fn hang_up(&mut self) {
        if let Some(connection) = self.connection.take() {
            if self.resets {
                connection.rst()
            } else {
                connection.fin()
            }
        }
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            label,
            cuts,
            reads,
            returns,
            answer,
            resets,
            ..
        } = self;
        write!(
            f,
            "{label}: cuts {cuts}, reads {reads}, returns {returns}, answered {answer:?}, resets {resets}"
        )
    }
}
