//! Streams that outlive their clients: resumability for servers that have none.
//!
//! A server without an event store loses what it sends to a client that is away. Here a writer, mostly a task that reads
//! the server's own stream, puts events into a [`Stream`], and the client's response reads it from there. A client
//! that comes back names the last event that it has, and reads on after it.
//!
//! 1. **Bounded.** A stream keeps 256 events and 1 MiB, a session 2,048 streams and 4 MiB of events, all together [`Limits::bytes`]. What is counted
//!    includes what it costs to keep it. Where no room is left for a stream, there is none: its call passes without event
//!    ids, and is then one that cannot be resumed.
//! 2. **What may be dropped** are progress and log lines, the oldest first, and then what the client that is there has been sent,
//!    requests of the server last; a comment in the stream says so. Answers, errors and requests of the server are kept: their
//!    writer waits for the client to read, and where there is none the call ends with an error.
//! 3. **How long.** A stream is kept for 60 s after its end. One whose client has all of it, or whose call was cancelled, makes
//!    room for others before that. A client that reads a stream when its session ends gets what the stream has, and an error in
//!    place of an answer that has not come.
//! 4. **Whose.** A stream is found in its own session only, by an event id with 128 random bits. Where a server judges who may
//!    use a session, [`Resumable`] has it judge who comes back as well.
//! 5. **One reader.** Who resumes a stream takes it over. The response that read it before ends.
//!
//! The parts: [`Stream`] has a `ring` of events, which is where it is decided what stays; a [`Session`] has streams, which
//! stand in its `index`, and the [`EventStore`] sessions.

mod budget;
mod call;
mod credentials;
mod event;
mod pong;
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
