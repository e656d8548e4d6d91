//! A request that is held until somebody has taken it.
//!
//! 1. Nothing of the body is read before it is to be sent.
//! 2. Then a body of at most [`KEPT`] is read whole, and can be sent again as it came. Of a longer body only the beginning is read.
//!    A longer body is sent once, frame by frame.
//! 3. A request that was not sent is whole, whatever its length.
//! 4. A body that stalls fails ([`limit_idle`]), also while it is sent.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http::{Request, request::Parts};
use http_body::Body as _;
use http_body_util::BodyExt as _;

use crate::{
    body_idle::{is_stalled, limit_idle},
    way::Refusal,
};

/// Maximum length of a body that can be sent again: 64 KiB. What clients send in a session is far shorter, but for large arguments.
const KEPT: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) head: Parts,
    body: HeldBody,
}

#[derive(Debug)]
enum HeldBody {
    Unread(Body),
    Whole(Bytes),
    /// It is too long to be kept.
    Long(Body),
    /// A long one, which is on its way.
    Lent,
}

// === impl Held ===

impl Held {
    pub(crate) fn new(request: Request<Body>) -> Self {
        let (head, body) = request.into_parts();
        let body = HeldBody::Unread(limit_idle(body));
        Self { head, body }
    }

    /// Reads the body if it can be kept, unless that was done.
    ///
    /// # Errors
    ///
    /// The client broke off in the middle of its request, or stalled.
    pub(crate) async fn read(&mut self) -> Result<(), Refusal> {
        self.body = match std::mem::replace(&mut self.body, HeldBody::Lent) {
            HeldBody::Unread(body) if is_long(&body) => HeldBody::Long(body),
            HeldBody::Unread(body) => HeldBody::read(body, KEPT).await?,
            read => read,
        };
        Ok(())
    }

    /// Reads the body, or its first `limit` bytes.
    ///
    /// # Errors
    ///
    /// The client broke off in the middle of its request, or stalled.
    pub(crate) async fn read_up_to(&mut self, limit: usize) -> Result<(), Refusal> {
        self.body = match std::mem::replace(&mut self.body, HeldBody::Lent) {
            HeldBody::Unread(body) | HeldBody::Long(body) => HeldBody::read(body, limit).await?,
            read => read,
        };
        Ok(())
    }

    /// Whether the request can still be sent, or served here, as it came.
    pub(crate) fn is_whole(&self) -> bool {
        !matches!(self.body, HeldBody::Lent)
    }

    /// The body, if it was read and can be sent again.
    pub(crate) fn bytes(&self) -> Option<&Bytes> {
        match &self.body {
            HeldBody::Whole(bytes) => Some(bytes),
            HeldBody::Unread(_) | HeldBody::Long(_) | HeldBody::Lent => None,
        }
    }

    /// The body, to be sent; nothing if it has been sent and could not be kept.
    pub(crate) fn lend(&mut self) -> Option<Body> {
        match &mut self.body {
            HeldBody::Whole(bytes) => Some(Body::from(bytes.clone())),
            long => match std::mem::replace(long, HeldBody::Lent) {
                HeldBody::Long(body) | HeldBody::Unread(body) => Some(body),
                HeldBody::Whole(_) | HeldBody::Lent => None,
            },
        }
    }

    /// Takes a lent body back of which nothing was sent.
    pub(crate) fn give_back(&mut self, body: Body) {
        if !self.is_whole() {
            self.body = HeldBody::Long(body);
        }
    }

    /// The request as it came.
    pub(crate) fn into_request(mut self) -> Option<Request<Body>> {
        let body = self.lend()?;
        Some(Request::from_parts(self.head, body))
    }
}

// === impl HeldBody ===

impl HeldBody {
    async fn read(mut body: Body, limit: usize) -> Result<Self, Refusal> {
        let mut first = Bytes::new();
        let mut more = BytesMut::new();
        while let Some(frame) = body.frame().await {
            // Trailers mean nothing to MCP.
            let Ok(data) = frame.map_err(|error| unread(&error))?.into_data() else {
                continue;
            };
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
                return Ok(Self::Long(chained(read, body)));
            }
        }
        Ok(Self::Whole(if more.is_empty() {
            first
        } else {
            more.freeze()
        }))
    }
}

