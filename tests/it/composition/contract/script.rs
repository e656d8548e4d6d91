//! A body that follows a script, and a reader that records what a body does.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame, SizeHint};

/// A body's steps and its end.
#[derive(Clone, Debug)]
pub(super) struct Script {
    steps: VecDeque<Step>,
    length: Length,
    end: End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Data(Bytes),
    Trailers,
    Error,
    /// Not ready at the first poll, but at the second.
    Wait,
    Panic,
}

/// What `size_hint` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    Unknown,
    /// At least the remaining bytes, and at most a hundred more.
    Bounds,
    Exact,
}

/// What follows the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// `None`.
    None,
    /// `None`, announced by `is_end_stream`.
    Announced,
    /// Never `None`, as for a reader that knows the length and does not poll again.
    Silent,
}

/// A body that follows a script.
pub(super) struct Scripted {
    left: Script,
    dropped: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// The error that a script's body fails with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// What a reader has observed about a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// `size_hint` and `is_end_stream`, queried before each poll and after the last.
    SizeHints(u64, Option<u64>, bool),
    Data(Bytes),
    Trailers(HeaderMap),
    Error(Broken),
    Pending,
    End,
}

/// How far a body is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    ToEnd,
    OneFrame,
    Nothing,
}

// === impl Script ===

impl Script {
    pub(super) fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            steps: steps.into_iter().collect(),
            length: Length::Unknown,
            end: End::None,
        }
    }

    /// Returns a body with these bytes in a single frame.
    pub(super) fn whole(data: impl Into<Bytes>) -> Self {
        Self::new([Step::Data(data.into())])
    }

    /// Returns a body that never yields a frame.
    pub(super) fn stalled() -> Self {
        Self::new([]).end(End::Silent)
    }

    pub(super) fn length(mut self, length: Length) -> Self {
        self.length = length;
        self
    }

    pub(super) fn end(mut self, end: End) -> Self {
        self.end = end;
        self
    }

    pub(super) fn body(&self) -> Scripted {
        Scripted {
            left: self.clone(),
            dropped: None,
        }
    }

    fn bytes_left(&self) -> u64 {
        let lengths = self.steps.iter().map(|step| match step {
            Step::Data(data) => data.len() as u64,
            _ => 0,
        });
        lengths.sum()
    }
}

impl Step {
    pub(super) fn data(text: &'static str) -> Self {
        Self::Data(Bytes::from_static(text.as_bytes()))
    }
}

/// The trailers of a script.
pub(super) fn trailers() -> HeaderMap {
    let digest = HeaderValue::from_static("sha-256=:47DEQpj8:");
    HeaderMap::from_iter([(http::HeaderName::from_static("repr-digest"), digest)])
}

// === impl Scripted ===

impl Scripted {
    /// Makes the body's destructor call `dropped`.
    pub(super) fn on_drop(mut self, dropped: impl FnOnce() + Send + Sync + 'static) -> Self {
        self.dropped = Some(Box::new(dropped));
        self
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Script { steps, end, .. } = &mut self.left;
        Poll::Ready(match steps.pop_front() {
            Some(Step::Data(data)) => Some(Ok(Frame::data(data))),
            Some(Step::Trailers) => Some(Ok(Frame::trailers(trailers()))),
            Some(Step::Error) => Some(Err(Broken)),
            Some(Step::Wait) => {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Some(Step::Panic) => panic!("the body panics on purpose"),
            None if *end == End::Silent => return Poll::Pending,
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left.end == End::Announced && self.left.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match self.left.length {
            Length::Unknown => SizeHint::new(),
            Length::Exact => SizeHint::with_exact(self.left.bytes_left()),
            Length::Bounds => {
                let left = self.left.bytes_left();
                let mut hint = SizeHint::new();
                hint.set_upper(left + 100);
                hint.set_lower(left);
                hint
            }
        }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        if let Some(dropped) = self.dropped.take() {
            dropped();
        }
    }
}

// === impl Broken ===

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken on purpose")
    }
}

impl std::error::Error for Broken {}

// === Reading ===

/// Reads a body that has to wait for at most one poll, and records everything observable.
pub(super) fn read<B>(body: &mut B, reading: Reading) -> Vec<Seen>
where
    B: Body<Data = Bytes, Error = Broken> + Unpin,
{
    let mut seen = vec![size_hints(body)];
    let frames = match reading {
        Reading::ToEnd => usize::MAX,
        Reading::OneFrame => 1,
        Reading::Nothing => 0,
    };
    for _ in 0..frames {
        let polled = poll(body);
        let over = !matches!(polled, Seen::Data(_) | Seen::Trailers(_));
        seen.push(polled);
        if over {
            // `size_hint` and `is_end_stream` mean nothing after the end.
            break;
        }
        seen.push(size_hints(body));
    }
    seen
}

/// Polls a body again if it is not ready at once.
///
/// Returns [`Seen::Pending`] if it is not ready the second time either.
fn poll<B>(body: &mut B) -> Seen
where
    B: Body<Data = Bytes, Error = Broken> + Unpin,
{
    let mut cx = Context::from_waker(Waker::noop());
    // The second poll is for a script's `Wait`.
    for _ in 0..2 {
        if let Poll::Ready(polled) = Pin::new(&mut *body).poll_frame(&mut cx) {
            return Seen::of(polled);
        }
    }
    Seen::Pending
}

fn size_hints<B: Body>(body: &B) -> Seen {
    let hint = body.size_hint();
    Seen::SizeHints(hint.lower(), hint.upper(), body.is_end_stream())
}

// === impl Seen ===

impl Seen {
    /// Removes the bounds for a body whose length is unknown.
    ///
    /// The layer may insert bytes into such a stream.
    pub(super) fn remove_bounds(&mut self) {
        if let Self::SizeHints(lower, upper, _) = self
            && *upper != Some(*lower)
        {
            (*lower, *upper) = (0, None);
        }
    }

    fn of(polled: Option<Result<Frame<Bytes>, Broken>>) -> Self {
        match polled {
            None => Self::End,
            Some(Err(error)) => Self::Error(error),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => Self::Data(data),
                Err(frame) => Self::Trailers(frame.into_trailers().expect("a frame is either")),
            },
        }
    }
}
