//! What every directory does, as tests for each of them.

use std::{net::Ipv4Addr, sync::Arc};

use bytes::Bytes;
use futures_util::future::join_all;

use super::*;

/// An instance of that number.
pub(crate) fn instance(number: u8) -> Owner {
    Owner {
        address: (Ipv4Addr::new(10, 0, 0, number), 9000).into(),
        incarnation: Incarnation::random(),
    }
}

/// A session, and parameters of it.
pub(crate) fn session(id: &str) -> (SessionHash, Arc<[u8]>) {
    (
        SessionHash::of(id),
        format!("{{\"of\":\"{id}\"}}").into_bytes().into(),
    )
}

/// All that follows, on directories that begin empty.
pub(super) async fn holds<D: Directory>(directory: D) {
    let directory = Arc::new(directory);
    who_enters_a_session_owns_it(&*directory).await;
    nobody_enters_a_session_of_another(&*directory).await;
    a_claim_changes_the_owner_once(&*directory).await;
    a_claim_is_won_only_on_what_was_read_since_the_last(&*directory).await;
    a_session_that_nobody_knows_cannot_be_claimed(&*directory).await;
    of_all_who_claim_at_once_one_wins(&directory).await;
    of_all_who_enter_at_once_one_owns(&directory).await;
    parameters_outlive_their_owner(&*directory).await;
    only_its_owner_removes_a_session(&*directory).await;
    a_beat_makes_no_lease(&*directory).await;
    an_absence_says_whether_the_asker_has_its_lease(&*directory).await;
    an_answer_is_found_under_its_own_names_only(&*directory).await;
    an_answer_that_was_removed_is_not_found(&*directory).await;
    a_client_at_the_door_is_one_of_its_own_session_only(&*directory).await;
}

/// What a directory says of who owns a session.
pub(crate) async fn ownership(
    directory: &impl Directory,
    session: SessionHash,
) -> Option<Ownership> {
    let found = directory.owner(session, Incarnation::random()).await;
    match found.unwrap() {
        Found::Owner(ownership) => Some(ownership),
        Found::Nobody(_) => None,
    }
}

/// Makes a claim on a session which is this owner's.
pub(crate) async fn claim_from(
    directory: &impl Directory,
    session: SessionHash,
    former: Owner,
    owner: Owner,
) -> Claim {
    let read = ownership(directory, session).await.unwrap();
    assert_eq!(read.owner, former);
    directory.claim(session, read, owner).await.unwrap()
}

async fn owner_of(directory: &impl Directory, session: SessionHash) -> Option<Owner> {
    let ownership = ownership(directory, session).await;
    ownership.map(|ownership| ownership.owner)
}

async fn who_enters_a_session_owns_it(directory: &impl Directory) {
    let me = instance(1);
    let sessions = [session("enter 1"), session("enter 2")];
    assert_eq!(owner_of(directory, sessions[0].0).await, None);
    assert_eq!(directory.enter(me, &sessions).await.unwrap(), []);
    assert_eq!(owner_of(directory, sessions[0].0).await, Some(me));
    assert_eq!(owner_of(directory, sessions[1].0).await, Some(me));
    assert_eq!(
        directory.enter(me, &sessions).await.unwrap(),
        [],
        "a second time is no harm"
    );
}

async fn nobody_enters_a_session_of_another(directory: &impl Directory) {
    let (first, second) = (instance(1), instance(2));
    let (taken, free) = (session("taken"), session("free"));
    directory
        .enter(first, std::slice::from_ref(&taken))
        .await
        .unwrap();
    let others = directory
        .enter(second, &[free.clone(), taken.clone()])
        .await
        .unwrap();
    assert_eq!(others, [(taken.0, first)]);
    assert_eq!(owner_of(directory, taken.0).await, Some(first));
    assert_eq!(owner_of(directory, free.0).await, Some(second));
}

async fn a_claim_changes_the_owner_once(directory: &impl Directory) {
    let (former, winner, loser) = (instance(1), instance(2), instance(3));
    let claimed = session("claimed");
    directory
        .enter(former, std::slice::from_ref(&claimed))
        .await
        .unwrap();
    let read = ownership(directory, claimed.0).await.unwrap();
    assert_eq!(
        directory.claim(claimed.0, read, winner).await.unwrap(),
        Claim::Won
    );
    let now = ownership(directory, claimed.0).await.unwrap();
    assert_eq!(now.owner, winner);
    assert_eq!(
        directory.claim(claimed.0, read, loser).await.unwrap(),
        Claim::Lost(now)
    );
    assert_eq!(ownership(directory, claimed.0).await, Some(now));
    let others = directory
        .enter(former, std::slice::from_ref(&claimed))
        .await
        .unwrap();
    assert_eq!(
        others,
        [(claimed.0, winner)],
        "the former owner is told when it comes back"
    );
}

