//! Takes the head of an HTTP/1.1 message off the received bytes (RFC 9112, section 2.1).

use bytes::{Buf, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};

/// Removes a head from `received` and returns its first line and its fields.
///
/// The bytes that follow it stay. Returns `None` if the head is still incomplete.
pub fn take(received: &mut BytesMut) -> Option<(String, HeaderMap)> {
    let end = received.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = received.split_to(end);
    received.advance(4);
    let head = std::str::from_utf8(&head).expect("a head is text");
    let (first, fields) = head.split_once("\r\n").unwrap_or((head, ""));
    let fields = fields.split_terminator("\r\n").map(field).collect();
    Some((first.to_owned(), fields))
}

/// Returns the status code from a response's first line.
pub fn status(line: &str) -> u16 {
    let status = line.split(' ').nth(1).expect("a status line");
    status.parse().expect("a status code")
}

fn field(line: &str) -> (HeaderName, HeaderValue) {
    let (name, value) = line.split_once(':').expect("a header field");
    (
        name.parse().expect("a header name"),
        value.trim().parse().expect("a header value"),
    )
}
