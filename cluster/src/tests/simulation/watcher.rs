//! Records every event in a run and checks it against the cluster's promises.
//!
//! | check | violated by |
//! |---|---|
//! | [`Check::Owner`] (a) | a call that starts on an instance after another live one has started to serve its session |
//! | [`Check::Attached`] (b) | cancelling a call whose client is attached, or has been disconnected for less than a grace period |
//! | [`Check::TurnedAway`] (b) | cancelling a call whose client a live instance has turned away within the grace period |
//! | [`Check::NotFound`] (c) | a 404 for a session whose owner is alive |
//! | [`Check::NotRestored`] (c) | a 404 for a session that the directory has never lost |
//! | [`Check::Answer`] (d) | a call that ended in time, but whose client gets an error instead of the answer, or no reply |
//! | [`Check::SentAnswer`] (d) | the same for a call whose client disconnected while its answer was on the connection |
//! | [`Check::Recovery`] (e) | a session that does not answer in time after the faults |
//! | [`Check::Orphan`] (e) | a call without a client that is not cancelled in time after the faults |
//! | [`Check::Directory`] (e) | a lease held by a dead instance, or a record of a deleted session |
//! | [`Check::HeadTimeout`] | a request that waits for a head longer than any limit, although its call has not started |
//! | [`Check::StartedTwice`] | a call that starts twice, or after its client has been sent the error that it was not started |
//! | [`Check::Status`] | a status that no rule permits |
//! | [`Check::Panic`] | a panic in any task |
//!
//! What the rules permit is not a failure. An instance may lose its sessions if it has been suspended, or its directory unreachable, for
//! longer than a lease. A session is lost if it is not open on any instance, and the directory loses the claim of an instance that has not
//! restored it yet.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use super::{
    net::Machine,
    node::{GRACE, LEAVE_LIMIT},
    time::{HostId, Ms, Post},
};
use crate::{
    directory::MemoryDirectory,
    ids::{Incarnation, SessionHash},
    lock::lock,
    sessions::Sessions,
};

/// How long it can take from a DELETE to its confirmation.
const DELETE_TIME: Ms = 10_000;

/// How long an instance can be without the directory before it may have lost its lease.
///
/// Less than [`MIN_LEASE`](crate::membership::heartbeat::MIN_LEASE) minus one heartbeat interval.
const LEASE_AT_RISK: Ms = 3_400;

/// How long after an instance's outage another one may still prove to own its sessions.
const PROOF_AFTER_OUTAGE: Ms = 10_000;

/// How long an instance's lease can take to lapse after a fault, which counts as turning clients away.
///
/// Includes the heartbeat interval.
const MAX_LAPSE_DELAY: Ms = 8_000;

/// How long a client that has been turned away may delay cancels.
const TURNED_AWAY: Ms = 50_000;

/// How long it can take to detect a disconnect.
const DISCONNECT_DETECTION: Ms = 200;

/// How long a write to a consistent directory can take.
const WRITE_TIME: Ms = 1_000;

/// A promise that is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Check {
    Owner,
    Attached,
    TurnedAway,
    NotFound,
    NotRestored,
    Answer,
    SentAnswer,
    Recovery,
    Orphan,
    Directory,
    HeadTimeout,
    StartedTwice,
    Status,
    Panic,
}

pub(super) const CHECKS: [Check; 14] = [
    Check::Owner,
    Check::Attached,
    Check::TurnedAway,
    Check::NotFound,
    Check::NotRestored,
    Check::Answer,
    Check::SentAnswer,
    Check::Recovery,
    Check::Orphan,
    Check::Directory,
    Check::HeadTimeout,
    Check::StartedTwice,
    Check::Status,
    Check::Panic,
];

/// How a call ended at its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Cancelled,
    Dropped,
}

/// What a client received for a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    /// The error for a call whose server has exited without storing an answer.
    Lost,
    /// The call was not started.
    NotStarted,
    Other(String),
}

/// The state of a call's client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Client {
    /// Its request has no response head yet.
    Requesting,
    /// Reads a stream through instance `by`.
    Attached { by: HostId, since: Ms },
    /// Has no stream, but will resume.
    Disconnected { since: Ms },
    /// Is requesting its stream again, after having been disconnected since `disconnected`.
    Resuming { since: Ms, disconnected: Ms },
    /// Has no stream and will never resume.
    NeverResumes { since: Ms },
    /// Has an answer, or has given up the call because of a 404.
    Done,
}

/// Why the directory counts as unreachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreachable {
    Path,
    Memory,
}

/// A broken promise.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) check: Check,
    pub(super) at: Ms,
    pub(super) message: String,
}

