use std::time::Duration;

use serde_json::json;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::*;
use crate::{
    answers::Answers,
    directory::{
        Claim, MemoryDirectory,
        contract::{claim_from, instance, session},
        faulty::{Fault, Faulty},
    },
    ids::Owner,
    membership::{heartbeat::Heartbeat, turned_away::TurnedAway},
};

/// A store as rmcp uses it, with the heartbeat task that writes for it.
struct Instance {
    me: Owner,
    store: ClusterStore,
    sessions: Arc<Sessions>,
    heartbeat: JoinHandle<()>,
}

impl Instance {
    /// Starts a session the way rmcp does.
    async fn begin(&self, id: &str, state: &SessionState) {
        self.sessions.on_opened(id, false);
        self.store.store(id, state).await.unwrap();
    }

    fn new(number: u8, directory: &Faulty) -> Self {
        let me = instance(number);
        let directory = Limited::new(directory.clone());
        let (sessions, _relinquished) = Sessions::new(me.incarnation);
        let heartbeat = Heartbeat::new(
            me,
            directory.clone(),
            sessions.clone(),
            Arc::new(TurnedAway::new(Duration::ZERO)),
            Answers::new(directory.clone()),
            false,
        );
        Self {
            me,
            store: ClusterStore::new(me.incarnation, directory, sessions.clone()),
            sessions,
            heartbeat: tokio::spawn(heartbeat.run()),
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.heartbeat.abort();
    }
}

fn directory() -> Faulty {
    Faulty::new(MemoryDirectory::default())
}

fn state(client: &str) -> SessionState {
    let params = json!({
        "protocolVersion": "2025-06-18",
        "capabilities": {"sampling": {}},
        "clientInfo": {"name": client, "version": "1"},
    });
    SessionState::new(serde_json::from_value(params).unwrap())
}

fn client(state: &SessionState) -> &str {
    &state.initialize_params.client_info.name
}

async fn stored_owner(directory: &Faulty, id: &str) -> Option<Owner> {
    directory
        .memory
        .load(SessionHash::of(id))
        .await
        .unwrap()
        .map(|entry| entry.ownership.owner)
}

#[tokio::test(start_paused = true)]
async fn a_new_session_is_in_the_directory_before_its_client_receives_it() {
    let directory = directory();
    let first = Instance::new(1, &directory);
    first.begin("a", &state("client")).await;
    assert_eq!(stored_owner(&directory, "a").await, Some(first.me));
    assert!(first.sessions.is_local(SessionHash::of("a")));
}

#[tokio::test(start_paused = true)]
async fn no_session_waits_long_for_a_directory_that_does_not_answer() {
    for fault in [Fault::Stopped, Fault::Fails, Fault::NoReply] {
        let directory = directory();
        let first = Instance::new(1, &directory);
        sleep(Duration::from_secs(1)).await;
        directory.set(fault);
        let started = Instant::now();
        first.begin("a", &state("client")).await;
        assert!(
            started.elapsed() <= OPEN_TIMEOUT + Duration::from_millis(10),
            "{:?}",
            started.elapsed()
        );
        assert!(first.sessions.is_local(SessionHash::of("a")));
        directory.set(Fault::None);
        first
            .sessions
            .wait_until_written(SessionHash::of("a"))
            .await;
        assert_eq!(stored_owner(&directory, "a").await, Some(first.me));
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_claimed_a_session_can_restore_it() {
    let directory = directory();
    let (first, second) = (Instance::new(1, &directory), Instance::new(2, &directory));
    first.begin("a", &state("client")).await;
    let session = SessionHash::of("a");
    let claim = claim_from(&directory.memory, session, first.me, second.me).await;
    assert_eq!(claim, Claim::Won);
    let loaded = second.store.load("a").await.unwrap().unwrap();
    assert_eq!(client(&loaded), "client");
    assert!(loaded.initialize_params.capabilities.sampling.is_some());
    assert!(second.sessions.is_local(SessionHash::of("a")));
}

#[tokio::test(start_paused = true)]
async fn a_session_of_another_instance_is_not_restored() {
    let directory = directory();
    let (first, second) = (Instance::new(1, &directory), Instance::new(2, &directory));
    first.begin("secret", &state("client")).await;
    let error = second.store.load("secret").await.unwrap_err();
    assert_eq!(error.to_string(), "another instance owns the session");
    assert!(!second.sessions.is_local(SessionHash::of("secret")));
}

#[tokio::test(start_paused = true)]
async fn an_unknown_session_is_not_restored() {
    let first = Instance::new(1, &directory());
    assert!(first.store.load("a").await.unwrap().is_none());
    assert!(!first.sessions.is_local(SessionHash::of("a")));
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_does_not_answer_or_is_wrong_restores_nothing() {
    let directory = directory();
    let first = Instance::new(1, &directory);
    directory
        .memory
        .register(first.me, &[session("a")])
        .await
        .unwrap();
    for fault in [
        Fault::Stopped,
        Fault::Fails,
        Fault::WrongOwner(instance(3)),
        Fault::WrongOwner(first.me),
        Fault::None,
    ] {
        directory.set(fault);
        first.store.load("a").await.unwrap_err();
        assert!(!first.sessions.is_local(SessionHash::of("a")), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_session_has_a_tombstone_before_its_client_is_answered() {
    let directory = directory();
    let first = Instance::new(1, &directory);
    first.begin("a", &state("client")).await;
    first.store.delete("a").await.unwrap();
    assert_eq!(stored_owner(&directory, "a").await, None);
    assert!(first.store.load("a").await.unwrap().is_none());
}

/// The store does not even ask the directory, which could not answer.
#[tokio::test(start_paused = true)]
async fn a_deleted_session_stays_deleted_while_the_directory_fails() {
    let directory = directory();
    let first = Instance::new(1, &directory);
    first.begin("a", &state("client")).await;
    directory.set(Fault::Fails);
    first.store.delete("a").await.unwrap();
    assert!(first.store.load("a").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_session_of_another_instance_is_not_deleted() {
    let directory = directory();
    let (first, second) = (Instance::new(1, &directory), Instance::new(2, &directory));
    first.begin("a", &state("client")).await;
    second.store.delete("a").await.unwrap();
    assert_eq!(stored_owner(&directory, "a").await, Some(first.me));
}

#[tokio::test(start_paused = true)]
async fn a_session_ends_without_a_directory_that_does_not_answer() {
    let directory = directory();
    let first = Instance::new(1, &directory);
    first.begin("a", &state("client")).await;
    directory.set(Fault::Stopped);
    let started = Instant::now();
    first.store.delete("a").await.unwrap();
    assert!(
        started.elapsed() <= DIRECTORY_TIMEOUT + Duration::from_millis(10),
        "{:?}",
        started.elapsed()
    );
    directory.set(Fault::None);
    first
        .sessions
        .wait_until_removed(SessionHash::of("a"))
        .await;
    assert_eq!(stored_owner(&directory, "a").await, None);
}

#[tokio::test(start_paused = true)]
async fn oversized_parameters_are_not_stored_but_the_session_is_found() {
    let directory = directory();
    let first = Instance::new(1, &directory);
    first.begin("a", &state(&"x".repeat(MAX_PARAMS))).await;
    let entry = directory
        .memory
        .load(SessionHash::of("a"))
        .await
        .unwrap()
        .unwrap();
    assert_eq!((entry.ownership.owner, entry.params.len()), (first.me, 0));
    assert!(first.store.load("a").await.unwrap().is_none());
}
