//! The end of a stream's time: streams are forgotten when it is over, where room is short, and with their session.

use std::{
    sync::{Arc, Weak},
    task::Waker,
};

use mcp_cancel_on_disconnect::CallToken;
use tokio::{runtime::Handle, task::AbortHandle, time::Instant};

use super::Stream;
use crate::hub::{
    book::{Book, Next, Over},
    budget::{Grant, Short},
    event::error,
};
use crate::refusal::SERVER_ERROR;

const SESSION_ENDED: &str = "the session was deleted";

// === impl Stream ===

impl Stream {
    /// Forgets it at once.
    pub(in crate::hub) fn forget(&self) {
        if let Some(book) = self.0.book.upgrade() {
            book.forget(self.0.number);
        }
    }

    /// Room for an event that is being read.
    pub(in crate::hub) fn room(&self) -> Option<Grant> {
        self.0.book.upgrade().map(|book| book.grant())
    }

    /// Makes that room larger. What may be dropped goes for it first. `false` if there is none.
    pub(in crate::hub) fn widen(&self, room: &mut Grant, by: usize) -> bool {
        while let Err(short) = room.grow(by) {
            if !self.drop_droppable() && !self.make_room(short) {
                return false;
            }
        }
        true
    }

    /// Forgets another stream, whose client has all of it. `false` if there is none.
    pub(super) fn make_room(&self, short: Short) -> bool {
        let book = self.0.book.upgrade();
        book.is_some_and(|book| book.make_room(short))
    }

    /// It has ended, and is forgotten at that time.
    pub(super) fn forget_at(&self, until: Instant) {
        let Some(book) = self.0.book.upgrade() else {
            return;
        };
        book.end(self.0.number, until);
        if let Some(over) = book.over()
            && let Ok(runtime) = Handle::try_current()
        {
            let swept = Arc::downgrade(&over);
            over.sweep_with(|| runtime.spawn(sweep(swept, until)).abort_handle());
        }
    }

    /// Its client has all of it.
    pub(super) fn is_spare(&self, until: Instant) {
        if let Some(book) = self.0.book.upgrade() {
            book.spare(self.0.number, until);
        }
    }

    /// Ends it with its session. A client that reads it gets what it has, and an error in place of an answer that has not come.
    fn close_with_session(&self, over: Option<&Over<Self>>) {
        let is_read = self.state().ring.has_reader();
        if !is_read {
            return self.close(over);
        }
        let call = self.0.call.as_ref();
        let error = call.map(|(id, _)| error(id, SERVER_ERROR, SESSION_ENDED));
        let (reader, token, writer, until, gaps) = {
            let mut state = self.state();
            if let Some(error) = error.filter(|_| state.until.is_none()) {
                state.ring.push_paid(error);
            }
            state.ring.end();
            state.spare = true;
            let until = state.until.replace(Instant::now());
            let reader = state.reader.take();
            (
                reader,
                state.token.take(),
                state.writer.take(),
                until,
                state.ring.gaps(),
            )
        };
        self.closed(reader, token, writer);
        if let Some(over) = over {
            over.closed(self.0.number, until, gaps);
        }
    }

    fn closed(&self, reader: Option<Waker>, token: Option<CallToken>, writer: Option<AbortHandle>) {
        drop(token);
        if let Some(writer) = writer {
            writer.abort();
        }
        self.0.moved.notify_waiters();
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Ends it at once, and gives back all that it has. Who calls this has taken it out of its book.
    fn close(&self, over: Option<&Over<Self>>) {
        let (reader, token, writer, until, gaps) = {
            let mut state = self.state();
            state.ring.clear();
            state.spare = true;
            let until = state.until.replace(Instant::now());
            let gaps = state.ring.gaps();
            let reader = state.reader.take();
            (reader, state.token.take(), state.writer.take(), until, gaps)
        };
        self.closed(reader, token, writer);
        if let Some(over) = over {
            over.closed(self.0.number, until, gaps);
        }
    }
}

// === impl Book ===

impl Book<Stream> {
    /// Forgets a stream. `false` if it is not there.
    pub(in crate::hub) fn forget(&self, number: u64) -> bool {
        let taken = self.take(number);
        if let Some(stream) = &taken {
            stream.close(self.over().as_deref());
        }
        taken.is_some()
    }

    /// Forgets a stream whose client has all of it, the oldest of those that would make this room. `false` if there is none.
    pub(in crate::hub) fn make_room(&self, short: Short) -> bool {
        let over = self.over();
        match short {
            Short::Session => {
                let spare = self.take_spare();
                if let Some(stream) = &spare {
                    stream.close(over.as_deref());
                }
                spare.is_some()
            }
            Short::All => over.is_some_and(|over| over.make_room()),
        }
    }

    /// Ends all its streams, and forgets them. None can be opened from here on.
    pub(in crate::hub) fn close(&self) {
        let over = self.over();
        for stream in self.take_all() {
            stream.close_with_session(over.as_deref());
        }
    }
}

// === impl Over ===

impl Over<Stream> {
    fn make_room(&self) -> bool {
        while let Some((book, number)) = self.take_spare() {
            if book.upgrade().is_some_and(|book| book.forget(number)) {
                return true;
            }
        }
        false
    }

    /// Forgets the streams whose time is over. Returns when that of the next is, if there is one.
    fn sweep(&self) -> Option<Instant> {
        loop {
            match self.next(Instant::now()) {
                Next::Due(book, number) => {
                    if let Some(book) = book.upgrade() {
                        book.forget(number);
                    }
                }
                Next::At(until) => return Some(until),
                Next::Nothing => return None,
            }
        }
    }
}

async fn sweep(over: Weak<Over<Stream>>, mut next: Instant) {
    loop {
        tokio::time::sleep_until(next).await;
        let Some(until) = over.upgrade().and_then(|over| over.sweep()) else {
            return;
        };
        next = until;
    }
}
