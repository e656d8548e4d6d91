//! A middleware inside the layer that reads the body and then waits.
//!
//! Authentication against a database does the same.

use std::time::Duration;

use axum::{
    Router,
    body::to_bytes,
    extract::Request,
    middleware::{Next, from_fn},
};

/// Adds the middleware, which waits for 5 ms.
pub(crate) fn slow_auth(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("a body");
        tokio::time::sleep(Duration::from_millis(5)).await;
        next.run(Request::from_parts(head, body.into())).await
    }))
}
