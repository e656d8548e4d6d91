//! Takes a request to where its session lives: it asks [`Way`] what to do, does it, and tells it what came of that.

use std::{pin::pin, sync::Arc, time::Duration};

use axum::body::Body;
use http::{Method, Request, Response};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::{
    arrivals::{Arrivals, Expected},
    departure::{Departure, Stage},
    directory::{Claim, Directory as _, LIMIT, Limited, Look},
    drain_gate::InFlightGuard,
    errand::Errand,
    fields::{Fields, SESSION_ID},
    heartbeat::Heartbeat,
    held::Held,
    ids::{Owner, Ownership, Record, SessionHash},
    lives::Lives,
    meter,
    owners::{Found, Owners},
    refusals,
    relay::{Relay, UNBEGUN_TIMEOUT},
    resume::{self, Localized, LostCall},
    routed::{HandedOver, Presence, Routed, Taken},
    sessions::Sessions,
    turned_away::{ON_ITS_WAY, TurnedAway, Waiting},
    way::{Arrival, Cause, Claimed, Failure, Known, Lease, Refusal, Step, Way},
};

/// How long after a look-up the next is, for who claims what this instance gave up: 50 ms.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How often it is asked whether a session is still the owner's that has not answered to a call: every 10 s.
pub(crate) const STILL_OWNER: Duration = Duration::from_secs(10);

/// How often a session of this instance is taken that somebody else takes at the same time: 3 times.
const MAX_TAKES: usize = 3;

/// What of an instance takes part in routing.
#[derive(Debug)]
pub(crate) struct Router {
    pub(crate) me: Owner,
    pub(crate) directory: Limited,
    pub(crate) heartbeat: Arc<Heartbeat>,
    pub(crate) owners: Owners,
    pub(crate) relay: Relay,
    pub(crate) turned_away: Arc<TurnedAway>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) arrivals: Arrivals,
    pub(crate) lives: Arc<Lives>,
    pub(crate) departure: Departure,
}

// === impl Router ===

impl Router {
    /// What is to be done with a client's request that has just come. It has entered the gate of its session, if that is here.
    pub(crate) fn arrive(&self, session: Option<&str>) -> (Step, Option<InFlightGuard>) {
        let guard = session.and_then(|id| self.sessions.enter(id));
        // One that is being restored is not here before that is done. One that another instance may have claimed is looked up.
        let is_here = |id| guard.is_some() && !self.comes(id) && self.heartbeat.may_serve(id);
        let arrival = Arrival {
            has_session: session.is_some(),
            is_here: session.is_some_and(is_here),
            is_from_peer: false,
            stage: Stage::Here,
        };
        (arrival.step(), guard)
    }

    /// What is to be done with a peer's request, and what of its session is here.
    pub(crate) fn arrive_from_peer(&self, session: Option<&str>) -> (Step, Presence) {
        let presence = session.and_then(|id| self.presence(id));
        let arrival = Arrival {
            has_session: session.is_some(),
            is_here: presence.is_some(),
            is_from_peer: true,
            stage: self.departure.stage(),
        };
        (arrival.step(), presence.unwrap_or_default())
    }

    /// What is here of a session that a peer asks for. `None` if the peer is to claim it: not one that comes, and not one that its
    /// client has ended.
    fn presence(&self, id: &str) -> Option<Presence> {
        // First: one that has come since is found below.
        let joined = self.joins(id);
        let guard = self.sessions.enter(id);
        let is_here =
            joined.is_some() || guard.is_some() || self.sessions.is_deleted(SessionHash::of(id));
        is_here.then_some(Presence { joined, guard })
    }

    /// Whether a session is on its way here.
    fn comes(&self, id: &str) -> bool {
        !self.arrivals.are_none() && self.arrivals.has(SessionHash::of(id))
    }

    /// The arrival that a request of a peer takes part in, if its session is on its way here.
    fn joins(&self, id: &str) -> Option<Expected> {
        let is_possible = !self.arrivals.are_none();
        is_possible.then(|| self.arrivals.join(SessionHash::of(id)))?
    }

    /// Nothing of a request brings its session any more.
    pub(crate) fn is_over(&self, id: &str) {
        let session = SessionHash::of(id);
        // What was loaded for it and not restored is brought by the next as if it had not been.
        self.arrivals
            .unless_coming(session, || self.sessions.discard_unopened(session));
        self.departure.ended(Some(id));
    }