/// Why a request is refused whose body cannot be read.
fn unread(error: &axum::Error) -> Refusal {
    if is_stalled(error) {
        Refusal::Stalled
    } else {
        Refusal::BrokeOff
    }
}

/// Returns `true` if a body announces that it is too long to be kept.
fn is_long(body: &Body) -> bool {
    usize::try_from(body.size_hint().lower()).map_or(true, |announced| announced > KEPT)
}

/// A body that begins with what has been read of it.
fn chained(read: Bytes, rest: Body) -> Body {
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
            .map(|(at, length)| {
                let letter = b'a' + u8::try_from(at % 26).unwrap();
                Ok::<_, std::io::Error>(Bytes::from(vec![letter; *length]))
            })
            .collect();
        Body::from_stream(stream::iter(pieces))
    }

    async fn whole(body: Body) -> Bytes {
        body.collect().await.unwrap().to_bytes()
    }

    async fn read_of(body: Body) -> Held {
        let mut held = Held::new(Request::new(body));
        held.read().await.unwrap();
        held
    }

    #[tokio::test]
    async fn a_short_body_can_be_sent_as_often_as_need_be() {
        for pieces in [&[][..], &[1], &[0, 3, 0, 4], &[KEPT], &[KEPT - 1, 1]] {
            let expected = whole(body(pieces)).await;
            let mut held = read_of(body(pieces)).await;
            for _ in 0..3 {
                assert_eq!(whole(held.lend().unwrap()).await, expected);
                assert!(held.is_whole());
            }
            let request = held.into_request().unwrap();
            assert_eq!(whole(request.into_body()).await, expected);
        }
    }

    #[tokio::test]
    async fn a_long_body_is_lent_once_and_whole() {
        for pieces in [
            &[KEPT + 1][..],
            &[KEPT, 1],
            &[1, KEPT],
            &[9, 0, 7, KEPT, 5, 4],
        ] {
            let expected = whole(body(pieces)).await;
            let mut held = read_of(body(pieces)).await;
            assert!(held.is_whole());
            let lent = held.lend().unwrap();
            assert!(!held.is_whole());
            assert!(held.lend().is_none());
            held.give_back(lent);
            let request = held.into_request().unwrap();
            assert_eq!(whole(request.into_body()).await, expected);
        }
    }

    #[tokio::test]
    async fn a_long_body_is_read_up_to_a_limit_and_stays_whole() {
        for (pieces, is_read) in [
            (&[KEPT + 1][..], true),
            (&[KEPT, KEPT], true),
            (&[KEPT; 4], false),
        ] {
            let expected = whole(body(pieces)).await;
            for is_begun in [true, false] {
                let mut held = Held::new(Request::new(body(pieces)));
                if is_begun {
                    held.read().await.unwrap();
                }
                held.read_up_to(2 * KEPT).await.unwrap();
                assert_eq!(held.bytes().is_some(), is_read);
                let request = held.into_request().unwrap();
                assert_eq!(whole(request.into_body()).await, expected);
            }
        }
    }

    #[tokio::test]
    async fn nothing_is_read_of_a_body_that_nobody_sends() {
        let polled = Arc::new(AtomicBool::new(false));
        let noted = polled.clone();
        let body = stream::once(async move {
            noted.store(true, Ordering::Relaxed);
            Ok::<_, std::io::Error>(Bytes::from_static(b"body"))
        });
        let held = Held::new(Request::new(Body::from_stream(body)));
        let request = held.into_request().unwrap();
        assert!(!polled.load(Ordering::Relaxed));
        assert_eq!(whole(request.into_body()).await, "body");
    }

    #[tokio::test]
    async fn a_body_that_says_its_length_is_not_read_if_it_is_long() {
        let mut held = Held::new(Request::new(Body::from(vec![b'x'; KEPT + 1])));
        held.read().now_or_never().unwrap().unwrap();
        assert!(matches!(held.body, HeldBody::Long(_)));
    }

    #[tokio::test]
    async fn a_client_that_breaks_off_is_an_error() {
        let pieces = [
            Ok(Bytes::from_static(b"{\"json")),
            Err(std::io::Error::other("reset")),
        ];
        let mut held = Held::new(Request::new(Body::from_stream(stream::iter(pieces))));
        assert_eq!(held.read().await, Err(Refusal::BrokeOff));
        assert!(held.into_request().is_none());
    }
}
