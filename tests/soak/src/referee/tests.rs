//! Tests the referee with hand-written logs.

use super::{Class, Misdelivery, Report, Violation, judge};
use crate::{
    clock::{MILLI, Micros, SECOND},
    fact::{CloseKind, Fact, Gauge, Line},
    setup::GRACE,
};

const WORK: Micros = 8 * SECOND;
/// A call that works for 8 s.
const CALL: &str = "c~8000~0~heeds";
const START: Micros = 100 * SECOND;

/// The facts about one call, sent at [`START`] on stream 1.
struct Story(Vec<Line>);

impl Story {
    fn on(route: &str) -> Self {
        let session = (route != "stateless").then(|| "s".into());
        let called = Fact::Calling {
            call: CALL.into(),
            client: "raw".into(),
            route: route.into(),
            session,
            id: "1".to_owned(),
            stream: 1,
        };
        Self(Vec::new())
            .fact(0, called)
            .fact(1, Fact::Sent { stream: 1 })
            .fact(5, Fact::Started { call: CALL.into() })
            .fact(
                6,
                Fact::Head {
                    stream: 1,
                    status: 200,
                },
            )
            .fact(
                7,
                Fact::Event {
                    stream: 1,
                    id: Some("0/0".to_owned()),
                },
            )
    }

    /// Adds a fact, `millis` milliseconds after the call was sent.
    fn fact(mut self, millis: u64, fact: Fact) -> Self {
        let at = START + millis * MILLI;
        self.0.push(Line { at, fact });
        self
    }

    fn closes(self, millis: u64, stream: u64) -> Self {
        let how = CloseKind::Fin;
        self.fact(millis, Fact::Closing { stream, how })
            .fact(millis + 1, Fact::Closed { stream })
    }

    fn resumes(self, millis: u64, id: &str) -> Self {
        let resuming = Fact::Resuming {
            call: CALL.into(),
            session: Some("s".into()),
            last_event_id: id.to_owned(),
            stream: 2,
        };
        self.fact(millis, resuming).fact(
            millis + 2,
            Fact::Head {
                stream: 2,
                status: 200,
            },
        )
    }

    /// Ends this stream.
    fn stream_ends(self, millis: u64, stream: u64) -> Self {
        let clean = true;
        self.fact(millis, Fact::StreamEnded { stream, clean })
    }

    fn cancelled(self, millis: u64) -> Self {
        self.fact(
            millis,
            Fact::Token {
                call: CALL.into(),
                reason: None,
            },
        )
    }

    fn answered(self) -> Self {
        self.fact(WORK / MILLI + 5, Fact::Answered { call: CALL.into() })
    }

    fn gets_answer_of(self, stream: u64, call: &str) -> Self {
        let answer = Fact::Answer {
            stream,
            id: "1".to_owned(),
            of: call.to_owned(),
            whole: true,
        };
        self.fact(WORK / MILLI + 6, answer)
    }

    fn judge(mut self) -> Report {
        self = self.fact(30_000, Fact::Seed { seed: 1 });
        self.0.sort_by_key(|line| line.at);
        judge(&self.0)
    }
}

fn class(report: &Report) -> Class {
    let ((_, class), _) = report.calls.first_key_value().expect("a call");
    *class
}

fn violations(report: &Report) -> Vec<Violation> {
    report.wrong.keys().copied().collect()
}

fn misdelivered(report: &Report) -> Vec<Misdelivery> {
    report.misdelivered.keys().copied().collect()
}

#[test]
fn a_call_whose_client_stays_must_complete() {
    let report = Story::on("wrapped")
        .answered()
        .gets_answer_of(1, CALL)
        .judge();
    assert_eq!(class(&report), Class::MustComplete);
    assert_eq!(
        (violations(&report), misdelivered(&report)),
        (vec![], vec![])
    );
}

#[test]
fn cancelling_a_call_whose_client_stays_is_a_false_cancel() {
    let report = Story::on("wrapped").cancelled(3_000).judge();
    assert_eq!(violations(&report), [Violation::FalseCancel]);
}

#[test]
fn cancelling_within_the_grace_is_a_false_cancel() {
    let report = Story::on("wrapped")
        .closes(1_000, 1)
        .cancelled(2_500)
        .judge();
    assert_eq!(violations(&report), [Violation::FalseCancel]);
    // Without a session there is no grace period.
    let report = Story::on("stateless")
        .closes(1_000, 1)
        .cancelled(1_200)
        .judge();
    assert_eq!(violations(&report), []);
}

#[test]
fn an_orphan_that_is_not_cancelled_is_a_zombie() {
    let closed = || Story::on("layer").closes(1_000, 1);
    let report = closed().cancelled(3_010).judge();
    assert_eq!(
        (class(&report), violations(&report)),
        (Class::MustBeCancelled, vec![])
    );
    assert_eq!(
        violations(&closed().cancelled(4_500).judge()),
        [Violation::Zombie]
    );
    assert_eq!(
        violations(&closed().answered().judge()),
        [Violation::Zombie]
    );
    assert_eq!(
        violations(&closed().judge()),
        [Violation::Zombie],
        "it never ended"
    );
}

