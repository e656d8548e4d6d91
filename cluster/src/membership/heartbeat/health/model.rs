//! Checks the health against its definition, evaluated over the entire history.

use std::time::Duration;

use proptest::{collection::vec, prelude::*};

use super::*;

#[derive(Debug, Clone, Copy)]
enum Step {
    Wait(u64),
    Heartbeat { run: u8, was_alive: bool },
    Fail,
    WroteAll,
}

/// All events, with the times at which they happened.
#[derive(Debug, Default)]
struct History(Vec<(Instant, Event)>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// A heartbeat that found nothing changed.
    Intact,
    /// A heartbeat that found a change.
    Broken,
    Failed,
    /// Everything has been written, whether or not that was required.
    WroteAll,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..8_000_u64).prop_map(Step::Wait),
        4 => (0..10_u8, 0..10_u8).prop_map(|(run, alive)| Step::Heartbeat { run: run / 9, was_alive: alive > 0 }),
        1 => Just(Step::Fail),
        3 => Just(Step::WroteAll),
    ]
}

impl History {
    /// Returns when the directory became consistent, by definition.
    ///
    /// That is when everything was first written after both the last event that broke the consistency and an answered heartbeat since.
    fn consistent_since(&self, now: Instant) -> Option<Instant> {
        let is_heartbeat = |event: &Event| matches!(event, Event::Intact | Event::Broken);
        let breaks = |event: &Event| matches!(event, Event::Failed | Event::Broken);
        let (latest, _) = self.0.iter().rfind(|(_, event)| is_heartbeat(event))?;
        if now - *latest >= MIN_LEASE {
            return None;
        }
        let from = self.0.iter().rposition(|(_, event)| breaks(event))?;
        let mut since = self.0[from..]
            .iter()
            .skip_while(|(_, event)| !is_heartbeat(event));
        since
            .find(|(_, event)| *event == Event::WroteAll)
            .map(|(at, _)| *at)
    }
}

proptest! {
    #[test]
    fn consistent_since_matches_its_definition(steps in vec(step(), 0..60)) {
        let mut health = DirectoryHealth::new(false);
        let mut history = History::default();
        let mut now = Instant::now();
        let mut last: Option<(Instant, u8)> = None;
        // Whether the directory has been consistent since everything was last required to be written.
        let mut was_consistent = true;
        for step in steps {
            match step {
                Step::Wait(millis) => now += Duration::from_millis(millis),
                Step::Fail => {
                    health.on_heartbeat_failed();
                    history.0.push((now, Event::Failed));
                }
                Step::WroteAll => {
                    health.on_all_written(now);
                    history.0.push((now, Event::WroteAll));
                }
                Step::Heartbeat { run, was_alive } => {
                    if !was_alive {
                        health.on_lease_missing();
                        prop_assert!(health.is_unreachable());
                    }
                    let required = health.on_heartbeat_answered(now, BackendRunId::new(&run.to_string()));
                    let is_unchanged = last.is_some_and(|(at, before)| before == run && now - at < MIN_LEASE) && was_alive;
                    let last_event = history.0.iter().rfind(|(_, event)| *event != Event::WroteAll);
                    let is_reachable_again = last_event.is_none_or(|(_, event)| *event == Event::Failed);
                    prop_assert_eq!(required.may_have_lost_data, !is_unchanged);
                    prop_assert_eq!(required.write_all, !is_unchanged || is_reachable_again && was_consistent);
                    was_consistent &= !required.write_all;
                    history.0.push((now, if is_unchanged { Event::Intact } else { Event::Broken }));
                    last = Some((now, run));
                }
            }
            let consistent = health.consistent_since(now);
            prop_assert_eq!(consistent, history.consistent_since(now));
            prop_assert!(consistent.is_none() || !health.is_unreachable());
            was_consistent |= health.consistent_since(now).is_some();
        }
    }
}
