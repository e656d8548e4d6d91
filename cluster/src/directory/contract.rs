//! The directory contract, as tests that run against each implementation.

use std::{net::Ipv4Addr, sync::Arc};

use futures_util::future::join_all;

use super::*;

mod leases_and_answers;

/// Returns a new instance at the address with this number. Each call returns a new incarnation.
pub(crate) fn instance(number: u8) -> Owner {
    Owner {
        address: (Ipv4Addr::new(10, 0, 0, number), 9000).into(),
        incarnation: Incarnation::random(),
    }
}

/// Returns the registration of a newly started session.
pub(crate) fn session(id: &str) -> Registration {
    Registration {
        session: SessionHash::of(id),
        epoch: Epoch::now(),
        renewed: None,
        params: format!("{{\"of\":\"{id}\"}}").into_bytes().into(),
    }
}

/// Checks the entire contract on an empty directory.
pub(super) async fn holds<D: Directory>(directory: D) {
    let directory = Arc::new(directory);
    an_instance_that_registers_a_new_session_owns_it(&*directory).await;
    a_session_is_registered_over_an_older_record_only(&*directory).await;
    a_new_epoch_is_registered_only_over_a_record_of_its_owner(&*directory).await;
    a_claim_changes_the_owner_once(&*directory).await;
    a_claim_is_won_only_on_the_current_record(&*directory).await;
    an_unknown_session_cannot_be_claimed(&*directory).await;
    of_concurrent_claims_one_wins(&directory).await;
    of_concurrent_registrations_one_wins(&directory).await;
    parameters_outlive_their_owner(&*directory).await;
    a_former_owner_does_not_register_a_deleted_session(&*directory).await;
    an_owner_that_lost_a_session_does_not_delete_it(&*directory).await;
    leases_and_answers::a_heartbeat_does_not_acquire_a_lease(&*directory).await;
    leases_and_answers::a_lease_has_what_its_instance_wrote(&*directory).await;
    leases_and_answers::a_heartbeat_that_arrives_late_renews_the_lease_as_of_its_own_time(
        &*directory,
    )
    .await;
    leases_and_answers::a_heartbeat_that_was_overtaken_does_not_replace_a_newer_status(&*directory)
        .await;
    leases_and_answers::a_heartbeat_reports_once_that_a_record_of_its_instance_was_replaced(
        &*directory,
    )
    .await;
    leases_and_answers::an_answer_is_found_under_its_own_key_only(&*directory).await;
    leases_and_answers::an_answer_that_was_removed_is_not_found(&*directory).await;
}

/// Returns a session's ownership as stored in a directory.
pub(crate) async fn ownership(
    directory: &impl Directory,
    session: SessionHash,
) -> Option<Ownership> {
    match directory.look_up(session).await.unwrap().record {
        Some(Record::Owned(ownership)) => Some(ownership),
        Some(Record::Deleted(_)) | None => None,
    }
}

/// Returns `true` if an instance has its lease.
pub(crate) async fn is_alive(directory: &impl Directory, owner: Owner) -> bool {
    let leases = directory.leases().await.unwrap();
    leases.get(owner.incarnation).is_some()
}

/// Claims one of `former`'s sessions for `owner`.
pub(crate) async fn claim_from(
    directory: &impl Directory,
    session: SessionHash,
    former: Owner,
    owner: Owner,
) -> Claim {
    let read = ownership(directory, session).await.unwrap();
    assert_eq!(read.owner, former);
    let wanted = read.claimed_by(owner);
    directory.claim(session, read, wanted).await.unwrap()
}

pub(crate) async fn owner_of(directory: &impl Directory, session: SessionHash) -> Option<Owner> {
    let ownership = ownership(directory, session).await;
    ownership.map(|ownership| ownership.owner)
}

/// Returns the record written by `owner` with this registration.
fn owned(owner: Owner, written: &Registration) -> Record {
    let epoch = written.epoch;
    Record::Owned(Ownership { owner, epoch })
}

