//! A bridge from HTTP to a process.
//!
//! Like other bridges, it forwards messages and ignores disconnects.

use std::{
    collections::HashMap,
    convert::Infallible,
    ffi::OsString,
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use mcp_cancel_proxy::{
    http_service::ResponseFuture,
    lock::lock,
    message::{Kind, Message},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{ChildStdout, Command},
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tower_service::Service;

/// A bridge with one process per session. Clones share the sessions.
#[derive(Clone)]
pub(super) struct Bridge(Arc<Inner>);

struct Inner {
    program: PathBuf,
    arguments: Vec<OsString>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    next_session: AtomicU32,
    /// The tasks that read from and write to the processes. They end with the bridge.
    tasks: Mutex<JoinSet<()>>,
}

/// A process's stdin, and the calls that it has yet to answer.
struct Session {
    stdin: mpsc::UnboundedSender<Bytes>,
    /// The pending calls, by id.
    calls: Mutex<HashMap<String, oneshot::Sender<Bytes>>>,
}

// === impl Bridge ===

impl Bridge {
    pub(super) fn new(program: PathBuf, arguments: Vec<OsString>) -> Self {
        Self(Arc::new(Inner {
            program,
            arguments,
            sessions: Mutex::default(),
            next_session: AtomicU32::new(0),
            tasks: Mutex::default(),
        }))
    }

    /// Responds to a POST, starting a session if the request has no session id.
    ///
    /// The error is the status of a response without a body.
    async fn respond(self, request: Request<Body>) -> Result<Response<Body>, StatusCode> {
        if request.method() != Method::POST {
            // The bridge stores no events, so there is nothing to resume.
            return Err(StatusCode::METHOD_NOT_ALLOWED);
        }
        let (head, body) = request.into_parts();
        let body = body
            .collect()
            .await
            .map_err(|_| StatusCode::BAD_REQUEST)?
            .to_bytes();
        let message = Message::read(&body).ok_or(StatusCode::BAD_REQUEST)?;
        let id = head
            .headers
            .get("mcp-session-id")
            .and_then(|id| id.to_str().ok());
        let (session, id) = match id {
            Some(id) => {
                let session = lock(&self.0.sessions).get(id).cloned();
                (session.ok_or(StatusCode::NOT_FOUND)?, id.to_owned())
            }
            None => self.begin_session()?,
        };
        let answer = message
            .id
            .filter(|_| message.kind == Kind::Request)
            .map(|id| {
                let (call, answer) = oneshot::channel();
                lock(&session.calls).insert(id.to_owned(), call);
                answer
            });
        session
            .stdin
            .send(body.clone())
            .map_err(|_| StatusCode::BAD_GATEWAY)?;
        let Some(answer) = answer else {
            return Err(StatusCode::ACCEPTED);
        };
        // If the client disconnects, the server is not notified, and the answer is dropped.
        let events = stream::once(answer).map(|answer| {
            let answer = answer.unwrap_or_default();
            Ok::<_, Infallible>([b"data: ", &answer[..], b"\n\n"].concat())
        });
        let mut response = Response::new(Body::from_stream(events));
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream"),
        );
        let id = HeaderValue::from_str(&id).map_err(|_| StatusCode::BAD_REQUEST)?;
        headers.insert("mcp-session-id", id);
        Ok(response)
    }

    /// Starts a process, and returns its session and the session's id.
    fn begin_session(&self) -> Result<(Arc<Session>, String), StatusCode> {
        let mut process = Command::new(&self.0.program)
            .args(&self.0.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|_| StatusCode::BAD_GATEWAY)?;
        let (Some(mut to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(StatusCode::BAD_GATEWAY);
        };
        let (stdin, mut lines) = mpsc::unbounded_channel::<Bytes>();
        let session = Arc::new(Session {
            stdin,
            calls: Mutex::default(),
        });
        let id = self
            .0
            .next_session
            .fetch_add(1, Ordering::Relaxed)
            .to_string();
        lock(&self.0.sessions).insert(id.clone(), session.clone());
        let reading = route_answers(session.clone(), from);
        let mut tasks = lock(&self.0.tasks);
        tasks.spawn(async move {
            // Dropping the process kills it, so the process ends with this task.
            let _process = process;
            reading.await;
        });
        tasks.spawn(async move {
            while let Some(line) = lines.recv().await {
                if to.write_all(&[&line[..], b"\n"].concat()).await.is_err() {
                    return;
                }
            }
        });
        Ok((session, id))
    }
}

/// Sends each answer to its call until the process closes its stdout. Drops all other messages.
async fn route_answers(session: Arc<Session>, stdout: ChildStdout) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let id = Message::read(line.as_bytes()).filter(|message| message.kind == Kind::Response);
        let id = id.and_then(|message| message.id);
        let call = id.and_then(|id| lock(&session.calls).remove(id));
        if let Some(call) = call {
            // Fails if the client has disconnected.
            let _ = call.send(line.into());
        }
    }
}

impl Service<Request<Body>> for Bridge {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        let response = self.clone().respond(request);
        Box::pin(async {
            Ok(response.await.unwrap_or_else(|status| {
                let mut response = Response::new(Body::empty());
                *response.status_mut() = status;
                response
            }))
        })
    }
}
