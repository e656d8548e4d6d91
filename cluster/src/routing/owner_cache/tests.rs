use tokio::{
    task::{JoinHandle, yield_now},
    time::sleep,
};

use super::*;
use crate::directory::{
    MemoryDirectory,
    contract::{instance, ownership, session},
    faulty::{Fault, Faulty},
};
use crate::ids::Owner;

const SECOND: Duration = Duration::from_secs(1);

/// Returns an instance's cache and directory, and the owner of session "a", another instance.
async fn owners() -> (OwnerCache, Faulty, Ownership) {
    let directory = Faulty::new(MemoryDirectory::default());
    let other = register(&directory, instance(2), "a").await;
    let owners = OwnerCache::new(instance(1).incarnation, Limited::new(directory.clone()));
    (owners, directory, other)
}

/// Registers a session and returns its ownership.
async fn register(directory: &Faulty, owner: Owner, id: &str) -> Ownership {
    let memory = &directory.memory;
    memory.register(owner, &[session(id)]).await.unwrap();
    ownership(memory, hash(id)).await.unwrap()
}

fn hash(id: &str) -> SessionHash {
    SessionHash::of(id)
}

async fn owner_of(owners: &OwnerCache, id: &str) -> Option<Ownership> {
    match owners.find(hash(id)).await.unwrap() {
        Found::Owner(ownership) => Some(ownership),
        Found::Unowned(_) => None,
    }
}

/// Looks up a session in another task.
fn spawn_lookup(owners: &OwnerCache, id: &str) -> JoinHandle<Result<Found, Arc<DirectoryError>>> {
    let (owners, session) = (owners.clone(), hash(id));
    tokio::spawn(async move { owners.find(session).await })
}

async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_owner_is_looked_up_once_a_minute() {
    let (owners, directory, other) = owners().await;
    for _ in 0..59 {
        assert_eq!(owner_of(&owners, "a").await, Some(other));
        sleep(SECOND).await;
    }
    assert_eq!(directory.request_count("look_up"), 1);
    sleep(SECOND).await;
    assert_eq!(owner_of(&owners, "a").await, Some(other));
    assert_eq!(directory.request_count("look_up"), 2);
}

#[tokio::test(start_paused = true)]
async fn an_unowned_session_is_looked_up_once_a_second() {
    let (owners, directory, _) = owners().await;
    for _ in 0..10 {
        assert_eq!(owner_of(&owners, "b").await, None);
    }
    assert_eq!(directory.request_count("look_up"), 1);
    sleep(SECOND).await;
    directory
        .memory
        .register(instance(3), &[session("b")])
        .await
        .unwrap();
    assert!(owner_of(&owners, "b").await.is_some());
}