    /// Whether a session lives here. One that is on its way may, or not yet.
    pub(crate) fn lives_here(&self, session: Option<&str>) -> bool {
        session.is_some_and(|id| self.sessions.is_open(SessionHash::of(id)))
    }

    /// Whether a session that is open here may serve something new, by now or in a moment: after this process stood still, sessions are
    /// written again first.
    pub(crate) async fn is_verified(&self, id: &str) -> bool {
        if self.heartbeat.may_serve(id) {
            return true;
        }
        let decided = timeout(LIMIT, self.heartbeat.until_decided(id)).await;
        decided.is_ok() && self.sessions.is_local(SessionHash::of(id))
    }

    /// Asks a client to come again.
    pub(crate) fn turn_away(&self, refusal: Refusal) -> Response<Body> {
        if refusal.is_temporary() {
            self.turned_away.note();
        }
        refusal.into()
    }

    /// What is answered when a session of this instance could not be restored: that its client should come again, or, after a few tries
    /// that did not fail for the directory, that there is none, so that its client opens a new one.
    pub(crate) fn not_restored(&self, id: &str) -> Response<Body> {
        if !self.sessions.is_unrestorable(id) {
            return self.turn_away(Refusal::NotSound);
        }
        let session = SessionHash::of(id);
        warn!(target: "mcp_cancel_cluster", %session, "a session is given up, because its handler refuses it when it is restored, or its parameters cannot be read");
        self.sessions.deleted(id);
        refusals::no_session()
    }

    /// Returns when nothing is left of a session that this instance has relinquished.
    pub(crate) async fn until_closed(&self, id: &str) {
        self.sessions
            .relinquished
            .until_closed(SessionHash::of(id))
            .await;
    }

    /// Serves a peer's request, or hands its session over.
    pub(crate) async fn hand_over(&self, request: Request<Body>) -> HandedOver {
        let session = Fields::of(request.headers()).session.map(str::to_owned);
        let mut held = Held::new(request);
        let errand = match Errand::of(&mut held).await {
            Ok(errand) => errand,
            Err(refusal) => return HandedOver::Answered(refusal.into()),
        };
        let (Some(request), Some(id)) = (held.into_request(), session) else {
            return HandedOver::Answered(Refusal::Again.into());
        };
        if errand == Errand::Call {
            self.departure.until_idle(&id).await;
        }
        if matches!(errand, Errand::Call | Errand::Stream) && !self.can_be_claimed(&id).await {
            return HandedOver::Answered(self.turn_away(Refusal::NotSound));
        }
        if errand == Errand::Call {
            self.departure.hand_over(&id).await;
        } else if errand == Errand::Stream {
            self.departure.try_hand_over(&id);
        }
        match self.presence(&id) {
            Some(presence) => HandedOver::Not(request, presence),
            None => HandedOver::Moved(request),
        }
    }

    /// Whether the directory has a session as this instance's, so that a peer can claim it once it is given up. If it has lost an open one,
    /// that is written again.
    async fn can_be_claimed(&self, id: &str) -> bool {
        let session = SessionHash::of(id);
        if !self.sessions.is_open(session) {
            return true;
        }
        let look = self.directory.look(session).await;
        let is_mine =
            |look: Look| matches!(look.record, Some(Record::Owned(is)) if is.owner == self.me);
        let is_there = look.is_ok_and(is_mine);
        if !is_there {
            self.sessions.write_again(session);
        }
        is_there
    }

    /// Has a request that is served here name its event so that this instance understands it.
    pub(crate) fn localize(&self, request: &mut Request<Body>) -> Localized {
        if request.method() != Method::GET {
            return Localized::Nothing;
        }
        let session = Fields::of(request.headers()).session;
        let life = session
            .filter(|id| self.sessions.has(id))
            .map(|id| self.lives.of(id));
        resume::localize(request.headers_mut(), life)
    }

    /// Gives a client the session that it has opened, if the response is one that does.
    pub(crate) fn admit_new_session(&self, response: Response<Body>) -> Response<Body> {
        let opened = response.headers().get(&SESSION_ID);
        let opened = opened.and_then(|id| id.to_str().ok());
        if opened.is_none_or(|id| self.sessions.admit_new_session(id)) {
            response
        } else {
            refusals::not_begun()
        }
    }

