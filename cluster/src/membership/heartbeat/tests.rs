use tokio::{
    sync::mpsc::UnboundedReceiver,
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::*;
use crate::{
    directory::{
        Claim, DIRECTORY_TIMEOUT, LEASE_TTL, MemoryDirectory, SessionSnapshot,
        contract::{claim_from, instance, is_alive, session},
        faulty::{Fault, Faulty},
    },
    ids::{Record, SessionHash},
    sessions::{Relinquished, RelinquishedTo},
};

const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(10);

/// An instance that sends heartbeats, with its own link to the directory.
struct Instance {
    me: Owner,
    link: Faulty,
    sessions: Arc<Sessions>,
    relinquished_sessions: UnboundedReceiver<Relinquished>,
    heartbeat: Arc<Heartbeat>,
    task: JoinHandle<()>,
}

impl Instance {
    fn new(number: u8, memory: &MemoryDirectory) -> Self {
        let me = instance(number);
        let link = Faulty::new(memory.clone());
        let (sessions, relinquished_sessions) = Sessions::new(me.incarnation);
        let turned_away = Arc::new(TurnedAway::new(Duration::ZERO));
        let directory = Limited::new(link.clone());
        let answers = Answers::new(directory.clone());
        let heartbeat =
            Heartbeat::new(me, directory, sessions.clone(), turned_away, answers, false);
        let task = tokio::spawn(heartbeat.clone().run());
        Self {
            me,
            link,
            sessions,
            relinquished_sessions,
            heartbeat,
            task,
        }
    }

    /// Starts an instance with already written sessions that have these ids.
    async fn with(number: u8, memory: &MemoryDirectory, ids: &[&str]) -> Self {
        let instance = Self::new(number, memory);
        for id in ids {
            instance.sessions.begin(id, session(id).params);
            instance
                .sessions
                .wait_until_written(session(id).session)
                .await;
        }
        instance.until_consistent().await;
        instance
    }

    fn is_consistent(&self) -> bool {
        self.heartbeat.consistent_since().is_some()
    }

    async fn until_consistent(&self) {
        while !self.is_consistent() {
            sleep(STEP).await;
        }
    }

    async fn until_not_consistent(&self) {
        while self.is_consistent() {
            sleep(STEP).await;
        }
    }

    async fn look_up(&self, session: SessionHash) -> SessionSnapshot {
        self.link.look_up(session).await.unwrap()
    }

    /// Returns `true` if the instance would respond with 404.
    async fn would_deny(&self, session: SessionHash) -> bool {
        let snapshot = self.look_up(session).await;
        snapshot.record.is_none() && self.heartbeat.proves_absence(&snapshot.leases)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn stored_owner(memory: &MemoryDirectory, id: &str) -> Option<Owner> {
    memory
        .load(session(id).session)
        .await
        .unwrap()
        .map(|entry| entry.ownership.owner)
}

/// The report is sent within `MIN_INTERVAL`, in case the instance dies soon afterwards.
#[tokio::test(start_paused = true)]
async fn a_client_that_was_turned_away_is_reported_without_delay() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    sleep(5 * SECOND).await;
    for _ in 0..3 {
        first.heartbeat.turned_away.record();
        sleep(MIN_INTERVAL + STEP).await;
        let age = memory.leases().await.unwrap().turned_away;
        assert!(age.is_some_and(|age| age <= MIN_INTERVAL + STEP), "{age:?}");
    }
}

/// The machine was suspended, so its clock has not advanced. Clients may have been waiting for it in the meantime.
#[tokio::test(start_paused = true)]
async fn a_suspension_of_the_machine_is_reported_by_the_first_current_heartbeat() {
    for suspended in [600, 2_000, 5_000, 20_000].map(Duration::from_millis) {
        let memory = MemoryDirectory::default();
        let first = Instance::with(1, &memory, &[]).await;
        sleep(5 * SECOND).await;
        assert_eq!(memory.leases().await.unwrap().turned_away, None);
        memory.step_clock(suspended);
        loop {
            sleep(STEP).await;
            let leases = memory.leases().await.unwrap();
            let age = leases.get(first.me.incarnation).map(|lease| lease.age);
            if let Some(age) = age.filter(|age| *age < suspended) {
                let reported = leases.turned_away;
                assert!(
                    reported.is_some_and(|reported| reported <= age),
                    "{suspended:?} {age:?} {reported:?}"
                );
                break;
            }
        }
    }
}

/// The instance cannot know whether the directory's clock has been set back in the meantime.
#[tokio::test(start_paused = true)]
async fn an_outage_of_the_directory_is_not_a_suspension() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    for fault in [Fault::Fails, Fault::Slow(240 * Duration::from_millis(1))] {
        first.link.set(fault);
        sleep(5 * SECOND).await;
        first.link.set(Fault::None);
        first.until_consistent().await;
        assert_eq!(memory.leases().await.unwrap().turned_away, None);
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_has_its_lease_for_as_long_as_it_sends_heartbeats() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    for _ in 0..60 {
        sleep(SECOND).await;
        assert!(is_alive(&memory, first.me).await && first.is_consistent());
    }
    first.task.abort();
    sleep(LEASE_TTL).await;
    assert!(!is_alive(&memory, first.me).await);
    assert!(!first.is_consistent(), "no heartbeat confirms it");
}

#[tokio::test(start_paused = true)]
async fn a_new_session_is_written_without_waiting_for_a_heartbeat() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    first.sessions.begin("a", session("a").params);
    timeout(
        STEP,
        first.sessions.wait_until_written(session("a").session),
    )
    .await
    .unwrap();
    assert_eq!(stored_owner(&memory, "a").await, Some(first.me));
}

#[tokio::test(start_paused = true)]
async fn an_open_session_is_known_until_it_is_closed() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &["living", "closed"]).await;
    first.sessions.on_closed("closed");
    sleep(Duration::from_secs(3 * 60 * 60)).await;
    assert_eq!(stored_owner(&memory, "living").await, Some(first.me));
    assert_eq!(stored_owner(&memory, "closed").await, None);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_session_is_removed_at_once() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &["a"]).await;
    first.sessions.on_deleted("a");
    timeout(
        STEP,
        first.sessions.wait_until_removed(session("a").session),
    )
    .await
    .unwrap();
    assert_eq!(stored_owner(&memory, "a").await, None);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_deleted_while_the_directory_is_down_is_removed_later() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &["a"]).await;
    first.link.set(Fault::Fails);
    first.sessions.on_deleted("a");
    sleep(30 * SECOND).await;
    assert_eq!(stored_owner(&memory, "a").await, Some(first.me));
    first.link.set(Fault::None);
    timeout(
        SECOND,
        first.sessions.wait_until_removed(session("a").session),
    )
    .await
    .unwrap();
    assert_eq!(stored_owner(&memory, "a").await, None);
}

