//! What a client needs to resume a stream, and which credentials the proxy sends on its behalf.

use std::time::Duration;

use axum::body::Body;
use http::Request;
use mcp_cancel_on_disconnect::{CancelReason, Outcome};
use mcp_cancel_proxy::event_store::{EventStore, Limits};

use crate::{WITH_PRIMING, scripted::*};

fn with_headers(mut request: Request<Body>, fields: &[(&'static str, &str)]) -> Request<Body> {
    for (name, value) in fields {
        let value = value.parse().unwrap();
        request.headers_mut().append(*name, value);
    }
    request
}

/// Starts a call with these header fields.
///
/// Returns its client, its server and the id of its first event.
async fn begin_call(
    setup: &mut Setup,
    fields: &[(&'static str, &str)],
) -> (Stream, Events, String) {
    let waiting = setup.send(with_headers(posted(SESSION, call(1)), fields));
    let server = setup.next().await.events();
    let mut client = in_time(waiting).await.unwrap();
    let last = client.event().await.unwrap().id.unwrap();
    (client, server, last)
}

#[tokio::test(start_paused = true)]
async fn a_client_with_another_key_or_none_gets_an_answer_only_if_the_server_accepts_it() {
    for field in ["x-api-key", "cookie", "authorization", "x-user"] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let (mut owner, server, last) = begin_call(&mut setup, &[(field, "owner")]).await;
        for other in [
            &[][..],
            &[(field, "other")],
            &[(field, "owner"), ("x-more", "1")],
        ] {
            let waiting = setup.send(with_headers(resumed(SESSION, &last), other));
            setup.next().await.status(401);
            assert_eq!(
                in_time(waiting).await.unwrap().status,
                401,
                "{field} {other:?}"
            );
        }
        // The owner still has the stream and can resume without a `ping`.
        server.message(&answer(1)).await;
        assert_eq!(owner.event().await.unwrap().data, answer(1));
        let same = [
            (field, "owner"),
            ("traceparent", "00-1-2-01"),
            ("user-agent", "b"),
        ];
        let mut resumed = in_time(setup.send(with_headers(resumed(SESSION, &last), &same)))
            .await
            .unwrap();
        assert_eq!(resumed.event().await.unwrap().data, answer(1));
        assert!(setup.arrived.is_empty());
    }
}

/// Hosted servers take their key in the query (`?api_key=`) or in the path.
#[tokio::test(start_paused = true)]
async fn a_client_with_another_key_in_its_url_gets_an_answer_only_if_the_server_accepts_it() {
    for (owner_url, other_url) in [
        ("/mcp?key=owner", "/mcp?key=other"),
        ("/mcp?key=owner", "/mcp"),
        ("/mcp/owner", "/mcp/other"),
    ] {
        let at = |mut request: Request<Body>, target: &str| {
            *request.uri_mut() = target.parse().unwrap();
            request
        };
        let mut setup = Setup::started(WITH_PRIMING).await;
        let waiting = setup.send(at(posted(SESSION, call(1)), owner_url));
        let server = setup.next().await.events();
        let last = in_time(waiting).await.unwrap().event().await.unwrap().id;
        let last = last.unwrap();
        let waiting = setup.send(at(resumed(SESSION, &last), other_url));
        let ping = setup.next().await;
        assert_eq!(ping.uri, other_url);
        ping.status(401);
        assert_eq!(in_time(waiting).await.unwrap().status, 401);
        server.message(&answer(1)).await;
        let waiting = setup.send(at(resumed(SESSION, &last), owner_url));
        let mut resumed = in_time(waiting).await.unwrap();
        assert_eq!(resumed.event().await.unwrap().data, answer(1));
        assert!(setup.arrived.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn the_cancel_has_the_url_that_was_accepted_last() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let mut request = posted(SESSION, call(1));
    *request.uri_mut() = "/mcp?key=old".parse().unwrap();
    let waiting = setup.send(request);
    let _server = setup.next().await.events();
    let last = in_time(waiting).await.unwrap().event().await.unwrap().id;
    let mut resumed = resumed(SESSION, &last.unwrap());
    *resumed.uri_mut() = "/mcp?key=new".parse().unwrap();
    let waiting = setup.send(resumed);
    setup.next().await.pong();
    drop(in_time(waiting).await.unwrap());
    let cancel = setup.next().await;
    assert!(cancel.body.contains("notifications/cancelled"));
    assert_eq!(cancel.uri, "/mcp?key=new");
    cancel.status(202);
}

/// Servers refuse with a JSON-RPC error, and gateways with a login page.
#[tokio::test(start_paused = true)]
async fn a_client_that_is_refused_with_status_200_gets_no_answer_and_no_cancel_has_its_key() {
    let response = |content_type: &str, body: &str| {
        http::Response::builder()
            .header("content-type", content_type)
            .body(Body::from(body.to_owned()))
            .unwrap()
    };
    let pong = pong_of("ID");
    let error = pong.replace(
        r#""result":{}"#,
        r#""error":{"code":-32001,"message":"no"}"#,
    );
    let without_ping = error.replace("-32001", "-32601");
    let log = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{}}"#;
    let too_long = format!("{}{pong}", " ".repeat(64 * 1024));
    let stream = |message: &str| format!(": hi\n\ndata: {log}\n\ndata: {message}\n\n");
    for (content_type, body, accepted) in [
        ("application/json", &*error, false),
        ("text/event-stream", &stream(&error), false),
        ("text/event-stream", ": nothing\n\n", false),
        ("text/html", "<html>log in</html>", false),
        ("text/html", &pong, false),
        ("application/json", &too_long, false),
        ("application/json", &pong, true),
        ("application/json", &without_ping, true),
        ("text/event-stream", &stream(&pong), true),
    ] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let (client, server, last) = begin_call(&mut setup, &[("x-api-key", "owner")]).await;
        drop(client);
        let other = with_headers(resumed(SESSION, &last), &[("x-api-key", "other")]);
        let waiting = setup.send(other);
        let ping = setup.next().await;
        let body = body.replace("ID", &ping.id());
        ping.answer(response(content_type, &body));
        let mut resumed = in_time(waiting).await.unwrap();
        let status = if accepted { 200 } else { 403 };
        assert_eq!(resumed.status, status, "{content_type} {body:.100}");
        if accepted {
            server.message(&answer(1)).await;
            assert_eq!(resumed.event().await.unwrap().data, answer(1));
        } else {
            let cancel = setup.next().await;
            assert_eq!(cancel.headers["x-api-key"], "owner");
        }
    }
}

/// A client may resume all of a session's streams with a fresh token at once, and servers route answers by their ids.
#[tokio::test(start_paused = true)]
async fn each_ping_has_an_id_of_its_own() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (_client, _server, last) = begin_call(&mut setup, &[("authorization", "old")]).await;
    let resume = || with_headers(resumed(SESSION, &last), &[("authorization", "new")]);
    let first = (setup.send(resume()), setup.next().await);
    let second = (setup.send(resume()), setup.next().await);
    first.1.json(&pong_of(&second.1.id()));
    assert_eq!(in_time(first.0).await.unwrap().status, 403);
    second.1.pong();
    assert_eq!(in_time(second.0).await.unwrap().status, 200);
}

/// A gateway that never ends its answer delays the client for at most 10 s.
#[tokio::test(start_paused = true)]
async fn a_ping_answer_that_never_ends_is_a_refusal() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (_client, _server, last) = begin_call(&mut setup, &[("x-api-key", "owner")]).await;
    let waiting = setup.resume(&last);
    let _unended = setup.next().await.events();
    let resumed = tokio::time::timeout(Duration::from_secs(11), waiting).await;
    assert_eq!(resumed.unwrap().unwrap().status, 403);
}

#[tokio::test(start_paused = true)]
async fn an_event_id_reveals_nothing_about_the_ids_of_other_streams() {
    let store = EventStore::new(Limits::default());
    let session = store.begin(SESSION, Some(WITH_PRIMING)).unwrap();
    let mut names = std::collections::HashSet::new();
    for _ in 0..100 {
        let stream = session.open_standalone().unwrap();
        stream.prime();
        stream.end();
        let body = http_body_util::BodyExt::collect(stream.respond().into_body())
            .await
            .unwrap();
        let text = String::from_utf8(body.to_bytes().into()).unwrap();
        let id = text
            .lines()
            .find_map(|line| line.strip_prefix("id: "))
            .unwrap();
        let (name, _) = id.rsplit_once('.').unwrap();
        let (_, bits) = name.rsplit_once('-').unwrap();
        assert_eq!(bits.len(), 32, "{id}");
        // No two names share their first or second half.
        assert!(names.insert(bits[..16].to_owned()) && names.insert(bits[16..].to_owned()));
        assert_eq!(store.resume(SESSION, id).unwrap().status(), 200);
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_id_from_before_a_proxy_restart_is_not_forwarded_to_the_server() {
    let mut earlier = Setup::started(WITH_PRIMING).await;
    let (mut client, _server) = earlier.call(1).await;
    let last = client.event().await.unwrap();
    let mut setup = Setup::started(WITH_PRIMING).await;
    assert_eq!(setup.resumed(&last).await.status, 400);
    assert!(setup.arrived.is_empty());
    // An id from the server, or from a proxy in front of another server, is forwarded.
    for id in [
        "1",
        "mcp-1",
        "mcp-00000000-0123456789abcdef0123456789abcdef.1",
    ] {
        let _waiting = setup.resume(id);
        assert_eq!(setup.next().await.headers["last-event-id"], id);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_is_not_cancelled_while_the_ping_about_its_client_is_pending() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (client, server, last) = begin_call(&mut setup, &[("authorization", "old")]).await;
    drop(client);
    let waiting = setup.send(with_headers(
        resumed(SESSION, &last),
        &[("authorization", "new")],
    ));
    let ping = setup.next().await;
    // The server is busy with the tool and does not answer the `ping` until it is done.
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(setup.arrived.is_empty(), "no cancel");
    server.message(&answer(1)).await;
    settle().await;
    ping.pong();
    let mut client = in_time(waiting).await.unwrap();
    assert_eq!(client.event().await.unwrap().data, answer(1));
    assert_eq!(setup.outcome().await, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_call_is_cancelled_after_its_ping_was_refused() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (client, _server, last) = begin_call(&mut setup, &[("authorization", "old")]).await;
    drop(client);
    let waiting = setup.send(with_headers(
        resumed(SESSION, &last),
        &[("authorization", "new")],
    ));
    let ping = setup.next().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    ping.status(401);
    assert_eq!(in_time(waiting).await.unwrap().status, 401);
    let cancel = tokio::time::timeout(Duration::from_secs(30), setup.next())
        .await
        .unwrap();
    assert!(cancel.body.contains("notifications/cancelled"));
    cancel.status(202);
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(setup.outcome().await, orphaned);
}

/// The path may contain a fresh key, for example. To the layer, a session belongs to its path.
#[tokio::test(start_paused = true)]
async fn a_client_that_resumes_at_another_path_keeps_its_call_and_has_the_grace_again() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (client, _server, last) = begin_call(&mut setup, &[]).await;
    drop(client);
    let mut resume = resumed(SESSION, &last);
    *resume.uri_mut() = "/mcp/other".parse().unwrap();
    let waiting = setup.send(resume);
    setup.next().await.pong();
    let client = in_time(waiting).await.unwrap();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(setup.arrived.is_empty(), "its client is reading");
    drop(client);
    tokio::time::sleep(Duration::from_secs(19)).await;
    assert!(setup.arrived.is_empty(), "its client may still resume");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let cancel = setup.next().await;
    assert!(cancel.body.contains("notifications/cancelled"));
    assert_eq!(cancel.uri, "/mcp/other");
}

#[tokio::test(start_paused = true)]
async fn the_cancel_has_the_credentials_that_were_accepted_last() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let old = [
        ("authorization", "old"),
        ("x-old", "1"),
        ("accept-language", "de"),
    ];
    let (client, _server, last) = begin_call(&mut setup, &old).await;
    drop(client);
    let new = [("authorization", "new"), ("cookie", "c")];
    let waiting = setup.send(with_headers(resumed(SESSION, &last), &new));
    setup.next().await.pong();
    drop(in_time(waiting).await.unwrap());
    // Credentials that the server has refused are not used.
    let waiting = setup.send(with_headers(
        resumed(SESSION, &last),
        &[("authorization", "refused")],
    ));
    setup.next().await.status(403);
    assert_eq!(in_time(waiting).await.unwrap().status, 403);
    let cancel = setup.next().await;
    assert!(cancel.body.contains("notifications/cancelled"));
    assert_eq!(cancel.headers["authorization"], "new");
    assert_eq!(cancel.headers["cookie"], "c");
    assert!(!cancel.headers.contains_key("x-old"));
    assert_eq!(cancel.headers["accept-language"], "de");
    assert_eq!(cancel.headers["mcp-session-id"], SESSION);
    cancel.status(202);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_sent_by_the_client_has_its_own_credentials() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (_client, _server, _last) = begin_call(&mut setup, &[("authorization", "call")]).await;
    let _waiting = setup.send(with_headers(
        posted(SESSION, cancel_of(1)),
        &[("authorization", "other")],
    ));
    let cancel = setup.next().await;
    assert_eq!(cancel.headers["authorization"], "other");
}

/// The server cuts its stream, as SEP-1699 allows, and the call's token expires before the proxy requests the rest.
#[tokio::test(start_paused = true)]
async fn a_client_whose_token_expired_gets_its_answer_with_a_fresh_one() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (mut client, server, last) = begin_call(&mut setup, &[("authorization", "old")]).await;
    server.send("id: up-1\ndata: \n\n").await;
    drop(server);
    let rest_request = setup.next().await;
    assert_eq!(rest_request.headers["authorization"], "old");
    rest_request.status(401);
    assert_eq!(client.event().await, None, "the client has to resume");
    // The client might not know yet that its token has expired.
    let waiting = setup.send(with_headers(
        resumed(SESSION, &last),
        &[("authorization", "old")],
    ));
    setup.next().await.status(401);
    assert_eq!(in_time(waiting).await.unwrap().status, 401);
    let waiting = setup.send(with_headers(
        resumed(SESSION, &last),
        &[("authorization", "new")],
    ));
    setup.next().await.pong();
    let mut client = in_time(waiting).await.unwrap();
    let rest_request = setup.next().await;
    assert_eq!(rest_request.headers["authorization"], "new");
    assert_eq!(rest_request.headers["last-event-id"], "up-1");
    let server = rest_request.events();
    server.answer().await;
    assert_eq!(client.rest().await, [answer(1)]);
    assert_eq!(setup.outcome().await, Outcome::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_what_it_accepted_is_not_asked_forever() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (_client, server, last) = begin_call(&mut setup, &[]).await;
    server.send("id: up-1\ndata: \n\n").await;
    drop(server);
    let mut attempts = 0;
    let last_message = loop {
        setup.next().await.status(403);
        attempts += 1;
        settle().await;
        let waiting = setup.resume(&last);
        if attempts == 3 {
            setup.next().await.pong();
            break in_time(waiting).await.unwrap().rest().await;
        }
        setup.next().await.pong();
        drop(in_time(waiting).await.unwrap());
    };
    assert!(
        last_message[0].contains("ended before its answer"),
        "{last_message:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_session_that_is_older_than_the_proxy_can_be_resumed() {
    for is_fast in [true, false] {
        // The proxy has not seen an `initialize`.
        let mut setup = Setup::with(Limits::default());
        let request = with_headers(
            posted(SESSION, call(1)),
            &[("mcp-protocol-version", WITH_PRIMING)],
        );
        let waiting = setup.send(request);
        let arrived = setup.next().await;
        if !is_fast {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        let server = arrived.events();
        let mut client = in_time(waiting).await.unwrap();
        let primed = client.event().await.unwrap();
        assert_eq!(primed.data, "");
        drop(client);
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(setup.arrived.is_empty(), "no cancel at once");
        server.answer().await;
        assert_eq!(setup.resumed(&primed).await.rest().await, [answer(1)]);
        assert_eq!(setup.outcome().await, Outcome::Completed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_its_server_does_not_know_is_not_retained() {
    let mut setup = Setup::with(Limits::default());
    let request = with_headers(
        posted("made-up", call(1)),
        &[("mcp-protocol-version", WITH_PRIMING)],
    );
    let waiting = setup.send(request);
    setup.next().await.status(404);
    assert_eq!(in_time(waiting).await.unwrap().status, 404);
    assert_eq!(setup.store.stats().sessions, 0);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_names_the_call_as_its_client_wrote_it() {
    for id in ["1.0", "1e2", "-0", "7", "\"a\""] {
        let mut setup = Setup::started(WITH_PRIMING).await;
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"slow"}}}}"#
        );
        let waiting = setup.post(body);
        let _server = setup.next().await.events();
        drop(in_time(waiting).await.unwrap());
        let cancel = setup.next().await;
        assert!(
            cancel.body.contains(&format!(r#""requestId":{id}"#)),
            "{}",
            cancel.body
        );
        let length: usize = cancel.headers["content-length"]
            .to_str()
            .unwrap()
            .parse()
            .unwrap();
        assert_eq!(length, cancel.body.len());
        cancel.status(202);
    }
}

/// Answers cancels like a server that accepts only the fresh token.
async fn expect_cancel_with_fresh_token(setup: &mut Setup) {
    let cancel = in_time(setup.next()).await;
    assert!(cancel.body.contains(r#""requestId":1"#));
    assert_eq!(cancel.headers["authorization"], "old");
    cancel.status(401);
    let cancel = in_time(setup.next()).await;
    assert!(cancel.body.contains(r#""requestId":1"#));
    assert_eq!(cancel.headers["authorization"], "fresh");
    cancel.status(202);
}

/// The call's token expires while the call is running, but the client has sent other requests in the session with a fresh one.
#[tokio::test(start_paused = true)]
async fn the_cancel_of_a_call_whose_token_has_expired_reaches_the_server() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (client, _server, _last) = begin_call(&mut setup, &[("authorization", "old")]).await;
    let ping = |id, token| {
        let ping = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
        with_headers(posted(SESSION, ping), &[("authorization", token)])
    };
    let late = setup.send(ping(2, "old"));
    let late_arrived = setup.next().await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let waiting = setup.send(ping(3, "fresh"));
    setup.next().await.pong();
    assert_eq!(in_time(waiting).await.unwrap().text().await, pong_of("3"));
    // The response to an older request does not count.
    late_arrived.pong();
    assert_eq!(in_time(late).await.unwrap().text().await, pong_of("2"));
    drop(client);
    expect_cancel_with_fresh_token(&mut setup).await;
}

/// The client has resumed another of the session's calls with a fresh token.
#[tokio::test(start_paused = true)]
async fn the_token_of_a_resume_counts_for_cancels_of_other_calls() {
    let mut setup = Setup::started(WITH_PRIMING).await;
    let (client, _server, _last) = begin_call(&mut setup, &[("authorization", "old")]).await;
    let other = with_headers(posted(SESSION, call(2)), &[("authorization", "old")]);
    let waiting = setup.send(other);
    let other_server = setup.next().await.events();
    let mut other = in_time(waiting).await.unwrap();
    let last = other.event().await.unwrap().id.unwrap();
    drop(other);
    let fresh = with_headers(resumed(SESSION, &last), &[("authorization", "fresh")]);
    let waiting = setup.send(fresh);
    setup.next().await.pong();
    let resumed = in_time(waiting).await.unwrap();
    assert_eq!(resumed.status, 200);
    drop(client);
    expect_cancel_with_fresh_token(&mut setup).await;
    drop((resumed, other_server));
}