/// When a call's client was turned away, and by which instance.
#[derive(Debug, Clone, Copy)]
struct TurnedAway {
    by: HostId,
    /// The first time since the client disconnected.
    first: Ms,
    last: Ms,
}

#[derive(Debug)]
struct Call {
    session: String,
    client: Client,
    started: Option<(HostId, Ms)>,
    ended: Option<(End, Ms)>,
    turned_away: Option<TurnedAway>,
    answer: Option<Answer>,
    /// The instance through which the client was last attached.
    by: Option<HostId>,
    /// Whether the answer may have been sent.
    ///
    /// That is, whether the client may have had a connection when the call ended, or later got one to the instance that had the answer.
    was_sent: bool,
}

#[derive(Debug, Default)]
struct Session {
    /// The instances that have started to serve the session, and when.
    served: Vec<(HostId, Ms)>,
    opened: Ms,
    is_deleted: bool,
    /// Whether the client has got a 404 for the session.
    is_lost: bool,
    /// Whether the directory has lost a claim while the session was not open anywhere.
    ///
    /// The instance that made the claim had not restored the session yet.
    has_lost_claim: bool,
}

#[derive(Debug)]
struct Process {
    machine: Machine,
    incarnation: Incarnation,
    sessions: Weak<Sessions>,
    state: State,
    /// When the process was suspended, and until when.
    stops: Vec<(Ms, Option<Ms>)>,
    /// When the process started to leave.
    leaving_since: Option<Ms>,
    /// Whether `leave` returned before its limit.
    has_left_early: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Alive,
    Suspended,
    Dead { at: Ms },
}

/// A run's log. Clones share it.
#[derive(Clone)]
pub(super) struct Watcher {
    post: Post,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Log {
    checks: BTreeSet<Check>,
    history: Vec<(Ms, String)>,
    failures: Vec<Failure>,
    calls: BTreeMap<Arc<str>, Call>,
    sessions: BTreeMap<String, Session>,
    processes: BTreeMap<HostId, Process>,
    /// When the directory was unreachable for a machine, or for all of them.
    cuts: Vec<(Option<Machine>, Ms, Option<Ms>, Unreachable)>,
    /// When the directory lost data.
    losses: Vec<Ms>,
    /// When the directory last evicted an answer.
    evicted: Option<Ms>,
    directory: Option<MemoryDirectory>,
    /// When the path between two machines was disturbed.
    paths: Vec<(Machine, Machine, Ms, Option<Ms>)>,
    requests: usize,
    /// When a client was last turned away.
    last_refusal: Option<Ms>,
    /// Deleted sessions: the id, the instances that served it, and when the client got the confirmation.
    deleted: Vec<(String, Vec<HostId>, Ms)>,
}

// === impl Watcher ===

impl Watcher {
    pub(super) fn new(post: Post, checks: BTreeSet<Check>, directory: MemoryDirectory) -> Self {
        let log = Log {
            checks,
            directory: Some(directory),
            ..Log::default()
        };
        Self {
            post,
            log: Arc::new(Mutex::new(log)),
        }
    }

    pub(super) fn note(&self, message: impl Into<String>) {
        let now = self.post.now();
        self.log().history.push((now, message.into()));
    }

    pub(super) fn fail(&self, check: Check, message: impl Into<String>) {
        let at = self.post.now();
        self.log().fail(check, at, message.into());
    }

    pub(super) fn failures(&self) -> Vec<Failure> {
        self.log().failures.clone()
    }

    pub(super) fn history(&self) -> Vec<(Ms, String)> {
        self.log().history.clone()
    }

    pub(super) fn requests(&self) -> usize {
        self.log().requests
    }

    // --- instances ---

    pub(super) fn started(
        &self,
        host: HostId,
        machine: Machine,
        incarnation: Incarnation,
        sessions: &Arc<Sessions>,
    ) {
        let process = Process {
            machine,
            incarnation,
            sessions: Arc::downgrade(sessions),
            state: State::Alive,
            stops: Vec::new(),
            leaving_since: None,
            has_left_early: false,
        };
        self.note(format!("instance {host} starts on machine {machine}"));
        self.log().processes.insert(host, process);
    }

    pub(super) fn died(&self, host: HostId) {
        let at = self.post.now();
        self.note(format!("instance {host} is dead"));
        self.log().may_lapse(at);
        if let Some(process) = self.log().processes.get_mut(&host) {
            process.state = State::Dead { at };
        }
    }