/// Checks that after `event` all sessions are written before the directory is consistent again.
async fn assert_all_is_written_before_consistency(
    event: impl AsyncFnOnce(&MemoryDirectory, &Faulty),
) {
    let memory = MemoryDirectory::default();
    let ids: Vec<String> = (0..500).map(|id| id.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let first = Instance::with(1, &memory, &ids).await;
    let before = first.heartbeat.consistent_since().unwrap();
    event(&memory, &first.link).await;
    let started = Instant::now();
    while first
        .heartbeat
        .consistent_since()
        .is_none_or(|since| since == before)
    {
        sleep(Duration::from_millis(1)).await;
        assert!(
            started.elapsed() < 4 * SECOND,
            "the directory is never consistent again"
        );
    }
    for id in ids {
        assert_eq!(stored_owner(&memory, id).await, Some(first.me));
    }
    assert!(is_alive(&memory, first.me).await);
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_all_is_written_before_the_directory_is_consistent() {
    assert_all_is_written_before_consistency(async |memory, _| memory.restart()).await;
}

#[tokio::test(start_paused = true)]
async fn after_a_flush_all_is_written_before_the_directory_is_consistent() {
    assert_all_is_written_before_consistency(async |memory, _| memory.flush()).await;
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_and_a_restart_all_is_written_before_the_directory_is_consistent() {
    assert_all_is_written_before_consistency(async |memory, link| {
        link.set(Fault::Fails);
        sleep(3 * SECOND).await;
        memory.restart();
        sleep(SECOND).await;
        link.set(Fault::None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn after_a_stall_and_a_flush_all_is_written_before_the_directory_is_consistent() {
    assert_all_is_written_before_consistency(async |memory, link| {
        link.set(Fault::Stopped);
        sleep(10 * SECOND).await;
        memory.flush();
        link.set(Fault::None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn after_a_reconnect_everything_is_written_again_once() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &["a"]).await;
    first.link.set(Fault::Fails);
    first.until_not_consistent().await;
    let registrations = first.link.request_count("register");
    first.link.set(Fault::None);
    first.until_consistent().await;
    assert_eq!(first.link.request_count("register"), registrations + 1);
    sleep(60 * SECOND).await;
    assert_eq!(
        first.link.request_count("register"),
        registrations + 1,
        "once is enough"
    );
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_does_not_answer_stops_being_consistent_within_a_heartbeat_and_its_timeout()
 {
    for fault in [Fault::Stopped, Fault::Fails, Fault::NoReply] {
        let memory = MemoryDirectory::default();
        let first = Instance::with(1, &memory, &["a"]).await;
        first.link.set(fault);
        timeout(
            HEARTBEAT_INTERVAL + DIRECTORY_TIMEOUT + STEP,
            first.until_not_consistent(),
        )
        .await
        .unwrap();
        sleep(60 * SECOND).await;
        assert!(!first.is_consistent());
        assert!(
            first.sessions.is_local(session("a").session),
            "its session stays open"
        );
        first.link.set(Fault::None);
        timeout(2 * SECOND, first.until_consistent()).await.unwrap();
        assert_eq!(stored_owner(&memory, "a").await, Some(first.me));
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_missing_in_an_empty_directory_is_not_reported_missing() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &["living"]).await;
    let second = Instance::with(2, &memory, &[]).await;
    sleep(SETTLE_PERIOD).await;
    assert!(second.would_deny(session("unknown").session).await);
    for lose_all in [MemoryDirectory::restart, MemoryDirectory::flush] {
        lose_all(&memory);
        let started = Instant::now();
        while started.elapsed() < 10 * SECOND {
            assert!(!second.would_deny(session("living").session).await);
            sleep(STEP).await;
        }
        assert_eq!(stored_owner(&memory, "living").await, Some(first.me));
        assert!(
            second.would_deny(session("unknown").session).await,
            "all sessions have been written again by then"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_has_just_started_reports_no_session_missing() {
    let memory = MemoryDirectory::default();
    let first = Instance::new(1, &memory);
    let started = Instant::now();
    while started.elapsed() < SETTLE_PERIOD {
        assert!(!first.would_deny(session("unknown").session).await);
        sleep(STEP).await;
    }
    sleep(STEP).await;
    assert!(first.would_deny(session("unknown").session).await);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_has_just_started_relies_on_a_settled_one() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    sleep(SETTLE_PERIOD + HEARTBEAT_INTERVAL).await;
    let second = Instance::with(2, &memory, &[]).await;
    assert!(second.would_deny(session("unknown").session).await);
    // But not after the directory has lost its data.
    memory.restart();
    sleep(2 * HEARTBEAT_INTERVAL).await;
    assert!(first.is_consistent() && second.is_consistent());
    assert!(!second.would_deny(session("unknown").session).await);
    sleep(SETTLE_PERIOD).await;
    assert!(second.would_deny(session("unknown").session).await);
}

#[tokio::test(start_paused = true)]
async fn a_lookup_before_a_restart_proves_nothing_after_it() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    sleep(SETTLE_PERIOD).await;
    let snapshot = first.look_up(session("unknown").session).await;
    assert!(snapshot.record.is_none() && first.heartbeat.proves_absence(&snapshot.leases));
    memory.restart();
    sleep(10 * SECOND).await;
    assert!(!first.heartbeat.proves_absence(&snapshot.leases));
}

/// An instance saw the owner without a lease, but claims the session only once it has one again.
#[tokio::test(start_paused = true)]
async fn a_session_cannot_be_claimed_after_its_owner_returned() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["wanted"]).await;
    let second = Instance::with(2, &memory, &[]).await;
    sleep(SETTLE_PERIOD + HEARTBEAT_INTERVAL).await;
    let wanted = session("wanted").session;
    first.link.set(Fault::Fails);
    while is_alive(&memory, first.me).await {
        sleep(STEP).await;
    }
    let read = memory.load(wanted).await.unwrap().unwrap().ownership;
    first.link.set(Fault::None);
    first.until_consistent().await;
    let claimed = read.claimed_by(second.me);
    let claim = memory.claim(wanted, read, claimed).await.unwrap();
    let current = memory.load(wanted).await.unwrap().unwrap().ownership;
    assert_eq!(claim, Claim::Lost(Record::Owned(current)));
    assert!(current.owner == first.me && current.epoch > read.epoch);
    sleep(10 * SECOND).await;
    assert!(first.sessions.is_local(wanted) && first.relinquished_sessions.try_recv().is_err());
}

/// The directory lost the record while the owner was stalled. The owner then rewrites it unchanged.
#[tokio::test(start_paused = true)]
async fn a_session_cannot_be_claimed_on_a_record_read_before_its_loss() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["wanted"]).await;
    let second = Instance::with(2, &memory, &[]).await;
    let wanted = session("wanted").session;
    let read = memory.load(wanted).await.unwrap().unwrap().ownership;
    first.link.set(Fault::Fails);
    memory.restart();
    sleep(SETTLE_PERIOD + LEASE_TTL).await;
    first.link.set(Fault::None);
    first.until_consistent().await;
    let claim = memory.claim(wanted, read, read.claimed_by(second.me)).await;
    let current = memory.load(wanted).await.unwrap().unwrap().ownership;
    assert_eq!(claim.unwrap(), Claim::Lost(Record::Owned(current)));
    assert!(current.owner == first.me && current.epoch > read.epoch);
    assert!(first.sessions.is_local(wanted) && first.relinquished_sessions.try_recv().is_err());
}

/// The instance that claimed the session after the snapshot has yet to rewrite it.
#[tokio::test(start_paused = true)]
async fn an_owner_that_returns_to_older_data_does_not_supersede_a_later_claim() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["a"]).await;
    let mut second = Instance::with(2, &memory, &[]).await;
    let snapshot = memory.take_snapshot();
    first.link.set(Fault::Fails);
    sleep(2 * LEASE_TTL).await;
    let claim = claim_from(&memory, session("a").session, first.me, second.me).await;
    assert_eq!(claim, Claim::Won);
    second.sessions.begin("a", session("a").params);
    sleep(SECOND).await;
    second.link.set(Fault::Fails);
    memory.load_snapshot(&snapshot);
    first.link.set(Fault::None);
    first.until_consistent().await;
    second.link.set(Fault::None);
    sleep(2 * SETTLE_PERIOD).await;
    assert_eq!(stored_owner(&memory, "a").await, Some(second.me));
    assert!(second.relinquished_sessions.try_recv().is_err());
    assert_eq!(
        first.relinquished_sessions.try_recv().unwrap().to,
        RelinquishedTo::Owner(second.me)
    );
}

/// The reply to acquiring the lease was lost. The next heartbeat finds a lease, which must not count as one that never lapsed.
#[tokio::test(start_paused = true)]
async fn the_lapse_of_a_lease_that_was_acquired_without_a_reply_is_detected() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &["a"]).await;
    let _settled = Instance::with(2, &memory, &[]).await;
    sleep(SETTLE_PERIOD + HEARTBEAT_INTERVAL).await;
    let read = memory.load(session("a").session).await.unwrap().unwrap();
    memory.release_lease(first.me).await.unwrap();
    first.link.set(Fault::NoReplyAt("acquire_lease"));
    first.until_not_consistent().await;
    while !is_alive(&memory, first.me).await {
        sleep(STEP).await;
    }
    first.link.set(Fault::None);
    first.until_consistent().await;
    let current = memory.load(session("a").session).await.unwrap().unwrap();
    assert!(current.ownership.epoch > read.ownership.epoch);
}

#[tokio::test(start_paused = true)]
async fn a_session_claimed_in_the_meantime_is_relinquished() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["claimed", "kept"]).await;
    let second = instance(2);
    first.link.set(Fault::Stopped);
    sleep(10 * SECOND).await;
    assert!(!is_alive(&memory, first.me).await);
    memory
        .acquire_lease(second, &Status::default())
        .await
        .unwrap();
    let claim = claim_from(&memory, session("claimed").session, first.me, second).await;
    assert_eq!(claim, Claim::Won);
    first.link.set(Fault::None);
    first.until_consistent().await;
    let relinquished = first.relinquished_sessions.recv().await.unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("claimed", RelinquishedTo::Owner(second))
    );
    assert!(first.relinquished_sessions.try_recv().is_err());
    assert!(
        !first.sessions.is_local(session("claimed").session)
            && first.sessions.is_local(session("kept").session)
    );
    assert_eq!(stored_owner(&memory, "claimed").await, Some(second));
}

#[tokio::test(start_paused = true)]
async fn of_two_instances_with_one_session_one_keeps_it_after_a_restart() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["a"]).await;
    let mut second = Instance::with(2, &memory, &[]).await;
    // The first instance does not notice the claim in time.
    first.link.set(Fault::Fails);
    sleep(10 * SECOND).await;
    claim_from(&memory, session("a").session, first.me, second.me).await;
    second.sessions.begin("a", session("a").params);
    memory.restart();
    first.link.set(Fault::None);
    sleep(5 * SECOND).await;
    assert!(first.is_consistent() && second.is_consistent());
    let are_local =
        [&first, &second].map(|instance| instance.sessions.is_local(session("a").session));
    let relinquished =
        [&mut first, &mut second].map(|instance| instance.relinquished_sessions.try_recv().is_ok());
    assert_eq!(are_local.map(|are_local| !are_local), relinquished);
    let owner = stored_owner(&memory, "a").await;
    assert_eq!(
        are_local,
        [first.me, second.me].map(|me| owner == Some(me)),
        "exactly the owner has it"
    );
}

