use tokio::{
    sync::mpsc::UnboundedReceiver,
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::*;
use crate::{
    directory::{
        Claim, DIRECTORY_TIMEOUT, LEASE_TTL, Look, MemoryDirectory,
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

    /// Starts an instance with sessions of these ids, which are written.
    async fn with(number: u8, memory: &MemoryDirectory, ids: &[&str]) -> Self {
        let instance = Self::new(number, memory);
        for id in ids {
            instance.sessions.begin(id, session(id).params);
            instance.sessions.until_written(session(id).session).await;
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

    async fn look(&self, session: SessionHash) -> Look {
        self.link.look(session).await.unwrap()
    }

    /// Returns `true` if the instance would answer 404.
    async fn would_deny(&self, session: SessionHash) -> bool {
        let look = self.look(session).await;
        look.record.is_none() && self.heartbeat.proves(&look.leases)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn owned(memory: &MemoryDirectory, id: &str) -> Option<Owner> {
    memory
        .load(session(id).session)
        .await
        .unwrap()
        .map(|entry| entry.ownership.owner)
}

/// An instance reports a turned-away client within `MIN_INTERVAL`, even if the instance dies soon after that.
#[tokio::test(start_paused = true)]
async fn a_client_that_was_turned_away_is_reported_without_delay() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    sleep(5 * SECOND).await;
    for _ in 0..3 {
        one.heartbeat.turned_away.record();
        sleep(MIN_INTERVAL + STEP).await;
        let age = memory.leases().await.unwrap().turned_away;
        assert!(age.is_some_and(|age| age <= MIN_INTERVAL + STEP), "{age:?}");
    }
}

/// The machine was suspended, so its clock has not advanced. Clients may have waited for it meanwhile.
#[tokio::test(start_paused = true)]
async fn a_suspension_of_the_machine_is_reported_by_the_first_current_heartbeat() {
    for suspended in [600, 2_000, 5_000, 20_000].map(Duration::from_millis) {
        let memory = MemoryDirectory::default();
        let one = Instance::with(1, &memory, &[]).await;
        sleep(5 * SECOND).await;
        assert_eq!(memory.leases().await.unwrap().turned_away, None);
        memory.step_clock(suspended);
        loop {
            sleep(STEP).await;
            let leases = memory.leases().await.unwrap();
            let age = leases.of(one.me.incarnation).map(|lease| lease.age);
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

/// The instance does not know whether the directory's clock was set back meanwhile.
#[tokio::test(start_paused = true)]
async fn an_outage_of_the_directory_is_no_suspension() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    for fault in [Fault::Fails, Fault::Slow(240 * Duration::from_millis(1))] {
        one.link.set(fault);
        sleep(5 * SECOND).await;
        one.link.set(Fault::None);
        one.until_consistent().await;
        assert_eq!(memory.leases().await.unwrap().turned_away, None);
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_has_its_lease_for_as_long_as_it_sends_heartbeats() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    for _ in 0..60 {
        sleep(SECOND).await;
        assert!(is_alive(&memory, one.me).await && one.is_consistent());
    }
    one.task.abort();
    sleep(LEASE_TTL).await;
    assert!(!is_alive(&memory, one.me).await);
    assert!(!one.is_consistent(), "no heartbeat confirms it");
}

#[tokio::test(start_paused = true)]
async fn a_new_session_is_written_without_waiting_for_a_heartbeat() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    one.sessions.begin("a", session("a").params);
    timeout(STEP, one.sessions.until_written(session("a").session))
        .await
        .unwrap();
    assert_eq!(owned(&memory, "a").await, Some(one.me));
}

#[tokio::test(start_paused = true)]
async fn an_open_session_is_known_until_it_is_closed() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &["living", "closed"]).await;
    one.sessions.on_closed("closed");
    sleep(Duration::from_secs(3 * 60 * 60)).await;
    assert_eq!(owned(&memory, "living").await, Some(one.me));
    assert_eq!(owned(&memory, "closed").await, None);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_session_is_removed_at_once() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &["a"]).await;
    one.sessions.on_deleted("a");
    timeout(STEP, one.sessions.until_removed(session("a").session))
        .await
        .unwrap();
    assert_eq!(owned(&memory, "a").await, None);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_deleted_while_the_directory_is_down_is_removed_later() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &["a"]).await;
    one.link.set(Fault::Fails);
    one.sessions.on_deleted("a");
    sleep(30 * SECOND).await;
    assert_eq!(owned(&memory, "a").await, Some(one.me));
    one.link.set(Fault::None);
    timeout(SECOND, one.sessions.until_removed(session("a").session))
        .await
        .unwrap();
    assert_eq!(owned(&memory, "a").await, None);
}

/// Checks that all sessions are written before the directory is consistent again, whatever `happens` to it.
async fn all_is_written_before_it_is_consistent(
    happens: impl AsyncFnOnce(&MemoryDirectory, &Faulty),
) {
    let memory = MemoryDirectory::default();
    let ids: Vec<String> = (0..500).map(|id| id.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let one = Instance::with(1, &memory, &ids).await;
    let before = one.heartbeat.consistent_since().unwrap();
    happens(&memory, &one.link).await;
    let begun = Instant::now();
    while one
        .heartbeat
        .consistent_since()
        .is_none_or(|since| since == before)
    {
        sleep(Duration::from_millis(1)).await;
        assert!(
            begun.elapsed() < 4 * SECOND,
            "the directory is never consistent again"
        );
    }
    for id in ids {
        assert_eq!(owned(&memory, id).await, Some(one.me));
    }
    assert!(is_alive(&memory, one.me).await);
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_all_is_written_before_it_is_consistent() {
    all_is_written_before_it_is_consistent(async |memory, _| memory.restart()).await;
}

#[tokio::test(start_paused = true)]
async fn after_a_flush_all_is_written_before_it_is_consistent() {
    all_is_written_before_it_is_consistent(async |memory, _| memory.flush()).await;
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_all_is_written_before_the_directory_is_consistent() {
    all_is_written_before_it_is_consistent(async |memory, link| {
        link.set(Fault::Fails);
        sleep(3 * SECOND).await;
        memory.restart();
        sleep(SECOND).await;
        link.set(Fault::None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn after_a_suspension_all_is_written_before_it_is_consistent() {
    all_is_written_before_it_is_consistent(async |memory, link| {
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
    let one = Instance::with(1, &memory, &["a"]).await;
    one.link.set(Fault::Fails);
    one.until_not_consistent().await;
    let entered = one.link.asked("register");
    one.link.set(Fault::None);
    one.until_consistent().await;
    assert_eq!(one.link.asked("register"), entered + 1);
    sleep(60 * SECOND).await;
    assert_eq!(one.link.asked("register"), entered + 1, "once is enough");
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_does_not_answer_is_not_consistent_within_a_heartbeat_and_its_limit() {
    for fault in [Fault::Stopped, Fault::Fails, Fault::NoReply] {
        let memory = MemoryDirectory::default();
        let one = Instance::with(1, &memory, &["a"]).await;
        one.link.set(fault);
        timeout(
            HEARTBEAT_INTERVAL + DIRECTORY_TIMEOUT + STEP,
            one.until_not_consistent(),
        )
        .await
        .unwrap();
        sleep(60 * SECOND).await;
        assert!(!one.is_consistent());
        assert!(
            one.sessions.is_local(session("a").session),
            "its session stays open"
        );
        one.link.set(Fault::None);
        timeout(2 * SECOND, one.until_consistent()).await.unwrap();
        assert_eq!(owned(&memory, "a").await, Some(one.me));
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_missing_in_an_empty_directory_is_not_reported_missing() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &["living"]).await;
    let two = Instance::with(2, &memory, &[]).await;
    sleep(SETTLE_PERIOD).await;
    assert!(two.would_deny(session("unknown").session).await);
    for lose_all in [MemoryDirectory::restart, MemoryDirectory::flush] {
        lose_all(&memory);
        let begun = Instant::now();
        while begun.elapsed() < 10 * SECOND {
            assert!(!two.would_deny(session("living").session).await);
            sleep(STEP).await;
        }
        assert_eq!(owned(&memory, "living").await, Some(one.me));
        assert!(
            two.would_deny(session("unknown").session).await,
            "all sessions are written again by then"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_has_just_started_reports_no_session_missing() {
    let memory = MemoryDirectory::default();
    let one = Instance::new(1, &memory);
    let begun = Instant::now();
    while begun.elapsed() < SETTLE_PERIOD {
        assert!(!one.would_deny(session("unknown").session).await);
        sleep(STEP).await;
    }
    sleep(STEP).await;
    assert!(one.would_deny(session("unknown").session).await);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_has_just_started_relies_on_a_settled_one() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    sleep(SETTLE_PERIOD + HEARTBEAT_INTERVAL).await;
    let two = Instance::with(2, &memory, &[]).await;
    assert!(two.would_deny(session("unknown").session).await);
    // Not after the directory has lost its data.
    memory.restart();
    sleep(2 * HEARTBEAT_INTERVAL).await;
    assert!(one.is_consistent() && two.is_consistent());
    assert!(!two.would_deny(session("unknown").session).await);
    sleep(SETTLE_PERIOD).await;
    assert!(two.would_deny(session("unknown").session).await);
}

#[tokio::test(start_paused = true)]
async fn a_look_before_a_restart_proves_nothing_after_it() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    sleep(SETTLE_PERIOD).await;
    let look = one.look(session("unknown").session).await;
    assert!(look.record.is_none() && one.heartbeat.proves(&look.leases));
    memory.restart();
    sleep(10 * SECOND).await;
    assert!(!one.heartbeat.proves(&look.leases));
}

/// An instance found that the owner had no lease. It claims the session only after the owner has renewed its lease.
#[tokio::test(start_paused = true)]
async fn a_session_cannot_be_claimed_after_its_owner_returned() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["wanted"]).await;
    let two = Instance::with(2, &memory, &[]).await;
    sleep(SETTLE_PERIOD + HEARTBEAT_INTERVAL).await;
    let wanted = session("wanted").session;
    one.link.set(Fault::Fails);
    while is_alive(&memory, one.me).await {
        sleep(STEP).await;
    }
    let read = memory.load(wanted).await.unwrap().unwrap().ownership;
    one.link.set(Fault::None);
    one.until_consistent().await;
    let claims = read.claimed_by(two.me);
    let claim = memory.claim(wanted, read, claims).await.unwrap();
    let current = memory.load(wanted).await.unwrap().unwrap().ownership;
    assert_eq!(claim, Claim::Lost(Record::Owned(current)));
    assert!(current.owner == one.me && current.epoch > read.epoch);
    sleep(10 * SECOND).await;
    assert!(one.sessions.is_local(wanted) && one.relinquished_sessions.try_recv().is_err());
}

/// The directory lost the record while the owner was stalled. The owner writes the record again as it was.
#[tokio::test(start_paused = true)]
async fn a_session_cannot_be_claimed_on_a_record_read_before_its_loss() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["wanted"]).await;
    let two = Instance::with(2, &memory, &[]).await;
    let wanted = session("wanted").session;
    let read = memory.load(wanted).await.unwrap().unwrap().ownership;
    one.link.set(Fault::Fails);
    memory.restart();
    sleep(SETTLE_PERIOD + LEASE_TTL).await;
    one.link.set(Fault::None);
    one.until_consistent().await;
    let claim = memory.claim(wanted, read, read.claimed_by(two.me)).await;
    let current = memory.load(wanted).await.unwrap().unwrap().ownership;
    assert_eq!(claim.unwrap(), Claim::Lost(Record::Owned(current)));
    assert!(current.owner == one.me && current.epoch > read.epoch);
    assert!(one.sessions.is_local(wanted) && one.relinquished_sessions.try_recv().is_err());
}

/// The instance that claimed the session after the snapshot has not written it again.
#[tokio::test(start_paused = true)]
async fn an_owner_that_returns_to_older_data_does_not_supersede_a_later_claim() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["a"]).await;
    let mut two = Instance::with(2, &memory, &[]).await;
    let snapshot = memory.take_snapshot();
    one.link.set(Fault::Fails);
    sleep(2 * LEASE_TTL).await;
    let claim = claim_from(&memory, session("a").session, one.me, two.me).await;
    assert_eq!(claim, Claim::Won);
    two.sessions.begin("a", session("a").params);
    sleep(SECOND).await;
    two.link.set(Fault::Fails);
    memory.load_snapshot(&snapshot);
    one.link.set(Fault::None);
    one.until_consistent().await;
    two.link.set(Fault::None);
    sleep(2 * SETTLE_PERIOD).await;
    assert_eq!(owned(&memory, "a").await, Some(two.me));
    assert!(two.relinquished_sessions.try_recv().is_err());
    assert_eq!(
        one.relinquished_sessions.try_recv().unwrap().to,
        RelinquishedTo::Owner(two.me)
    );
}

/// The reply to the acquisition was lost. The next heartbeat finds a lease, which must not count as one that never lapsed.
#[tokio::test(start_paused = true)]
async fn the_lapse_of_a_lease_that_was_acquired_without_a_reply_is_detected() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &["a"]).await;
    let _settled = Instance::with(2, &memory, &[]).await;
    sleep(SETTLE_PERIOD + HEARTBEAT_INTERVAL).await;
    let read = memory.load(session("a").session).await.unwrap().unwrap();
    memory.release_lease(one.me).await.unwrap();
    one.link.set(Fault::NoReplyAt("acquire_lease"));
    one.until_not_consistent().await;
    while !is_alive(&memory, one.me).await {
        sleep(STEP).await;
    }
    one.link.set(Fault::None);
    one.until_consistent().await;
    let current = memory.load(session("a").session).await.unwrap().unwrap();
    assert!(current.ownership.epoch > read.ownership.epoch);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_was_claimed_meanwhile_is_relinquished() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["claimed", "kept"]).await;
    let two = instance(2);
    one.link.set(Fault::Stopped);
    sleep(10 * SECOND).await;
    assert!(!is_alive(&memory, one.me).await);
    memory.acquire_lease(two, &Status::default()).await.unwrap();
    let claim = claim_from(&memory, session("claimed").session, one.me, two).await;
    assert_eq!(claim, Claim::Won);
    one.link.set(Fault::None);
    one.until_consistent().await;
    let relinquished = one.relinquished_sessions.recv().await.unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("claimed", RelinquishedTo::Owner(two))
    );
    assert!(one.relinquished_sessions.try_recv().is_err());
    assert!(
        !one.sessions.is_local(session("claimed").session)
            && one.sessions.is_local(session("kept").session)
    );
    assert_eq!(owned(&memory, "claimed").await, Some(two));
}

#[tokio::test(start_paused = true)]
async fn of_two_instances_with_one_session_one_keeps_it_after_a_restart() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["a"]).await;
    let mut two = Instance::with(2, &memory, &[]).await;
    // The first instance does not detect the claim in time.
    one.link.set(Fault::Fails);
    sleep(10 * SECOND).await;
    claim_from(&memory, session("a").session, one.me, two.me).await;
    two.sessions.begin("a", session("a").params);
    memory.restart();
    one.link.set(Fault::None);
    sleep(5 * SECOND).await;
    assert!(one.is_consistent() && two.is_consistent());
    let are_local = [&one, &two].map(|instance| instance.sessions.is_local(session("a").session));
    let relinquished =
        [&mut one, &mut two].map(|instance| instance.relinquished_sessions.try_recv().is_ok());
    assert_eq!(are_local.map(|are_local| !are_local), relinquished);
    let owner = owned(&memory, "a").await;
    assert_eq!(
        are_local,
        [one.me, two.me].map(|me| owner == Some(me)),
        "exactly the owner has it"
    );
}

/// Two instances were suspended, the first one for longer. The second one had claimed the session, and the directory has lost that claim.
/// The first one writes the session again before the second one does.
#[tokio::test(start_paused = true)]
async fn an_owner_whose_record_is_replaced_relinquishes_its_session_with_its_next_heartbeat() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["a", "other"]).await;
    let two = Instance::with(2, &memory, &[]).await;
    let _three = Instance::with(3, &memory, &[]).await;
    one.link.set(Fault::Fails);
    sleep(10 * SECOND).await;
    claim_from(&memory, session("a").session, one.me, two.me).await;
    two.sessions.begin("a", session("a").params);
    two.sessions.until_written(session("a").session).await;
    two.link.set(Fault::Fails);
    sleep(SECOND).await;
    memory.restart();
    sleep(10 * SECOND).await;
    one.link.set(Fault::None);
    one.until_consistent().await;
    sleep(SECOND / 2).await;
    assert_eq!(owned(&memory, "a").await, Some(one.me));
    two.link.set(Fault::None);
    while owned(&memory, "a").await != Some(two.me) {
        sleep(STEP).await;
    }
    let relinquished = timeout(HEARTBEAT_INTERVAL + STEP, one.relinquished_sessions.recv());
    let relinquished = relinquished.await.unwrap().unwrap();
    assert_eq!(
        (&*relinquished.id, relinquished.to),
        ("a", RelinquishedTo::Owner(two.me))
    );
    assert!(one.sessions.is_local(session("other").session));
    assert!(two.sessions.is_local(session("a").session));
}

#[tokio::test(start_paused = true)]
async fn the_lease_outlives_the_writing_of_many_sessions_to_a_slow_directory() {
    let memory = MemoryDirectory::default();
    let one = Instance::with(1, &memory, &[]).await;
    one.link.set(Fault::Slow(400 * Duration::from_millis(1)));
    for id in 0..10_000 {
        one.sessions.begin(&id.to_string(), session("any").params);
    }
    one.link.memory.restart();
    let begun = Instant::now();
    one.until_not_consistent().await;
    while !one.is_consistent() {
        assert!(
            begun.elapsed() < 120 * SECOND,
            "the sessions are never all written"
        );
        sleep(100 * Duration::from_millis(1)).await;
        assert!(begun.elapsed() < 3 * SECOND || is_alive(&memory, one.me).await);
    }
    assert_eq!(memory.sessions(), 10_000);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_deletions_to_a_slow_directory_delays_no_new_session() {
    let memory = MemoryDirectory::default();
    let ids: Vec<String> = (0..1_000).map(|id| id.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let one = Instance::with(1, &memory, &ids).await;
    one.link.set(Fault::Slow(300 * Duration::from_millis(1)));
    for id in ids {
        one.sessions.on_deleted(id);
    }
    let new = session("new");
    one.sessions.begin("new", new.params);
    let written = timeout(2 * SECOND, one.sessions.until_written(new.session));
    assert!(
        written.await.is_ok(),
        "the new session waits for the deletions"
    );
    one.sessions.until_all_removed().await;
    assert_eq!(memory.sessions(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_answers_every_second_time_still_gets_all_sessions() {
    let memory = MemoryDirectory::default();
    let ids: Vec<String> = (0..2_000).map(|id| id.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let one = Instance::with(1, &memory, &ids).await;
    memory.restart();
    for _ in 0..20 {
        one.link.set(Fault::Fails);
        sleep(700 * Duration::from_millis(1)).await;
        one.link.set(Fault::Slow(200 * Duration::from_millis(1)));
        sleep(900 * Duration::from_millis(1)).await;
    }
    assert_eq!(memory.sessions(), 2_000);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_shuts_down_releases_its_lease_and_is_not_consistent() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["a"]).await;
    one.heartbeat.stop();
    timeout(SECOND, &mut one.task).await.unwrap().unwrap();
    assert!(!is_alive(&memory, one.me).await && !one.is_consistent());
    assert_eq!(
        owned(&memory, "a").await,
        Some(one.me),
        "other instances find the record, and can claim the session"
    );
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_shuts_down_does_not_wait_for_an_unreachable_directory() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &[]).await;
    one.link.set(Fault::Stopped);
    sleep(3 * SECOND).await;
    one.heartbeat.stop();
    timeout(3 * DIRECTORY_TIMEOUT, &mut one.task)
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_session_that_the_directory_attributes_to_this_instance_is_not_lost() {
    let memory = MemoryDirectory::default();
    let mut one = Instance::with(1, &memory, &["a"]).await;
    one.link.set(Fault::WrongOwner(one.me));
    memory.restart();
    sleep(5 * SECOND).await;
    assert!(one.is_consistent() && one.relinquished_sessions.try_recv().is_err());
    assert!(one.sessions.is_local(session("a").session));
}
