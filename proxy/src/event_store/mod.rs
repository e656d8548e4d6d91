//! Streams that outlive their clients: resumability for servers that have none.
//!
//! A server without an event store loses what it sends while its client is away. Here a writer, usually a task that
//! reads the server's own stream, adds events to a [`Stream`]. The response to the client reads the events from there. A
//! client that resumes specifies the last event that it has received and gets the events after that one.
//!
//! 1. **Bounded.** A stream keeps at most 256 events and 1 MiB, a session 2,048 streams and 4 MiB of events, and all
//!    sessions together [`Limits::bytes`]. The overhead of keeping them counts as well. If there is no room for a stream,
//!    [`Resumable`] forwards the call unchanged. It can then be resumed only if the server itself keeps its events.
//! 2. **Dropping.** Progress and log events are dropped first, the oldest before the others. Next are events that the
//!    attached client was sent, requests and answers last. A comment in the stream has the number of dropped events. All
//!    other events are kept: their writer waits for the client to read, and without a client the call ends with an error.
//! 3. **Retention.** A stream is kept for 60 s after its end. It may be evicted earlier once its client has read it, or
//!    if its call was cancelled. If a session is closed, a client that is reading one of its streams gets the remaining events. An
//!    error takes the place of a missing answer.
//! 4. **Access.** A stream is found in its own session only, by an event id with 128 random bits. If a server
//!    authenticates a session's clients, [`Resumable`] has it authenticate a client that resumes as well.
//! 5. **One reader.** A client that resumes a stream replaces the response that read it before.
//!
//! The parts: a [`Stream`] has a `ring` of events, which decides what is dropped. A [`Session`] has streams, which are
//! in its `stream_index`. The [`EventStore`] has the sessions.

mod budget;
mod call;
mod credentials;
mod event;
mod ping;
mod read;
mod resumable;
mod ring;
mod session;
mod sessions;
mod stream;
mod stream_index;
mod upstream;
mod upstream_resume;

pub use self::{
    budget::Limits,
    call::Call,
    event::{Event, Weight},
    resumable::{MIN_COMMIT_AFTER, Resumable},
    session::Session,
    sessions::{EventStore, Stats},
    stream::{Refused, Stream, UPSTREAM_LINGER},
};
