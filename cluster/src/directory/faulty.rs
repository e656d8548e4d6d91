//! A directory for tests, with faults that can be switched on and off.

use std::{
    any::Any,
    fmt::Debug,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::{sync::watch, time::sleep};

use super::{
    Claim, Directory, DirectoryError, Entry, HeartbeatReply, Leases, MemoryDirectory, Registration,
    SessionSnapshot, Status,
};
use crate::ids::{CallNumber, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone};

/// What is wrong with the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing is wrong.
    None,
    /// The directory is stalled. It executes queued requests when it resumes, even if their callers have stopped waiting.
    Stopped,
    /// Every request fails.
    Fails,
    /// Every request is executed, but its reply is lost.
    NoReply,
    /// Every request takes this long.
    Slow(Duration),
    /// Every request with this command is executed, but its reply is lost.
    NoReplyAt(&'static str),
    /// Every request with this command takes this long.
    SlowAt(&'static str, Duration),
    /// Every request with this command fails.
    FailsAt(&'static str),
    /// The directory reports this owner for every session.
    WrongOwner(Owner),
}

/// An in-memory directory with a fault. Clones share the data and the fault.
#[derive(Debug, Clone)]
pub(crate) struct Faulty {
    pub(crate) memory: MemoryDirectory,
    fault: watch::Sender<Fault>,
    commands: Arc<Mutex<Vec<&'static str>>>,
    gate: Option<Arc<dyn Gate>>,
}

/// Decides when, and whether, a request is executed. In the simulation, each instance has its own gate.
pub(crate) trait Gate: Debug + Send + Sync {
    /// Wraps a request so that it is executed as this gate allows.
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest;
}

/// A request to the directory whose reply type has been erased.
pub(crate) type ErasedRequest = BoxFuture<'static, Result<Box<dyn Any + Send>, DirectoryError>>;

// === impl Faulty ===

impl Faulty {
    pub(crate) fn new(memory: MemoryDirectory) -> Self {
        Self {
            memory,
            fault: watch::Sender::new(Fault::None),
            commands: Arc::default(),
            gate: None,
        }
    }

    /// Returns the same directory as seen by an instance behind `gate`.
    pub(crate) fn behind(&self, gate: impl Gate + 'static) -> Self {
        Self {
            gate: Some(Arc::new(gate)),
            ..self.clone()
        }
    }

    pub(crate) fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    /// Returns the number of requests with this command, not counting those through a gate.
    pub(crate) fn request_count(&self, command: &str) -> usize {
        self.commands
            .lock()
            .unwrap()
            .iter()
            .filter(|requested| **requested == command)
            .count()
    }

    async fn execute<T: Send + 'static>(
        &self,
        command: &'static str,
        request: impl Future<Output = Result<T, DirectoryError>> + Send + 'static,
    ) -> Result<T, DirectoryError> {
        if let Some(gate) = &self.gate {
            let request = async move {
                request
                    .await
                    .map(|answer| Box::new(answer) as Box<dyn Any + Send>)
            };
            let answer = gate.pass(command, Box::pin(request)).await?;
            return Ok(*answer.downcast().unwrap());
        }
        self.commands.lock().unwrap().push(command);
        let fault = *self.fault.borrow();
        match fault {
            Fault::SlowAt(slow, time) if slow == command => {
                sleep(time).await;
                request.await
            }
            Fault::FailsAt(fails) if fails == command => {
                Err(DirectoryError::failed("the directory is switched off"))
            }
            Fault::NoReplyAt(unanswered) if unanswered == command => {
                request.await?;
                std::future::pending().await
            }
            Fault::None
            | Fault::WrongOwner(_)
            | Fault::SlowAt(..)
            | Fault::FailsAt(_)
            | Fault::NoReplyAt(_) => request.await,
            Fault::Slow(time) => {
                sleep(time).await;
                request.await
            }
            Fault::Fails => Err(DirectoryError::failed("the directory is switched off")),
            Fault::NoReply => {
                request.await?;
                std::future::pending().await
            }
            Fault::Stopped => {
                let mut fault = self.fault.subscribe();
                let resumed = tokio::spawn(async move {
                    drop(fault.wait_for(|fault| *fault != Fault::Stopped).await);
                    request.await
                });
                resumed.await.unwrap()
            }
        }
    }

    fn wrong_owner(&self) -> Option<Ownership> {
        let fault = *self.fault.borrow();
        match fault {
            Fault::WrongOwner(owner) => Some(Ownership::begin(owner)),
            _ => None,
        }
    }
}

#[async_trait]
impl Directory for Faulty {
    async fn look_up(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError> {
        let memory = self.memory.clone();
        let wrong_owner = self.wrong_owner();
        self.execute("look_up", async move {
            let snapshot = memory.look_up(session).await?;
            Ok(SessionSnapshot {
                record: wrong_owner.map(Record::Owned).or(snapshot.record),
                ..snapshot
            })
        })
        .await
    }

    async fn leases(&self) -> Result<Leases, DirectoryError> {
        let memory = self.memory.clone();
        self.execute("leases", async move { memory.leases().await })
            .await
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        if let Some(ownership) = self.wrong_owner() {
            let params = Bytes::from_static(b"{}");
            return Ok(Some(Entry { ownership, params }));
        }
        let memory = self.memory.clone();
        self.execute("load", async move { memory.load(session).await })
            .await
    }

    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError> {
        if let Some(ownership) = self.wrong_owner() {
            let wrong_record =
                |registration: &Registration| (registration.session, Record::Owned(ownership));
            return Ok(sessions.iter().map(wrong_record).collect());
        }
        let memory = self.memory.clone();
        let sessions = sessions.to_vec();
        self.execute("register", async move {
            memory.register(owner, &sessions).await
        })
        .await
    }

    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError> {
        if let Some(ownership) = self.wrong_owner() {
            return Ok(Claim::Lost(Record::Owned(ownership)));
        }
        let memory = self.memory.clone();
        self.execute("claim", async move {
            memory.claim(session, previous, wanted).await
        })
        .await
    }

    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError> {
        let memory = self.memory.clone();
        self.execute(
            "delete",
            async move { memory.delete(session, tombstone).await },
        )
        .await
    }

    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError> {
        let (memory, status) = (self.memory.clone(), status.clone());
        self.execute("heartbeat", async move {
            memory.heartbeat(owner, &status).await
        })
        .await
    }

    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError> {
        let (memory, status) = (self.memory.clone(), status.clone());
        self.execute("acquire_lease", async move {
            memory.acquire_lease(owner, &status).await
        })
        .await
    }

    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError> {
        let memory = self.memory.clone();
        self.execute(
            "release_lease",
            async move { memory.release_lease(owner).await },
        )
        .await
    }

    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
        time: Duration,
    ) -> Result<(), DirectoryError> {
        let memory = self.memory.clone();
        self.execute("keep_answer", async move {
            memory
                .keep_answer(session, incarnation, call, answer, time)
                .await
        })
        .await
    }

    async fn remove_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<(), DirectoryError> {
        let memory = self.memory.clone();
        self.execute("remove_answer", async move {
            memory.remove_answer(session, incarnation, call).await
        })
        .await
    }

    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError> {
        let memory = self.memory.clone();
        self.execute("answer", async move {
            memory.answer(session, incarnation, call).await
        })
        .await
    }
}
