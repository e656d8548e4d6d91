//! Compares the ring with a simple model, under random operations.

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::event_store::budget::Budget;

const LIMITS: BufferLimits = BufferLimits {
    retry: std::time::Duration::from_secs(3),
    events: 4,
    bytes: 1_200,
};
const BUDGET: usize = 2_500;

/// How many bytes the session's other streams may try to reserve.
const OTHERS: [usize; 3] = [0, 1_000, 2_300];

#[derive(Debug, Clone, Copy)]
enum Op {
    Push {
        weight: Weight,
        size: usize,
    },
    Attach(Start),
    Take(usize),
    /// A reader that has been detached tries to take an event.
    TakeDetached,
    Detach,
    /// An event bypasses the ring, split into `pieces`.
    Bypass {
        pieces: usize,
        weight: Weight,
    },
    End,
    /// The session's other streams reserve or release bytes.
    Others(usize),
}

/// A reference implementation that never discards an event, but only marks it as dropped.
#[derive(Debug, Default)]
struct Model {
    events: Vec<Item>,
    reader: Option<ReaderModel>,
    /// The first event that no reader has taken.
    unread: usize,
    bypassed: Option<usize>,
    answer: Option<usize>,
    others: usize,
    has_ended: bool,
}

#[derive(Debug)]
struct Item {
    text: String,
    weight: Weight,
    cost: usize,
    is_retained: bool,
}

#[derive(Debug)]
struct ReaderModel {
    from: usize,
    position: usize,
}

// === impl Model ===

impl Model {
    fn retained(&self) -> impl Iterator<Item = &Item> {
        self.events.iter().filter(|item| item.is_retained)
    }

    fn cost(&self) -> usize {
        self.retained().map(|item| item.cost).sum()
    }

    fn has_room(&self, cost: usize) -> bool {
        self.retained().count() < LIMITS.events
            && self.cost() < LIMITS.bytes
            && self.cost() + self.others + cost <= BUDGET
    }

    /// Returns `true` if the event is kept or dropped, and `false` if it is refused.
    fn push(&mut self, text: String, weight: Weight, cost: usize) -> bool {
        let is_droppable = weight == Weight::Droppable;
        while !self.has_room(cost) {
            let position = self.reader.as_ref().map_or(0, |reader| reader.position);
            let oldest = |matches: &dyn Fn(&Item) -> bool| {
                let mut events = self.events.iter();
                events.position(|item| item.is_retained && matches(item))
            };
            let is_taken = |oldest: &usize| *oldest < position && !is_droppable;
            let notification = oldest(&|item| item.weight == Weight::Kept).filter(is_taken);
            let taken = notification.or(oldest(&|_| true).filter(is_taken));
            let oldest_droppable = oldest(&|item| item.weight == Weight::Droppable);
            match oldest_droppable.or(taken) {
                Some(dropped) => self.events[dropped].is_retained = false,
                None if is_droppable => break,
                None => return false,
            }
        }
        let is_retained = self.has_room(cost);
        self.add(text, weight, cost, is_retained);
        true
    }

    fn add(&mut self, text: String, weight: Weight, cost: usize, is_retained: bool) {
        if weight == Weight::Answer {
            self.answer = Some(self.events.len());
        }
        self.events.push(Item {
            text,
            weight,
            cost,
            is_retained,
        });
    }

    fn take(&mut self) -> Option<String> {
        let taken = self.take_next();
        let position = self.reader.as_ref().map_or(0, |reader| reader.position);
        self.unread = self.unread.max(position);
        taken
    }

    fn take_next(&mut self) -> Option<String> {
        let reader = self.reader.as_ref()?;
        let missed = self
            .bypassed
            .is_some_and(|bypassed| reader.from <= bypassed);
        let is_retained = self
            .answer
            .is_some_and(|answer| self.events[answer].is_retained);
        if self.has_ended && missed && !is_retained {
            self.bypassed = None;
            self.add("lost".into(), Weight::Answer, 0, true);
        }
        let reader = self.reader.as_mut()?;
        let missing = self.events[reader.position..]
            .iter()
            .take_while(|item| !item.is_retained)
            .count();
        reader.position += missing;
        if missing > 0 {
            return Some(format!("{missing} missing"));
        }
        let item = self.events.get(reader.position)?;
        reader.position += 1;
        Some(item.text.clone())
    }
}

/// Converts a frame to the model's form: the data of an event, or the number of missing ones.
fn seen(frame: &[u8]) -> String {
    let text = std::str::from_utf8(frame).unwrap();
    if let Some(comment) = text.strip_prefix(": ") {
        let count = comment.split(' ').next().unwrap();
        let count = if count == "an" { "1" } else { count };
        return format!("{count} missing");
    }
    let (data, _) = text.split_once('\n').unwrap();
    data.strip_prefix("data: ").unwrap().to_owned()
}

fn event(text: &str, weight: Weight) -> Event {
    Event::from_lines(format!("data: {text}\n").into_bytes(), weight)
}

