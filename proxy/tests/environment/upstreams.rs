//! Upstreams that fail.
//!
//! The fault happens to another session's call, so that the table also covers whether one session can harm another.

use crate::{
    support::{
        Connection, ReceivedRequest, Reply, Request, Running, Upstream, call, post, session_call,
        within,
    },
    table::{Phase, run},
};

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Refuses connections for a while.
    Refuses,
    /// Resets the connection after receiving the request.
    Resets,
    /// Receives the request but never answers.
    Hangs,
    /// Redirects to another host.
    Redirects,
    Unavailable,
    /// Answers, and then closes its connection while no request is in flight on it.
    ClosesKeptAlive,
}

/// A proxy in some phase of call 7 in session `s`.
struct Served {
    upstream: Upstream,
    proxy: Running,
    client: Option<Connection>,
    received: Option<ReceivedRequest>,
    first_event: String,
}

const ANSWER: &str = r#"{"jsonrpc":"2.0","id":7,"result":{}}"#;

#[tokio::test]
async fn an_upstream_that_fails_one_call_affects_no_other() {
    let faults = [
        Fault::Refuses,
        Fault::Resets,
        Fault::Hangs,
        Fault::Redirects,
        Fault::Unavailable,
        Fault::ClosesKeptAlive,
    ];
    run(&faults, cell).await;
}

async fn cell(fault: Fault, phase: Phase) {
    let mut served = Served::in_phase(phase).await;
    match fault {
        Fault::Refuses => {
            served.upstream.refuse().await;
            let refused = served.reply_to_other(None).await;
            served.upstream.accept_again().await;
            assert_eq!((refused.status, &refused.json()["id"]), (502, &8.into()));
        }
        Fault::Resets => {
            let reset = served.reply_to_other(Some(ReceivedRequest::reset)).await;
            assert_eq!((reset.status, &reset.json()["id"]), (502, &8.into()));
            assert!(!served.upstream.has_more().await, "the call was sent twice");
        }
        Fault::Hangs => {
            let other = served.begin_other().await;
            let hangs = served.upstream.next_request().await;
            other.fin();
            // The client has no event to resume from.
            served.other_is_cancelled().await;
            drop(hangs);
        }
        Fault::Redirects => {
            let mut other = served.begin_other().await;
            let head = "307 Temporary Redirect\r\nlocation: https://other.example/mcp";
            served.upstream.next_request().await.answer(head, "").await;
            let reply = within("a reply", other.reply()).await;
            assert_eq!((reply.status, &reply.json()["id"]), (502, &8.into()));
        }
        Fault::Unavailable => {
            let mut other = served.begin_other().await;
            let head = "503 Service Unavailable\r\nretry-after: 7";
            served
                .upstream
                .next_request()
                .await
                .answer(head, "why")
                .await;
            let reply = within("a reply", other.reply()).await;
            assert_eq!((reply.status, reply.text()), (503, "why"));
            assert_eq!(reply.headers["retry-after"], "7");
        }
        Fault::ClosesKeptAlive => {
            for _ in 0..20 {
                let mut other = served.begin_other().await;
                let mut received = served.upstream.next_request().await;
                let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
                let answer = ANSWER.replace('7', "8");
                received
                    .write(format!("{head}: {}\r\n\r\n{answer}", answer.len()))
                    .await;
                let reply = within("a reply", other.reply()).await;
                assert_eq!((reply.status, reply.text()), (200, answer.as_str()));
                // A request sent while the connection is closing would be lost.
                received.close().await;
            }
        }
    }
    served.client_is_served(phase).await;
    served.ends().await;
}

// === impl Served ===

impl Served {
    async fn in_phase(phase: Phase) -> Self {
        let (upstream, proxy) = Running::start(&[]).await;
        let mut served = Self {
            upstream,
            proxy,
            client: None,
            received: None,
            first_event: String::new(),
        };
        if phase == Phase::BeforeInitialize {
            return served;
        }
        served.begin().await;
        match phase {
            Phase::Idle => served.gets_its_answer().await,
            Phase::ClientAway => served.disconnect().await,
            Phase::AnswerWaits => {
                served.disconnect().await;
                served.answer().await;
                served.proxy.calls_reach(0).await;
            }
            Phase::Draining => served.proxy.stop(),
            Phase::BeforeInitialize | Phase::CallInFlight => {}
        }
        served
    }

    /// Starts the call and reads up to its first event.
    async fn begin(&mut self) {
        let mut client = Connection::sending(self.proxy.addr, &session_call("7")).await;
        let mut received = self.upstream.next_request().await;
        received.stream().await;
        let progress = r#"{"jsonrpc":"2.0","method":"notifications/message","params":{}}"#;
        received.chunk(&format!("data: {progress}\n\n")).await;
        assert_eq!(within("a response head", client.head()).await.status, 200);
        let first = within("an event", client.event()).await;
        self.first_event = first.expect("an event").id.expect("an id");
        self.client = Some(client);
        self.received = Some(received);
    }

