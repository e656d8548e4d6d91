//! Removes streams when they expire, when there is no room, and when their session is closed.

use std::{
    iter,
    sync::{Arc, Weak},
    task::Waker,
};

use mcp_cancel_on_disconnect::CallToken;
use tokio::{runtime::Handle, task::AbortHandle, time::Instant};

use super::{State, Stream};
use crate::event_store::{
    budget::{Exhausted, Reservation},
    event::error,
    stream_index::{EndedStreams, NextExpiry, StreamIndex},
};
use crate::refusal::SERVER_ERROR;

const SESSION_ENDED: &str = "the session was deleted";

// === impl Stream ===

impl Stream {
    /// Removes the stream immediately.
    pub(in crate::event_store) fn evict(&self) {
        if let Some(index) = self.0.index.upgrade() {
            index.evict(self.0.number);
        }
    }

    /// Drops the oldest droppable event if no client is reading the stream.
    ///
    /// Returns `false` if nothing was dropped.
    pub(in crate::event_store) fn drop_unread(&self) -> bool {
        let mut state = self.state();
        !state.ring.has_reader() && state.ring.drop_droppable()
    }

    /// Removes the stream if it is marked as evictable and no client is still reading its events.
    ///
    /// Returns `false` if it was not removed.
    fn evict_unless_reading(&self) -> bool {
        let Some(index) = self.0.index.upgrade() else {
            return false;
        };
        let ended_streams = index.ended_streams();
        let is_closed = self.close_if(ended_streams.as_deref(), |state| {
            // When a client resumes, the mark is cleared until that client has read everything.
            let may_close = state.is_evictable && !state.ring.is_in_progress();
            if may_close {
                state.ring.clear();
            }
            may_close
        });
        if is_closed {
            index.remove(self.0.number);
        }
        is_closed
    }

    /// Removes the stream, or postpones its expiry.
    ///
    /// The stream is retained for another retention period if a client still has events to read, or if the server is checking a
    /// client. If the last client stopped reading before it had everything, the retention period starts at that point.
    fn expire(&self) {
        let now = Instant::now();
        let postponed = {
            let mut state = self.state();
            let last_read = if state.ring.is_in_progress() || self.has_pending_check() {
                Some(now)
            } else {
                state.detached_at.filter(|_| !state.is_evictable)
            };
            let until = last_read.map(|last_read| last_read + self.0.retention);
            let postponed = until.filter(|until| *until > now);
            state.until = postponed.or(state.until);
            postponed
        };
        match postponed {
            Some(until) => self.expire_at(until),
            None => self.evict(),
        }
    }

    /// Returns an empty reservation for the next event, or `None` if the session was removed.
    pub(in crate::event_store) fn reservation(&self) -> Option<Reservation> {
        self.0.index.upgrade().map(|index| index.reservation())
    }

    /// Grows the reservation of an event being read. Returns `false` if there is no room.
    ///
    /// To make room, this drops the stream's own droppable events, and then evicts other streams.
    pub(in crate::event_store) fn grow_reservation(
        &self,
        reservation: &mut Reservation,
        additional: usize,
    ) -> bool {
        while let Err(exhausted) = reservation.grow(additional) {
            if !self.drop_droppable() && !self.evict_for(exhausted) {
                return false;
            }
        }
        true
    }

    /// Evicts another stream. If that fails and the shared budget is the exhausted one, makes room across all sessions.
    ///
    /// A stream can be evicted if it has been read in full or its call was cancelled, but not while it is being read again.
    /// Returns `false` if nothing was freed.
    pub(super) fn evict_for(&self, exhausted: Exhausted) -> bool {
        let index = self.0.index.upgrade();
        index.is_some_and(|index| index.evict_for(exhausted))
    }

    /// Registers the stream as ended, to expire at `until`.
    ///
    /// Also starts the task that removes expired streams, unless called outside a Tokio runtime.
    pub(super) fn expire_at(&self, until: Instant) {
        let Some(index) = self.0.index.upgrade() else {
            return;
        };
        index.add_ended(self.0.number, until);
        if let Some(ended_streams) = index.ended_streams()
            && let Ok(runtime) = Handle::try_current()
        {
            let weak = Arc::downgrade(&ended_streams);
            ended_streams.start_sweeper(|| runtime.spawn(expire_loop(weak, until)).abort_handle());
        }
    }

    pub(super) fn mark_evictable(&self, until: Instant) {
        if let Some(index) = self.0.index.upgrade() {
            index.mark_evictable(self.0.number, until);
        }
    }

