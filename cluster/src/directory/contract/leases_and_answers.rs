//! The part of the contract that covers leases and answers.

use bytes::Bytes;

use super::*;

pub(super) async fn a_heartbeat_does_not_acquire_a_lease(directory: &impl Directory) {
    let (me, status) = (instance(1), Status::default());
    let heartbeat = async || directory.heartbeat(me, &status).await.unwrap().was_alive;
    assert!(!heartbeat().await);
    assert!(!is_alive(directory, me).await);
    directory.acquire_lease(me, &status).await.unwrap();
    assert!(is_alive(directory, me).await);
    assert!(heartbeat().await);
    directory.release_lease(me).await.unwrap();
    assert!(!is_alive(directory, me).await);
    assert!(!heartbeat().await);
}

pub(super) async fn a_lease_has_what_its_instance_wrote(directory: &impl Directory) {
    let (me, other) = (instance(1), instance(2));
    let unknown = session("absent").session;
    let run = directory
        .heartbeat(me, &Status::default())
        .await
        .unwrap()
        .run;
    let statuses = [
        Status::default(),
        Status {
            written_in: Some(BackendRunId::new("another")),
            is_settled: true,
            has_late_answers: true,
            turned_away: Some(Duration::from_secs(10)),
            ..Status::default()
        },
        Status {
            written_in: Some(run.clone()),
            is_settled: false,
            has_late_answers: true,
            turned_away: Some(Duration::ZERO),
            ..Status::default()
        },
        Status {
            written_in: Some(run.clone()),
            is_settled: true,
            has_late_answers: false,
            ..Status::default()
        },
    ];
    // Any instance's report counts, and it outlives that instance's lease.
    let mut latest = None;
    for status in statuses {
        directory.acquire_lease(me, &status).await.unwrap();
        let SessionSnapshot { record, leases } = directory.look_up(unknown).await.unwrap();
        assert_eq!((record, &leases.run), (None, &run));
        let lease = leases.get(me.incarnation).unwrap();
        assert_eq!(lease.written_in, status.written_in);
        assert!(lease.age < Duration::from_secs(5), "{lease:?}");
        latest = [latest, status.turned_away].into_iter().flatten().min();
        assert_is_since(leases.turned_away, latest);
        let is_written = status.written_in.as_ref() == Some(&run);
        assert_eq!(leases.all_have_written(other.incarnation), is_written);
        assert!(
            leases.all_have_written(me.incarnation),
            "an instance does not wait for itself"
        );
        assert_eq!(lease.is_settled, status.is_settled);
        assert_eq!(leases.has_settled(), is_written && status.is_settled);
        assert_eq!(lease.has_late_answers, status.has_late_answers);
        assert_eq!(leases.have_late_answers(), status.has_late_answers);
    }
    directory.release_lease(me).await.unwrap();
    let leases = directory.leases().await.unwrap();
    assert!(leases.get(me.incarnation).is_none());
    assert_is_since(leases.turned_away, latest);
}

pub(super) async fn a_heartbeat_that_arrives_late_renews_the_lease_as_of_its_own_time(
    directory: &impl Directory,
) {
    let (me, second) = (instance(1), Duration::from_secs(1));
    let untimed = Status::default();
    let DirectoryTime(now) = directory.heartbeat(me, &untimed).await.unwrap().time;
    let created = |ago: Duration| Status {
        created_at: Some(DirectoryTime(now - ago.as_millis() as u64)),
        ..Status::default()
    };
    let age = async || {
        let leases = directory.leases().await.unwrap();
        leases.get(me.incarnation).map(|lease| lease.age)
    };
    directory
        .acquire_lease(me, &created(4 * second))
        .await
        .unwrap();
    assert!(age().await.is_some_and(|age| age >= 4 * second));
    assert!(
        directory
            .heartbeat(me, &created(3 * second))
            .await
            .unwrap()
            .was_alive
    );
    assert!(
        age()
            .await
            .is_some_and(|age| age >= 3 * second && age < 4 * second)
    );
    // An older heartbeat has been overtaken.
    assert!(
        directory
            .heartbeat(me, &created(5 * second))
            .await
            .unwrap()
            .was_alive
    );
    assert!(age().await.is_some_and(|age| age < 4 * second));
    assert!(directory.heartbeat(me, &untimed).await.unwrap().was_alive);
    assert!(age().await.is_some_and(|age| age < second));
    directory.release_lease(me).await.unwrap();
    directory
        .acquire_lease(me, &created(LEASE_TTL))
        .await
        .unwrap();
    assert_eq!(age().await, None, "this lease has lapsed already");
    assert!(!directory.heartbeat(me, &untimed).await.unwrap().was_alive);
}

