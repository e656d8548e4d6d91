//! The slot in which a stream keeps the inner body, so that not only its reader can let go of it.
//!
//! hyper polls a body only while the client takes it. A client that does not read would keep the inner body without
//! end, and with it what fills it: rmcp's session worker waits for a channel of 16 messages. So the body is not in the
//! [`EventStream`](super::stream::EventStream) itself. It is taken out for every poll and put back after it, and whatever closes
//! the slot drops it. No lock is held while it is polled or dropped.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::{
        Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::Instant;

use super::{Polled, commit::Committed, late::Late};
use crate::{
    call::DetachCause,
    exchange::Guard,
    lock::lock,
    registry::Outlet,
    timer::{LatenessTracker, OnDeadline, Rearm, Timeliness, TimerHandle},
};

pub(super) struct Slot<B> {
    state: Mutex<State<B>>,
    /// In a box, because few layers have a limit.
    stall: Option<Box<Stall>>,
}

struct State<B> {
    held: Option<Pin<Box<Held<B>>>>,
    /// Under the same lock, because one costs less than two.
    reader: Option<Waker>,
    /// In a box, because others hardly ever say something.
    said: Option<Box<Said>>,
}

/// What others than the reader and the inner body said.
#[derive(Default)]
struct Said {
    messages: VecDeque<Bytes>,
    closing: Option<Closing>,
}

