//! Two parsers that clients use, which are independent of this crate and of each other.
//!
//! The fuzz targets include this file, too.

use std::{convert::Infallible, fmt::Debug};

use bytes::Bytes;
use futures_util::{FutureExt as _, Stream, StreamExt as _, stream};
use sse_stream::{Sse, SseStream};
use sseer::{event::Event, event_stream::EventStream};

/// The events before the first error, and whether there was an error.
pub type Read<T> = (Vec<T>, bool);

/// Parses with the parser that rmcp's client uses.
pub fn by_sse_stream(frames: &[Bytes]) -> Read<Sse> {
    to_first_error(SseStream::from_bytes_stream(body(frames)))
}

/// Parses with a parser that follows the standard where the other one fails to.
pub fn by_sseer(frames: &[Bytes]) -> Read<Event> {
    to_first_error(EventStream::new(body(frames)))
}

fn body(frames: &[Bytes]) -> impl Stream<Item = Result<Bytes, Infallible>> + Unpin {
    stream::iter(frames.to_vec()).map(Ok)
}

fn to_first_error<T, E: Debug>(events: impl Stream<Item = Result<T, E>>) -> Read<T> {
    let read = events.fold((Vec::new(), false), async |(mut events, failed), event| {
        match event {
            Ok(event) if !failed => events.push(event),
            _ => return (events, true),
        }
        (events, failed)
    });
    read.now_or_never().expect("nothing to wait for")
}
