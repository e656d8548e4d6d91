//! Reads a call's id, method and tool name from a POST body, and little else.
//!
//! To turn a disconnect into a cancellation, the layer has to know which request the body contains. Most of a body consists of arguments,
//! which only the tool parses, so [`read`] walks three objects (the message, its `params` and their `_meta`) and skips everything else.
//!
//! A wrong id would cancel another request's call, while a call with an unknown id merely keeps running. When in doubt, [`read`] therefore
//! returns an error, and the call remains unknown:
//!
//! 1. **Ids match rmcp's.** An id's span is decoded with `serde_json` and rmcp 3.9's rule for integers, so an id is either the same as in
//!    rmcp or unknown. A string never equals a number.
//! 2. **Message kinds match rmcp's.** A message with `method` and `id` is a request, and one with just `method` is a notification. A
//!    message without `method` that has either `result` or `error` is a response. All of them must have `"jsonrpc": "2.0"`.
//! 3. **Ambiguity is an error.** Two parsers may disagree about a body with a duplicate envelope key, or with an escape in a key of the
//!    message or its `params`.
//! 4. **One message.** The body must be a single JSON-RPC 2.0 message. An array, which is a batch in MCP 2025-03-26, is an error no matter
//!    what it contains.
//! 5. **The inner service decides the rest.** In skipped values, invalid escapes, control characters, invalid UTF-8 and out-of-range
//!    numbers go undetected. A strict parser rejects a body with any of these errors, so there is no call. A lenient parser reads the same
//!    ids as [`read`]. Everywhere else, malformed text is detected.
//!
//! ```text
//! {"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"search","arguments":{…}}}
//!                     │             │                             │
//!                     id            method                        tool
//! ```

use std::borrow::Cow;

use self::id::parse_id;
use super::{
    ParseFailure,
    scan::{Cursor, is_plain},
};
use crate::call::RequestId;

mod answers;
mod id;

pub(crate) use self::answers::{Answers, answers};

/// The `_meta` key for a request's protocol revision, from MCP 2026-07-28 on.
const PROTOCOL_VERSION: &[u8] = b"io.modelcontextprotocol/protocolVersion";

/// A JSON-RPC message. Strings are borrowed from the body unless they contain escapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    /// Has a `method` and an `id`.
    Request(Request<'a>),
    /// Has a `method` and no `id`.
    Notification(Notification<'a>),
    /// Has a `result` or an `error`, but no `method`. It answers a request from the server, so its id does not belong to a call.
    Response,
}

/// The parsed parts of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    pub(crate) id: RequestId,
    pub(crate) method: Cow<'a, str>,
    /// `params.name`, if this is a `tools/call` and the name is a string.
    pub(crate) tool: Option<Cow<'a, str>>,
    /// The protocol revision in `params._meta`, if it is a string.
    pub(crate) protocol_version: Option<Cow<'a, str>>,
    /// Whether `params.task` is an object, as in MCP 2025-11-25's task-augmented requests.
    pub(crate) task: bool,
}

/// The parsed parts of a notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Notification<'a> {
    pub(crate) method: Cow<'a, str>,
    /// `params.requestId`, if this is a `notifications/cancelled` and the value is an id.
    pub(crate) cancels: Option<RequestId>,
}

/// The message members that the layer needs, as spans of the body.
#[derive(Default)]
struct Members<'a> {
    jsonrpc: Option<&'a [u8]>,
    id: Option<&'a [u8]>,
    method: Option<&'a [u8]>,
    result: Option<&'a [u8]>,
    error: Option<&'a [u8]>,
    params: Option<Params<'a>>,
}

/// A message's `params`. They may precede its `method`, so they are only interpreted later.
enum Params<'a> {
    Object(ParamMembers<'a>),
    Other,
}

#[derive(Default)]
struct ParamMembers<'a> {
    name: Option<&'a [u8]>,
    task: Option<&'a [u8]>,
    request_id: Option<&'a [u8]>,
    meta: Option<Meta<'a>>,
}

#[derive(Default)]
struct Meta<'a> {
    protocol_version: Option<&'a [u8]>,
}

