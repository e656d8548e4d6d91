//! Adds resumability to servers that have none, with streams that outlive their clients.
//!
//! A server without an event store loses whatever it sends while its client is disconnected. With this module, a writer
//! (usually a task that reads the server's own stream) adds events to a [`Stream`], and the client's response reads them from
//! there. To resume, a client sends the id of the last event it received, and gets the events after it.
//!
//! 1. **Bounded.** By default, a stream holds up to 256 events and 1 MiB, and a session up to 2,048 streams and 4 MiB of
//!    events. All sessions share the budget [`Limits::bytes`], which includes overhead. When there is no room for another
//!    stream, [`Resumable`] forwards the call unchanged. That call can then only be resumed if the server itself stores events.
//! 2. **Dropping.** When there is no room for another event, progress and log events are dropped first, oldest first. Events
//!    already sent to the attached client are dropped next, requests and answers last. A comment in the stream states how many
//!    events were dropped. Nothing else is ever dropped. Instead, the writer waits for the attached client to read more. If no
//!    client is attached, the call ends with an error.
//! 3. **Retention.** By default, a stream is retained for 60 s after it ends. It may be evicted earlier to make room, but only
//!    if its client has read all of it or its call was cancelled. When a session is closed while a client is reading one of its
//!    streams, the client still gets the remaining events, with an error in place of a missing answer.
//! 4. **Access.** A stream can only be found within its own session, and only by an event id containing 128 random bits. If the
//!    server authenticates a session's clients, [`Resumable`] also has it authenticate every client that resumes.
//! 5. **One reader.** When a client resumes a stream, its response takes over from the stream's previous reader.
//!
//! A [`Stream`] stores its events in a `ring`, which also decides what to drop. A [`Session`] indexes its streams in a
//! `stream_index`, and the [`EventStore`] owns the sessions.

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
