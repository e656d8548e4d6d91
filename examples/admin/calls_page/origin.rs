//! Checks a request's origin and host.

use std::net::IpAddr;

use axum::{
    extract::{FromRequestParts, Request},
    http::{HeaderMap, HeaderName, StatusCode, header, request::Parts, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// A request sent by one of this server's own pages.
///
/// Other sites can make a browser send forms here, along with its cookies, but they cannot forge the headers in which
/// the browser specifies a request's origin.
///
/// `Origin` must contain the request's host, and `Sec-Fetch-Site` must be `same-origin`. At least one of these headers
/// must be present, and neither header may be repeated. A reverse proxy must not change `Host`.
pub(super) struct SameOrigin;

/// Rejects any request whose host is neither `localhost` nor a loopback address.
///
/// Otherwise a site could make its own name resolve to 127.0.0.1, and would then have the same origin (DNS rebinding).
pub(crate) async fn local_names_only(request: Request, next: Next) -> Response {
    let host = host(request.uri().authority(), request.headers());
    let host = host.as_ref().map(Authority::host);
    if host.is_some_and(is_this_machine) {
        next.run(request).await
    } else {
        (StatusCode::FORBIDDEN, "only for this machine\n").into_response()
    }
}

impl<S: Sync> FromRequestParts<S> for SameOrigin {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        is_same_origin(parts)
            .filter(|is_same| *is_same)
            .map(|_| Self)
            .ok_or((StatusCode::FORBIDDEN, "only from the page itself\n"))
    }
}

fn is_this_machine(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || address
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Returns `true` if one of this server's pages sent the request.
///
/// Returns `None` if one of the headers is repeated or is not text, if there is no valid host, or if neither header is
/// present.
fn is_same_origin(parts: &Parts) -> Option<bool> {
    let origin = single_value(&parts.headers, &header::ORIGIN)?;
    let site = single_value(&parts.headers, &SEC_FETCH_SITE)?;
    let host = host(parts.uri.authority(), &parts.headers)?;
    let origin_is_host = origin.map(|origin| {
        let authority = origin
            .strip_prefix("http://")
            .or_else(|| origin.strip_prefix("https://"));
        // Compare the parsed authorities, because host names are case-insensitive.
        authority.and_then(|authority| authority.parse().ok()) == Some(host)
    });
    let site_is_same = site.map(|site| site == "same-origin");
    match (origin_is_host, site_is_same) {
        (None, None) => None,
        (origin, site) => Some(origin.unwrap_or(true) && site.unwrap_or(true)),
    }
}

/// Returns a request's host, which HTTP/2 puts in the URI.
fn host(authority: Option<&Authority>, headers: &HeaderMap) -> Option<Authority> {
    match authority {
        Some(authority) => Some(authority.clone()),
        None => single_value(headers, &header::HOST)??.parse().ok(),
    }
}

/// Returns a header's value, or `Some(None)` if the header is absent.
///
/// Returns `None` if the header is repeated or its value is not text.
fn single_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<Option<&'a str>> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Some(None),
        (Some(value), None) => value.to_str().ok().map(Some),
        _ => None,
    }
}