    pub(super) fn suspended(&self, host: HostId, is_suspended: bool) {
        let now = self.post.now();
        let verb = if is_suspended {
            "is suspended"
        } else {
            "resumes"
        };
        self.note(format!("instance {host} {verb}"));
        self.log().may_lapse(now);
        if let Some(process) = self.log().processes.get_mut(&host) {
            if is_suspended {
                process.state = State::Suspended;
                process.stops.push((now, None));
            } else {
                process.state = State::Alive;
                if let Some(last) = process.stops.last_mut() {
                    last.1 = Some(now);
                }
            }
        }
    }

    /// Records that an instance is starting to shut down.
    pub(super) fn leaving(&self, host: HostId) {
        let now = self.post.now();
        self.note(format!("instance {host} is shutting down"));
        if let Some(process) = self.log().processes.get_mut(&host) {
            process.leaving_since = Some(now);
        }
    }

    /// Records that `leave` has returned.
    pub(super) fn on_left(&self, host: HostId) {
        let now = self.post.now();
        self.note(format!("instance {host} has shut down"));
        if let Some(process) = self.log().processes.get_mut(&host) {
            let limit = process.leaving_since.map(|at| at + LEAVE_LIMIT);
            process.has_left_early = limit.is_some_and(|limit| now < limit);
        }
    }

    /// Records that the directory is unreachable for one or all machines, or reachable again.
    pub(super) fn cut(&self, machine: Option<Machine>, reason: Unreachable, is_cut: bool) {
        let now = self.post.now();
        let mut log = self.log();
        log.may_lapse(now);
        if is_cut {
            log.cuts.push((machine, now, None, reason));
        } else {
            let cut = log.cuts.iter_mut().rev();
            let mut cut = cut.filter(|cut| (cut.0, cut.3) == (machine, reason) && cut.2.is_none());
            if let Some(cut) = cut.next() {
                cut.2 = Some(now);
            }
        }
    }

    pub(super) fn directory_lost(&self, data: &str) {
        let now = self.post.now();
        self.note(format!("the directory lost {data}"));
        self.log().losses.push(now);
    }

    /// Makes the directory lose records, and marks each session that loses a claim before being restored.
    ///
    /// Sessions that are open on an instance are not marked.
    pub(super) fn directory_loses(&self, data: &str, lose: impl FnOnce()) {
        let claimed = self.log().unrestored_claims();
        lose();
        self.directory_lost(data);
        let mut log = self.log();
        for session in claimed {
            let is_lost = log.recorded_owner(&session).is_none();
            if let Some(known) = log.sessions.get_mut(&session) {
                known.has_lost_claim |= is_lost;
            }
        }
    }

    /// Records that the directory has lost an answer, which no instance can detect.
    pub(super) fn evicted_answer(&self, answer: &str) {
        let now = self.post.now();
        self.note(format!("the directory lost {answer}"));
        self.log().evicted = Some(now);
    }

    pub(super) fn path_changed(&self, from: Machine, to: Machine, is_disturbed: bool) {
        let now = self.post.now();
        let mut log = self.log();
        if is_disturbed {
            log.paths.push((from, to, now, None));
        } else {
            let path = log.paths.iter_mut().rev();
            let mut path = path.filter(|path| (path.0, path.1) == (from, to) && path.3.is_none());
            if let Some(path) = path.next() {
                path.3 = Some(now);
            }
        }
    }

    // --- servers ---

    pub(super) fn restored(&self, host: HostId, session: &str) {
        let now = self.post.now();
        self.note(format!("{host} restores {}", short(session)));
        let mut log = self.log();
        let known = log.sessions.entry(session.to_owned()).or_default();
        known.served.push((host, now));
        known.has_lost_claim = false;
    }

    pub(super) fn call_started(&self, host: HostId, session: Option<&str>, label: &str) {
        let now = self.post.now();
        self.note(format!("{label} starts on {host}"));
        let mut log = self.log();
        if let Some(session) = session
            && let Some(reason) = log.why_not_owner(host, session, now)
        {
            let message = format!("{label} starts on {host}, {reason}");
            log.fail(Check::Owner, now, message);
        }
        let Some(call) = log.calls.get_mut(label) else {
            return;
        };
        if call.answer == Some(Answer::NotStarted) {
            let message = format!(
                "{label} starts on {host}, although its client received the error that it does not"
            );
            log.fail(Check::StartedTwice, now, message);
        } else if let Some((before, _)) = call.started.replace((host, now)) {
            let message = format!("{label} starts on {host}, and has started on {before}");
            log.fail(Check::StartedTwice, now, message);
        }
    }

