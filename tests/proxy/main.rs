//! Real proxies in front of the server: whether a disconnect is detected, and which silent calls survive.
//!
//! These tests need nginx and HAProxy, so they are ignored unless `tests/proxy/run` starts them.

#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

mod behind;
mod proxy;

use std::{env, time::Duration};

use futures_util::future::join_all;
use test_support::{Connection, limit::LIMIT};
use tokio::time::{Instant, sleep};

use self::{
    behind::{Behind, Client, GRACE, Probing},
    proxy::Kind,
};

/// An idle limit that no test reaches.
const UNREACHED_LIMIT: Duration = Duration::from_secs(600);

/// How often to probe in tests where it makes no difference.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// How a client closes its connection.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Fin,
    Rst,
    /// A FIN behind an unread line end, which hyper does not notice without a proxy in between.
    StrayAndFin,
}

#[tokio::test]
#[ignore = "needs nginx: tests/proxy/run"]
async fn nginx_forwards_a_disconnect_at_once_whatever_it_buffers() {
    for kind in [
        Kind::NginxUnbuffered,
        Kind::NginxBuffered,
        Kind::NginxBufferedAnyhow,
    ] {
        disconnects_are_detected(kind).await;
    }
}

#[tokio::test]
#[ignore = "needs HAProxy: tests/proxy/run"]
async fn haproxy_forwards_a_disconnect_with_abort_on_close() {
    disconnects_are_detected(Kind::HaproxyAbortonclose).await;
}

#[tokio::test]
#[ignore = "needs nginx: tests/proxy/run"]
async fn only_probes_detect_a_disconnect_if_nginx_ignores_aborts() {
    only_probes_detect_a_disconnect(Kind::NginxIgnoringAborts).await;
}

#[tokio::test]
#[ignore = "needs HAProxy: tests/proxy/run"]
async fn only_probes_detect_a_disconnect_behind_haproxy_with_its_defaults() {
    only_probes_detect_a_disconnect(Kind::Haproxy).await;
}

#[tokio::test]
#[ignore = "needs nginx: tests/proxy/run"]
async fn probes_keep_silent_calls_open_beyond_nginx_read_timeout() {
    let kinds = [
        Kind::NginxUnbuffered,
        Kind::NginxBuffered,
        Kind::NginxBufferedAnyhow,
    ];
    join_all(kinds.map(probes_keep_calls_open_beyond_the_idle_limit)).await;
}

#[tokio::test]
#[ignore = "needs HAProxy: tests/proxy/run"]
async fn probes_keep_silent_calls_open_beyond_haproxy_timeouts() {
    probes_keep_calls_open_beyond_the_idle_limit(Kind::Haproxy).await;
}

/// Asserts that the disconnect is detected for all kinds of clients, without probes.
async fn disconnects_are_detected(kind: Kind) {
    let behind = Behind::start(kind, UNREACHED_LIMIT, PROBE_INTERVAL).await;
    let leave = async |client, ending| {
        let label = format!("{kind:?}, {client:?}, {ending:?}");
        let call = behind.hold(client, Probing::Off, &label).await;
        let left = Instant::now();
        hang_up(call, ending).await;
        let fired = behind.witness.token_fired(&label).await;
        if client == Client::Graced {
            assert!(fired - left >= GRACE, "{label}: {:?}", fired - left);
        }
    };
    for ending in [Ending::Fin, Ending::Rst, Ending::StrayAndFin] {
        join_all(Client::ALL.map(|client| leave(client, ending))).await;
    }
}

/// Asserts that only probes detect the disconnect. The proxy must keep its connection to the server open.
async fn only_probes_detect_a_disconnect(kind: Kind) {
    let behind = Behind::start(kind, UNREACHED_LIMIT, PROBE_INTERVAL).await;
    let leave = async |client| {
        let label = |probing| format!("{kind:?}, {client:?}, {probing:?}");
        let (silent, probed) = (label(Probing::Off), label(Probing::On));
        for (label, probing) in [(&silent, Probing::Off), (&probed, Probing::On)] {
            let call = behind.hold(client, probing, label).await;
            hang_up(call, Ending::Fin).await;
        }
        behind.witness.token_fired(&probed).await;
        assert!(behind.witness.is_running(&silent), "{silent}");
    };
    join_all(Client::ALL.map(leave)).await;
}

/// While a probed call stays silent, the idle limit ends two calls without probes in turn.
async fn probes_keep_calls_open_beyond_the_idle_limit(kind: Kind) {
    let idle_limit = idle_limit();
    let behind = Behind::start(kind, idle_limit, idle_limit / 4).await;
    let outlast = async |client: Client| {
        let probed = format!("{kind:?}, {client:?}, probed");
        let mut open = behind.hold(client, Probing::On, &probed).await;
        for silent in ["first", "second"].map(|name| format!("{kind:?}, {client:?}, {name}")) {
            let mut dies = behind.hold(client, Probing::Off, &silent).await;
            // With a realistic idle limit, the wait is longer than `LIMIT`.
            sleep(idle_limit.saturating_sub(LIMIT / 2)).await;
            let head = dies.head().await;
            let expected = if client.has_a_head_at_once() {
                200
            } else {
                504
            };
            assert_eq!(head.status, expected, "{silent}");
            if head.status == 200 {
                assert_eq!(dies.answer().await, None, "{silent}");
                assert!(!dies.is_complete(), "{silent}: the stream was cut");
            }
            // The proxy closes the connection, and that is all the server notices.
            behind.witness.token_fired(&silent).await;
        }
        behind.witness.release(&probed);
        assert_eq!(open.head().await.status, 200, "{probed}");
        let answer = open.answer().await.expect("an answer");
        assert!(answer.get("result").is_some(), "{probed}: {answer}");
    };
    join_all(Client::ALL.map(outlast)).await;
}

async fn hang_up(mut call: Connection, ending: Ending) {
    match ending {
        Ending::Fin => call.fin(),
        Ending::Rst => call.rst(),
        Ending::StrayAndFin => {
            call.write(b"\r\n").await;
            call.fin();
        }
    }
}

/// Returns the idle limit, which `IDLE_LIMIT` sets in seconds. The default is 2 s.
fn idle_limit() -> Duration {
    let given = env::var("IDLE_LIMIT").ok();
    let seconds = given.map_or(2, |seconds| seconds.parse().expect("a number of seconds"));
    Duration::from_secs(seconds)
}