/// Two instances were suspended, the first one for longer. The second had claimed the session, but the directory has lost that claim, and
/// the first rewrites the session before the second does.
#[tokio::test(start_paused = true)]
async fn an_owner_whose_record_is_replaced_relinquishes_its_session_with_its_next_heartbeat() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["a", "other"]).await;
    let second = Instance::with(2, &memory, &[]).await;
    let _third = Instance::with(3, &memory, &[]).await;
    first.link.set(Fault::Fails);
    sleep(10 * SECOND).await;
    claim_from(&memory, session("a").session, first.me, second.me).await;
    second.sessions.begin("a", session("a").params);
    second
        .sessions
        .wait_until_written(session("a").session)
        .await;
    second.link.set(Fault::Fails);
    sleep(SECOND).await;
    memory.restart();
    sleep(10 * SECOND).await;
    first.link.set(Fault::None);
    first.until_consistent().await;
    sleep(SECOND / 2).await;
    assert_eq!(stored_owner(&memory, "a").await, Some(first.me));
    second.link.set(Fault::None);
    while stored_owner(&memory, "a").await != Some(second.me) {
        sleep(STEP).await;
    }
    let relinquished = timeout(
        HEARTBEAT_INTERVAL + STEP,
        first.relinquished_sessions.recv(),
    );
    let relinquished = relinquished.await.unwrap().unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("a", RelinquishedTo::Owner(second.me))
    );
    assert!(first.sessions.is_local(session("other").session));
    assert!(second.sessions.is_local(session("a").session));
}

