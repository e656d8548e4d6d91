use std::{ops::Range, time::Duration};

use serde_json::json;
use tokio::time::{Instant, sleep};

use super::*;
use crate::{
    cluster::{Cluster, Options, join},
    directory::{
        Directory as _, MemoryDirectory,
        contract::instance,
        faulty::{Fault, Faulty},
    },
    relay::{filter::PeersFilter, wire::Secret},
};

const SECOND: Duration = Duration::from_secs(1);

/// A source that answers every call with an error whose message has this length in bytes.
struct FakeSource(usize);

impl AnswerSource for FakeSource {
    fn answer(&self, _session: &str, _event: &str) -> Option<Arc<ServerJsonRpcMessage>> {
        let error = json!({ "code": -1, "message": "x".repeat(self.0) });
        let answer = json!({ "jsonrpc": "2.0", "id": 1, "error": error });
        Some(Arc::new(serde_json::from_value(answer).unwrap()))
    }
}

/// An instance whose clients disconnect before their calls end.
struct Instance {
    cluster: Cluster,
    directory: Faulty,
    generation: Incarnation,
    source: Arc<dyn AnswerSource>,
}

impl Instance {
    fn start(length: usize) -> Self {
        let directory = Faulty::new(MemoryDirectory::default());
        let me = instance(1);
        let secret = Secret::default();
        Self {
            cluster: join(
                me,
                directory.clone(),
                PeersFilter::default(),
                secret,
                Options::default(),
            ),
            directory,
            generation: me.incarnation,
            source: Arc::new(FakeSource(length)),
        }
    }

    /// Reports ended calls in a session, all of whose clients have disconnected.
    fn end_calls(&self, session: &str, numbers: Range<u64>) {
        for number in numbers {
            let request = NumberOrString::Number(1);
            self.cluster.answers().on_detached(DetachedCall {
                call: Call::new(session.into(), &request, CallNumber::new(number)),
                generation: self.generation,
                event: "0/0".into(),
                source: Arc::downgrade(&self.source),
            });
        }
    }