    /// Answers for a call that ended with its instance, in the place of what the application says.
    pub(crate) async fn answer(&self, lost: &LostCall, accepted: Response<Body>) -> Response<Body> {
        let (directory, session) = (&self.directory, lost.session);
        let find = || directory.answer(session, lost.incarnation, lost.number);
        let mut kept = find().await;
        if matches!(kept, Ok(None)) {
            if !self.heartbeat.has_all_answers().await {
                return self.turn_away(Refusal::NotSound);
            }
            // Its instance may have written it before it renewed the lease that was just read.
            kept = find().await;
        }
        match kept {
            Ok(kept) => lost.answer(accepted, kept.as_ref()),
            Err(_) => self.turn_away(Refusal::NotSound),
        }
    }

    /// Routes a request whose session does not live here.
    pub(crate) async fn route(&self, request: Request<Body>) -> Routed {
        let Some(id) = Fields::of(request.headers()).session.map(str::to_owned) else {
            return Routed::Here(request, None);
        };
        let session = SessionHash::of(&id);
        let is_call = request.method() == Method::POST;
        let mut way = Way::new(self.me.incarnation, is_call);
        let mut held = Held::new(request);
        let mut step = Step::LookUp;
        // From before it is claimed: peers may learn of the new owner before that one does.
        let (mut expected, mut waiting) = (None, None);
        loop {
            step = match step {
                Step::LookUp => {
                    let (known, is_consistent) = self.look_up(session).await;
                    meter::looked_up(known);
                    match known {
                        Known::Owner(Ownership { owner, .. })
                            if owner == self.me && self.departure.has_given_up(&id) =>
                        {
                            way.given_up()
                        }
                        known => way.known(known, is_consistent),
                    }
                }
                Step::LookAgain => {
                    sleep(LOOK_AGAIN).await;
                    Step::LookUp
                }
                // Nothing comes to an instance that is gone.
                Step::Claim(..) | Step::Take if self.departure.stage() >= Stage::Gone => {
                    Step::Refuse(Refusal::Again)
                }
                Step::Relay(is) => {
                    expected = None;
                    if let Err(refusal) = self.relay.prepare(&mut held).await {
                        return Routed::Answered(refusal.into());
                    }
                    let sent = self.send(&mut held, session, is.owner).await;
                    meter::relayed(sent.as_ref().err().copied());
                    match sent {
                        Ok(response) => return served(waiting, Routed::Answered(response)),
                        Err(failure) => {
                            debug!(target: "mcp_cancel_cluster", %session, owner = %is.owner.address, ?failure, "relay failed");
                            self.owners.forget(session, is);
                            // What follows takes time, and its client may hang up meanwhile.
                            waiting = waiting.or_else(|| Some(self.turned_away.wait()));
                            way.failed(is, failure)
                        }
                    }
                }
                // Its owner's word may be older than a claim that the directory has lost.
                Step::Claim(_, Cause::GivenUp) if !self.heartbeat.is_up_to_date().await => {
                    Step::Refuse(Refusal::NotSound)
                }
                Step::AskLease(is) => way.lease(is, self.lease(is.owner).await),
                Step::Claim(former, cause) => {
                    expected = Some(self.arrivals.expect(session));
                    let (claimed, is_consistent) = self.claim(session, former).await;
                    meter::claimed(claimed);
                    if claimed == Claimed::Won {
                        info!(target: "mcp_cancel_cluster", %session, former = %former.owner.address, "session claimed: {cause}");
                    }
                    way.claimed(claimed, is_consistent, held.is_whole())
                }
                Step::Take => {
                    let coming = expected.unwrap_or_else(|| self.arrivals.expect(session));
                    return served(waiting, Routed::here(held, Some(coming)));
                }
                // The directory has none. What is open here all the same is not this instance's any more, or is written again.
                Step::Serve if self.sessions.is_open(session) => {
                    self.sessions.write_again(session);
                    Step::Refuse(Refusal::Again)
                }
                Step::Serve | Step::HandOver | Step::Moved => {
                    self.until_closed(&id).await;
                    return served(waiting, Routed::here(held, None));
                }
                Step::Refuse(refusal) => {
                    debug!(target: "mcp_cancel_cluster", %session, ?refusal, "request refused");
                    return Routed::Answered(self.turn_away(refusal));
                }
            };
        }
    }

