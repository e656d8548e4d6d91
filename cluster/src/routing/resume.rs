//! Handles requests to resume calls running here or ended with an earlier incarnation.
//!
//! 1. An event id from the session's current generation is passed on in the form the session manager assigned.
//! 2. An event id from any other generation is not passed on. The event is from another incarnation, or from before the session was
//!    restored here, and the session manager could mistake its id for the id of another call's event. If the event belongs to a call, the
//!    client gets the stored answer, or an error because the server is no longer running, and then the stream ends. The answer or error is
//!    sent only if the application accepts the request, so its own checks on clients still apply. If the event belongs to no call, the
//!    client gets a new stream.
//! 3. An event id we did not create is passed on unchanged.

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use crate::{
    ids::{CallNumber, ClusterEventId, Incarnation, NamedCall, SessionHash},
    routing::fields::Fields,
};

/// The header field containing the id of the last event a client received.
pub(crate) static LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// An event id that no session manager uses.
pub(crate) const NO_EVENT: &str = "~";

/// The JSON-RPC error code for calls whose server is no longer running: internal error.
const INTERNAL_ERROR: i32 = -32603;

/// The response to a resume if there is no stored answer and the request id is unknown.
const NO_ANSWER: &str =
    "Last-Event-ID refers to an event from a server that has exited without leaving an answer\n";

/// A call that ended with its instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LostCall {
    pub(crate) session: SessionHash,
    pub(crate) incarnation: Incarnation,
    pub(crate) number: CallNumber,
    /// The call's request id, as JSON text. Without the id, no error can be addressed to the call.
    request: Option<String>,
    /// The event id as the client sent it.
    event_id: HeaderValue,
}

/// The result of [`rewrite_event_id`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RewriteOutcome {
    /// The request head contains no event id created by an instance.
    ///
    /// An event id from another generation is removed if it belongs to no call.
    Unchanged,
    /// An event from the session's current generation, with its call, if any.
    Local(Incarnation, Option<NamedCall>),
    /// An event from a call that ended with another incarnation.
    LostCall(LostCall),
}

/// Rewrites the event id in a request head into the local session manager's form.
///
/// [`RewriteOutcome`] lists the cases. A head with no session id, or with several event ids, is left unchanged. `generation` is the
/// generation of the head's session, if that session is open here.
pub(crate) fn rewrite_event_id(
    headers: &mut HeaderMap,
    generation: Option<Incarnation>,
) -> RewriteOutcome {
    try_rewrite(headers, generation).unwrap_or(RewriteOutcome::Unchanged)
}

fn try_rewrite(headers: &mut HeaderMap, generation: Option<Incarnation>) -> Option<RewriteOutcome> {
    let session = Fields::parse(headers).session.map(SessionHash::of)?;
    let mut event_ids = headers.get_all(&LAST_EVENT_ID).iter();
    let (Some(event_id), None) = (event_ids.next(), event_ids.next()) else {
        return None;
    };
    let event_id = event_id.clone();
    let event = ClusterEventId::parse(event_id.to_str().ok()?)?;
    if Some(event.incarnation) == generation {
        let plain = HeaderValue::from_str(event.plain).ok()?;
        headers.insert(&LAST_EVENT_ID, plain);
        return Some(RewriteOutcome::Local(event.incarnation, event.call));
    }
    let Some(call) = event.call else {
        // This is an event from the standalone stream, which belongs to no call. Without an event id, the client gets a new stream.
        headers.remove(&LAST_EVENT_ID);
        return None;
    };
    headers.insert(&LAST_EVENT_ID, HeaderValue::from_static(NO_EVENT));
    Some(RewriteOutcome::LostCall(LostCall {
        session,
        incarnation: event.incarnation,
        number: call.number,
        request: call.request.filter(|request| is_request_id(request)),
        event_id,
    }))
}

/// Returns `true` if a string is a request id without control characters.
///
/// The string may have been forged by a client.
fn is_request_id(text: &str) -> bool {
    let value = serde_json::from_str(text);
    matches!(value, Ok(Value::Number(_) | Value::String(_))) && !text.contains(char::is_control)
}

/// Returns `true` if a response is an event stream, which means the resume was accepted.
pub(crate) fn is_accepted<B>(response: &Response<B>) -> bool {
    let content_type = response.headers().get(header::CONTENT_TYPE);
    response.status().is_success()
        && content_type.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"))
}

// === impl LostCall ===

impl LostCall {
    /// Returns the accepted response, with the stored answer or the error as its body.
    ///
    /// Returns 400 if there is neither an answer nor a request id to address an error to.
    pub(crate) fn answer(
        &self,
        accepted: Response<Body>,
        stored: Option<&Bytes>,
    ) -> Response<Body> {
        let Some(events) = self.events(stored) else {
            let mut response = Response::new(Body::from(NO_ANSWER));
            *response.status_mut() = StatusCode::BAD_REQUEST;
            return response;
        };
        let mut response = accepted.map(|_| Body::from(events));
        let headers = response.headers_mut();
        headers.remove(header::CONTENT_LENGTH);
        headers.remove(header::CONTENT_ENCODING);
        response
    }

