//! The MCP server behind the proxy.

use std::{
    convert::Infallible,
    fmt, io,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower_service::Service;

use crate::{
    config::{Config, Target},
    event_store::{EventStore, Limits, Resumable},
    forward::{Forward, UpstreamError},
    http_service::ResponseFuture,
    refusal,
    stdio::{Options, Program, Stdio},
};

/// The path at which a command's sessions are served.
const STDIO_PATH: &str = "/mcp";

/// The server behind the proxy. Implements [`HttpService`](crate::http_service::HttpService).
#[derive(Debug, Clone)]
pub enum Server {
    /// An upstream whose events are not stored.
    Forward(Forward),
    /// An upstream whose events are stored.
    Resumable(Resumable<Forward>),
    /// A command, run as one process per session.
    Stdio(Stdio),
}

/// A server's current statistics, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Number of a command's running sessions, or of an upstream's sessions in the event store.
    pub sessions: usize,
    /// Number of processes, including stopping ones.
    pub children: usize,
    /// Number of bytes stored for clients that resume, overhead included.
    pub buffer_bytes: usize,
    /// How many times a client has resumed a stream.
    pub resumes: u64,
    /// How many times a client has been notified of missing events.
    ///
    /// A stream's gaps are only counted once the stream has been removed.
    pub gaps: u64,
    /// Number of processes that had to be killed.
    pub kills: u64,
}

/// Error returned by [`Server::new`].
#[derive(Debug)]
#[non_exhaustive]
pub enum ServerError {
    /// The upstream is invalid.
    Upstream(UpstreamError),
    /// The command is invalid.
    Command(io::Error),
}

// === impl Server ===

impl Server {
    /// Creates the configured server.
    pub fn new(config: &Config) -> Result<Self, ServerError> {
        let limits = Limits {
            bytes: config.buffer,
            retry: config.retry(),
            ..Limits::default()
        };
        match config.target() {
            Target::Http(upstream) => {
                let forward = Forward::new(upstream, config.header.clone());
                let forward = forward.map_err(ServerError::Upstream)?;
                Ok(if config.no_resumable {
                    Self::Forward(forward)
                } else {
                    let store = EventStore::for_server(&forward.to_string(), limits);
                    let resumable = Resumable::new(forward, store);
                    Self::Resumable(resumable.commit_after(config.commit_after))
                })
            }
            Target::Command(command) => {
                let (name, arguments) = command.split_first().unzip();
                let arguments = arguments.unwrap_or_default();
                let mut program =
                    Program::new(name.cloned().unwrap_or_default(), arguments.iter().cloned());
                let variables = config.env.iter().cloned();
                program.environment = variables
                    .map(|(name, value)| (name.into(), value.into()))
                    .collect();
                program.directory.clone_from(&config.cwd);
                let options = Options {
                    max_sessions: config.max_sessions,
                    session_timeout: config.session_timeout.0,
                    lost_timeout: config.lost_timeout.0,
                    kill_after: config.kill_after,
                    ..Options::new(program)
                };
                // Every running process needs a session in the store.
                let sessions = limits.sessions.max(config.max_sessions);
                let store = EventStore::new(Limits { sessions, ..limits });
                let stdio = Stdio::new(options, store).map_err(ServerError::Command)?;
                Ok(Self::Stdio(stdio))
            }
        }
    }

    /// Returns the path that clients connect to.
    pub fn path(&self) -> &str {
        match self {
            Self::Forward(forward) => forward.path(),
            Self::Resumable(resumable) => resumable.get_ref().path(),
            Self::Stdio(_) => STDIO_PATH,
        }
    }

    /// Returns `true` if events are stored for clients that resume.
    pub fn is_resumable(&self) -> bool {
        !matches!(self, Self::Forward(_))
    }

    /// Returns how long an answer is stored for its client, or `None` if answers are not stored.
    pub fn retention(&self) -> Option<Duration> {
        self.is_resumable().then(|| Limits::default().retention)
    }

    /// Returns the event store that confirms an upstream's orphans.
    ///
    /// Returns `None` for a command, or for an upstream whose events are not stored.
    pub fn event_store(&self) -> Option<EventStore> {
        match self {
            Self::Resumable(resumable) => Some(resumable.event_store().clone()),
            Self::Forward(_) | Self::Stdio(_) => None,
        }
    }

    /// Opens a connection to the upstream and closes it again. Does nothing for a command.
    ///
    /// # Errors
    ///
    /// Returns an error if the upstream can't be reached within `timeout`.
    pub async fn connect(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Forward(forward) => forward.connect(timeout).await,
            Self::Resumable(resumable) => resumable.get_ref().connect(timeout).await,
            Self::Stdio(_) => Ok(()),
        }
    }

    /// Returns the current statistics, or `None` for an upstream whose events are not stored.
    pub fn stats(&self) -> Option<Stats> {
        let (store, stdio) = match self {
            Self::Forward(_) => return None,
            Self::Resumable(resumable) => (resumable.event_store().stats(), None),
            Self::Stdio(stdio) => (stdio.event_store().stats(), Some(stdio.stats())),
        };
        Some(Stats {
            // Don't use the store's count for a command, because sessions in the store outlive their processes.
            sessions: stdio.map_or(store.sessions, |stdio| stdio.sessions),
            children: stdio.map_or(0, |stdio| stdio.children),
            buffer_bytes: store.buffer_bytes,
            resumes: store.resumes,
            gaps: store.gaps,
            kills: stdio.map_or(0, |stdio| stdio.kills),
        })
    }

    /// Returns `true` if the shutdown should wait for a client.
    ///
    /// See [`EventStore::is_in_progress`].
    pub fn is_in_progress(&self) -> bool {
        match self {
            Self::Forward(_) => false,
            Self::Resumable(resumable) => resumable.event_store().is_in_progress(),
            Self::Stdio(stdio) => stdio.event_store().is_in_progress(),
        }
    }

    /// Stops all of a command's processes, waiting at most `timeout`. Does nothing for an upstream.
    pub async fn shutdown(&self, timeout: Duration) {
        if let Self::Stdio(stdio) = self {
            stdio.shutdown(timeout).await;
        }
    }
}

impl Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        match self {
            Self::Forward(forward) => forward.poll_ready(cx),
            Self::Resumable(resumable) => resumable.poll_ready(cx),
            Self::Stdio(stdio) => stdio.poll_ready(cx),
        }
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        match self {
            Self::Forward(forward) => forward.call(request),
            Self::Resumable(resumable) => resumable.call(request),
            Self::Stdio(_) if request.uri().path() != STDIO_PATH => {
                let text = "the MCP server is at /mcp\n";
                Box::pin(async { Ok(refusal::plain(StatusCode::NOT_FOUND, text)) })
            }
            Self::Stdio(stdio) => stdio.call(request),
        }
    }
}

/// Formats the server for logs: the upstream's URL, or the command.
impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward(forward) => forward.fmt(f),
            Self::Resumable(resumable) => resumable.get_ref().fmt(f),
            Self::Stdio(stdio) => write!(f, "`{}`, one process per session", stdio.program()),
        }
    }
}

// === impl ServerError ===

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Upstream(error) => error.fmt(f),
            Self::Command(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ServerError {}
