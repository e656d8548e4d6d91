//! Random operations. Likely sequences are drawn most often.

use proptest::{collection::vec, option, prelude::*, test_runner::RngAlgorithm};

use super::*;

fn pick() -> impl Strategy<Value = Pick> {
    prop_oneof![
        9 => (0..64_usize).prop_map(Pick::InFlight),
        1 => (0..64_usize).prop_map(Pick::Any),
    ]
}

fn generations() -> impl Strategy<Value = Generations> {
    prop_oneof![
        5 => Just(Generations::Newest),
        1 => (0..8_usize).prop_map(Generations::Any),
    ]
}

fn stream() -> impl Strategy<Value = Stream> {
    prop_oneof![
        (0..3_u64).prop_map(Stream::Numbered),
        (0..5_u32).prop_map(Stream::Opaque),
    ]
}

fn event_ids() -> impl Strategy<Value = EventIds> {
    prop_oneof![
        2 => Just(EventIds::Own),
        1 => stream().prop_map(EventIds::Shared),
    ]
}

/// Event ids from a server other than rmcp.
fn events() -> impl Strategy<Value = Op> {
    let events = (0..3_u64, 0..6_u32, 1..4_u32);
    (pick(), events).prop_map(|(call, (stream, first, count))| {
        Op::RecordEventId(call, EventIds::Events(stream, first, count))
    })
}

fn op_or_events() -> impl Strategy<Value = Op> {
    prop_oneof![12 => op(), 1 => events()]
}

fn waiting() -> impl Strategy<Value = Waiting> {
    prop_oneof![
        1 => (0..5_000_u64).prop_map(|retry_ms| Waiting::GraceUntil { after_ms: 0, retry_ms }),
        6 => (1..30_000_u64, 0..10_000_u64)
            .prop_map(|(after_ms, retry_ms)| Waiting::GraceUntil { after_ms, retry_ms }),
        1 => Just(Waiting::UntilComplete),
        1 => (1..3_600_000_u64).prop_map(|after_ms| Waiting::ForgetAt { after_ms }),
    ]
}

fn retaining() -> impl Strategy<Value = Retaining> {
    (any::<bool>(), 0..4_usize, 1..120_u64).prop_map(|(answered, units, for_s)| Retaining {
        answered,
        units,
        for_s,
    })
}

fn decision() -> impl Strategy<Value = Decision> {
    prop_oneof![
        Just(Decision::Cancel),
        (1..30_000_u64).prop_map(|wait_ms| Decision::Postpone { wait_ms }),
    ]
}

fn advance() -> impl Strategy<Value = Advance> {
    prop_oneof![
        4 => (0..6_000_u64).prop_map(Advance::Ms),
        1 => (0..60_000_u64).prop_map(Advance::Ms),
        1 => (0..4_000_000_u64).prop_map(Advance::Ms),
        3 => Just(Advance::Deadline { and_ms: 0 }),
        3 => (0..3_usize, 0..2_u64)
            .prop_map(|(bound, ms)| Advance::Deadline { and_ms: LATE_MS[bound] + ms }),
        2 => (0..12_000_u64).prop_map(|and_ms| Advance::Deadline { and_ms }),
    ]
}

fn start() -> impl Strategy<Value = Op> {
    let deadline_ms = option::weighted(0.2, 0..60_000_u64);
    ((SCOPES, REQUESTS), prop::bool::weighted(0.8), deadline_ms).prop_map(
        |(key, accepted, deadline_ms)| Op::Start {
            key,
            accepted,
            deadline_ms,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => start(),
        3 => pick().prop_map(Op::Accept),
        2 => (pick(), (SCOPES, REQUESTS)).prop_map(|(call, key)| Op::Rekey(call, key)),
        12 => (pick(), event_ids()).prop_map(|(call, event_ids)| Op::RecordEventId(call, event_ids)),
        16 => (pick(), generations(), waiting(), prop::bool::weighted(0.1), prop::bool::weighted(0.7))
            .prop_map(|(call, generation, wait, resumed_without_events, end)| Op::Detach {
                call,
                generation,
                wait,
                resumed_without_events,
                end,
            }),
        6 => pick().prop_map(Op::Attach),
        2 => (pick(), 1..26_u32, 1..4_000_u64, option::of((0..26_u32, 0..4_000_u64)))
            .prop_map(|(call, times, every_ms, stalled)| Op::Poll {
                call,
                times,
                every_ms,
                stalled,
            }),
        7 => pick().prop_map(Op::BeginResume),
        6 => pick().prop_map(Op::EndResume),
        3 => pick().prop_map(Op::RenewGrace),
        2 => pick().prop_map(Op::SetMaybeResumed),
        2 => pick().prop_map(Op::AddBackgroundReader),
        3 => pick().prop_map(Op::RemoveBackgroundReader),
        3 => (pick(), retaining()).prop_map(|(call, completed)| Op::FinishDue(call, completed)),
        4 => pick().prop_map(Op::RequestConfirmation),
        4 => (0..64_usize, decision()).prop_map(|(index, decision)| Op::Confirm(index, decision)),
        2 => (pick(), retaining()).prop_map(|(call, completed)| Op::FinishDetached(call, completed)),
        8 => (pick(), option::weighted(0.7, retaining()))
            .prop_map(|(call, completed)| Op::Finish(call, completed)),
        2 => (SCOPES, option::weighted(0.7, retaining()))
            .prop_map(|(scope, end)| Op::BeginClose { scope, end }),
        12 => advance().prop_map(Op::Advance),
        1 => (1..12_u32, 19..22_u64).prop_map(|(checks, and_ms)| Op::ExpireLate { checks, and_ms }),
        12 => prop::bool::weighted(0.8).prop_map(|end| Op::Expire { end }),
    ]
}

fn run_to_end() -> impl Strategy<Value = Op> {
    (any::<bool>(), retaining()).prop_map(|(is_detached, completed)| Op::RunToEnd {
        is_detached,
        completed,
    })
}

/// About as many event ids as a call can store.
fn many_events() -> impl Strategy<Value = Op> {
    (pick(), 1_000..1_010_u32, 250..266_u32)
        .prop_map(|(call, first, count)| Op::RecordEventId(call, EventIds::Many(first, count)))
}

/// A few more event ids.
fn few_events() -> impl Strategy<Value = Op> {
    (pick(), 990..1_300_u32, 1..8_u32)
        .prop_map(|(call, first, count)| Op::RecordEventId(call, EventIds::Many(first, count)))
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        // In a debug build, the default generator takes longer than the test itself.
        rng_algorithm: RngAlgorithm::XorShift,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(2_000))]

    #[test]
    fn a_session_state_behaves_like_its_model(ops in vec(op_or_events(), 1..100)) {
        agrees_with_model(ROOMY, &ops);
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn a_session_state_behaves_like_its_model_with_little_memory(
        ops in vec(prop_oneof![2 => op_or_events(), 1 => run_to_end()], 1..100),
    ) {
        agrees_with_model(TIGHT, &ops);
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn a_session_state_behaves_like_its_model_with_more_event_ids_than_it_stores(
        before in vec(op(), 0..8),
        start in start(),
        many_events in many_events(),
        after in vec(prop_oneof![2 => op(), 1 => few_events()], 0..24),
    ) {
        agrees_with_model(ROOMY, &[before, vec![start, many_events], after].concat());
    }
}
