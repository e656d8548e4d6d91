use std::time::Duration;

use tokio::time::sleep;

use super::*;
use crate::directory::{
    ANSWER_TTL, Limited,
    contract::{self, instance, is_alive, session},
};

#[tokio::test]
async fn the_directory_in_memory_fulfils_the_contract() {
    contract::holds(MemoryDirectory::default()).await;
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_not_registered_again_is_known_for_an_hour() {
    let directory = MemoryDirectory::default();
    directory
        .register(instance(1), &[session("a")])
        .await
        .unwrap();
    sleep(RECORD_TTL - Duration::from_secs(1)).await;
    assert_eq!(directory.sessions(), 1);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(directory.load(session("a").session).await.unwrap(), None);
    assert_eq!(directory.sessions(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lease_lapses_after_six_seconds_and_is_not_renewed_then() {
    let directory = MemoryDirectory::default();
    let me = instance(1);
    let status = Status::default();
    directory.acquire_lease(me, &status).await.unwrap();
    sleep(LEASE_TTL - Duration::from_millis(1)).await;
    assert!(directory.heartbeat(me, &status).await.unwrap().was_alive);
    sleep(LEASE_TTL).await;
    assert!(!directory.heartbeat(me, &status).await.unwrap().was_alive);
    assert!(!is_alive(&directory, me).await);
}

#[tokio::test(start_paused = true)]
async fn answers_expire_and_the_oldest_are_evicted_at_the_limit() {
    let directory = MemoryDirectory::default();
    let (session, me) = (session("a").session, instance(1).incarnation);
    let large = Bytes::from(vec![b' '; 1024 * 1024]);
    for call in 0..100 {
        directory
            .keep_answer(
                session,
                me,
                CallNumber::new(call),
                large.clone(),
                ANSWER_TTL,
            )
            .await
            .unwrap();
    }
    assert!(directory.state().answer_bytes <= MAX_ANSWERS);
    assert_eq!(
        directory
            .answer(session, me, CallNumber::new(0))
            .await
            .unwrap(),
        None
    );
    assert!(
        directory
            .answer(session, me, CallNumber::new(99))
            .await
            .unwrap()
            .is_some()
    );
    directory
        .keep_answer(
            session,
            me,
            CallNumber::new(99),
            Bytes::from_static(b"again"),
            ANSWER_TTL,
        )
        .await
        .unwrap();
    assert_eq!(
        directory
            .answer(session, me, CallNumber::new(99))
            .await
            .unwrap()
            .unwrap(),
        "again"
    );
    sleep(ANSWER_TTL).await;
    assert_eq!(
        directory
            .answer(session, me, CallNumber::new(99))
            .await
            .unwrap(),
        None
    );
    directory
        .heartbeat(instance(1), &Status::default())
        .await
        .unwrap();
    let state = directory.state();
    assert_eq!(
        (
            state.answer_bytes,
            state.answers.len(),
            state.write_order.len()
        ),
        (0, 0, 0)
    );
}

#[tokio::test]
async fn an_answer_that_is_too_large_is_not_stored() {
    let directory = Limited::new(MemoryDirectory::default());
    let (session, me) = (session("a").session, instance(1).incarnation);
    let largest = Bytes::from(vec![b' '; crate::directory::MAX_ANSWER]);
    let too_large = Bytes::from(vec![b' '; crate::directory::MAX_ANSWER + 1]);
    directory
        .keep_answer(session, me, CallNumber::new(1), largest, ANSWER_TTL)
        .await
        .unwrap();
    let error = directory
        .keep_answer(session, me, CallNumber::new(2), too_large, ANSWER_TTL)
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "the answer is too large to store");
    assert_eq!(
        directory
            .answer(session, me, CallNumber::new(2))
            .await
            .unwrap(),
        None
    );
}

#[tokio::test]
async fn debug_shows_the_number_of_sessions() {
    let directory = MemoryDirectory::default();
    directory
        .register(instance(1), &[session("secret")])
        .await
        .unwrap();
    assert_eq!(format!("{directory:?}"), "MemoryDirectory { sessions: 1 }");
}
