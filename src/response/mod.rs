//! The response: first the future that resolves to its head, then its body.
//!
//! | file | what it is |
//! |---|---|
//! | `future` | the response future, up to the response head; decides whether to send the head early |
//! | `body` | the response body, of any kind; defines when it has ended |
//! | `stream` | the body of an event stream: injects probes and messages, and detects clients that stop reading |
//! | `slot` | owns a stream's inner body so that the timer can drop it, too |
//! | `commit` | converts the inner answer to events, if the head was sent early |
//! | `late` | the stream for a client that resumes a cancelled call: the answer if the server has it, otherwise the error |

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

/// The result of polling a body.
type Polled<B> = Poll<Option<Result<Frame<<B as Body>::Data>, <B as Body>::Error>>>;

type Sleeper = Pin<Box<Sleep>>;

/// Completes when the client closes its connection, even while hyper is not reading.
type PeerClosed = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// Returns `None` if the client's socket is not watched.
#[cfg(feature = "socket")]
fn peer_closed(extensions: &Extensions) -> Option<PeerClosed> {
    let peer = watched_socket::Peer::of(extensions)?.clone();
    Some(Box::pin(async move { peer.closed().await }))
}

#[cfg(not(feature = "socket"))]
fn peer_closed(_: &Extensions) -> Option<PeerClosed> {
    None
}

/// Polls a future. Returns `true` if it is ready, or `false` if it is pending or there is none.
fn is_ready<F>(future: &mut Option<Pin<Box<F>>>, cx: &mut Context<'_>) -> bool
where
    F: Future + ?Sized,
{
    future
        .as_mut()
        .is_some_and(|future| future.as_mut().poll(cx).is_ready())
}

/// Returns a timer, or `None` outside a tokio runtime.
fn timer(time: Duration) -> Option<Sleeper> {
    Handle::try_current().ok()?;
    Some(Box::pin(sleep(time)))
}
