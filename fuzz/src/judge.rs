//! How a body should be read according to `serde_json`, JSON-RPC 2.0 and MCP. It shares no code with the crate.

use mcp_cancel_on_disconnect::{RequestId, fuzzing::ParsedMessage};

use crate::json::{DuplicateMember, Json};

/// What the crate is expected to return.
#[derive(Debug, PartialEq)]
pub enum Verdict<T> {
    /// This value and nothing else.
    Clear(T),
    /// This value or a rejection, because an id in float form is only as exact as a float.
    Perhaps(T),
    /// A rejection.
    Doubtful,
}

/// Removes the text between quotes and shortens numbers to two digits. This shows whether a parser has rejected
/// those or the rest of the body.
pub fn without_text(body: &[u8]) -> Vec<u8> {
    let mut bare = Vec::new();
    let mut inside = false;
    let mut digits = 0;
    let mut bytes = body.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => inside = !inside,
            b'\\' if inside => {
                bytes.next();
            }
            _ => {}
        }
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        // Two digits are kept, because a leading zero is invalid.
        if (!inside && digits <= 2) || *byte == b'"' {
            bare.push(*byte);
        }
    }
    bare
}

/// Returns `true` if a body starts like an array, even if the rest is invalid.
pub fn is_array(body: &[u8]) -> bool {
    let first = body.iter().find(|byte| !b" \t\r\n".contains(byte));
    first == Some(&b'[')
}

/// Returns the message in a request body.
pub fn message(body: &Json) -> Verdict<ParsedMessage> {
    verdict(body, read)
}

/// Returns the id that an event's data answers.
pub fn answer(data: &Json) -> Verdict<Option<RequestId>> {
    verdict(data, answered)
}

fn verdict<T>(body: &Json, read: impl Fn(&Json, &mut bool) -> Option<T>) -> Verdict<T> {
    let mut by_float = false;
    match read(body, &mut by_float) {
        Some(value) if by_float => Verdict::Perhaps(value),
        Some(value) => Verdict::Clear(value),
        None => Verdict::Doubtful,
    }
}

/// Returns `None` if the message is doubtful. Sets `by_float` if an id was a float.
fn read(message: &Json, by_float: &mut bool) -> Option<ParsedMessage> {
    let member = |name| message.member(name).map_err(|DuplicateMember| ()).ok();
    let (method, id) = (member("method")?, member("id")?);
    let (result, error) = (member("result")?, member("error")?);
    let params = member("params")?;
    let param = |name| match params {
        Some(params) => params.member(name).map_err(|DuplicateMember| ()).ok(),
        None => Some(None),
    };
    // Every member that means something in some message, whether or not it does in this one.
    let (name, task) = (param("name")?, param("task")?);
    let (cancels, meta) = (param("requestId")?, param("_meta")?);
    let version = match meta {
        Some(meta) => meta
            .member("io.modelcontextprotocol/protocolVersion")
            .map_err(|DuplicateMember| ())
            .ok()?,
        None => None,
    };
    if member("jsonrpc")?.and_then(Json::text) != Some("2.0") {
        return None;
    }
    match (method, id, result, error) {
        (Some(method), Some(id), None, None) => {
            if !matches!(params, None | Some(Json::Null | Json::Object(_))) {
                return None;
            }
            let method = method.text()?;
            let name = name.filter(|_| method == "tools/call");
            Some(ParsedMessage::Request {
                id: request_id(id, by_float)?,
                method: method.into(),
                tool: name.and_then(Json::text).map(Into::into),
                protocol_version: version.and_then(Json::text).map(Into::into),
                task: task.is_some_and(Json::is_object),
            })
        }
        (Some(method), None, None, None) => {
            let method = method.text()?;
            let cancels = cancels.filter(|_| method == "notifications/cancelled");
            Some(ParsedMessage::Notification {
                method: method.into(),
                cancels: cancels.and_then(|id| request_id(id, by_float)),
            })
        }
        (None, _, Some(_), None) | (None, _, None, Some(_)) => Some(ParsedMessage::Response),
        _ => None,
    }
}

/// Returns the id that a message answers, if any. Returns `None` if the message is doubtful.
fn answered(message: &Json, by_float: &mut bool) -> Option<Option<RequestId>> {
    let member = |name| message.member(name).map_err(|DuplicateMember| ()).ok();
    let (method, id) = (member("method")?, member("id")?);
    let (result, error) = (member("result")?, member("error")?);
    let _params = member("params")?;
    if member("jsonrpc")?.and_then(Json::text) != Some("2.0") {
        return None;
    }
    match (method, result, error) {
        (Some(_), None, None) => Some(None),
        (None, Some(_), None) | (None, None, Some(_)) => request_id(id?, by_float).map(Some),
        _ => None,
    }
}

fn request_id(id: &Json, by_float: &mut bool) -> Option<RequestId> {
    /// From here on, several integers share one `f64`.
    const FIRST_SHARED: f64 = 9_007_199_254_740_992.0;
    match id {
        Json::Text(text) => Some(RequestId::String(text.as_str().into())),
        Json::Integer(number) => Some(RequestId::Number(*number)),
        Json::Float(float) if float.fract() == 0.0 && float.abs() < FIRST_SHARED => {
            *by_float = true;
            Some(RequestId::Number(*float as i64))
        }
        _ => None,
    }
}
