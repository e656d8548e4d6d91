//! What a `Content-Type` names.

use http::HeaderValue;

/// Whether it names this media type, whatever its parameters (RFC 9110, section 8.3.1).
pub(crate) fn names(value: &HeaderValue, media_type: &str) -> bool {
    if value.as_bytes() == media_type.as_bytes() {
        return true;
    }
    let essence = value.as_bytes().split(|byte| *byte == b';').next();
    essence.is_some_and(|essence| {
        essence
            .trim_ascii()
            .eq_ignore_ascii_case(media_type.as_bytes())
    })
}