    /// Sends a request to the owner of its session. The client of one that takes long, and is no call, counts as turned away meanwhile.
    /// A call waits for as long as the session is the owner's. One that has not begun fails before that is looked up.
    async fn send(
        &self,
        held: &mut Held,
        session: SessionHash,
        owner: Owner,
    ) -> Result<Response<Body>, Failure> {
        let is_call = held.head.method == Method::POST;
        let mut sent = pin!(self.relay.send(held, owner));
        if is_call {
            let mut next_look = UNBEGUN_TIMEOUT;
            return loop {
                if let Ok(sent) = timeout(next_look, &mut sent).await {
                    break sent;
                }
                next_look = STILL_OWNER;
                let look = self.directory.look(session).await;
                let is_its = |look: &Look| match look.record {
                    Some(Record::Owned(is)) => is.owner == owner,
                    Some(Record::Deleted(_)) => false,
                    // An owner that lives writes it again.
                    None => look.leases.of(owner.incarnation).is_some() || !self.is_proof(look),
                };
                if look.is_ok_and(|look| !is_its(&look)) {
                    break Err(Failure::Broken);
                }
            };
        }
        if let Ok(sent) = timeout(ON_ITS_WAY, &mut sent).await {
            return sent;
        }
        let waiting = self.turned_away.wait();
        let sent = sent.await;
        if sent.is_ok() {
            waiting.served();
        }
        sent
    }

    /// Asks for the owner. Also says whether the session does not exist beyond doubt, if nobody has it.
    async fn look_up(&self, session: SessionHash) -> (Known, bool) {
        match self.owners.find(session).await {
            Ok(Found::Owner(is)) => (Known::Owner(is), false),
            Ok(Found::Nobody(look)) => (Known::Nobody, self.is_proof(&look)),
            Err(_) => (Known::NoAnswer, false),
        }
    }

    /// Whether a look that found no owner proves that there is none.
    pub(crate) fn is_proof(&self, look: &Look) -> bool {
        matches!(look.record, Some(Record::Deleted(_))) || self.heartbeat.proves(&look.leases)
    }

    async fn lease(&self, owner: Owner) -> Lease {
        match self.directory.leases().await {
            Ok(leases) if leases.of(owner.incarnation).is_some() => Lease::Alive,
            Ok(leases) if self.heartbeat.proves(&leases) => Lease::Gone,
            Ok(_) | Err(_) => Lease::NoAnswer,
        }
    }

    /// Takes a session of this instance once more, before it is brought to life: who was told before that it is not here claims it
    /// in vain from now on.
    pub(crate) async fn take(&self, session: SessionHash) -> Taken {
        if !self.heartbeat.is_up_to_date().await {
            // A new epoch would outdo a later claim that the directory has lost.
            return Taken::Refused(Refusal::NotSound);
        }
        let (mut known, mut is_consistent) = self.look_up(session).await;
        for _ in 0..MAX_TAKES {
            let mine = match known {
                Known::Owner(is) if is.owner == self.me => is,
                Known::Owner(_) => return Taken::Elsewhere,
                // The application says that there is no such session.
                Known::Nobody if is_consistent => return Taken::Here,
                Known::Nobody | Known::NoAnswer => return Taken::Refused(Refusal::NotSound),
            };
            let claimed = self.claim(session, mine).await;
            (known, is_consistent) = match claimed {
                (Claimed::Won, _) => return Taken::Here,
                (Claimed::Lost(is), _) => (Known::Owner(is), false),
                (Claimed::Nobody, is_consistent) => (Known::Nobody, is_consistent),
                (Claimed::NoAnswer, _) => (Known::NoAnswer, false),
            };
        }
        Taken::Refused(Refusal::Again)
    }

    /// Claims a session. Also says whether it does not exist beyond doubt, if nobody has it.
    async fn claim(&self, session: SessionHash, former: Ownership) -> (Claimed, bool) {
        let wanted = former.claimed_by(self.me);
        match self.directory.claim(session, former, wanted).await {
            Ok(Claim::Won) => {
                self.owners.is_mine(session);
                self.sessions.claimed(session, wanted.epoch);
                self.departure.has_back(session);
                (Claimed::Won, false)
            }
            Ok(Claim::Lost(Record::Owned(is))) => {
                self.owners.learn(session, is);
                (Claimed::Lost(is), false)
            }
            Ok(Claim::Lost(Record::Deleted(_))) => (Claimed::Nobody, true),
            Ok(Claim::Unknown) => match self.look_up(session).await {
                // Somebody has entered it in between.
                (Known::Owner(is), _) => (Claimed::Lost(is), false),
                (Known::Nobody, is_consistent) => (Claimed::Nobody, is_consistent),
                (Known::NoAnswer, _) => (Claimed::NoAnswer, false),
            },
            Err(_) => (Claimed::NoAnswer, false),
        }
    }
}

/// Its client does not wait for an owner any more.
fn served(waiting: Option<Waiting>, routed: Routed) -> Routed {
    if let Some(waiting) = waiting {
        waiting.served();
    }
    routed
}
