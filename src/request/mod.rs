//! The request on its way in: its body as it passes, and cancels that are replayed with its head.

mod body;
mod replay;

pub use self::body::TeeBody;
pub(crate) use self::{
    body::Capture,
    replay::{Replay, Template},
};
