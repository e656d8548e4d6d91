//! A directory that returns an error if it does not answer in time.
//!
//! If an answer arrives in time but this process stalls before reading it, the answer is discarded, because it may be out of date.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::{
    Claim, Directory, DirectoryError, Entry, HeartbeatReply, Leases, MAX_ANSWER, Registration,
    SessionSnapshot, Status,
};
use crate::ids::{CallNumber, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone};

/// Timeout for all requests other than writing, reading or removing an answer.
///
/// A timed-out request may still be executed.
pub(crate) const DIRECTORY_TIMEOUT: Duration = Duration::from_millis(500);

/// Timeout for writing, reading or removing an answer.
///
/// Long enough for a directory with a latency of 2 s to confirm 1 MiB. The only client requests that ever wait this long are those that
/// resume a lost call.
pub(crate) const ANSWERS_TIMEOUT: Duration = Duration::from_secs(5);

/// A directory whose requests succeed or fail within a timeout. Clones share the directory.
///
/// The timeout is [`DIRECTORY_TIMEOUT`], or [`ANSWERS_TIMEOUT`] for requests about answers.
#[derive(Debug, Clone)]
pub(crate) struct Limited(Arc<dyn Directory>);

// === impl Limited ===

impl Limited {
    pub(crate) fn new(directory: impl Directory) -> Self {
        Self(Arc::new(directory))
    }
}

async fn limited<T>(
    answer: impl Future<Output = Result<T, DirectoryError>>,
) -> Result<T, DirectoryError> {
    with_timeout(DIRECTORY_TIMEOUT, answer).await
}

async fn with_timeout<T>(
    limit: Duration,
    answer: impl Future<Output = Result<T, DirectoryError>>,
) -> Result<T, DirectoryError> {
    let started = Instant::now();
    match timeout(limit, answer).await {
        // After a stall, `timeout` still returns an answer that is already there, so check the time again.
        Ok(answer) if started.elapsed() <= limit => answer,
        Ok(_) | Err(_) => Err(DirectoryError::timed_out()),
    }
}

#[async_trait]
impl Directory for Limited {
    async fn look_up(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError> {
        limited(self.0.look_up(session)).await
    }

    async fn leases(&self) -> Result<Leases, DirectoryError> {
        limited(self.0.leases()).await
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        limited(self.0.load(session)).await
    }

    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError> {
        limited(self.0.register(owner, sessions)).await
    }

    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError> {
        limited(self.0.claim(session, previous, wanted)).await
    }

    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError> {
        limited(self.0.delete(session, tombstone)).await
    }

    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError> {
        limited(self.0.heartbeat(owner, status)).await
    }

    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError> {
        limited(self.0.acquire_lease(owner, status)).await
    }

    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError> {
        limited(self.0.release_lease(owner)).await
    }

    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
        time: Duration,
    ) -> Result<(), DirectoryError> {
        if answer.len() > MAX_ANSWER {
            return Err(DirectoryError::too_large());
        }
        let kept = self.0.keep_answer(session, incarnation, call, answer, time);
        with_timeout(ANSWERS_TIMEOUT, kept).await
    }

    async fn remove_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<(), DirectoryError> {
        with_timeout(
            ANSWERS_TIMEOUT,
            self.0.remove_answer(session, incarnation, call),
        )
        .await
    }

    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError> {
        with_timeout(ANSWERS_TIMEOUT, self.0.answer(session, incarnation, call)).await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::{sync::oneshot, time::advance};

    use super::*;

    /// Simulates a stall of this process, after which it reads an old answer.
    #[tokio::test(start_paused = true)]
    async fn an_answer_after_the_timeout_is_discarded() {
        for (stall, is_returned) in [
            (DIRECTORY_TIMEOUT / 2, true),
            (2 * DIRECTORY_TIMEOUT, false),
        ] {
            let (sender, answer) = oneshot::channel();
            let mut request = Box::pin(limited(async { Ok(answer.await.unwrap()) }));
            assert!((&mut request).now_or_never().is_none());
            sender.send(1).unwrap();
            advance(stall).await;
            assert_eq!(request.await.ok(), is_returned.then_some(1));
        }
    }
}
