//! The bodies on the two sides of the layer, and the future between them.
//!
//! The inner service gets a [`TeeBody`]. The services around the layer get a [`ResponseFuture`], and from that a
//! [`ResponseBody`]. A stack of ready-made layers seldom names them; a service or a layer of your own does.

pub use crate::{
    request::TeeBody,
    response::{ResponseBody, ResponseFuture},
};
