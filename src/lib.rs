//! Cancels an in-flight MCP call when its client hangs up, and only then.
//!
//! # Why
//!
//! An MCP server written with [rmcp](https://docs.rs/rmcp) keeps a tool running when its client closes the
//! connection in the middle of a call: in session mode, the default, its cancellation token never fires.
//! The work goes on for nobody. This crate is a tower layer that cancels such a call.
//!
//! # Quick start
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
//! let app: Router = Router::new()
//!     .nest_service("/mcp", mcp)
//!     .layer(CancelOnDisconnectLayer::new());
//! # drop(app);
//! ```
//!
//! The handler's `RequestContext::ct` fires when its call is cancelled; [`CallToken::of`] tells it why.
//! A handler that does not look goes on; inside [`AbortOnCancel`] it is stopped. [`CallToken::on_cancel`] cleans up
//! after it.
//!
//! The layer alone works too, over any MCP server: it then cancels by a `notifications/cancelled` POST into the
//! inner service. [`CancellableSessionManager`] makes it exact and cheap. On routes that have nothing to do with
//! MCP, the [`CallToken`] in the request's extensions fires when the client hangs up.
//!
//! Cancels are delivered, and deadlines kept, on the tokio runtimes that serve the requests, however many these are.
//! What one of them does not come to, because its thread is busy or because it has ended, another one does. They need
//! their timers (`enable_time`), as rmcp does.
//!
//! # What a disconnect is
//!
//! The response future or the response body is dropped before its end, the response body fails, the request
//! body fails while it is read, or the inner service panics. On HTTP/1 a closed connection does the first, on
//! HTTP/2 a reset stream as well. No disconnect is: a HEAD response, a body of known length of which
//! everything was taken, a stream that ended.
//!
//! A connection that just goes silent is no disconnect until a write to it fails, and hyper misses some that do not:
//!
//! | the client | is noticed by |
//! |---|---|
//! | vanished with its network | [`keep_alive`](CancelOnDisconnectLayer::keep_alive) and `DeadPeer`, together |
//! | left while hyper has bytes of a next request, or its body is unread | `keep_alive`, or at once behind a `WatchedListener` |
//! | waits for a silent handler that has sent no head | [`commit_after`](CancelOnDisconnectLayer::commit_after) |
//! | is there and does not read | [`stall_timeout`](CancelOnDisconnectLayer::stall_timeout) |
//!
//! [Deploying](manual::deploying) says how long each takes at worst, and what proxies make of it.
//!
//! # What a disconnect means
//!
//! That is [`Grace`], explained in [the manual](manual::disconnect). By default a session call that its client
//! can resume waits for it, [`MIN_GRACE`] at least, because real clients do come back; everything else is
//! cancelled at once. A client that comes back late gets the answer all the same, or learns that
//! the call was cancelled.
//!
//! Revisions of the specification up to 2025-11-25 say that a disconnect SHOULD NOT be read as a cancel. A grace
//! that ends only when nobody came back narrows that; [`Grace::Never`] keeps to it. From 2026-07-28 on a
//! disconnect MUST cancel, and it does.
//!
//! When in doubt, nothing is cancelled: see [`Unreadable`](observe::Unreadable).
//!
//! # What it is not
//!
//! - `tower_http::on_early_drop` runs a callback when a response is dropped. It knows nothing of calls, and
//!   cannot tell a client that left from one that reconnects.
//! - rmcp cancels stateless calls by itself. With this layer that still happens, and the reason is known.
//!
//! # What happens
//!
//! is logged with `tracing`, in the span of the request: cancels at info, what comes before them at debug and
//! trace. [`Observer`]s get every [`Event`]; a call that starts ends once.
//!
//! # Where things are
//!
//! The root has what most servers name. [`observe`] has what comes with events and snapshots, [`body`] the types that
//! pass through the layer, `socket` what is below HTTP, `transport` what serves a session, and the [`manual`] the why.
//!
//! # Features
//!
//! `rmcp` (default): the session manager, and the helpers for handlers. `axum`: [`CallToken`] as an extractor.
//! `metrics`: `observe::Metrics`, an observer that counts through the `metrics` facade.
//! `socket`: the module `socket` with `DeadPeer`, the socket options that find a dead network, and `WatchedListener`,
//! which lets the kernel say that a client is gone where hyper does not read; with `axum` as well, it is a listener for
//! `axum::serve`.
//! `serde`: `Serialize` for snapshots of calls and what is in them, without session ids.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(
    not(feature = "rmcp"),
    allow(
        dead_code,
        unused_imports,
        reason = "a part of each module is there for the session manager alone"
    )
)]

pub mod body;
mod call;
mod calls;
mod cancel;
mod envelope;
mod exchange;
mod fields;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod jsonrpc;
mod layer;
mod limits;
pub mod manual;
#[cfg(feature = "rmcp")]
mod mcp;
pub mod observe;
mod options;
mod policy;
mod quietly;
mod registry;
mod request;
mod response;
#[cfg(feature = "serde")]
mod serialize;
mod service;
mod shards;
#[cfg(feature = "socket")]
pub mod socket;
mod source;
mod sse;
mod timer;
mod token;
#[cfg(feature = "rmcp")]
pub mod transport;
mod verdict;

#[cfg(feature = "rmcp")]
pub use self::mcp::{AbortOnCancel, CancellableSessionManager};
#[cfg(feature = "axum")]
pub use self::token::MissingLayer;
pub use self::{
    call::{CallId, CallInfo, CancelReason, Outcome, ParseCallIdError, RequestId},
    calls::{Calls, DrainReport},
    layer::CancelOnDisconnectLayer,
    limits::Limits,
    observe::event::{Event, Observer},
    options::Retain,
    policy::{Grace, MIN_GRACE, Policy},
    service::CancelOnDisconnect,
    token::CallToken,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