    /// Ends the stream because its session has been closed.
    ///
    /// An attached client still gets the remaining events, with an error in place of a missing answer. If no client is
    /// attached, all events are dropped.
    fn close_with_session(&self, ended_streams: Option<&EndedStreams<Self>>) {
        let call = self.0.call.as_ref();
        let error = call.map(|(id, _)| error(id, SERVER_ERROR, SESSION_ENDED));
        self.close_if(ended_streams, |state| {
            if state.ring.has_reader() {
                if let Some(error) = error.filter(|_| state.until.is_none()) {
                    state.ring.push_reserved(error);
                }
                state.ring.end();
            } else {
                state.ring.clear();
            }
            true
        });
    }

    /// Releases a closed stream's resources, and wakes its tasks. The caller must not hold the state's lock.
    fn release(
        &self,
        reader: Option<Waker>,
        token: Option<CallToken>,
        writer: Option<AbortHandle>,
    ) {
        drop(token);
        if let Some(writer) = writer {
            writer.abort();
        }
        self.0.reader_progress.notify_waiters();
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Ends the stream right away, and drops its events.
    ///
    /// The caller must already have removed the stream from its index.
    fn close(&self, ended_streams: Option<&EndedStreams<Self>>) {
        self.close_if(ended_streams, |state| {
            state.ring.clear();
            true
        });
    }

    /// Lets `end` decide whether to close the stream, and returns its decision.
    ///
    /// If `end` returns `true`, it must have ended the ring.
    fn close_if(
        &self,
        ended_streams: Option<&EndedStreams<Self>>,
        end: impl FnOnce(&mut State) -> bool,
    ) -> bool {
        let (reader, token, writer, until, gaps) = {
            let mut state = self.state();
            if !end(&mut state) {
                return false;
            }
            state.is_evictable = true;
            let until = state.until.replace(Instant::now());
            let gaps = state.ring.gaps();
            let reader = state.reader.take();
            (reader, state.token.take(), state.writer.take(), until, gaps)
        };
        self.release(reader, token, writer);
        if let Some(ended_streams) = ended_streams {
            ended_streams.on_closed(self.0.number, until, gaps);
        }
        true
    }
}

// === impl StreamIndex ===

impl StreamIndex<Stream> {
    /// Removes and closes a stream, unless it has already been removed.
    fn evict(&self, number: u64) {
        if let Some(stream) = self.remove(number) {
            stream.close(self.ended_streams().as_deref());
        }
    }

    /// Evicts the session's oldest evictable stream.
    ///
    /// If the shared budget is exhausted, evicts the oldest evictable stream of any session instead or, if there is none, makes
    /// room across all sessions. Returns `false` if nothing was freed.
    pub(in crate::event_store) fn evict_for(&self, exhausted: Exhausted) -> bool {
        match exhausted {
            Exhausted::Session => {
                iter::from_fn(|| self.take_evictable()).any(|stream| stream.evict_unless_reading())
            }
            Exhausted::Global => {
                let ended_streams = self.ended_streams();
                ended_streams.is_some_and(|ended_streams| ended_streams.make_room())
            }
        }
    }

    /// Ends and removes all streams. No stream can be inserted afterwards.
    pub(in crate::event_store) fn close(&self) {
        let ended_streams = self.ended_streams();
        for stream in self.take_all() {
            stream.close_with_session(ended_streams.as_deref());
        }
    }
}

// === impl EndedStreams ===

impl EndedStreams<Stream> {
    /// Evicts the oldest evictable stream of any session, or else makes room across all sessions.
    ///
    /// Returns `false` if nothing was freed.
    pub(in crate::event_store) fn make_room(&self) -> bool {
        self.evict_oldest() || self.make_room_in_sessions()
    }

    /// Evicts the oldest evictable stream of any session. Returns `false` if there is none.
    fn evict_oldest(&self) -> bool {
        iter::from_fn(|| self.take_evictable()).any(|(index, number)| {
            let stream = index
                .upgrade()
                .and_then(|index| index.get_by_number(number));
            stream.is_some_and(|stream| stream.evict_unless_reading())
        })
    }

    /// Removes expired streams, and returns when the next one expires.
    ///
    /// Returns `None` if no ended stream is left.
    fn expire(&self) -> Option<Instant> {
        loop {
            match self.next_expiry(Instant::now()) {
                NextExpiry::Due(index, number) => {
                    if let Some(stream) = index
                        .upgrade()
                        .and_then(|index| index.get_by_number(number))
                    {
                        stream.expire();
                    }
                }
                NextExpiry::At(until) => return Some(until),
                NextExpiry::None => return None,
            }
        }
    }
}

/// Removes streams when they expire, until no ended stream is left.
async fn expire_loop(ended_streams: Weak<EndedStreams<Stream>>, mut next: Instant) {
    loop {
        tokio::time::sleep_until(next).await;
        let Some(until) = ended_streams
            .upgrade()
            .and_then(|ended_streams| ended_streams.expire())
        else {
            return;
        };
        next = until;
    }
}
