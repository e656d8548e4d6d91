//! Reads the server's tool lists, to label metrics and to check the tools named in options.
//!
//! If an option names a tool that the server does not list, the proxy logs a warning, because the name may be misspelt or may
//! belong to another server's tool. Once a complete list has been read, bodies are only copied if there are metrics.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    mem,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use axum::body::{Body, Bytes, HttpBody};
use futures_util::future::Either;
use http::{Method, Request, Response};
use http_body::{Frame, SizeHint};
use mcp_cancel_on_disconnect::observe::ToolNames;
use serde::{Deserialize, de::IgnoredAny};
use tower_service::Service;
use tracing::warn;

use crate::{
    http_service::{HttpService, ResponseFuture},
    lock::lock,
    message::{MAX_BODY, Message},
};

/// Maximum size of a request that is recognised as `tools/list`.
const MAX_REQUEST: usize = 4 * 1024;

/// A service that reads the tool lists in an inner service's responses.
#[derive(Debug, Clone)]
pub(crate) struct Listing<S> {
    inner: S,
    readers: Readers,
}

/// The consumers of the listed tools.
#[derive(Debug, Clone)]
struct Readers {
    unlisted: UnlistedTools,
    /// The labels for metrics, or `None` if there are no metrics.
    labels: Option<ToolNames>,
}

/// The tools named in options that have yet to be listed.
///
/// Empty once the first list has been read to its last page.
#[derive(Debug, Clone)]
struct UnlistedTools(Arc<Mutex<BTreeSet<String>>>);

/// A copy of a body, discarded if it exceeds a limit.
#[derive(Debug, Default)]
struct BodyCopy {
    bytes: Vec<u8>,
    is_too_large: bool,
}

/// A body whose data is observed as it passes through.
struct Tee<F> {
    body: Body,
    observe: F,
}

/// The copy of a response to `tools/list`.
struct Page {
    copied: BodyCopy,
    readers: Readers,
}

/// A response with a tool list.
#[derive(Deserialize)]
struct ListResponse<'a> {
    #[serde(borrow)]
    result: Tools<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Tools<'a> {
    #[serde(borrow)]
    tools: Vec<Tool<'a>>,
    next_cursor: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Tool<'a> {
    #[serde(borrow)]
    name: std::borrow::Cow<'a, str>,
}

// === impl Listing ===

impl<S> Listing<S> {
    /// Creates a service that reads the tool lists in `inner`'s responses.
    ///
    /// The service warns about each tool in `unlisted` that the server does not list, and adds all tools that the server does
    /// list to `labels`.
    pub(crate) fn new(
        inner: S,
        unlisted: impl IntoIterator<Item = String>,
        labels: Option<ToolNames>,
    ) -> Self {
        let unlisted = UnlistedTools(Arc::new(Mutex::new(unlisted.into_iter().collect())));
        let readers = Readers { unlisted, labels };
        Self { inner, readers }
    }
}

impl<S: HttpService> Service<Request<Body>> for Listing<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, ResponseFuture>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.method() != Method::POST || self.readers.are_done() {
            return Either::Left(self.inner.call(request));
        }
        let copied = Arc::new(Mutex::new(BodyCopy::default()));
        let copy = copied.clone();
        let observe = move |data: &Bytes| lock(&copy).add(data, MAX_REQUEST);
        let future = self
            .inner
            .call(request.map(|body| Body::new(Tee { body, observe })));
        let readers = self.readers.clone();
        Either::Right(Box::pin(async move {
            let response = future.await?;
            let request = mem::take(&mut *lock(&copied));
            if !request.is_tools_list() {
                return Ok(response);
            }
            let copied = BodyCopy::default();
            let mut page = Page { copied, readers };
            let observe = move |data: &Bytes| page.add(data);
            Ok(response.map(|body| Body::new(Tee { body, observe })))
        }))
    }
}

// === impl Readers ===

impl Readers {
    /// Returns `true` if no more lists need to be read.
    fn are_done(&self) -> bool {
        self.labels.is_none() && self.unlisted.is_empty()
    }

    fn observe(&self, page: &Tools<'_>) {
        self.unlisted.observe(page);
        if let Some(labels) = &self.labels {
            for tool in &page.tools {
                labels.add(&*tool.name);
            }
        }
    }
}

// === impl UnlistedTools ===

impl UnlistedTools {
    fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    /// Removes a page's tools. After the last page, warns about any that are left.
    fn observe(&self, page: &Tools<'_>) {
        let mut unlisted = lock(&self.0);
        for tool in &page.tools {
            unlisted.remove(&*tool.name);
        }
        if page.next_cursor.is_some() {
            return;
        }
        let unlisted = mem::take(&mut *unlisted);
        for tool in unlisted {
            warn!(
                "--exempt or --tool-grace names the tool {tool:?}, which the server does not list"
            );
        }
    }
}

// === impl BodyCopy ===

impl BodyCopy {
    fn add(&mut self, data: &Bytes, max: usize) {
        self.is_too_large |= self.bytes.len() + data.len() > max;
        if self.is_too_large {
            self.bytes = Vec::new();
        } else {
            self.bytes.extend_from_slice(data);
        }
    }

    /// Returns `true` if this is a request for the tool list.
    fn is_tools_list(&self) -> bool {
        let message = Message::read(&self.bytes);
        message.is_some_and(|message| message.method.as_deref() == Some("tools/list"))
    }
}

// === impl Page ===

impl Page {
    /// Adds data. If this completes a list, reads the list before the client receives the data.
    fn add(&mut self, data: &Bytes) {
        self.copied.add(data, MAX_BODY);
        let text = self.copied.bytes.as_slice();
        if text.trim_ascii_start().starts_with(b"{") {
            if text.trim_ascii_end().ends_with(b"}") {
                self.read();
            }
        } else if text.ends_with(b"\n\n") || text.ends_with(b"\r\n\r\n") {
            // An empty line ends an event.
            self.read();
            self.copied = BodyCopy::default();
        }
    }

    /// Reads the tool list, if there is one, from a JSON body or an event's data.
    fn read(&self) {
        let text = &self.copied.bytes;
        let lines = text.split(|byte| matches!(byte, b'\n' | b'\r'));
        let events = lines.filter_map(|line| line.strip_prefix(b"data:"));
        for json in std::iter::once(text.as_slice()).chain(events) {
            if let Ok(listed) = serde_json::from_slice::<ListResponse<'_>>(json) {
                self.readers.observe(&listed.result);
                return;
            }
        }
    }
}

// === impl Tee ===

impl<F: FnMut(&Bytes) + Unpin> HttpBody for Tee<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            (self.observe)(data);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
