//! The layer's request and response bodies, and its response future.
//!
//! The inner service receives requests with a [`TeeBody`]. The services around the layer get a [`ResponseFuture`], which resolves to a
//! response with a [`ResponseBody`]. You only need to name these types if you write your own service or layer.

pub use crate::{
    request::TeeBody,
    response::{ResponseBody, ResponseFuture},
};
