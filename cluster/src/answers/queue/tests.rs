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
struct Model {
    queue: AnswerQueue,
    now: Instant,
}

impl Model {
    fn new() -> Self {
        Self {
            queue: AnswerQueue::default(),
            now: Instant::now(),
        }
    }

    fn put(&mut self, session: &str, call: u64, length: usize) -> Option<Bound> {
        let place = self.queue.reserve(self.now);
        let exceeded = self.queue.put(place, key(session, call), text(length));
        self.queue.release(place);
        exceeded
    }

    /// Returns all operations that may be in flight now.
    fn start(&mut self) -> Vec<Operation> {
        self.queue.expire(self.now);
        std::iter::from_fn(|| self.queue.next_operation(self.now)).collect()
    }

    fn complete(&mut self, operations: Vec<Operation>, is_done: bool) {
        for operation in operations {
            self.queue.complete(operation, is_done, self.now);
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

/// Returns the call of each operation, and `true` if the operation writes it.
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
fn answers_are_written_in_the_order_of_their_reservations() {
    let mut model = Model::new();
    let first = model.queue.reserve(model.now);
    model.put("a", 2, 10);
    model.queue.put(first, key("a", 1), text(10));
    model.put("b", 3, 10);
    assert_eq!(summarize(&model.start()), writes([1, 2, 3]));
}

#[test]
fn a_failed_write_keeps_its_place_and_is_retried_after_half_a_second() {
    let mut model = Model::new();
    for call in 0..3 {
        model.put("a", call, 10);
    }
    for _ in 0..1_000 {
        let operations = model.start();
        assert_eq!(summarize(&operations), writes([0, 1, 2]));
        model.complete(operations, false);
        assert!(model.start().is_empty());
        let paused = model.now + RETRY_DELAY;
        assert_eq!(model.queue.next_deadline(), Some(paused));
        model.now = paused;
    }
    model.put("a", 3, 10);
    assert_eq!(summarize(&model.start()), writes([0, 1, 2, 3]));
}

#[test]
fn operations_in_flight_are_bounded_in_bytes_and_in_number() {
    let mut model = Model::new();
    for call in 0..5 {
        model.put(&call.to_string(), call, 1_000_000);
    }
    let mut operations = model.start();
    assert_eq!(summarize(&operations), writes(0..4));
    let second = operations.remove(1);
    model.complete(vec![second], true);
    assert_eq!(summarize(&model.start()), writes([4]));

    let mut model = Model::new();
    for call in 0..1_000 {
        model.put("a", call, 10);
    }
    assert_eq!(summarize(&model.start()), writes(0..256));
    assert!(model.start().is_empty());
}

#[test]
fn the_oldest_of_a_session_is_evicted_beyond_its_bound() {
    let mut model = Model::new();
    model.put("b", 9, 1_000_000);
    for call in 0..10 {
        assert_eq!(model.put("a", call, 100_000), None);
    }
    // An answer that is not written needs no removal.
    assert_eq!(model.put("a", 10, 100_000), Some(Bound::Session));
    assert_eq!(summarize(&model.start())[..2], writes([9, 1]));
    let mut model = Model::new();
    for call in 0..10 {
        model.put("a", call, 100_000);
    }
    model.write_all();
    // An answer that is written is removed first.
    assert_eq!(model.put("a", 10, 100_000), Some(Bound::Session));
    let operations = model.start();
    assert_eq!(
        summarize(&operations),
        [removals([0]), writes([10])].concat()
    );
    model.complete(operations, true);
    // An answer that fills the whole bound.
    let largest = MAX_SESSION_SIZE - OVERHEAD;
    assert_eq!(model.put("a", 11, largest), Some(Bound::Session));
    let expected = [removals(1..11), writes([11])].concat();
    assert_eq!(summarize(&model.start()), expected);
    // An answer above the bound, for which nothing is evicted.
    assert_eq!(model.put("a", 12, largest + 1), Some(Bound::Session));
    assert_eq!(model.queue.answers.len(), 1);
}

#[test]
fn the_oldest_of_all_is_evicted_beyond_the_bound_of_an_instance() {
    let mut model = Model::new();
    let sessions = MAX_INSTANCE_SIZE / MAX_SESSION_SIZE;
    for call in 0..sessions as u64 {
        let length = MAX_SESSION_SIZE - OVERHEAD;
        assert_eq!(model.put(&call.to_string(), call, length), None);
    }
    model.write_all();
    assert_eq!(model.put("another", 1_000, 10), Some(Bound::Instance));
    let expected = [removals([0]), writes([1_000])].concat();
    assert_eq!(summarize(&model.start()), expected);
    assert!(model.queue.size <= MAX_INSTANCE_SIZE);
}

#[test]
fn an_answer_that_is_evicted_while_it_is_written_is_removed_afterwards() {
    for is_done in [true, false] {
        let mut model = Model::new();
        model.put("a", 1, 600_000);
        let operations = model.start();
        assert_eq!(model.put("a", 2, 600_000), Some(Bound::Session));
        assert_eq!(summarize(&model.start()), writes([2]));
        model.complete(operations, is_done);
        model.now += RETRY_DELAY;
        let operations = model.start();
        assert_eq!(summarize(&operations), removals([1]));
        // A removal is retried, too.
        model.complete(operations, false);
        model.now += RETRY_DELAY;
        let operations = model.start();
        assert_eq!(summarize(&operations), removals([1]));
        model.complete(operations, true);
        assert!(model.start().is_empty());
    }
}

#[test]
fn an_answer_whose_write_failed_may_be_stored_and_is_removed() {
    let mut model = Model::new();
    model.put("a", 1, 600_000);
    let operations = model.start();
    model.complete(operations, false);
    model.put("a", 2, 600_000);
    model.now += RETRY_DELAY;
    let expected = [removals([1]), writes([2])].concat();
    assert_eq!(summarize(&model.start()), expected);
}

#[test]
fn everything_expires_ten_minutes_after_the_end_of_its_call() {
    // Every state: new, in flight, failed, written, evicted before the write has ended, and to be removed.
    let mut model = Model::new();
    model.put("written", 1, 10);
    model.write_all();
    model.put("evicted", 2, 600_000);
    model.write_all();
    model.put("evicted", 3, 600_000);
    let mut late = model.start();
    assert_eq!(summarize(&late), [removals([2]), writes([3])].concat());
    model.put("evicted", 4, 600_000);
    model.put("failed", 5, 10);
    let failed = model.start();
    assert_eq!(summarize(&failed), writes([4, 5]));
    model.complete(failed, false);
    model.put("new", 6, 10);
    model.now += ANSWER_TTL - SECOND;
    let again = model.start();
    assert_eq!(summarize(&again), writes([4, 5, 6]));
    assert!(again.iter().all(|operation| operation.ttl == SECOND));
    late.extend(again);
    model.now += SECOND;
    assert!(model.queue.expire(model.now), "some were not written");
    // The answer of the same call is queued again before its operation in flight has ended.
    assert_eq!(model.put("failed", 5, 10), None);
    model.complete(late, false);
    model.now += RETRY_DELAY;
    let operations = model.start();
    assert_eq!(summarize(&operations), writes([5]));
    model.complete(operations, true);
    model.now += ANSWER_TTL;
    assert!(!model.queue.expire(model.now));
    model.assert_empty();
    assert_eq!(model.queue.next_deadline(), None);
}

#[test]
fn an_answer_is_queued_once() {
    let mut model = Model::new();
    model.put("a", 1, 10);
    model.put("a", 1, 10);
    let operations = model.start();
    assert_eq!(summarize(&operations), writes([1]));
    model.put("a", 1, 10);
    model.complete(operations, true);
    model.put("a", 1, 10);
    assert!(model.start().is_empty());
    assert!(model.queue.is_written_until(model.queue.end()));
    assert_eq!(model.queue.size, 10 + OVERHEAD);
}

#[test]
fn a_flush_waits_for_reserved_and_queued_answers_and_for_no_later_ones() {
    let mut model = Model::new();
    assert!(model.queue.is_written_until(model.queue.end()));
    let place = model.queue.reserve(model.now);
    let end = model.queue.end();
    assert!(!model.queue.is_written_until(end));
    model.queue.put(place, key("a", 1), text(10));
    model.queue.release(place);
    assert!(!model.queue.is_written_until(end));
    model.put("a", 2, 10);
    let mut operations = model.start();
    let second = operations.pop();
    model.complete(operations, true);
    assert!(model.queue.is_written_until(end));
    assert!(!model.queue.is_written_until(model.queue.end()));
    model.complete(second.into_iter().collect(), true);
    let empty = model.queue.reserve(model.now);
    model.queue.release(empty);
    assert!(model.queue.is_written_until(model.queue.end()));
}

#[test]
fn an_answer_that_is_not_written_within_a_second_is_late() {
    let mut model = Model::new();
    let is_late = |model: &Model| model.queue.is_late(model.now);
    model.put("a", 0, 100);
    model.now += LATE_THRESHOLD;
    assert!(!is_late(&model));
    model.now += Duration::from_millis(1);
    assert!(is_late(&model));
    let in_flight = model.start();
    assert!(is_late(&model), "it may fail");
    model.complete(in_flight, true);
    assert!(!is_late(&model));
    model.queue.write_again();
    assert!(is_late(&model));
    model.now += ANSWER_TTL;
    model.start();
    assert!(!is_late(&model), "it has expired");
}

#[test]
fn answers_are_written_again_if_the_directory_lost_them() {
    let mut model = Model::new();
    for call in 0..3 {
        model.put("a", call, 100);
        if call < 2 {
            model.write_all();
        }
    }
    let in_flight = model.start();
    model.queue.write_again();
    let end = model.queue.end();
    assert!(!model.queue.is_written_until(end));
    model.complete(in_flight, true);
    let again = model.start();
    let calls: Vec<AnswerKey> = again.iter().map(|operation| operation.key).collect();
    assert_eq!(calls, [0, 1, 2].map(|call| key("a", call)));
    assert!(
        again
            .iter()
            .all(|operation| operation.text == Some(text(100)))
    );
    model.complete(again, true);
    assert!(model.start().is_empty() && model.queue.is_written_until(end));
}