    async fn disconnect(&mut self) {
        self.client.take().expect("a client").rst();
    }

    async fn answer(&mut self) {
        let mut received = self.received.take().expect("a call");
        received.chunk(&format!("data: {ANSWER}\n\n")).await;
        received.end().await;
    }

    async fn gets_its_answer(&mut self) {
        self.answer().await;
        let mut client = self.client.take().expect("a client");
        let answer = within("the answer", client.answer()).await;
        assert!(answer.expect("the answer")["result"].is_object());
    }

    /// Checks that the client gets this phase's answers as if there had been no fault.
    async fn client_is_served(&mut self, phase: Phase) {
        match phase {
            Phase::BeforeInitialize | Phase::Idle => {
                self.begin().await;
                self.gets_its_answer().await;
            }
            Phase::CallInFlight | Phase::Draining => self.gets_its_answer().await,
            Phase::ClientAway | Phase::AnswerWaits => {
                let resume = Request::new("GET", "/mcp")
                    .header("accept", "text/event-stream")
                    .header("mcp-session-id", "s")
                    .header("mcp-protocol-version", "2025-11-25")
                    .header("last-event-id", &self.first_event);
                let mut resumed = Connection::sending(self.proxy.addr, &resume).await;
                assert_eq!(within("a response head", resumed.head()).await.status, 200);
                if phase == Phase::ClientAway {
                    self.answer().await;
                }
                let answer = within("the answer", resumed.answer()).await;
                assert!(answer.expect("the answer")["result"].is_object());
            }
        }
    }

    /// Sends call 8 in session `t`.
    async fn begin_other(&self) -> Connection {
        let mut other = Connection::open(self.proxy.addr).await;
        let request = post(&call("8"))
            .header("mcp-protocol-version", "2025-11-25")
            .header("mcp-session-id", "t");
        other.send(&request).await;
        other
    }

    /// Returns the reply to call 8.
    ///
    /// `fault` is what the upstream does with the request, or `None` if none will arrive.
    async fn reply_to_other(&self, fault: Option<fn(ReceivedRequest)>) -> Reply {
        let mut other = self.begin_other().await;
        if let Some(fault) = fault {
            fault(self.upstream.next_request().await);
        }
        within("a reply", other.reply()).await
    }

    /// Checks that the upstream receives the cancellation for call 8.
    async fn other_is_cancelled(&self) {
        let cancel = self.upstream.next_request().await;
        let message: serde_json::Value = serde_json::from_slice(&cancel.body).expect("JSON");
        assert_eq!(message["method"], "notifications/cancelled");
        assert_eq!(message["params"]["requestId"], 8);
        assert_eq!(cancel.headers["mcp-session-id"], "t");
        cancel.answer("202 Accepted", "").await;
    }

    /// Checks that the upstream has received nothing else, and that the proxy exits in time.
    async fn ends(mut self) {
        self.proxy.calls_reach(0).await;
        assert!(
            !self.upstream.has_more().await,
            "the upstream received another request"
        );
        drop(self.upstream);
        self.proxy.stop();
        self.proxy.ended().await;
    }
}

/// The client gets the same status and body.
#[tokio::test]
async fn each_status_of_an_upstream_reaches_the_client_and_the_next_call_is_served() {
    let (upstream, proxy) = Running::start(&[]).await;
    for status in [
        400, 401, 403, 404, 405, 406, 409, 410, 415, 422, 429, 500, 501, 502, 503, 504,
    ] {
        let mut client = Connection::sending(proxy.addr, &session_call("1")).await;
        let received = within("the request", upstream.next_request()).await;
        received.answer(&format!("{status} Said"), "why").await;
        let reply = within("a reply", client.reply()).await;
        assert_eq!((reply.status, reply.text()), (status, "why"));
    }
    proxy.calls_reach(0).await;
    let mut client = Connection::sending(proxy.addr, &session_call("2")).await;
    upstream
        .next_request()
        .await
        .answer("200 OK\r\ncontent-type: application/json", "{}")
        .await;
    assert_eq!(client.head().await.status, 200);
}

/// A call is not sent twice, because the upstream may have started it.
#[tokio::test]
async fn an_upstream_that_closes_or_resets_gets_no_call_twice_and_serves_the_next() {
    let (upstream, proxy) = Running::start(&[]).await;
    for written in ["", "HTTP/1.1 2", "HTTP/1.1 200 OK\r\ncontent-len"] {
        let mut client = Connection::open(proxy.addr).await;
        client
            .send(&post(&call("1")).header("mcp-session-id", "s"))
            .await;
        let mut received = within("the request", upstream.next_request()).await;
        received.write(written).await;
        drop(received);
        let reply = within("a reply", client.reply()).await;
        assert_eq!(
            (reply.status, &reply.json()["id"]),
            (502, &1.into()),
            "{written:?}"
        );
        assert!(!upstream.has_more().await, "the call was sent twice");
    }
    proxy.calls_reach(0).await;
}