    /// Returns a session's calls whose answers are stored, and the total size of these answers.
    async fn stored(&self, session: &str, numbers: Range<u64>) -> (Vec<u64>, usize) {
        let (mut calls, mut bytes) = (Vec::new(), 0);
        for number in numbers {
            let (session, call) = (SessionHash::of(session), CallNumber::new(number));
            let answer = self
                .directory
                .memory
                .answer(session, self.generation, call)
                .await;
            if let Some(answer) = answer.unwrap() {
                calls.push(number);
                bytes += answer.len();
            }
        }
        (calls, bytes)
    }
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_answers_is_stored() {
    let instance = Instance::start(10);
    instance
        .directory
        .set(Fault::Slow(Duration::from_millis(50)));
    instance.end_calls("a", 0..300);
    sleep(3 * SECOND).await;
    assert_eq!(instance.stored("a", 0..300).await.0.len(), 300);
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_shuts_down_writes_all_answers_within_its_limit() {
    let instance = Instance::start(10);
    instance
        .directory
        .set(Fault::Slow(Duration::from_millis(450)));
    sleep(SECOND).await;
    instance.end_calls("a", 0..720);
    let started = Instant::now();
    instance.cluster.leave(30 * SECOND).await;
    assert_eq!(instance.stored("a", 0..720).await.0.len(), 720);
    assert!(started.elapsed() < 10 * SECOND, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_instance_that_shuts_down_waits_for_the_directory_until_its_limit() {
    let instance = Instance::start(10);
    instance.directory.set(Fault::FailsAt("keep_answer"));
    instance.end_calls("a", 0..1);
    let recovery = async {
        sleep(20 * SECOND).await;
        instance.directory.set(Fault::None);
    };
    let started = Instant::now();
    tokio::join!(instance.cluster.leave(30 * SECOND), recovery);
    assert_eq!(instance.stored("a", 0..1).await.0, [0]);
    assert!(started.elapsed() < 22 * SECOND, "{:?}", started.elapsed());

    let instance = Instance::start(10);
    instance.directory.set(Fault::FailsAt("keep_answer"));
    instance.end_calls("a", 0..1);
    let started = Instant::now();
    instance.cluster.leave(30 * SECOND).await;
    let took = started.elapsed();
    assert!(took >= 30 * SECOND && took < 33 * SECOND, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_queued_during_a_long_outage_is_stored_after_it() {
    let instance = Instance::start(10);
    instance.directory.set(Fault::Fails);
    instance.end_calls("a", 0..1);
    sleep(120 * SECOND).await;
    instance.end_calls("a", 1..2);
    instance.directory.set(Fault::None);
    sleep(SECOND).await;
    assert_eq!(instance.stored("a", 0..2).await.0, [0, 1]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_queued_during_a_long_outage_is_stored_by_a_later_shutdown() {
    let instance = Instance::start(10);
    instance.directory.set(Fault::FailsAt("keep_answer"));
    instance.end_calls("a", 0..1);
    sleep(60 * SECOND).await;
    instance.directory.set(Fault::None);
    instance.cluster.leave(30 * SECOND).await;
    assert_eq!(instance.stored("a", 0..1).await.0, [0]);
}

#[tokio::test(start_paused = true)]
async fn the_answers_of_a_session_have_a_bound_in_the_directory() {
    let instance = Instance::start(60_000);
    instance.end_calls("other", 0..1);
    for number in 0..300 {
        instance.end_calls("a", number..number + 1);
        sleep(Duration::from_millis(20)).await;
        let (_, bytes) = instance.stored("a", 0..300).await;
        assert!(bytes <= 1024 * 1024, "{number}: {bytes}");
    }
    let (calls, _) = instance.stored("a", 0..300).await;
    let expected: Vec<u64> = (283..300).collect();
    assert_eq!(calls, expected, "the latest are stored");
    assert_eq!(instance.stored("other", 0..1).await.0, [0]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_stored_for_ten_minutes_after_its_call_ended() {
    let instance = Instance::start(10);
    instance.end_calls("a", 0..1);
    instance.directory.set(Fault::Fails);
    instance.end_calls("a", 1..2);
    sleep(300 * SECOND).await;
    instance.directory.set(Fault::None);
    sleep(299 * SECOND).await;
    assert_eq!(instance.stored("a", 0..2).await.0, [0, 1]);
    sleep(SECOND).await;
    assert_eq!(instance.stored("a", 0..2).await.0, [] as [u64; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_closes_keeps_the_answers_of_calls_that_have_ended() {
    let instance = Instance::start(10);
    instance.directory.set(Fault::Fails);
    instance.end_calls("a", 0..300);
    instance.cluster.answers().on_session_closed("a");
    sleep(20 * SECOND).await;
    instance.directory.set(Fault::None);
    sleep(SECOND).await;
    assert_eq!(instance.stored("a", 0..300).await.0.len(), 300);
}

#[tokio::test(start_paused = true)]
async fn a_cluster_that_is_dropped_writes_no_more() {
    let instance = Instance::start(10);
    sleep(SECOND).await;
    let Instance {
        cluster, directory, ..
    } = instance;
    let answers = Arc::downgrade(cluster.answers());
    drop(cluster);
    sleep(SECOND).await;
    assert!(answers.upgrade().is_none());
    let heartbeats = directory.request_count("heartbeat");
    sleep(60 * SECOND).await;
    assert_eq!(directory.request_count("heartbeat"), heartbeats);
}

/// A stream may be dropped outside of a runtime.
#[test]
fn an_answer_is_stored_wherever_its_stream_was_dropped() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let instance = runtime.block_on(async { Instance::start(10) });
    instance.end_calls("a", 0..1);
    let stored = runtime.block_on(async {
        sleep(Duration::from_millis(100)).await;
        instance.stored("a", 0..1).await.0
    });
    assert_eq!(stored, [0]);
}
