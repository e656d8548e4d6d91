//! Streams that outlive their clients: resumability for servers that have none.
//!
//! A server without an event store loses whatever it sends while its client is away. With this module, a writer (usually a
//! task that reads the server's own stream) adds events to a [`Stream`], and the response to the client reads them from
//! there. A client that resumes sends the id of the last event that it has received, and gets the ones after it.
//!
//! 1. **Bounded.** A stream keeps at most 256 events and 1 MiB, a session 2,048 streams and 4 MiB of events, and all
//!    sessions together [`Limits::bytes`], overhead included. If there is no room for a stream, [`Resumable`] forwards the
//!    call unchanged, in which case it can only be resumed if the server itself keeps its events.
//! 2. **Dropping.** Progress and log events are dropped first, oldest first. Next are events that have already been sent to
//!    the attached client, with requests and answers last. A comment in the stream states how many events were dropped.
//!    Nothing else is dropped: the writer waits for the client to read, and without a client the call ends with an error.
//! 3. **Retention.** A stream is kept for 60 s after it ends. It may be evicted earlier once its client has read it, or
//!    if its call was cancelled. When a session is closed, a client that is reading one of its streams still gets the
//!    remaining events, with an error in place of a missing answer.
//! 4. **Access.** A stream can only be found in its own session, by an event id with 128 random bits. If a server
//!    authenticates a session's clients, [`Resumable`] has it authenticate a client that resumes as well.
//! 5. **One reader.** A client that resumes a stream replaces the response that was reading it.
//!
//! A [`Stream`] has a `ring` of events, which decides what is dropped. A [`Session`] keeps its streams in a `stream_index`,
//! and the [`EventStore`] has the sessions.

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
