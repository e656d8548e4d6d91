//! HTTP/2 streams that share a connection and can be reset one by one.

use std::{
    fmt,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::Response;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    body::Incoming,
    client::conn::http2::{Builder, SendRequest},
    rt::Executor,
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{net::TcpStream, task::JoinSet};

use super::{
    client::Head,
    limit::within,
    request::Request,
    sse::{SseEvent, SseItem, SseReader},
};

/// An HTTP/2 connection. Dropping it closes the socket under all of its streams.
#[derive(Debug)]
pub struct H2 {
    sender: SendRequest<Full<Bytes>>,
    addr: SocketAddr,
    tasks: Tasks,
}

/// A request on a shared connection. Its stream is reset if it is dropped before the end.
pub struct H2Stream {
    state: State,
    sse: SseReader,
}

enum State {
    Pending(Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>),
    Answered(Head, Incoming),
}

/// A connection's tasks.
///
/// hyper moves the socket into one of them, so the tasks have to be aborted to close it.
#[derive(Clone, Debug, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

// === impl H2 ===

impl H2 {
    /// Connects without an upgrade, so the server has to recognize HTTP/2 by its preface.
    pub async fn open(addr: SocketAddr) -> Self {
        Self::open_with_window(addr, None).await
    }

    /// Connects with a window of `bytes` per stream, or with hyper's default for `None`.
    pub async fn open_with_window(addr: SocketAddr, bytes: impl Into<Option<u32>>) -> Self {
        let stream = TcpStream::connect(addr).await.expect("connect");
        let tasks = Tasks::default();
        let (sender, connection) = Builder::new(tasks.clone())
            .initial_stream_window_size(bytes)
            .handshake(TokioIo::new(stream))
            .await
            .expect("the HTTP/2 handshake");
        tasks.execute(connection);
        Self {
            sender,
            addr,
            tasks,
        }
    }

    /// Sends a request on a new stream without waiting for the response.
    pub async fn send(&mut self, request: &Request) -> H2Stream {
        within("an HTTP/2 stream", self.sender.ready())
            .await
            .expect("the connection is open");
        let request = request.to_http(&self.addr.to_string()).map(Full::new);
        H2Stream {
            state: State::Pending(Box::pin(self.sender.send_request(request))),
            sse: SseReader::default(),
        }
    }

    /// Closes the socket and with it all streams.
    pub fn hang_up(self) {}

    /// Returns `true` if the server has closed the connection or is about to do so.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }
}

impl Drop for H2 {
    fn drop(&mut self) {
        self.tasks.with(JoinSet::abort_all);
    }
}

// === impl H2Stream ===

impl H2Stream {
    /// Waits for the response head.
    pub async fn head(&mut self) -> Head {
        self.answered().await.0.clone()
    }

    /// Returns the next piece of the body, or `None` at the end, even if the body is incomplete.
    pub async fn data(&mut self) -> Option<Bytes> {
        let (_, body) = self.answered().await;
        loop {
            let frame = within("an HTTP/2 frame", body.frame()).await?.ok()?;
            if let Ok(data) = frame.into_data() {
                return Some(data);
            }
        }
    }

    /// Returns the next event in the body, skipping comments, or `None` at the end.
    pub async fn event(&mut self) -> Option<SseEvent> {
        loop {
            match self.sse.pop() {
                Some(SseItem::Event(event)) => return Some(event),
                Some(SseItem::Comment(_)) => {}
                None => {
                    let data = self.data().await?;
                    self.sse.push(&data);
                }
            }
        }
    }

    /// Reads the rest of the body.
    pub async fn body_to_end(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        while let Some(data) = self.data().await {
            body.extend_from_slice(&data);
        }
        body
    }

    /// Reads up to the JSON-RPC response, whether it is sent as an event or as the body.
    ///
    /// Returns `None` if the stream ends without a response, or if the body is not JSON.
    pub async fn answer(&mut self) -> Option<Value> {
        if !self.head().await.is_event_stream() {
            let body = self.body_to_end().await;
            return serde_json::from_slice(&body).ok();
        }
        loop {
            let event = self.event().await?;
            if event.is_answer() {
                return Some(event.json());
            }
        }
    }

    /// Abandons the stream, which hyper resets with CANCEL while the other streams continue.
    pub fn reset(self) {}

    /// Waits for the response head, and returns it with the body.
    async fn answered(&mut self) -> (&Head, &mut Incoming) {
        if let State::Pending(response) = &mut self.state {
            let response = within("an HTTP/2 answer", response)
                .await
                .expect("the connection closed before the response");
            let (parts, body) = response.into_parts();
            let head = Head {
                status: parts.status.as_u16(),
                headers: parts.headers,
            };
            self.state = State::Answered(head, body);
        }
        match &mut self.state {
            State::Answered(head, body) => (head, body),
            State::Pending(_) => unreachable!("the response has just arrived"),
        }
    }
}

impl fmt::Debug for H2Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = match &self.state {
            State::Pending(_) => None,
            State::Answered(head, _) => Some(head),
        };
        f.debug_struct("H2Stream")
            .field("head", &head)
            .finish_non_exhaustive()
    }
}

// === impl Tasks ===

impl Tasks {
    fn with<T>(&self, use_tasks: impl FnOnce(&mut JoinSet<()>) -> T) -> T {
        use_tasks(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<F> Executor<F> for Tasks
where
    F: Future + Send + 'static,
{
    fn execute(&self, task: F) {
        self.with(|tasks| {
            tasks.spawn(async move {
                // A connection error also shows up on the streams.
                task.await;
            })
        });
    }
}
