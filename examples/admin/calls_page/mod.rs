//! Serves the calls in flight as a page and as JSON, with a button to cancel each call. Copy this directory into your
//! server:
//!
//! ```ignore
//! let app = Router::new().nest("/admin", calls_page::routes(layer.calls()));
//! ```
//!
//! Any client that can reach these routes can cancel every call and see the names of all tools. Put your own
//! authentication in front of them, or serve them only on a loopback address, wrapped in [`local_names_only`].
//!
//! 1. Only a POST can change anything, and only if it was sent by the page itself ([`SameOrigin`]).
//! 2. The method, the tool and the ids are sent by clients, so they are truncated, escaped, and shown as text
//!    ([`html`]).
//! 3. The page loads only its own style sheet and script, and inline code is not run.
//! 4. Session ids are secrets, so the page shows a keyed hash instead. Calls and log lines with the same hash belong to
//!    the same session.
//! 5. Call numbers are valid only within one process. Each page therefore sends the mark of the process that served it,
//!    and a page from another process cannot cancel anything. A script can send the mark, too: it is `process` in
//!    `/calls.json`.
//! 6. A button that has just moved under the pointer cannot be pressed, because otherwise a double click or a moving
//!    row would cancel the wrong call.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use axum::{
    Form, Json, Router,
    extract::{Query, State},
    http::{HeaderValue, StatusCode, header},
    middleware::map_response,
    response::{Html, IntoResponse, Response},
    routing::get,
};
use mcp_cancel_on_disconnect::{Calls, CancelReason};
use serde::{Deserialize, Serialize};

use self::{origin::SameOrigin, row::Row};

mod html;
mod origin;
mod row;

pub(crate) use self::origin::local_names_only;

const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
    form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The calls, and the key that distinguishes this process from others.
#[derive(Clone)]
pub(crate) struct Page {
    calls: Calls,
    /// The key for the page's mark. Each process has a different key.
    key: Arc<RandomState>,
}

#[derive(Serialize)]
struct Listing {
    /// This process's mark. The call numbers are valid only within this process.
    process: String,
    calls: Vec<Row>,
}

#[derive(Deserialize)]
struct Cancel {
    call: u64,
}

#[derive(Deserialize)]
struct Source {
    /// The mark of the page whose button was pressed. A script may omit it.
    page: Option<String>,
}

#[derive(Deserialize)]
struct Notice {
    /// A call that could not be cancelled.
    missed: Option<u64>,
}

/// Serves `/calls`, `/calls.json`, and the page's files.
pub(crate) fn routes(page: impl Into<Page>) -> Router {
    let style = (
        [(header::CONTENT_TYPE, "text/css")],
        include_str!("calls.css"),
    );
    let script = (
        [(header::CONTENT_TYPE, "text/javascript")],
        include_str!("calls.js"),
    );
    Router::new()
        .route("/calls", get(show).post(cancel))
        .route("/calls.json", get(list))
        .route("/calls.css", get(async || style))
        .route("/calls.js", get(async || script))
        .layer(map_response(add_security_headers))
        .with_state(page.into())
}

async fn show(State(page): State<Page>, Query(notice): Query<Notice>) -> Html<String> {
    Html(html::page(&page.rows(), &page.mark(), notice.missed))
}

async fn list(State(page): State<Page>) -> Json<Listing> {
    Json(Listing {
        process: page.mark(),
        calls: page.rows(),
    })
}

/// Cancels a call and redirects to the page.
///
/// Because of the redirect, reloading the page does not submit the form again.
async fn cancel(
    _: SameOrigin,
    State(page): State<Page>,
    Query(source): Query<Source>,
    Form(Cancel { call }): Form<Cancel>,
) -> Response {
    let location = if page.matches_process(source.page.as_deref()) && page.cancel(call) {
        "calls".to_owned()
    } else {
        format!("calls?missed={call}")
    };
    (StatusCode::SEE_OTHER, [(header::LOCATION, location)]).into_response()
}

async fn add_security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
        // With "no-referrer", browsers would send `Origin: null` along with the form.
        (header::REFERRER_POLICY, "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

// === impl Page ===

impl From<Calls> for Page {
    fn from(calls: Calls) -> Self {
        let key = Arc::default();
        Self { calls, key }
    }
}

impl Page {
    fn rows(&self) -> Vec<Row> {
        let calls = self.calls.snapshot();
        calls.iter().map(Row::new).collect()
    }

    fn mark(&self) -> String {
        format!("{:016x}", self.key.hash_one("the page"))
    }

    /// Returns `true` if the mark belongs to this process or is absent.
    pub(crate) fn matches_process(&self, mark: Option<&str>) -> bool {
        mark.is_none_or(|mark| mark == self.mark())
    }

    /// Cancels a call. Returns `false` if it has already ended, or if only its client may end it.
    pub(crate) fn cancel(&self, id: u64) -> bool {
        let id = id.to_string().parse();
        id.is_ok_and(|id| self.calls.cancel(id, CancelReason::Requested))
    }
}