pin_project! {
    /// The inner body, and who is told when it goes.
    pub(super) struct Held<B> {
        // First, so that the token fires before the inner body's destructors run.
        guard: Guard,
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProj]
    pub(super) enum Inner<B> {
        Body { #[pin] body: B },
        Committed { committed: Box<Committed<B>> },
        Late { late: Box<Late<B>> },
    }
}

/// Why others let go of the inner body.
#[derive(Debug, Clone, Copy)]
enum Closing {
    /// Its client was told how its call ended.
    Told,
    /// Its client does not take it, or is gone.
    Gone(DetachCause),
}

/// What the reader does next.
pub(super) enum Next<B> {
    /// Sends a message.
    Message(Bytes),
    /// Polls the inner body, and puts it back.
    Inner(Pin<Box<Held<B>>>),
    /// Ends.
    Over,
}

/// How long the client has not read.
struct Stall {
    limit: Duration,
    since: Instant,
    /// When the reader was last given something that it has not come back from, in ms after `since`, plus 1.
    given_at: AtomicU64,
    ticket: OnceLock<TimerHandle>,
}

// === impl Slot ===

impl<B> Slot<B> {
    pub(super) fn new(guard: Guard, inner: Inner<B>, stall_timeout: Option<Duration>) -> Self {
        Self {
            state: Mutex::new(State {
                held: Some(Box::pin(Held { guard, inner })),
                reader: None,
                said: None,
            }),
            stall: stall_timeout.map(|limit| {
                Box::new(Stall {
                    limit,
                    since: Instant::now(),
                    given_at: AtomicU64::new(0),
                    ticket: OnceLock::new(),
                })
            }),
        }
    }

    /// Keeps the ticket by which it is watched for a reader that stays away.
    pub(super) fn keep_ticket(&self, ticket: TimerHandle) {
        if let Some(stall) = &self.stall {
            // A slot is watched once.
            let _first = stall.ticket.set(ticket);
        }
    }

    /// Whether the time is limited in which the client must read.
    pub(super) fn is_timed(&self) -> bool {
        self.stall.is_some()
    }

    /// Whether the inner body was dropped because its client was told how its call ended.
    pub(super) fn was_told(&self) -> bool {
        matches!(self.state().closing(), Some(Closing::Told))
    }

    /// The next message for its client, also in the middle of an event, once the inner body was dropped for that.
    pub(super) fn last_message(&self) -> Option<Bytes> {
        let mut state = self.state();
        let was_told = matches!(state.closing(), Some(Closing::Told));
        let said = state.said.as_mut().filter(|_| was_told)?;
        said.messages.pop_front()
    }

    /// Notes that the reader is here.
    pub(super) fn came(&self) {
        if let Some(stall) = &self.stall {
            stall.given_at.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that the reader goes with a frame. If it does not come back, the client does not read.
    pub(super) fn gave(&self) {
        if let Some(stall) = &self.stall {
            let elapsed = u64::try_from(stall.since.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
            stall.given_at.store(elapsed + 1, Ordering::Relaxed);
        }
    }

    /// What the reader does next. It is woken by this waker from now on, and gets a message only at a boundary.
    pub(super) fn next(&self, at_boundary: bool, waker: &Waker) -> Next<B> {
        let (next, former) = {
            let mut state = self.state();
            let former = state.wake_by(waker);
            (state.next(at_boundary), former)
        };
        // It may be the last of its task, so it is dropped without the lock.
        drop(former);
        next
    }

    /// Takes the inner body back after a poll. `false` if the slot was closed meanwhile.
    pub(super) fn put_back(&self, held: Pin<Box<Held<B>>>) -> bool {
        let mut state = self.state();
        let Some(closing) = state.closing() else {
            state.held = Some(held);
            return true;
        };
        drop(state);
        end(held, closing);
        false
    }

    /// Lets go of the inner body as its client does, by a drop.
    pub(super) fn drop_inner(&self) {
        let held = self.state().held.take();
        drop(held);
    }

    /// Lets go of the inner body, because the client has left or does not read.
    pub(super) fn abandon(&self, cause: DetachCause) {
        self.shut(Closing::Gone(cause));
    }

    #[cold]
    fn shut(&self, closing: Closing) {
        let (held, reader) = {
            let mut state = self.state();
            state.said().closing.get_or_insert(closing);
            (state.held.take(), state.reader.take())
        };
        if let Some(held) = held {
            end(held, closing);
        }
        wake(reader);
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        lock(&self.state)
    }
}

// === impl State ===

impl<B> State<B> {
    fn next(&mut self, at_boundary: bool) -> Next<B> {
        if at_boundary
            && let Some(said) = &mut self.said
            && let Some(message) = said.messages.pop_front()
        {
            return Next::Message(message);
        }
        self.held.take().map_or(Next::Over, Next::Inner)
    }

    /// Gives the former waker back.
    fn wake_by(&mut self, waker: &Waker) -> Option<Waker> {
        match &self.reader {
            Some(reader) if reader.will_wake(waker) => None,
            _ => self.reader.replace(waker.clone()),
        }
    }

    fn said(&mut self) -> &mut Said {
        self.said.get_or_insert_default()
    }

    fn closing(&self) -> Option<Closing> {
        self.said.as_ref()?.closing
    }
}

fn wake(reader: Option<Waker>) {
    if let Some(reader) = reader {
        reader.wake();
    }
}

#[cold]
fn end<B>(mut held: Pin<Box<Held<B>>>, closing: Closing) {
    let guard = held.as_mut().guard();
    match closing {
        Closing::Told => guard.complete(),
        Closing::Gone(cause) => guard.abandon(cause),
    }
}

impl<B: Send> Outlet for Slot<B> {
    fn tell(&self, message: Bytes) {
        let reader = {
            let mut state = self.state();
            state.said().messages.push_back(message);
            state.reader.take()
        };
        wake(reader);
    }

    fn close(&self) {
        self.shut(Closing::Told);
    }
}

impl<B: Send> OnDeadline for Slot<B> {
    fn on_deadline(&self, watch: &LatenessTracker, noticed: Timeliness) -> Option<Rearm> {
        let now = watch.now();
        let stall = self.stall.as_ref()?;
        if self.state().closing().is_some() {
            return None;
        }
        let again = now.checked_add(stall.limit);
        let deadline = match stall.given_at.load(Ordering::Relaxed).checked_sub(1) {
            None => again?,
            Some(elapsed) => {
                let given_at = stall.since.checked_add(Duration::from_millis(elapsed))?;
                given_at.checked_add(stall.limit)?
            }
        };
        if deadline > now {
            return Some(Rearm::At(deadline));
        }
        match noticed {
            // The runtime stood still, and with it the reader.
            Timeliness::Late => again.map(Rearm::At),
            Timeliness::Delayed => Some(Rearm::Soon),
            Timeliness::OnTime => {
                self.abandon(DetachCause::Stalled);
                None
            }
        }
    }
}

// === impl Held ===

impl<B> Held<B> {
    pub(super) fn guard(self: Pin<&mut Self>) -> &mut Guard {
        self.project().guard
    }
}

impl<B> Held<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    pub(super) fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled<B> {
        let this = self.project();
        match this.inner.project() {
            InnerProj::Body { body } => {
                let _polling = this.guard.polling();
                body.poll_frame(cx)
            }
            InnerProj::Committed { committed } => committed.poll_frame(this.guard, cx),
            InnerProj::Late { late } => {
                let _polling = this.guard.polling();
                late.poll_frame(cx)
            }
        }
    }

    /// Whether nothing comes any more, as far as the body says.
    pub(super) fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Body { body } => body.is_end_stream(),
            Inner::Committed { .. } | Inner::Late { .. } => false,
        }
    }
}
