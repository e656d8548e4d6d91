//! Decodes the body that follows an HTTP/1.1 message's head (RFC 9112, sections 6 and 7).

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;

/// An incremental decoder that takes body bytes off the front of a buffer.
#[derive(Debug)]
pub struct BodyDecoder {
    state: State,
}

/// The result of [`BodyDecoder::decode`].
#[derive(Debug, PartialEq, Eq)]
pub enum Decoded {
    /// Some of the body, never empty.
    Data(Bytes),
    /// Nothing yet, because more bytes are needed.
    More,
    /// The body has ended. Anything left in the buffer follows it.
    End,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// `content-length`, with the number of bytes still missing.
    Length(u64),
    /// At the line with a chunk's size.
    ChunkSize,
    /// Within a chunk, with the number of bytes still missing.
    Chunk(u64),
    /// At the line end after a chunk.
    ChunkEnd,
    /// At a trailer line, or at the blank line that ends the message.
    Trailer,
    /// Everything up to the end of the connection.
    UntilClose,
    /// The body has ended.
    Ended,
}

// === impl BodyDecoder ===

impl BodyDecoder {
    /// Returns the decoder for a response without a body.
    pub fn empty() -> Self {
        Self {
            state: State::Ended,
        }
    }

    /// Returns the decoder for a response with this head, unless it answers a HEAD request.
    pub fn new(status: u16, headers: &HeaderMap) -> Self {
        let state = match announced(headers) {
            _ if matches!(status, 100..=199 | 204 | 304) => State::Ended,
            announced => announced.unwrap_or(State::UntilClose),
        };
        Self { state }
    }

    /// Returns the decoder for a message that has a body only if its head announces one.
    ///
    /// This covers any request, and any response from a server that keeps connections open.
    pub fn announced(headers: &HeaderMap) -> Self {
        Self {
            state: announced(headers).unwrap_or(State::Ended),
        }
    }

    /// Takes the next piece of the body off `buffer`, skipping trailers.
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

    /// Returns `true` if the whole body has been decoded. `is_closed` completes a body that runs to the end of the
    /// connection.
    pub fn is_complete(&self, is_closed: bool) -> bool {
        match self.state {
            State::Length(0) | State::Ended => true,
            State::UntilClose => is_closed,
            _ => false,
        }
    }

    /// Takes plain body bytes.
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

    /// Returns the state that follows a complete line.
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

/// Returns the initial state if the head announces a body, otherwise `None`.
fn announced(headers: &HeaderMap) -> Option<State> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if header("transfer-encoding") == Some("chunked") {
        return Some(State::ChunkSize);
    }
    let length = header("content-length")?;
    Some(State::Length(length.parse().expect("a length")))
}

/// Takes a line off `buffer` without its line end, or returns `None` if it is incomplete.
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
