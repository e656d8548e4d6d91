//! The internal header fields that instances add to relayed requests and responses.
//!
//! Clients never receive these fields from another instance, and cannot send them either:
//!
//! 1. The layer strips the fields from every client request before any other code reads it, and the relay strips them from every response.
//! 2. A peer's request is marked by an extension, which nothing sent over a connection can forge.
//! 3. A response without an `mcp-cluster` field is not accepted as a response from a peer, no matter what its status is. The address may
//!    have been reassigned, or the peer may have rejected the secret with an unmarked 403.

use std::{fmt, net::SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue};
use subtle::{Choice, ConstantTimeEq as _};

use crate::ids::Incarnation;

/// In a request, the shared secret. In a response, the incarnation of the responding instance.
///
/// [`MOVED`] precedes the incarnation if that instance does not have the session.
static CLUSTER: HeaderName = HeaderName::from_static("mcp-cluster");

/// The address of the client whose request is being relayed.
static CLIENT: HeaderName = HeaderName::from_static("mcp-cluster-client");

/// Precedes the incarnation in a response from an instance that does not have the session.
///
/// A 421 on its own could have been sent by the application.
const MOVED: &str = "moved ";

/// The value to send if no secret is set, which distinguishes relayed requests from others.
const NO_SECRET: &str = "relay";

/// Marks a request that arrived on the peer listener.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FromPeer;

/// The shared bearer secret, and another secret accepted during rotation.
#[derive(Clone)]
pub(crate) struct Secret {
    sent: HeaderValue,
    also_accepted: Option<HeaderValue>,
}

/// The error for an unusable secret.
///
/// The secret is empty, starts or ends with whitespace, or contains characters not allowed in a header field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidSecret;

/// Who answered a relayed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Responder {
    /// An instance that answered the request itself, if only by asking for a retry.
    Peer(Incarnation),
    /// An instance that does not have the session.
    ///
    /// By now a different instance may have the owner's address, so compare the incarnation with the owner's.
    Moved(Incarnation),
    /// Not a peer, or a peer with a different secret.
    Unmarked,
}

/// Returns `true` if `mcp-{name}` is an internal field.
pub(crate) fn is_internal(name: &str) -> bool {
    name == "cluster" || name == "cluster-client"
}

/// Removes the internal fields, which only peers may set.
pub(crate) fn strip(headers: &mut HeaderMap) {
    headers.remove(&CLUSTER);
    headers.remove(&CLIENT);
}

// === impl Secret ===

impl Secret {
    pub(crate) fn new(secret: &str) -> Result<Self, InvalidSecret> {
        let sent = field_value(secret)?;
        Ok(Self {
            sent,
            also_accepted: None,
        })
    }

    /// Accepts another secret too.
    pub(crate) fn also_accept(self, other: &str) -> Result<Self, InvalidSecret> {
        let also_accepted = Some(field_value(other)?);
        Ok(Self {
            also_accepted,
            ..self
        })
    }

    /// Replaces a request's internal fields with the secret and, if known, the client's address.
    pub(crate) fn attach(&self, headers: &mut HeaderMap, client: Option<SocketAddr>) {
        strip(headers);
        headers.insert(&CLUSTER, self.sent.clone());
        let client = client.and_then(|client| HeaderValue::try_from(client.to_string()).ok());
        if let Some(client) = client {
            headers.insert(&CLIENT, client);
        }
    }

    /// Returns `true` if a request carries exactly one secret and that secret is accepted.
    ///
    /// Both secrets are compared in constant time.
    pub(crate) fn verify(&self, headers: &HeaderMap) -> bool {
        let mut values = headers.get_all(&CLUSTER).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return false;
        };
        let matches = |secret: &HeaderValue| value.as_bytes().ct_eq(secret.as_bytes());
        let matches_other = self.also_accepted.as_ref().map_or(Choice::from(0), matches);
        (matches(&self.sent) | matches_other).into()
    }
}

impl Default for Secret {
    fn default() -> Self {
        Self {
            sent: HeaderValue::from_static(NO_SECRET),
            also_accepted: None,
        }
    }
}

