//! Cancels an in-flight MCP call when its client disconnects, and only then.
//!
//! When a client closes its connection mid-call, an [rmcp](https://docs.rs/rmcp) server in session mode (the default) keeps the tool
//! running: the cancellation token never fires, and the work continues without a client. This crate is a tower layer that cancels such
//! a call. If the client reconnects for its answer instead, it keeps its call.
//!
//! ```
//! use std::sync::Arc;
//! use axum::Router;
//! use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
//! use rmcp::{ServerHandler, transport::streamable_http_server::StreamableHttpService};
//!
//! #[derive(Clone)]
//! struct MyServer;
//! impl ServerHandler for MyServer {}
//!
//! let sessions = Arc::new(CancellableSessionManager::default());
//! let mcp = StreamableHttpService::new(|| Ok(MyServer), sessions, Default::default());
//! let layer = CancelOnDisconnectLayer::new();
//! let calls = layer.calls();
//! let app: Router = Router::new().nest_service("/mcp", mcp).layer(layer);
//! assert!(calls.is_empty(), "no call is in flight yet");
//! # drop(app);
//! ```
//!
//! # What you need first
//!
//! | | what for |
//! |---|---|
//! | [`CancelOnDisconnectLayer`] | wraps the service; its options decide what a disconnect means |
//! | [`CancellableSessionManager`] | replaces the session manager of rmcp's service, and makes cancels exact and cheap |
//! | [`Grace`] | how long a call waits for its client to resume: by default at least 20 s, or not at all if the client cannot resume |
//! | [`CallToken`] | notifies a handler that its call has been cancelled, and why, where rmcp's `RequestContext::ct` is not enough |
//!
//! The layer also works without the session manager, in front of any MCP server. It then cancels a session's call with a
//! `notifications/cancelled` POST to the inner service.
//!
//! # What you may need later
//!
//! | | what for |
//! |---|---|
//! | [`AbortOnCancel`] | stops handlers that do not watch their token |
//! | [`Policy`], [`RetainAnswers`], [`Limits`] | rules for individual calls, which answers are retained, how much is tracked and retained |
//! | [`Calls`] | lists the calls in flight, cancels them, and drains them before a shutdown |
//! | [`Confirmation`], [`Orphan`] | decide whether an orphan is cancelled |
//! | [`Event`], [`Observer`] | everything that happens to a call |
//! | [`CallInfo`], [`CallId`], [`RequestId`], [`CancelReason`], [`Outcome`] | a call's properties, as they appear in events and snapshots |
//! | [`observe`] | the other types in events and snapshots, and metrics |
//! | `socket` | detects disconnects that hyper misses (feature `socket`) |
//! | [`body`], [`transport`] | types that pass through the layer and the session manager, for services of your own |
//! | [`manual`] | [what a disconnect means](manual::disconnect), [deploying](manual::deploying), [several servers](manual::several_servers), [operating](manual::operating), [defaults](manual::defaults) |
//!
//! # What counts as a disconnect
//!
//! A disconnect is any of these:
//!
//! - The response future or the response body is dropped before it completes, or the response body fails. This is what happens when a
//!   connection is closed, or when an HTTP/2 stream is reset.
//! - The request body fails while it is being read.
//! - The inner service panics.
//!
//! The end of a response to HEAD is not a disconnect, nor is the end of a body of known length that has been sent in full, or of a
//! stream that the server has ended.
//!
//! A connection that has silently died counts as a disconnect only once a write to it fails. hyper also misses these cases:
//!
//! | the client | is detected by |
//! |---|---|
//! | vanished with its network | [`keep_alive`](CancelOnDisconnectLayer::keep_alive) and `DeadPeer`, together |
//! | disconnected while hyper is holding bytes of the next request, or before the request body was read | `keep_alive`, or at once by a `WatchedListener` |
//! | is waiting for a silent handler that has not sent a response head | [`commit_after`](CancelOnDisconnectLayer::commit_after) |
//! | is connected but not reading | [`stall_timeout`](CancelOnDisconnectLayer::stall_timeout) |
//!
//! [Deploying](manual::deploying) lists how long each of them takes at worst, and how proxies affect it.
//!
//! # What a disconnect means
//!
//! [`Grace`] decides, and [the manual](manual::disconnect) has a table of all cases. By default, a call that its client can resume
//! waits for the client, because real clients do resume, and a call that no client can resume is cancelled at once. With the session
//! manager, even a client that resumes late gets its answer, or the error of its cancelled call. When in doubt, nothing is cancelled
//! (see [`ParseFailure`](observe::ParseFailure)).
//!
//! Up to revision 2025-11-25 of the specification, a disconnect SHOULD NOT be interpreted as a cancellation. The default departs from this
//! only narrowly: it cancels a call if its client cannot resume, or has not resumed within its grace period. [`Grace::Never`] follows the
//! specification to the letter. From revision 2026-07-28 on, a disconnect MUST cancel, and by default it does.
//!
//! # Runtimes
//!
//! Any tokio runtime that serves requests can deliver cancels and handle deadlines. If one runtime's thread is busy, or the runtime has
//! shut down, another takes over. The runtimes need tokio's timers (`enable_time`), which rmcp needs, too.
//!
//! # Related crates
//!
//! - `tower_http::on_early_drop` runs a callback when a response is dropped. It knows nothing about calls, so it cannot distinguish a
//!   client that reconnects from one that does not.
//! - rmcp 3 cancels stateless calls on its own, unless their events are stored. It still does so with this layer, which then reports
//!   the reason.
//! - `mcp-cancel-proxy` is this layer as a program, in front of a server in any language.
//! - `mcp-cancel-cluster` is for several instances of a server whose load balancer does not route by session.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `rmcp` (default) | the session manager, and the helpers for handlers |
//! | `axum` | [`CallToken`] as an extractor; with `socket`, `WatchedListener` for `axum::serve` |
//! | `metrics` | `observe::Metrics`, an observer that counts through the `metrics` facade |
//! | `socket` | the module `socket`, with `DeadPeer` and `WatchedListener` |
//! | `serde` | `Serialize` for snapshots of calls and what is in them, without session ids |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "rmcp"),
    allow(
        dead_code,
        unused_imports,
        reason = "each module has items that only the session manager uses"
    )
)]

