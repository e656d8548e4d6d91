use super::*;

fn key(session: &str, request: i64) -> Option<Key> {
    Some(Key {
        scope: Scope::Path("/mcp".into()),
        session: session.into(),
        request: RequestId::Number(request),
    })
}

/// Starts and claims a call, as an accepted exchange does.
fn accepted(core: &mut Core<&'static str>, key: Option<Key>, name: &'static str) -> CallId {
    let id = CallId::next();
    core.start(id, key, name);
    core.claim(id);
    id
}

fn assert_empty(core: &Core<&'static str>) {
    assert_eq!(core.len(), 0);
    assert!(core.owners.is_empty());
    assert!(core.deadlines.is_empty());
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn invariant_1_a_call_that_was_not_accepted_never_takes_a_key() {
    let mut core = Core::new();
    let victim = accepted(&mut core, key("s", 7), "victim");
    let stranger = CallId::next();
    core.start(stranger, key("s", 7), "stranger");

    assert!(!core.finish(stranger).unwrap().injectable);
    assert!(core.finish(victim).unwrap().injectable);
    assert_empty(&core);
}

#[test]
fn invariant_2_a_call_ends_once() {
    let mut core = Core::new();
    let id = accepted(&mut core, key("s", 7), "call");
    assert!(core.finish(id).is_some());
    assert!(core.finish(id).is_none());
    assert!(!core.detach(id, Wait::ForItsEnd));
    assert_empty(&core);
}

#[test]
fn invariant_2_a_call_without_a_key_is_never_injected() {
    let mut core = Core::new();
    let id = accepted(&mut core, None, "stateless");
    assert!(!core.finish(id).unwrap().injectable);
    assert_empty(&core);
}

#[test]
fn invariant_3_only_detached_calls_expire() {
    let now = Instant::now();
    let mut core = Core::new();
    let attached = accepted(&mut core, key("s", 1), "attached");
    let detached = accepted(&mut core, key("s", 2), "detached");
    core.detach(detached, Wait::Until(now + SECOND));
    assert_eq!(core.next_deadline(), Some(now + SECOND));

    assert!(core.expire(now).is_empty());
    assert_eq!(core.expire(now + SECOND), [(detached, "detached")]);
    assert!(
        core.expire(now + UNSEEN_FOR).is_empty(),
        "an orphan expires once"
    );
    core.finish(detached);
    core.finish(attached);
    assert_empty(&core);
}

#[test]
fn invariant_4_a_reused_id_makes_the_older_call_leave_untouched() {
    let now = Instant::now();
    let mut core = Core::new();
    let older = accepted(&mut core, key("s", 7), "older");
    core.detach(older, Wait::Until(now + SECOND));
    let newer = accepted(&mut core, key("s", 7), "newer");

    assert!(core.expire(now + UNSEEN_FOR).is_empty());
    assert!(core.finish(older).is_none());
    assert!(core.finish(newer).unwrap().injectable);
    assert_empty(&core);
}

#[test]
fn invariant_4_claiming_twice_is_not_a_reuse() {
    let mut core = Core::new();
    let id = accepted(&mut core, key("s", 7), "call");
    core.claim(id);
    assert!(core.finish(id).unwrap().injectable);
}

#[test]
fn invariant_5_an_unseen_call_is_forgotten_not_cancelled() {
    let now = Instant::now();
    let mut core = Core::new();
    let id = accepted(&mut core, key("s", 7), "unseen");
    core.detach(id, Wait::Unseen(now + UNSEEN_FOR));
    assert!(core.expire(now + UNSEEN_FOR).is_empty());
    assert_empty(&core);
}

#[test]
fn the_same_id_in_another_session_or_scope_or_kind_is_another_call() {
    let mut core = Core::new();
    let mut keys = vec![key("s", 7), key("t", 7)];
    for change in [
        |key: &mut Key| key.scope = Scope::Path("/other".into()),
        |key: &mut Key| key.request = RequestId::String("7".into()),
    ] {
        let mut other = key("s", 7);
        other.as_mut().map(change);
        keys.push(other);
    }
    let ids: Vec<_> = keys
        .into_iter()
        .map(|key| accepted(&mut core, key, ""))
        .collect();
    assert!(ids.into_iter().all(|id| core.finish(id).is_some()));
    assert_empty(&core);
}

#[test]
fn a_resume_spares_the_detached_calls_of_its_session_only() {
    let now = Instant::now();
    let mut core = Core::new();
    let mine = accepted(&mut core, key("s", 1), "mine");
    let theirs = accepted(&mut core, key("t", 1), "theirs");
    core.detach(mine, Wait::Until(now + SECOND));
    core.detach(theirs, Wait::Until(now + SECOND));
    core.spare(&Scope::Path("/mcp".into()), "s", now);

    assert_eq!(core.expire(now + SECOND), [(theirs, "theirs")]);
    core.finish(theirs);
    assert_eq!(core.next_deadline(), Some(now + UNSEEN_FOR));
    core.finish(mine);
    assert_empty(&core);
}

#[test]
fn a_second_detach_replaces_the_first() {
    let now = Instant::now();
    let mut core = Core::new();
    let id = accepted(&mut core, None, "call");
    core.detach(id, Wait::Until(now + SECOND));
    core.detach(id, Wait::Until(now + 2 * SECOND));
    assert_eq!(core.next_deadline(), Some(now + 2 * SECOND));
    assert!(core.expire(now + SECOND).is_empty());
    assert_eq!(core.expire(now + 2 * SECOND).len(), 1);
}

#[test]
fn a_better_key_replaces_the_first_one() {
    let mut core = Core::new();
    let id = accepted(&mut core, key("s", 7), "call");
    core.rekey(id, key("s", 8).unwrap());
    let other = accepted(&mut core, key("s", 7), "other");
    assert!(core.finish(other).unwrap().injectable);
    assert!(core.finish(id).unwrap().injectable);
    assert_empty(&core);
}