async fn an_instance_that_registers_a_new_session_owns_it(directory: &impl Directory) {
    let me = instance(1);
    let sessions = [session("registered 1"), session("registered 2")];
    assert_eq!(owner_of(directory, sessions[0].session).await, None);
    assert_eq!(directory.register(me, &sessions).await.unwrap(), []);
    assert_eq!(owner_of(directory, sessions[0].session).await, Some(me));
    assert_eq!(owner_of(directory, sessions[1].session).await, Some(me));
    assert_eq!(
        directory.register(me, &sessions).await.unwrap(),
        [],
        "a second registration changes nothing"
    );
}

async fn a_session_is_registered_over_an_older_record_only(directory: &impl Directory) {
    let (first, second) = (instance(1), instance(2));
    let (taken, free) = (session("taken"), session("free"));
    let later = Registration {
        epoch: taken.epoch.next(),
        ..taken.clone()
    };
    let register =
        async |owner, sessions: &[Registration]| directory.register(owner, sessions).await.unwrap();
    assert_eq!(register(first, std::slice::from_ref(&later)).await, []);
    let differing = register(second, &[free.clone(), taken.clone()]).await;
    assert_eq!(differing, [(taken.session, owned(first, &later))]);
    assert_eq!(owner_of(directory, taken.session).await, Some(first));
    assert_eq!(owner_of(directory, free.session).await, Some(second));
    // A directory restored from a snapshot may contain an older record like this one.
    let latest = Registration {
        epoch: later.epoch.next(),
        ..taken.clone()
    };
    assert_eq!(register(second, std::slice::from_ref(&latest)).await, []);
    assert_eq!(owner_of(directory, taken.session).await, Some(second));
    let differing = register(first, &[later]).await;
    assert_eq!(differing, [(taken.session, owned(second, &latest))]);
    // If two instances have the same epoch, the larger incarnation owns the session.
    let [smaller, larger] = {
        let mut both = [instance(3), instance(4)];
        both.sort_by_key(|owner| owner.incarnation.to_string());
        both
    };
    let tied = session("tied");
    for (owner, is_registered) in [(larger, true), (smaller, false), (larger, true)] {
        assert_eq!(
            register(owner, std::slice::from_ref(&tied))
                .await
                .is_empty(),
            is_registered
        );
        assert_eq!(owner_of(directory, tied.session).await, Some(larger));
    }
}

async fn a_new_epoch_is_registered_only_over_a_record_of_its_owner(directory: &impl Directory) {
    let (me, other) = (instance(1), instance(2));
    let [mine, taken, lost] = ["mine", "taken meanwhile", "lost"].map(session);
    let both = [mine.clone(), taken.clone()];
    assert_eq!(directory.register(me, &both).await.unwrap(), []);
    let read = ownership(directory, mine.session).await.unwrap();
    claim_from(directory, taken.session, me, other).await;
    let current = ownership(directory, taken.session).await.unwrap();
    // This epoch is later than the other instance's.
    let renewed = current.epoch.next();
    let renewals = both.map(|registered| Registration {
        renewed: Some(renewed),
        ..registered
    });
    let differing = directory.register(me, &renewals).await.unwrap();
    assert_eq!(differing, [(taken.session, Record::Owned(current))]);
    let now = Ownership {
        owner: me,
        epoch: renewed,
    };
    assert_eq!(ownership(directory, mine.session).await, Some(now));
    // If there is no record, a later claim may have been lost.
    let renewal = Registration {
        renewed: Some(renewed),
        ..lost.clone()
    };
    let differing = directory.register(me, &[renewal]).await.unwrap();
    assert_eq!(differing, [(lost.session, owned(me, &lost))]);
    let wanted = read.claimed_by(other);
    let late = directory.claim(mine.session, read, wanted).await.unwrap();
    assert_eq!(late, Claim::Lost(Record::Owned(now)));
    let differing = directory.register(me, std::slice::from_ref(&mine)).await;
    assert_eq!(
        differing.unwrap(),
        [(mine.session, Record::Owned(now))],
        "the reply has the epoch whose confirmation the owner did not receive"
    );
}

