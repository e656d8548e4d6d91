//! Binds stored events to their session by adding a MAC to every event id.
//!
//! On its own, rmcp would replay stored events to any session (`stored_events` in ARCHITECTURE.md, Workarounds). With an event
//! store, every event id sent to a client therefore carries a keyed MAC over the id and the session, and a resume is passed on
//! only if the MAC matches its session. This requires no state.
//!
//! 1. An id without a valid MAC is never passed on.
//! 2. The registry and the client see the sealed id; the inner manager and its store see the plain id.
//! 3. Without an event store, no id is sealed.

use std::{
    array,
    hash::{BuildHasher, RandomState},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use futures_util::{Stream, StreamExt, stream};
use pin_project_lite::pin_project;
use rmcp::transport::streamable_http_server::session::{
    EventId, EventStore, EventStoreError, EventStream, ServerSseMessage, SessionId,
};
use sha2::{Digest, Sha256};

/// Separates an id from its MAC.
const SEPARATOR: char = '.';

/// Length of a MAC in bytes. It is sent as hexadecimal digits, two per byte.
///
/// This truncates HMAC-SHA256 to half its length, which RFC 2104 allows.
const MAC_BYTES: usize = 16;

/// Block size of SHA-256, to which HMAC pads its key.
const BLOCK: usize = 64;

/// A key that binds event ids to sessions.
#[derive(Clone)]
pub(super) struct EventIdKey(Arc<MacKey>);

/// The inner and outer HMAC-SHA256 states after the key has been absorbed.
struct MacKey {
    inner: Sha256,
    outer: Sha256,
}

/// Seals event ids for one session, or for clients without a session.
#[derive(Clone)]
pub(super) struct Seal {
    key: EventIdKey,
    session: Option<SessionId>,
}

pin_project! {
    /// An event stream that seals event ids, or passes them through unchanged if it has no seal.
    pub(super) struct Sealed<S> {
        #[pin]
        events: S,
        // Boxed, because few streams have a seal.
        seal: Option<Box<Seal>>,
    }
}

/// Wraps a store for clients without a session.
struct Sessionless {
    store: Arc<dyn EventStore>,
    seal: Seal,
}

type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, EventStoreError>> + Send + 'a>>;

// === impl EventIdKey ===

impl EventIdKey {
    /// Returns the process-wide key, shared by all managers without a key of their own.
    ///
    /// They must share a key, because they might also share a store.
    pub(super) fn process_wide() -> Self {
        static PROCESS_WIDE: OnceLock<EventIdKey> = OnceLock::new();
        let random = || {
            // std seeds its 128-bit keys from the system's random number generator.
            let random = RandomState::new();
            let parts: [[u8; 8]; 4] = array::from_fn(|part| random.hash_one(part).to_be_bytes());
            Self::new(parts.as_flattened())
        };
        PROCESS_WIDE.get_or_init(random).clone()
    }

    /// Creates a key from bytes of any length.
    pub(super) fn new(key: &[u8]) -> Self {
        let mut block = [0; BLOCK];
        let long: [u8; 32];
        let key = if key.len() > BLOCK {
            long = Sha256::digest(key).into();
            &long
        } else {
            key
        };
        for (to, from) in block.iter_mut().zip(key) {
            *to = *from;
        }
        let keyed = |pad: u8| Sha256::new_with_prefix(block.map(|byte| byte ^ pad));
        Self(Arc::new(MacKey {
            inner: keyed(0x36),
            outer: keyed(0x5c),
        }))
    }

    pub(super) fn seal_for(&self, session: Option<&SessionId>) -> Seal {
        Seal {
            key: self.clone(),
            session: session.cloned(),
        }
    }

    /// Wraps a store for clients without a session.
    pub(super) fn wrap(&self, store: Arc<dyn EventStore>) -> Arc<dyn EventStore> {
        let seal = self.seal_for(None);
        Arc::new(Sessionless { store, seal })
    }

    fn hmac(&self, parts: [&[u8]; 4]) -> [u8; 32] {
        let MacKey { inner, outer } = &*self.0;
        let inner = parts
            .iter()
            .fold(inner.clone(), |inner, part| inner.chain_update(part));
        outer
            .clone()
            .chain_update(inner.finalize())
            .finalize()
            .into()
    }
}

// === impl Seal ===

impl Seal {
    /// Returns the sealed id, as the client receives it.
    pub(super) fn seal(&self, id: &str) -> EventId {
        let mac = self.mac(id);
        format!("{id}{SEPARATOR}{mac:032x}")
    }

    /// Returns the plain id, or `None` if `sealed` is not an event id of this session.
    pub(super) fn open<'a>(&self, sealed: &'a str) -> Option<&'a str> {
        let (id, mac) = sealed.rsplit_once(SEPARATOR)?;
        // `from_str_radix` also accepts upper case and `+`, which would give one event several ids.
        let is_canonical = mac.len() == 2 * MAC_BYTES
            && mac
                .bytes()
                .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let mac = u128::from_str_radix(mac, 16)
            .ok()
            .filter(|_| is_canonical)?;
        // Comparing integers takes constant time.
        (mac == self.mac(id)).then_some(id)
    }

    fn mac(&self, id: &str) -> u128 {
        // The length separates the session from the event id, and distinguishes an empty session id from none.
        let (session, length) = match &self.session {
            Some(session) => (session.as_bytes(), session.len() as u64),
            None => (&[][..], u64::MAX),
        };
        let mac = self
            .key
            .hmac([b"event id\0", &length.to_be_bytes(), session, id.as_bytes()]);
        let [first, _] = halves(mac);
        u128::from_be_bytes(first)
    }

    fn seal_event(&self, event: &mut ServerSseMessage) {
        if let Some(id) = &mut event.event_id {
            *id = self.seal(id);
        }
    }
}