#[test]
fn an_unread_stream_excuses_late_cancels_in_its_session_until_its_client_has_disconnected() {
    let other = |session: &str| Fact::Calling {
        call: "other~8000~0~floods".into(),
        client: "raw".into(),
        route: "wrapped".into(),
        session: Some(session.into()),
        id: "2".to_owned(),
        stream: 3,
    };
    let how = CloseKind::Reset;
    let deleted = |session: &str, cancelled: u64| {
        let story = Story::on("wrapped")
            .fact(100, other(session))
            .fact(200, Fact::Stops { stream: 3 })
            .fact(
                500,
                Fact::Deleting {
                    session: "s".into(),
                },
            )
            .fact(
                1_000,
                Fact::Deleted {
                    session: "s".into(),
                    status: 202,
                },
            )
            .fact(3_500, Fact::Closing { stream: 3, how })
            .fact(3_501, Fact::Closed { stream: 3 });
        violations(&story.cancelled(cancelled).judge())
    };
    assert_eq!(deleted("s", 4_400), []);
    assert_eq!(deleted("s", 4_600), [Violation::Zombie]);
    assert_eq!(deleted("another", 2_100), [Violation::Zombie]);
}

#[test]
fn a_stall_excuses_no_more_than_its_length_and_one_more_check() {
    let closed = |stalled: u64| {
        let stall = Fact::Stalled { millis: 700 };
        let story = Story::on("wrapped").closes(1_000, 1).fact(3_700, stall);
        story.cancelled(4_000 + stalled).judge()
    };
    assert_eq!(violations(&closed(790)), []);
    assert_eq!(violations(&closed(900)), [Violation::Zombie]);
}

#[test]
fn every_stall_excuses_one_more_check_at_the_end_of_a_grace_and_nothing_else() {
    let with_stalls = |story: Story| {
        let stall =
            |story: Story, n: u64| story.fact(3_100 + 200 * n, Fact::Stalled { millis: 60 });
        (0..4_u64).fold(story, stall)
    };
    let closed = || with_stalls(Story::on("wrapped").closes(1_000, 1));
    assert_eq!(violations(&closed().cancelled(4_630).judge()), []);
    assert_eq!(
        violations(&closed().cancelled(4_700).judge()),
        [Violation::Zombie]
    );
    let gave_up = || {
        let story = Story::on("wrapped").fact(2_999, Fact::Cancelling { call: CALL.into() });
        with_stalls(story.fact(3_000, Fact::Cancelled { call: CALL.into() }))
    };
    assert_eq!(violations(&gave_up().cancelled(4_230).judge()), []);
    assert_eq!(
        violations(&gave_up().cancelled(4_300).judge()),
        [Violation::Zombie]
    );
}

#[test]
fn a_client_that_resumes_in_time_keeps_its_call() {
    let resumed = || Story::on("wrapped").closes(1_000, 1).resumes(2_000, "0/0");
    let report = resumed().answered().gets_answer_of(2, CALL).judge();
    assert_eq!(class(&report), Class::MustComplete);
    assert_eq!(
        (violations(&report), misdelivered(&report)),
        (vec![], vec![])
    );
    assert_eq!(
        violations(&resumed().cancelled(3_005).judge()),
        [Violation::FalseCancel]
    );
}

#[test]
fn a_client_that_disconnects_from_one_of_two_streams_keeps_its_call() {
    for closes in [1, 2] {
        let two = || {
            Story::on("wrapped")
                .resumes(1_000, "0/0")
                .closes(1_500, closes)
        };
        let stays = 3 - closes;
        let report = two().answered().gets_answer_of(stays, CALL).judge();
        assert_eq!(class(&report), Class::MustComplete);
        assert_eq!(violations(&report), []);
        assert_eq!(
            violations(&two().cancelled(3_505).judge()),
            [Violation::FalseCancel]
        );
        assert_eq!(
            misdelivered(&two().answered().judge()),
            [Misdelivery::LostAnswer]
        );
        let neither = two().closes(2_000, stays);
        assert_eq!(
            violations(&neither.cancelled(6_000).judge()),
            [Violation::Zombie]
        );
    }
}

#[test]
fn the_end_of_a_replay_does_not_excuse_the_stream_before_it() {
    let checks = || {
        Story::on("replays")
            .resumes(1_000, "0/0")
            .stream_ends(1_003, 2)
    };
    let report = checks().answered().gets_answer_of(1, CALL).judge();
    assert_eq!(class(&report), Class::MustComplete);
    assert_eq!(
        (violations(&report), misdelivered(&report)),
        (vec![], vec![])
    );
    assert_eq!(
        violations(&checks().cancelled(3_010).judge()),
        [Violation::FalseCancel]
    );
}

