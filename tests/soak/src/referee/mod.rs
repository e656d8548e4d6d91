//! Judges a run by its facts. What the layer reports about itself is ignored, except that it must report nothing left at the
//! end.
//!
//! The [`rules`] define when a call must complete, must be cancelled, or may do either. [`delivery`] defines which client must
//! receive which answer, and [`health`] what state the server must end up in. A run in which too many calls may do either
//! proves nothing, so it fails.

use std::{collections::BTreeMap, fmt};

mod delivery;
mod health;
mod history;
mod rules;
#[cfg(test)]
mod tests;

use self::history::{CallHistory, End, History};
pub use self::{
    delivery::Misdelivery,
    health::Health,
    rules::{Class, Violation},
};
use crate::{clock::SECOND, fact::Line};

/// What the referee has found.
#[derive(Debug)]
pub struct Report {
    pub seed: Option<u64>,
    pub fault: Option<String>,
    /// How many calls there were and how many of them were answered, by route and class.
    pub calls: BTreeMap<(&'static str, Class), (usize, usize)>,
    /// How many calls each SDK made.
    pub sdks: BTreeMap<String, usize>,
    /// Calls that may do either, by their clients' stories.
    pub undecided: BTreeMap<String, usize>,
    pub wrong: BTreeMap<Violation, Vec<String>>,
    pub misdelivered: BTreeMap<Misdelivery, Vec<String>>,
    pub stray_answers: usize,
    pub health: Option<Health>,
    pub leaks: Vec<String>,
    pub late_drains: usize,
    pub drains: usize,
    pub stalled_millis: u64,
    pub longest_stall_millis: u64,
    pub unexplained: Vec<String>,
}

/// The highest percentage of calls that may do either.
const MAX_EITHER_PERCENT: usize = 25;
/// How many findings of each kind are printed in full.
const MAX_PRINTED: usize = 5;

/// Judges a run's facts, which must be sorted by time.
#[must_use]
pub fn judge(lines: &[Line]) -> Report {
    let history = History::of(lines);
    let health = Health::of(&history);
    let mut report = Report {
        seed: history.seed,
        fault: history.fault.clone(),
        calls: BTreeMap::new(),
        sdks: BTreeMap::new(),
        undecided: BTreeMap::new(),
        wrong: BTreeMap::new(),
        misdelivered: BTreeMap::new(),
        stray_answers: delivery::stray_answers(&history),
        leaks: health.as_ref().map_or_else(Vec::new, Health::leaks),
        health,
        late_drains: history.late_drains,
        drains: history.drains.len(),
        stalled_millis: history.stalls.total() / 1_000,
        longest_stall_millis: history.stalls.longest(0, u64::MAX) / 1_000,
        unexplained: history.unexplained.clone(),
    };
    let mut calls: Vec<_> = history.calls.iter().collect();
    calls.sort_by_key(|(_, call)| call.called);
    for (key, call) in calls {
        let (class, wrong) = rules::judge(call, &history);
        let (all, answered) = report.calls.entry((call.setup.route, class)).or_default();
        *all += 1;
        *answered += usize::from(matches!(call.ended, Some((_, End::Answered))));
        if class == Class::Either {
            *report.undecided.entry(kind(key)).or_default() += 1;
        }
        // Raw clients are named `r<round>a<number>s<session>`, and no SDK has a name like that.
        if !call.client.starts_with('r') || !call.client.contains('a') {
            *report.sdks.entry(call.client.to_string()).or_default() += 1;
        }
        if let Some(wrong) = wrong {
            report
                .wrong
                .entry(wrong)
                .or_default()
                .push(story(key, call));
        }
        if let Some(wrong) = delivery::judge(key, call, &history) {
            report
                .misdelivered
                .entry(wrong)
                .or_default()
                .push(story(key, call));
        }
    }
    report
}

/// Returns the last part of a call's name, which is its client's story. An SDK's calls have a number there instead.
fn kind(key: &str) -> String {
    let name = key.split('~').next().unwrap_or_default();
    let kind = name.rsplit('.').next().unwrap_or_default();
    let is_number = kind.bytes().all(|byte| byte.is_ascii_digit());
    if is_number {
        "an SDK".to_owned()
    } else {
        kind.to_owned()
    }
}

/// Describes a call's course in one line, in milliseconds since the request.
fn story(key: &str, call: &CallHistory) -> String {
    let since = |at: u64| at.saturating_sub(call.called) / 1_000;
    let mut line = format!(
        "{key} on {} (asked at {} us, session {:?}):",
        call.setup.route, call.called, call.session
    );
    for stream in &call.streams {
        line += &format!(
            " [{} after {:?}: head {:?}, answer {}, error {:?}, leaving {:?}, over {:?}]",
            since(stream.opened),
            stream.last_event_id,
            stream.head.map(|(at, status)| (since(at), status)),
            stream.answer.as_ref().map_or_else(
                || "none".to_owned(),
                |(at, _, of, whole)| { format!("{} at {}, whole: {whole}", of, since(*at)) }
            ),
            stream
                .error
                .as_ref()
                .map(|(at, _, code)| (since(*at), code)),
            stream.closing.map(|(at, how)| (since(at), how)),
            stream.over.map(since),
        );
    }
    let ended = call.ended.map(|(at, end)| (since(at), end));
    line + &format!(
        " started {:?}, ended {ended:?} {:?}, cancelled {:?}",
        call.started.iter().map(|&at| since(at)).collect::<Vec<_>>(),
        call.reason,
        call.cancelling.map(since),
    )
}

// === impl Report ===

impl Report {
    /// Returns the number of calls, and how many of them may do either.
    #[must_use]
    pub fn total(&self) -> (usize, usize) {
        let count = |class: Option<Class>| {
            let calls = self
                .calls
                .iter()
                .filter(|((_, actual), _)| class.is_none_or(|class| class == *actual));
            calls.map(|(_, (all, _))| all).sum()
        };
        (count(None), count(Some(Class::Either)))
    }