async fn a_claim_changes_the_owner_once(directory: &impl Directory) {
    let (former, winner, loser) = (instance(1), instance(2), instance(3));
    let claimed = session("claimed");
    directory
        .register(former, std::slice::from_ref(&claimed))
        .await
        .unwrap();
    let read = ownership(directory, claimed.session).await.unwrap();
    let [winning, losing] = [winner, loser].map(|owner| read.claimed_by(owner));
    let claim = async |wanted| {
        directory
            .claim(claimed.session, read, wanted)
            .await
            .unwrap()
    };
    assert_eq!(claim(winning).await, Claim::Won);
    let now = ownership(directory, claimed.session).await.unwrap();
    assert_eq!(now, winning);
    assert_eq!(claim(losing).await, Claim::Lost(Record::Owned(now)));
    assert_eq!(ownership(directory, claimed.session).await, Some(now));
    let differing = directory
        .register(former, std::slice::from_ref(&claimed))
        .await
        .unwrap();
    assert_eq!(
        differing,
        [(claimed.session, Record::Owned(now))],
        "the reply to the former owner has the claim"
    );
}

async fn a_claim_is_won_only_on_the_current_record(directory: &impl Directory) {
    let (owner, late) = (instance(1), instance(2));
    let taken = session("taken once more");
    let register = async |epoch| {
        let registered = Registration {
            epoch,
            ..taken.clone()
        };
        let registered = directory.register(owner, &[registered]).await;
        assert_eq!(registered.unwrap(), []);
    };
    register(taken.epoch).await;
    let read = ownership(directory, taken.session).await.unwrap();
    register(taken.epoch).await;
    assert_eq!(
        ownership(directory, taken.session).await,
        Some(read),
        "a second write takes no new epoch"
    );
    let now = read.claimed_by(owner);
    let claimed = directory.claim(taken.session, read, now).await.unwrap();
    assert_eq!(claimed, Claim::Won);
    assert_eq!(ownership(directory, taken.session).await, Some(now));
    for claimer in [late, owner] {
        // Within one millisecond, the owner's second claim would be equal to its first.
        let wanted = now.claimed_by(claimer);
        let claimed = directory.claim(taken.session, read, wanted).await.unwrap();
        assert_eq!(claimed, Claim::Lost(Record::Owned(now)));
    }
    // The claim also fails if the record has been rewritten with a later epoch.
    register(now.epoch.next()).await;
    let wanted = now.claimed_by(late);
    let claimed = directory.claim(taken.session, now, wanted).await.unwrap();
    assert!(
        matches!(claimed, Claim::Lost(Record::Owned(current)) if current.owner == owner && current != now)
    );
}

async fn an_unknown_session_cannot_be_claimed(directory: &impl Directory) {
    let unknown = session("unknown").session;
    let [previous, wanted] = [1, 2].map(|number| Ownership::begin(instance(number)));
    let claimed = directory.claim(unknown, previous, wanted).await.unwrap();
    assert_eq!(claimed, Claim::Unknown);
    assert_eq!(owner_of(directory, unknown).await, None);
}

async fn of_concurrent_claims_one_wins<D: Directory>(directory: &Arc<D>) {
    for round in 0..20 {
        let former = instance(1);
        let wanted = session(&format!("wanted {round}"));
        directory
            .register(former, std::slice::from_ref(&wanted))
            .await
            .unwrap();
        let read = ownership(&**directory, wanted.session).await.unwrap();
        let rivals: Vec<Owner> = (10..18).map(instance).collect();
        let claims = rivals.iter().map(|rival| {
            let (directory, rival, session) = (directory.clone(), *rival, wanted.session);
            let wanted = read.claimed_by(rival);
            tokio::spawn(
                async move { (rival, directory.claim(session, read, wanted).await.unwrap()) },
            )
        });
        let claims: Vec<(Owner, Claim)> = join_all(claims)
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
        let now = ownership(&**directory, wanted.session).await.unwrap();
        for (rival, claim) in claims {
            let expected = if rival == now.owner {
                Claim::Won
            } else {
                Claim::Lost(Record::Owned(now))
            };
            assert_eq!(claim, expected);
        }
        assert!(rivals.contains(&now.owner));
    }
}