    pub(super) fn ended(&self, host: HostId, label: &str, end: End) {
        let now = self.post.now();
        self.note(format!("{label} is {end:?} on {host}"));
        let mut log = self.log();
        if end == End::Cancelled
            && let Some((check, reason)) = log.why_not_orphan(host, label, now)
        {
            let message = format!("{label} is cancelled on {host}, {reason}");
            log.fail(check, now, message);
        }
        if let Some(call) = log.calls.get_mut(label)
            && call.ended.is_none()
        {
            call.ended = Some((end, now));
        }
        let was_sent = log.may_have_been_sent(host, label, now);
        if let Some(call) = log.calls.get_mut(label) {
            call.was_sent |= was_sent;
        }
    }

    // --- clients ---

    pub(super) fn opened(&self, host: HostId, session: &str) {
        let now = self.post.now();
        self.note(format!("{} is opened on {host}", short(session)));
        let mut log = self.log();
        let known = log.sessions.entry(session.to_owned()).or_default();
        known.opened = now;
        known.served.insert(0, (host, now));
    }

    pub(super) fn deleted(&self, session: &str) {
        self.note(format!("the client of {} deletes it", short(session)));
        let mut log = self.log();
        if let Some(session) = log.sessions.get_mut(session) {
            session.is_deleted = true;
        }
    }

    /// Records that an instance has turned away the client of some session.
    pub(super) fn refused(&self, by: HostId) {
        let now = self.post.now();
        let mut log = self.log();
        log.last_refusal = log.last_refusal.max(Some(now));
        log.history.push((now, format!("{by} turns a client away")));
    }

    /// Records that the client of some session has waited for an owner that did not answer.
    pub(super) fn on_waited(&self) {
        let now = self.post.now();
        let mut log = self.log();
        log.last_refusal = log.last_refusal.max(Some(now));
    }

    /// Records that an instance has confirmed a session's deletion.
    pub(super) fn deletion_confirmed(&self, session: &str, by: HostId) {
        let now = self.post.now();
        self.note(format!("{by} confirms that {} is deleted", short(session)));
        let mut log = self.log();
        // Without a live owner or a record, the confirming instance knew of no such session, which the README states as a limit.
        let owner = log.last_served(session).map(|served| served.0);
        if !owner.is_some_and(|owner| log.is_alive(owner)) && log.recorded_owner(session).is_none()
        {
            return;
        }
        let known = log.sessions.get(session);
        let served = known.map_or_else(Vec::new, |known| known.served.clone());
        let hosts = served.into_iter().map(|served| served.0).collect();
        log.deleted.push((session.to_owned(), hosts, now));
    }

    pub(super) fn requested(&self) {
        self.log().requests += 1;
    }

    pub(super) fn called(&self, label: &str, session: &str) {
        let call = Call {
            session: session.to_owned(),
            client: Client::Requesting,
            started: None,
            ended: None,
            turned_away: None,
            answer: None,
            by: None,
            was_sent: false,
        };
        self.log().calls.insert(label.into(), call);
    }

    pub(super) fn set_client(&self, label: &str, client: Client) {
        self.note(format!("the client of {label}: {client:?}"));
        let mut log = self.log();
        let sends_answer = log.owner_sends_answer(label);
        if let Some(call) = log.calls.get_mut(label) {
            call.client = client;
            if let Client::Attached { by, .. } = client {
                call.by = Some(by);
                call.was_sent |= sends_answer;
            }
        }
    }

    /// Records that an instance has turned away a call's client.
    pub(super) fn turned_away(&self, label: &str, by: HostId) {
        let now = self.post.now();
        self.note(format!("the client of {label} is turned away by {by}"));
        let mut log = self.log();
        log.last_refusal = log.last_refusal.max(Some(now));
        if let Some(call) = log.calls.get_mut(label) {
            let disconnected = match call.client {
                Client::Resuming { disconnected, .. } => disconnected,
                _ => now,
            };
            let first = call.turned_away.map(|before| before.first);
            call.turned_away = Some(TurnedAway {
                by,
                first: first.filter(|first| *first >= disconnected).unwrap_or(now),
                last: now,
            });
        }
    }

    pub(super) fn answered(&self, label: &str, answer: Answer) {
        let now = self.post.now();
        self.note(format!("the client of {label} has {answer:?}"));
        let mut log = self.log();
        if let Some(reason) = log.why_wrong(label, &answer) {
            let message = format!("the client of {label} has {answer:?}, {reason}");
            let was_sent = log.calls.get(label).is_some_and(|call| call.was_sent);
            let check = if was_sent {
                Check::SentAnswer
            } else {
                Check::Answer
            };
            log.fail(check, now, message);
        }
        if let Some(call) = log.calls.get_mut(label) {
            call.client = Client::Done;
            call.answer = Some(answer);
        }
    }

