//! The plan's decisions, case by case and under arbitrary replies.

use std::net::SocketAddr;

use proptest::prelude::*;

use super::*;

fn owner(number: u16) -> Ownership {
    let address = SocketAddr::from(([127, 0, 0, 1], number));
    let text = format!("{address} {} 7", incarnation(number));
    text.parse().unwrap()
}

fn incarnation(number: u16) -> Incarnation {
    format!("{number:016x}").parse().unwrap()
}

fn plan(is_call: bool) -> RoutingPlan {
    RoutingPlan::new(incarnation(1), is_call)
}

const STAGES: [ShutdownStage; 4] = [
    ShutdownStage::Running,
    ShutdownStage::Transferring,
    ShutdownStage::Stopped,
    ShutdownStage::Closed,
];

#[test]
fn a_head_decides_at_once_or_requires_a_lookup() {
    let rows = [
        // has_session, is_local, is_from_peer
        ((false, false, false), [Action::Serve; 4]),
        ((true, true, false), [Action::Serve; 4]),
        ((true, false, false), [Action::LookUp; 4]),
        (
            (true, true, true),
            [
                Action::Serve,
                Action::Transfer,
                Action::Moved,
                Action::Moved,
            ],
        ),
        ((true, false, true), [Action::Moved; 4]),
        ((false, false, true), [Action::Moved; 4]),
    ];
    for ((has_session, is_local, is_from_peer), actions) in rows {
        for (stage, action) in STAGES.into_iter().zip(actions) {
            let incoming = IncomingRequest {
                has_session,
                is_local,
                is_from_peer,
                stage,
            };
            assert_eq!(incoming.action(), action, "{incoming:?}");
        }
    }
}

#[test]
fn an_unknown_session_does_not_exist_only_if_the_directory_is_consistent() {
    let refused = Action::Refuse(Refusal::OwnerUnknown);
    let rows = [
        (Known::Owner(owner(1)), true, Action::Reclaim),
        (Known::Owner(owner(1)), false, Action::Reclaim),
        (Known::Owner(owner(2)), true, Action::Relay(owner(2))),
        (Known::Owner(owner(2)), false, Action::Relay(owner(2))),
        (Known::Unowned, true, Action::Serve),
        (Known::Unowned, false, refused),
        (Known::NoAnswer, true, refused),
        (Known::NoAnswer, false, refused),
    ];
    for (known, is_consistent, action) in rows {
        assert_eq!(
            plan(true).on_lookup(known, is_consistent),
            action,
            "{known:?} {is_consistent}"
        );
    }
}

#[test]
fn a_call_that_may_have_started_is_refused_and_its_session_claimed_if_the_owner_has_ended() {
    let broken = Action::Refuse(Refusal::ConnectionLost);
    let broken_plan = || {
        let mut plan = plan(true);
        let action = plan.on_relay_failure(owner(2), Failure::Broken);
        assert_eq!(action, Action::CheckLease(owner(2)));
        plan
    };
    for lease in [LeaseState::Alive, LeaseState::NoAnswer] {
        assert_eq!(broken_plan().on_lease(owner(2), lease), broken, "{lease:?}");
    }
    for claimed in [
        Claimed::Won,
        Claimed::Lost(owner(1)),
        Claimed::Lost(owner(3)),
        Claimed::Unowned,
        Claimed::NoAnswer,
    ] {
        let mut plan = broken_plan();
        let action = plan.on_lease(owner(2), LeaseState::Expired);
        assert_eq!(action, Action::Claim(owner(2), Cause::LeaseLapsed));
        assert_eq!(plan.on_claim(claimed, true, true), broken, "{claimed:?}");
    }
    // An instance that has stopped claims nothing.
    assert_eq!(broken_plan().refuse(Refusal::SessionMoved), broken);
    assert_eq!(
        plan(true).refuse(Refusal::SessionMoved),
        Action::Refuse(Refusal::SessionMoved)
    );
}

#[test]
fn a_session_is_claimed_only_if_its_owner_has_no_lease_or_relinquished_it() {
    let claim = |cause| Action::Claim(owner(2), cause);
    let (moved, check_lease) = (claim(Cause::Relinquished), Action::CheckLease(owner(2)));
    let stalled = Action::Refuse(Refusal::Stalled);
    let rows = [
        (Failure::Refused, check_lease, check_lease),
        (Failure::Moved, moved, moved),
        (Failure::Misdirected, check_lease, check_lease),
        (Failure::Unreachable, check_lease, check_lease),
        (Failure::Silent, check_lease, check_lease),
        (Failure::Broken, check_lease, check_lease),
        (Failure::Stalled, stalled, stalled),
    ];
    for (failure, call, other) in rows {
        assert_eq!(
            plan(true).on_relay_failure(owner(2), failure),
            call,
            "{failure:?}"
        );
        assert_eq!(
            plan(false).on_relay_failure(owner(2), failure),
            other,
            "{failure:?}"
        );
    }
    let unreachable = Action::Refuse(Refusal::OwnerUnreachable);
    let rows = [
        (LeaseState::Expired, claim(Cause::LeaseLapsed)),
        (LeaseState::Alive, unreachable),
        (LeaseState::NoAnswer, Action::Refuse(Refusal::OwnerUnknown)),
    ];
    for (lease, action) in rows {
        assert_eq!(plan(false).on_lease(owner(2), lease), action, "{lease:?}");
    }
}