/// A heartbeat created earlier arrives later, on another connection.
pub(super) async fn a_heartbeat_that_was_overtaken_does_not_replace_a_newer_status(
    directory: &impl Directory,
) {
    let (me, second) = (instance(1), Duration::from_secs(1));
    let heartbeat = async |status: &Status| directory.heartbeat(me, status).await.unwrap();
    directory
        .acquire_lease(me, &Status::default())
        .await
        .unwrap();
    let reply = heartbeat(&Status::default()).await;
    let older = Status {
        written_in: Some(reply.run),
        is_settled: true,
        created_at: Some(DirectoryTime(reply.time.0 - 2_000)),
        number: 1,
        ..Status::default()
    };
    let newer = Status {
        has_late_answers: true,
        created_at: Some(reply.time),
        number: 2,
        ..Status::default()
    };
    heartbeat(&newer).await;
    assert!(heartbeat(&older).await.was_alive);
    directory.acquire_lease(me, &older).await.unwrap();
    let leases = directory.leases().await.unwrap();
    let lease = leases.get(me.incarnation).unwrap();
    assert!(lease.age < second, "control: the time is not set back");
    assert_eq!(
        (&lease.written_in, lease.is_settled, lease.has_late_answers),
        (&None, false, true)
    );
    directory.release_lease(me).await.unwrap();
}

pub(super) async fn a_heartbeat_reports_once_that_a_record_of_its_instance_was_replaced(
    directory: &impl Directory,
) {
    let [former, owner, late] = [1, 2, 3].map(instance);
    let status = |number| Status {
        is_settled: true,
        number,
        ..Status::default()
    };
    let heartbeat = async |owner, number| {
        let reply = directory.heartbeat(owner, &status(number)).await.unwrap();
        (reply.was_alive, reply.was_replaced)
    };
    let [replaced, other] = ["replaced", "beside"].map(session);
    let later = Registration {
        epoch: replaced.epoch.next(),
        ..replaced.clone()
    };
    for instance in [former, owner] {
        directory.acquire_lease(instance, &status(1)).await.unwrap();
    }
    let both = [replaced.clone(), other];
    for _ in 0..2 {
        assert_eq!(directory.register(former, &both).await.unwrap(), []);
        assert_eq!(heartbeat(former, 2).await, (true, false));
    }
    for _ in 0..2 {
        let written = directory.register(owner, std::slice::from_ref(&later));
        assert_eq!(written.await.unwrap(), []);
        let leases = directory.leases().await.unwrap();
        let lease = leases.get(former.incarnation).unwrap();
        assert!(lease.is_settled, "the status is unchanged");
    }
    assert_eq!(
        heartbeat(former, 1).await,
        (true, true),
        "the first heartbeat was overtaken"
    );
    assert_eq!(heartbeat(former, 3).await, (true, true));
    assert_eq!(heartbeat(former, 4).await, (true, false), "once is enough");
    assert_eq!(heartbeat(owner, 4).await, (true, false));
    // An owner without a lease verifies its sessions anyway.
    directory.release_lease(owner).await.unwrap();
    let latest = Registration {
        epoch: later.epoch.next(),
        ..later
    };
    let written = directory.register(late, &[latest]).await;
    assert_eq!(written.unwrap(), []);
    assert!(!is_alive(directory, owner).await);
    assert_eq!(heartbeat(owner, 5).await, (false, false));
    directory.release_lease(former).await.unwrap();
}

/// Asserts that `read` is the time that was written, or up to 5 s more.
fn assert_is_since(read: Option<Duration>, written: Option<Duration>) {
    let is_since = match (read, written) {
        (Some(read), Some(written)) => read >= written && read - written < Duration::from_secs(5),
        (read, written) => read == written,
    };
    assert!(is_since, "{read:?} {written:?}");
}

pub(super) async fn an_answer_is_found_under_its_own_key_only(directory: &impl Directory) {
    let me = instance(1).incarnation;
    let (first, second) = (session("answer 1").session, session("answer 2").session);
    let answer = Bytes::from_static(b"{\"result\":\0}");
    let [seven, eight, last] = [7, 8, u64::MAX].map(CallNumber::new);
    directory
        .keep_answer(first, me, seven, answer.clone(), ANSWER_TTL)
        .await
        .unwrap();
    directory
        .keep_answer(first, me, last, Bytes::from_static(b"last"), ANSWER_TTL)
        .await
        .unwrap();
    assert_eq!(
        directory.answer(first, me, seven).await.unwrap(),
        Some(answer)
    );
    assert_eq!(
        directory.answer(first, me, last).await.unwrap().as_deref(),
        Some(&b"last"[..])
    );
    for (session, incarnation, call) in [
        (first, me, eight),
        (second, me, seven),
        (first, instance(1).incarnation, seven),
    ] {
        assert_eq!(
            directory.answer(session, incarnation, call).await.unwrap(),
            None
        );
    }
}

pub(super) async fn an_answer_that_was_removed_is_not_found(directory: &impl Directory) {
    let (me, session) = (instance(1).incarnation, session("answer 3").session);
    let [removed, kept] = [1, 2].map(CallNumber::new);
    let answer = Bytes::from_static(b"{}");
    for call in [removed, kept] {
        let write = directory.keep_answer(session, me, call, answer.clone(), ANSWER_TTL);
        write.await.unwrap();
    }
    for _ in 0..2 {
        directory.remove_answer(session, me, removed).await.unwrap();
        let found = directory.answer(session, me, removed).await.unwrap();
        assert_eq!(found, None, "a second removal changes nothing");
    }
    let found = directory.answer(session, me, kept).await.unwrap();
    assert_eq!(found, Some(answer));
}