    /// Records that a client got a 404 for its session.
    pub(super) fn not_found(&self, session: &str, by: HostId) {
        let now = self.post.now();
        self.note(format!("404 for {} by {by}", short(session)));
        let mut log = self.log();
        if let Some((check, reason)) = log.why_known(session, now) {
            let message = format!("404 for {} by {by}, {reason}", short(session));
            log.fail(check, now, message);
        }
        if let Some(session) = log.sessions.get_mut(session) {
            session.is_lost = true;
        }
    }

    /// Returns the instance that last started to serve a session, or `None` if none has.
    pub(super) fn owner(&self, session: &str) -> Option<HostId> {
        self.log().last_served(session).map(|served| served.0)
    }

    /// Returns `true` if a call may still be waiting for its response head.
    ///
    /// That is the case if the call has started, or if the last instance to serve its session is suspended, has been dead for less than
    /// `limit`, or started to serve the session less than `limit` ago.
    pub(super) fn may_wait(&self, label: &str, limit: Ms) -> bool {
        let (log, now) = (self.log(), self.post.now());
        let Some(call) = log.calls.get(label) else {
            return false;
        };
        let may_wait = |(owner, since): (HostId, Ms)| {
            let state = log.processes.get(&owner).map(|process| process.state);
            since + limit > now
                || match state {
                    Some(State::Suspended) => true,
                    // The call may have been waiting for its turn until then.
                    Some(State::Dead { at }) => at + limit > now,
                    Some(State::Alive) | None => false,
                }
        };
        call.started.is_some() || log.last_served(&call.session).is_some_and(may_wait)
    }

    /// Returns `true` if an instance is alive and has not been suspended since `since`.
    pub(super) fn was_running_since(&self, host: HostId, since: Ms) -> bool {
        let log = self.log();
        let process = log.processes.get(&host);
        process.is_some_and(|process| {
            process.state == State::Alive
                && process
                    .stops
                    .iter()
                    .all(|(_, until)| until.is_some_and(|until| until < since))
        })
    }

    /// Checks what must hold once a run has settled. The faults ended at `faults_end`.
    pub(super) fn check_settled(&self, faults_end: Ms, limit: Ms) {
        let now = self.post.now();
        let mut log = self.log();
        let mut violations = Vec::new();
        for (label, call) in &log.calls {
            let session = log.sessions.get(&call.session);
            let has_ended = session.is_none_or(|session| session.is_deleted || session.is_lost);
            if let (Client::NeverResumes { since }, Some((host, _)), None) =
                (call.client, call.started, call.ended)
                && log.is_alive(host)
                && now.saturating_sub(since.max(faults_end)) > limit
                && log.last_refusal.is_none_or(|at| at + TURNED_AWAY < now)
            {
                let message =
                    format!("{label} still runs on {host}, its client disconnected at {since}");
                violations.push((Check::Orphan, message));
            }
            if let (
                Client::Resuming { since, .. } | Client::Attached { since, .. },
                Some((End::Done, at)),
            ) = (call.client, call.ended)
                && !has_ended
                && now.saturating_sub(since.max(at).max(faults_end)) > limit
            {
                let message = format!("the client of {label} does not get the answer of {at}");
                violations.push((Check::Answer, message));
            }
        }
        for (check, message) in violations {
            log.fail(check, now, message);
        }
    }

    /// Returns the deleted sessions whose deletion the directory cannot have lost.
    pub(super) fn deleted_sessions(&self) -> Vec<String> {
        let log = self.log();
        let last = log.losses.iter().max().copied().unwrap_or(0);
        // The instance that confirmed the deletion is one of those that have served the session. It must have lived, and held its lease,
        // until the directory had the deletion.
        let is_stored = |host: HostId, at| match log.processes.get(&host)?.state {
            // It died before the client sent the DELETE.
            State::Dead { at: died } if died + DELETE_TIME < at => Some(true),
            State::Dead { at: died } => Some(log.consistent_time(host, at, died) >= WRITE_TIME),
            State::Alive | State::Suspended => Some(!log.may_have_lost(host, at, self.post.now())),
        };
        let deleted = log.deleted.iter().filter(|(_, hosts, at)| {
            *at > last + 2 * WRITE_TIME
                && hosts.iter().all(|host| is_stored(*host, *at) == Some(true))
        });
        deleted.map(|(session, ..)| session.clone()).collect()
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }
}

// === impl Log ===

impl Log {
    /// Records a broken promise, which fails the run if its check has been chosen.
    fn fail(&mut self, check: Check, at: Ms, message: String) {
        self.history.push((at, format!("!!! {check:?}: {message}")));
        if self.checks.contains(&check) {
            self.failures.push(Failure { check, at, message });
        }
    }

    fn is_alive(&self, host: HostId) -> bool {
        let process = self.processes.get(&host);
        process.is_some_and(|process| process.state == State::Alive)
    }

