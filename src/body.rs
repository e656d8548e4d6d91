//! The bodies on the two sides of the layer, and the future between them.
//!
//! The inner service gets a [`TeeBody`]. The services around the layer get a [`ResponseFuture`], and from that a [`ResponseBody`].
//! Only a service or a layer of your own needs to name these types.

pub use crate::{
    request::TeeBody,
    response::{ResponseBody, ResponseFuture},
};
