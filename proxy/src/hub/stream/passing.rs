//! An event that goes straight through, because there is no room for it.

use bytes::Bytes;

use super::{ANSWER_IS_GONE, INTERNAL_ERROR, NO_ROOM, Refused, Stream};
use crate::hub::{
    event::{Event, Weight, error},
    ring::{MAX_FRAME, Passed, Ring},
};

// === impl Stream ===

impl Stream {
    /// Begins an event that goes straight through.
    pub(in crate::hub) async fn begin_pass(&self) {
        let lost = || {
            let id = self.0.call.as_ref().map_or("null", |(id, _)| id);
            error(id, INTERNAL_ERROR, ANSWER_IS_GONE)
        };
        self.when_moved(|ring| ring.begin_pass(lost).then_some(()))
            .await;
    }

    /// Sends a piece of it. Returns when its reader has taken that, or `false` when it has left.
    pub(in crate::hub) async fn pass(&self, mut bytes: Bytes) -> bool {
        while !bytes.is_empty() {
            let mut piece = Some(bytes.split_to(bytes.len().min(MAX_FRAME)));
            let passed = self.when_moved(|ring| {
                if let Some(piece) = piece.take() {
                    ring.pass(piece);
                }
                Some(ring.passed()).filter(|passed| *passed != Passed::Wait)
            });
            if passed.await != Passed::Taken {
                return false;
            }
        }
        true
    }

    /// Ends it. `false` if its reader left before it had all of it.
    pub(in crate::hub) async fn end_pass(&self, weight: Weight) -> bool {
        let id = self.state().ring.id_of_pass();
        let taken = self.pass(id).await && self.state().ring.end_pass(weight) == Passed::Taken;
        self.tell_answered();
        taken
    }

    /// An event is lost that had to go straight through: the call ends with an error.
    pub(in crate::hub) fn lose(&self) -> Result<(), Refused> {
        self.fail(NO_ROOM)
    }

    pub(super) async fn send_through(&self, event: Event) -> Result<(), Refused> {
        let weight = event.weight;
        self.begin_pass().await;
        if self.pass(event.into_bytes()).await && self.end_pass(weight).await {
            Ok(())
        } else {
            self.lose()
        }
    }

    /// Does what needs the reader to have moved, once it has.
    async fn when_moved<T>(&self, mut step: impl FnMut(&mut Ring) -> Option<T>) -> T {
        loop {
            let moved = self.0.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            let (done, reader) = {
                let mut state = self.state();
                let done = step(&mut state.ring);
                (done, state.reader.take())
            };
            if let Some(reader) = reader {
                reader.wake();
            }
            match done {
                Some(done) => return done,
                None => moved.await,
            }
        }
    }
}