    fn machine(&self, host: HostId) -> Option<Machine> {
        self.processes.get(&host).map(|process| process.machine)
    }

    /// Returns the longest time that an instance was without the directory, up to `now`.
    ///
    /// Only absences that ended at `from` or later count.
    fn longest_absence(&self, host: HostId, from: Ms, now: Ms) -> Ms {
        let Some(process) = self.processes.get(&host) else {
            return 0;
        };
        let stops = process.stops.iter().copied();
        let machine = Some(process.machine);
        let cuts = self.cuts.iter();
        let cuts = cuts.filter(|cut| cut.0.is_none() || cut.0 == machine);
        let mut absences: Vec<(Ms, Ms)> = stops
            .chain(cuts.map(|(_, since, until, _)| (*since, *until)))
            .map(|(since, until)| (since, until.unwrap_or(now)))
            .filter(|(_, until)| *until >= from)
            .collect();
        absences.sort_unstable();
        let mut longest = 0;
        let mut last: Option<(Ms, Ms)> = None;
        for (since, until) in absences {
            // Two absences that are at most a second apart count as one.
            last = match last {
                Some((first, end)) if since <= end + 1_000 => Some((first, end.max(until))),
                _ => Some((since, until)),
            };
            if let Some((first, end)) = last {
                longest = longest.max(end - first);
            }
        }
        longest
    }

    /// Returns `true` if the rules permit an instance to have lost a session since `from`.
    fn may_have_lost(&self, host: HostId, from: Ms, now: Ms) -> bool {
        self.longest_absence(host, from.saturating_sub(PROOF_AFTER_OUTAGE), now) >= LEASE_AT_RISK
    }

    /// Returns `true` if another instance was the last to serve a session, or owns it in the directory.
    fn has_other_owner(&self, session: &str, host: HostId) -> bool {
        let served = self.last_served(session).map(|served| served.0);
        let owners = [served, self.recorded_owner(session)];
        owners.into_iter().flatten().any(|owner| owner != host)
    }

    /// Returns the sessions that an instance has claimed, but that have not been restored or opened anywhere.
    fn unrestored_claims(&self) -> Vec<String> {
        let sessions = self.sessions.keys().filter(|session| {
            let owner = self.recorded_owner(session);
            let served = self.last_served(session).map(|served| served.0);
            owner.is_some() && owner != served && !self.is_open(session)
        });
        sessions.cloned().collect()
    }

    /// Returns `true` if a session is open on any instance.
    fn is_open(&self, session: &str) -> bool {
        let session = SessionHash::of(session);
        let instances = self.processes.values();
        let mut instances = instances.filter_map(|process| process.sessions.upgrade());
        instances.any(|sessions| sessions.is_open(session))
    }

    /// Returns a session's owner in the directory.
    fn recorded_owner(&self, session: &str) -> Option<HostId> {
        let owner = self.directory.as_ref()?.owner(SessionHash::of(session))?;
        let mut processes = self.processes.iter();
        let (host, _) = processes.find(|(_, process)| process.incarnation == owner)?;
        Some(*host)
    }

    /// Returns `true` if a call's client is attached, or its server may not have detected the disconnect yet.
    fn may_have_been_sent(&self, host: HostId, label: &str, now: Ms) -> bool {
        let Some(call) = self.calls.get(label) else {
            return false;
        };
        let since = match call.client {
            Client::Attached { .. } => return true,
            Client::Disconnected { since }
            | Client::Resuming {
                disconnected: since,
                ..
            } => since,
            _ => return false,
        };
        // The relaying instance closes its connection once it runs again and the path is clear. The owner detects that once it runs.
        let was_suspended = |host: HostId| {
            let stops = self.processes.get(&host).map(|process| &process.stops);
            let mut stops = stops.into_iter().flatten();
            stops.any(|(from, until)| {
                *from <= since + DISCONNECT_DETECTION
                    && until.is_none_or(|until| until + DISCONNECT_DETECTION > now)
            })
        };
        let is_late = |by| was_suspended(by) || self.is_disturbed(by, host, now);
        since + DISCONNECT_DETECTION > now || was_suspended(host) || call.by.is_some_and(is_late)
    }

    /// Returns `true` if a call has ended on an instance that will send its answer on the next stream.
    ///
    /// An instance that is shutting down does not count.
    fn owner_sends_answer(&self, label: &str) -> bool {
        let Some(Call {
            session,
            started: Some((host, _)),
            ended: Some((End::Done, _)),
            ..
        }) = self.calls.get(label)
        else {
            return false;
        };
        if self
            .last_served(session)
            .is_none_or(|served| served.0 != *host)
        {
            return false;
        }
        let process = self.processes.get(host);
        process
            .is_some_and(|process| process.state == State::Alive && process.leaving_since.is_none())
    }

