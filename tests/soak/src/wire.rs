//! Reads the bytes of HTTP/1.1 as they come: responses with their events, and requests. Knows no sockets.

use serde_json::Value;

/// What can be seen in the responses of one connection.
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

/// An event of a stream, or a whole JSON body.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub id: Option<String>,
    pub message: Option<Value>,
}

/// The responses of one connection.
#[derive(Debug, Default)]
pub struct Responses {
    bytes: Vec<u8>,
    body: Body,
    /// Of the body, without its transfer coding, what no event has taken yet.
    text: Vec<u8>,
    is_stream: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Body {
    /// A head comes next.
    #[default]
    None,
    Length(usize),
    /// The rest of a chunk, or the line with the size of the next.
    Chunk(usize),
    ChunkEnd,
    Trailer,
}

/// A request of a client.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub session: Option<String>,
    pub last_event_id: Option<String>,
    pub message: Option<Value>,
}

/// The requests of one connection.
#[derive(Debug, Default)]
pub struct Requests {
    bytes: Vec<u8>,
}

// === impl Responses ===

impl Responses {
    /// Takes bytes, and says what they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Item> {
        self.bytes.extend_from_slice(bytes);
        let mut items = Vec::new();
        while self.step(&mut items) {}
        items
    }

    /// The head or the body of a response is there in part.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.body != Body::None || !self.bytes.is_empty()
    }

    fn step(&mut self, items: &mut Vec<Item>) -> bool {
        match self.body {
            Body::None => self.head(items),
            Body::Length(0) => {
                self.end(items);
                true
            }
            Body::Length(left) => {
                let taken = self.take(left);
                self.body = Body::Length(left - taken);
                taken > 0
            }
            Body::Chunk(0) => match self.line() {
                Some(size) => {
                    let size = size.split(';').next().unwrap_or_default().trim();
                    self.body = match usize::from_str_radix(size, 16) {
                        Ok(0) | Err(_) => Body::Trailer,
                        Ok(size) => Body::Chunk(size),
                    };
                    true
                }
                None => false,
            },
            Body::Chunk(left) => {
                let taken = self.take(left);
                self.events(items);
                self.body = match left - taken {
                    0 => Body::ChunkEnd,
                    left => Body::Chunk(left),
                };
                taken > 0
            }
            Body::ChunkEnd => self.line().is_some_and(|_| {
                self.body = Body::Chunk(0);
                true
            }),
            Body::Trailer => self.line().is_some_and(|line| {
                if line.is_empty() {
                    self.end(items);
                }
                true
            }),
        }
    }

    fn head(&mut self, items: &mut Vec<Item>) -> bool {
        let Some((lines, rest)) = head(&self.bytes) else {
            return false;
        };
        self.bytes.drain(..rest);
        let status = lines[0]
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        let status = status.unwrap_or(0);
        if (100..200).contains(&status) {
            return true;
        }
        self.is_stream =
            field(&lines, "content-type").is_some_and(|it| it.starts_with("text/event-stream"));
        self.text.clear();
        self.body = match field(&lines, "transfer-encoding") {
            Some(_) => Body::Chunk(0),
            None => Body::Length(
                field(&lines, "content-length")
                    .and_then(|it| it.parse().ok())
                    .unwrap_or(0),
            ),
        };
        let session = field(&lines, "mcp-session-id");
        items.push(Item::Head { status, session });
        true
    }

    fn take(&mut self, limit: usize) -> usize {
        let taken = self.bytes.len().min(limit);
        self.text.extend(self.bytes.drain(..taken));
        taken
    }

    fn line(&mut self) -> Option<String> {
        let end = self.bytes.windows(2).position(|it| it == b"\r\n")?;
        let line = String::from_utf8_lossy(&self.bytes[..end]).into_owned();
        self.bytes.drain(..end + 2);
        Some(line)
    }

    fn events(&mut self, items: &mut Vec<Item>) {
        while let Some(end) = self
            .text
            .windows(2)
            .position(|it| it == b"\n\n")
            .filter(|_| self.is_stream)
        {
            let block: Vec<u8> = self.text.drain(..end + 2).collect();
            let (mut id, mut data) = (None, String::new());
            for line in String::from_utf8_lossy(&block).lines() {
                if let Some(value) = line.strip_prefix("id:") {
                    id = Some(value.trim().to_owned());
                } else if let Some(value) = line.strip_prefix("data:") {
                    data.push_str(value.trim_start());
                }
            }
            let message = serde_json::from_str(&data).ok();
            if id.is_some() || message.is_some() {
                items.push(Item::Event(Event { id, message }));
            }
        }
    }

    fn end(&mut self, items: &mut Vec<Item>) {
        self.events(items);
        let message = serde_json::from_slice(&self.text).ok();
        if !self.is_stream && message.is_some() {
            items.push(Item::Event(Event { id: None, message }));
        }
        self.text.clear();
        self.body = Body::None;
        items.push(Item::End);
    }
}

// === impl Requests ===

impl Requests {
    /// Takes bytes, and gives the requests that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<Request> {
        self.bytes.extend_from_slice(bytes);
        std::iter::from_fn(|| self.next()).collect()
    }

    fn next(&mut self) -> Option<Request> {
        let (lines, at) = head(&self.bytes)?;
        let (body, end) = match field(&lines, "transfer-encoding") {
            Some(_) => dechunked(&self.bytes[at..])?,
            None => {
                let length = field(&lines, "content-length")
                    .and_then(|it| it.parse().ok())
                    .unwrap_or(0);
                (self.bytes.get(at..at + length)?.to_vec(), length)
            }
        };
        self.bytes.drain(..at + end);
        Some(Request {
            method: lines[0].split(' ').next().unwrap_or_default().to_owned(),
            session: field(&lines, "mcp-session-id"),
            last_event_id: field(&lines, "last-event-id"),
            message: serde_json::from_slice(&body).ok(),
        })
    }
}

/// The lines of a head, and where the body begins.
fn head(bytes: &[u8]) -> Option<(Vec<String>, usize)> {
    let end = bytes.windows(4).position(|it| it == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]);
    Some((head.split("\r\n").map(str::to_owned).collect(), end + 4))
}

fn field(lines: &[String], name: &str) -> Option<String> {
    let mut fields = lines.iter().skip(1).filter_map(|line| line.split_once(':'));
    fields
        .find(|(field, _)| field.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim().to_owned())
}

fn dechunked(bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    let (mut body, mut at) = (Vec::new(), 0);
    loop {
        let line = bytes.get(at..)?.windows(2).position(|it| it == b"\r\n")?;
        let size =
            usize::from_str_radix(std::str::from_utf8(&bytes[at..at + line]).ok()?.trim(), 16)
                .ok()?;
        at += line + 2;
        body.extend_from_slice(bytes.get(at..at + size)?);
        at += size + 2;
        if bytes.len() < at {
            return None;
        }
        if size == 0 {
            return Some((body, at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nmcp-session-id: s\r\n\
        transfer-encoding: chunked\r\n\r\n8\r\nid: 0/0\n\r\n9\r\ndata: {}\n\r\n1\r\n\n\r\n0\r\n\r\n";

    #[test]
    fn a_response_is_read_however_it_is_cut() {
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
    fn a_request_is_read_when_it_is_whole() {
        let mut requests = Requests::default();
        let post = "POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}GET / HTTP/1.1\r\nLast-Event-ID: 0/1\r\n\r\n";
        assert!(requests.feed(&post.as_bytes()[..39]).is_empty());
        let found = requests.feed(&post.as_bytes()[39..]);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].last_event_id.as_deref(), Some("0/1"));
    }
}
