//! Services and their session store: without one, several services per membership, and made-up session ids.

use std::{sync::Arc, time::Duration};

use axum::Router;
use http::Request;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager,
    observe::{SessionEnd, SessionEvent},
};
use serde_json::json;
use test_support::{Mcp, Mode, Tools, Witness, serve};
use tokio::net::TcpStream;

use super::{
    log_lines::Warnings,
    node::{Node, Setup, hash, pass},
    steps::{directory, status},
};
use crate::{
    Cluster,
    directory::{Directory as _, MemoryDirectory, contract::owner_of, faulty::Faulty},
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
};

/// Two services that share one membership, at `/one` and `/two`.
fn two_services(cluster: &Cluster, witness: &Witness) -> Router {
    let service = || {
        let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
        let mut config = Mode::Session.config();
        config.session_store = Some(Arc::new(cluster.clone()));
        Tools::new(witness).service_with(config, sessions)
    };
    Router::new()
        .nest_service("/one", service())
        .nest_service("/two", service())
        .layer(cluster.protect(CancelOnDisconnectLayer::new()))
        .layer(cluster.layer())
}

#[tokio::test]
async fn a_service_without_a_session_store_logs_once_what_it_needs() {
    for has_session_store in [true, false] {
        let warnings = Warnings::watch();
        let setup = Setup {
            has_session_store,
            ..Setup::default()
        };
        let directory = Faulty::new(MemoryDirectory::default());
        let node = setup.start(&directory).await;
        node.until_settled().await;
        for _ in 0..2 {
            let mcp = node.session().await;
            assert_eq!([status(&mcp, 1).await, status(&mcp, 2).await], [200; 2]);
        }
        let logged = warnings.count("session_store = Some(Arc::new(cluster.clone()))");
        assert_eq!(logged, usize::from(!has_session_store));
    }
}

/// Clients find their session only at its service's path.
#[tokio::test]
async fn a_session_of_one_service_is_not_restored_in_another() {
    let directory = MemoryDirectory::default();
    let member = Cluster::in_memory(&directory).advertise("127.0.0.1:9");
    let cluster = member.connect().await.unwrap();
    let witness = Witness::new();
    let served = serve(two_services(&cluster, &witness)).await;
    let mcp = Mcp::session(served.addr, "/one").await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    call.head().await;
    let last_event_id = call.event().await.unwrap().id.unwrap();
    witness.started("a").await;
    let elsewhere = Mcp::stateless(served.addr, "/two").in_session(mcp.session_id().unwrap());
    assert_eq!(status(&elsewhere, 2).await, 404);

    call.fin();
    let mut resumed = mcp.resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    witness.release("a");
    assert_eq!(resumed.answer().await.unwrap()["id"], 1);
}

#[tokio::test]
async fn a_delete_at_another_service_ends_the_session() {
    let directory = MemoryDirectory::default();
    let member = Cluster::in_memory(&directory).advertise("127.0.0.1:9");
    let cluster = member.connect().await.unwrap();
    let witness = Witness::new();
    let served = serve(two_services(&cluster, &witness)).await;
    pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
    let mcp = Mcp::session(served.addr, "/one").await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    call.head().await;
    witness.started("a").await;
    let elsewhere = Mcp::stateless(served.addr, "/two").in_session(mcp.session_id().unwrap());
    assert_eq!(elsewhere.delete().await, 202);
    assert_eq!(owner_of(&directory, hash(&mcp)).await, None);
    pass(Duration::from_secs(2)).await;
    let answered = status(&mcp, 2).await;
    pass(Duration::from_secs(75)).await;
    let later = status(&mcp, 3).await;
    assert_eq!(
        (answered, later, witness.is_running("a")),
        (404, 404, false)
    );
}

/// The client may still return, and in the meantime the record costs little and will expire.
#[tokio::test]
async fn a_lost_session_stays_in_the_directory_and_is_restored_for_its_client() {
    let directory = MemoryDirectory::default();
    let member = Cluster::in_memory(&directory).advertise("127.0.0.1:9");
    let cluster = member.connect().await.unwrap();
    let (sender, mut ends) = tokio::sync::mpsc::unbounded_channel();
    let manager = CancellableSessionManager::default()
        .lost_timeout(Duration::from_millis(100))
        .on_session(move |event| {
            if let SessionEvent::Closed { reason, .. } = event {
                let _sent = sender.send(*reason);
            }
        });
    let mut config = Mode::Session.config();
    config.session_store = Some(Arc::new(cluster.clone()));
    let mcp = Tools::new(&Witness::new()).service_with(config, Arc::new(cluster.sessions(manager)));
    let router = Router::new()
        .nest_service("/mcp", mcp)
        .layer(cluster.protect(CancelOnDisconnectLayer::new()))
        .layer(cluster.layer());
    let served = serve(router).await;
    pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
    let mcp = Mcp::session(served.addr, "/mcp").await;
    let mut standalone = mcp.listen().await;
    standalone.head().await;
    standalone.fin();
    assert_eq!(ends.recv().await, Some(SessionEnd::Lost));

    assert!(owner_of(&directory, hash(&mcp)).await.is_some());
    assert_eq!(status(&mcp, 1).await, 200);
}

/// rmcp accepts a DELETE even if there is no such session.
#[tokio::test]
async fn invented_session_ids_add_nothing_to_the_directory() {
    let directory = directory();
    let node = Node::start(&directory).await;
    node.until_settled().await;
    for number in 0..20 {
        let client = node.client(&format!("made-up-{number}"));
        assert_eq!(client.delete().await, 202);
        let snapshot = directory.memory.look_up(hash(&client)).await.unwrap();
        assert!(snapshot.record.is_none());
    }
}

/// A client that can reach the peer listener must not be able to fill the log.
#[tokio::test]
async fn untrusted_requests_at_the_peer_listener_are_logged_once_a_minute() {
    let directory = Faulty::new(MemoryDirectory::default());
    let node = Node::start(&directory).await;
    let warnings = Warnings::watch();
    for _ in 0..5 {
        let (mut sender, connection) = {
            let stream = TcpStream::connect(node.me.address).await.unwrap();
            let io = hyper_util::rt::TokioIo::new(stream);
            hyper::client::conn::http1::handshake(io).await.unwrap()
        };
        tokio::spawn(connection);
        let request = Request::get("/mcp").header("mcp-cluster", "a guess");
        let request = request.body(axum::body::Body::empty()).unwrap();
        let answered = sender.send_request(request).await.unwrap();
        assert_eq!(answered.status(), 403);
    }
    assert_eq!(warnings.count("without the cluster's secret"), 1);
}