    fn last_served(&self, session: &str) -> Option<(HostId, Ms)> {
        self.sessions.get(session)?.served.last().copied()
    }

    /// Returns why an instance does not own a session, or `None` if it might.
    fn why_not_owner(&self, host: HostId, session: &str, now: Ms) -> Option<String> {
        let (owner, since) = self.last_served(session)?;
        if owner == host || !self.is_alive(owner) {
            return None;
        }
        let served = &self.sessions.get(session)?.served;
        // The session may be recorded as opened only after its first call.
        served.iter().find(|(by, _)| *by == host)?;
        // The other instance may have been without a lease and not have detected that.
        let is_record_true = self.losses.is_empty() || self.may_have_lost(owner, now, now);
        if is_record_true && self.recorded_owner(session) == Some(host) {
            return None;
        }
        // The rules permit an instance to continue without the directory. A directory with older data has to settle before the instance can
        // detect a claim.
        let detects_within = if self.losses.is_empty() {
            2_500
        } else {
            10_000
        };
        let is_cut = self.cuts.iter().any(|(machine, _, until, _)| {
            (machine.is_none() || *machine == self.machine(host))
                && until.is_none_or(|until| until + detects_within >= now)
        });
        (!is_cut).then(|| format!("{owner} has been serving its session since {since}"))
    }

    /// Returns why a call must not be cancelled, or `None` if it may be.
    fn why_not_orphan(&self, host: HostId, label: &str, now: Ms) -> Option<(Check, String)> {
        let call = self.calls.get(label)?;
        let session = self.sessions.get(&call.session)?;
        let process = self.processes.get(&host)?;
        let is_expected = session.is_deleted || session.is_lost || process.leaving_since.is_some();
        if is_expected || !matches!(process.state, State::Alive) {
            return None;
        }
        let started = call.started.map_or(now, |(_, at)| at);
        if self.has_other_owner(&call.session, host) && self.may_have_lost(host, started, now) {
            return None;
        }
        match call.client {
            Client::Attached { by, since }
                if self.is_alive(by) && !self.is_disturbed(by, host, now) =>
            {
                let reason = format!("its client has been attached by {by} since {since}");
                return Some((Check::Attached, reason));
            }
            Client::Disconnected { since }
            | Client::Resuming {
                disconnected: since,
                ..
            } if now - since < GRACE => {
                let reason = format!("its client has been disconnected only since {since}");
                return Some((Check::Attached, reason));
            }
            Client::NeverResumes { since } if now - since < GRACE => {
                let reason = format!("its client disconnected only at {since}");
                return Some((Check::Attached, reason));
            }
            _ => {}
        }
        let TurnedAway { by, first, last } = call.turned_away?;
        // A suspended instance may not have reported the client in a heartbeat yet.
        if let Client::Resuming { disconnected, .. } = call.client
            && (disconnected..=disconnected + GRACE).contains(&first)
            && now - last < GRACE
            && self.is_alive(by)
        {
            let reason = format!("its client was turned away by {by} from {first} to {last}");
            return Some((Check::TurnedAway, reason));
        }
        None
    }

    /// Returns `true` if the path between two instances is disturbed, or was within the last `PROOF_AFTER_OUTAGE`.
    fn is_disturbed(&self, one: HostId, other: HostId, now: Ms) -> bool {
        let (one, other) = (self.machine(one), self.machine(other));
        self.paths.iter().any(|(from, to, _, until)| {
            let between = (Some(*from), Some(*to));
            (between == (one, other) || between == (other, one))
                && until.is_none_or(|until| until + PROOF_AFTER_OUTAGE >= now)
        })
    }