    /// Returns why the run failed. Empty if it passed.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        for (wrong, calls) in &self.wrong {
            failures.push(format!("{} calls: {wrong:?}", calls.len()));
        }
        for (wrong, calls) in &self.misdelivered {
            failures.push(format!("{} calls: {wrong:?}", calls.len()));
        }
        if self.stray_answers > 0 {
            failures.push(format!(
                "{} answers on standalone streams",
                self.stray_answers
            ));
        }
        failures.extend(self.leaks.iter().cloned());
        if self.late_drains > 0 {
            failures.push(format!("{} drains did not end in time", self.late_drains));
        }
        let (all, either) = self.total();
        if all == 0 || either * 100 > all * MAX_EITHER_PERCENT {
            failures.push(format!("{either} of {all} calls are not decided"));
        }
        if self.health.is_none() {
            failures.push("the server was not seen at rest".to_owned());
        }
        if !self.unexplained.is_empty() {
            failures.push(format!("{} facts do not fit", self.unexplained.len()));
        }
        failures
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, either) = self.total();
        writeln!(
            f,
            "{:<10} {:<16} {:>7} {:>9}",
            "route", "class", "calls", "answered"
        )?;
        for ((route, class), (all, answered)) in &self.calls {
            let class = format!("{class:?}");
            writeln!(f, "{route:<10} {class:<16} {all:>7} {answered:>9}")?;
        }
        writeln!(
            f,
            "\n{all} calls, {either} of them not decided ({:.1} %)",
            100.0 * either as f64 / all.max(1) as f64
        )?;
        writeln!(f, "not decided: {:?}", self.undecided)?;
        writeln!(f, "of SDKs: {:?}", self.sdks)?;
        for wrong in [
            Violation::FalseCancel,
            Violation::Zombie,
            Violation::RanTwice,
        ] {
            let calls = self.wrong.get(&wrong).map_or(&[][..], Vec::as_slice);
            writeln!(f, "{wrong:?}: {}", calls.len())?;
            calls
                .iter()
                .take(MAX_PRINTED)
                .try_for_each(|call| writeln!(f, "    {call}"))?;
        }
        for wrong in [
            Misdelivery::WrongAnswer,
            Misdelivery::LostAnswer,
            Misdelivery::MissingError,
        ] {
            let calls = self.misdelivered.get(&wrong).map_or(&[][..], Vec::as_slice);
            writeln!(f, "{wrong:?}: {}", calls.len())?;
            calls
                .iter()
                .take(MAX_PRINTED)
                .try_for_each(|call| writeln!(f, "    {call}"))?;
        }
        writeln!(f, "stray answers: {}", self.stray_answers)?;
        writeln!(f, "drains: {}, late: {}", self.drains, self.late_drains)?;
        if let Some(Health { first, last }) = &self.health {
            for (when, gauge) in [("first", first), ("last", last)] {
                let sessions: usize = gauge.sessions.values().map(Vec::len).sum();
                writeln!(
                    f,
                    "at rest, {when}: {} calls, {sessions} sessions, {} KiB, {} descriptors, {} tasks",
                    gauge.calls, gauge.allocated_kib, gauge.descriptors, gauge.tasks
                )?;
            }
        }
        let stalled = self.stalled_millis as f64 * 1_000.0 / SECOND as f64;
        writeln!(
            f,
            "stalls: {stalled:.1} s in all, the longest {} ms",
            self.longest_stall_millis
        )?;
        for unexplained in self.unexplained.iter().take(MAX_PRINTED) {
            writeln!(f, "does not fit: {unexplained}")?;
        }
        if let Some(fault) = &self.fault {
            writeln!(f, "deliberate fault: {fault}")?;
        }
        write!(
            f,
            "seed: {}",
            self.seed
                .map_or_else(|| "unknown".to_owned(), |seed| seed.to_string())
        )
    }
}
