//! Reports about calls, to observers and in the log.

mod causes;
mod injection;
mod lifecycle;
mod observers;
mod sessions;
mod setup_hints;
mod spans;

use std::time::Duration;

use crate::{
    setup::{Setup, arguments},
    support::*,
};

const GRACE: Duration = Duration::from_secs(20);

/// Resolution to which tokio rounds a timer up.
const TICK: Duration = Duration::from_millis(1);

/// Starts call 1 and disconnects its client after the first event, so that the call is detached.
async fn cut(setup: &Setup, mcp: &Mcp) {
    let mut call = mcp.call(1, "hold", arguments("a")).await;
    setup.witness.started("a").await;
    call.head().await;
    call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(mcp, 1).await;
}
