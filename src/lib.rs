//! Cancels an in-flight MCP call when its client hangs up, and only then.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod body;
mod call;
mod cancel;
mod envelope;
mod exchange;
mod future;
mod layer;
#[cfg(feature = "rmcp")]
mod mcp;
mod observe;
mod policy;
mod registry;
mod service;
mod token;

#[cfg(feature = "rmcp")]
pub use self::mcp::{CancellableSessionManager, CancellableTransport, TransportError};
#[cfg(feature = "axum")]
pub use self::token::MissingLayer;
pub use self::{
    body::ResponseBody,
    call::{CallId, CallInfo, CancelReason, Outcome, RequestId},
    cancel::CancelError,
    envelope::{TeeBody, Unknown},
    future::ResponseFuture,
    layer::CancelOnDisconnectLayer,
    observe::{Event, Observer},
    policy::{DEFAULT_GRACE, Grace},
    registry::Calls,
    service::CancelOnDisconnect,
    token::CallToken,
};
