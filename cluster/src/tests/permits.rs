//! A concurrency limit inside the cluster's layer: requests that wait or are relayed have no permit of it.

use std::{sync::Arc, time::Duration};

use axum::Router;
use futures_util::{
    FutureExt as _,
    future::{join, join_all},
};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Served, Tools, Witness, serve};
use tokio::{net::TcpListener, time::timeout};
use tower_layer::Layer as _;

use super::{
    compositions::Limit,
    node::{Node, Setup, pass},
    steps::{directory, join_as, run_other_tasks, status},
};
use crate::{
    Cluster,
    directory::faulty::Faulty,
    ids::{Incarnation, Owner},
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
};

const SECOND: Duration = Duration::from_secs(1);

/// `ServiceBuilder::new().layer(cluster.layer()).concurrency_limit(permits).service(router)`.
struct Limited {
    cluster: Cluster,
    public: Served,
    #[allow(dead_code, reason = "only held")]
    witness: Witness,
}

impl Limited {
    async fn start(directory: &Faulty, permits: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = Owner {
            address: listener.local_addr().unwrap(),
            incarnation: Incarnation::random(),
        };
        let cluster = join_as(me, directory);
        let witness = Witness::new();
        let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
        let mut config = Mode::Session.config().with_sse_keep_alive(None);
        config.session_store = Some(Arc::new(cluster.clone()));
        let service = Tools::new(&witness).service_with(config, sessions);
        let router =
            test_support::router(service).layer(cluster.protect(CancelOnDisconnectLayer::new()));
        let app = cluster.layer().layer(Limit::new(router, permits));
        let public = serve(Router::new().fallback_service(app.clone())).await;
        let member = cluster.clone();
        let _peers = tokio::spawn(async move { member.serve_peers(listener, app).await });
        Self {
            cluster,
            public,
            witness,
        }
    }

    fn client(&self, session: &str) -> Mcp {
        Mcp::stateless(self.public.addr, PATH).in_session(session)
    }
}

/// The client of a call resumes through B, while a call that B relays waits for the owner to transfer its session. If the waiting call
/// had a permit of B, the resume would not be relayed.
///
/// Returns whether the call still runs, and whether the resume has a head.
async fn is_running_although_resumed(permits: usize) -> (bool, bool) {
    const GRACE: Duration = Duration::from_secs(6);
    let directory = directory();
    let setup = Setup {
        grace: Grace::After(GRACE),
        ..Setup::default()
    };
    let a = setup.start(&directory).await;
    let b = Limited::start(&directory, permits).await;
    pass(SETTLE_PERIOD + 3 * HEARTBEAT_INTERVAL).await;
    let mcp = a.session().await;
    let at_b = b.client(mcp.session_id().unwrap());
    assert_eq!(status(&at_b, 7).await, 200, "B relays");
    let named = a.detach(&mcp, 1, "long").await;
    let _leaving = a.routing().shutdown.begin();
    // Waits on A until the first call is over.
    let _waiting = at_b.call(2, "echo", json!({ "text": "x" })).await;
    run_other_tasks().await;
    // The client is back at once.
    let mut resumed = at_b.resume(&named).await;
    run_other_tasks().await;
    pass(3 * GRACE).await;
    let is_running = a.witness.is_running("long");
    let has_head = resumed.head().now_or_never().is_some();
    drop(b.cluster);
    (is_running, has_head)
}

#[tokio::test]
async fn a_call_whose_client_is_back_is_not_cancelled_because_relays_have_the_permits() {
    assert_eq!(
        is_running_although_resumed(20).await,
        (true, true),
        "control"
    );
    assert!(is_running_although_resumed(1).await.0);
}

/// A shuts down. Calls of its sessions wait on B. B has nothing else to do.
#[tokio::test]
async fn an_instance_that_leaves_does_not_block_the_others() {
    for permits in [20, 4] {
        let directory = directory();
        let a = Node::start(&directory).await;
        let b = Limited::start(&directory, permits).await;
        pass(SETTLE_PERIOD + 3 * HEARTBEAT_INTERVAL).await;
        let mcp = a.session().await;
        let at_b = b.client(mcp.session_id().unwrap());
        let mut long = mcp.call(1, "hold", json!({ "label": "long" })).await;
        assert_eq!(long.head().await.status, 200);
        a.witness.started("long").await;
        let _leaving = a.routing().shutdown.begin();
        let waiting = (10..14).map(|id| at_b.call(id, "echo", json!({ "text": "x" })));
        let _waiting = join_all(waiting).await;
        run_other_tasks().await;
        let opened = timeout(5 * SECOND, Mcp::session(b.public.addr, PATH)).await;
        assert!(opened.is_ok(), "{permits} permits: no session begins on B");
    }
}

/// "Calls in flight continue on their instance, with their resumes, cancels and answers to the server's questions."
#[tokio::test]
async fn calls_that_wait_on_a_leaving_instance_do_not_block_resumes_there() {
    for permits in [20, 4] {
        let directory = directory();
        let a = Limited::start(&directory, permits).await;
        let b = Node::start(&directory).await;
        b.until_settled().await;
        let mcp = Mcp::session(a.public.addr, PATH).await;
        let at_b = b.client_of(&mcp);
        let mut long = at_b.call(1, "hold", json!({ "label": "long" })).await;
        assert_eq!(long.head().await.status, 200);
        let named = long.event().await.unwrap().id.unwrap();
        a.witness.started("long").await;
        let _leaving = a.cluster.router().shutdown.begin();
        let waiting = (10..14).map(|id| at_b.call(id, "echo", json!({ "text": "x" })));
        let _waiting = join_all(waiting).await;
        run_other_tasks().await;
        long.fin();
        let mut resumed = at_b.resume(&named).await;
        let head = timeout(8 * SECOND, resumed.head()).await;
        let head = head.map(|head| head.status);
        assert_eq!(head.ok(), Some(200), "{permits} permits");
    }
}

/// Two instances relay to each other. Each relayed call has a permit of the instance that relays, and needs one of its owner.
#[tokio::test]
async fn instances_with_a_concurrency_limit_can_relay_to_each_other() {
    for (permits, calls) in [(20, 4), (4, 8)] {
        let directory = directory();
        let a = Limited::start(&directory, permits).await;
        let b = Limited::start(&directory, permits).await;
        pass(SETTLE_PERIOD + 3 * HEARTBEAT_INTERVAL).await;
        let of_a = Mcp::session(a.public.addr, PATH).await;
        let of_b = Mcp::session(b.public.addr, PATH).await;
        let (through_b, through_a) = (
            b.client(of_a.session_id().unwrap()),
            a.client(of_b.session_id().unwrap()),
        );
        let through_b = join_all((0..calls).map(|id| status(&through_b, id)));
        let through_a = join_all((0..calls).map(|id| status(&through_a, id)));
        let both = timeout(8 * SECOND, join(through_b, through_a)).await;
        let all = both.map(|both| [both.0, both.1].concat());
        assert_eq!(all, Ok(vec![200; 2 * calls as usize]), "{permits} permits");
    }
}
