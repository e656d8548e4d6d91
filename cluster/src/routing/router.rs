//! Routes requests: carries out a [`RoutingPlan`]'s actions and feeds the results back to it.

use std::{pin::pin, sync::Arc, time::Duration};

use axum::body::Body;
use http::{Method, Request, Response};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use crate::{
    directory::{Claim, DIRECTORY_TIMEOUT, Directory as _, Limited, SessionSnapshot},
    ids::{Owner, Ownership, Record, SessionHash},
    membership::{heartbeat::Heartbeat, turned_away::TurnedAway},
    metrics,
    refusals::{self, Refusal},
    relay::{
        client::{Relay, UNSTARTED_TIMEOUT},
        failure::Failure,
        replayable_request::ReplayableRequest,
    },
    routing::{
        fields::{Fields, SESSION_ID},
        owner_cache::{Found, OwnerCache},
        plan::{Action, Cause, Claimed, IncomingRequest, Known, LeaseState, RoutingPlan},
        resume::{self, RewriteOutcome},
        routed::{Presence, Reclaimed, Routed, end_wait},
    },
    sessions::{
        Sessions,
        drain_gate::InFlightGuard,
        generations::Generations,
        pending_restores::{PendingRestore, PendingRestores},
    },
    shutdown::{Shutdown, ShutdownStage},
};

mod lost_call;
mod transfer;

pub(crate) use self::{lost_call::FormerOwners, transfer::WaitingCalls};

/// Delay between lookups while another instance is claiming a relinquished session.
const RECHECK_DELAY: Duration = Duration::from_millis(50);

/// How often a call checks whether a silent owner still owns its session.
pub(crate) const OWNER_RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of attempts to reclaim a session that another instance is also claiming.
const MAX_RECLAIMS: usize = 3;

/// The parts of an instance needed for routing.
#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) this_instance: Owner,
    pub(crate) directory: Limited,
    pub(crate) heartbeat: Arc<Heartbeat>,
    pub(crate) owners: OwnerCache,
    pub(crate) relay: Relay,
    pub(crate) turned_away: Arc<TurnedAway>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) restores: PendingRestores,
    pub(crate) generations: Arc<Generations>,
    pub(crate) shutdown: Shutdown,
    pub(crate) former_owners: FormerOwners,
    pub(crate) waiting_calls: WaitingCalls,
    /// Permits for the lookups that decide whether an orphan is cancelled.
    pub(crate) confirmation_permits: Semaphore,
}

// === impl Router ===

impl Router {
    /// Returns the action for a client's new request.
    ///
    /// If its session is open here, the request enters the session's gate.
    pub(crate) fn classify(&self, session: Option<&str>) -> (Action, Option<InFlightGuard>) {
        let guard = session.and_then(|id| self.sessions.enter(id));
        // Do not serve a session without a lookup if it is being restored, or if another instance may have claimed it.
        let is_local =
            |id| guard.is_some() && !self.is_being_restored(id) && self.heartbeat.may_serve(id);
        let incoming = IncomingRequest {
            has_session: session.is_some(),
            is_local: session.is_some_and(is_local),
            is_from_peer: false,
            stage: ShutdownStage::Running,
        };
        (incoming.action(), guard)
    }

    /// Returns the action for a peer's request, and whether its session is present here.
    pub(crate) fn classify_from_peer(&self, session: Option<&str>) -> (Action, Presence) {
        let presence = session.and_then(|id| self.presence(id));
        let incoming = IncomingRequest {
            has_session: session.is_some(),
            is_local: presence.is_some(),
            is_from_peer: true,
            stage: self.shutdown.stage(),
        };
        (incoming.action(), presence.unwrap_or_default())
    }

    /// Returns a session's local presence, or `None` if a peer must claim the session.
    ///
    /// A session is present while it is open or being restored here. After its client has ended it, the session stays present until its
    /// tombstone is in the directory.
    fn presence(&self, id: &str) -> Option<Presence> {
        // Check the restore first: if it completes right after this check, the session is found open below.
        let restore = self.join_restore(id);
        let guard = self.sessions.enter(id);
        let is_local =
            restore.is_some() || guard.is_some() || self.sessions.is_deleted(SessionHash::of(id));
        is_local.then_some(Presence { restore, guard })
    }

    /// Returns `true` if a session is about to be restored here.
    fn is_being_restored(&self, id: &str) -> bool {
        !self.restores.is_empty() && self.restores.contains(SessionHash::of(id))
    }

    /// Joins a peer's request to its session's restore, or returns `None` if none is pending.
    fn join_restore(&self, id: &str) -> Option<PendingRestore> {
        let is_possible = !self.restores.is_empty();
        is_possible.then(|| self.restores.join(SessionHash::of(id)))?
    }

