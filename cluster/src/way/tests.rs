//! The decision, row by row, and under any answers at all.

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

fn way(is_call: bool) -> Way {
    Way::new(incarnation(1), is_call)
}

const STAGES: [Stage; 4] = [Stage::Here, Stage::HandingOver, Stage::Gone, Stage::Closed];

#[test]
fn a_head_decides_at_once_or_asks_for_the_owner() {
    let rows = [
        // has_session, is_here, is_from_peer
        ((false, false, false), [Step::Serve; 4]),
        ((true, true, false), [Step::Serve; 4]),
        ((true, false, false), [Step::LookUp; 4]),
        (
            (true, true, true),
            [Step::Serve, Step::HandOver, Step::Moved, Step::Moved],
        ),
        ((true, false, true), [Step::Moved; 4]),
        ((false, false, true), [Step::Moved; 4]),
    ];
    for ((has_session, is_here, is_from_peer), steps) in rows {
        for (stage, step) in STAGES.into_iter().zip(steps) {
            let arrival = Arrival {
                has_session,
                is_here,
                is_from_peer,
                stage,
            };
            assert_eq!(arrival.step(), step, "{arrival:?}");
        }
    }
}

#[test]
fn what_is_not_known_does_not_exist_only_if_the_directory_is_sound() {
    let refused = Step::Refuse(Refusal::NotSound);
    let rows = [
        (Known::Owner(owner(1)), true, Step::Take),
        (Known::Owner(owner(1)), false, Step::Take),
        (Known::Owner(owner(2)), true, Step::Relay(owner(2))),
        (Known::Owner(owner(2)), false, Step::Relay(owner(2))),
        (Known::Nobody, true, Step::Serve),
        (Known::Nobody, false, refused),
        (Known::NoAnswer, true, refused),
        (Known::NoAnswer, false, refused),
    ];
    for (known, is_consistent, step) in rows {
        assert_eq!(
            way(true).known(known, is_consistent),
            step,
            "{known:?} {is_consistent}"
        );
    }
}

#[test]
fn a_session_is_claimed_only_if_its_owner_is_gone() {
    let claim = |cause| Step::Claim(owner(2), cause);
    let (moved, ask) = (claim(Cause::GivenUp), Step::AskLease(owner(2)));
    let broken = Step::Refuse(Refusal::Broken);
    let stalled = Step::Refuse(Refusal::Stalled);
    let rows = [
        (Failure::Refused, ask, ask),
        (Failure::Moved, moved, moved),
        (Failure::Misdirected, ask, ask),
        (Failure::Unreachable, ask, ask),
        (Failure::Silent, ask, ask),
        // What a call has begun must not begin again.
        (Failure::Broken, broken, ask),
        (Failure::Stalled, stalled, stalled),
    ];
    for (failure, call, other) in rows {
        assert_eq!(way(true).failed(owner(2), failure), call, "{failure:?}");
        assert_eq!(way(false).failed(owner(2), failure), other, "{failure:?}");
    }
    let away = Step::Refuse(Refusal::OwnerAway);
    let rows = [
        (Lease::Gone, claim(Cause::LeaseOver)),
        (Lease::Alive, away),
        (Lease::NoAnswer, Step::Refuse(Refusal::NotSound)),
    ];
    for (lease, step) in rows {
        assert_eq!(way(false).lease(owner(2), lease), step, "{lease:?}");
    }
}

