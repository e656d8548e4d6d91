//! Requests that arrive slowly, in parts, or never in full.

use serde_json::json;

use super::{ID, assert_answered};
use crate::{
    setup::{EXCHANGE, Server, for_servers},
    support::*,
};

/// A content length larger than any body sent here.
const ANNOUNCED: usize = 10_000;

for_servers!(all {
    a_body_that_never_ends_is_not_a_call,
    a_body_that_arrives_byte_by_byte_is_one_call_like_any_other,
    bytes_of_a_next_request_do_not_hide_an_answer,
});

async fn a_body_that_never_ends_is_not_a_call(server: Server) {
    let setup = server.start().await;
    let victim = setup.mcp().await;
    let call = setup.start_call(&victim, ID, "hold", "victim").await;
    let mut open = Vec::new();
    for nth in 0..20 {
        let name = format!("half {nth}");
        let attacker = victim.clone().header(EXCHANGE, &name);
        let mut request = attacker.call_request(ID, "hold", json!({ "label": "half" }));
        request.body.truncate(request.body.len() * nth / 20);
        let mut connection = Connection::open(setup.served.addr).await;
        connection.send_cut(&request, ANNOUNCED).await;
        setup.exchanges.started_for(&name).await;
        open.push((name, connection));
    }
    assert_eq!(setup.calls.len(), 1, "only the victim's call");

    for (name, connection) in open {
        connection.rst();
        setup.exchanges.over_for(&name).await;
    }

    assert_eq!(setup.calls.len(), 1);
    assert_eq!(setup.witness.starts("half"), 0);
    assert_answered(&setup, &victim, call).await;
}

async fn a_body_that_arrives_byte_by_byte_is_one_call_like_any_other(server: Server) {
    let (setup, mcp) = server.client().await;
    let request = mcp.call_request(ID, "hold", json!({ "label": "slow" }));
    let mut slow = Connection::open(setup.served.addr).await;
    slow.send_chunked(&request, &vec![1; request.body.len()])
        .await;
    setup.witness.started("slow").await;
    assert_eq!(setup.calls.len(), 1);

    slow.fin();

    assert!(setup.witness.ended("slow").await.is_cancelled());
    setup.calls_reach(0).await;
}

/// hyper does not read any further, so it does not notice the disconnect.
///
/// The call completes with its answer.
async fn bytes_of_a_next_request_do_not_hide_an_answer(server: Server) {
    let (setup, mcp) = server.client().await;
    let mut call = setup.start_call(&mcp, ID, "hold", "a").await;
    call.write(b"POST /mcp HTTP/1.1\r\nhost: ").await;

    call.half_close().await;
    setup.witness.release("a");

    setup.witness.ended("a").await;
    setup.calls_reach(0).await;
}