    /// Returns the response's events, or `None` if nothing can be addressed to the call.
    fn events(&self, stored: Option<&Bytes>) -> Option<Vec<u8>> {
        let Some(answer) = stored else {
            // The error has no event id, because otherwise the TypeScript client would retry forever.
            let error = json!({
                "code": INTERNAL_ERROR,
                "message": "the server that was running this call has exited without leaving an answer",
            });
            let call = self.request.as_ref()?;
            let event =
                format!("data: {{\"jsonrpc\":\"2.0\",\"id\":{call},\"error\":{error}}}\n\n");
            return Some(event.into_bytes());
        };
        // Repeat the client's event id, so that the client can resume once more if the answer is cut off.
        let mut events = [b"id: ", self.event_id.as_bytes(), b"\ndata:\n\n"].concat();
        for line in answer.split(|byte| *byte == b'\n') {
            events.extend_from_slice(b"data: ");
            events.extend_from_slice(line);
            events.push(b'\n');
        }
        events.push(b'\n');
        Some(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::CallNumber;

    const ME: &str = "0123456789abcdef";
    const OTHER: &str = "fedcba9876543210";

    fn rewrite(event_ids: &[&str]) -> (Option<LostCall>, Vec<String>) {
        let mut headers = HeaderMap::new();
        headers.insert("mcp-session-id", HeaderValue::from_static("a session"));
        for value in event_ids {
            headers.append(&LAST_EVENT_ID, value.parse().unwrap());
        }
        let lost = match rewrite_event_id(&mut headers, ME.parse().ok()) {
            RewriteOutcome::LostCall(lost) => Some(lost),
            RewriteOutcome::Unchanged | RewriteOutcome::Local(..) => None,
        };
        let remaining = headers.get_all(&LAST_EVENT_ID).iter();
        let remaining = remaining.map(|value| value.to_str().unwrap().to_owned());
        (lost, remaining.collect())
    }

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn an_event_of_this_incarnation_has_its_plain_id() {
        for call in ["4~7", "4~%2222%22", "~"] {
            let (lost, remaining) = rewrite(&[&format!("3/0~{ME}~{call}")]);
            assert_eq!((lost, remaining), (None, vec!["3/0".to_owned()]));
        }
    }

    #[test]
    fn an_event_of_another_incarnation_is_not_passed_on() {
        for (encoded, call) in [("7", "7"), ("%22a%20b%22", "\"a b\""), ("1%2E0", "1.0")] {
            let (lost, remaining) = rewrite(&[&format!("3/0~{OTHER}~4~{encoded}")]);
            let lost = lost.unwrap();
            assert_eq!(
                (lost.request.as_deref(), lost.number, lost.incarnation),
                (Some(call), CallNumber::new(4), OTHER.parse().unwrap())
            );
            assert_eq!(remaining, [NO_EVENT]);
        }
    }

    #[test]
    fn a_stream_without_a_call_restarts() {
        let (lost, remaining) = rewrite(&[&format!("12~{OTHER}~~")]);
        assert_eq!((lost, remaining), (None, Vec::new()));
    }

    #[test]
    fn a_call_without_its_id_gets_its_answer_and_no_error() {
        for call in ["", "nonsense", "null", "%5B7%5D", "7%0A", "%22%0A%22"] {
            let (lost, remaining) = rewrite(&[&format!("12~{OTHER}~4~{call}")]);
            let lost = lost.unwrap();
            assert_eq!(
                (lost.number, remaining),
                (CallNumber::new(4), strings(&[NO_EVENT]))
            );
            assert_eq!(lost.events(None), None, "{call}");
            assert!(lost.events(Some(&Bytes::from_static(b"{}"))).is_some());
            let accepted = Response::new(Body::empty());
            assert_eq!(lost.answer(accepted, None).status(), 400);
        }
    }

    #[test]
    fn an_event_id_that_no_instance_tagged_passes_unchanged() {
        let twice = format!("0/0~{ME}~4~7");
        for event_ids in [
            &[][..],
            &["0/0"],
            &["0/0~4~7"],
            &["0/0~0123~4~7"],
            &["0/0~0123456789ABCDEF~4~7"],
            &["0/0~0123456789abcdef~7"],
            &["~~~"],
            &[""],
            &[&*twice, &*twice],
        ] {
            let (lost, remaining) = rewrite(event_ids);
            assert_eq!((lost, remaining), (None, strings(event_ids)));
        }
    }

    #[test]
    fn the_error_is_sent_alone_and_the_answer_after_the_named_id() {
        let (lost, _) = rewrite(&[&format!("3/0~{OTHER}~4~7")]);
        let lost = lost.unwrap();
        let error = String::from_utf8(lost.events(None).unwrap()).unwrap();
        let data = error
            .strip_prefix("data: ")
            .unwrap()
            .strip_suffix("\n\n")
            .unwrap();
        let error: Value = serde_json::from_str(data).unwrap();
        assert_eq!(
            (&error["id"], &error["error"]["code"]),
            (&json!(7), &json!(INTERNAL_ERROR))
        );

        let answer = lost
            .events(Some(&Bytes::from_static(b"{\"id\":7,\n\"result\":{}}")))
            .unwrap();
        let expected =
            format!("id: 3/0~{OTHER}~4~7\ndata:\n\ndata: {{\"id\":7,\ndata: \"result\":{{}}}}\n\n");
        assert_eq!(String::from_utf8(answer).unwrap(), expected);
    }
}
