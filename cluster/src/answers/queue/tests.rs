use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn key(session: &str, call: u64) -> AnswerKey {
    AnswerKey {
        session: SessionHash::of(session),
        generation: "0123456789abcdef".parse().unwrap(),
        call: CallNumber::new(call),
    }
}

fn text(length: usize) -> Bytes {
    Bytes::from(vec![b'x'; length])
}

/// A queue and its clock.
struct Harness {
    queue: AnswerQueue,
    now: Instant,
}

impl Harness {
    fn new() -> Self {
        Self {
            queue: AnswerQueue::default(),
            now: Instant::now(),
        }
    }

    /// Puts an answer of the given length, and returns the bound that it exceeds, if any.
    fn put(&mut self, session: &str, call: u64, length: usize) -> Option<Bound> {
        let place = self.queue.reserve(self.now);
        let exceeded = self.queue.put(place, key(session, call), text(length));
        self.queue.release(place);
        exceeded
    }

    /// Expires answers, then starts and returns every operation that can be started now.
    fn start(&mut self) -> Vec<Operation> {
        self.queue.expire(self.now);
        std::iter::from_fn(|| self.queue.next_operation(self.now)).collect()
    }

    fn complete(&mut self, operations: Vec<Operation>, succeeded: bool) {
        for operation in operations {
            self.queue.complete(operation, succeeded, self.now);
        }
    }

    fn write_all(&mut self) {
        loop {
            let operations = self.start();
            if operations.is_empty() {
                return;
            }
            self.complete(operations, true);
        }
    }

    fn assert_empty(&self) {
        let AnswerQueue {
            answers,
            removals,
            waiting,
            unwritten,
            places,
            sessions,
            size,
            in_flight,
            bytes_in_flight,
            ..
        } = &self.queue;
        assert!(answers.is_empty() && removals.is_empty() && places.is_empty());
        assert!(waiting.is_empty() && unwritten.is_empty() && sessions.is_empty());
        assert_eq!((*size, *in_flight, *bytes_in_flight), (0, 0, 0));
    }
}

/// Returns each operation's call, and `true` if the operation writes the call's answer.
fn summarize(operations: &[Operation]) -> Vec<(CallNumber, bool)> {
    let operations = operations.iter();
    operations
        .map(|operation| (operation.key.call, operation.text.is_some()))
        .collect()
}

fn writes(calls: impl IntoIterator<Item = u64>) -> Vec<(CallNumber, bool)> {
    let calls = calls.into_iter();
    calls.map(|call| (CallNumber::new(call), true)).collect()
}

fn removals(calls: impl IntoIterator<Item = u64>) -> Vec<(CallNumber, bool)> {
    let calls = calls.into_iter();
    calls.map(|call| (CallNumber::new(call), false)).collect()
}

#[test]
fn answers_are_written_in_reservation_order() {
    let mut harness = Harness::new();
    let first = harness.queue.reserve(harness.now);
    harness.put("a", 2, 10);
    harness.queue.put(first, key("a", 1), text(10));
    harness.put("b", 3, 10);
    assert_eq!(summarize(&harness.start()), writes([1, 2, 3]));
}

#[test]
fn a_failed_write_keeps_its_place_and_is_retried_after_half_a_second() {
    let mut harness = Harness::new();
    for call in 0..3 {
        harness.put("a", call, 10);
    }
    for _ in 0..1_000 {
        let operations = harness.start();
        assert_eq!(summarize(&operations), writes([0, 1, 2]));
        harness.complete(operations, false);
        assert!(harness.start().is_empty());
        let paused_until = harness.now + RETRY_DELAY;
        assert_eq!(harness.queue.next_deadline(), Some(paused_until));
        harness.now = paused_until;
    }
    harness.put("a", 3, 10);
    assert_eq!(summarize(&harness.start()), writes([0, 1, 2, 3]));
}

#[test]
fn operations_in_flight_are_bounded_in_bytes_and_in_number() {
    let mut harness = Harness::new();
    for call in 0..5 {
        harness.put(&call.to_string(), call, 1_000_000);
    }
    let mut operations = harness.start();
    assert_eq!(summarize(&operations), writes(0..4));
    let second = operations.remove(1);
    harness.complete(vec![second], true);
    assert_eq!(summarize(&harness.start()), writes([4]));

    let mut harness = Harness::new();
    for call in 0..1_000 {
        harness.put("a", call, 10);
    }
    assert_eq!(summarize(&harness.start()), writes(0..256));
    assert!(harness.start().is_empty());
}

