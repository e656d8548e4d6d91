use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// A stream is represented by its call's number.
type Stream = usize;

#[derive(Debug, PartialEq)]
struct NotStarted(Refused);

impl From<Refused> for NotStarted {
    fn from(refused: Refused) -> Self {
        Self(refused)
    }
}

fn id(json: &str) -> IdKey {
    IdKey::of(json).unwrap()
}

fn begin(
    routes: &mut Routes<Stream>,
    call: &str,
    token: Option<&str>,
    stream: Stream,
) -> Result<Stream, NotStarted> {
    routes.begin(id(call), token.map(id), || Ok(stream))
}

fn route(routes: &mut Routes<Stream>, json: &str) -> Route<Stream> {
    routes.route(&Message::read(json.as_bytes()).unwrap())
}

fn answer(routes: &mut Routes<Stream>, id: &str) -> Route<Stream> {
    route(routes, &format!(r#"{{"id":{id},"result":{{}}}}"#))
}

fn progress(routes: &mut Routes<Stream>, token: &str) -> Route<Stream> {
    route(
        routes,
        &format!(r#"{{"method":"notifications/progress","params":{{"progressToken":{token}}}}}"#),
    )
}

const SERVER_REQUEST: &str = r#"{"id":1,"method":"elicitation/create"}"#;

#[test]
fn ids_are_compared_by_value() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "1", None, 0).unwrap();
    begin(&mut routes, "\"1\"", None, 1).unwrap();
    assert_eq!(
        begin(&mut routes, "1.0", None, 2),
        Err(NotStarted(Refused::IdInUse))
    );
    assert_eq!(answer(&mut routes, "2"), Route::Dropped);
    assert_eq!(answer(&mut routes, "null"), Route::Dropped);
    assert_eq!(answer(&mut routes, "\"1\""), Route::Answer(1));
    assert_eq!(answer(&mut routes, "1.0"), Route::Answer(0));
    assert_eq!(answer(&mut routes, "1"), Route::Dropped, "a second answer");
}

#[test]
fn an_id_is_free_only_once_it_has_been_answered() {
    let mut routes = Routes::new(None);
    let now = Instant::now();
    begin(&mut routes, "1", None, 0).unwrap();
    assert_eq!(
        begin(&mut routes, "1", None, 1),
        Err(NotStarted(Refused::IdInUse))
    );
    routes.on_cancelled(&id("1"), now);
    assert_eq!(
        begin(&mut routes, "1", None, 1),
        Err(NotStarted(Refused::IdInUse))
    );
    assert_eq!(routes.due(now + UPSTREAM_LINGER, false).closed, [0]);
    assert_eq!(answer(&mut routes, "1"), Route::Dropped);
    begin(&mut routes, "1", None, 1).unwrap();
    assert_eq!(answer(&mut routes, "1"), Route::Answer(1));
}

#[test]
fn an_answer_that_coincides_with_a_cancel_reaches_its_call() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "1", None, 0).unwrap();
    routes.on_cancelled(&id("1"), Instant::now());
    assert_eq!(answer(&mut routes, "1"), Route::Answer(0));
    assert_eq!(routes.next_due(), None);
}

#[test]
fn progress_is_routed_by_its_token_unless_two_calls_share_it() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "1", Some("7"), 0).unwrap();
    begin(&mut routes, "2", Some("\"7\""), 1).unwrap();
    assert_eq!(progress(&mut routes, "7"), Route::Call(0));
    assert_eq!(progress(&mut routes, "\"7\""), Route::Call(1));
    assert_eq!(progress(&mut routes, "8"), Route::Standalone);
    begin(&mut routes, "3", Some("7"), 2).unwrap();
    assert_eq!(progress(&mut routes, "7"), Route::Standalone);
    assert_eq!(answer(&mut routes, "1"), Route::Answer(0));
    assert_eq!(
        progress(&mut routes, "7"),
        Route::Standalone,
        "the progress may be late"
    );
    assert_eq!(answer(&mut routes, "3"), Route::Answer(2));
    begin(&mut routes, "4", Some("7"), 3).unwrap();
    assert_eq!(progress(&mut routes, "7"), Route::Call(3));
}