/// Reads the envelope of a complete POST body.
///
/// # Errors
///
/// Returns the first reason the body can't be parsed.
pub(crate) fn read(body: &[u8]) -> Result<Message<'_>, ParseFailure> {
    let mut cursor = Cursor::new(body);
    let message = parse_members(&mut cursor, parse_params)?.message()?;
    cursor.expect_end()?;
    Ok(message)
}

fn parse_members<'a>(
    cursor: &mut Cursor<'a>,
    parse_params: impl Fn(&mut Cursor<'a>) -> Result<Params<'a>, ParseFailure>,
) -> Result<Members<'a>, ParseFailure> {
    match cursor.next_byte() {
        Some(b'{') => {}
        Some(b'[') => return Err(ParseFailure::Batch),
        _ => {
            // Parse it anyway, because the failure must distinguish a value of another type from invalid JSON.
            cursor.value()?;
            return Err(ParseFailure::NotAMessage);
        }
    }
    let mut members = Members::default();
    let mut key = cursor.enter_object()?;
    while let Some(name) = key {
        match name {
            b"jsonrpc" => set_once(&mut members.jsonrpc, cursor.value()?)?,
            b"id" => set_once(&mut members.id, cursor.value()?)?,
            b"method" => set_once(&mut members.method, cursor.value()?)?,
            b"result" => set_once(&mut members.result, cursor.value()?)?,
            b"error" => set_once(&mut members.error, cursor.value()?)?,
            b"params" => set_once(&mut members.params, parse_params(cursor)?)?,
            other => skip_value(other, cursor)?,
        }
        key = cursor.next_key()?;
    }
    Ok(members)
}

/// Parses `params`. `null` is treated as an empty object.
fn parse_params<'a>(cursor: &mut Cursor<'a>) -> Result<Params<'a>, ParseFailure> {
    if cursor.next_byte() != Some(b'{') {
        return Ok(match cursor.value()? {
            // rmcp treats this as if there were no parameters.
            b"null" => Params::Object(ParamMembers::default()),
            _ => Params::Other,
        });
    }
    let mut members = ParamMembers::default();
    let mut key = cursor.enter_object()?;
    while let Some(name) = key {
        match name {
            b"name" => set_once(&mut members.name, cursor.value()?)?,
            b"task" => set_once(&mut members.task, cursor.value()?)?,
            b"requestId" => set_once(&mut members.request_id, cursor.value()?)?,
            b"_meta" => set_once(&mut members.meta, parse_meta(cursor)?)?,
            other => skip_value(other, cursor)?,
        }
        key = cursor.next_key()?;
    }
    Ok(Params::Object(members))
}

fn parse_meta<'a>(cursor: &mut Cursor<'a>) -> Result<Meta<'a>, ParseFailure> {
    let mut meta = Meta::default();
    if cursor.next_byte() != Some(b'{') {
        // If `_meta` is not an object, there is no version, which is harmless because no id depends on it.
        cursor.value()?;
        return Ok(meta);
    }
    let mut key = cursor.enter_object()?;
    while let Some(name) = key {
        let value = cursor.value()?;
        // Accept escapes, because in `_meta` they cannot hide an id, and PHP writes every `/` as `\/`.
        if name == PROTOCOL_VERSION || decodes_to(name, PROTOCOL_VERSION) {
            set_once(&mut meta.protocol_version, value)?;
        }
        key = cursor.next_key()?;
    }
    Ok(meta)
}

fn decodes_to(key: &[u8], name: &[u8]) -> bool {
    if !key.contains(&b'\\') {
        return false;
    }
    let quoted = [b"\"", key, b"\""].concat();
    serde_json::from_slice::<String>(&quoted).is_ok_and(|decoded| decoded.as_bytes() == name)
}

/// Sets a member, or fails if it is already set.
fn set_once<T>(slot: &mut Option<T>, value: T) -> Result<(), ParseFailure> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(ParseFailure::DuplicateKey),
    }
}

