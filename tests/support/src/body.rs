//! Finds the body of an HTTP/1.1 message behind its head (RFC 9112, sections 6 and 7).

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;

/// An incremental decoder. It takes bytes of the body off the front of a buffer.
#[derive(Debug)]
pub struct BodyDecoder {
    state: State,
}

/// The result of [`BodyDecoder::decode`].
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Bytes of the body, never empty.
    Data(Bytes),
    /// Nothing yet; more bytes are needed.
    More,
    /// The body has ended. What remains in the buffer is after it.
    End,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `content-length`, with the number of missing bytes.
    Length(u64),
    /// At the line with a chunk's size.
    ChunkSize,
    /// In a chunk, with the number of missing bytes.
    Chunk(u64),
    /// At the line end after a chunk.
    ChunkEnd,
    /// At a trailer line, or at the blank one that ends everything.
    Trailer,
    /// Everything until the connection closes.
    UntilClose,
    /// After the end.
    Ended,
}

// === impl BodyDecoder ===

impl BodyDecoder {
    /// Returns the decoder of a response that has no body.
    pub fn empty() -> Self {
        Self {
            state: State::Ended,
        }
    }

    /// Returns the decoder of the response with this head, except for a response to HEAD.
    pub fn new(status: u16, headers: &HeaderMap) -> Self {
        let state = match announced(headers) {
            _ if matches!(status, 100..=199 | 204 | 304) => State::Ended,
            announced => announced.unwrap_or(State::UntilClose),
        };
        Self { state }
    }

    /// Returns the decoder of a message that has a body only if its head announces one.
    ///
    /// That is any request, and a response from a server that keeps connections open.
    pub fn announced(headers: &HeaderMap) -> Self {
        Self {
            state: announced(headers).unwrap_or(State::Ended),
        }
    }

    /// Takes the next piece of the body off `buffer`. Skips trailers.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Decoded {
        loop {
            match self.state {
                State::Length(0) | State::Ended => {
                    self.state = State::Ended;
                    return Decoded::End;
                }
                State::Chunk(0) => self.state = State::ChunkEnd,
                State::UntilClose | State::Length(_) | State::Chunk(_) => return self.data(buffer),
                State::ChunkSize | State::ChunkEnd | State::Trailer => match line(buffer) {
                    Some(line) => self.state = self.after(&line),
                    None => return Decoded::More,
                },
            }
        }
    }

    /// Returns `true` if the whole body was decoded. If `is_closed`, a body that ends with its connection is complete.
    pub fn is_complete(&self, is_closed: bool) -> bool {
        match self.state {
            State::Length(0) | State::Ended => true,
            State::UntilClose => is_closed,
            _ => false,
        }
    }

    /// Takes plain bytes that belong to the body.
    fn data(&mut self, buffer: &mut BytesMut) -> Decoded {
        if buffer.is_empty() {
            return Decoded::More;
        }
        let (State::Length(left) | State::Chunk(left)) = &mut self.state else {
            return Decoded::Data(buffer.split().freeze());
        };
        let taken = usize::try_from(*left).map_or(buffer.len(), |left| left.min(buffer.len()));
        *left -= taken as u64;
        Decoded::Data(buffer.split_to(taken).freeze())
    }

    /// Returns the state after a complete line.
    fn after(&self, line: &str) -> State {
        match self.state {
            State::ChunkSize => match chunk_size(line) {
                0 => State::Trailer,
                size => State::Chunk(size),
            },
            State::ChunkEnd => State::ChunkSize,
            _ if line.is_empty() => State::Ended,
            _ => State::Trailer,
        }
    }
}

/// Returns the initial state if the head announces a body, and `None` otherwise.
fn announced(headers: &HeaderMap) -> Option<State> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if header("transfer-encoding") == Some("chunked") {
        return Some(State::ChunkSize);
    }
    let length = header("content-length")?;
    Some(State::Length(length.parse().expect("a length")))
}

/// Takes a line off `buffer`, without its end. Returns `None` if it is incomplete.
fn line(buffer: &mut BytesMut) -> Option<String> {
    let end = buffer.windows(2).position(|two| two == b"\r\n")?;
    let line = buffer.split_to(end);
    buffer.advance(2);
    Some(String::from_utf8(line.into()).expect("a line of text"))
}

fn chunk_size(line: &str) -> u64 {
    let digits = line.split(';').next().unwrap_or_default().trim();
    u64::from_str_radix(digits, 16).expect("a chunk size")
}
