//! The bodies on the two sides of the layer, and the future between them.
//!
//! The inner service gets a [`TeeBody`]. The services around the layer get a [`ResponseFuture`], and from that a
//! [`ResponseBody`]. A stack of ready-made layers seldom names them; a service or a layer of your own does:
//!
//! ```
//! use axum::body::Body;
//! use http::{Request, Response};
//! use http_body::Body as _;
//! use mcp_cancel_on_disconnect::{
//!     CancelOnDisconnectLayer,
//!     body::{ResponseBody, TeeBody},
//! };
//! use tower::{Layer, ServiceExt, service_fn};
//!
//! async fn hello(_: Request<TeeBody<Body>>) -> Result<Response<Body>, std::convert::Infallible> {
//!     Ok(Response::new(Body::from("hello")))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let service = CancelOnDisconnectLayer::new().layer(service_fn(hello));
//! let response = service.oneshot(Request::new(Body::empty())).await.unwrap();
//! let body: ResponseBody<Body> = response.into_body();
//! assert_eq!(body.size_hint().exact(), Some(5));
//! # }
//! ```

pub use crate::{
    request::TeeBody,
    response::{ResponseBody, ResponseFuture},
};
