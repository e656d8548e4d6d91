//! An instance's public listener and its clients' connections.
//!
//! A request is passed straight to the application, without HTTP in between, and so are client disconnects.
//!
//! 1. A request that is waiting when its instance is stopped is passed to the application when the instance resumes, even if the client has
//!    disconnected in the meantime, because a server reads its socket before it detects the end.
//! 2. When a client disconnects, the response's future or body is dropped.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, Weak},
    task::{Poll, Waker},
};

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::{
    select,
    sync::{mpsc, oneshot},
};
use tower_service::Service as _;

use super::time::{HostId, Post, WORLD};

/// A request arriving at an instance.
pub(super) struct IngressRequest {
    request: Request<Body>,
    response: Responder,
    disconnected: oneshot::Receiver<()>,
}

/// Sends client requests to an instance.
#[derive(Clone)]
pub(super) struct Ingress {
    pub(super) host: HostId,
    post: Post,
    requests: mpsc::UnboundedSender<IngressRequest>,
    open: Arc<Mutex<Vec<Weak<Mutex<State>>>>>,
}

/// A client's request, and what has arrived of the response. Dropping this disconnects the client.
pub(super) struct Exchange {
    pub(super) host: HostId,
    post: Post,
    state: Arc<Mutex<State>>,
    disconnect: Option<oneshot::Sender<()>>,
}

#[derive(Default)]
struct State {
    head: Option<(StatusCode, HeaderMap)>,
    data: VecDeque<Bytes>,
    end: Option<End>,
    waker: Option<Waker>,
}

/// How a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Whole,
    /// The connection broke.
    Broken,
}

/// The other side of an [`Exchange`].
struct Responder {
    post: Post,
    state: Arc<Mutex<State>>,
    is_whole: bool,
}

// === impl Ingress ===

impl Ingress {
    pub(super) fn new(host: HostId, post: Post) -> (Self, mpsc::UnboundedReceiver<IngressRequest>) {
        let (requests, arriving) = mpsc::unbounded_channel();
        let ingress = Self {
            host,
            post,
            requests,
            open: Arc::default(),
        };
        (ingress, arriving)
    }

    /// Sends a request. Returns `None` if connections are refused.
    pub(super) fn send(&self, request: Request<Body>) -> Option<Exchange> {
        if self.requests.is_closed() {
            return None;
        }
        let (disconnect, disconnected) = oneshot::channel();
        let state = Arc::<Mutex<State>>::default();
        {
            let mut open = self.open.lock().unwrap();
            open.retain(|state| state.strong_count() > 0);
            open.push(Arc::downgrade(&state));
        }
        let response = Responder {
            post: self.post.clone(),
            state: state.clone(),
            is_whole: false,
        };
        let arriving_request = IngressRequest {
            request,
            response,
            disconnected,
        };
        let requests = self.requests.clone();
        self.post.after(self.host, 1, move || {
            // If the instance has exited, the request is dropped, which reports a broken connection.
            let _ = requests.send(arriving_request);
        });
        Some(Exchange {
            host: self.host,
            post: self.post.clone(),
            state,
            disconnect: Some(disconnect),
        })
    }

    /// Cuts all client connections.
    pub(super) fn cut(&self) {
        let open: Vec<_> = self.open.lock().unwrap().drain(..).collect();
        for state in open.iter().filter_map(Weak::upgrade) {
            let state = state.clone();
            self.post.after(WORLD, 1, move || {
                change(&state, |state| {
                    state.end.get_or_insert(End::Broken);
                })
            });
        }
    }
}

/// Serves clients while it is polled.
#[allow(clippy::disallowed_methods, reason = "each connection is a task")]
pub(super) async fn serve(app: Router, mut arriving: mpsc::UnboundedReceiver<IngressRequest>) {
    while let Some(arriving_request) = arriving.recv().await {
        tokio::spawn(serve_connection(app.clone(), arriving_request));
    }
}

async fn serve_connection(mut app: Router, arriving_request: IngressRequest) {
    let IngressRequest {
        request,
        mut response,
        mut disconnected,
    } = arriving_request;
    let answered = pin!(app.call(request));
    let answer: Result<Response<Body>, Infallible> = select! {
        biased;
        answer = answered => answer,
        _disconnected = &mut disconnected => return,
    };
    let Ok(answer) = answer;
    let (head, body) = answer.into_parts();
    response.send(move |state| state.head = Some((head.status, head.headers)));
    let mut body = pin!(body);
    loop {
        let frame = select! {
            biased;
            frame = body.frame() => frame,
            _disconnected = &mut disconnected => return,
        };
        match frame {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    response.send(move |state| state.data.push_back(data));
                }
            }
            Some(Err(_)) => return,
            None => break,
        }
    }
    response.is_whole = true;
}

fn change(state: &Mutex<State>, change: impl FnOnce(&mut State)) {
    let waker = {
        let mut state = state.lock().unwrap();
        change(&mut state);
        state.waker.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}

// === impl Responder ===

impl Responder {
    fn send(&self, update: impl FnOnce(&mut State) + Send + 'static) {
        let state = self.state.clone();
        self.post.after(WORLD, 1, move || change(&state, update));
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        let end = if self.is_whole {
            End::Whole
        } else {
            End::Broken
        };
        self.send(move |state| {
            state.end.get_or_insert(end);
        });
    }
}

// === impl Exchange ===

impl Exchange {
    /// Returns the response head, or an error if the connection broke before it arrived.
    pub(super) async fn head(&self) -> Result<(StatusCode, HeaderMap), End> {
        self.poll(|state| match (&state.head, state.end) {
            (Some(head), _) => Some(Ok(head.clone())),
            (None, Some(end)) => Some(Err(end)),
            (None, None) => None,
        })
        .await
    }

    /// Returns the next bytes of the body.
    pub(super) async fn data(&self) -> Result<Bytes, End> {
        self.poll(|state| match (state.data.pop_front(), state.end) {
            // Data that had not been delivered when the connection broke is lost.
            (Some(data), None | Some(End::Whole)) => Some(Ok(data)),
            (_, Some(end)) => Some(Err(end)),
            (None, None) => None,
        })
        .await
    }

    async fn poll<T>(&self, pick: impl Fn(&mut State) -> Option<T>) -> T {
        std::future::poll_fn(|cx| {
            let mut state: MutexGuard<'_, State> = self.state.lock().unwrap();
            match pick(&mut state) {
                Some(picked) => Poll::Ready(picked),
                None => {
                    state.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let disconnect = self.disconnect.take();
        self.post.after(self.host, 1, move || drop(disconnect));
    }
}
