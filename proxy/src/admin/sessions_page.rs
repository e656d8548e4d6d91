//! Shows a command's sessions, as a page and as JSON.

use std::{fmt::Write as _, time::Duration};

use axum::{
    Json, Router,
    http::{HeaderValue, header},
    middleware::map_response,
    response::{Html, Response},
    routing::get,
};
use serde_json::{Value, json};

use crate::{
    server::Server,
    stdio::{SessionInfo, Stdio},
};

/// The page's content security policy.
const POLICY: &str = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'";

/// Serves `/sessions` and `/sessions.json`.
///
/// Returns no routes for an upstream, because its sessions are unknown.
pub(super) fn routes(server: &Server) -> Router {
    let Server::Stdio(stdio) = server else {
        return Router::new();
    };
    let (listed, shown) = (stdio.clone(), stdio.clone());
    Router::new()
        .route("/sessions.json", get(async move || Json(list(&listed))))
        .route("/sessions", get(async move || Html(page(&shown))))
        .layer(map_response(add_protection))
}

fn list(stdio: &Stdio) -> Value {
    let row = |session: &SessionInfo| {
        json!({
            "mcp.session.id": session.id,
            "age_seconds": session.age.as_secs(),
            "unused_seconds": session.unused.map(|unused| unused.as_secs()),
        })
    };
    let sessions = stdio.sessions();
    json!({ "sessions": sessions.iter().map(row).collect::<Vec<_>>() })
}

fn page(stdio: &Stdio) -> String {
    let sessions = stdio.sessions();
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=2>\
         <title>{count} sessions</title><h1>Sessions</h1><p>{count} in all\
         <table><tr><th>Session<th>Age<th>Last use\n",
        count = sessions.len()
    );
    for session in sessions {
        let last_use = match session.unused {
            Some(unused) => format!("{} ago", format_duration(unused)),
            None => "in use".to_owned(),
        };
        let age = format_duration(session.age);
        // The id needs no escaping, because it is a hexadecimal hash. Writing to a `String` never fails.
        let _ = writeln!(page, "<tr><td>{}<td>{age}<td>{last_use}", session.id);
    }
    page + "</table><p><a href=\"sessions.json\">JSON</a>\n"
}

fn format_duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

/// Adds headers that forbid sniffing, framing and caching.
async fn add_protection(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