pub mod body;
mod call;
mod calls;
mod cancel;
mod catch_panic;
mod confirm;
mod disconnect;
mod either_body;
mod envelope;
mod exchange;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod headers;
mod jsonrpc;
mod layer;
mod limits;
mod lock;
pub mod manual;
#[cfg(feature = "rmcp")]
mod mcp;
pub mod observe;
mod options;
mod policy;
mod registry;
mod request;
mod response;
#[cfg(feature = "serde")]
mod serialize;
mod service;
mod shards;
mod sse;
mod timer;
mod token;
#[cfg(feature = "rmcp")]
pub mod transport;
mod wait_until;

#[cfg(feature = "rmcp")]
pub use self::mcp::{AbortOnCancel, CancellableSessionManager};
#[cfg(feature = "axum")]
pub use self::token::MissingLayer;
/// The sockets below HTTP: the kernel detects dead peers and disconnects that hyper misses.
#[cfg(feature = "socket")]
#[doc(inline)]
pub use watched_socket as socket;

pub use self::{
    call::{CallId, CallInfo, CancelReason, Outcome, ParseCallIdError, RequestId},
    calls::{Calls, DrainReport},
    confirm::{Confirmation, Orphan},
    layer::CancelOnDisconnectLayer,
    limits::Limits,
    observe::event::{Event, Observer},
    options::RetainAnswers,
    policy::{Grace, MIN_GRACE, Policy},
    service::CancelOnDisconnect,
    token::CallToken,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