#[test]
fn after_a_claim_the_request_goes_where_the_session_is_if_it_can() {
    let not_consistent = Step::Refuse(Refusal::NotSound);
    let again = Step::Refuse(Refusal::Again);
    let rows = [
        // claimed, is_sound, is_whole
        (Claimed::Won, true, true, Step::Take),
        (Claimed::Won, false, true, Step::Take),
        (Claimed::Won, true, false, again),
        (Claimed::Lost(owner(3)), true, true, Step::Relay(owner(3))),
        (Claimed::Lost(owner(3)), false, true, Step::Relay(owner(3))),
        (Claimed::Lost(owner(3)), true, false, again),
        (Claimed::Lost(owner(1)), true, true, Step::Take),
        (Claimed::Lost(owner(1)), true, false, again),
        (Claimed::Nobody, true, true, Step::Serve),
        (Claimed::Nobody, true, false, again),
        (Claimed::Nobody, false, true, not_consistent),
        (Claimed::Nobody, false, false, not_consistent),
        (Claimed::NoAnswer, true, true, not_consistent),
        (Claimed::NoAnswer, false, true, not_consistent),
    ];
    for (claimed, is_consistent, is_whole, step) in rows {
        let decided = way(true).claimed(claimed, is_consistent, is_whole);
        assert_eq!(decided, step, "{claimed:?} {is_consistent} {is_whole}");
    }
}

#[test]
fn the_relay_after_the_third_claim_is_the_last() {
    for failure in FAILURES
        .into_iter()
        .filter(|failure| *failure != Failure::Stalled)
    {
        let mut way = way(false);
        for claim in 1..=MAX_CLAIMS {
            let step = way.claimed(Claimed::Lost(owner(3)), true, true);
            assert_eq!(step, Step::Relay(owner(3)));
            let is_end = way.failed(owner(3), failure) == Step::Refuse(Refusal::OwnerAway);
            assert_eq!(is_end, claim == MAX_CLAIMS, "{failure:?} {claim}");
        }
    }
}