fn field_value(secret: &str) -> Result<HeaderValue, InvalidSecret> {
    let mut value = HeaderValue::from_str(secret).map_err(|_| InvalidSecret)?;
    // A field value loses its surrounding whitespace in transit.
    if secret.is_empty() || secret.trim() != secret {
        return Err(InvalidSecret);
    }
    value.set_sensitive(true);
    Ok(value)
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Returns the client's address, or `None` if the relaying peer does not report a valid one.
pub(crate) fn client(headers: &HeaderMap) -> Option<SocketAddr> {
    headers.get(&CLIENT)?.to_str().ok()?.parse().ok()
}

/// Marks a response as sent by this instance.
pub(crate) fn mark(headers: &mut HeaderMap, this_instance: Incarnation) {
    strip(headers);
    if let Ok(value) = HeaderValue::try_from(this_instance.to_string()) {
        headers.insert(&CLUSTER, value);
    }
}

/// Marks a response as sent by this instance, which does not have the session.
pub(crate) fn mark_moved(headers: &mut HeaderMap, this_instance: Incarnation) {
    if let Ok(value) = HeaderValue::try_from(format!("{MOVED}{this_instance}")) {
        headers.insert(&CLUSTER, value);
    }
}

// === impl Responder ===

impl Responder {
    /// Determines who sent a response, and strips the response's internal fields.
    pub(crate) fn take(headers: &mut HeaderMap) -> Self {
        let value = headers.remove(&CLUSTER);
        strip(headers);
        let value = value.as_ref().and_then(|value| value.to_str().ok());
        let responder = value.and_then(|value| match value.strip_prefix(MOVED) {
            Some(by) => by.parse().ok().map(Self::Moved),
            None => value.parse().ok().map(Self::Peer),
        });
        responder.unwrap_or(Self::Unmarked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(values: &[&str]) -> HeaderMap {
        let values = values
            .iter()
            .map(|value| (CLUSTER.clone(), value.parse().unwrap()));
        values.collect()
    }

    #[test]
    fn only_the_complete_secret_in_one_field_is_accepted() {
        let secret = Secret::new("a long secret").unwrap();
        assert!(secret.verify(&head(&["a long secret"])));
        for wrong in [
            &[][..],
            &[""],
            &["a long secre"],
            &["a long secret "],
            &["a long secret", "a long secret"],
            &[NO_SECRET],
        ] {
            assert!(!secret.verify(&head(wrong)), "{wrong:?}");
        }
        assert!(Secret::default().verify(&head(&[NO_SECRET])));
        assert!(!Secret::default().verify(&HeaderMap::new()));
    }

    #[test]
    fn of_two_secrets_the_first_is_sent_and_both_are_accepted() {
        let both = Secret::new("new").unwrap().also_accept("old").unwrap();
        for (value, is_accepted) in [("new", true), ("old", true), ("newold", false), ("", false)] {
            assert_eq!(both.verify(&head(&[value])), is_accepted, "{value}");
        }
        assert!(!both.verify(&head(&["new", "old"])));
        let mut headers = HeaderMap::new();
        both.attach(&mut headers, None);
        assert_eq!(headers[&CLUSTER], "new");
        assert_eq!(both.also_accept("a\nb").unwrap_err(), InvalidSecret);
    }

    #[test]
    fn a_secret_that_a_field_cannot_carry_is_invalid() {
        for secret in ["", " ", "a ", "a\nb", "a\0"] {
            assert_eq!(
                Secret::new(secret).unwrap_err(),
                InvalidSecret,
                "{secret:?}"
            );
        }
    }

    #[test]
    fn internal_fields_of_a_relayed_head_are_those_of_this_instance() {
        let mut headers = head(&["forged", "forged"]);
        headers.insert(&CLIENT, "10.0.0.1:1".parse().unwrap());
        let secret = Secret::new("secret").unwrap();
        secret.attach(&mut headers, None);
        assert!(secret.verify(&headers));
        assert_eq!(client(&headers), None);

        let address: SocketAddr = "[2001:db8::1]:4711".parse().unwrap();
        secret.attach(&mut headers, Some(address));
        assert_eq!(client(&headers), Some(address));
        strip(&mut headers);
        assert!(headers.is_empty());
        assert!(!format!("{secret:?} {headers:?}").contains("secret"));
    }

    #[test]
    fn an_answer_counts_as_a_peers_only_if_it_is_marked() {
        let me: Incarnation = "0123456789abcdef".parse().unwrap();
        let mut headers = head(&["forged"]);
        mark(&mut headers, me);
        assert_eq!(Responder::take(&mut headers), Responder::Peer(me));
        assert_eq!(Responder::take(&mut headers), Responder::Unmarked);
        mark_moved(&mut headers, me);
        assert_eq!(headers[&CLUSTER], "moved 0123456789abcdef");
        assert_eq!(Responder::take(&mut headers), Responder::Moved(me));
        for value in ["", "relay", "0123", "moved", "moved ", "moved 0123"] {
            assert_eq!(Responder::take(&mut head(&[value])), Responder::Unmarked);
        }
    }
}
