//! Parses the backend's replies.

use std::{fmt::Display, str, time::Duration};

use super::format::{LATE_ANSWERS, MAX_CLOCK_SKEW, NONE, SETTLED, TURNED_AWAY, session_key};
use crate::{
    directory::{BackendRunId, DirectoryError, LEASE_TTL, Lease, Leases},
    ids::{Record, SessionHash},
};

/// Parses the leases from the replies to `HGETALL`, `TIME` and `INFO server`.
pub(super) fn parse_leases(
    fields: Vec<(String, String)>,
    (seconds, micros): (u64, u64),
    info: &str,
) -> Result<Leases, DirectoryError> {
    let now = Duration::from_secs(seconds) + Duration::from_micros(micros);
    // Skip the `TURNED_AWAY` field, lapsed leases, and leases written by another version.
    let leases = fields
        .iter()
        .filter_map(|(incarnation, text)| parse_lease(incarnation, text, now));
    let mut turned_away = fields.iter().filter(|(field, _)| field == TURNED_AWAY);
    let turned_away = turned_away.next().and_then(|(_, at)| leading_time(at));
    let turned_away = turned_away.max(last_lapse(&fields, now));
    Ok(Leases {
        run: parse_run(info)?,
        entries: leases.collect(),
        turned_away: turned_away.map(|at| now.saturating_sub(at)),
    })
}

/// Returns when a lease last lapsed, judging by the leases not yet removed by a heartbeat.
///
/// A lease too far ahead of the clock counts as lapsing now.
fn last_lapse(fields: &[(String, String)], now: Duration) -> Option<Duration> {
    let leases = fields.iter().filter(|(field, _)| field != TURNED_AWAY);
    let renewed = leases.filter_map(|(_, text)| leading_time(text));
    let lapsed = renewed.filter(|renewed| !is_valid(*renewed, now));
    lapsed.map(|renewed| now.min(renewed + LEASE_TTL)).max()
}

fn is_valid(renewed: Duration, now: Duration) -> bool {
    now.saturating_sub(renewed) < LEASE_TTL && renewed.saturating_sub(now) <= MAX_CLOCK_SKEW
}

/// Returns the time at the start of a lease or of the [`TURNED_AWAY`] field.
fn leading_time(text: &str) -> Option<Duration> {
    let millis = text.split(' ').next()?.parse().ok()?;
    Some(Duration::from_millis(millis))
}

/// Parses a lease, or returns `None` if it has lapsed or is malformed.
fn parse_lease(incarnation: &str, text: &str, now: Duration) -> Option<Lease> {
    let renewed = leading_time(text)?;
    let mut parts = text.split(' ').skip(1);
    let _number: u64 = parts.next()?.parse().ok()?;
    let run = parts.next()?;
    let marks = parts.next()?;
    let has_mark = |mark| marks.split(',').any(|present| present == mark);
    let age = now.saturating_sub(renewed);
    is_valid(renewed, now).then_some(Lease {
        incarnation: incarnation.parse().ok()?,
        age,
        written_in: (run != NONE).then(|| BackendRunId::new(run)),
        is_settled: has_mark(SETTLED),
        has_late_answers: has_mark(LATE_ANSWERS),
    })
}

pub(super) fn parse_record(session: SessionHash, text: &[u8]) -> Result<Record, DirectoryError> {
    let record = str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    record.ok_or_else(|| {
        unreadable(&format_args!(
            "{} is not a session record",
            session_key(session)
        ))
    })
}

/// Parses the backend's run id from its reply to `INFO`.
pub(super) fn parse_run(info: &str) -> Result<BackendRunId, DirectoryError> {
    let run = info.lines().find_map(|line| line.strip_prefix("run_id:"));
    let run = run.map(str::trim).filter(|run| !run.is_empty());
    run.map(BackendRunId::new)
        .ok_or_else(|| unreadable(&"INFO does not include a run_id"))
}

fn unreadable(reason: &dyn Display) -> DirectoryError {
    DirectoryError::unreadable(reason.to_string())
}
