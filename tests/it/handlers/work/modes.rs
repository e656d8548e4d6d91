//! The transport modes in which a call can reach its handler.
//!
//! The handler is always behind the layer and wrapped in `AbortOnCancel`.

use std::time::Duration;

use rmcp::{RoleServer, service::RequestContext};

use crate::{
    setup::{Plan, Scripted, Server, Setup},
    support::{server::report, *},
};

/// How long a cancelled handler may keep running, which is long enough to end on its own.
const ABORT_GRACE: Duration = Duration::from_millis(100);

/// The header that lets a handler know that its events are stored.
const STORED: &str = "x-stored";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransportMode {
    Session,
    StatelessSse,
    StatelessJson,
    /// Revision 2026-07-28.
    Newest,
    /// Revision 2026-07-28 with events in a store. rmcp alone never cancels such a call.
    NewestStored,
}

/// Turns every test that takes a [`TransportMode`] into a `#[tokio::test]` for each mode.
macro_rules! for_modes {
    ($($test:ident,)+) => {
        for_modes!(@ session = Session, $($test,)+);
        for_modes!(@ stateless_sse = StatelessSse, $($test,)+);
        for_modes!(@ stateless_json = StatelessJson, $($test,)+);
        for_modes!(@ newest = Newest, $($test,)+);
        for_modes!(@ newest_stored = NewestStored, $($test,)+);
    };
    (@ $module:ident = $mode:ident, $($test:ident,)+) => {
        mod $module {
            $(
                #[tokio::test]
                async fn $test() {
                    super::$test(super::TransportMode::$mode).await;
                }
            )+
        }
    };
}

pub(super) use for_modes;

/// A server, and a client that uses it in one of the modes.
pub(super) struct Bench {
    pub(super) mode: TransportMode,
    pub(super) setup: Setup,
    pub(super) mcp: Mcp,
}

// === impl TransportMode ===

impl TransportMode {
    pub(super) async fn start(self, handler: Scripted) -> Bench {
        let plan = Plan::of(match self {
            Self::Session => Server::Wrapped,
            Self::StatelessSse | Self::Newest | Self::NewestStored => Server::StatelessSse,
            Self::StatelessJson => Server::StatelessJson,
        });
        let plan = match self {
            Self::NewestStored => plan.stored(),
            _ => plan,
        };
        let setup = plan.abort_after(ABORT_GRACE).start_scripted(handler).await;
        let mcp = match self {
            Self::Newest => Mcp::sessionless(setup.served.addr, PATH),
            Self::NewestStored => Mcp::sessionless(setup.served.addr, PATH).header(STORED, "yes"),
            _ => setup.mcp().await,
        };
        Bench {
            mode: self,
            setup,
            mcp,
        }
    }
}

// === impl Bench ===

impl Bench {
    /// Starts a call and waits until its handler has started.
    ///
    /// If the call's events are stored, its first event is read, too.
    pub(super) async fn start_call(&self, id: i64, label: &str) -> Connection {
        let mut call = self.setup.start_call(&self.mcp, id, "any", label).await;
        if self.mode == TransportMode::NewestStored {
            // Until it has sent its first message, rmcp notices the disconnect itself.
            call.head().await;
            call.event().await.expect("an event");
        }
        call
    }
}

/// What every handler in these tests does first.
///
/// A message before the answer turns a JSON response into a stream, so only handlers whose events are stored send one.
pub(super) async fn begin(context: &RequestContext<RoleServer>) {
    let parts: Option<&http::request::Parts> = context.extensions.get();
    let stored = parts.is_some_and(|parts| parts.headers.contains_key(STORED));
    if stored {
        report(context, "any", 1).await;
    }
}
