//! Running out of descriptors and memory.
//!
//! The program has no files of its own. What a full disk does to its log is covered by `output`.

use tokio::net::TcpStream;

use crate::{
    started::{Setup, Started},
    support::{Mcp, within},
    table::{Phase, run},
};

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Other clients open more connections than the limit allows, and send nothing.
    ManyConnections,
    /// There are barely enough descriptors for a session.
    FewDescriptors,
    /// The address space is limited to 1 GB.
    LittleMemory,
}

/// How many connections other clients open, which is more than `ulimit -n` allows.
const EXTRA_CONNECTIONS: usize = 300;

#[tokio::test(flavor = "multi_thread")]
async fn exhausted_resources_are_not_taken_from_clients_in_service() {
    let faults = [
        Fault::ManyConnections,
        Fault::FewDescriptors,
        Fault::LittleMemory,
    ];
    run(&faults, cell).await;
}

async fn cell(fault: Fault, phase: Phase) {
    let setup = Setup {
        preparation: match fault {
            Fault::ManyConnections => "ulimit -n 200",
            Fault::FewDescriptors => "ulimit -n 80",
            Fault::LittleMemory => "ulimit -v 1000000",
        },
        options: &["--max-sessions=8"],
        ..Setup::default()
    };
    let mut started = Started::in_phase(setup, phase).await;
    let mut connections = Vec::new();
    if matches!(fault, Fault::ManyConnections) {
        for _ in 0..EXTRA_CONNECTIONS {
            let connection = TcpStream::connect(started.addr).await;
            // A draining program accepts no more connections once its call has ended.
            assert!(connection.is_ok() || phase == Phase::Draining);
            connections.extend(connection);
        }
        if phase != Phase::Draining {
            started.reach_log("connection limit reached").await;
        }
    }
    started.client_is_served(phase).await;
    drop(connections);
    if phase == Phase::Draining {
        return started.drains().await;
    }
    started.session_leaves_no_state().await;
    started.ends_by_sigterm().await;
}

#[tokio::test]
async fn sessions_without_descriptors_get_503_and_do_not_count_as_crashes() {
    let setup = Setup {
        preparation: "ulimit -n 96",
        ..Setup::default()
    };
    let mut started = Started::in_phase(setup, Phase::Idle).await;
    let warned = "the limit of 96 descriptors (ulimit -n) is enough for about";
    started.reach_log(warned).await;
    let mut others = Vec::new();
    let refused = loop {
        let client = Mcp::stateless(started.addr, "/mcp");
        let mut first = client
            .request("i", "initialize", serde_json::json!({}))
            .await;
        let head = within("an answer", first.head()).await;
        if head.status != 200 {
            break head;
        }
        let id = head.header("mcp-session-id").expect("an id").to_owned();
        assert!(first.answer().await.is_some());
        others.push(client.in_session(&id));
    };
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (503, Some("1"))
    );
    for _ in 0..3 {
        let again = Mcp::stateless(started.addr, "/mcp");
        let mut again = again
            .request("i", "initialize", serde_json::json!({}))
            .await;
        assert_eq!(again.head().await.status, 503);
    }
    started.client_is_served(Phase::Idle).await;
    for other in others {
        assert_eq!(other.delete().await, 204);
    }
    let served = async {
        loop {
            let client = Mcp::stateless(started.addr, "/mcp");
            let mut first = client
                .request("i", "initialize", serde_json::json!({}))
                .await;
            if first.head().await.status == 200 {
                return;
            }
        }
    };
    within("a new session", served).await;
    started.ends_by_sigterm().await;
}

#[tokio::test]
async fn a_session_beyond_the_limit_gets_503_and_the_log_names_the_option() {
    let setup = Setup {
        options: &["--max-sessions=1"],
        ..Setup::default()
    };
    let mut started = Started::in_phase(setup, Phase::Idle).await;
    let client = Mcp::stateless(started.addr, "/mcp");
    for _ in 0..5 {
        let mut second = client
            .request("i", "initialize", serde_json::json!({}))
            .await;
        let head = within("an answer", second.head()).await;
        assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
    }
    started
        .reach_log("session limit reached (--max-sessions")
        .await;
    let lines = started.logged().matches("--max-sessions").count();
    assert_eq!(lines, 1, "{}", started.logged());
    started.ends_by_sigterm().await;
}