    /// Called when a request no longer takes part in restoring its session.
    pub(crate) fn on_request_done(&self, id: &str) {
        let session = SessionHash::of(id);
        // Discard any parameters loaded for this request but never used to restore a session.
        self.restores
            .run_unless_restoring(session, || self.sessions.discard_unopened(session));
        self.shutdown.on_call_ended(Some(id));
    }

    /// Returns `true` if a session is open here. A session being restored might not be open yet.
    pub(crate) fn is_open_here(&self, session: Option<&str>) -> bool {
        session.is_some_and(|id| self.sessions.is_open(SessionHash::of(id)))
    }

    /// Waits up to [`DIRECTORY_TIMEOUT`] for a local session to be ready for new requests.
    ///
    /// Returns `true` if the session may serve them. After this process has stalled, the session may have to be rewritten first.
    pub(crate) async fn wait_until_verified(&self, id: &str) -> bool {
        if self.heartbeat.may_serve(id) {
            return true;
        }
        let decided = timeout(DIRECTORY_TIMEOUT, self.heartbeat.wait_until_decided(id)).await;
        decided.is_ok() && self.sessions.is_local(SessionHash::of(id))
    }

    /// Rejects a request. If the refusal is temporary, the client counts as turned away.
    pub(crate) fn reject(&self, refusal: Refusal) -> Response<Body> {
        if refusal.is_temporary() {
            self.turned_away.record();
        }
        refusal.into()
    }

    /// Returns the response to send when one of this instance's sessions could not be restored.
    ///
    /// Normally, the response asks the client to retry. Once three attempts have failed even though the directory returned the parameters,
    /// the session is abandoned (unless another instance now owns it), and the response is a 404, which makes the client open a new
    /// session.
    pub(crate) async fn restore_failure(&self, id: &str) -> Response<Body> {
        // Another instance may have claimed the session during the attempt.
        let snapshot = self.directory.look_up(SessionHash::of(id)).await;
        let has_other_owner = |snapshot: &SessionSnapshot| matches!(snapshot.record, Some(Record::Owned(ownership)) if ownership.owner != self.this_instance);
        if snapshot.is_ok_and(|snapshot| !has_other_owner(&snapshot))
            && self.abandon_if_unrestorable(id)
        {
            return refusals::no_session();
        }
        self.reject(Refusal::OwnerUnknown)
    }

    /// Abandons a session after too many failed attempts to restore it. Returns `true` if it did.
    pub(crate) fn abandon_if_unrestorable(&self, id: &str) -> bool {
        let session = SessionHash::of(id);
        let unrestorable = self.sessions.restore_attempts.unrestorable_epoch(session);
        if let Some(epoch) = unrestorable {
            warn!(target: "mcp_cancel_cluster", %session, "abandoning a session because its handler refuses to restore it or its parameters cannot be parsed");
            self.sessions.on_unrestorable(id, epoch);
        }
        unrestorable.is_some()
    }

    /// Waits until a session is fully closed, if this instance has relinquished it.
    pub(crate) async fn wait_until_closed(&self, id: &str) {
        let session = SessionHash::of(id);
        self.sessions.relinquished.wait_until_closed(session).await;
    }

    /// Rewrites a GET's event id into the form expected by the local session manager.
    ///
    /// Other requests are left unchanged.
    pub(crate) fn rewrite_event_id(&self, request: &mut Request<Body>) -> RewriteOutcome {
        if request.method() != Method::GET {
            return RewriteOutcome::Unchanged;
        }
        let session = Fields::parse(request.headers()).session;
        let generation = session
            .filter(|id| self.sessions.has_open_gate(id))
            .map(|id| self.generations.get(id));
        resume::rewrite_event_id(request.headers_mut(), generation)
    }

    /// Returns a response unchanged, or a 503 if the client must not be given its new session.
    pub(crate) fn admit_new_session(&self, response: Response<Body>) -> Response<Body> {
        let new_session = response.headers().get(&SESSION_ID);
        let new_session = new_session.and_then(|id| id.to_str().ok());
        if new_session.is_none_or(|id| self.sessions.admit_new_session(id)) {
            response
        } else {
            refusals::session_not_opened()
        }
    }