async fn a_claim_is_won_only_on_what_was_read_since_the_last(directory: &impl Directory) {
    let (owner, late) = (instance(1), instance(2));
    let taken = session("taken once more");
    let enters = async || {
        let entered = directory.enter(owner, std::slice::from_ref(&taken)).await;
        assert_eq!(entered.unwrap(), []);
    };
    enters().await;
    let read = ownership(directory, taken.0).await.unwrap();
    enters().await;
    assert_eq!(
        ownership(directory, taken.0).await,
        Some(read),
        "who writes it takes nothing"
    );
    let claimed = directory.claim(taken.0, read, owner).await.unwrap();
    assert_eq!(claimed, Claim::Won);
    let now = ownership(directory, taken.0).await.unwrap();
    assert!(now.owner == owner && now != read);
    for who in [late, owner] {
        let claimed = directory.claim(taken.0, read, who).await.unwrap();
        assert_eq!(claimed, Claim::Lost(now));
    }
    // Also if it was forgotten, and entered again.
    directory.remove(taken.0, owner).await.unwrap();
    enters().await;
    let claimed = directory.claim(taken.0, now, late).await.unwrap();
    assert!(matches!(claimed, Claim::Lost(is) if is.owner == owner && is != now));
}

async fn a_session_that_nobody_knows_cannot_be_claimed(directory: &impl Directory) {
    let unknown = session("unknown").0;
    assert_eq!(
        directory
            .claim(unknown, Ownership::begin(instance(1)), instance(2))
            .await
            .unwrap(),
        Claim::Unknown
    );
    assert_eq!(owner_of(directory, unknown).await, None);
}

async fn of_all_who_claim_at_once_one_wins<D: Directory>(directory: &Arc<D>) {
    for round in 0..20 {
        let former = instance(1);
        let wanted = session(&format!("wanted {round}"));
        directory
            .enter(former, std::slice::from_ref(&wanted))
            .await
            .unwrap();
        let read = ownership(&**directory, wanted.0).await.unwrap();
        let rivals: Vec<Owner> = (10..18).map(instance).collect();
        let claims = rivals.iter().map(|rival| {
            let (directory, rival, session) = (directory.clone(), *rival, wanted.0);
            tokio::spawn(
                async move { (rival, directory.claim(session, read, rival).await.unwrap()) },
            )
        });
        let claims: Vec<(Owner, Claim)> = join_all(claims)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        let now = ownership(&**directory, wanted.0).await.unwrap();
        for (rival, claim) in claims {
            let expected = if rival == now.owner {
                Claim::Won
            } else {
                Claim::Lost(now)
            };
            assert_eq!(claim, expected);
        }
        assert!(rivals.contains(&now.owner));
    }
}

async fn of_all_who_enter_at_once_one_owns<D: Directory>(directory: &Arc<D>) {
    let wanted = session("entered at once");
    let rivals: Vec<Owner> = (10..18).map(instance).collect();
    let entered = rivals.iter().map(|rival| {
        let (directory, rival, wanted) = (directory.clone(), *rival, wanted.clone());
        tokio::spawn(async move { (rival, directory.enter(rival, &[wanted]).await.unwrap()) })
    });
    let entered: Vec<_> = join_all(entered)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let owner = owner_of(&**directory, wanted.0).await.unwrap();
    for (rival, others) in entered {
        let expected = if rival == owner {
            vec![]
        } else {
            vec![(wanted.0, owner)]
        };
        assert_eq!(others, expected);
    }
}

async fn parameters_outlive_their_owner(directory: &impl Directory) {
    let (former, winner) = (instance(1), instance(2));
    let (hash, params) = session("restored");
    assert_eq!(directory.load(hash).await.unwrap(), None);
    directory
        .enter(former, &[(hash, params.clone())])
        .await
        .unwrap();
    claim_from(directory, hash, former, winner).await;
    let entry = directory.load(hash).await.unwrap().unwrap();
    assert_eq!((entry.owner, &*entry.params), (winner, &*params));
}

async fn only_its_owner_removes_a_session(directory: &impl Directory) {
    let (me, other) = (instance(1), instance(2));
    let mine = session("removed");
    directory
        .enter(me, std::slice::from_ref(&mine))
        .await
        .unwrap();
    directory.remove(mine.0, other).await.unwrap();
    assert_eq!(owner_of(directory, mine.0).await, Some(me));
    directory.remove(mine.0, me).await.unwrap();
    assert_eq!(owner_of(directory, mine.0).await, None);
    assert_eq!(directory.load(mine.0).await.unwrap(), None);
    directory.remove(mine.0, me).await.unwrap();
}

