//! A call's life as the log shows it.

use serde_json::json;

use crate::setup::{GRACE, Lines, Plan, Server, StoppedClock, TICK, for_servers};

for_servers!(sessions {
    the_lifecycle_of_an_orphan_is_logged_step_by_step,
    the_lifecycle_of_a_call_whose_client_disconnects_without_a_grace_is_logged,
    the_lifecycle_of_a_call_whose_client_resumes_is_logged,
    a_stream_that_the_server_ends_is_not_logged_as_a_disconnect,
    a_cancel_by_the_client_is_logged_as_one,
    a_cancel_is_never_an_error,
});

async fn the_lifecycle_of_an_orphan_is_logged_step_by_step(server: Server) {
    let lines = Lines::all();
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE + TICK).await;
    setup.events.ended(&mcp, 1).await;

    assert_eq!(
        lifecycle(&lines),
        [
            r#"TRACE … call started call=… jsonrpc.request.id="1" mcp.method.name="tools/call" gen_ai.tool.name="hold" mcp.session.id="…""#,
            r#"DEBUG … client disconnected, waiting for resume call=… jsonrpc.request.id="1" mcp.method.name="tools/call" gen_ai.tool.name="hold" mcp.session.id="…" cause="disconnected" grace=20s"#,
            r#"INFO … call cancelled call=… jsonrpc.request.id="1" mcp.method.name="tools/call" gen_ai.tool.name="hold" mcp.session.id="…" lasted=20.001s cause="disconnected" detached=20.001s reason="client did not resume within the grace period""#,
        ]
    );
}

async fn the_lifecycle_of_a_call_whose_client_disconnects_without_a_grace_is_logged(
    server: Server,
) {
    let lines = Lines::all();
    let (clock, setup, mcp) = server.stopped().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    clock.advance(TICK).await;
    call.fin();
    setup.events.ended(&mcp, 1).await;

    let [_, disconnected, cancelled] = &*lifecycle(&lines) else {
        panic!("{lines:?}");
    };
    assert!(
        disconnected.starts_with("DEBUG … client disconnected call=…"),
        "{disconnected}"
    );
    assert!(
        disconnected.ends_with(r#" cause="disconnected""#),
        "{disconnected}"
    );
    let end = r#" lasted=1ms cause="disconnected" detached=0ns reason="client disconnected""#;
    assert!(cancelled.ends_with(end), "{cancelled}");
}

async fn the_lifecycle_of_a_call_whose_client_resumes_is_logged(server: Server) {
    let lines = Lines::all();
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(TICK).await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;
    setup.assert_completes("a", &mut resumed).await;
    setup.events.ended(&mcp, 1).await;

    let [_, _, resumed, completed] = &*lifecycle(&lines) else {
        panic!("{lines:?}");
    };
    assert!(
        resumed.starts_with("DEBUG … client resumed call=…"),
        "{resumed}"
    );
    assert!(
        resumed.ends_with(r#" cause="disconnected" detached=1ms"#),
        "{resumed}"
    );
    assert!(completed.starts_with("TRACE … call completed call=…"));
    assert!(completed.ends_with(" lasted=1ms"), "{completed}");
}

async fn a_stream_that_the_server_ends_is_not_logged_as_a_disconnect(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = Plan::with_grace(server).client().await;
    let mut call = setup.start_primed(&mcp, 1, "hold", "a").await;

    setup.sessions.end_stream(&mcp, 0, None).await;
    call.body_to_end().await;
    setup.events.detached(&mcp, 1).await;

    let [_, ended] = &*lifecycle(&lines) else {
        panic!("{lines:?}");
    };
    let expected = "DEBUG … stream ended before the answer call=…";
    assert!(ended.starts_with(expected), "{ended}");
    assert!(
        ended.ends_with(r#" cause="stream ended by the server" grace=20s"#),
        "{ended}"
    );
}

async fn a_cancel_by_the_client_is_logged_as_one(server: Server) {
    let lines = Lines::all();
    let (setup, mcp) = server.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    assert_eq!(mcp.cancel(1).await, 202);
    setup.events.ended(&mcp, 1).await;

    let lifecycle = lifecycle(&lines);
    let end = lifecycle.last().expect("a line");
    assert!(end.starts_with("INFO … call cancelled call=…"), "{end}");
    assert!(end.ends_with(r#" reason="requested by the client""#));
}

async fn a_cancel_is_never_an_error(server: Server) {
    let clock = StoppedClock::stop();
    let plan = Plan::with_grace(server);
    let setup = plan.layer(|layer| layer.call_timeout(2 * GRACE)).start();
    let setup = setup.await;
    let mcp = setup.mcp().await;
    // The first call logs the hints about the setup.
    setup.assert_usable(&mcp).await;
    let lines = Lines::up_to(tracing::Level::WARN);
    setup.cut(&mcp, 1, "a").await;
    let _late = setup.start_call(&mcp, 2, "hold", "b").await;
    let _closed = setup.start_call(&mcp, 3, "hold", "c").await;
    let last = mcp.call("d", "hold", json!({ "label": "d" })).await;
    setup.witness.started("d").await;
    last.rst();
    clock.advance(GRACE + TICK).await;
    setup.events.ended(&mcp, 1).await;
    clock.advance(GRACE).await;
    setup.events.ended(&mcp, 2).await;
    mcp.delete().await;
    setup.events.ended(&mcp, 3).await;
    setup.events.ended(&mcp, "d").await;
    assert_eq!(lines.text(), "");
}

/// Returns call 1's lines, without the parts that vary between runs.
fn lifecycle(lines: &Lines) -> Vec<String> {
    let of_call = lines.matching(|line| line.contains(r#" jsonrpc.request.id="1" "#));
    of_call.iter().map(|line| masked(line)).collect()
}

/// Removes the target, the call's number and the session id.
fn masked(line: &str) -> String {
    let line = line.replace("mcp_cancel_on_disconnect:", "…");
    let words = line.split(' ').map(|word| {
        if word.starts_with("call=") {
            return "call=…".to_owned();
        }
        match word.strip_prefix("mcp.session.id=") {
            Some(_) => "mcp.session.id=\"…\"".to_owned(),
            None => word.to_owned(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}
