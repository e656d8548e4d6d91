//! A session: one process group, the calls in flight in it, and the task that runs both.

use std::{
    convert::Infallible,
    fmt,
    pin::pin,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::{join, maybe_done};
use rustix::process::Signal;
use tokio::{
    io::AsyncReadExt as _,
    process::ChildStdout,
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use super::{
    id::Id,
    input::{self, Full, Input, Jam, Stopped, Waiting},
    lines::{Line, Lines},
    log::{self, Name, Rate},
    process::{Group, Pipes, in_words},
    routing::{Refused, Route, Routes},
};
use crate::{
    hub::{self, Event, Stream},
    message::{Kind, Message},
};

/// How long a process has to end after its stdin was closed, and again after SIGTERM: 2 s.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long is read on after the leader's end, what somebody outside of the group may still hold the pipes of: 0.5 s.
const DRAIN: Duration = Duration::from_millis(500);

/// How long a session is kept whose client never came back after `initialize`: 60 s.
const UNUSED: Duration = Duration::from_secs(60);

/// JSON-RPC's code for an error of the server, here: it is gone.
const SERVER_GONE: i32 = -32000;

/// A session, shared by the requests that use it and the task that [runs](Self::run) it.
pub(super) struct Session {
    pub(super) name: Name,
    /// Its streams.
    pub(super) streams: hub::Session,
    /// The stream for what belongs to no call.
    pub(super) standalone: Stream,
    input: Input,
    jam: Jam,
    state: Mutex<State>,
    /// A deadline may have come nearer.
    changed: Notify,
    stop: Notify,
    timeout: Duration,
}

struct State {
    routes: Routes<Stream>,
    used: Instant,
    /// The client has sent something besides the first request.
    is_begun: bool,
    /// The server has answered something.
    has_answered: bool,
    stopped: Option<Why>,
}

/// Why a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The client deleted it, or never got it.
    Deleted,
    /// It was not used for long.
    Idle,
    /// The program ends.
    Shutdown,
    /// The leader of the process group has exited.
    Exited,
    /// The process has closed its stdin or its stdout.
    Closed,
    /// It does not read its stdin.
    Stuck,
    /// A call that was told to stop has not answered in time.
    Overdue,
}

/// How a session ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) why: Why,
    /// The process failed before it answered anything.
    pub(super) is_false_start: bool,
    /// It was killed by us.
    pub(super) was_killed: bool,
}

/// What it took to end a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// Nothing, or the end of its stdin.
    ByItself,
    /// SIGTERM.
    Asked,
    /// SIGKILL.
    Killed,
}