/// Skips an unneeded member. Fails if its key contains an escape, a control character or invalid UTF-8.
fn skip_value(key: &[u8], cursor: &mut Cursor<'_>) -> Result<(), ParseFailure> {
    if !is_plain(key) {
        check_key(key)?;
    }
    cursor.value().map(|_| ())
}

#[cold]
fn check_key(key: &[u8]) -> Result<(), ParseFailure> {
    let key = str::from_utf8(key).map_err(|_| ParseFailure::NotJson)?;
    if key.bytes().any(|byte| byte == b'\\') {
        return Err(ParseFailure::EscapedKey);
    }
    if key.bytes().any(|byte| byte < b' ') {
        return Err(ParseFailure::NotJson);
    }
    Ok(())
}

/// Decodes a string from its span. Fails with [`WrongType`](ParseFailure::WrongType) for any other value.
fn decode_text(span: &[u8]) -> Result<Cow<'_, str>, ParseFailure> {
    let Some(quoted) = span.strip_prefix(b"\"") else {
        return Err(ParseFailure::WrongType);
    };
    // Fast path for almost every string, with the same result as `serde_json`.
    let plain = quoted.strip_suffix(b"\"").filter(|text| is_plain(text));
    match plain.map(str::from_utf8) {
        Some(Ok(text)) => Ok(Cow::Borrowed(text)),
        _ => serde_json::from_slice(span).map_err(|_| ParseFailure::NotJson),
    }
}

/// Decodes a member that is only used if it is a string.
///
/// Returns `None` if the member is absent or has another type, because no id depends on it.
fn decode_optional_text(span: Option<&[u8]>) -> Result<Option<Cow<'_, str>>, ParseFailure> {
    match span.map(decode_text) {
        None | Some(Err(ParseFailure::WrongType)) => Ok(None),
        Some(text) => text.map(Some),
    }
}

// === impl Members ===

impl<'a> Members<'a> {
    fn message(self) -> Result<Message<'a>, ParseFailure> {
        match (self.method()?, self.id) {
            (Some(method), Some(id)) => request(method, id, self.params).map(Message::Request),
            (Some(method), None) => notification(method, self.params).map(Message::Notification),
            (None, _) => Ok(Message::Response),
        }
    }

    /// Returns the `method`, or `None` for a response.
    fn method(&self) -> Result<Option<&'a [u8]>, ParseFailure> {
        if self.jsonrpc != Some(br#""2.0""#) {
            return Err(ParseFailure::NotAMessage);
        }
        match (self.method, self.result, self.error) {
            (Some(method), None, None) => Ok(Some(method)),
            (None, Some(_), None) | (None, None, Some(_)) => Ok(None),
            _ => Err(ParseFailure::NotAMessage),
        }
    }
}

fn request<'a>(
    method: &'a [u8],
    id_span: &[u8],
    params: Option<Params<'a>>,
) -> Result<Request<'a>, ParseFailure> {
    let method = match method {
        // Fast path for the most frequent method.
        br#""tools/call""# => Cow::Borrowed("tools/call"),
        other => decode_text(other)?,
    };
    let params = match params {
        None => ParamMembers::default(),
        Some(Params::Object(params)) => params,
        Some(Params::Other) => return Err(ParseFailure::WrongType),
    };
    let name = params.name.filter(|_| &*method == "tools/call");
    let version = params.meta.and_then(|meta| meta.protocol_version);
    Ok(Request {
        id: parse_id(id_span)?,
        tool: decode_optional_text(name)?,
        protocol_version: decode_optional_text(version)?,
        task: params.task.is_some_and(|task| task.starts_with(b"{")),
        method,
    })
}

fn notification<'a>(
    method: &'a [u8],
    params: Option<Params<'_>>,
) -> Result<Notification<'a>, ParseFailure> {
    let method = decode_text(method)?;
    let request_id = match params {
        Some(Params::Object(params)) if &*method == "notifications/cancelled" => params.request_id,
        // `params` of any other type can't refer to a request.
        _ => None,
    };
    let cancels = match request_id.map(parse_id) {
        None | Some(Err(ParseFailure::BadId)) => None,
        Some(id) => Some(id?),
    };
    Ok(Notification { method, cancels })
}

#[cfg(test)]
mod tests;