#[test]
fn a_replaced_stream_need_not_have_the_answer() {
    let both = || Story::on("wrapped").resumes(1_000, "0/0");
    for replaced in [1, 2] {
        let report = both().stream_ends(1_004, replaced).answered();
        let report = report.gets_answer_of(3 - replaced, CALL).judge();
        assert_eq!(
            (violations(&report), misdelivered(&report)),
            (vec![], vec![])
        );
    }
    let none = both().stream_ends(1_004, 1).answered().judge();
    assert_eq!(misdelivered(&none), [Misdelivery::LostAnswer]);
    // A stream that had already ended is not replaced by a later resume.
    let again = Story::on("wrapped")
        .stream_ends(900, 1)
        .resumes(1_000, "0/0");
    let report = again.answered().stream_ends(8_100, 2).judge();
    assert_eq!(misdelivered(&report), [Misdelivery::LostAnswer]);
}

#[test]
fn a_connected_client_must_get_the_error_when_the_server_ends_its_call() {
    let ended = || {
        Story::on("paths")
            .resumes(1_000, "0/0")
            .stream_ends(1_004, 1)
            .cancelled(4_010)
    };
    assert_eq!(violations(&ended().judge()), []);
    assert_eq!(misdelivered(&ended().judge()), [Misdelivery::MissingError]);
    let stream_ends = ended().stream_ends(4_008, 2).judge();
    assert_eq!(
        misdelivered(&stream_ends),
        [Misdelivery::MissingError],
        "it may ask again"
    );
    let polls = Fact::Polling { call: CALL.into() };
    let polled = ended().fact(3_990, polls).stream_ends(3_995, 2).judge();
    assert_eq!(misdelivered(&polled), [], "the server made it poll");
    let error = Fact::Error {
        stream: 2,
        id: "1".to_owned(),
        code: -32_001,
    };
    assert_eq!(misdelivered(&ended().fact(4_012, error).judge()), []);
}

#[test]
fn a_wrong_event_id_does_not_resume() {
    let report = Story::on("wrapped")
        .closes(1_000, 1)
        .resumes(2_000, "7/7")
        .answered()
        .judge();
    assert_eq!(violations(&report), [Violation::Zombie]);
}

#[test]
fn a_resume_at_the_end_of_the_grace_allows_either_outcome() {
    let edge = (1_000 + GRACE / MILLI) - 100;
    let resumed = || Story::on("wrapped").closes(1_000, 1).resumes(edge, "0/0");
    let report = resumed().answered().gets_answer_of(2, CALL).judge();
    assert_eq!(
        (class(&report), violations(&report)),
        (Class::Either, vec![])
    );
    assert_eq!(violations(&resumed().cancelled(3_005).judge()), []);
}

#[test]
fn a_suspended_server_need_not_receive_a_resume() {
    let resumed = || Story::on("wrapped").closes(1_000, 1).resumes(2_000, "0/0");
    let stalled = |millis| resumed().fact(2_950, Fact::Stalled { millis });
    assert_eq!(violations(&stalled(900).cancelled(3_300).judge()), []);
    let report = stalled(300).cancelled(3_300).judge();
    assert_eq!(violations(&report), [Violation::FalseCancel]);
}

#[test]
fn another_clients_answer_is_wrong_on_any_stream() {
    let report = Story::on("wrapped")
        .answered()
        .gets_answer_of(1, "d~1~0~heeds")
        .judge();
    assert_eq!(misdelivered(&report), [Misdelivery::WrongAnswer]);
    let listening = Fact::Listening {
        session: Some("t".into()),
        stream: 9,
    };
    let story = Story::on("layer").fact(8, listening).answered();
    assert_eq!(story.gets_answer_of(9, CALL).judge().stray_answers, 1);
}

#[test]
fn an_answer_must_reach_a_waiting_client() {
    let report = Story::on("layer").answered().judge();
    assert_eq!(misdelivered(&report), [Misdelivery::LostAnswer]);
}

#[test]
fn a_client_that_resumes_too_late_must_get_the_error() {
    let late = || {
        Story::on("layer")
            .closes(1_000, 1)
            .cancelled(3_005)
            .resumes(4_000, "0/0")
    };
    assert_eq!(misdelivered(&late().judge()), [Misdelivery::MissingError]);
    let error = Fact::Error {
        stream: 2,
        id: "1".to_owned(),
        code: -32_800,
    };
    assert_eq!(misdelivered(&late().fact(4_003, error).judge()), []);
}

#[test]
fn state_left_at_rest_is_a_leak() {
    let gauge = |calls| {
        Fact::Gauge(Gauge {
            calls,
            sessions: Default::default(),
            allocated_kib: 10_000,
            descriptors: 10,
            tasks: 10,
        })
    };
    let run = |calls| {
        let story = Story::on("wrapped").answered().gets_answer_of(1, CALL);
        let story = story.fact(20_000, Fact::Quiet).fact(20_500, gauge(0));
        let story = story.fact(25_000, Fact::Quiet).fact(25_500, gauge(calls));
        story.judge().failures()
    };
    assert_eq!(run(0), Vec::<String>::new());
    assert_eq!(run(1), ["1 calls are left after the second round"]);
}
