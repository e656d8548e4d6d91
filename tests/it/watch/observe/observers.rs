//! Several observers, of which some break.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use mcp_cancel_on_disconnect::{Event, Observer};

use crate::setup::{Plan, Server, What};

/// Counts what it sees.
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
async fn every_part_of_a_tuple_sees_everything_though_others_break() {
    let (first, last, nested) = (Count::default(), Count::default(), Count::default());
    let observers = (
        first.clone(),
        broken,
        (broken, nested.clone()),
        last.clone(),
    );
    let plan = Plan::of(Server::Wrapped).layer(|layer| layer.observe(observers));
    let setup = plan.start().await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;

    setup.assert_completes("a", &mut call).await;

    setup.events.ended(&mcp, 1).await;
    for count in [first, last, nested] {
        assert_eq!(count.0.load(Ordering::Relaxed), 2, "started and ended");
    }
}

#[tokio::test]
async fn a_tuple_whose_parts_all_break_harms_no_call() {
    let plan = Plan::of(Server::Wrapped).layer(|layer| layer.observe((broken, broken)));
    let setup = plan.start().await;
    let mcp = setup.mcp().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;

    call.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
    setup.events.ended(&mcp, 1).await;
    assert_eq!(setup.events.of(&mcp, 1).len(), 2);
    assert!(matches!(setup.events.of(&mcp, 1)[1], What::Ended(_)));
}

#[test]
fn tuples_of_one_to_eight_are_observers() {
    let count = Count::default();
    let each = || count.clone();
    let observers: [Box<dyn Observer>; 8] = [
        Box::new((each(),)),
        Box::new((each(), each())),
        Box::new((each(), each(), each())),
        Box::new((each(), each(), each(), each())),
        Box::new((each(), each(), each(), each(), each())),
        Box::new((each(), each(), each(), each(), each(), each())),
        Box::new((each(), each(), each(), each(), each(), each(), each())),
        Box::new((
            each(),
            each(),
            each(),
            each(),
            each(),
            each(),
            each(),
            each(),
        )),
    ];
    let layer = mcp_cancel_on_disconnect::CancelOnDisconnectLayer::new();
    let layer = observers.into_iter().fold(layer, |layer, observer| {
        layer.observe(move |event: &Event<'_>| observer.on_event(event))
    });
    let request = http::Request::post("/mcp").header("content-type", "application/json");
    let request = request.body(axum::body::Body::from("no JSON"));
    let unread = tower::service_fn(async |_| {
        Ok::<_, std::convert::Infallible>(http::Response::new(axum::body::Body::empty()))
    });
    let served = catch_unwind(AssertUnwindSafe(|| {
        use tower::{Layer as _, ServiceExt as _};
        let future = layer.layer(unread).oneshot(request.expect("a request"));
        futures_util::FutureExt::now_or_never(future)
    }));
    served.expect("no panic").expect("ready").expect("served");
    // One event: the body is not watched, because nobody read it.
    assert_eq!(count.0.load(Ordering::Relaxed), 36);
}
