//! The response on its way to the client: first its future, then its body.
//!
//! | file | what it is |
//! |---|---|
//! | `future` | from the request to the head; where an early commit is decided |
//! | `body` | from the head to the end, for any body: what counts as its end |
//! | `stream` | a body of events: probes, last words, a client that does not read |
//! | `slot` | where a stream keeps the inner body, so that others can let go of it |
//! | `commit` | the inner answer as events, where the head went out before it |
//! | `late` | a resumed stream of a cancelled call: the answer if its server has it, else the error |

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::Extensions;
use http_body::{Body, Frame};
use tokio::{
    runtime::Handle,
    time::{Sleep, sleep},
};

mod body;
mod commit;
mod future;
mod head;
mod late;
mod slot;
mod stream;

pub(crate) use self::future::ResponseOptions;
pub use self::{body::ResponseBody, future::ResponseFuture};

/// What a poll of a body gives.
type Polled<B> = Poll<Option<Result<Frame<<B as Body>::Data>, <B as Body>::Error>>>;

type Sleeper = Pin<Box<Sleep>>;

/// Ends when the client's connection does, also where hyper does not look.
type PeerClosed = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// `None` where nobody watches the client's socket.
#[cfg(feature = "socket")]
fn departure(extensions: &Extensions) -> Option<PeerClosed> {
    let peer = crate::socket::Peer::of(extensions)?.clone();
    Some(Box::pin(async move { peer.closed().await }))
}

#[cfg(not(feature = "socket"))]
fn departure(_: &Extensions) -> Option<PeerClosed> {
    None
}

/// Polls a future, if there is one.
fn is_ready<F>(future: &mut Option<Pin<Box<F>>>, cx: &mut Context<'_>) -> bool
where
    F: Future + ?Sized,
{
    future
        .as_mut()
        .is_some_and(|future| future.as_mut().poll(cx).is_ready())
}

/// A timer of the current runtime, if there is one.
fn timer(time: Duration) -> Option<Sleeper> {
    Handle::try_current().ok()?;
    Some(Box::pin(sleep(time)))
}