    /// Returns why an answer is wrong, or `None` if it is not.
    fn why_wrong(&self, label: &str, answer: &Answer) -> Option<String> {
        let call = self.calls.get(label)?;
        let session = self.sessions.get(&call.session)?;
        if session.is_deleted || session.is_lost {
            return None;
        }
        match (answer, call.ended) {
            (Answer::Done, _) => None,
            (Answer::NotStarted, _) => call
                .started
                .map(|(host, _)| format!("the call has started on {host}")),
            (Answer::Other(_), Some((End::Cancelled, _))) => None,
            (Answer::Other(_), Some((End::Done, at))) if self.was_cut_short(call, at) => None,
            (Answer::Other(text), _) => Some(format!("which no rule permits: {text}")),
            (Answer::Lost, Some((End::Done, at))) => {
                let (host, _) = call.started?;
                let now = self.history.last().map_or(0, |line| line.0);
                let served = self.last_served(&call.session);
                let is_still_owner = served.is_none_or(|served| served.0 == host);
                let died = match self.processes.get(&host)?.state {
                    State::Dead { at } => at,
                    State::Alive | State::Suspended if is_still_owner => {
                        return Some(format!("{host} is alive, and it ended at {at}"));
                    }
                    State::Alive | State::Suspended => now,
                };
                let is_evicted = self.evicted.is_some_and(|evicted| evicted >= at);
                // `leave` returns early only once the directory has all answers.
                let has_left_early = self.processes.get(&host)?.has_left_early
                    && self.losses.iter().all(|loss| *loss < at);
                let had_time =
                    died >= at + WRITE_TIME && self.consistent_time(host, at, died) >= WRITE_TIME;
                let is_written = !is_evicted && (has_left_early || had_time);
                is_written
                    .then(|| format!("the call ended at {at} on {host}, which died at {died}"))
            }
            (Answer::Lost, None) => {
                let (host, started) = call.started?;
                let now = self.history.last().map_or(0, |line| line.0);
                let is_lost = self.has_other_owner(&call.session, host)
                    && self.may_have_lost(host, started, now);
                (self.is_alive(host) && !is_lost).then(|| format!("the call is running on {host}"))
            }
            (Answer::Lost, Some(_)) => None,
        }
    }

    /// Returns `true` if `leave` may have cancelled a call on reaching its limit.
    fn was_cut_short(&self, call: &Call, ended: Ms) -> bool {
        let process = call.started.and_then(|(host, _)| self.processes.get(&host));
        let leaving_since = process.and_then(|process| process.leaving_since);
        leaving_since.is_some_and(|at| ended >= at + LEAVE_LIMIT)
    }

    /// Records that an instance's lease may lapse, because it has died or stalled, or cannot reach the directory.
    fn may_lapse(&mut self, now: Ms) {
        self.last_refusal = self.last_refusal.max(Some(now + MAX_LAPSE_DELAY));
    }

    /// Returns how long the directory was consistent for an instance, without losing data, between `from` and `until`.
    fn consistent_time(&self, host: HostId, from: Ms, until: Ms) -> Ms {
        let machine = self.machine(host);
        let cuts = self.cuts.iter();
        let cuts = cuts.filter(|cut| cut.0.is_none() || cut.0 == machine);
        let stops = self.processes.get(&host).map(|process| &process.stops);
        let stops = stops.into_iter().flatten().map(|(_, end)| *end);
        let consistent_from = cuts
            .map(|(_, _, end, _)| *end)
            .chain(stops)
            .map(|end| end.map_or(until, |end| end + 2_000))
            // The next heartbeat detects the loss.
            .chain(self.losses.iter().map(|at| at + 2_000))
            .max()
            .unwrap_or(0);
        until.saturating_sub(from.max(consistent_from))
    }

    /// Returns why a session must be known, or `None` if a 404 is permitted.
    fn why_known(&self, session: &str, now: Ms) -> Option<(Check, String)> {
        let known = self.sessions.get(session)?;
        if known.is_deleted || known.has_lost_claim {
            return None;
        }
        let (owner, since) = *known.served.last()?;
        let process = self.processes.get(&owner)?;
        match process.state {
            State::Alive if process.leaving_since.is_none() => {
                let absence =
                    self.longest_absence(owner, now.saturating_sub(PROOF_AFTER_OUTAGE), now);
                (absence < LEASE_AT_RISK).then(|| {
                    let reason = format!("{owner} is alive, and has been serving it since {since}");
                    (Check::NotFound, reason)
                })
            }
            State::Suspended => {
                let stopped = process.stops.last().map_or(now, |stop| stop.0);
                (now - stopped < LEASE_AT_RISK
                    && self.longest_absence(
                        owner,
                        stopped.saturating_sub(PROOF_AFTER_OUTAGE),
                        stopped,
                    ) < LEASE_AT_RISK)
                    .then(|| {
                        let reason = format!("{owner} serves it, and stopped only at {stopped}");
                        (Check::NotFound, reason)
                    })
            }
            State::Alive | State::Dead { .. } => {
                let is_lost = self.losses.iter().any(|loss| *loss >= known.opened);
                let was_cut = self
                    .cuts
                    .iter()
                    .any(|cut| cut.2.is_none_or(|end| end >= known.opened));
                (!is_lost && !was_cut).then(|| {
                    let reason = format!("{owner} has ended, but the directory has lost nothing");
                    (Check::NotRestored, reason)
                })
            }
        }
    }
}

/// Returns the first characters of a session id.
pub(super) fn short(session: &str) -> &str {
    session.get(..8).unwrap_or(session)
}