async fn of_concurrent_registrations_one_wins<D: Directory>(directory: &Arc<D>) {
    let wanted = session("registered at once");
    let rivals: Vec<Owner> = (10..18).map(instance).collect();
    let registered = rivals.iter().map(|rival| {
        let (directory, rival, wanted) = (directory.clone(), *rival, wanted.clone());
        tokio::spawn(async move { directory.register(rival, &[wanted]).await.unwrap() })
    });
    let registered = join_all(registered).await.into_iter().map(Result::unwrap);
    let largest = rivals
        .iter()
        .max_by_key(|rival| rival.incarnation.to_string());
    let owner = owner_of(&**directory, wanted.session).await;
    assert_eq!(owner.as_ref(), largest);
    assert!(registered.filter(Vec::is_empty).count() >= 1);
    for rival in rivals {
        let differing = directory
            .register(rival, std::slice::from_ref(&wanted))
            .await
            .unwrap();
        assert_eq!(differing.is_empty(), Some(rival) == owner);
    }
}

async fn parameters_outlive_their_owner(directory: &impl Directory) {
    let (former, winner) = (instance(1), instance(2));
    let restored = session("restored");
    let hash = restored.session;
    assert_eq!(directory.load(hash).await.unwrap(), None);
    directory
        .register(former, std::slice::from_ref(&restored))
        .await
        .unwrap();
    claim_from(directory, hash, former, winner).await;
    let entry = directory.load(hash).await.unwrap().unwrap();
    assert_eq!(Some(entry.ownership), ownership(directory, hash).await);
    assert_eq!(
        (entry.ownership.owner, &*entry.params),
        (winner, &*restored.params)
    );
}

async fn a_former_owner_does_not_register_a_deleted_session(directory: &impl Directory) {
    let (former, owner, late) = (instance(1), instance(2), instance(3));
    let deleted = session("deleted");
    let hash = deleted.session;
    directory
        .register(former, std::slice::from_ref(&deleted))
        .await
        .unwrap();
    claim_from(directory, hash, former, owner).await;
    let read = ownership(directory, hash).await.unwrap();
    // Even an owner that no longer knows its epoch can delete the session.
    let tombstone = Tombstone {
        by: owner.incarnation,
        epoch: deleted.epoch,
    };
    for _ in 0..2 {
        directory.delete(hash, tombstone).await.unwrap();
        let expected = Record::Deleted(Tombstone {
            epoch: read.epoch,
            ..tombstone
        });
        let snapshot = directory.look_up(hash).await.unwrap();
        assert_eq!(snapshot.record, Some(expected));
        assert_eq!(directory.load(hash).await.unwrap(), None);
        let rewrite = Registration {
            epoch: read.epoch,
            ..deleted.clone()
        };
        for (registrant, registration) in [(former, &deleted), (owner, &rewrite)] {
            let differing = directory
                .register(registrant, std::slice::from_ref(registration))
                .await;
            assert_eq!(differing.unwrap(), [(hash, expected)]);
        }
        let claimed = directory.claim(hash, read, read.claimed_by(late)).await;
        assert_eq!(claimed.unwrap(), Claim::Lost(expected));
    }
    // A session lost by the directory gets a tombstone too.
    let lost = session("deleted and lost").session;
    directory.delete(lost, tombstone).await.unwrap();
    let snapshot = directory.look_up(lost).await.unwrap();
    assert_eq!(snapshot.record, Some(Record::Deleted(tombstone)));
}

async fn an_owner_that_lost_a_session_does_not_delete_it(directory: &impl Directory) {
    let (former, owner) = (instance(1), instance(2));
    let kept = session("kept");
    directory
        .register(former, std::slice::from_ref(&kept))
        .await
        .unwrap();
    claim_from(directory, kept.session, former, owner).await;
    let tombstone = Tombstone {
        by: former.incarnation,
        epoch: kept.epoch,
    };
    directory.delete(kept.session, tombstone).await.unwrap();
    assert_eq!(owner_of(directory, kept.session).await, Some(owner));
}
