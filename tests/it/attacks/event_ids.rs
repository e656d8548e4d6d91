//! Ids that an attacker has guessed or overheard.
//!
//! They are the ids of events, of requests, and of sessions on other paths.

use axum::{Router, http::header::CONTENT_TYPE, routing::any};

use super::{ID, assert_answered, assert_orphaned_on_time, label, lose_client, try_resume};
use crate::{
    setup::{Plan, Server, StoppedClock, for_servers},
    support::*,
};

for_servers!(sessions {
    a_resume_with_the_event_id_of_another_session_neither_keeps_nor_shows_its_call,
    guessed_event_ids_neither_keep_nor_show_a_call_of_another_session,
    guessed_request_ids_do_not_end_a_call_of_another_session,
    a_session_id_on_another_path_is_another_session,
});

async fn a_resume_with_the_event_id_of_another_session_neither_keeps_nor_shows_its_call(
    server: Server,
) {
    let clock = StoppedClock::stop();
    let setup = Plan::with_grace(server).start().await;
    let (victim, attacker) = (setup.mcp().await, setup.mcp().await);
    lose_client(&setup, &victim).await;

    for id in ["0/0", "1/0"] {
        let seen = try_resume(&attacker, id).await.expect("a stream");
        assert_eq!(seen, "", "{id}");
    }

    assert_orphaned_on_time(&setup, &victim, &clock).await;
    let seen = try_resume(&attacker, "0/0").await.expect("a stream");
    assert!(!seen.contains("-32800"), "reveals the cancellation: {seen}");
}

async fn guessed_event_ids_neither_keep_nor_show_a_call_of_another_session(server: Server) {
    let clock = StoppedClock::stop();
    let setup = Plan::with_grace(server).start().await;
    let (victim, attacker) = (setup.mcp().await, setup.mcp().await);
    lose_client(&setup, &victim).await;

    let numbers = (0..6).flat_map(|index| (0..6).map(move |stream| format!("{index}/{stream}")));
    // A plain number refers to the attacker's own standalone stream.
    let odd = [
        "0/00",
        "00/0",
        "0/0/0",
        "/0",
        "0/",
        "-1/0",
        "0/18446744073709551616",
    ];
    let session = victim.session_id().expect("a session");
    let joined = [format!("{session}/0"), format!("{session}:0/0")];
    for id in numbers.chain(odd.map(str::to_owned)).chain(joined) {
        let seen = try_resume(&attacker, &id).await.unwrap_or_default();
        assert!(!seen.contains("victim"), "{id}: {seen}");
        assert!(!seen.contains("progress"), "{id}: {seen}");
    }

    assert_orphaned_on_time(&setup, &victim, &clock).await;
}

async fn guessed_request_ids_do_not_end_a_call_of_another_session(server: Server) {
    let setup = Plan::with_grace(server).start().await;
    let (victim, attacker) = (setup.mcp().await, setup.mcp().await);
    let call = setup.start_call(&victim, ID, "hold", "victim").await;

    for id in 0..20 {
        assert_eq!(attacker.cancel(id).await, 202);
        assert_eq!(attacker.cancel(id.to_string()).await, 202);
    }
    let same = setup.start_call(&attacker, ID, "hold", "attacker").await;
    same.rst();
    assert_eq!(attacker.delete().await, 202);

    assert_answered(&setup, &victim, call).await;
}

/// The service on the other path accepts everything.
async fn a_session_id_on_another_path_is_another_session(server: Server) {
    let clock = StoppedClock::stop();
    let setup = Plan::with_grace(server)
        .inside(with_permissive_route)
        .start()
        .await;
    let victim = setup.mcp().await;
    lose_client(&setup, &victim).await;
    let session = victim.session_id().expect("a session");
    let elsewhere = Mcp::stateless(setup.served.addr, "/other").in_session(session);

    assert_eq!(elsewhere.cancel(ID).await, 200);
    assert_eq!(elsewhere.delete().await, 200);
    assert!(try_resume(&elsewhere, "0/0").await.is_some());
    elsewhere.call(ID, "hold", label()).await.rst();
    // By the time this request arrives, the exchange of the previous call is over.
    assert_eq!(elsewhere.cancel(ID).await, 200);

    // The attacker's call has the same session id and request id, but a different path.
    let detached = setup.calls.detached();
    assert_eq!(detached, 1);
    clock.advance(std::time::Duration::ZERO).await;
    assert!(setup.witness.is_running("victim"));
    let mut resumed = victim.resume("0/0").await;
    assert_eq!(resumed.head().await.status, 200);
    setup.events.resumed(&victim, ID, 1).await;
    setup.assert_completes("victim", &mut resumed).await;
}

fn with_permissive_route(router: Router) -> Router {
    let permissive = any(async || ([(CONTENT_TYPE, "text/event-stream")], ": hello\n\n"));
    router.route("/other", permissive)
}
