//! The request: a tee for its body, and cancellations replayed with its head.

mod body;
mod replay;

pub use self::body::TeeBody;
pub(crate) use self::{
    body::Capture,
    replay::{Replay, ServicePrototype},
};
