//! A request that can be resent until an instance accepts it.
//!
//! 1. The body is not read until the request is about to be sent, classified, or used to restore its session.
//! 2. A body of up to [`MAX_REPLAY`] is then read in full and can be resent unchanged. A longer body is sent once, frame by frame.
//! 3. Until it has been sent, a request is intact, no matter how long it is.
//! 4. If a body stalls, reading it fails ([`with_idle_timeout`]), even while it is being sent.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http::{Request, request::Parts};
use http_body::Body as _;
use http_body_util::BodyExt as _;

use crate::{
    refusals::Refusal,
    relay::body_idle::{is_stalled, with_idle_timeout},
};

/// Maximum length of a body that can be resent.
///
/// Session messages are far shorter than this, except for calls with large arguments.
const MAX_REPLAY: usize = 64 * 1024;

/// A request whose body, if short enough, is buffered so that it can be resent.
#[derive(Debug)]
pub(crate) struct ReplayableRequest {
    pub(crate) head: Parts,
    body: ReplayableBody,
}

/// A request's body, and how much of it has been read or sent.
#[derive(Debug)]
enum ReplayableBody {
    Unread(Body),
    Buffered(Bytes),
    /// A body too long to be buffered.
    Long(Body),
    /// The body has been handed out without being buffered, or reading it has failed.
    Sent,
}

// === impl ReplayableRequest ===

impl ReplayableRequest {
    pub(crate) fn new(request: Request<Body>) -> Self {
        let (head, body) = request.into_parts();
        let body = ReplayableBody::Unread(with_idle_timeout(body));
        Self { head, body }
    }

    /// Reads the body if it is short enough to be buffered, unless it has already been read.
    ///
    /// # Errors
    ///
    /// Returns an error if the client disconnected mid-request, or stalled. Either way, the request is no longer intact.
    pub(crate) async fn read(&mut self) -> Result<(), Refusal> {
        self.body = match std::mem::replace(&mut self.body, ReplayableBody::Sent) {
            ReplayableBody::Unread(body) if is_long(&body) => ReplayableBody::Long(body),
            ReplayableBody::Unread(body) => ReplayableBody::read(body, MAX_REPLAY).await?,
            other => other,
        };
        Ok(())
    }

    /// Reads the body in full, or until more than `limit` bytes have been read.
    ///
    /// Does nothing if the body has already been read in full or sent.
    ///
    /// # Errors
    ///
    /// Returns an error if the client disconnected mid-request, or stalled. Either way, the request is no longer intact.
    pub(crate) async fn read_up_to(&mut self, limit: usize) -> Result<(), Refusal> {
        self.body = match std::mem::replace(&mut self.body, ReplayableBody::Sent) {
            ReplayableBody::Unread(body) | ReplayableBody::Long(body) => {
                ReplayableBody::read(body, limit).await?
            }
            other => other,
        };
        Ok(())
    }

    /// Returns `true` if the request can still be sent, or served here, unchanged.
    pub(crate) fn is_intact(&self) -> bool {
        !matches!(self.body, ReplayableBody::Sent)
    }

    /// Returns the body, or `None` if it has not been read in full.
    pub(crate) fn bytes(&self) -> Option<&Bytes> {
        match &self.body {
            ReplayableBody::Buffered(bytes) => Some(bytes),
            ReplayableBody::Unread(_) | ReplayableBody::Long(_) | ReplayableBody::Sent => None,
        }
    }

    /// Returns the body to send, or `None` if it has been sent unbuffered.
    pub(crate) fn body_for_attempt(&mut self) -> Option<Body> {
        match &mut self.body {
            ReplayableBody::Buffered(bytes) => Some(Body::from(bytes.clone())),
            body => match std::mem::replace(body, ReplayableBody::Sent) {
                ReplayableBody::Long(body) | ReplayableBody::Unread(body) => Some(body),
                ReplayableBody::Buffered(_) | ReplayableBody::Sent => None,
            },
        }
    }

    /// Puts back a body if none of it has been sent.
    pub(crate) fn restore_body(&mut self, body: Body) {
        if !self.is_intact() {
            self.body = ReplayableBody::Long(body);
        }
    }

    /// Returns the original request, or `None` if its body has been sent unbuffered.
    pub(crate) fn into_request(mut self) -> Option<Request<Body>> {
        let body = self.body_for_attempt()?;
        Some(Request::from_parts(self.head, body))
    }
}

// === impl ReplayableBody ===

impl ReplayableBody {
    async fn read(mut body: Body, limit: usize) -> Result<Self, Refusal> {
        let mut first = Bytes::new();
        let mut more = BytesMut::new();
        while let Some(frame) = body.frame().await {
            // MCP does not use trailers.
            let Ok(data) = frame.map_err(|error| refusal_for(&error))?.into_data() else {
                continue;
            };
            // Don't copy a body that arrives in a single frame.
            if first.is_empty() {
                first = data;
            } else {
                if more.is_empty() {
                    more.extend_from_slice(&first);
                }
                more.extend_from_slice(&data);
            }
            if first.len().max(more.len()) > limit {
                let read = if more.is_empty() {
                    first
                } else {
                    more.freeze()
                };
                return Ok(Self::Long(chain(read, body)));
            }
        }
        Ok(Self::Buffered(if more.is_empty() {
            first
        } else {
            more.freeze()
        }))
    }
}