#[tokio::test(start_paused = true)]
async fn the_lease_outlives_the_writing_of_many_sessions_to_a_slow_directory() {
    let memory = MemoryDirectory::default();
    let first = Instance::with(1, &memory, &[]).await;
    first.link.set(Fault::Slow(400 * Duration::from_millis(1)));
    for id in 0..10_000 {
        first.sessions.begin(&id.to_string(), session("any").params);
    }
    first.link.memory.restart();
    let started = Instant::now();
    first.until_not_consistent().await;
    while !first.is_consistent() {
        assert!(
            started.elapsed() < 120 * SECOND,
            "the sessions are never all written"
        );
        sleep(100 * Duration::from_millis(1)).await;
        assert!(started.elapsed() < 3 * SECOND || is_alive(&memory, first.me).await);
    }
    assert_eq!(memory.sessions(), 10_000);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_deletions_to_a_slow_directory_does_not_delay_new_sessions() {
    let memory = MemoryDirectory::default();
    let ids: Vec<String> = (0..1_000).map(|id| id.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let first = Instance::with(1, &memory, &ids).await;
    first.link.set(Fault::Slow(300 * Duration::from_millis(1)));
    for id in ids {
        first.sessions.on_deleted(id);
    }
    let new = session("new");
    first.sessions.begin("new", new.params);
    let written = timeout(2 * SECOND, first.sessions.wait_until_written(new.session));
    assert!(
        written.await.is_ok(),
        "the new session waits for the deletions"
    );
    first.sessions.wait_until_all_removed().await;
    assert_eq!(memory.sessions(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_answers_only_every_second_request_still_gets_all_sessions() {
    let memory = MemoryDirectory::default();
    let ids: Vec<String> = (0..2_000).map(|id| id.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let first = Instance::with(1, &memory, &ids).await;
    memory.restart();
    for _ in 0..20 {
        first.link.set(Fault::Fails);
        sleep(700 * Duration::from_millis(1)).await;
        first.link.set(Fault::Slow(200 * Duration::from_millis(1)));
        sleep(900 * Duration::from_millis(1)).await;
    }
    assert_eq!(memory.sessions(), 2_000);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_shuts_down_releases_its_lease_and_is_not_consistent() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["a"]).await;
    first.heartbeat.stop();
    timeout(SECOND, &mut first.task).await.unwrap().unwrap();
    assert!(!is_alive(&memory, first.me).await && !first.is_consistent());
    assert_eq!(
        stored_owner(&memory, "a").await,
        Some(first.me),
        "other instances find the record, and can claim the session"
    );
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_shuts_down_does_not_wait_for_an_unreachable_directory() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &[]).await;
    first.link.set(Fault::Stopped);
    sleep(3 * SECOND).await;
    first.heartbeat.stop();
    timeout(3 * DIRECTORY_TIMEOUT, &mut first.task)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_session_that_the_directory_attributes_to_this_instance_is_not_lost() {
    let memory = MemoryDirectory::default();
    let mut first = Instance::with(1, &memory, &["a"]).await;
    first.link.set(Fault::WrongOwner(first.me));
    memory.restart();
    sleep(5 * SECOND).await;
    assert!(first.is_consistent() && first.relinquished_sessions.try_recv().is_err());
    assert!(first.sessions.is_local(session("a").session));
}
