//! Lets scripts with the token from `--admin-token` see the calls and cancel them.
//!
//! `POST /calls/{id}/cancel` cancels a call. Scripts can add the parameter `process`, with its value from `/calls.json`, so
//! that they don't cancel a different call that has the same number after a restart.

use axum::{
    Json, Router,
    extract::{
        Path, Query, Request, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::{Next, from_fn_with_state, map_response},
    response::{IntoResponse as _, Response},
    routing::post,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::calls_page::Page;
use crate::{config::AdminToken, headers::exactly_one};

/// The query parameters.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Parameters {
    /// The `process` from the `/calls.json` that listed the call.
    process: Option<String>,
}

/// Serves `/calls/{id}/cancel`.
pub(super) fn routes(page: Page, token: AdminToken) -> Router {
    let router = Router::new()
        .route("/calls/{id}/cancel", post(cancel))
        .layer(map_response(forbid_caching))
        .with_state(page);
    restrict_to_token(router, token)
}

/// Rejects requests to these routes that lack the token.
pub(super) fn restrict_to_token(router: Router, token: AdminToken) -> Router {
    router.route_layer(from_fn_with_state(token, require_token))
}

async fn require_token(State(token): State<AdminToken>, request: Request, next: Next) -> Response {
    if bearer(request.headers()).is_some_and(|given| token.is(given)) {
        return next.run(request).await;
    }
    let refused = (
        StatusCode::UNAUTHORIZED,
        [(header::WWW_AUTHENTICATE, "Bearer")],
        error("the request needs the bearer token from --admin-token"),
    );
    refused.into_response()
}

/// Returns a request's bearer token.
///
/// Returns `None` unless the request has exactly one `Authorization` header, with the `Bearer` scheme.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = exactly_one(headers, &header::AUTHORIZATION)?.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then(|| token.trim_start_matches(' '))
}

/// Cancels the call with the given id.
///
/// The status is 400 for an unknown parameter, 409 if `process` does not match this process, and 404 if there is no such call
/// or it can't be cancelled.
async fn cancel(
    State(page): State<Page>,
    id: Result<Path<String>, PathRejection>,
    parameters: Result<Query<Parameters>, QueryRejection>,
) -> (StatusCode, Json<Value>) {
    let Ok(Query(parameters)) = parameters else {
        let text = "the only query parameter is `process`";
        return (StatusCode::BAD_REQUEST, error(text));
    };
    if !page.matches_process(parameters.process.as_deref()) {
        let text = "the call belonged to a different proxy process";
        return (StatusCode::CONFLICT, error(text));
    }
    let id = id.map_or_else(|_| String::new(), |Path(id)| id);
    if id.parse().is_ok_and(|id| page.cancel(id)) {
        let cancelled = json!({ "call": id, "cancelled": true });
        return (StatusCode::OK, Json(cancelled));
    }
    let text = "no such call is in flight, or only its client may end it";
    (StatusCode::NOT_FOUND, error(text))
}

fn error(text: &str) -> Json<Value> {
    Json(json!({ "error": text }))
}

async fn forbid_caching(mut response: Response) -> Response {
    let no_store = HeaderValue::from_static("no-store");
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, no_store);
    response
}
