//! Owns a stream's inner body so that the timer can drop it even if hyper does not poll.
//!
//! hyper polls a body only while the client is reading, so a client that stops reading would otherwise keep the inner body open
//! forever and block its sender (`unread_stream` in ARCHITECTURE.md, Workarounds). That is why the
//! [`EventStream`](super::stream::EventStream) does not own the inner body. Instead, it takes the body out of the slot for each
//! poll and puts it back afterwards. Closing the slot drops the body. No lock is held while the body is being polled or dropped.

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

use super::{Polled, commit::CommittedBody, late::Late};
use crate::{
    call::DetachCause,
    exchange::Guard,
    lock::lock,
    registry::StreamHandle,
    timer::{LatenessTracker, OnDeadline, Rearm, Timeliness, TimerHandle},
};

/// Owns a stream's inner body between polls.
pub(super) struct BodySlot<B> {
    state: Mutex<State<B>>,
    /// Boxed, because few layers have a stall timeout.
    stall: Option<Box<Stall>>,
}

struct State<B> {
    inner: Option<Pin<Box<InnerBody<B>>>>,
    /// Protected by the same lock, because one lock is cheaper than two.
    reader: Option<Waker>,
    /// Boxed, because messages are rarely injected.
    injected: Option<Box<Injected>>,
}

/// Injected messages and the reason the slot was closed.
#[derive(Default)]
struct Injected {
    messages: VecDeque<Bytes>,
    closing: Option<Closing>,
}

