//! The layer's request and response bodies, and its response future.
//!
//! The inner service receives requests with a [`TeeBody`]. The services around the layer get a [`ResponseFuture`], which resolves to a
//! response with a [`ResponseBody`]. You only need to name these types if you write a service or a layer of your own.

pub use crate::{
    request::TeeBody,
    response::{ResponseBody, ResponseFuture},
};
