//! Several observers, some of which panic.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use mcp_cancel_on_disconnect::{Event, Observer};

use crate::setup::{EventKind, Plan, Server};

/// Counts the events it receives.
#[derive(Clone, Debug, Default)]
struct Count(Arc<AtomicUsize>);

impl Observer for Count {
    fn on_event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn broken(_: &Event<'_>) {
    panic!("an observer panics on purpose");
}

#[tokio::test]
async fn every_observer_receives_all_events_although_others_panic() {
    let (first, last) = (Count::default(), Count::default());
    let observers = (first.clone(), last.clone());
    let plan = Plan::of(Server::Wrapped).layer(|layer| {
        let layer = layer.observe(observers.0).observe(broken);
        layer.observe(broken).observe(observers.1)
    });
    let (setup, mcp) = plan.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;

    setup.assert_completes("a", &mut call).await;

    setup.events.ended(&mcp, 1).await;
    for count in [first, last] {
        assert_eq!(count.0.load(Ordering::Relaxed), 2, "started and ended");
    }
}

#[tokio::test]
async fn observers_that_all_panic_do_not_affect_a_call() {
    let plan = Plan::of(Server::Wrapped).layer(|layer| layer.observe(broken).observe(broken));
    let (setup, mcp) = plan.client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;

    call.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
    setup.events.ended(&mcp, 1).await;
    assert_eq!(setup.events.of(&mcp, 1).len(), 2);
    assert!(matches!(setup.events.of(&mcp, 1)[1], EventKind::Ended(_)));
}
