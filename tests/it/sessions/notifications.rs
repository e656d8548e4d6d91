//! Observers are notified once whenever a session opens or closes.

use std::{
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use mcp_cancel_on_disconnect::{CancellableSessionManager, observe::SessionEvent};
use rmcp::transport::streamable_http_server::session::{SessionId, local::SessionConfig};

use self::Notification::{Closed, Opened, Restored};
use super::idle::eventually;
use crate::{
    setup::{Plan, SavedSessions, Server, Sessions, Setup, StoppedClock, TICK},
    support::*,
};

const IDLE: Duration = SessionConfig::DEFAULT_KEEP_ALIVE;
/// The notifications so far.
#[derive(Clone, Default)]
struct Notifications(Arc<Mutex<Vec<(Notification, String)>>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notification {
    Opened,
    Restored,
    Closed,
}

impl Notifications {
    fn record(&self, event: &SessionEvent<'_>) {
        let (notification, session) = match event {
            SessionEvent::Opened {
                session, restored, ..
            } => (if *restored { Restored } else { Opened }, session),
            SessionEvent::Closed { session, .. } => (Closed, session),
            other => panic!("{other:?}"),
        };
        self.0
            .lock()
            .unwrap()
            .push((notification, (*session).to_owned()));
    }

    fn of(&self, mcp: &Mcp) -> Vec<Notification> {
        let session = mcp.session_id().expect("a session");
        let notifications = self.0.lock().unwrap();
        let of_session = notifications.iter().filter(|(_, id)| id == session);
        of_session.map(|(notification, _)| *notification).collect()
    }
}

#[tokio::test]
async fn a_session_that_its_client_ends() {
    let (setup, notifications) = start(|plan| plan).await;
    let mcp = setup.mcp().await;
    let other = setup.mcp().await;
    assert_eq!(notifications.of(&mcp), [Opened]);

    assert_eq!(mcp.delete().await, 202);
    // rmcp's task closes the session again once its handlers have returned.
    setup.assert_usable(&other).await;
    mcp.delete().await;

    assert_eq!(notifications.of(&mcp), [Opened, Closed]);
    assert_eq!(notifications.of(&other), [Opened]);
}

#[tokio::test]
async fn an_idle_session_and_one_that_is_restored_under_its_id() {
    let clock = StoppedClock::stop();
    let (setup, notifications) = start(|plan| plan.saving(SavedSessions::default())).await;
    let mcp = setup.mcp().await;
    clock.advance(IDLE + TICK).await;
    eventually("the session to be closed", async || {
        notifications.of(&mcp).len() == 2
    })
    .await;
    assert_eq!(notifications.of(&mcp), [Opened, Closed]);

    setup.assert_usable(&mcp).await;

    assert_eq!(notifications.of(&mcp), [Opened, Closed, Restored]);
}

/// The inner manager has lost the session, in a crash or because of its own timer.
#[tokio::test]
async fn a_session_that_another_replaces_is_reported_as_closed() {
    let (setup, notifications) = start(|plan| plan.saving(SavedSessions::default())).await;
    let mcp = setup.mcp().await;
    let session: SessionId = mcp.session_id().expect("a session").into();
    setup
        .sessions
        .local()
        .sessions
        .write()
        .await
        .remove(&session);

    setup.assert_usable(&mcp).await;

    assert_eq!(notifications.of(&mcp), [Opened, Closed, Restored]);
}

#[tokio::test]
async fn a_listener_that_panics_affects_nothing_else() {
    let notifications = Notifications::default();
    let listener = notifications.clone();
    let wrap = move |_| {
        CancellableSessionManager::local(SessionConfig::default())
            .on_session(|_| panic!("on purpose"))
            .on_session(move |event| listener.record(event))
    };
    let (setup, mcp) = Plan::of(Server::Wrapped).wrap(wrap).client().await;
    setup.assert_usable(&mcp).await;
    assert_eq!(mcp.delete().await, 202);
    assert_eq!(notifications.of(&mcp), [Opened, Closed]);
    assert!(matches!(setup.sessions, Sessions::Wrapped(_)));
}

async fn start(plan: impl FnOnce(Plan) -> Plan) -> (Setup, Notifications) {
    let notifications = Notifications::default();
    let listener = notifications.clone();
    let wrap = move |_| {
        CancellableSessionManager::local(SessionConfig::default())
            .on_session(move |event| listener.record(event))
    };
    let setup = plan(Plan::of(Server::Wrapped).wrap(wrap)).start().await;
    (setup, notifications)
}

/// The inner manager closes the session after its calls have been cancelled.
#[tokio::test]
async fn a_session_is_reported_as_closed_when_the_inner_manager_has_closed_it() {
    let found: Arc<Mutex<Vec<bool>>> = Arc::default();
    let sessions: Arc<OnceLock<Sessions>> = Arc::default();
    let (seen, checks) = (found.clone(), sessions.clone());
    let plan = Plan::of(Server::Wrapped).wrap(move |local| {
        CancellableSessionManager::new(local).on_session(move |event| {
            if let SessionEvent::Closed { session, .. } = event {
                let sessions = checks.get().expect("the server has started").local();
                let sessions = sessions
                    .sessions
                    .try_read()
                    .expect("the sessions are not locked");
                let is_there = sessions.keys().any(|id| **id == **session);
                seen.lock().unwrap().push(is_there);
            }
        })
    });
    let setup = plan.start().await;
    assert!(sessions.set(setup.sessions.clone()).is_ok());
    let mcp = setup.mcp().await;

    assert_eq!(mcp.delete().await, 202);

    assert_eq!(*found.lock().unwrap(), [false]);
}