#[tokio::test(start_paused = true)]
async fn concurrent_requests_for_a_session_share_one_lookup() {
    let (owners, directory, other) = owners().await;
    directory.set(Fault::Stopped);
    let lookups: Vec<_> = (0..100).map(|_| spawn_lookup(&owners, "a")).collect();
    settle().await;
    assert_eq!(directory.request_count("look_up"), 1);
    directory.set(Fault::None);
    for answer in lookups {
        assert_eq!(answer.await.unwrap().unwrap(), Found::Owner(other));
    }
    assert_eq!(directory.request_count("look_up"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lookup_continues_when_its_first_request_is_dropped() {
    let (owners, directory, other) = owners().await;
    directory.set(Fault::Stopped);
    let first = spawn_lookup(&owners, "a");
    settle().await;
    let second = spawn_lookup(&owners, "a");
    settle().await;
    first.abort();
    settle().await;
    directory.set(Fault::None);
    assert_eq!(second.await.unwrap().unwrap(), Found::Owner(other));
    assert_eq!(directory.request_count("look_up"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lookup_without_waiting_requests_leaves_no_state() {
    let (owners, directory, other) = owners().await;
    directory.set(Fault::Stopped);
    let lookups: Vec<_> = (0..100)
        .map(|id| spawn_lookup(&owners, &id.to_string()))
        .collect();
    settle().await;
    assert_eq!(owners.0.state().lookups.len(), 100);
    for answer in lookups {
        answer.abort();
    }
    settle().await;
    assert_eq!(owners.0.state().lookups.len(), 0);
    assert_eq!(owners.0.lookup_permits.available_permits(), MAX_LOOKUPS);
    directory.set(Fault::None);
    assert_eq!(owner_of(&owners, "a").await, Some(other));
}

#[tokio::test(start_paused = true)]
async fn a_thousand_lookups_run_at_once_and_none_waits_longer_than_the_timeout() {
    let (owners, directory, _) = owners().await;
    directory.set(Fault::Stopped);
    let started = Instant::now();
    let lookups: Vec<_> = (0..2 * MAX_LOOKUPS)
        .map(|id| spawn_lookup(&owners, &id.to_string()))
        .collect();
    settle().await;
    assert_eq!(directory.request_count("look_up"), MAX_LOOKUPS);
    for answer in lookups {
        let error = answer.await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the directory did not respond in time");
    }
    assert!(
        started.elapsed() <= DIRECTORY_TIMEOUT + Duration::from_millis(10),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(owners.0.state().lookups.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_lookup_is_not_cached() {
    let (owners, directory, other) = owners().await;
    directory.set(Fault::Fails);
    let error = owners.find(hash("a")).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the directory failed: the directory is switched off"
    );
    directory.set(Fault::None);
    assert_eq!(owner_of(&owners, "a").await, Some(other));
}

#[tokio::test(start_paused = true)]
async fn an_owner_inserted_during_a_lookup_is_newer_than_its_result() {
    let (owners, directory, other) = owners().await;
    directory.set(Fault::Stopped);
    let late = spawn_lookup(&owners, "a");
    settle().await;
    let winner = Ownership::begin(instance(3));
    owners.insert(hash("a"), winner);
    directory.set(Fault::None);
    assert_eq!(late.await.unwrap().unwrap(), Found::Owner(other));
    assert_eq!(owner_of(&owners, "a").await, Some(winner));
}

#[tokio::test(start_paused = true)]
async fn a_session_of_this_instance_is_looked_up_each_time() {
    let (owners, directory, other) = owners().await;
    let me = Owner {
        incarnation: owners.0.this_instance,
        ..instance(3)
    };
    owners.insert(hash("a"), Ownership::begin(me));
    assert_eq!(owner_of(&owners, "a").await, Some(other));
    let mine = register(&directory, me, "c").await;
    for lookups in 2..4 {
        assert_eq!(owner_of(&owners, "c").await, Some(mine));
        assert_eq!(directory.request_count("look_up"), lookups);
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_given_owner_is_invalidated() {
    let (owners, directory, other) = owners().await;
    let winner = Ownership::begin(instance(3));
    owners.insert(hash("a"), winner);
    owners.invalidate(hash("a"), other);
    assert_eq!(owner_of(&owners, "a").await, Some(winner));
    owners.invalidate(hash("a"), winner);
    assert_eq!(
        owner_of(&owners, "a").await,
        Some(other),
        "the session is looked up again"
    );
    assert_eq!(directory.request_count("look_up"), 1);
}

#[tokio::test(start_paused = true)]
async fn invented_ids_do_not_evict_owners() {
    let (owners, directory, other) = owners().await;
    assert_eq!(owner_of(&owners, "a").await, Some(other));
    for id in 0..MAX_OWNERS + 1 {
        assert_eq!(owner_of(&owners, &id.to_string()).await, None);
    }
    let lookups = directory.request_count("look_up");
    assert_eq!(owner_of(&owners, "a").await, Some(other));
    assert_eq!(directory.request_count("look_up"), lookups);
    let state = owners.0.state();
    assert!(state.unowned.len() <= MAX_UNOWNED && state.owners.len() == 1);
}