    /// Routes a request whose session is not known to be open here.
    pub(crate) async fn route(&self, request: Request<Body>) -> Routed {
        let Some(id) = Fields::parse(request.headers()).session.map(str::to_owned) else {
            return Routed::Local(request, None);
        };
        let session = SessionHash::of(&id);
        let is_call = request.method() == Method::POST;
        // Keep this guard until the request has a response or its session is about to be restored here.
        let _in_flight = is_call.then(|| self.shutdown.enter_relay());
        let mut plan = RoutingPlan::new(self.this_instance.incarnation, is_call);
        let mut replayable = ReplayableRequest::new(request);
        let mut action = Action::LookUp;
        // Register the restore before sending the claim, because peers may find the new owner in the directory before this instance has
        // received the reply.
        let (mut restore, mut waiting) = (None, None);
        loop {
            action = match action {
                Action::LookUp => {
                    let (known, is_consistent) = self.look_up(session).await;
                    metrics::count_lookup(known.label());
                    match known {
                        Known::Owner(Ownership { owner, .. })
                            if owner == self.this_instance
                                && self.shutdown.has_relinquished(&id) =>
                        {
                            plan.on_relinquished()
                        }
                        known => plan.on_lookup(known, is_consistent),
                    }
                }
                Action::LookUpLater => {
                    sleep(RECHECK_DELAY).await;
                    Action::LookUp
                }
                // A stopped instance does not restore any more sessions.
                Action::Claim(..) | Action::Reclaim if self.shutdown.has_stopped() => {
                    plan.refuse(Refusal::SessionMoved)
                }
                Action::Relay(ownership) => {
                    restore = None;
                    let sent = self.send(&mut replayable, session, ownership.owner).await;
                    let sent = match sent {
                        Ok(sent) => sent,
                        Err(refusal) => return Routed::Answered(refusal.into()),
                    };
                    metrics::count_relay(
                        sent.as_ref()
                            .err()
                            .map_or("answered", |failure| failure.label()),
                    );
                    match sent {
                        Ok(response) => return end_wait(waiting, Routed::Answered(response)),
                        Err(failure) => {
                            debug!(target: "mcp_cancel_cluster", %session, owner = %ownership.owner.address, ?failure, "relay failed");
                            self.owners.invalidate(session, ownership);
                            // The next steps take time. If the client disconnects in the meantime, it counts as turned away.
                            waiting = waiting.or_else(|| Some(self.turned_away.begin_wait()));
                            plan.on_relay_failure(ownership, failure)
                        }
                    }
                }
                // The owner's answer may predate a claim that the directory has lost.
                Action::Claim(_, Cause::Relinquished) if !self.heartbeat.is_up_to_date().await => {
                    Action::Refuse(Refusal::OwnerUnknown)
                }
                Action::CheckLease(ownership) => {
                    plan.on_lease(ownership, self.lease_state(ownership.owner).await)
                }
                Action::Claim(previous, cause) => {
                    restore = Some(self.restores.add(session));
                    let (claimed, is_consistent) = self.claim(session, previous).await;
                    metrics::count_claim(claimed.label());
                    if claimed == Claimed::Won {
                        info!(target: "mcp_cancel_cluster", %session, former = %previous.owner.address, "session claimed: {cause}");
                    }
                    plan.on_claim(claimed, is_consistent, replayable.is_intact())
                }
                Action::Reclaim => {
                    let restore = restore.unwrap_or_else(|| self.restores.add(session));
                    return end_wait(waiting, Routed::local(replayable, Some(restore)));
                }
                // The session provably has no owner, yet it is open here. Rewriting it either finds its tombstone or restores its record.
                Action::Serve if self.sessions.is_open(session) => {
                    self.sessions.write_again(session);
                    Action::Refuse(Refusal::SessionMoved)
                }
                Action::Serve | Action::Transfer | Action::Moved => {
                    self.wait_until_closed(&id).await;
                    return end_wait(waiting, Routed::local(replayable, None));
                }
                Action::Refuse(refusal) => {
                    debug!(target: "mcp_cancel_cluster", %session, ?refusal, "request refused");
                    return Routed::Answered(self.reject(refusal));
                }
            };
        }
    }

    /// Reads a request's body and sends the request to its session's owner.
    ///
    /// A call waits for its response for as long as the owner still owns the session. Ownership is first checked after
    /// [`UNSTARTED_TIMEOUT`], by which time an unstarted call has already failed. For any other request, the client counts as turned away
    /// if it has to wait long ([`TurnedAway::record_if_slow`]).
    ///
    /// # Errors
    ///
    /// Returns the refusal if the request cannot be relayed. The inner error is the reason the relay failed.
    async fn send(
        &self,
        replayable: &mut ReplayableRequest,
        session: SessionHash,
        owner: Owner,
    ) -> Result<Result<Response<Body>, Failure>, Refusal> {
        if replayable.head.method != Method::POST {
            let sent = async {
                self.relay.prepare(replayable).await?;
                Ok(self.relay.send(replayable, owner, None).await)
            };
            return self.turned_away.record_if_slow(sent).await;
        }
        self.relay.prepare(replayable).await?;
        let in_flight = self.shutdown.enter_relay();
        let mut sent = pin!(self.relay.send(replayable, owner, in_flight));
        let mut next_check = UNSTARTED_TIMEOUT;
        loop {
            if let Ok(sent) = timeout(next_check, &mut sent).await {
                return Ok(sent);
            }
            next_check = OWNER_RECHECK_INTERVAL;
            let snapshot = self.directory.look_up(session).await;
            let is_owner = |snapshot: &SessionSnapshot| match snapshot.record {
                Some(Record::Owned(ownership)) => ownership.owner == owner,
                Some(Record::Deleted(_)) => false,
                // If the owner is alive, it will rewrite its record.
                None => {
                    snapshot.leases.get(owner.incarnation).is_some()
                        || !self.proves_absence(snapshot)
                }
            };
            if snapshot.is_ok_and(|snapshot| !is_owner(&snapshot)) {
                return Ok(Err(Failure::Broken));
            }
        }
    }