pin_project! {
    /// The inner body and the guard that reports when it is dropped.
    pub(super) struct InnerBody<B> {
        // Declared first, so that the token fires before the inner body's destructors run.
        guard: Guard,
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProj]
    pub(super) enum Inner<B> {
        Body { #[pin] body: B },
        Committed { committed: Box<CommittedBody<B>> },
        Late { late: Box<Late<B>> },
    }
}

/// Why the slot was closed.
#[derive(Debug, Clone, Copy)]
enum Closing {
    /// The client receives an error, because its call has ended.
    WithError,
    /// The client is not reading or has disconnected.
    Detached(DetachCause),
}

/// The reader's next step.
pub(super) enum Next<B> {
    /// Send a message.
    Message(Bytes),
    /// Poll the inner body and put it back.
    Inner(Pin<Box<InnerBody<B>>>),
    /// End the stream.
    Closed,
}

/// Measures how long the client has not been reading.
struct Stall {
    limit: Duration,
    created_at: Instant,
    /// When the last frame was delivered, in ms after `created_at`, plus 1.
    ///
    /// 0 while the reader is waiting for the next frame.
    delivered_at: AtomicU64,
    timer: OnceLock<TimerHandle>,
}

// === impl BodySlot ===

impl<B> BodySlot<B> {
    pub(super) fn new(guard: Guard, inner: Inner<B>, stall_timeout: Option<Duration>) -> Self {
        Self {
            state: Mutex::new(State {
                inner: Some(Box::pin(InnerBody { guard, inner })),
                reader: None,
                injected: None,
            }),
            stall: stall_timeout.map(|limit| {
                Box::new(Stall {
                    limit,
                    created_at: Instant::now(),
                    delivered_at: AtomicU64::new(0),
                    timer: OnceLock::new(),
                })
            }),
        }
    }

    /// Sets the timer that detects when the reader stops polling.
    ///
    /// This has no effect without a stall timeout.
    pub(super) fn set_timer(&self, timer: TimerHandle) {
        if let Some(stall) = &self.stall {
            // Always succeeds, because this is called only once per slot.
            let _ = stall.timer.set(timer);
        }
    }

    pub(super) fn has_stall_timeout(&self) -> bool {
        self.stall.is_some()
    }

    /// Returns `true` if the slot was closed because the call has ended.
    ///
    /// If so, the client receives an error.
    pub(super) fn was_closed_with_error(&self) -> bool {
        matches!(self.state().closing(), Some(Closing::WithError))
    }

    /// Returns the next injected message, even mid-event.
    ///
    /// Returns `None` if no message is left, or if the slot was not closed with an error.
    pub(super) fn next_remaining_message(&self) -> Option<Bytes> {
        let mut state = self.state();
        let has_error = matches!(state.closing(), Some(Closing::WithError));
        let injected = state.injected.as_mut().filter(|_| has_error)?;
        injected.messages.pop_front()
    }

    /// Records that the reader is polling.
    pub(super) fn record_poll(&self) {
        if let Some(stall) = &self.stall {
            stall.delivered_at.store(0, Ordering::Relaxed);
        }
    }

    /// Records that a frame has been delivered.
    ///
    /// If the reader does not poll again after this, the client is not reading.
    pub(super) fn record_delivery(&self) {
        if let Some(stall) = &self.stall {
            let elapsed =
                u64::try_from(stall.created_at.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
            stall.delivered_at.store(elapsed + 1, Ordering::Relaxed);
        }
    }

    /// Returns the reader's next step.
    ///
    /// A message is returned only at a boundary. After this, `waker` wakes the reader.
    pub(super) fn next(&self, at_boundary: bool, waker: &Waker) -> Next<B> {
        let (next, previous) = {
            let mut state = self.state();
            let previous = state.replace_waker(waker);
            (state.next(at_boundary), previous)
        };
        // Drop the previous waker without holding the lock, because it might own its task.
        drop(previous);
        next
    }

    /// Puts the inner body back after a poll. Returns `false` if the slot has been closed in the meantime.
    pub(super) fn restore(&self, body: Pin<Box<InnerBody<B>>>) -> bool {
        let mut state = self.state();
        let Some(closing) = state.closing() else {
            state.inner = Some(body);
            return true;
        };
        drop(state);
        report_closed(body, closing);
        false
    }

    /// Drops the inner body, whose guard reports a disconnect unless the body has ended.
    pub(super) fn drop_inner(&self) {
        let body = self.state().inner.take();
        drop(body);
    }

    /// Drops the inner body, because the client has disconnected or is not reading.
    pub(super) fn on_disconnect(&self, cause: DetachCause) {
        self.close_with(Closing::Detached(cause));
    }

    /// Closes the slot, reports the end of the inner body and wakes the reader.
    ///
    /// If the slot is already closed, the first reason stands.
    #[cold]
    fn close_with(&self, closing: Closing) {
        let (body, reader) = {
            let mut state = self.state();
            state.injected_mut().closing.get_or_insert(closing);
            (state.inner.take(), state.reader.take())
        };
        if let Some(body) = body {
            report_closed(body, closing);
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
            && let Some(injected) = &mut self.injected
            && let Some(message) = injected.messages.pop_front()
        {
            return Next::Message(message);
        }
        self.inner.take().map_or(Next::Closed, Next::Inner)
    }

    /// Returns the previous waker if it has been replaced.
    fn replace_waker(&mut self, waker: &Waker) -> Option<Waker> {
        match &self.reader {
            Some(reader) if reader.will_wake(waker) => None,
            _ => self.reader.replace(waker.clone()),
        }
    }

    fn injected_mut(&mut self) -> &mut Injected {
        self.injected.get_or_insert_default()
    }

    fn closing(&self) -> Option<Closing> {
        self.injected.as_ref()?.closing
    }
}

fn wake(reader: Option<Waker>) {
    if let Some(reader) = reader {
        reader.wake();
    }
}

#[cold]
fn report_closed<B>(mut body: Pin<Box<InnerBody<B>>>, closing: Closing) {
    let guard = body.as_mut().guard();
    match closing {
        Closing::WithError => guard.complete(),
        Closing::Detached(cause) => guard.report_dropped(cause),
    }
}

impl<B: Send> StreamHandle for BodySlot<B> {
    fn send(&self, message: Bytes) {
        let reader = {
            let mut state = self.state();
            state.injected_mut().messages.push_back(message);
            state.reader.take()
        };
        wake(reader);
    }

    fn close(&self) {
        self.close_with(Closing::WithError);
    }
}

impl<B: Send> OnDeadline for BodySlot<B> {
    fn on_deadline(&self, lateness: &LatenessTracker, timeliness: Timeliness) -> Option<Rearm> {
        let now = lateness.now();
        let stall = self.stall.as_ref()?;
        if self.state().closing().is_some() {
            return None;
        }
        let rearm_at = now.checked_add(stall.limit);
        let deadline = match stall.delivered_at.load(Ordering::Relaxed).checked_sub(1) {
            // The reader is waiting for the next frame, so the client has not stalled.
            None => rearm_at?,
            Some(elapsed) => {
                let delivered_at = stall
                    .created_at
                    .checked_add(Duration::from_millis(elapsed))?;
                delivered_at.checked_add(stall.limit)?
            }
        };
        if deadline > now {
            return Some(Rearm::At(deadline));
        }
        match timeliness {
            // The runtime has stalled, and the reader with it.
            Timeliness::Late => rearm_at.map(Rearm::At),
            Timeliness::Delayed => Some(Rearm::Soon),
            Timeliness::OnTime => {
                self.on_disconnect(DetachCause::Stalled);
                None
            }
        }
    }
}

// === impl InnerBody ===

impl<B> InnerBody<B> {
    pub(super) fn guard(self: Pin<&mut Self>) -> &mut Guard {
        self.project().guard
    }
}

impl<B> InnerBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    pub(super) fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled<B> {
        let this = self.project();
        match this.inner.project() {
            InnerProj::Body { body } => {
                let _polling = this.guard.poll_guard();
                body.poll_frame(cx)
            }
            InnerProj::Committed { committed } => committed.poll_frame(this.guard, cx),
            InnerProj::Late { late } => {
                let _polling = this.guard.poll_guard();
                late.poll_frame(cx)
            }
        }
    }

    /// Returns `true` if the body reports that it has ended.
    pub(super) fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Body { body } => body.is_end_stream(),
            Inner::Committed { .. } | Inner::Late { .. } => false,
        }
    }
}
