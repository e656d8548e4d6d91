//! Sends an event directly to the client when there is no room for it in the ring.

use bytes::Bytes;

use super::{ANSWER_NOT_RETAINED, INTERNAL_ERROR, NO_ROOM, Refused, Stream};
use crate::event_store::{
    event::{Event, Weight, error},
    ring::{Bypassed, MAX_FRAME, Ring},
};

// === impl Stream ===

impl Stream {
    /// Starts an event that bypasses the ring, once the reader has taken all earlier events.
    ///
    /// If there is no reader, this returns immediately, and the event is lost.
    pub(in crate::event_store) async fn begin_bypass(&self) {
        let lost = || {
            let id = self.0.call.as_ref().map_or("null", |(id, _)| id);
            error(id, INTERNAL_ERROR, ANSWER_NOT_RETAINED)
        };
        self.wait_for_progress(|ring| ring.begin_bypass(lost).then_some(()))
            .await;
    }

    /// Sends part of the bypassing event, and returns `true` once the reader has taken it.
    ///
    /// Returns `false` if the reader has detached, if there was no reader, or if the stream has ended.
    pub(in crate::event_store) async fn bypass(&self, mut bytes: Bytes) -> bool {
        while !bytes.is_empty() {
            let mut piece = Some(bytes.split_to(bytes.len().min(MAX_FRAME)));
            let state = self.wait_for_progress(|ring| {
                if let Some(piece) = piece.take() {
                    ring.set_bypass_piece(piece);
                }
                Some(ring.bypass_state()).filter(|state| *state != Bypassed::Wait)
            });
            if state.await != Bypassed::Taken {
                return false;
            }
        }
        true
    }

    /// Ends the bypassing event, and returns `true` if the reader has taken all of it.
    pub(in crate::event_store) async fn end_bypass(&self, weight: Weight) -> bool {
        let id = self.state().ring.bypass_id_line();
        let taken =
            self.bypass(id).await && self.state().ring.end_bypass(weight) == Bypassed::Taken;
        self.notify_answered();
        taken
    }

    /// Refuses a bypassing event that was lost. If the stream belongs to a call, it ends with an error.
    pub(in crate::event_store) fn fail_lost_event(&self) -> Result<(), Refused> {
        self.fail(NO_ROOM)
    }

    /// Sends an entire event past the ring, failing unless the attached client takes all of it.
    pub(super) async fn push_bypassing(&self, event: Event) -> Result<(), Refused> {
        let weight = event.weight;
        self.begin_bypass().await;
        if self.bypass(event.into_bytes()).await && self.end_bypass(weight).await {
            Ok(())
        } else {
            self.fail_lost_event()
        }
    }

    /// Runs `step` now and whenever the reader makes progress, until it returns a value.
    ///
    /// Wakes the reader each time.
    async fn wait_for_progress<T>(&self, mut step: impl FnMut(&mut Ring) -> Option<T>) -> T {
        loop {
            let reader_progress = self.0.reader_progress.notified();
            tokio::pin!(reader_progress);
            reader_progress.as_mut().enable();
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
                None => reader_progress.await,
            }
        }
    }
}
