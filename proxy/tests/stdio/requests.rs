//! How the service answers all kinds of requests.

use axum::body::Body;
use http::{Method, Request, StatusCode};

use crate::{client::*, server::*};

#[tokio::test]
async fn a_call_is_answered_on_its_own_stream() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut events = client
        .call("7", "work", r#"{"seconds":0.2,"label":"x"}"#)
        .await;
    let messages = events.rest().await;
    assert!(
        messages[0].contains("notifications/progress"),
        "{messages:?}"
    );
    assert!(messages.last().unwrap().contains("worked for 0.2 s: x"));
}

#[tokio::test]
async fn messages_pass_byte_for_byte() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    for (id, arguments) in [
        (
            "1",
            r#"{"a":1.0,"b":1e3,"c":-0,"d":12345678901234567890123}"#,
        ),
        ("\"1\"", r#"{ "spaces" : [ 1 ,2 ] }"#),
        ("1.0", r#"{"\u00e9":"é\ud83d\ude00","x":null,"x":2}"#),
        ("-5", r#"{"task":{"ttl":60},"unknown":[{}]}"#),
        ("99999999999999999999", "{}"),
        (r#""a\/\u0062""#, "{}"),
    ] {
        let events = client.call(id, "echo", arguments).await.rest().await;
        assert_eq!(
            events,
            [format!(
                r#"{{"jsonrpc":"2.0","id":{id},"result":{arguments}}}"#
            )]
        );
    }
}

#[tokio::test]
async fn a_message_on_several_lines_is_one_line_for_the_server() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let body = "\r\n{\r\n\"jsonrpc\":\"2.0\",\n\"id\":3,\n\"method\":\"ping\"\n}\n";
    assert_eq!(
        client.request(body).await.rest().await,
        [r#"{"jsonrpc":"2.0","id":3,"result":{}}"#]
    );
}

#[tokio::test]
async fn a_client_that_resumes_gets_the_answer_and_a_new_one_is_primed() {
    let client = Client::begin(&serve(scripted(&[])), WITH_PRIMING).await;
    let mut events = client.call("7", "work", r#"{"seconds":0.3}"#).await;
    let primed = events.next().await.unwrap();
    assert_eq!(primed.data, "");
    drop(events);
    for _ in 0..2 {
        let mut again = Events::of(client.get(primed.id.as_deref()).await);
        assert!(again.rest().await.last().unwrap().contains("worked for"));
    }
}

/// The client has disconnected from its only open call and is reading the standalone stream.
#[tokio::test]
async fn messages_for_the_session_are_not_sent_on_a_detached_call() {
    let script = r#"
        read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'
        read line; read line; read line
        echo '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'
        echo '{"jsonrpc":"2.0","id":"q","method":"elicitation/create"}'
        read line
        echo '{"jsonrpc":"2.0","id":1,"result":{}}'
        read line"#;
    let proceed = r#"{"jsonrpc":"2.0","method":"x"}"#;
    for (revision, listens_before) in [
        (WITH_PRIMING, true),
        (WITHOUT_PRIMING, true),
        (WITHOUT_PRIMING, false),
    ] {
        let client = Client::begin(&serve(shell(script)), revision).await;
        let mut listening = None;
        if listens_before {
            listening = Some(Events::of(client.get(None).await));
        }
        let mut call = client
            .request(r#"{"jsonrpc":"2.0","id":1,"method":"x"}"#)
            .await;
        let first = if revision == WITH_PRIMING {
            call.next().await.unwrap().id
        } else {
            None
        };
        drop(call);
        assert_eq!(client.notify(proceed).await, StatusCode::ACCEPTED);
        let mut listening = match listening {
            Some(listening) => listening,
            None => Events::of(client.get(None).await),
        };
        listening.event_with("list_changed").await;
        listening.event_with("elicitation/create").await;
        assert_eq!(client.notify(proceed).await, StatusCode::ACCEPTED);
        if first.is_some() {
            let mut resumed = Events::of(client.get(first.as_deref()).await);
            assert_eq!(
                resumed.rest().await,
                [r#"{"jsonrpc":"2.0","id":1,"result":{}}"#]
            );
        }
    }
}

#[tokio::test]
async fn a_client_with_an_empty_event_id_listens_to_its_session() {
    let client = Client::begin(&serve(scripted(&[])), WITH_PRIMING).await;
    assert_eq!(client.get(Some("")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn an_older_client_is_not_primed() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut events = client.call("7", "pid", "{}").await;
    assert!(events.next().await.unwrap().data.contains("result"));
}

#[tokio::test]
async fn two_sessions_with_the_same_ids_are_two_processes() {
    let stdio = serve(scripted(&[]));
    let (one, other) = (
        Client::begin(&stdio, WITHOUT_PRIMING).await,
        Client::begin(&stdio, WITHOUT_PRIMING).await,
    );
    assert_ne!(one.pid().await, other.pid().await);
    let mut working = one
        .call("7", "work", r#"{"seconds":1,"label":"one"}"#)
        .await;
    let mut answered = other
        .call("7", "work", r#"{"seconds":0,"label":"other"}"#)
        .await;
    assert!(answered.answer().await.to_string().contains("other"));
    assert_eq!(other.cancel("7").await, StatusCode::ACCEPTED);
    assert!(working.answer().await.to_string().contains("one"));
}

#[tokio::test]
async fn a_cancel_reaches_the_tool_and_its_stream_ends() {
    let log_path = log_path();
    let stdio = serve(scripted(&["--notes", log_path.to_str().unwrap()]));
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let mut events = client
        .call("7", "work", r#"{"seconds":60,"label":"x"}"#)
        .await;
    let _progress = events.message().await;
    assert_eq!(client.cancel("7").await, StatusCode::ACCEPTED);
    assert!(
        events
            .rest()
            .await
            .iter()
            .all(|message| !message.contains("result"))
    );
    until(|| {
        std::fs::read_to_string(&log_path)
            .unwrap_or_default()
            .contains("cancelled x")
    })
    .await;
    // The server has not answered that request yet.
    assert_eq!(
        client
            .post(r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#)
            .await
            .status(),
        StatusCode::BAD_REQUEST
    );
    std::fs::remove_file(log_path).unwrap();
}

#[tokio::test]
async fn an_id_in_use_is_refused_and_its_call_continues() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut events = client.call("7", "work", r#"{"seconds":0.3}"#).await;
    for id in ["7", "7.0"] {
        let refused = client
            .post(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#))
            .await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        assert!(
            json(refused).await["error"]["message"]
                .as_str()
                .unwrap()
                .contains("in use")
        );
    }
    assert!(events.answer().await["result"].is_object());
    assert_eq!(client.call("7", "pid", "{}").await.rest().await.len(), 1);
}

#[tokio::test]
async fn a_server_request_gets_its_answer() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut events = client
        .call("7", "ask", r#"{"text":"elicitation/create"}"#)
        .await;
    let question: serde_json::Value = serde_json::from_str(&events.message().await).unwrap();
    assert_eq!(question["method"], "elicitation/create");
    let answer = format!(
        r#"{{"jsonrpc":"2.0","id":{},"result":{{"action":"accept"}}}}"#,
        question["id"]
    );
    assert_eq!(client.notify(answer.clone()).await, StatusCode::ACCEPTED);
    let received = events.answer().await;
    assert_eq!(received["result"]["content"][0]["text"], answer);
}

#[tokio::test]
async fn messages_that_belong_to_no_call_wait_for_a_listener() {
    let client = Client::begin(&serve(scripted(&[])), WITHOUT_PRIMING).await;
    let mut working = client.call("1", "work", r#"{"seconds":0.5}"#).await;
    let mut caller = client.call("2", "ask", r#"{"text":"roots/list"}"#).await;
    let mut listening = Events::of(client.get(None).await);
    let question = listening.answer().await;
    assert_eq!(question["method"], "roots/list");
    let answer = format!(
        r#"{{"jsonrpc":"2.0","id":{},"result":{{}}}}"#,
        question["id"]
    );
    assert_eq!(client.notify(answer).await, StatusCode::ACCEPTED);
    assert!(caller.answer().await["result"].is_object());
    assert!(working.answer().await["result"].is_object());
}

#[tokio::test]
async fn a_new_listener_gets_new_messages_and_a_resumed_one_those_it_missed() {
    for revision in [WITHOUT_PRIMING, WITH_PRIMING] {
        let client = Client::begin(&serve(scripted(&[])), revision).await;
        // With two open calls, there is no telling which of them sends the request.
        let _working = client.call("1", "work", r#"{"seconds":60}"#).await;
        let _one = client.call("2", "ask", r#"{"text":"roots/list"}"#).await;
        let mut listening = Events::of(client.get(None).await);
        let first = listening.event_with("asked for 2").await;
        drop(listening);
        let _other = client.call("3", "ask", r#"{"text":"roots/list"}"#).await;
        let mut again = Events::of(client.get(None).await);
        if revision == WITH_PRIMING {
            let primed = again.next().await.unwrap();
            assert_eq!((&*primed.data, &primed.id), ("", &first.id));
        }
        let second = again.next().await.unwrap();
        assert!(second.data.contains("asked for 3"), "{second:?}");
        let mut resumed = Events::of(client.get(first.id.as_deref()).await);
        assert_eq!(resumed.next().await.unwrap(), second);
        assert_eq!(
            again.next().await,
            None,
            "the client that resumes replaces the reader"
        );
    }
}

#[tokio::test]
async fn a_resume_to_a_command_needs_the_session_and_no_authorization() {
    let client = Client::begin(&serve(scripted(&[])), WITH_PRIMING).await;
    let call = r#"{"jsonrpc":"2.0","id":7,"method":"ping"}"#;
    let request = post()
        .header("mcp-session-id", &client.session)
        .header("authorization", "Bearer a")
        .body(call.into())
        .unwrap();
    let mut events = Events::of(send(&client.stdio, request).await);
    let primed = events.next().await.unwrap();
    let mut again = Events::of(client.get(primed.id.as_deref()).await);
    assert!(again.answer().await["result"].is_object());
}

#[tokio::test]
async fn a_revision_without_sessions_is_refused_so_that_clients_fall_back() {
    let stdio = serve(scripted(&[]));
    let discover = r#"{"jsonrpc":"2.0","id":"p","method":"server/discover"}"#;
    let request = post()
        .header("mcp-protocol-version", "2026-07-28")
        .body(discover.into())
        .unwrap();
    let refused = send(&stdio, request).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let refused = json(refused).await;
    assert_eq!(
        (&refused["id"], &refused["error"]["code"]),
        (&"p".into(), &(-32022).into())
    );
    assert_eq!(refused["error"]["data"]["requested"], "2026-07-28");
    assert!(
        refused["error"]["data"]["supported"]
            .as_array()
            .unwrap()
            .contains(&WITH_PRIMING.into())
    );
    assert_eq!(stdio.stats().children, 0);
}

#[tokio::test]
async fn bad_requests_are_refused_and_start_nothing() {
    let stdio = serve(scripted(&[]));
    let good = initialize(WITHOUT_PRIMING);
    let large = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"initialize","x":"{}"}}"#,
        "x".repeat(4 << 20)
    );
    let with = |name: &'static str, value: &'static str| {
        let mut request = post().body(Body::from(good.clone())).unwrap();
        request.headers_mut().insert(name, value.parse().unwrap());
        request
    };
    let body = |body: &[u8]| post().body(Body::from(body.to_vec())).unwrap();
    for (request, status) in [
        (with("accept", "application/json"), 406),
        (with("accept", "text/event-stream"), 406),
        (with("content-type", "text/plain"), 415),
        (with("mcp-session-id", "unknown"), 404),
        (body(b"{"), 400),
        (body(b"\xff"), 400),
        (
            body(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"initialize\",\"x\":\"\xff\"}"),
            400,
        ),
        (body(b"[]"), 400),
        (body(format!("[{good}]").as_bytes()), 400),
        (body(b"{}"), 400),
        (
            body(br#"{"jsonrpc":"2.0","id":null,"method":"initialize"}"#),
            400,
        ),
        (
            body(br#"{"jsonrpc":"2.0","id":{},"method":"initialize"}"#),
            400,
        ),
        (body(br#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#), 400),
        (
            body(br#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#),
            400,
        ),
        (body(large.as_bytes()), 413),
        (
            Request::get("/")
                .header("accept", "text/event-stream")
                .body(Body::empty())
                .unwrap(),
            400,
        ),
        (Request::get("/").body(Body::empty()).unwrap(), 406),
        (Request::delete("/").body(Body::empty()).unwrap(), 400),
        (
            Request::builder()
                .method(Method::PUT)
                .body(Body::empty())
                .unwrap(),
            405,
        ),
    ] {
        let shown = format!("{request:?}");
        assert_eq!(send(&stdio, request).await.status(), status, "{shown}");
    }
    assert_eq!(stdio.stats().children, 0);
}

#[tokio::test]
async fn event_ids_of_other_sessions_and_unknown_ids_are_refused() {
    let stdio = serve(scripted(&[]));
    let (one, other) = (
        Client::begin(&stdio, WITH_PRIMING).await,
        Client::begin(&stdio, WITH_PRIMING).await,
    );
    let mut events = one.call("7", "pid", "{}").await;
    let id = events.next().await.unwrap().id.unwrap();
    assert_eq!(one.get(Some(&id)).await.status(), StatusCode::OK);
    assert_eq!(other.get(Some(&id)).await.status(), StatusCode::BAD_REQUEST);
    for wrong in ["0/0", "x", &format!("{id}9")] {
        assert_eq!(
            one.get(Some(wrong)).await.status(),
            StatusCode::BAD_REQUEST,
            "{wrong}"
        );
    }
}

#[tokio::test]
async fn the_number_of_sessions_is_limited() {
    let mut options = scripted(&[]);
    options.max_sessions = 1;
    let stdio = serve(options);
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    assert_refused(&begin(&stdio).await, "1");
    assert_eq!(client.delete().await, StatusCode::NO_CONTENT);
    until(|| stdio.stats().children == 0).await;
    drop(Client::begin(&stdio, WITHOUT_PRIMING).await);
}

/// The client has no standalone stream: either it never opens one, or it has given up on it after an outage, as SDK clients do. It reads
/// its calls' streams, except for one that it has abandoned.
#[tokio::test]
async fn a_question_during_several_calls_reaches_a_client_that_reads_only_these() {
    let script = r#"read line; echo '{"jsonrpc":"2.0","id":0,"result":{}}'; read line
        for call in 1 2 3; do read line; echo '{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":'$call',"progress":1}}'; done
        read line; echo '{"jsonrpc":"2.0","id":"q","method":"sampling/createMessage","params":{}}'
        for call in 1 2 3; do echo '{"jsonrpc":"2.0","id":'$call',"result":{}}'; done; cat > /dev/null"#;
    let stdio = serve(shell(script));
    let client = Client::begin(&stdio, WITHOUT_PRIMING).await;
    let call = |id: u32| {
        format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"x","params":{{"_meta":{{"progressToken":{id}}}}}}}"#
        )
    };
    let mut calls = Vec::new();
    for id in 1..=3 {
        let mut stream = client.request(call(id)).await;
        assert!(stream.message().await.contains("progress"));
        calls.push(stream);
    }
    // The newest call has lost its client.
    drop(calls.pop());
    let go = r#"{"jsonrpc":"2.0","method":"notifications/go"}"#;
    assert_eq!(client.notify(go).await, StatusCode::ACCEPTED);
    let question = calls[1].message().await;
    assert!(question.contains("sampling"), "{question}");
    for call in &mut calls {
        let answer = call.message().await;
        assert!(answer.contains("result"), "{answer}");
    }
}
