//! rmcp: the session manager that binds calls, the handler that stops, and what a handler asks for.

use rmcp::model::NumberOrString;

use crate::call::RequestId;

mod abort;
mod asked;
mod going_on;
mod handler;
mod kept;
mod late;
mod life;
mod owned;
mod passing;
mod resuming;
mod session;
mod session_manager;
mod shared;
mod shelf;
mod stream;
mod transport;

pub use self::{
    abort::AbortOnCancel,
    session_manager::CancellableSessionManager,
    transport::{CancellableTransport, TransportError},
};

impl From<&NumberOrString> for RequestId {
    fn from(id: &NumberOrString) -> Self {
        match id {
            NumberOrString::Number(number) => Self::Number(*number),
            NumberOrString::String(string) => Self::String(string.clone()),
        }
    }
}

impl From<&RequestId> for NumberOrString {
    fn from(id: &RequestId) -> Self {
        match id {
            RequestId::Number(number) => Self::Number(*number),
            RequestId::String(string) => Self::String(string.clone()),
        }
    }
}
