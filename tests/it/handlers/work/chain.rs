//! Three servers in a row, each of which calls the next.
//!
//! After a hundred of the first server's clients have disconnected, no handler is running on any of the three.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::CallToken;
use rmcp::{
    ErrorData, RoleClient, RoleServer, ServiceExt as _,
    model::{CallToolRequest, CallToolRequestParams, ClientRequest, ErrorCode},
    service::{PeerRequestOptions, RequestContext, RunningService},
    transport::StreamableHttpClientTransport,
};
use tokio::time::Instant;

use crate::{
    setup::{Plan, Scripted, Server, Setup, arguments},
    support::*,
};

/// The number of disconnects, and how many of them happen at the same time.
const DISCONNECTS: usize = 100;
const AT_ONCE: usize = 10;

type Client = Arc<RunningService<RoleClient, ()>>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_disconnects_stop_a_hundred_chains() {
    let worker = start(None).await;
    let middle = start(Some(client_of(&worker).await)).await;
    let front = start(Some(client_of(&middle).await)).await;
    let servers = [&front, &middle, &worker];
    let sessionless = Mcp::sessionless(front.served.addr, PATH);
    let clients = [front.mcp().await, sessionless];
    let mut slowest = Duration::ZERO;
    for round in 0..DISCONNECTS / AT_ONCE {
        let calls = (0..AT_ONCE).map(async |number| {
            let label = format!("{round}-{number}");
            let id = (round * AT_ONCE + number) as i64;
            let mcp = &clients[number % clients.len()];
            let call = front.start_call(mcp, id, "any", &label).await;
            for server in servers {
                server.witness.started(&label).await;
            }
            let disconnected_at = Instant::now();
            call.fin();
            let mut last = disconnected_at;
            for server in servers {
                last = last.max(server.witness.ended(&label).await.at());
            }
            last - disconnected_at
        });
        let took = join_all(calls).await.into_iter().max();
        slowest = slowest.max(took.unwrap_or_default());
    }
    eprintln!(
        "{DISCONNECTS} disconnects, {AT_ONCE} at once: all had stopped {slowest:.1?} after theirs"
    );
    for server in servers {
        assert_eq!(server.witness.running(), 0);
        // Each handler has run exactly once.
        assert_eq!(
            server.witness.completed() + server.witness.dropped(),
            DISCONNECTS
        );
    }
}

/// Starts a server that calls the next one. The last server works without checking its token.
async fn start(next: Option<Client>) -> Setup {
    let handler = Scripted::labelled(move |label, context| {
        let next = next.clone();
        async move {
            match next {
                Some(next) => call_next(&next, &label, &context).await,
                None => std::future::pending().await,
            }
        }
    });
    let plan = Plan::of(Server::Wrapped).abort_after(Duration::from_millis(50));
    plan.start_scripted(handler).await
}

async fn client_of(server: &Setup) -> Client {
    let url = format!("http://{}{PATH}", server.served.addr);
    let transport = StreamableHttpClientTransport::from_uri(url);
    Arc::new(().serve(transport).await.expect("a connection"))
}

/// Forwards the cancellation, like the `gateway` example.
async fn call_next(
    next: &RunningService<RoleClient, ()>,
    label: &str,
    context: &RequestContext<RoleServer>,
) -> Result<String, ErrorData> {
    let mut params = CallToolRequestParams::new("any");
    params.arguments = arguments(label).as_object().cloned();
    let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
    let options = PeerRequestOptions::no_options();
    let sent = next.peer().send_cancellable_request(request, options);
    let mut request = sent.await.expect("the next server is running");
    tokio::select! {
        answer = &mut request.rx => panic!("the call was never released: {answer:?}"),
        () = context.ct.cancelled() => {
            let reason = CallToken::of(context).and_then(|call| call.reason());
            let cancelled = request.cancel(reason.map(|reason| reason.to_string()));
            cancelled.await.expect("the next server is running");
            Err(ErrorData::new(ErrorCode(-32_800), "Request cancelled", None))
        }
    }
}
