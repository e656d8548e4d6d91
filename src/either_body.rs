//! A body that may have been replaced by bytes.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

pin_project! {
    /// Either a body or the bytes that replace it.
    #[project = EitherBodyProj]
    pub(crate) enum EitherBody<B> {
        Body { #[pin] body: B },
        // Boxed, because bodies are moved often and rarely replaced.
        Bytes { bytes: Option<Box<Bytes>> },
    }
}

// === impl EitherBody ===

impl<B> EitherBody<B> {
    pub(crate) fn body(body: B) -> Self {
        Self::Body { body }
    }

    /// Creates a body with a single frame.
    pub(crate) fn bytes(bytes: Bytes) -> Self {
        Self::Bytes {
            bytes: Some(Box::new(bytes)),
        }
    }
}

impl<B> Body for EitherBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        match self.project() {
            EitherBodyProj::Body { body } => body.poll_frame(cx),
            EitherBodyProj::Bytes { bytes } => {
                let bytes = bytes.take();
                Poll::Ready(bytes.map(|bytes| Ok(Frame::data((*bytes).into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Body { body } => body.is_end_stream(),
            Self::Bytes { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Body { body } => body.size_hint(),
            Self::Bytes { bytes } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
        }
    }
}
