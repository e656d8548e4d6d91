//! Parses the body of a response that refuses a call.

use serde::Deserialize;
use serde_json::value::RawValue;

/// Returns the JSON-RPC error in a refusal's body, as JSON text.
pub(super) fn json_rpc_error(body: &[u8]) -> Option<&str> {
    #[derive(Deserialize)]
    struct Refusal<'a> {
        #[serde(borrow)]
        error: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct Error<'a> {
        #[serde(rename = "code")]
        _code: i64,
        #[serde(borrow, rename = "message")]
        _message: std::borrow::Cow<'a, str>,
    }
    let refusal: Refusal<'_> = serde_json::from_slice(body).ok()?;
    let text = refusal.error.get();
    // Check only the error's shape: its text is passed on unchanged, along with any other fields.
    let _is_error: Error<'_> = serde_json::from_str(text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_json_rpc_error_is_taken_from_a_refusal() {
        for (body, expected) in [
            (
                r#"{"error":{"code":-1, "message":"\u0061"},"id":null}"#,
                Some(r#"{"code":-1, "message":"\u0061"}"#),
            ),
            (r#"{"error":{"code":1.5,"message":"a"}}"#, None),
            (r#"{"error":{"code":1}}"#, None),
            (r#"{"error":"invalid_token"}"#, None),
            ("", None),
        ] {
            assert_eq!(json_rpc_error(body.as_bytes()), expected, "{body}");
        }
    }
}
