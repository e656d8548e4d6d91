//! The answers that are the proxy's own.

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{json, value::RawValue};

/// The JSON-RPC code of an error between client and server: the first of those that are left to implementations.
const BETWEEN: i32 = -32000;

/// What is read of a request, to answer it. A member that comes twice makes it unreadable.
#[derive(Deserialize)]
struct Asked<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(rename = "method")]
    _method: IgnoredAny,
}

/// A line of text for a person.
pub fn plain(status: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

/// A JSON-RPC error that answers `request`, whose id is `null` if that cannot be read.
pub fn error(status: StatusCode, request: &[u8], message: &str) -> Response<Body> {
    let asked: Option<Asked<'_>> = match request.trim_ascii_start().first() {
        // A struct can be read from an array as well.
        Some(b'{') => serde_json::from_slice(request).ok(),
        _ => None,
    };
    let id = asked
        .and_then(|asked| asked.id)
        .map_or("null", RawValue::get);
    let error = json!({ "code": BETWEEN, "message": message });
    let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    async fn error_for(request: &[u8]) -> String {
        let response = error(StatusCode::BAD_GATEWAY, request, "it is \"down\"");
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[tokio::test]
    async fn an_error_has_the_id_of_its_request_byte_for_byte() {
        for id in [
            "1",
            "1.0",
            "\"\\u0061\"",
            "123456789012345678901234567890",
            "-0",
        ] {
            let request = format!(r#" {{"method":"tools/call","id":{id},"params":[]}}"#);
            assert_eq!(
                error_for(request.as_bytes()).await,
                format!(
                    r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32000,"message":"it is \"down\""}}}}"#
                )
            );
        }
    }

    #[tokio::test]
    async fn an_error_has_no_id_where_the_request_has_none_beyond_doubt() {
        for request in [
            "",
            "{",
            "nonsense",
            r#"{"method":"notifications/progress"}"#,
            r#"{"id":1}"#,
            r#"{"id":1,"id":2,"method":"ping"}"#,
            r#"[1,"ping"]"#,
            r#"[{"id":1,"method":"ping"}]"#,
        ] {
            let text = error_for(request.as_bytes()).await;
            assert!(
                text.starts_with(r#"{"jsonrpc":"2.0","id":null,"#),
                "{request}: {text}"
            );
        }
    }
}
