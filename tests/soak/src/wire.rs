//! Incremental HTTP/1.1 parsers: responses with their events, and requests. They use no sockets.

use bytes::BytesMut;
use http::HeaderMap;
use serde_json::Value;
use test_support::{
    SseEvent, SseItem,
    body::{BodyDecoder, Decoded},
    head,
    sse::SseReader,
};

/// An observable item in a connection's responses.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    Head {
        status: u16,
        session: Option<String>,
    },
    Event(Event),
    /// The response is complete.
    End,
}

/// An event from a stream, or a whole JSON body.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub id: Option<String>,
    pub message: Option<Value>,
}

/// The responses on one connection.
#[derive(Debug, Default)]
pub struct Responses {
    bytes: BytesMut,
    /// The current response, from its head until it ends.
    body: Option<Body>,
}

#[derive(Debug)]
struct Body {
    decoder: BodyDecoder,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Stream(SseReader),
    Json(Vec<u8>),
}

/// A request from a client.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub session: Option<String>,
    pub last_event_id: Option<String>,
    pub message: Option<Value>,
}

/// The requests on one connection.
#[derive(Debug, Default)]
pub struct Requests {
    bytes: BytesMut,
    /// The current request: its head, its decoder, and the body received so far.
    head: Option<(Request, BodyDecoder, Vec<u8>)>,
}

// === impl Responses ===

impl Responses {
    /// Adds bytes. Returns the items that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Item> {
        self.bytes.extend_from_slice(bytes);
        let mut items = Vec::new();
        while self.step(&mut items) {}
        items
    }

    /// Returns `true` if the head or the body of a response is incomplete.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.body.is_some() || !self.bytes.is_empty()
    }

    /// Parses the next part. Returns `false` if that part is still incomplete.
    fn step(&mut self, items: &mut Vec<Item>) -> bool {
        let Some(body) = &mut self.body else {
            return self.parse_head(items);
        };
        match body.decoder.decode(&mut self.bytes) {
            Decoded::Data(data) => {
                body.content.push(&data, items);
                true
            }
            Decoded::More => false,
            Decoded::End => {
                items.extend(body.content.whole());
                items.push(Item::End);
                self.body = None;
                true
            }
        }
    }

    /// Parses a head, skipping informational ones. Returns `false` if it is still incomplete.
    fn parse_head(&mut self, items: &mut Vec<Item>) -> bool {
        let Some((line, headers)) = head::take(&mut self.bytes) else {
            return false;
        };
        let status = head::status(&line);
        if (100..200).contains(&status) {
            return true;
        }
        let content_type = field(&headers, "content-type");
        let content = if content_type.is_some_and(|value| value.starts_with("text/event-stream")) {
            Content::Stream(SseReader::default())
        } else {
            Content::Json(Vec::new())
        };
        self.body = Some(Body {
            decoder: BodyDecoder::announced(&headers),
            content,
        });
        let session = field(&headers, "mcp-session-id");
        items.push(Item::Head { status, session });
        true
    }
}

// === impl Content ===

impl Content {
    fn push(&mut self, data: &[u8], items: &mut Vec<Item>) {
        let reader = match self {
            Self::Stream(reader) => reader,
            Self::Json(text) => return text.extend_from_slice(data),
        };
        reader.push(data);
        while let Some(item) = reader.pop() {
            let SseItem::Event(SseEvent { id, data, .. }) = item else {
                continue;
            };
            let message = serde_json::from_str(&data).ok();
            if id.is_some() || message.is_some() {
                items.push(Item::Event(Event { id, message }));
            }
        }
    }

    /// Returns a complete JSON body as an event. `None` if this is a stream or the body is not JSON.
    fn whole(&self) -> Option<Item> {
        let Self::Json(text) = self else {
            return None;
        };
        let message = Some(serde_json::from_slice(text).ok()?);
        Some(Item::Event(Event { id: None, message }))
    }
}

// === impl Requests ===

impl Requests {
    /// Adds bytes. Returns the requests that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Request> {
        self.bytes.extend_from_slice(bytes);
        std::iter::from_fn(|| self.next()).collect()
    }

    fn next(&mut self) -> Option<Request> {
        if self.head.is_none() {
            let (line, headers) = head::take(&mut self.bytes)?;
            let request = Request {
                method: line.split(' ').next().unwrap_or_default().to_owned(),
                session: field(&headers, "mcp-session-id"),
                last_event_id: field(&headers, "last-event-id"),
                message: None,
            };
            self.head = Some((request, BodyDecoder::announced(&headers), Vec::new()));
        }
        let (_, decoder, body) = self.head.as_mut()?;
        loop {
            match decoder.decode(&mut self.bytes) {
                Decoded::Data(data) => body.extend_from_slice(&data),
                Decoded::More => return None,
                Decoded::End => break,
            }
        }
        let (request, _, body) = self.head.take()?;
        let message = serde_json::from_slice(&body).ok();
        Some(Request { message, ..request })
    }
}

fn field(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nmcp-session-id: s\r\n\
        transfer-encoding: chunked\r\n\r\n8\r\nid: 0/0\n\r\n9\r\ndata: {}\n\r\n1\r\n\n\r\n0\r\n\r\n";

    #[test]
    fn a_response_is_parsed_however_it_is_split() {
        let whole = Responses::default().feed(STREAM.as_bytes());
        let mut reader = Responses::default();
        let bytewise: Vec<_> = STREAM
            .bytes()
            .flat_map(|byte| reader.feed(&[byte]))
            .collect();
        assert_eq!(whole, bytewise);
        assert_eq!(whole.len(), 3);
        let id = Some("0/0".to_owned());
        assert!(
            matches!(&whole[1], Item::Event(event) if event.id == id && event.message.is_some())
        );
        assert!(!reader.is_open());
    }

    #[test]
    fn a_request_is_parsed_when_it_is_complete() {
        let mut requests = Requests::default();
        let post = "POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}GET / HTTP/1.1\r\nLast-Event-ID: 0/1\r\n\r\n";
        assert!(requests.feed(&post.as_bytes()[..39]).is_empty());
        let parsed = requests.feed(&post.as_bytes()[39..]);
        assert_eq!(parsed.len(), 2);
        assert_eq!(parsed[1].last_event_id.as_deref(), Some("0/1"));
    }
}