/// Returns the reason for refusing a request whose body cannot be read.
fn refusal_for(error: &axum::Error) -> Refusal {
    if is_stalled(error) {
        Refusal::Stalled
    } else {
        Refusal::Incomplete
    }
}

/// Returns `true` if a body's announced length is too long for the body to be buffered.
fn is_long(body: &Body) -> bool {
    usize::try_from(body.size_hint().lower()).map_or(true, |announced| announced > MAX_REPLAY)
}

/// Returns a body that starts with the part already read.
fn chain(read: Bytes, rest: Body) -> Body {
    let read = stream::once(async move { Ok(read) });
    Body::from_stream(read.chain(rest.into_data_stream()))
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use futures_util::FutureExt as _;

    use super::*;

    fn body(pieces: &[usize]) -> Body {
        let pieces: Vec<_> = pieces
            .iter()
            .enumerate()
            .map(|(index, length)| {
                let letter = b'a' + u8::try_from(index % 26).unwrap();
                Ok::<_, std::io::Error>(Bytes::from(vec![letter; *length]))
            })
            .collect();
        Body::from_stream(stream::iter(pieces))
    }

    async fn whole(body: Body) -> Bytes {
        body.collect().await.unwrap().to_bytes()
    }

    async fn read_request(body: Body) -> ReplayableRequest {
        let mut replayable = ReplayableRequest::new(Request::new(body));
        replayable.read().await.unwrap();
        replayable
    }

    #[tokio::test]
    async fn a_short_body_can_be_sent_any_number_of_times() {
        for pieces in [
            &[][..],
            &[1],
            &[0, 3, 0, 4],
            &[MAX_REPLAY],
            &[MAX_REPLAY - 1, 1],
        ] {
            let expected = whole(body(pieces)).await;
            let mut replayable = read_request(body(pieces)).await;
            for _ in 0..3 {
                assert_eq!(
                    whole(replayable.body_for_attempt().unwrap()).await,
                    expected
                );
                assert!(replayable.is_intact());
            }
            let request = replayable.into_request().unwrap();
            assert_eq!(whole(request.into_body()).await, expected);
        }
    }

    #[tokio::test]
    async fn a_long_body_is_sent_once_and_completely() {
        for pieces in [
            &[MAX_REPLAY + 1][..],
            &[MAX_REPLAY, 1],
            &[1, MAX_REPLAY],
            &[9, 0, 7, MAX_REPLAY, 5, 4],
        ] {
            let expected = whole(body(pieces)).await;
            let mut replayable = read_request(body(pieces)).await;
            assert!(replayable.is_intact());
            let sent = replayable.body_for_attempt().unwrap();
            assert!(!replayable.is_intact());
            assert!(replayable.body_for_attempt().is_none());
            replayable.restore_body(sent);
            let request = replayable.into_request().unwrap();
            assert_eq!(whole(request.into_body()).await, expected);
        }
    }

    #[tokio::test]
    async fn a_long_body_is_read_up_to_a_limit_and_stays_whole() {
        for (pieces, is_read) in [
            (&[MAX_REPLAY + 1][..], true),
            (&[MAX_REPLAY, MAX_REPLAY], true),
            (&[MAX_REPLAY; 4], false),
        ] {
            let expected = whole(body(pieces)).await;
            for has_started in [true, false] {
                let mut replayable = ReplayableRequest::new(Request::new(body(pieces)));
                if has_started {
                    replayable.read().await.unwrap();
                }
                replayable.read_up_to(2 * MAX_REPLAY).await.unwrap();
                assert_eq!(replayable.bytes().is_some(), is_read);
                let request = replayable.into_request().unwrap();
                assert_eq!(whole(request.into_body()).await, expected);
            }
        }
    }

    #[tokio::test]
    async fn a_body_that_is_not_relayed_is_not_read() {
        let polled = Arc::new(AtomicBool::new(false));
        let recorded = polled.clone();
        let body = stream::once(async move {
            recorded.store(true, Ordering::Relaxed);
            Ok::<_, std::io::Error>(Bytes::from_static(b"body"))
        });
        let replayable = ReplayableRequest::new(Request::new(Body::from_stream(body)));
        let request = replayable.into_request().unwrap();
        assert!(!polled.load(Ordering::Relaxed));
        assert_eq!(whole(request.into_body()).await, "body");
    }

    #[tokio::test]
    async fn a_body_with_a_known_length_is_not_read_if_it_is_long() {
        let mut replayable =
            ReplayableRequest::new(Request::new(Body::from(vec![b'x'; MAX_REPLAY + 1])));
        replayable.read().now_or_never().unwrap().unwrap();
        assert!(matches!(replayable.body, ReplayableBody::Long(_)));
    }

    #[tokio::test]
    async fn a_client_that_disconnects_is_an_error() {
        let pieces = [
            Ok(Bytes::from_static(b"{\"json")),
            Err(std::io::Error::other("reset")),
        ];
        let mut replayable =
            ReplayableRequest::new(Request::new(Body::from_stream(stream::iter(pieces))));
        assert_eq!(replayable.read().await, Err(Refusal::Incomplete));
        assert!(replayable.into_request().is_none());
    }
}
