//! The pages and numbers that operators get to see.

use std::net::SocketAddr;

use serde_json::json;

use crate::support::*;

async fn get(admin: SocketAddr, path: &str) -> Reply {
    Connection::fetch(admin, &Request::new("GET", path)).await
}

#[tokio::test]
async fn health_metrics_and_calls_are_shown() {
    let (upstream, proxy) = Running::start(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let (_client, _received) = proxy.streaming(&upstream, &session_call("1")).await;

    assert_eq!(get(admin, "/healthz").await.status, 200);
    assert_eq!(get(admin, "/readyz").await.status, 200);
    let calls = get(admin, "/calls.json").await.json();
    assert_eq!(calls["calls"][0]["gen_ai.tool.name"], "work");
    let page = get(admin, "/calls").await;
    assert!(page.text().contains("1 in flight"), "{}", page.text());
    let metrics = get(admin, "/metrics").await;
    assert!(metrics.text().contains("mcp_calls_"), "{}", metrics.text());
}

#[tokio::test]
async fn the_button_of_a_call_cancels_it() {
    let (upstream, proxy) = Running::start(&["--admin=127.0.0.1:0", "--no-resumable"]).await;
    let admin = proxy.admin.expect("an address");
    let (mut client, _received) = proxy.streaming(&upstream, &session_call("1")).await;
    let calls = get(admin, "/calls.json").await.json();
    let id = calls["calls"][0]["call"]
        .as_str()
        .expect("an id")
        .to_owned();
    let press = Request::new("POST", "/calls")
        .header("content-type", "application/x-www-form-urlencoded")
        .body(format!("call={id}"));

    assert_eq!(
        Connection::fetch(admin, &press).await.status,
        403,
        "without an origin"
    );
    let press = press.header("origin", &format!("http://{admin}"));
    assert_eq!(Connection::fetch(admin, &press).await.status, 303);

    let answer = client.answer().await.expect("an error");
    assert_eq!(answer["error"]["code"], -32800);
    let cancel = upstream.next_request().await;
    assert!(cancel.body().contains("notifications/cancelled"));
    assert_eq!(get(admin, "/calls.json").await.json()["calls"], json!([]));
}

const TOKEN: &str = "0123456789abcdef-._~+/==";

fn cancel(id: &str) -> Request {
    Request::new("POST", &format!("/calls/{id}/cancel"))
}

fn with_token(request: Request) -> Request {
    request.header("authorization", &format!("Bearer {TOKEN}"))
}

#[tokio::test]
async fn a_script_with_the_token_cancels_one_call() {
    let token = format!("--admin-token={TOKEN}");
    let (upstream, proxy) =
        Running::start(&["--admin=127.0.0.1:0", "--no-resumable", &token]).await;
    let admin = proxy.admin.expect("an address");
    let (mut client, _received) = proxy.streaming(&upstream, &session_call("1")).await;
    let listing = get(admin, "/calls.json").await.json();
    let id = listing["calls"][0]["call"].as_str().expect("an id");
    let process = listing["process"].as_str().expect("an id");

    for wrong in [
        cancel(id),
        cancel(id).header("authorization", TOKEN),
        cancel(id).header("authorization", "Bearer 0123456789abcdef-._~+/=x"),
        cancel(id).header("authorization", "Bearer "),
        with_token(with_token(cancel(id))),
    ] {
        let refused = Connection::fetch(admin, &wrong).await;
        assert_eq!(refused.status, 401, "{wrong:?}");
        assert_eq!(refused.headers["www-authenticate"], "Bearer");
        assert!(refused.json()["error"].is_string());
    }
    for (path, status) in [
        (format!("/calls/{id}/cancel?process=0123456789abcdef"), 409),
        (format!("/calls/{id}/cancel?proces=0123456789abcdef"), 400),
        ("/calls/999999999/cancel".to_owned(), 404),
        ("/calls/x/cancel".to_owned(), 404),
        ("/calls/%FF/cancel".to_owned(), 404),
    ] {
        let reply = Connection::fetch(admin, &with_token(Request::new("POST", &path))).await;
        assert_eq!(reply.status, status, "{path}");
        assert!(reply.json()["error"].is_string(), "{path}");
    }
    let get_cancel = with_token(Request::new("GET", &format!("/calls/{id}/cancel")));
    assert_eq!(Connection::fetch(admin, &get_cancel).await.status, 405);
    assert_eq!(proxy.calls.len(), 1, "nothing has been cancelled");

    let path = format!("/calls/{id}/cancel?process={process}");
    let done = Connection::fetch(admin, &with_token(Request::new("POST", &path))).await;
    assert_eq!(done.status, 200);
    assert_eq!(done.json(), json!({ "call": id, "cancelled": true }));
    assert_eq!(
        client.answer().await.expect("an error")["error"]["code"],
        -32800
    );
    let notified = upstream.next_request().await;
    assert!(notified.body().contains("notifications/cancelled"));
    let again = Connection::fetch(admin, &with_token(cancel(id))).await;
    assert_eq!(again.status, 404);
}

#[tokio::test]
async fn without_a_token_no_script_cancels() {
    let (_upstream, proxy) = Running::start(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let refused = Connection::fetch(admin, &with_token(cancel("1"))).await;
    assert_eq!(refused.status, 404);
}

#[tokio::test]
async fn other_machines_see_and_cancel_calls_with_the_token_only() {
    let token = format!("--admin-token={TOKEN}");
    let (_upstream, proxy) = Running::start(&["--admin=0.0.0.0:0", &token]).await;
    let port = proxy.admin.expect("an address").port();
    let admin = SocketAddr::from(([127, 0, 0, 1], port));
    for path in ["/healthz", "/readyz", "/metrics", "/"] {
        assert_eq!(get(admin, path).await.status, 200, "{path}");
    }
    for path in ["/calls", "/calls.json", "/calls.js"] {
        assert_eq!(get(admin, path).await.status, 401, "{path}");
        let request = with_token(Request::new("GET", path));
        let reply = Connection::fetch(admin, &request).await;
        assert_eq!(reply.status, 200, "{path}");
    }
    let form = Request::new("POST", "/calls")
        .header("content-type", "application/x-www-form-urlencoded")
        .header("origin", &format!("http://{admin}"))
        .body("call=1".to_owned());
    assert_eq!(Connection::fetch(admin, &form).await.status, 401);
    assert_eq!(Connection::fetch(admin, &cancel("1")).await.status, 401);
    let unknown = Connection::fetch(admin, &with_token(cancel("999999999"))).await;
    assert_eq!(unknown.status, 404);
}

#[tokio::test]
async fn a_proxy_is_ready_while_its_server_accepts_connections() {
    let mut upstream = Upstream::start().await;
    let proxy = Running::in_front_of(&upstream, &["--admin=127.0.0.1:0", "--ready-upstream"]).await;
    let bare = Running::in_front_of(&upstream, &["--admin=127.0.0.1:0"]).await;
    let (admin, bare_admin) = (
        proxy.admin.expect("an address"),
        bare.admin.expect("an address"),
    );
    assert_eq!(get(admin, "/readyz").await.status, 200);

    upstream.refuse().await;

    let reply = get(admin, "/readyz").await;
    assert_eq!(reply.status, 503);
    assert!(reply.text().contains("is not accepting connections"));
    assert_eq!(get(admin, "/healthz").await.status, 200);
    assert_eq!(
        get(bare_admin, "/readyz").await.status,
        200,
        "without the option"
    );

    upstream.accept_again().await;
    assert_eq!(get(admin, "/readyz").await.status, 200);
    assert!(!upstream.has_more().await, "a probe is not a request");
}

/// Lists the server's tools, which it answers with `body`.
async fn list_tools(proxy: &Running, upstream: &Upstream, kind: &str, body: &str) {
    let request = post(r#"{"jsonrpc":"2.0","id":0,"method":"tools/list"}"#)
        .header("mcp-protocol-version", "2025-11-25")
        .header("mcp-session-id", "s");
    let mut client = Connection::sending(proxy.addr, &request).await;
    let received = upstream.next_request().await;
    let head = format!("200 OK\r\ncontent-type: {kind}");
    received.answer(&head, body).await;
    client.reply().await;
}

/// Calls one of the server's tools, which answers at once.
async fn call_tool(proxy: &Running, upstream: &Upstream, tool: &str) {
    let call = call("1").replace("work", tool);
    let request = Request {
        body: call.into(),
        ..session_call("1")
    };
    let mut client = Connection::sending(proxy.addr, &request).await;
    let received = upstream.next_request().await;
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    received
        .answer("200 OK\r\ncontent-type: application/json", answer)
        .await;
    client.reply().await;
}

#[tokio::test]
async fn a_tool_is_a_label_once_the_server_has_listed_it() {
    let (upstream, proxy) = Running::start(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let started = async |tool: &str| {
        let metrics = get(admin, "/metrics").await;
        let label = format!(r#"tool="{tool}""#);
        let mut lines = metrics.text().lines();
        lines.any(|line| line.starts_with("mcp_calls_started_total") && line.contains(&label))
    };
    // The recorder is shared with other tests in this process, so these names are used by this test only.
    call_tool(&proxy, &upstream, "label-a").await;
    assert!(started("other").await);
    assert!(!started("label-a").await, "not in any list yet");
    let list = r#"{"jsonrpc":"2.0","id":0,"result":{"tools":[{"name":"label-a"},{"name":"label-b"}],"nextCursor":"c"}}"#;
    list_tools(&proxy, &upstream, "application/json", list).await;
    let list = r#"{"jsonrpc":"2.0","id":0,"result":{"tools":[{"name":"label-c"}]}}"#;
    let event = format!("event: message\ndata: {list}\n\n");
    list_tools(&proxy, &upstream, "text/event-stream", &event).await;
    for tool in ["label-a", "label-b", "label-c", "label-d"] {
        call_tool(&proxy, &upstream, tool).await;
        assert_eq!(started(tool).await, tool != "label-d", "{tool}");
    }
    // A list that changes later counts as well.
    let list = r#"{"jsonrpc":"2.0","id":0,"result":{"tools":[{"name":"label-d"}]}}"#;
    list_tools(&proxy, &upstream, "application/json", list).await;
    call_tool(&proxy, &upstream, "label-d").await;
    assert!(started("label-d").await);
}

#[tokio::test]
async fn a_call_keeps_its_label_when_its_tool_is_listed_meanwhile() {
    let (upstream, proxy) = Running::start(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let mut client = Connection::open(proxy.addr).await;
    let call = call("1").replace("work", "listed-late");
    let request = Request {
        body: call.into(),
        ..session_call("1")
    };
    client.send(&request).await;
    let received = upstream.next_request().await;
    let list = r#"{"jsonrpc":"2.0","id":0,"result":{"tools":[{"name":"listed-late"}]}}"#;
    list_tools(&proxy, &upstream, "application/json", list).await;
    let answer = r#"{"jsonrpc":"2.0","id":1,"result":{}}"#;
    received
        .answer("200 OK\r\ncontent-type: application/json", answer)
        .await;
    client.reply().await;
    let metrics = get(admin, "/metrics").await;
    assert!(
        !metrics.text().contains("listed-late"),
        "{}",
        metrics.text()
    );
}

#[tokio::test]
async fn the_calls_are_for_this_machine_only() {
    let upstream = Upstream::start().await;
    let local = Running::in_front_of(&upstream, &["--admin=127.0.0.1:0"]).await;
    let mut client = Connection::open(local.admin.expect("an address")).await;
    client
        .write(b"GET /calls HTTP/1.1\r\nhost: evil.example\r\n\r\n")
        .await;
    assert_eq!(client.head().await.status, 403);

    let open = Running::in_front_of(&upstream, &["--admin=0.0.0.0:0"]).await;
    let port = open.admin.expect("an address").port();
    let admin = SocketAddr::from(([127, 0, 0, 1], port));
    assert_eq!(get(admin, "/healthz").await.status, 200);
    for path in ["/calls", "/calls.json", "/calls.js"] {
        assert_eq!(get(admin, path).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn health_and_metrics_accept_names_of_this_host_and_addresses() {
    let options = ["--admin=127.0.0.1:0", "--allow-host=mcp.example.com"];
    let proxy = Running::in_front_of_command(&options).await;
    let admin = proxy.admin.expect("an address");
    for path in ["/", "/healthz", "/readyz", "/metrics"] {
        for (host, status) in [
            ("evil.example", 403),
            ("mcp.example.com", 200),
            ("10.1.2.3:9090", 200),
            ("[fd00::1]:9090", 200),
            ("localhost", 200),
        ] {
            let mut client = Connection::open(admin).await;
            let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n");
            client.write(request.as_bytes()).await;
            assert_eq!(client.head().await.status, status, "{path} of {host}");
        }
    }
}

#[tokio::test]
async fn the_first_page_has_links_to_the_others() {
    let proxy = Running::in_front_of_command(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let index = get(admin, "/").await;
    for path in ["/calls", "/calls.json", "/metrics", "/healthz", "/readyz"] {
        let link = format!("<a href=\"{path}\">");
        assert!(index.text().contains(&link), "{path}: {}", index.text());
        assert_eq!(get(admin, path).await.status, 200, "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn idle_connections_block_other_operators_only_for_a_limited_time() {
    let proxy = Running::in_front_of_command(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let mut idle = Vec::new();
    for _ in 0..64 {
        let mut client = Connection::open(admin).await;
        client.write(b"GET /metrics HTTP/1.1\r\nhost: loc").await;
        idle.push(client);
    }
    assert_eq!(get(admin, "/healthz").await.status, 200);
    idle.clear();
    let mut kept = Connection::open(admin).await;
    let started_at = tokio::time::Instant::now();
    for _ in 0..20 {
        kept.send(&Request::new("GET", "/healthz")).await;
        if kept.try_head().await.is_none() {
            break;
        }
        kept.body_to_end().await;
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
    }
    let open = started_at.elapsed().as_secs();
    assert!((59..=66).contains(&open), "{open} s");
}

/// On Linux all addresses in 127.0.0.0/8 are loopback addresses.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_calls_are_shown_on_any_loopback_address() {
    let (_upstream, proxy) = Running::start(&["--admin=127.0.0.2:0"]).await;
    let admin = proxy.admin.expect("an address");
    for path in ["/calls", "/calls.json", "/calls.js"] {
        assert_eq!(get(admin, path).await.status, 200, "{path}");
    }
}

/// Returns the proxy's own metrics.
async fn own_metrics(admin: SocketAddr) -> Vec<(String, u64)> {
    let metrics = get(admin, "/metrics").await;
    let lines = metrics.text().lines().filter_map(|line| {
        let (name, value) = line.strip_prefix("mcp_proxy_")?.split_once(' ')?;
        if name.contains('{') {
            return None;
        }
        Some((name.to_owned(), value.parse().expect("a number")))
    });
    lines.collect()
}

fn value(metrics: &[(String, u64)], name: &str) -> u64 {
    let metric = metrics.iter().find(|(metric, _)| metric == name);
    metric.unwrap_or_else(|| panic!("{name} is missing")).1
}

#[tokio::test]
async fn the_sessions_processes_and_events_of_a_command_are_counted() {
    let proxy = Running::in_front_of_command(&["--admin=127.0.0.1:0", "--kill-after=1ms"]).await;
    let admin = proxy.admin.expect("an address");
    let none = own_metrics(admin).await;
    let names: Vec<&str> = none.iter().map(|(name, _)| &**name).collect();
    let expected = [
        "log_lines_dropped_total",
        "sessions",
        "children",
        "buffer_bytes",
        "resumes_total",
        "gaps_total",
        "kills_total",
    ];
    assert_eq!(names, expected);
    assert!(none.iter().all(|(_, value)| *value == 0), "{none:?}");

    let client = Mcp::stateless(proxy.addr, "/mcp")
        .version("2025-11-25")
        .connect()
        .await;
    let mut call = client
        .call(1, "work", json!({ "seconds": 60, "ignores_cancel": true }))
        .await;
    call.head().await;
    let first = call.event().await.expect("an event").id.expect("an id");
    call.fin();
    let mut resumed = client.resume(&first).await;
    resumed.head().await;

    let calls = get(admin, "/calls.json").await.json();
    assert_eq!(
        (&calls["calls"][0]["gen_ai.tool.name"], &calls["calls"][1]),
        (&"work".into(), &json!(null))
    );
    assert!(get(admin, "/calls").await.text().contains("1 in flight"));
    let sessions = get(admin, "/sessions.json").await.json();
    assert_eq!(
        (
            &sessions["sessions"][0]["mcp.session.id"],
            &sessions["sessions"][0]["unused_seconds"]
        ),
        (&calls["calls"][0]["mcp.session.id"], &json!(null))
    );
    assert!(get(admin, "/sessions").await.text().contains("<td>in use"));
    assert!(get(admin, "/").await.text().contains("/sessions.json"));
    let some = own_metrics(admin).await;
    assert_eq!((value(&some, "sessions"), value(&some, "children")), (1, 1));
    assert!(value(&some, "buffer_bytes") > 0);
    assert_eq!(
        (value(&some, "resumes_total"), value(&some, "kills_total")),
        (1, 0)
    );

    assert_eq!(client.cancel(1).await, 202);
    let killed = async {
        loop {
            let now = own_metrics(admin).await;
            let values = ["kills_total", "children", "sessions"].map(|name| value(&now, name));
            if values == [1, 0, 0] {
                return;
            }
        }
    };
    within("the process to be killed", killed).await;
    let metrics = get(admin, "/metrics").await;
    let ended = r#"mcp_sessions_closed_total{why="cancel_not_answered"} 1"#;
    assert!(metrics.text().lines().any(|line| line == ended));
    let idle = r#"mcp_sessions_closed_total{why="idle"} 0"#;
    assert!(metrics.text().lines().any(|line| line == idle));
}

#[tokio::test]
async fn the_events_of_an_upstream_are_counted_if_they_are_kept() {
    let (upstream, proxy) = Running::start(&["--admin=127.0.0.1:0"]).await;
    let (_client, _received) = proxy.streaming(&upstream, &session_call("1")).await;
    let metrics = own_metrics(proxy.admin.expect("an address")).await;
    assert_eq!(
        (value(&metrics, "sessions"), value(&metrics, "children")),
        (1, 0)
    );
    assert!(value(&metrics, "buffer_bytes") > 0);

    let bare = Running::in_front_of(&upstream, &["--admin=127.0.0.1:0", "--no-resumable"]).await;
    let metrics = own_metrics(bare.admin.expect("an address")).await;
    assert_eq!(metrics, [("log_lines_dropped_total".to_owned(), 0)]);
}

#[tokio::test]
async fn every_proxy_metric_has_a_help_text_and_the_build_info_has_the_version() {
    let proxy = Running::in_front_of_command(&["--admin=127.0.0.1:0"]).await;
    let metrics = get(proxy.admin.expect("an address"), "/metrics").await;
    let lines: Vec<&str> = metrics.text().lines().collect();
    let proxy_metrics = lines
        .windows(3)
        .filter(|three| three[2].starts_with("mcp_proxy_"));
    let mut count = 0;
    for three in proxy_metrics {
        let name = three[2].split(['{', ' ']).next().expect("a name");
        assert!(
            three[0].starts_with(&format!("# HELP {name} ")),
            "{three:?}"
        );
        assert!(
            three[1].starts_with(&format!("# TYPE {name} ")),
            "{three:?}"
        );
        count += 1;
    }
    assert_eq!(count, 8, "{lines:?}");
    let version = env!("CARGO_PKG_VERSION");
    let info = format!("mcp_proxy_build_info{{version=\"{version}\"}} 1");
    assert!(lines.contains(&&*info), "{lines:?}");
}

#[tokio::test]
async fn a_proxy_that_drains_is_not_ready_and_still_shows_its_calls() {
    let mut proxy = Running::in_front_of_command(&["--admin=127.0.0.1:0"]).await;
    let admin = proxy.admin.expect("an address");
    let client = Mcp::session(proxy.addr, "/mcp").await;
    let mut call = client.call(1, "work", json!({ "seconds": 1 })).await;
    call.head().await;
    assert_eq!(get(admin, "/readyz").await.status, 200);

    proxy.stop();

    while get(admin, "/readyz").await.status != 503 {}
    assert_eq!(
        get(admin, "/calls.json").await.json()["calls"][0]["gen_ai.tool.name"],
        "work"
    );
    assert_eq!(get(admin, "/healthz").await.status, 200);
    assert!(call.answer().await.expect("an answer")["result"].is_object());
    proxy.ended().await;
}

/// A server might show its environment to clients, as server-everything does (`get-env`).
#[tokio::test]
async fn a_command_does_not_inherit_the_token() {
    let script = r#"read line
        echo '{"jsonrpc":"2.0","id":"a","result":{"token":"'"$MCP_PROXY_ADMIN_TOKEN"'"}}'; cat"#;
    let mut command = Program::command(&[
        "--listen=127.0.0.1:0",
        "--admin=127.0.0.1:0",
        "--",
        "sh",
        "-c",
        script,
    ]);
    command.env("MCP_PROXY_ADMIN_TOKEN", TOKEN);
    let mut program = Program::start(command);
    let client = Mcp::stateless(program.addr(), "/mcp");
    let mut opening = client.request("a", "initialize", json!({})).await;
    let answer = opening.answer().await.expect("an answer");
    assert_eq!(answer["result"]["token"], "");
}