fn halves(mac: [u8; 32]) -> [[u8; MAC_BYTES]; 2] {
    let (halves, _) = mac.as_chunks::<MAC_BYTES>();
    <[_; 2]>::try_from(halves).unwrap_or_default()
}

// === impl Sealed ===

impl<S> Sealed<S> {
    pub(super) fn new(events: S, seal: Option<Box<Seal>>) -> Self {
        Self { events, seal }
    }
}

impl<S: Stream<Item = ServerSseMessage>> Stream for Sealed<S> {
    type Item = ServerSseMessage;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.project();
        let mut next = this.events.poll_next(cx);
        if let Some(seal) = this.seal
            && let Poll::Ready(Some(event)) = &mut next
        {
            seal.seal_event(event);
        }
        next
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.events.size_hint()
    }
}

// === impl Sessionless ===

/// Written out the way `async_trait` would expand it.
impl EventStore for Sessionless {
    fn store_event<'s, 'i, 'e, 'a>(
        &'s self,
        stream_id: &'i str,
        event: &'e ServerSseMessage,
    ) -> StoreFuture<'a, EventId>
    where
        's: 'a,
        'i: 'a,
        'e: 'a,
        Self: 'a,
    {
        let write = self.store.store_event(stream_id, event);
        Box::pin(async { write.await.map(|id| self.seal.seal(&id)) })
    }

    fn replay_events_after<'s, 'i, 'a>(
        &'s self,
        last_event_id: &'i str,
    ) -> StoreFuture<'a, EventStream>
    where
        's: 'a,
        'i: 'a,
        Self: 'a,
    {
        Box::pin(async {
            let Some(id) = self.seal.open(last_event_id) else {
                let empty: EventStream = Box::pin(stream::empty());
                return Ok(empty);
            };
            let replayed = self.store.replay_events_after(id).await?;
            let sealed = Sealed::new(replayed, Some(Box::new(self.seal.clone())));
            let mut priming_event = ServerSseMessage::default();
            priming_event.event_id = Some(last_event_id.to_owned());
            // Without an event, a client using the TypeScript SDK would not resume again.
            let events = async {
                let mut sealed = Box::pin(sealed.peekable());
                match sealed.as_mut().peek().await {
                    Some(_) => sealed.left_stream(),
                    None => stream::iter([priming_event]).right_stream(),
                }
            };
            let events: EventStream = Box::pin(stream::once(events).flatten());
            Ok(events)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: &str) -> SessionId {
        id.into()
    }

    /// Test cases 1, 2 and 6 of RFC 4231.
    #[test]
    fn the_mac_is_hmac_sha256() {
        let cases: [(&[u8], &[u8], &str); 3] = [
            (
                &[0x0b; 20],
                b"Hi There",
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
            ),
            (
                b"Jefe",
                b"what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ];
        for (key, data, expected) in cases {
            let mac = EventIdKey::new(key).hmac([data, b"", b"", b""]);
            let mac: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(mac, expected);
        }
    }

    #[test]
    fn an_event_id_opens_for_its_own_session_and_for_no_other() {
        let key = EventIdKey::new(b"a key");
        let seal_for = |id: Option<&str>| key.seal_for(id.map(session).as_ref());
        let sealed = seal_for(Some("a")).seal("event.1");
        assert_eq!(seal_for(Some("a")).open(&sealed), Some("event.1"));
        for other in [Some("b"), Some(""), Some("aevent"), None] {
            assert_eq!(seal_for(other).open(&sealed), None, "{other:?}");
        }
        let sealed = seal_for(None).seal("1");
        assert_eq!(seal_for(None).open(&sealed), Some("1"));
        assert_eq!(seal_for(Some("")).open(&sealed), None);
    }

    #[test]
    fn a_changed_event_id_opens_for_no_session() {
        let seal = EventIdKey::new(b"a key").seal_for(Some(&session("a")));
        let sealed = seal.seal("1");
        let (_, mac) = sealed.split_once('.').unwrap();
        let other_key = EventIdKey::new(b"another").seal_for(Some(&session("a")));
        assert_eq!(other_key.open(&sealed), None);
        for changed in [
            "1".to_owned(),
            "1.".to_owned(),
            format!("2.{mac}"),
            format!("1.{}", mac.to_uppercase()),
            format!("1.+{}", &mac[1..]),
            format!("1.0{mac}"),
            format!("1.{}", &mac[1..]),
            sealed.clone() + ".",
        ] {
            assert_eq!(seal.open(&changed), None, "{changed}");
        }
    }

    #[test]
    fn managers_without_a_key_of_their_own_share_one() {
        let seal = |key: EventIdKey| key.seal_for(Some(&session("a")));
        let sealed = seal(EventIdKey::process_wide()).seal("1");
        assert_eq!(seal(EventIdKey::process_wide()).open(&sealed), Some("1"));
    }
}
