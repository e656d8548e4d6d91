//! The MCP server that the proxy stands in front of, of whatever kind.

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

/// Where clients find a server that is started here.
const STDIO_PATH: &str = "/mcp";

/// A server, as a [stage](crate::stage::Stage).
#[derive(Debug, Clone)]
pub enum Server {
    /// One that speaks HTTP, as it is.
    Forward(Forward),
    /// One that speaks HTTP, with the event store's streams.
    Resumable(Resumable<Forward>),
    /// One that is started for each session.
    Stdio(Stdio),
}

/// How much is kept and runs for a server, to be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Sessions that are known.
    pub sessions: usize,
    /// Processes of sessions, with those that are about to end.
    pub children: usize,
    /// Bytes that are kept for clients that resume, with what it costs to keep them.
    pub buffer_bytes: usize,
    /// How often a client came back to a stream.
    pub resumes: u64,
    /// How often a client was told that events are missing, on streams that are gone.
    pub gaps: u64,
    /// How often a process had to be killed.
    pub kills: u64,
}

/// Why there is no such server.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServerError {
    /// The upstream is none.
    Upstream(UpstreamError),
    /// The command is none.
    Command(io::Error),
}

// === impl Server ===

impl Server {
    /// The one that is configured.
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
                    kill_after: config.kill_after,
                    ..Options::new(program)
                };
                // Each of them has streams for as long as it runs.
                let sessions = limits.sessions.max(config.max_sessions);
                let store = EventStore::new(Limits { sessions, ..limits });
                let stdio = Stdio::new(options, store).map_err(ServerError::Command)?;
                Ok(Self::Stdio(stdio))
            }
        }
    }

    /// The path at which clients find it.
    pub fn path(&self) -> &str {
        match self {
            Self::Forward(forward) => forward.path(),
            Self::Resumable(resumable) => resumable.get_ref().path(),
            Self::Stdio(_) => STDIO_PATH,
        }
    }

    /// Whether clients find here what was sent while they were away.
    pub fn is_resumable(&self) -> bool {
        !matches!(self, Self::Forward(_))
    }

    /// How long an answer is kept for a client that is away, if it is.
    pub fn retention(&self) -> Option<Duration> {
        self.is_resumable().then(|| Limits::default().retention)
    }

    /// Where the streams of a server are kept that speaks HTTP and may be asked who came back.
    pub fn event_store(&self) -> Option<EventStore> {
        match self {
            Self::Resumable(resumable) => Some(resumable.event_store().clone()),
            Self::Forward(_) | Self::Stdio(_) => None,
        }
    }

    /// How much there is. `None` if nothing is kept here and nothing runs.
    pub fn stats(&self) -> Option<Stats> {
        let (kept, run) = match self {
            Self::Forward(_) => return None,
            Self::Resumable(resumable) => (resumable.event_store().stats(), None),
            Self::Stdio(stdio) => (stdio.event_store().stats(), Some(stdio.stats())),
        };
        Some(Stats {
            // Those of the event store outlive their process.
            sessions: run.map_or(kept.sessions, |run| run.sessions),
            children: run.map_or(0, |run| run.children),
            buffer_bytes: kept.buffer_bytes,
            resumes: kept.resumes,
            gaps: kept.gaps,
            kills: run.map_or(0, |run| run.kills),
        })
    }

    /// Whether the answer of any call is still to come, or to be read by a client that is there, as far as that is seen here.
    pub fn is_in_progress(&self) -> bool {
        match self {
            Self::Forward(_) => false,
            Self::Resumable(resumable) => resumable.event_store().is_in_progress(),
            Self::Stdio(stdio) => stdio.event_store().is_in_progress(),
        }
    }

    /// Ends what runs here, within this time.
    pub async fn shutdown(&self, within: Duration) {
        if let Self::Stdio(stdio) = self {
            stdio.shutdown(within).await;
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

/// As a person would name it.
impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward(forward) => forward.fmt(f),
            Self::Resumable(resumable) => resumable.get_ref().fmt(f),
            Self::Stdio(stdio) => write!(f, "`{}`, a process for each session", stdio.program()),
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
