//! Determines which request a server's message answers.

use super::{Cursor, Params, ParseFailure, parse_id, parse_members};
use crate::call::RequestId;

/// The request that a message answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answers {
    /// No request. The message is itself a request or a notification, or nothing but white space.
    Nothing,
    /// The request with this id.
    One(RequestId),
    /// The message may be a response, but it is unclear to which request.
    ///
    /// [`BadId`] stands for a response without a usable id, such as `null`, which a server sends if it could not read the request's id
    /// (JSON-RPC 2.0, section 5). The other failures are the same as for a POST body.
    ///
    /// [`BadId`]: ParseFailure::BadId
    Ambiguous(ParseFailure),
}

/// Returns the request answered by `data`, a complete message.
///
/// The rules are the same as for [`read`](super::read), so that the same text means the same id in both directions. If a message has a
/// `method`, its values are skipped.
pub(crate) fn answers(data: &[u8]) -> Answers {
    try_answers(data).unwrap_or_else(Answers::Ambiguous)
}

fn try_answers(data: &[u8]) -> Result<Answers, ParseFailure> {
    let mut cursor = Cursor::new(data);
    if cursor.next_byte().is_none() {
        return Ok(Answers::Nothing);
    }
    let members = parse_members(&mut cursor, |cursor| cursor.value().map(|_| Params::Other))?;
    let answers = match members.method()? {
        Some(_) => Answers::Nothing,
        None => members
            .id
            .map_or(Err(ParseFailure::BadId), parse_id)
            .map(Answers::One)?,
    };
    cursor.expect_end()?;
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_or_an_error_answers_the_request_with_its_id() {
        for (data, id) in [
            (
                r#"{"jsonrpc":"2.0","id":1,"result":{"id":2}}"#,
                RequestId::Number(1),
            ),
            (
                r#" {"result":null,"id":-7.0,"jsonrpc":"2.0","x":[]}"#,
                RequestId::Number(-7),
            ),
            (
                r#"{"jsonrpc":"2.0","id":"\u0031","error":{"code":1,"message":""}}"#,
                RequestId::String("1".into()),
            ),
        ] {
            assert_eq!(answers(data.as_bytes()), Answers::One(id), "{data}");
        }
    }

    #[test]
    fn a_message_with_a_method_answers_nothing() {
        for data in [
            r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1}}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"sampling/createMessage","params":{"\u0069d":1}}"#,
            r#"{"jsonrpc":"2.0","id":null,"method":"ping","params":[]}"#,
        ] {
            assert_eq!(answers(data.as_bytes()), Answers::Nothing, "{data}");
        }
    }

    #[test]
    fn white_space_answers_nothing() {
        for data in ["", "\n", " \t\r\n"] {
            assert_eq!(answers(data.as_bytes()), Answers::Nothing, "{data:?}");
        }
    }

    #[test]
    fn a_response_without_a_usable_id_is_ambiguous() {
        for id in [
            "",
            r#""id":null,"#,
            r#""id":1.5,"#,
            r#""id":[1],"#,
            r#""id":{},"#,
        ] {
            let data = format!(r#"{{{id}"jsonrpc":"2.0","error":{{"code":-32700}}}}"#);
            let expected = Answers::Ambiguous(ParseFailure::BadId);
            assert_eq!(answers(data.as_bytes()), expected, "{data}");
        }
    }

    #[test]
    fn data_that_may_not_be_one_message_is_ambiguous() {
        for (data, reason) in [
            ("hello", ParseFailure::NotJson),
            (
                r#"{"jsonrpc":"2.0","id":"\x","result":1}"#,
                ParseFailure::NotJson,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"result":1}{}"#,
                ParseFailure::NotJson,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"result":{"#,
                ParseFailure::Truncated,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"id":2,"result":1}"#,
                ParseFailure::DuplicateKey,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"\u0069d":2,"result":1}"#,
                ParseFailure::EscapedKey,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"result":1,"error":{}}"#,
                ParseFailure::NotAMessage,
            ),
            (
                r#"{"jsonrpc":"2.0","id":1,"method":"a","result":1}"#,
                ParseFailure::NotAMessage,
            ),
            (r#"{"jsonrpc":"2.0","id":1}"#, ParseFailure::NotAMessage),
            (r#"{"id":1,"result":1}"#, ParseFailure::NotAMessage),
            ("[]", ParseFailure::Batch),
            (
                r#"[{"jsonrpc":"2.0","id":1,"result":1}]"#,
                ParseFailure::Batch,
            ),
            ("null", ParseFailure::NotAMessage),
        ] {
            assert_eq!(
                answers(data.as_bytes()),
                Answers::Ambiguous(reason),
                "{data}"
            );
        }
    }
}
