//! Deliberate faults that the referee must find.

use std::{env, mem};

use axum::{body::Body, extract::Request, middleware::Next, response::Response};

/// Selected by `SOAK_FAULT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Orphans are never cancelled.
    Zombie,
    /// There is no grace period.
    FalseCancel,
    /// Some responses are never dropped.
    Leak,
    /// There is no layer.
    Bare,
}

/// One out of this many responses is leaked.
const LEAKED: u8 = 20;

// === impl Fault ===

impl Fault {
    /// Returns the fault in `SOAK_FAULT`, or `None` if that is empty or not set.
    pub(crate) fn from_env() -> Result<Option<Self>, String> {
        let Ok(name) = env::var("SOAK_FAULT") else {
            return Ok(None);
        };
        Ok(Some(match name.as_str() {
            "" => return Ok(None),
            "zombie" => Self::Zombie,
            "false-cancel" => Self::FalseCancel,
            "leak" => Self::Leak,
            "bare" => Self::Bare,
            _ => return Err(format!("no such fault: {name}")),
        }))
    }
}

/// A middleware that leaks the bodies of some responses, which it then sends without a body.
pub(crate) async fn leak(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if fastrand::u8(..LEAKED) > 0 {
        return response;
    }
    let (head, body) = response.into_parts();
    mem::forget(body);
    Response::from_parts(head, Body::empty())
}
