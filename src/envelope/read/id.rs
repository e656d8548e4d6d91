//! Decodes ids the way rmcp does.

use serde_json::{Number, Value};

use crate::{call::RequestId, envelope::ParseFailure};

/// Decodes an id from its span. The value is the same as in rmcp 3.9.
pub(super) fn parse_id(span: &[u8]) -> Result<RequestId, ParseFailure> {
    // Pass only strings and numbers to `serde_json`: if any crate in the build enables its `arbitrary_precision` or `raw_value`, it reads
    // some objects as numbers, too.
    if !matches!(span.first(), Some(b'"' | b'-' | b'0'..=b'9')) {
        return Err(ParseFailure::BadId);
    }
    // Fast path for almost every id, with the same result as `serde_json`.
    if let Some(number) = digits(span) {
        return Ok(RequestId::Number(number));
    }
    match serde_json::from_slice(span).map_err(|_| ParseFailure::NotJson)? {
        Value::String(string) => Ok(RequestId::String(string.into())),
        Value::Number(number) => integer(&number, span)
            .map(RequestId::Number)
            .ok_or(ParseFailure::BadId),
        _ => Err(ParseFailure::BadId),
    }
}

/// Parses up to 18 decimal digits. Returns `None` for any other text.
///
/// A longer number might not fit in an `i64`.
fn digits(span: &[u8]) -> Option<i64> {
    if span.len() > 18 {
        return None;
    }
    span.iter().try_fold(0, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| i64::from(byte - b'0'))?;
        Some(10 * number + digit)
    })
}

/// Returns a number's integer value, or `None` if it is uncertain or not an `i64`.
///
/// An integer in float form is accepted only below 2^53, because from there on, several integers share one `f64`. It must also be what
/// `std` parses, which is stricter than rmcp: unless its `float_roundtrip` is enabled, `serde_json` may miss the nearest `f64` by one. For
/// example, version 1.0.154 reads `9007199254740991.0` as the integer before it, and `950884728136105.9` as an integer. If `std` parses a
/// different number, so may the client.
fn integer(number: &Number, span: &[u8]) -> Option<i64> {
    const FIRST_SHARED: f64 = 9_007_199_254_740_992.0;
    number.as_i64().or_else(|| {
        let float = number.as_f64()?;
        let nearest: f64 = str::from_utf8(span).ok()?.parse().ok()?;
        let integral = float.fract() == 0.0 && float.abs() < FIRST_SHARED;
        (integral && float == nearest).then_some(float as i64)
    })
}