fn lost() -> Event {
    event("lost", Weight::Answer)
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let weight = prop_oneof![
        4 => Just(Weight::Droppable),
        4 => Just(Weight::Kept),
        2 => Just(Weight::Request),
        1 => Just(Weight::Answer),
    ];
    let op = prop_oneof![
        8 => (weight.clone(), prop_oneof![Just(10_usize), 1..600_usize, Just(3_000)])
            .prop_map(|(weight, size)| Op::Push { weight, size }),
        3 => prop_oneof![Just(Start::Beginning), (0..12_u64).prop_map(Start::After), Just(Start::Unread)]
            .prop_map(Op::Attach),
        6 => (1..6_usize).prop_map(Op::Take),
        1 => Just(Op::TakeDetached),
        1 => Just(Op::Detach),
        1 => (1..3_usize, weight).prop_map(|(pieces, weight)| Op::Bypass { pieces, weight }),
        1 => Just(Op::End),
        1 => (0..OTHERS.len()).prop_map(Op::Others),
    ];
    vec(op, 1..60)
}

fn run(ops: Vec<Op>) {
    let budget = Budget::new(BUDGET);
    let mut others = budget.reservation();
    let mut ring = Ring::new(
        "n-0.".into(),
        LIMITS,
        budget.reservation(),
        budget.reservation(),
    );
    let mut model = Model::default();
    let mut id = None;
    let mut detached = None;
    for (count, op) in ops.into_iter().enumerate() {
        match op {
            Op::Push { weight, size } => {
                let text = format!("{count}{}", "x".repeat(size));
                let event = event(&text, weight);
                let cost = event.lines.len() + ID_CAPACITY + EVENT_OVERHEAD;
                let pushed = ring.push(event);
                if model.has_ended {
                    assert!(matches!(pushed, Pushed::Ended));
                } else if model.push(text, weight, cost) {
                    assert!(matches!(pushed, Pushed::Done), "{pushed:?}");
                } else {
                    let is_below_limits =
                        model.retained().count() < LIMITS.events && model.cost() < LIMITS.bytes;
                    assert_eq!(matches!(pushed, Pushed::Exhausted(..)), is_below_limits);
                    assert_eq!(
                        matches!(pushed, Pushed::Wait(_)),
                        !is_below_limits && model.reader.is_some()
                    );
                }
            }
            Op::Attach(from) => {
                detached = id.or(detached);
                let attached = ring.attach(from);
                let position = match from {
                    Start::Beginning => 0,
                    Start::After(seq) => seq as usize + 1,
                    Start::Unread => model.unread,
                };
                let is_known = position <= model.events.len();
                assert_eq!(attached.is_some(), is_known);
                if let Some(reader) = attached {
                    id = attached;
                    model.reader = Some(ReaderModel {
                        from: position,
                        position,
                    });
                    // A reader that resumes after an event has already received that one and all earlier ones.
                    model.unread = model.unread.max(position);
                    let position_event = ring
                        .position_event(reader)
                        .map(|event| String::from_utf8(event.into()).unwrap());
                    assert_eq!(position_event.is_some(), position > 0);
                    let id = format!("id: n-0.{}\n\n", position.saturating_sub(1));
                    assert!(position_event.is_none_or(|event| event.ends_with(&id)));
                }
            }
            Op::Take(times) => {
                let Some(id) = id else { continue };
                for _ in 0..times {
                    let expected = model.take();
                    match ring.take(id) {
                        Taken::Frame(frame) => assert_eq!(Some(seen(&frame)), expected),
                        Taken::Wait => assert!(expected.is_none() && !model.has_ended),
                        Taken::End => {
                            assert!(
                                expected.is_none() && (model.has_ended || model.reader.is_none())
                            )
                        }
                    }
                }
            }
            Op::TakeDetached => {
                if let Some(detached) = detached.filter(|detached| Some(*detached) != id) {
                    assert_eq!(ring.take(detached), Taken::End);
                    ring.detach(detached);
                }
            }
            Op::Detach => {
                if let Some(id) = id {
                    ring.detach(id);
                    model.reader = None;
                }
            }
            Op::Bypass { pieces, weight } => {
                let is_behind = model
                    .reader
                    .as_ref()
                    .is_some_and(|reader| reader.position != model.events.len());
                let has_reader = model.reader.is_some() && !model.has_ended;
                assert_eq!(ring.begin_bypass(lost), !(has_reader && is_behind));
                if has_reader && !is_behind {
                    let seq = model.events.len();
                    for piece in 0..pieces {
                        ring.set_bypass_piece(format!("{piece}").into());
                        assert_eq!(ring.bypass_state(), Bypassed::Wait);
                        let frame = Taken::Frame(format!("{piece}").into());
                        assert_eq!(ring.take(id.unwrap()), frame);
                    }
                    assert!(
                        ring.bypass_id_line()
                            .ends_with(format!(".{seq}\n\n").as_bytes())
                    );
                    assert_eq!(ring.end_bypass(weight), Bypassed::Taken);
                    model.bypassed = Some(seq);
                    model.add(String::new(), weight, 0, false);
                    model.reader = Some(ReaderModel {
                        from: seq + 1,
                        position: seq + 1,
                    });
                    model.unread = seq + 1;
                } else if !has_reader {
                    assert_eq!(ring.end_bypass(weight), Bypassed::NoReader);
                    if !model.has_ended {
                        model.add(String::new(), Weight::Kept, 0, false);
                    }
                }
            }
            Op::End => {
                ring.end();
                model.has_ended = true;
            }
            Op::Others(choice) => {
                others.shrink(usize::MAX);
                let wanted = OTHERS[choice];
                model.others = others.grow(wanted).map_or(0, |()| wanted);
            }
        }
        assert_eq!(budget.used(), model.cost() + model.others);
        assert_eq!(ring.is_answered(), model.answer.is_some());
    }
    drop((ring, others));
    assert_eq!(budget.used(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ring_behaves_like_its_model(ops in ops()) {
        run(ops);
    }
}