#[test]
fn a_message_that_names_no_call_is_routed_to_the_only_open_one() {
    let mut routes = Routes::new(None);
    assert_eq!(route(&mut routes, SERVER_REQUEST), Route::Standalone);
    begin(&mut routes, "1", None, 0).unwrap();
    assert_eq!(route(&mut routes, SERVER_REQUEST), Route::Call(0));
    assert_eq!(
        progress(&mut routes, "5"),
        Route::Standalone,
        "progress of a call that has ended"
    );
    begin(&mut routes, "2", None, 1).unwrap();
    assert_eq!(route(&mut routes, SERVER_REQUEST), Route::Standalone);
    routes.on_cancelled(&id("1"), Instant::now());
    assert_eq!(route(&mut routes, SERVER_REQUEST), Route::Call(1));
}

#[test]
fn a_cancelled_call_receives_only_its_answer() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "1", Some("7"), 0).unwrap();
    routes.on_cancelled(&id("1"), Instant::now());
    assert_eq!(progress(&mut routes, "7"), Route::Dropped);
    assert_eq!(route(&mut routes, SERVER_REQUEST), Route::Standalone);
    assert!(routes.is_idle());
}

#[test]
fn a_cancel_of_another_id_cancels_nothing() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "1", None, 0).unwrap();
    for other in ["1.5", "\"1\"", "2"] {
        routes.on_cancelled(&id(other), Instant::now());
    }
    assert_eq!(routes.next_due(), None);
    assert!(!routes.is_idle());
}

#[test]
fn a_cancelled_call_is_overdue_once() {
    let after = Duration::from_secs(5);
    let mut routes = Routes::new(Some(after));
    let now = Instant::now();
    begin(&mut routes, "1", None, 0).unwrap();
    begin(&mut routes, "2", None, 1).unwrap();
    routes.on_cancelled(&id("1"), now);
    routes.on_cancelled(&id("2"), now);
    assert_eq!(routes.next_due(), Some(now + UPSTREAM_LINGER));
    assert_eq!(routes.due(now + UPSTREAM_LINGER, false).closed.len(), 2);
    assert_eq!(answer(&mut routes, "2"), Route::Dropped);
    assert_eq!(routes.next_due(), Some(now + after));
    assert!(routes.due(now + after, false).overdue);
    assert!(!routes.due(now + after, false).overdue);
    assert_eq!(routes.next_due(), None);
}

#[test]
fn an_answer_may_have_the_other_type_if_the_client_has_sent_no_id_of_that_type() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "7", None, 0).unwrap();
    begin(&mut routes, "8", None, 1).unwrap();
    assert_eq!(answer(&mut routes, "\"9\""), Route::Dropped);
    assert_eq!(answer(&mut routes, "\"7\""), Route::Answer(0));
    assert_eq!(
        answer(&mut routes, "\"7\""),
        Route::Dropped,
        "a second answer"
    );
    begin(&mut routes, "\"8\"", None, 2).unwrap();
    assert_eq!(answer(&mut routes, "\"8\""), Route::Answer(2));
    assert_eq!(
        answer(&mut routes, "\"8\""),
        Route::Dropped,
        "not that of 8"
    );
    let mut routes = Routes::new(None);
    begin(&mut routes, "\"7\"", None, 0).unwrap();
    assert_eq!(answer(&mut routes, "7"), Route::Answer(0));
}

#[test]
fn a_process_that_was_blocked_has_its_whole_time_afterwards() {
    let after = Duration::from_secs(5);
    let mut routes = Routes::new(Some(after));
    let now = Instant::now();
    begin(&mut routes, "1", None, 0).unwrap();
    routes.on_cancelled(&id("1"), now);
    let blocked = Duration::from_secs(100);
    assert!(!routes.due(now + blocked, true).overdue);
    // The process had already been blocked before the cancellation.
    routes.add_blocked_time(now + blocked, blocked * 2);
    assert_eq!(routes.next_due(), Some(now + blocked + after));
    assert!(!routes.due(now + blocked, false).overdue);
    assert!(routes.due(now + blocked + after, false).overdue);
}

#[test]
fn the_number_of_remembered_unanswered_calls_is_bounded() {
    let mut routes = Routes::new(None);
    let now = Instant::now();
    let mut evicted = Vec::new();
    for call in 0..MAX_UNANSWERED + 3 {
        begin(&mut routes, &call.to_string(), Some("7"), call).unwrap();
        let at = now + Duration::from_nanos(call as u64);
        evicted.extend(routes.on_cancelled(&id(&call.to_string()), at));
    }
    assert_eq!(evicted, [0, 1, 2]);
    assert_eq!(
        routes.due(now + UPSTREAM_LINGER * 2, false).closed.len(),
        MAX_UNANSWERED
    );
    assert!(begin(&mut routes, "0", None, 0).is_ok());
}