/// Why a request or a notification is not for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotSent {
    /// It has an id that cannot be.
    BadId,
    IdInUse,
    /// Too much waits, or too many calls are open.
    Busy,
    /// The buffers have no room for another stream.
    NoRoom,
    /// The session is over.
    Gone,
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        name: Name,
        streams: hub::Session,
        standalone: Stream,
        kill_after: Option<Duration>,
        timeout: Duration,
    ) -> (Self, Waiting) {
        let (input, waiting) = input::queue();
        let state = State {
            routes: Routes::new(kill_after),
            used: Instant::now(),
            is_begun: false,
            has_answered: false,
            stopped: None,
        };
        let session = Self {
            name,
            streams,
            standalone,
            input,
            jam: Jam::default(),
            state: Mutex::new(state),
            changed: Notify::new(),
            stop: Notify::new(),
            timeout,
        };
        (session, waiting)
    }

    /// Sends a request to the server. Returns the stream of its answer.
    pub(super) fn request(
        &self,
        message: &Message<'_>,
        call: hub::Call,
        line: Bytes,
    ) -> Result<Stream, NotSent> {
        let id = message.id.and_then(Id::read).ok_or(NotSent::BadId)?;
        let is_first = message.method.as_deref() == Some("initialize");
        let token = message.params().progress_token.and_then(Id::read);
        let place = self.input.reserve(line.len(), false)?;
        let stream = {
            let mut state = self.state();
            state.used = Instant::now();
            state.is_begun |= !is_first;
            let open = || self.streams.open(call).ok_or(NotSent::NoRoom);
            state.routes.begin(id, token, open)?
        };
        // A client cannot resume before it knows its session.
        if !is_first {
            self.prime(&stream);
        }
        place.send(line);
        Ok(stream)
    }

    /// Sends a notification or an answer of the client to the server.
    pub(super) fn tell(&self, message: &Message<'_>, line: Bytes) -> Result<(), NotSent> {
        let is_cancel = message.kind == Kind::Notification
            && message.method.as_deref() == Some("notifications/cancelled");
        let place = self.input.reserve(line.len(), is_cancel)?;
        let forgotten = {
            let mut state = self.state();
            if state.stopped.is_some() {
                return Err(NotSent::Gone);
            }
            let now = Instant::now();
            state.used = now;
            state.is_begun = true;
            let cancelled = message
                .params()
                .request_id
                .filter(|_| is_cancel)
                .and_then(Id::read);
            cancelled.and_then(|id| state.routes.cancelled(&id, now))
        };
        place.send(line);
        if is_cancel {
            self.changed.notify_one();
        }
        if let Some(stream) = forgotten {
            stream.end();
        }
        Ok(())
    }

    /// The client is there. `false` if the session is not any more.
    pub(super) fn touch(&self) -> bool {
        let mut state = self.state();
        state.used = Instant::now();
        state.is_begun = true;
        state.stopped.is_none()
    }

    /// Gives the client a place from which to resume, if it is one that understands that.
    pub(super) fn prime(&self, stream: &Stream) {
        if self.streams.primes() {
            // It is a new stream: if there is no room, its call ends with an error.
            let _primed = stream.push_now(Event::priming());
        }
    }

    /// Begins its end. No call can be begun from here on, and those that are open end with an error.
    pub(super) fn stop(&self, why: Why) {
        let open = {
            let mut state = self.state();
            if state.stopped.is_some() {
                return;
            }
            state.stopped = Some(why);
            state.routes.end()
        };
        self.end_streams(open, why.in_words());
        self.stop.notify_one();
    }

    /// Runs the session to its end: nothing of its process is left then.
    pub(super) async fn run(&self, mut group: Group, pipes: Pipes, waiting: Waiting) -> End {
        let session = self.name;
        info!(%session, pid = group.pid(), "session begun");
        let mut reading = pin!(maybe_done(self.read(pipes.stdout)));
        let mut logging = pin!(maybe_done(log::stderr(session, pipes.stderr)));
        let why = {
            // Its end closes stdin.
            let writing = waiting.write(pipes.stdin, &self.jam);
            let mut logging = pin!(endless(logging.as_mut()));
            tokio::select! {
                () = group.exited() => Why::Exited,
                () = self.stop.notified() => self.state().stopped.unwrap_or(Why::Deleted),
                stopped = writing => Why::from(stopped),
                () = reading.as_mut() => Why::Closed,
                why = self.keep_time() => why,
                never = logging.as_mut() => match never {},
            }
        };
        let ended = {
            let output = endless(join(reading.as_mut(), logging.as_mut()));
            tokio::select! {
                ended = end(&mut group, why) => ended,
                never = output => match never {},
            }
        };
        group.signal(Signal::KILL);
        let _late = timeout(DRAIN, join(reading, logging)).await;
        let status = match timeout(PATIENCE, group.reap()).await {
            Ok(Ok(status)) => in_words(status),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it does not end".into(),
        };
        let is_false_start = {
            let state = self.state();
            state.stopped.is_none() && !state.has_answered
        };
        let why = match (why, ended) {
            // Its pipes have ended a little before it.
            (Why::Closed, Ended::ByItself) => Why::Exited,
            _ => why,
        };
        let text = match why {
            Why::Exited => format!("the MCP server has exited ({status})"),
            why => format!("{} ({status})", why.in_words()),
        };
        self.finish(why, &text);
        match why {
            Why::Deleted | Why::Idle | Why::Shutdown => info!(%session, "session over: {text}"),
            _ => warn!(%session, "session over: {text}"),
        }
        let was_killed = ended == Ended::Killed;
        End {
            why,
            is_false_start,
            was_killed,
        }
    }

    /// Ends everything that is still open.
    pub(super) fn finish(&self, why: Why, text: &str) {
        let open = {
            let mut state = self.state();
            state.stopped.get_or_insert(why);
            state.routes.end()
        };
        self.end_streams(open, text);
    }

    fn end_streams(&self, open: Vec<Stream>, text: &str) {
        for stream in open {
            stream.end_with_error(SERVER_GONE, text);
        }
        self.standalone.end();
    }

    /// Reads what the server writes, until the end of it.
    async fn read(&self, mut stdout: ChildStdout) {
        let (mut lines, mut rate) = (Lines::default(), Rate::default());
        loop {
            let read = stdout.read_buf(lines.buffer()).await;
            while let Some(line) = lines.next_line() {
                self.line(line, &mut rate).await;
            }
            if !matches!(read, Ok(1..)) {
                if let Some(line) = lines.last_line() {
                    self.line(line, &mut rate).await;
                }
                return;
            }
        }
    }

    async fn line(&self, line: Line, rate: &mut Rate) {
        let text = match line {
            Line::Whole(text) => super::on_one_line(text),
            Line::TooLong(beginning) => {
                return rate.unreadable(self.name, "a line that is too long", &beginning);
            }
        };
        let message = str::from_utf8(&text)
            .ok()
            .and_then(|text| Message::read(text.as_bytes()));
        let Some(message) = message else {
            return rate.unreadable(self.name, "a line that is not a message", &text);
        };
        let route = {
            let mut state = self.state();
            state.has_answered |= message.kind == Kind::Response;
            state.routes.route(&message)
        };
        let (stream, is_answer) = match &route {
            Route::Answer(stream) => (stream, true),
            Route::Call(stream) => (stream, false),
            Route::Standalone => (&self.standalone, false),
            Route::Nobody => {
                return debug!(session = %self.name, "the MCP server sent what is for nobody");
            }
        };
        let event = Event::message(&text, stream.call());
        // What was refused is said by the hub, and its call has ended.
        let _pushed = self.jam.wait(stream.push(event)).await;
        if is_answer {
            stream.end();
            self.state().used = Instant::now();
        }
    }

    /// Does what time decides, until it decides that the session ends.
    async fn keep_time(&self) -> Why {
        loop {
            let next = {
                let mut state = self.state();
                let now = Instant::now();
                let due = state.routes.due(now);
                let idle = self.idle_at(&mut state, now);
                let next = state.routes.next_due().map_or(idle, |due| due.min(idle));
                let ends = match due.overdue {
                    true => Some(Why::Overdue),
                    false => (idle <= now).then_some(Why::Idle),
                };
                if ends == Some(Why::Idle) {
                    // Under the same lock as what would be begun now.
                    state.stopped.get_or_insert(Why::Idle);
                    state.routes.end();
                }
                drop(state);
                for stream in due.let_go {
                    stream.end();
                }
                if let Some(why) = ends {
                    return why;
                }
                next
            };
            tokio::select! {
                () = sleep_until(next) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// When the session is idle for too long, if nothing happens.
    fn idle_at(&self, state: &mut State, now: Instant) -> Instant {
        let timeout = match state.is_begun {
            true => self.timeout,
            false => self.timeout.min(UNUSED),
        };
        // Nobody cancels an `initialize` whose client has gone.
        let works = match state.is_begun {
            true => !state.routes.is_idle(),
            false => state.routes.streams().any(Stream::is_attached),
        };
        if works || self.standalone.is_attached() {
            // A quarter of it, so that the end of the use is noticed in time.
            state.used = now.max(state.used);
            return now + timeout / 4 + Duration::from_millis(1);
        }
        state.used + timeout
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.name)
    }
}

/// Does its work and then waits for ever.
async fn endless<T>(work: impl Future<Output = T>) -> Infallible {
    work.await;
    std::future::pending().await
}

/// Ends a process whose stdin is closed.
async fn end(group: &mut Group, why: Why) -> Ended {
    match why {
        Why::Exited => return Ended::ByItself,
        // These did not heed what they were told.
        Why::Stuck | Why::Overdue => {}
        Why::Deleted | Why::Idle | Why::Shutdown | Why::Closed => {
            if timeout(PATIENCE, group.exited()).await.is_ok() {
                return Ended::ByItself;
            }
            group.signal(Signal::TERM);
            if timeout(PATIENCE, group.exited()).await.is_ok() {
                return Ended::Asked;
            }
        }
    }
    group.signal(Signal::KILL);
    let _gone = timeout(PATIENCE, group.exited()).await;
    Ended::Killed
}

// === impl Why ===

impl Why {
    pub(super) fn in_words(self) -> &'static str {
        match self {
            Self::Deleted => "the session was deleted",
            Self::Idle => "the session was not used for too long",
            Self::Shutdown => "the proxy shuts down",
            Self::Exited => "the MCP server has exited",
            Self::Closed => "the MCP server has closed its stdin or stdout",
            Self::Stuck => "the MCP server did not read its stdin, and was killed",
            Self::Overdue => "the MCP server did not stop a call in time, and was killed",
        }
    }
}

impl From<Stopped> for Why {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Closed => Self::Closed,
            Stopped::Stuck => Self::Stuck,
        }
    }
}

// === impl NotSent ===

impl From<Refused> for NotSent {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::IdInUse => Self::IdInUse,
            Refused::TooMany => Self::Busy,
            Refused::Ended => Self::Gone,
        }
    }
}

impl From<Full> for NotSent {
    fn from(full: Full) -> Self {
        match full {
            Full::Busy => Self::Busy,
            Full::Gone => Self::Gone,
        }
    }
}