#[test]
fn the_oldest_answer_of_a_session_is_evicted_above_its_bound() {
    let mut harness = Harness::new();
    harness.put("b", 9, 1_000_000);
    for call in 0..10 {
        assert_eq!(harness.put("a", call, 100_000), None);
    }
    // An answer that has not been written yet needs no removal.
    assert_eq!(harness.put("a", 10, 100_000), Some(Bound::Session));
    assert_eq!(summarize(&harness.start())[..2], writes([9, 1]));
    let mut harness = Harness::new();
    for call in 0..10 {
        harness.put("a", call, 100_000);
    }
    harness.write_all();
    // An answer that has already been written is removed before the next write.
    assert_eq!(harness.put("a", 10, 100_000), Some(Bound::Session));
    let operations = harness.start();
    assert_eq!(
        summarize(&operations),
        [removals([0]), writes([10])].concat()
    );
    harness.complete(operations, true);
    // An answer that fills the whole bound.
    let largest = MAX_SESSION_SIZE - OVERHEAD;
    assert_eq!(harness.put("a", 11, largest), Some(Bound::Session));
    let expected = [removals(1..11), writes([11])].concat();
    assert_eq!(summarize(&harness.start()), expected);
    // An answer above the bound, for which nothing is evicted.
    assert_eq!(harness.put("a", 12, largest + 1), Some(Bound::Session));
    assert_eq!(harness.queue.answers.len(), 1);
}

#[test]
fn the_oldest_answer_is_evicted_above_the_bound_of_an_instance() {
    let mut harness = Harness::new();
    let sessions = MAX_INSTANCE_SIZE / MAX_SESSION_SIZE;
    for call in 0..sessions as u64 {
        let length = MAX_SESSION_SIZE - OVERHEAD;
        assert_eq!(harness.put(&call.to_string(), call, length), None);
    }
    harness.write_all();
    assert_eq!(harness.put("another", 1_000, 10), Some(Bound::Instance));
    let expected = [removals([0]), writes([1_000])].concat();
    assert_eq!(summarize(&harness.start()), expected);
    assert!(harness.queue.size <= MAX_INSTANCE_SIZE);
}

#[test]
fn an_answer_evicted_during_its_write_is_removed_afterwards() {
    for succeeded in [true, false] {
        let mut harness = Harness::new();
        harness.put("a", 1, 600_000);
        let operations = harness.start();
        assert_eq!(harness.put("a", 2, 600_000), Some(Bound::Session));
        assert_eq!(summarize(&harness.start()), writes([2]));
        harness.complete(operations, succeeded);
        harness.now += RETRY_DELAY;
        let operations = harness.start();
        assert_eq!(summarize(&operations), removals([1]));
        // A removal is retried, too.
        harness.complete(operations, false);
        harness.now += RETRY_DELAY;
        let operations = harness.start();
        assert_eq!(summarize(&operations), removals([1]));
        harness.complete(operations, true);
        assert!(harness.start().is_empty());
    }
}

#[test]
fn an_answer_evicted_after_a_failed_write_is_removed() {
    let mut harness = Harness::new();
    harness.put("a", 1, 600_000);
    let operations = harness.start();
    harness.complete(operations, false);
    harness.put("a", 2, 600_000);
    harness.now += RETRY_DELAY;
    let expected = [removals([1]), writes([2])].concat();
    assert_eq!(summarize(&harness.start()), expected);
}

