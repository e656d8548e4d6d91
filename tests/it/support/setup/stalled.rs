//! Streams that stay unread inside the layer, as behind a full buffer.
//!
//! Their end is only detected once they are dropped.

use std::future::pending;

use axum::{
    Router,
    body::Body,
    extract::Request,
    middleware::{Next, from_fn},
};
use futures_util::{StreamExt, stream};

use super::EXCHANGE;

/// Reads the streams of named exchanges up to their first event, then holds them unread.
///
/// They stay unread until they are dropped.
pub(crate) fn stalled(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let is_named = request.headers().contains_key(EXCHANGE);
        let response = next.run(request).await;
        if is_named {
            response.map(|body| {
                let first = (body.into_data_stream(), true);
                Body::from_stream(stream::unfold(first, async |(mut body, first)| {
                    if first {
                        Some((body.next().await?, (body, false)))
                    } else {
                        // Keeps hold of the body in the meantime.
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