    /// Looks up the owner. The `bool` indicates whether the session provably does not exist.
    async fn look_up(&self, session: SessionHash) -> (Known, bool) {
        match self.owners.find(session).await {
            Ok(Found::Owner(ownership)) => (Known::Owner(ownership), false),
            Ok(Found::Unowned(snapshot)) => (Known::Unowned, self.proves_absence(&snapshot)),
            Err(_) => (Known::NoAnswer, false),
        }
    }

    /// Returns `true` if a snapshot without an owner proves that the session has none.
    pub(crate) fn proves_absence(&self, snapshot: &SessionSnapshot) -> bool {
        matches!(snapshot.record, Some(Record::Deleted(_)))
            || self.heartbeat.proves_absence(&snapshot.leases)
    }

    async fn lease_state(&self, owner: Owner) -> LeaseState {
        match self.directory.leases().await {
            Ok(leases) if leases.get(owner.incarnation).is_some() => LeaseState::Alive,
            Ok(leases) if self.heartbeat.proves_absence(&leases) => LeaseState::Expired,
            Ok(_) | Err(_) => LeaseState::NoAnswer,
        }
    }

    /// Reclaims one of this instance's own sessions before it is restored.
    ///
    /// The request is refused after [`MAX_RECLAIMS`] lost claims. Because reclaiming changes the record, a peer that has already received
    /// 421 for the session can no longer claim it.
    pub(crate) async fn reclaim(&self, session: SessionHash) -> Reclaimed {
        if !self.heartbeat.is_up_to_date().await {
            // A new epoch would supersede a later claim that the directory has lost.
            return Reclaimed::Refused(Refusal::OwnerUnknown);
        }
        let (mut known, mut is_consistent) = self.look_up(session).await;
        for _ in 0..MAX_RECLAIMS {
            let current = match known {
                Known::Owner(ownership) if ownership.owner == self.this_instance => ownership,
                Known::Owner(_) => return Reclaimed::Moved,
                // The session does not exist, so the application responds accordingly.
                Known::Unowned if is_consistent => return Reclaimed::Local,
                Known::Unowned | Known::NoAnswer => {
                    return Reclaimed::Refused(Refusal::OwnerUnknown);
                }
            };
            let claimed = self.claim(session, current).await;
            (known, is_consistent) = match claimed {
                (Claimed::Won, _) => return Reclaimed::Local,
                (Claimed::Lost(ownership), _) => (Known::Owner(ownership), false),
                (Claimed::Unowned, is_consistent) => (Known::Unowned, is_consistent),
                (Claimed::NoAnswer, _) => (Known::NoAnswer, false),
            };
        }
        Reclaimed::Refused(Refusal::SessionMoved)
    }

    /// Claims a session and records its owner. The `bool` indicates whether the session provably does not exist.
    async fn claim(&self, session: SessionHash, previous: Ownership) -> (Claimed, bool) {
        let wanted = previous.claimed_by(self.this_instance);
        match self.directory.claim(session, previous, wanted).await {
            Ok(Claim::Won) => {
                self.owners.mark_own(session);
                if previous.owner != self.this_instance {
                    self.former_owners
                        .record(session, previous.owner.incarnation);
                }
                self.sessions.on_claimed(session, wanted.epoch);
                self.shutdown.on_reclaimed(session);
                (Claimed::Won, false)
            }
            Ok(Claim::Lost(Record::Owned(ownership))) => {
                self.owners.insert(session, ownership);
                (Claimed::Lost(ownership), false)
            }
            Ok(Claim::Lost(Record::Deleted(_))) => (Claimed::Unowned, true),
            Ok(Claim::Unknown) => match self.look_up(session).await {
                // An instance has registered the session in the meantime.
                (Known::Owner(ownership), _) => (Claimed::Lost(ownership), false),
                (Known::Unowned, is_consistent) => (Claimed::Unowned, is_consistent),
                (Known::NoAnswer, _) => (Claimed::NoAnswer, false),
            },
            Err(_) => (Claimed::NoAnswer, false),
        }
    }
}
