//! A client that is refused. None of its requests takes effect, wherever the layer is placed.

use axum::{Router, extract::Request};
use http::{StatusCode, header::AUTHORIZATION};
use tower_http::validate_request::ValidateRequestHeaderLayer;

use super::{ID, assert_answered, assert_orphaned_on_time, label, lose_client};
use crate::{
    setup::{Plan, Server, Setup, StoppedClock, for_servers},
    support::*,
};

/// The side of the layer on which the attacker is refused.
#[derive(Clone, Copy, Debug)]
enum Side {
    Inside,
    Outside,
}

for_servers!(sessions {
    what_is_refused_inside_does_not_end_a_call,
    what_is_refused_outside_does_not_end_a_call,
    what_is_refused_inside_does_not_keep_a_call,
    what_is_refused_outside_does_not_keep_a_call,
});

async fn what_is_refused_inside_does_not_end_a_call(server: Server) {
    assert_ends_no_call(server, Side::Inside).await;
}

async fn what_is_refused_outside_does_not_end_a_call(server: Server) {
    assert_ends_no_call(server, Side::Outside).await;
}

async fn what_is_refused_inside_does_not_keep_a_call(server: Server) {
    assert_keeps_no_call(server, Side::Inside).await;
}

async fn what_is_refused_outside_does_not_keep_a_call(server: Server) {
    assert_keeps_no_call(server, Side::Outside).await;
}

async fn assert_ends_no_call(server: Server, side: Side) {
    let (setup, victim, attacker) = guarded(server, side).await;
    let call = setup.start_call(&victim, ID, "hold", "victim").await;

    assert_all_are_refused(&attacker).await;

    assert_answered(&setup, &victim, call).await;
}

async fn assert_keeps_no_call(server: Server, side: Side) {
    let clock = StoppedClock::stop();
    let (setup, victim, attacker) = guarded(server, side).await;
    lose_client(&setup, &victim).await;

    assert_all_are_refused(&attacker).await;

    assert_orphaned_on_time(&setup, &victim, &clock).await;
}

/// Sends requests with the victim's session and the ids of its call and events.
///
/// All of them must be refused.
async fn assert_all_are_refused(attacker: &Mcp) {
    let mut call = attacker.call(ID, "hold", label()).await;
    assert_eq!(call.head().await.status, 401);
    assert_eq!(attacker.cancel(ID).await, 401);
    for id in ["0/0", "1/0"] {
        assert_eq!(attacker.resume(id).await.head().await.status, 401);
    }
    assert_eq!(attacker.listen().await.head().await.status, 401);
    assert_eq!(attacker.delete().await, 401);
}

/// Returns a server with two clients.
///
/// The victim is let in, but the attacker, which has the victim's session, is not.
async fn guarded(server: Server, side: Side) -> (Setup, Mcp, Mcp) {
    let plan: Plan = Plan::with_grace(server);
    let plan = match side {
        Side::Inside => plan.inside(refusing),
        Side::Outside => plan.outside(refusing),
    };
    let setup = plan.start().await;
    let victim = Mcp::stateless(setup.served.addr, PATH).header("authorization", "Bearer owner");
    let victim = victim.connect().await;
    let session = victim.session_id().expect("a session");
    let attacker = Mcp::stateless(setup.served.addr, PATH).in_session(session);
    (setup, victim, attacker)
}

#[allow(clippy::result_large_err, reason = "the signature is tower-http's")]
fn refusing(router: Router) -> Router {
    router.layer(ValidateRequestHeaderLayer::custom(
        |request: &mut Request| {
            if request.headers().contains_key(AUTHORIZATION) {
                Ok(())
            } else {
                let mut refused = http::Response::new(axum::body::Body::empty());
                *refused.status_mut() = StatusCode::UNAUTHORIZED;
                Err(refused)
            }
        },
    ))
}