async fn a_beat_makes_no_lease(directory: &impl Directory) {
    let (me, other) = (instance(1), instance(2));
    let is_alive = async || {
        directory
            .is_alive(me.incarnation, other.incarnation)
            .await
            .unwrap()
            == Alive::Yes
    };
    assert!(!directory.beat(me).await.unwrap().was_alive);
    assert!(!is_alive().await);
    directory.lease(me).await.unwrap();
    assert!(is_alive().await);
    assert!(directory.beat(me).await.unwrap().was_alive);
    directory.leave(me).await.unwrap();
    assert!(!is_alive().await);
    assert!(!directory.beat(me).await.unwrap().was_alive);
}

async fn an_absence_says_whether_the_asker_has_its_lease(directory: &impl Directory) {
    let (me, gone) = (instance(1), instance(2));
    let unknown = session("absent").0;
    for asker_is_alive in [false, true] {
        let run = directory.beat(me).await.unwrap().run;
        let absence = Absence {
            run,
            asker_is_alive,
        };
        assert_eq!(
            directory.owner(unknown, me.incarnation).await.unwrap(),
            Found::Nobody(absence.clone())
        );
        let alive = directory
            .is_alive(gone.incarnation, me.incarnation)
            .await
            .unwrap();
        assert_eq!(alive, Alive::No(absence));
        directory.lease(me).await.unwrap();
    }
}

async fn an_answer_is_found_under_its_own_names_only(directory: &impl Directory) {
    let me = instance(1).incarnation;
    let (one, two) = (session("answer 1").0, session("answer 2").0);
    let answer = Bytes::from_static(b"{\"result\":\0}");
    let [seven, eight, last] = [7, 8, u64::MAX].map(CallNumber::new);
    directory
        .keep_answer(one, me, seven, answer.clone(), KEPT_ANSWER)
        .await
        .unwrap();
    directory
        .keep_answer(one, me, last, Bytes::from_static(b"last"), KEPT_ANSWER)
        .await
        .unwrap();
    assert_eq!(
        directory.answer(one, me, seven).await.unwrap(),
        Some(answer)
    );
    assert_eq!(
        directory.answer(one, me, last).await.unwrap().as_deref(),
        Some(&b"last"[..])
    );
    for (session, incarnation, call) in [
        (one, me, eight),
        (two, me, seven),
        (one, instance(1).incarnation, seven),
    ] {
        assert_eq!(
            directory.answer(session, incarnation, call).await.unwrap(),
            None
        );
    }
}

async fn an_answer_that_was_removed_is_not_found(directory: &impl Directory) {
    let (me, session) = (instance(1).incarnation, session("answer 3").0);
    let [one, two] = [1, 2].map(CallNumber::new);
    let answer = Bytes::from_static(b"{}");
    for call in [one, two] {
        let kept = directory.keep_answer(session, me, call, answer.clone(), KEPT_ANSWER);
        kept.await.unwrap();
    }
    for _ in 0..2 {
        directory.remove_answer(session, me, one).await.unwrap();
        let found = directory.answer(session, me, one).await.unwrap();
        assert_eq!(found, None, "a second time is no harm");
    }
    let found = directory.answer(session, me, two).await.unwrap();
    assert_eq!(found, Some(answer));
}

async fn a_client_at_the_door_is_one_of_its_own_session_only(directory: &impl Directory) {
    let me = instance(1);
    let (one, two, unknown) = (session("door 1"), session("door 2"), session("door 3"));
    let (one_and_two, asker) = ([one.clone(), two.clone()], me.incarnation);
    directory.enter(me, &one_and_two).await.unwrap();
    // The shorter time does not end the longer one.
    for time in [TURNED_AWAY / 2, TURNED_AWAY, TURNED_AWAY / 2] {
        directory.knock(one.0, time).await.unwrap();
        let standing = directory.standing(one.0, asker).await.unwrap();
        assert!(matches!(standing.found, Found::Owner(is) if is.owner == me));
        let left = standing.at_the_door.unwrap();
        assert!(left > time - Duration::from_secs(5), "{left:?}");
    }
    let left = directory.standing(one.0, asker).await.unwrap().at_the_door;
    assert!(
        left.is_some_and(|left| left > TURNED_AWAY - Duration::from_secs(5) && left <= TURNED_AWAY)
    );
    for session in [two.0, unknown.0] {
        let standing = Standing {
            found: directory.owner(session, asker).await.unwrap(),
            at_the_door: None,
        };
        assert_eq!(directory.standing(session, asker).await.unwrap(), standing);
    }
}
