//! The request on its way in: its body as it passes, and the cancel that is sent in its place.

mod body;
mod replay;

pub use self::body::TeeBody;
pub(crate) use self::{
    body::Capture,
    replay::{Replay, Template},
};