#[test]
fn the_number_of_open_calls_is_bounded() {
    let mut routes = Routes::new(None);
    for call in 0..MAX_OPEN {
        begin(&mut routes, &call.to_string(), None, call).unwrap();
    }
    assert_eq!(
        begin(&mut routes, "\"x\"", None, 0),
        Err(NotStarted(Refused::TooMany))
    );
}

#[test]
fn no_call_begins_after_the_end() {
    let mut routes = Routes::new(None);
    begin(&mut routes, "1", Some("1"), 0).unwrap();
    assert_eq!(routes.end(), [0]);
    assert!(routes.end().is_empty());
    assert_eq!(
        begin(&mut routes, "2", None, 1),
        Err(NotStarted(Refused::Ended))
    );
    assert_eq!(answer(&mut routes, "1"), Route::Dropped);
}

#[test]
fn a_call_without_a_stream_is_not_started() {
    let mut routes = Routes::<Stream>::new(None);
    let refused = routes.begin(id("1"), Some(id("1")), || Err(NotStarted(Refused::TooMany)));
    assert!(refused.is_err() && routes.is_idle());
    begin(&mut routes, "1", None, 0).unwrap();
    assert_eq!(progress(&mut routes, "1"), Route::Standalone);
}

#[derive(Debug, Clone)]
enum Step {
    Begin(&'static str, Option<&'static str>),
    Answer(&'static str),
    Progress(&'static str),
    Ask,
    Cancel(&'static str),
    Wait(u64),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Open,
    /// When the call was cancelled, and whether its stream is still open.
    Unanswered(Instant, bool),
    Ended,
}

/// The expected behaviour, derived from the list of all calls so far.
#[derive(Default)]
struct Model {
    calls: Vec<(&'static str, Option<&'static str>, State)>,
    /// Tokens that two calls have had at the same time, each until all its calls have ended.
    ambiguous_tokens: HashSet<&'static str>,
}

/// Returns `true` if two ids have the same value.
fn have_same_value(one: &str, other: &str) -> bool {
    one.trim_end_matches(".0") == other.trim_end_matches(".0")
}

/// Returns `true` if a server might mistake two ids for the same one.
fn may_be_confused(one: &str, other: &str) -> bool {
    let is_large = |id: &str| id.starts_with("900719925474099");
    have_same_value(one, other) || (is_large(one) && is_large(other))
}

impl Model {
    fn begin(&mut self, id: &'static str, token: Option<&'static str>) -> bool {
        let taken = self
            .calls
            .iter()
            .any(|(other, _, state)| may_be_confused(other, id) && *state != State::Ended);
        if !taken {
            self.calls.push((id, token, State::Open));
            self.update_ambiguous_tokens();
        }
        !taken
    }

    fn answer(&mut self, id: &str) -> Route<Stream> {
        let is_text = |id: &str| id.starts_with('"');
        let had_kind = self
            .calls
            .iter()
            .any(|(other, ..)| is_text(other) == is_text(id));
        let other_kind = if is_text(id) {
            id.trim_matches('"').to_owned()
        } else {
            format!("\"{}\"", id.trim_end_matches(".0"))
        };
        let id = if had_kind { id } else { &other_kind };
        let calls = self.calls.iter_mut().enumerate();
        let mut matching = calls
            .filter(|(_, (other, _, state))| have_same_value(other, id) && *state != State::Ended);
        let Some((stream, (.., state))) = matching.next() else {
            return Route::Dropped;
        };
        let route = match *state {
            State::Unanswered(_, false) => Route::Dropped,
            _ => Route::Answer(stream),
        };
        *state = State::Ended;
        drop(matching);
        self.update_ambiguous_tokens();
        route
    }

    fn progress(&self, token: &str) -> Route<Stream> {
        if self.ambiguous_tokens.contains(token) {
            return Route::Standalone;
        }
        let mut owners = self.calls.iter().enumerate();
        let owner = owners.find(|(_, (_, call_token, state))| {
            *call_token == Some(token) && *state != State::Ended
        });
        match owner {
            None => Route::Standalone,
            Some((stream, (.., State::Open))) => Route::Call(stream),
            Some(_) => Route::Dropped,
        }
    }

    fn ask(&self) -> Route<Stream> {
        let open: Vec<_> = (0..self.calls.len())
            .filter(|call| self.calls[*call].2 == State::Open)
            .collect();
        match open[..] {
            [only] => Route::Call(only),
            _ => Route::Standalone,
        }
    }

    fn cancel(&mut self, id: &str, now: Instant) {
        for (other, _, state) in &mut self.calls {
            if have_same_value(other, id) && *state == State::Open {
                *state = State::Unanswered(now, true);
            }
        }
    }

    fn due(&mut self, now: Instant) -> Vec<Stream> {
        let mut closed = Vec::new();
        for (stream, (.., state)) in self.calls.iter_mut().enumerate() {
            if let State::Unanswered(since, has_stream @ true) = state
                && *since + UPSTREAM_LINGER <= now
            {
                *has_stream = false;
                closed.push(stream);
            }
        }
        closed
    }

    fn update_ambiguous_tokens(&mut self) {
        for token in TOKENS {
            let owners = self.calls.iter().filter(|(_, call_token, state)| {
                *call_token == Some(token) && *state != State::Ended
            });
            match owners.count() {
                0 => drop(self.ambiguous_tokens.remove(token)),
                1 => {}
                _ => drop(self.ambiguous_tokens.insert(token)),
            }
        }
    }
}

const IDS: [&str; 7] = [
    "1",
    "1.0",
    "\"1\"",
    "2",
    "\"a\"",
    "9007199254740992",
    "9007199254740993",
];
const TOKENS: [&str; 3] = ["1", "\"1\"", "2"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let id = || prop::sample::select(&IDS[..]);
    let token = || prop::sample::select(&TOKENS[..]);
    let step = prop_oneof![
        3 => (id(), prop::option::of(token())).prop_map(|(id, token)| Step::Begin(id, token)),
        2 => id().prop_map(Step::Answer),
        2 => token().prop_map(Step::Progress),
        1 => Just(Step::Ask),
        2 => id().prop_map(Step::Cancel),
        1 => (0..1_500_u64).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn every_line_is_routed_as_a_search_of_all_calls_would(steps in steps()) {
        let (mut routes, mut model) = (Routes::new(None), Model::default());
        let mut now = Instant::now();
        for step in steps {
            match step {
                Step::Begin(call, token) => {
                    let stream = model.calls.len();
                    let started = begin(&mut routes, call, token, stream).is_ok();
                    prop_assert_eq!(started, model.begin(call, token));
                }
                Step::Answer(call) => prop_assert_eq!(answer(&mut routes, call), model.answer(call)),
                Step::Progress(token) => prop_assert_eq!(progress(&mut routes, token), model.progress(token)),
                Step::Ask => prop_assert_eq!(route(&mut routes, SERVER_REQUEST), model.ask()),
                Step::Cancel(call) => {
                    routes.on_cancelled(&id(call), now);
                    model.cancel(call, now);
                }
                Step::Wait(ms) => {
                    now += Duration::from_millis(ms);
                    let mut closed = routes.due(now, false).closed;
                    closed.sort_unstable();
                    prop_assert_eq!(closed, model.due(now));
                }
            }
        }
    }

    #[test]
    fn no_stream_is_lost(steps in steps()) {
        let mut routes = Routes::new(None);
        let mut now = Instant::now();
        let (mut started, mut ended) = (0, Vec::new());
        for step in steps {
            match step {
                Step::Begin(call, token) => {
                    let made = routes.begin(id(call), token.map(id), || Ok::<_, NotStarted>(started));
                    started += usize::from(made.is_ok());
                }
                Step::Answer(call) => {
                    if let Route::Answer(stream) = answer(&mut routes, call) {
                        ended.push(stream);
                    }
                }
                Step::Cancel(call) => ended.extend(routes.on_cancelled(&id(call), now)),
                Step::Wait(ms) => {
                    now += Duration::from_millis(ms);
                    ended.extend(routes.due(now, false).closed);
                }
                Step::Progress(_) | Step::Ask => {}
            }
        }
        ended.extend(routes.end());
        ended.sort_unstable();
        prop_assert_eq!(ended, (0..started).collect::<Vec<_>>());
    }
}