#[test]
fn everything_expires_ten_minutes_after_the_end_of_its_call() {
    // The state of each answer when it expires: written (1), in flight (4 to 6), evicted while being written (3), being removed (2).
    let mut harness = Harness::new();
    harness.put("written", 1, 10);
    harness.write_all();
    harness.put("evicted", 2, 600_000);
    harness.write_all();
    harness.put("evicted", 3, 600_000);
    let mut late = harness.start();
    assert_eq!(summarize(&late), [removals([2]), writes([3])].concat());
    harness.put("evicted", 4, 600_000);
    harness.put("failed", 5, 10);
    let failed = harness.start();
    assert_eq!(summarize(&failed), writes([4, 5]));
    harness.complete(failed, false);
    harness.put("new", 6, 10);
    harness.now += ANSWER_TTL - SECOND;
    let again = harness.start();
    assert_eq!(summarize(&again), writes([4, 5, 6]));
    assert!(again.iter().all(|operation| operation.ttl == SECOND));
    late.extend(again);
    harness.now += SECOND;
    assert!(
        harness.queue.expire(harness.now),
        "some expired answers were not known to be written"
    );
    // The answer to the same call is queued again while its previous operation is still in flight.
    assert_eq!(harness.put("failed", 5, 10), None);
    harness.complete(late, false);
    harness.now += RETRY_DELAY;
    let operations = harness.start();
    assert_eq!(summarize(&operations), writes([5]));
    harness.complete(operations, true);
    harness.now += ANSWER_TTL;
    assert!(!harness.queue.expire(harness.now));
    harness.assert_empty();
    assert_eq!(harness.queue.next_deadline(), None);
}

#[test]
fn an_answer_is_queued_once() {
    let mut harness = Harness::new();
    harness.put("a", 1, 10);
    harness.put("a", 1, 10);
    let operations = harness.start();
    assert_eq!(summarize(&operations), writes([1]));
    harness.put("a", 1, 10);
    harness.complete(operations, true);
    harness.put("a", 1, 10);
    assert!(harness.start().is_empty());
    assert!(harness.queue.is_written_until(harness.queue.end()));
    assert_eq!(harness.queue.size, 10 + OVERHEAD);
}

#[test]
fn a_flush_waits_for_reserved_and_queued_answers_but_not_for_later_ones() {
    let mut harness = Harness::new();
    assert!(harness.queue.is_written_until(harness.queue.end()));
    let place = harness.queue.reserve(harness.now);
    let end = harness.queue.end();
    assert!(!harness.queue.is_written_until(end));
    harness.queue.put(place, key("a", 1), text(10));
    harness.queue.release(place);
    assert!(!harness.queue.is_written_until(end));
    harness.put("a", 2, 10);
    let mut operations = harness.start();
    let second = operations.pop();
    harness.complete(operations, true);
    assert!(harness.queue.is_written_until(end));
    assert!(!harness.queue.is_written_until(harness.queue.end()));
    harness.complete(second.into_iter().collect(), true);
    let empty = harness.queue.reserve(harness.now);
    harness.queue.release(empty);
    assert!(harness.queue.is_written_until(harness.queue.end()));
}

#[test]
fn an_answer_not_written_within_a_second_is_late() {
    let mut harness = Harness::new();
    let has_late_answers = |harness: &Harness| harness.queue.has_late_answers(harness.now);
    harness.put("a", 0, 100);
    harness.now += LATE_THRESHOLD;
    assert!(!has_late_answers(&harness));
    harness.now += Duration::from_millis(1);
    assert!(has_late_answers(&harness));
    let in_flight = harness.start();
    assert!(
        has_late_answers(&harness),
        "a write in flight may still fail"
    );
    harness.complete(in_flight, true);
    assert!(!has_late_answers(&harness));
    harness.queue.write_again();
    assert!(has_late_answers(&harness));
    harness.now += ANSWER_TTL;
    harness.start();
    assert!(!has_late_answers(&harness), "an expired answer is not late");
}

#[test]
fn answers_are_written_again_if_the_directory_has_lost_them() {
    let mut harness = Harness::new();
    for call in 0..3 {
        harness.put("a", call, 100);
        if call < 2 {
            harness.write_all();
        }
    }
    let in_flight = harness.start();
    harness.queue.write_again();
    let end = harness.queue.end();
    assert!(!harness.queue.is_written_until(end));
    harness.complete(in_flight, true);
    let again = harness.start();
    let keys: Vec<AnswerKey> = again.iter().map(|operation| operation.key).collect();
    assert_eq!(keys, [0, 1, 2].map(|call| key("a", call)));
    assert!(
        again
            .iter()
            .all(|operation| operation.text == Some(text(100)))
    );
    harness.complete(again, true);
    assert!(harness.start().is_empty() && harness.queue.is_written_until(end));
}
