//! Timelines: hours of calls and clients in a moment. The clock jumps from one time to the next. rmcp is real, in
//! process.
//!
//! A [`Story`] describes the server and the planned events, and [`play`] records what happened. The oracle follows the
//! manual. A client that returns within its grace, or while its answer is retained, gets its call or its answer. A call
//! that may run on ends on its own. No report is repeated, and no state remains.
//!
//! The generated stories are a sample. `TIMELINES` sets their number, and `TEST_SEED` the first one.

mod oracle;
mod story;
mod world;

use std::{env, time::Duration};

use mcp_cancel_on_disconnect::Grace;
use test_support::Dice;

use self::{
    story::{Confirm, How, Loss, Story},
    world::play,
};
use crate::setup::Server;

/// Number of generated stories by default.
const SAMPLE: u64 = 100;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

const ENDED_BY_SERVER: How = How::EndedByServer { retry: None };

const SERVERS: [Server; 2] = [Server::Wrapped, Server::LayerOnly];

#[test]
fn in_hours_of_events_no_client_that_resumes_in_time_has_lost_anything() {
    let count = env::var("TIMELINES").map_or(SAMPLE, |count| count.parse().expect("a number"));
    let first = Dice::new().seed();
    for seed in (0..count).map(|nth| first.wrapping_add(nth)) {
        // The dice print how to repeat a failure.
        let mut dice = Dice::seeded(seed);
        assert_right(&Story::roll(&mut dice));
    }
}

#[test]
fn an_answer_that_is_retained_for_a_disconnected_client_keeps_its_session_open() {
    let story = Story::of(Server::Wrapped, Grace::After(HOUR));
    assert_right(&story.call(MINUTE, &[hangs_up(10 * MINUTE)]));
    let mut story = Story::of(Server::Wrapped, Grace::Auto);
    story.retry = Some(10 * MINUTE);
    assert_right(&story.call(MINUTE, &[hangs_up(590 * SECOND)]));
}

#[test]
fn a_call_that_may_run_on_ends_by_itself_although_its_server_ended_the_stream() {
    let ended = Loss::after_a_second(ENDED_BY_SERVER, SECOND);
    let never = Story::of(Server::Wrapped, Grace::Never);
    let mut exempt = Story::of(Server::Wrapped, Grace::Auto);
    exempt.is_exempt = true;
    for story in [never, exempt] {
        assert_right(&story.clone().call(3 * HOUR, &[ended]).stops_resuming());
        let twice = [hangs_up(SECOND), ended];
        assert_right(&story.call(3 * HOUR, &twice).stops_resuming());
    }
}

#[test]
fn a_call_whose_stream_ended_before_any_event_id_ends_by_itself() {
    for grace in [Grace::Auto, Grace::Never] {
        let mut story = Story::of(Server::Wrapped, grace);
        story.retry = None;
        let ended = Loss::after_a_second(ENDED_BY_SERVER, SECOND);
        assert_right(&story.call(20 * MINUTE, &[ended]));
    }
}

#[test]
fn a_stored_call_ends_by_itself_although_its_client_resumed_once() {
    let mut story = Story::of(Server::Wrapped, Grace::Auto);
    story.is_stored = true;
    let losses = [hangs_up(30 * SECOND), hangs_up(SECOND)];
    assert_right(&story.call(3 * HOUR, &losses).stops_resuming());
}

#[test]
fn a_call_that_was_resumed_elsewhere_ends_by_itself() {
    let after = Loss::after_a_second(How::ResumedElsewhere { first: false }, SECOND);
    let story = Story::of(Server::Wrapped, Grace::After(MINUTE));
    assert_right(&story.call(3 * HOUR, &[after]).stops_resuming());
}

#[test]
fn an_answer_is_retained_equally_long_whenever_the_resume_elsewhere_is_reported() {
    for first in [true, false] {
        let taken = Loss::after_a_second(How::ResumedElsewhere { first }, 400 * SECOND);
        let mut story = Story::of(Server::Wrapped, Grace::After(8 * SECOND));
        story.retry = Some(250 * SECOND);
        assert_right(&story.call(MINUTE, &[taken]));
    }
}

/// The usual order when a network fails: the old connection is dropped last.
#[test]
fn a_call_that_was_resumed_elsewhere_before_its_old_connection_is_missed_is_not_cancelled() {
    let first = Loss::after_a_second(How::ResumedElsewhere { first: true }, SECOND);
    for grace in [Grace::Auto, Grace::Immediate, Grace::After(MINUTE)] {
        let story = Story::of(Server::Wrapped, grace);
        assert_right(&story.call(3 * HOUR, &[first]).stops_resuming());
        // After an hour the layer no longer tracks the call and does not cancel it then.
        let story = Story::of(Server::LayerOnly, grace);
        assert_right(&story.call(30 * MINUTE, &[first]).stops_resuming());
    }
}

#[test]
fn a_client_that_returns_after_a_resume_elsewhere_has_a_full_grace() {
    let first = Loss::after_a_second(How::ResumedElsewhere { first: true }, MINUTE);
    for server in SERVERS {
        let story = Story::of(server, Grace::After(MINUTE));
        let losses = [first, hangs_up(SECOND)];
        assert_right(&story.call(HOUR / 2, &losses).stops_resuming());
    }
}

#[test]
fn an_answer_is_retained_for_the_retry_that_the_server_sent() {
    let retry = Some(300 * SECOND);
    let ended = Loss::after_a_second(How::EndedByServer { retry }, 290 * SECOND);
    for grace in [Grace::Immediate, Grace::Never] {
        let story = Story::of(Server::Wrapped, grace);
        assert_right(&story.call(MINUTE, &[ended]));
    }
}

#[test]
fn an_answer_is_retained_for_the_time_that_its_call_was_postponed() {
    let mut story = Story::of(Server::Wrapped, Grace::After(20 * SECOND));
    story.confirm = Some(Confirm {
        times: 2,
        wait: 20 * MINUTE,
    });
    assert_right(&story.call(MINUTE, &[hangs_up(15 * MINUTE)]));
}

#[test]
fn a_grace_is_not_shorter_than_the_retry_that_the_server_sent() {
    for server in SERVERS {
        for retry in [MINUTE, HOUR] {
            for grace in [Grace::Auto, Grace::After(30 * SECOND)] {
                let mut story = Story::of(server, grace);
                story.retry = Some(retry);
                assert_right(&story.call(3 * HOUR, &[hangs_up(retry + SECOND)]));
            }
        }
    }
}

fn hangs_up(away: Duration) -> Loss {
    Loss::after_a_second(How::HangsUp, away)
}

fn assert_right(story: &Story) {
    let history = play(story);
    if let Some(fault) = oracle::fault(story, &history) {
        panic!("{fault}\n{story:#?}\n{history:#?}");
    }
}