#[test]
fn after_a_claim_the_request_is_served_by_the_owner_if_possible() {
    let not_consistent = Action::Refuse(Refusal::OwnerUnknown);
    let session_moved = Action::Refuse(Refusal::SessionMoved);
    let rows = [
        // claimed, is_consistent, is_intact
        (Claimed::Won, true, true, Action::Reclaim),
        (Claimed::Won, false, true, Action::Reclaim),
        (Claimed::Won, true, false, session_moved),
        (Claimed::Lost(owner(3)), true, true, Action::Relay(owner(3))),
        (
            Claimed::Lost(owner(3)),
            false,
            true,
            Action::Relay(owner(3)),
        ),
        (Claimed::Lost(owner(3)), true, false, session_moved),
        (Claimed::Lost(owner(1)), true, true, Action::Reclaim),
        (Claimed::Lost(owner(1)), true, false, session_moved),
        (Claimed::Unowned, true, true, Action::Serve),
        (Claimed::Unowned, true, false, session_moved),
        (Claimed::Unowned, false, true, not_consistent),
        (Claimed::Unowned, false, false, not_consistent),
        (Claimed::NoAnswer, true, true, not_consistent),
        (Claimed::NoAnswer, false, true, not_consistent),
    ];
    for (claimed, is_consistent, is_intact, action) in rows {
        let decided = plan(true).on_claim(claimed, is_consistent, is_intact);
        assert_eq!(decided, action, "{claimed:?} {is_consistent} {is_intact}");
    }
}

#[test]
fn the_relay_after_the_third_claim_is_the_last() {
    for failure in FAILURES
        .into_iter()
        .filter(|failure| *failure != Failure::Stalled)
    {
        let mut plan = plan(false);
        for claim in 1..=MAX_CLAIMS {
            let action = plan.on_claim(Claimed::Lost(owner(3)), true, true);
            assert_eq!(action, Action::Relay(owner(3)));
            let is_last = plan.on_relay_failure(owner(3), failure)
                == Action::Refuse(Refusal::OwnerUnreachable);
            assert_eq!(is_last, claim == MAX_CLAIMS, "{failure:?} {claim}");
        }
    }
}

#[test]
fn a_session_relinquished_here_is_looked_up_for_a_while_and_not_reclaimed() {
    let mut plan = plan(true);
    for _ in 0..MAX_LOOKUP_RETRIES {
        assert_eq!(plan.on_relinquished(), Action::LookUpLater);
    }
    assert_eq!(
        plan.on_relinquished(),
        Action::Refuse(Refusal::SessionMoved)
    );
}

const FAILURES: [Failure; 7] = [
    Failure::Refused,
    Failure::Moved,
    Failure::Misdirected,
    Failure::Unreachable,
    Failure::Silent,
    Failure::Broken,
    Failure::Stalled,
];

/// The replies of the directory and of peers, in the order in which they are requested.
#[derive(Debug, Clone)]
struct Replies {
    incoming: IncomingRequest,
    known: Known,
    failures: Vec<Option<Failure>>,
    lease: LeaseState,
    claimed: Claimed,
    is_consistent: Vec<bool>,
    is_long: bool,
    is_call: bool,
}

fn any_replies() -> impl Strategy<Value = Replies> {
    let owners = (1..5_u16).prop_map(owner);
    let stage = proptest::sample::select(STAGES.to_vec());
    let incoming = (any::<[bool; 3]>(), stage).prop_map(|(flags, stage)| IncomingRequest {
        has_session: flags[0],
        is_local: flags[1],
        is_from_peer: flags[2],
        stage,
    });
    let known = prop_oneof![
        4 => owners.clone().prop_map(Known::Owner),
        1 => Just(Known::Unowned),
        1 => Just(Known::NoAnswer),
    ];
    let failure = proptest::option::weighted(0.8, proptest::sample::select(FAILURES.to_vec()));
    let lease = prop_oneof![
        2 => Just(LeaseState::Expired),
        1 => Just(LeaseState::Alive),
        1 => Just(LeaseState::NoAnswer)
    ];
    let claimed = prop_oneof![
        2 => Just(Claimed::Won),
        2 => owners.prop_map(Claimed::Lost),
        1 => Just(Claimed::Unowned),
        1 => Just(Claimed::NoAnswer),
    ];
    let failures = proptest::collection::vec(failure, 4);
    let consistent = proptest::collection::vec(any::<bool>(), 2);
    let flags = any::<[bool; 2]>();
    (incoming, known, failures, lease, claimed, consistent, flags).prop_map(
        |(incoming, known, failures, lease, claimed, is_consistent, [is_long, is_call])| Replies {
            incoming,
            known,
            failures,
            lease,
            claimed,
            is_consistent,
            is_long,
            is_call,
        },
    )
}

