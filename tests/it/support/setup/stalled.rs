//! Streams that nobody reads on inside the layer, as behind a full buffer: their end is seen when they are
//! dropped, and not before.

use std::future::pending;

use axum::{
    Router,
    body::Body,
    extract::Request,
    middleware::{Next, from_fn},
};
use futures_util::{StreamExt, stream};

use super::EXCHANGE;

/// Reads the streams of named exchanges to their first event and then holds them unread, until they are dropped.
pub(crate) fn stalled(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let stalls = request.headers().contains_key(EXCHANGE);
        let response = next.run(request).await;
        if stalls {
            response.map(|body| {
                let first = (body.into_data_stream(), true);
                Body::from_stream(stream::unfold(first, async |(mut body, first)| {
                    if first {
                        Some((body.next().await?, (body, false)))
                    } else {
                        // Holds the body all the while.
                        pending::<()>().await;
                        Some((body.next().await?, (body, false)))
                    }
                }))
            })
        } else {
            response
        }
    }))
}
