//! Cancels an in-flight MCP call when its client disconnects, and only then.
//!
//! When a client closes its connection mid-call, an [rmcp](https://docs.rs/rmcp) server in session mode (the default) keeps the tool
//! running: the cancellation token never fires, and the work continues without a client. This crate is a tower layer that cancels these
//! calls. If a client reconnects for its answer, its call keeps running.
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
//! | | what it does |
//! |---|---|
//! | [`CancelOnDisconnectLayer`] | wraps the service; its options determine what a disconnect means |
//! | [`CancellableSessionManager`] | replaces the session manager in rmcp's service, and makes cancellations exact and cheap |
//! | [`Grace`] | sets how long a call waits for its client to resume: by default at least 20 s, or not at all if the client cannot resume |
//! | [`CallToken`] | notifies a handler that its call has been cancelled, and why, in case rmcp's `RequestContext::ct` is not enough |
//!
//! The layer also works without the session manager, in front of any MCP server. It then cancels a session's call by sending a
//! `notifications/cancelled` POST to the inner service.
//!
//! # What you may need later
//!
//! | | what it does |
//! |---|---|
//! | [`AbortOnCancel`] | stops handlers that do not watch their token |
//! | [`Policy`] | sets the rules for individual calls |
//! | [`RetainAnswers`], [`Limits`] | set which answers are retained, and how much is tracked and retained |
//! | [`Calls`] | lists the calls in flight, cancels them, and drains them before a shutdown |
//! | [`Confirmation`], [`Orphan`] | let your own code decide whether an orphan is cancelled |
//! | [`Event`], [`Observer`] | report everything that happens to a call |
//! | [`CallInfo`], [`CallId`], [`RequestId`], [`CancelReason`], [`Outcome`] | describe a call in events and snapshots |
//! | [`observe`] | contains the other types in events and snapshots, and the metrics |
//! | `socket` | detects disconnects that hyper misses (feature `socket`) |
//! | [`body`], [`transport`] | contain the types that you need to name in your own services |
//! | [`manual`] | explains [what a disconnect means](manual::disconnect), [deploying](manual::deploying), [several servers](manual::several_servers), [operating](manual::operating) and the [defaults](manual::defaults) |
//!
//! # What counts as a disconnect
//!
//! Any of the following counts as a disconnect:
//!
//! - The response future or the response body is dropped before it completes, or the response body fails. This is what happens when a
//!   connection is closed, or when an HTTP/2 stream is reset.
//! - The request body fails while it is being read.
//! - The inner service panics.
//!
//! It is not a disconnect when a response to HEAD ends, when a body of known length has been sent in full, or when the server ends a
//! stream.
//!
//! A connection that dies silently counts as a disconnect only once a write to it fails, and hyper misses some other cases too. These are
//! the remedies:
//!
//! | a client that … | is detected by |
//! |---|---|
//! | has vanished along with its network | [`keep_alive`](CancelOnDisconnectLayer::keep_alive) and `DeadPeer`, together |
//! | has disconnected while hyper has part of the next request buffered, or before the request body was read | `keep_alive`, or at once by a `WatchedListener` |
//! | has vanished before its silent handler has sent a response head | [`commit_after`](CancelOnDisconnectLayer::commit_after) |
//! | is connected but not reading | [`stall_timeout`](CancelOnDisconnectLayer::stall_timeout) |
//!
//! [Deploying](manual::deploying) lists the worst-case detection time for each case, and how proxies affect it.
//!
//! # What a disconnect means
//!
//! That depends on the call's [`Grace`], and [the manual](manual::disconnect) has a table of all cases. By default, if the client can
//! resume its call, the call waits for the client, because real clients do resume. If no client can resume it, it is cancelled at once.
//! With the session manager, even a client that resumes late receives its answer, or an error if its call was cancelled. When in doubt,
//! nothing is cancelled (see [`ParseFailure`](observe::ParseFailure)).
//!
//! Up to revision 2025-11-25 of the specification, a disconnect SHOULD NOT be interpreted as a cancellation. The default departs from this
//! only narrowly: it cancels a call if its client cannot resume, or has not resumed within its grace period. [`Grace::Never`] follows the
//! specification to the letter. From revision 2026-07-28 on, a disconnect MUST cancel the call, and by default it does.
//!
//! # Runtimes
//!
//! Any tokio runtime that serves requests can deliver cancellations and handle deadlines. If one runtime's thread is busy, or the runtime
//! has shut down, another takes over. The runtimes need tokio's timers (`enable_time`), as they do for rmcp.
//!
//! # Related crates
//!
//! - `tower_http::on_early_drop` runs a callback when a response is dropped. It knows nothing about calls, so it cannot distinguish a
//!   client that reconnects from one that does not.
//! - rmcp 3 cancels stateless calls on its own, unless their events are stored. It still does with this layer, which then also reports the
//!   reason.
//! - `mcp-cancel-proxy` is this layer as a standalone program, for servers written in any language.
//! - `mcp-cancel-cluster` is for servers with several instances behind a load balancer that does not route by session.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `rmcp` (default) | the session manager, and the helpers for handlers |
//! | `axum` | [`CallToken`] as an extractor; with `socket`, `WatchedListener` for `axum::serve` |
//! | `metrics` | `observe::Metrics`, an observer that counts through the `metrics` facade |
//! | `socket` | the module `socket`, with `DeadPeer` and `WatchedListener` |
//! | `serde` | `Serialize` for snapshots of calls and everything in them, without session ids |
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
/// TCP sockets that detect dead peers, and disconnects that hyper misses.
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