/// Runs a plan to completion and returns all its actions. The last is `None` if a relay was answered.
fn run(replies: &Replies) -> Vec<Option<Action>> {
    let mut plan = RoutingPlan::new(incarnation(1), replies.is_call);
    let mut failures = replies.failures.iter();
    let mut actions = vec![Some(replies.incoming.action())];
    let mut is_intact = true;
    while let Some(Some(action)) = actions.last().copied() {
        assert!(actions.len() < 16, "the plan does not end: {actions:?}");
        let next = match action {
            Action::Serve
            | Action::Reclaim
            | Action::Transfer
            | Action::Moved
            | Action::Refuse(_) => break,
            Action::LookUpLater => unreachable!("no session was relinquished"),
            Action::LookUp => Some(plan.on_lookup(replies.known, replies.is_consistent[0])),
            Action::Relay(owner) => failures.next().expect("four relays").map(|failure| {
                let is_sent = match failure {
                    Failure::Refused | Failure::Unreachable => false,
                    Failure::Silent => !replies.is_call,
                    Failure::Moved | Failure::Misdirected | Failure::Broken | Failure::Stalled => {
                        true
                    }
                };
                is_intact &= !(is_sent && replies.is_long);
                plan.on_relay_failure(owner, failure)
            }),
            Action::CheckLease(owner) => Some(plan.on_lease(owner, replies.lease)),
            Action::Claim(..) => {
                Some(plan.on_claim(replies.claimed, replies.is_consistent[1], is_intact))
            }
        };
        actions.push(next);
    }
    actions
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_invariants_hold_for_all_replies(replies in any_replies()) {
        let actions = run(&replies);
        let taken: Vec<Action> = actions.iter().copied().flatten().collect();
        let last = actions.last().copied().flatten();
        let count = |wanted: fn(&Action) -> bool| taken.iter().filter(|action| wanted(action)).count();
        let relays = count(|action| matches!(action, Action::Relay(_)));
        let claims = count(|action| matches!(action, Action::Claim(..)));

        // One hop, plus one more relay for each claim.
        prop_assert!(claims <= usize::from(MAX_CLAIMS));
        prop_assert!(relays <= 1 + claims);
        prop_assert!(!replies.incoming.is_from_peer || taken.len() == 1);

        // No instance relays to itself.
        for action in &taken {
            if let Action::Relay(owner) | Action::Claim(owner, _) = action {
                prop_assert_ne!(owner.owner.incarnation, incarnation(1));
            }
        }

        // Only a session's owner reclaims it.
        if last == Some(Action::Reclaim) {
            let is_ours = if claims == 0 {
                replies.known == Known::Owner(owner(1))
            } else {
                matches!(replies.claimed, Claimed::Won) || replies.claimed == Claimed::Lost(owner(1))
            };
            prop_assert!(is_ours, "{:?}", actions);
        }

        // Answering 404 requires a directory that has been consistent and has no owner for the session.
        if last == Some(Action::Serve) && replies.incoming.has_session && !replies.incoming.is_local {
            let is_proven = if claims == 0 {
                replies.known == Known::Unowned && replies.is_consistent[0]
            } else {
                replies.claimed == Claimed::Unowned && replies.is_consistent[1]
            };
            prop_assert!(is_proven, "{:?}", actions);
        }

        // A session is claimed only if its owner itself answered "not here", or if the owner's lease has lapsed.
        let mut failures = replies.failures.iter();
        for pair in taken.windows(2) {
            let failure = matches!(pair[0], Action::Relay(_)).then(|| failures.next().unwrap());
            match pair {
                [Action::Relay(_), Action::Claim(_, cause)] => {
                    prop_assert_eq!(*cause, Cause::Relinquished);
                    prop_assert_eq!(failure.unwrap(), &Some(Failure::Moved));
                }
                [Action::CheckLease(_), Action::Claim(_, cause)] => {
                    prop_assert_eq!(*cause, Cause::LeaseLapsed);
                    prop_assert_eq!(replies.lease, LeaseState::Expired);
                }
                [action, Action::Claim(..)] => prop_assert!(false, "a claim after {:?}", action),
                _ => {}
            }
        }

        // A call that a peer may have started is neither sent again nor served here.
        let is_broken = replies.failures.iter().take(relays).any(|failure| *failure == Some(Failure::Broken));
        if replies.is_call && is_broken {
            prop_assert_eq!(last, Some(Action::Refuse(Refusal::ConnectionLost)));
        }
    }
}