#[test]
fn what_was_given_up_here_is_looked_for_a_while_and_not_taken_back() {
    let mut way = way(true);
    for _ in 0..MAX_LOOKS {
        assert_eq!(way.given_up(), Step::LookAgain);
    }
    assert_eq!(way.given_up(), Step::Refuse(Refusal::Again));
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

/// What a directory and peers say, in the order in which they are asked.
#[derive(Debug, Clone)]
struct World {
    arrival: Arrival,
    known: Known,
    failures: Vec<Option<Failure>>,
    lease: Lease,
    claimed: Claimed,
    is_consistent: Vec<bool>,
    is_long: bool,
    is_call: bool,
}

fn worlds() -> impl Strategy<Value = World> {
    let owners = (1..5_u16).prop_map(owner);
    let stage = proptest::sample::select(STAGES.to_vec());
    let arrival = (any::<[bool; 3]>(), stage).prop_map(|(flags, stage)| Arrival {
        has_session: flags[0],
        is_here: flags[1],
        is_from_peer: flags[2],
        stage,
    });
    let known = prop_oneof![
        4 => owners.clone().prop_map(Known::Owner),
        1 => Just(Known::Nobody),
        1 => Just(Known::NoAnswer),
    ];
    let failure = proptest::option::weighted(0.8, proptest::sample::select(FAILURES.to_vec()));
    let lease = prop_oneof![
        2 => Just(Lease::Gone),
        1 => Just(Lease::Alive),
        1 => Just(Lease::NoAnswer)
    ];
    let claimed = prop_oneof![
        2 => Just(Claimed::Won),
        2 => owners.prop_map(Claimed::Lost),
        1 => Just(Claimed::Nobody),
        1 => Just(Claimed::NoAnswer),
    ];
    let failures = proptest::collection::vec(failure, 4);
    let consistent = proptest::collection::vec(any::<bool>(), 2);
    let flags = any::<[bool; 2]>();
    (arrival, known, failures, lease, claimed, consistent, flags).prop_map(
        |(arrival, known, failures, lease, claimed, is_consistent, [is_long, is_call])| World {
            arrival,
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

/// Walks a way to its end, and gives all of its steps. The last is `None` if a relay was answered.
fn walk(world: &World) -> Vec<Option<Step>> {
    let mut way = Way::new(incarnation(1), world.is_call);
    let mut failures = world.failures.iter();
    let mut steps = vec![Some(world.arrival.step())];
    let mut is_whole = true;
    while let Some(Some(step)) = steps.last().copied() {
        assert!(steps.len() < 16, "in circles: {steps:?}");
        let next = match step {
            Step::Serve | Step::Take | Step::HandOver | Step::Moved | Step::Refuse(_) => break,
            Step::LookAgain => unreachable!("nothing was given up"),
            Step::LookUp => Some(way.known(world.known, world.is_consistent[0])),
            Step::Relay(owner) => failures.next().expect("four relays").map(|failure| {
                let is_sent = match failure {
                    Failure::Refused | Failure::Unreachable => false,
                    Failure::Silent => !world.is_call,
                    Failure::Moved | Failure::Misdirected | Failure::Broken | Failure::Stalled => {
                        true
                    }
                };
                is_whole &= !(is_sent && world.is_long);
                way.failed(owner, failure)
            }),
            Step::AskLease(owner) => Some(way.lease(owner, world.lease)),
            Step::Claim(..) => Some(way.claimed(world.claimed, world.is_consistent[1], is_whole)),
        };
        steps.push(next);
    }
    steps
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_answered_the_invariants_hold(world in worlds()) {
        let steps = walk(&world);
        let taken: Vec<Step> = steps.iter().copied().flatten().collect();
        let last = steps.last().copied().flatten();
        let count = |wanted: fn(&Step) -> bool| taken.iter().filter(|step| wanted(step)).count();
        let relays = count(|step| matches!(step, Step::Relay(_)));
        let claims = count(|step| matches!(step, Step::Claim(..)));

        // One hop, and one more relay for each claim.
        prop_assert!(claims <= usize::from(MAX_CLAIMS));
        prop_assert!(relays <= 1 + claims);
        prop_assert!(!world.arrival.is_from_peer || taken.len() == 1);

        // No instance relays to itself.
        for step in &taken {
            if let Step::Relay(owner) | Step::Claim(owner, _) = step {
                prop_assert_ne!(owner.owner.incarnation, incarnation(1));
            }
        }

        // Only the one whose session it is takes it.
        if last == Some(Step::Take) {
            let is_ours = if claims == 0 {
                world.known == Known::Owner(owner(1))
            } else {
                matches!(world.claimed, Claimed::Won) || world.claimed == Claimed::Lost(owner(1))
            };
            prop_assert!(is_ours, "{:?}", steps);
        }

        // "No such session" needs a directory that said so and was consistent.
        if last == Some(Step::Serve) && world.arrival.has_session && !world.arrival.is_here {
            let says_so = if claims == 0 {
                world.known == Known::Nobody && world.is_consistent[0]
            } else {
                world.claimed == Claimed::Nobody && world.is_consistent[1]
            };
            prop_assert!(says_so, "{:?}", steps);
        }

        // No claim from an owner that may live: it answered so itself, or its lease is over.
        let mut failures = world.failures.iter();
        for pair in taken.windows(2) {
            let failure = matches!(pair[0], Step::Relay(_)).then(|| failures.next().unwrap());
            match pair {
                [Step::Relay(_), Step::Claim(_, cause)] => {
                    prop_assert_eq!(*cause, Cause::GivenUp);
                    prop_assert_eq!(failure.unwrap(), &Some(Failure::Moved));
                }
                [Step::AskLease(_), Step::Claim(_, cause)] => {
                    prop_assert_eq!(*cause, Cause::LeaseOver);
                    prop_assert_eq!(world.lease, Lease::Gone);
                }
                [step, Step::Claim(..)] => prop_assert!(false, "a claim after {:?}", step),
                _ => {}
            }
        }

        // A call that a peer may have begun is neither sent again nor served here.
        let broke = world.failures.iter().take(relays).any(|failure| *failure == Some(Failure::Broken));
        if world.is_call && broke {
            prop_assert_eq!(last, Some(Step::Refuse(Refusal::Broken)));
        }
    }
}
