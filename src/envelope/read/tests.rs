use proptest::{collection::vec, option, prelude::*, sample::Index};
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::*;

// Bodies with a known message.

#[test]
fn a_tool_call_is_read() {
    let body = br#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"search",
        "arguments":{"name":"decoy","id":8,"q":["\"id\":9",{}]},"_meta":{"progressToken":1}}}"#;
    assert_eq!(request_in(body), tool_call(7, "search"));
}

#[test]
fn the_order_of_members_is_free() {
    let body = br#" { "params" : { "task" : {} , "name" : "search" } , "method" : "tools/call" ,
        "id" : 7 , "jsonrpc" : "2.0" } "#;
    let expected = Request {
        task: true,
        ..tool_call(7, "search")
    };
    assert_eq!(request_in(body), expected);
}

#[test]
fn only_a_tool_call_has_a_tool() {
    let body = br#"{"jsonrpc":"2.0","id":1,"method":"prompts/get","params":{"name":"greet"}}"#;
    assert_eq!(request_in(body), plain_request(1, "prompts/get"));
}

#[test]
fn a_tool_name_of_another_type_is_not_a_tool_name() {
    for name in ["1", "null", "[]", r#"{"name":"x"}"#] {
        let body = with_params(&format!(r#"{{"name":{name}}}"#));
        assert_eq!(request_in(body.as_bytes()), plain_request(7, "tools/call"));
    }
}

#[test]
fn the_protocol_version_is_read_from_meta() {
    let key = str::from_utf8(PROTOCOL_VERSION).unwrap();
    let body = with_params(&format!(r#"{{"_meta":{{"a":{{}},"{key}":"2026-07-28"}}}}"#));
    let version = request_in(body.as_bytes()).protocol_version;
    assert_eq!(version.as_deref(), Some("2026-07-28"));
}

#[test]
fn an_escape_hides_nothing_in_meta() {
    for key in [
        r"io.modelcontextprotocol\/protocolVersion",
        r"io.modelcontextprotocol/protocol\u0056ersion",
    ] {
        let body = with_params(&format!(r#"{{"_meta":{{"a\/b":1,"{key}":"2026-07-28"}}}}"#));
        let version = request_in(body.as_bytes()).protocol_version;
        assert_eq!(version.as_deref(), Some("2026-07-28"), "{body}");
        let key_again = str::from_utf8(PROTOCOL_VERSION).unwrap();
        let body = with_params(&format!(r#"{{"_meta":{{"{key}":"a","{key_again}":"b"}}}}"#));
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::DuplicateKey),
            "{body}"
        );
    }
}

#[test]
fn params_of_null_are_none() {
    let body = br#"{"jsonrpc":"2.0","id":1,"method":"tools/list","params":null}"#;
    assert_eq!(request_in(body), plain_request(1, "tools/list"));
}

#[test]
fn a_protocol_version_elsewhere_or_of_another_type_is_none() {
    let key = str::from_utf8(PROTOCOL_VERSION).unwrap();
    for params in [
        format!(r#"{{"{key}":"2026-07-28"}}"#),
        format!(r#"{{"arguments":{{"_meta":{{"{key}":"2026-07-28"}}}}}}"#),
        format!(r#"{{"_meta":{{"{key}":20260728}}}}"#),
        format!(r#"{{"_meta":["{key}","2026-07-28"]}}"#),
        r#"{"_meta":null}"#.to_owned(),
    ] {
        let body = with_params(&params);
        let request = request_in(body.as_bytes());
        assert_eq!(request.protocol_version, None, "{params}");
    }
}

#[test]
fn only_an_object_makes_a_task() {
    for (task, expected) in [(r#"{"ttl":1}"#, true), ("null", false), ("true", false)] {
        let body = with_params(&format!(r#"{{"task":{task}}}"#));
        assert_eq!(request_in(body.as_bytes()).task, expected, "{task}");
    }
}

#[test]
fn escapes_in_values_are_decoded() {
    let body = br#"{"jsonrpc":"2.0","id":"\u00e9\ud83d\ude00\"","method":"tools\/call",
        "params":{"name":"a\\b\n"}}"#;
    let expected = Request {
        id: RequestId::String("é😀\"".into()),
        ..tool_call(0, "a\\b\n")
    };
    assert_eq!(request_in(body), expected);
}

#[test]
fn integers_are_ids_in_any_spelling() {
    for (text, expected) in [
        ("0", 0),
        ("-0", 0),
        ("-0.0", 0),
        ("1.0", 1),
        ("1e2", 100),
        ("100E-2", 1),
        ("1e+2", 100),
        ("-12", -12),
        ("4503599627370495.0", 4_503_599_627_370_495),
        ("9007199254740993", 9_007_199_254_740_993),
        ("9223372036854775807", i64::MAX),
        ("-9223372036854775808", i64::MIN),
    ] {
        assert_eq!(id_in(text), Ok(RequestId::Number(expected)), "{text}");
    }
}

#[test]
fn an_integer_of_any_length_is_the_id_that_serde_json_reads() {
    for length in 1..=21 {
        for digit in ['1', '9'] {
            for sign in ["", "-"] {
                let text = format!("{sign}{}", digit.to_string().repeat(length));
                let expected = serde_json::from_str::<i64>(&text).map(RequestId::Number);
                assert_eq!(
                    id_in(&text),
                    expected.map_err(|_| ParseFailure::BadId),
                    "{text}"
                );
            }
        }
    }
}

#[test]
fn an_integer_with_a_leading_zero_is_not_json() {
    for text in [
        "00",
        "01",
        "-01",
        "000000000000000001",
        "00000000000000000000",
    ] {
        assert!(serde_json::from_str::<Value>(text).is_err(), "{text}");
        assert_eq!(id_in(text), Err(ParseFailure::NotJson), "{text}");
    }
}

#[test]
fn a_string_of_any_length_is_the_text_that_serde_json_reads() {
    for length in 0..20 {
        let before = "x".repeat(length);
        for end in [
            "",
            "\x7f",
            "é",
            "\u{1f600}",
            r"\/",
            r#"\""#,
            r"\\",
            r"\u0000",
            r"\t",
        ] {
            let name = format!("\"{before}{end}\"");
            let body = with_params(&format!(r#"{{"name":{name}}}"#));
            let expected: String = serde_json::from_str(&name).unwrap();
            assert_eq!(
                request_in(body.as_bytes()),
                tool_call(7, &expected),
                "{name}"
            );
        }
    }
}

#[test]
fn a_control_character_anywhere_in_a_used_string_is_not_json() {
    for length in 0..20 {
        for byte in 0..b' ' {
            let name = format!("{}{}x", "x".repeat(length), char::from(byte));
            let body = with_params(&format!(r#"{{"name":"{name}"}}"#));
            assert_eq!(
                read(body.as_bytes()),
                Err(ParseFailure::NotJson),
                "{name:?}"
            );
        }
    }
}

#[test]
fn a_number_and_a_string_never_alias() {
    assert_eq!(id_in("1"), id_in("1.0"));
    assert_eq!(id_in(r#""1""#), id_in(r#""\u0031""#));
    assert_ne!(id_in("1"), id_in(r#""1""#));
    assert_ne!(id_in(r#""1""#), id_in(r#""1.0""#));
    assert_ne!(id_in(r#""1""#), id_in(r#"" 1""#));
}

#[test]
fn a_float_that_serde_json_misreads_is_not_the_id_of_its_neighbour() {
    for id in 9_007_199_254_740_892..9_007_199_254_740_992_i64 {
        let read = id_in(&format!("{id}.0"));
        assert!(
            read == Ok(RequestId::Number(id)) || read == Err(ParseFailure::BadId),
            "{id} {read:?}"
        );
    }
}

#[test]
fn a_cancellation_names_its_request() {
    for (params, expected) in [
        (
            r#"{"requestId":7,"reason":"x"}"#,
            Some(RequestId::Number(7)),
        ),
        (r#"{"requestId":"7"}"#, Some(RequestId::String("7".into()))),
        (r#"{"requestId":null}"#, None),
        (r#"{"requestId":1.5}"#, None),
        (r#"{"requestId":[7]}"#, None),
        (r#"{"arguments":{"requestId":7}}"#, None),
        ("{}", None),
        ("[7]", None),
        ("null", None),
    ] {
        let body =
            format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}"#);
        let expected = Message::Notification(Notification {
            method: "notifications/cancelled".into(),
            cancels: expected,
        });
        assert_eq!(read(body.as_bytes()), Ok(expected), "{params}");
    }
}

#[test]
fn other_notifications_cancel_nothing() {
    let body = br#"{"jsonrpc":"2.0","method":"notifications/x","params":{"requestId":7}}"#;
    let expected = Message::Notification(Notification {
        method: "notifications/x".into(),
        cancels: None,
    });
    assert_eq!(read(body), Ok(expected));
}

#[test]
fn results_and_errors_are_responses_whatever_their_id() {
    for body in [
        r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":"a","error":{"code":-1,"message":""}}"#,
        r#"{"jsonrpc":"2.0","id":null,"error":{}}"#,
        r#"{"jsonrpc":"2.0","result":null,"params":3}"#,
    ] {
        assert_eq!(read(body.as_bytes()), Ok(Message::Response), "{body}");
    }
}

#[test]
fn malformed_text_in_skipped_values_is_for_the_inner_service_to_refuse() {
    let mut body = with_params(r#"{"name":"search","arguments":"#).into_bytes();
    body.truncate(body.len() - 1);
    body.extend_from_slice(b"[\"\xff\",\"\\x\",\"\n\",\"\\ud800\",1e999]}}");
    assert!(serde_json::from_slice::<Value>(&body).is_err());
    assert_eq!(request_in(&body), tool_call(7, "search"));
}

// Bodies without a known message.

#[test]
fn malformed_json_is_unknown() {
    for body in [
        "\u{feff}{}",
        "\0{}",
        "}",
        "]",
        ",",
        "'",
        "tru e",
        "nul1",
        "True",
        "{]",
        "{,}",
        "{\"a\"}",
        "{\"a\",1}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\":1 \"b\":2}",
        "{\"a\"::1}",
        "{a:1}",
        "{'a':1}",
        "{1:1}",
        "{\"a\":[1,]}",
        "{\"a\":[1 2]}",
        "{\"a\":[1}",
        "{\"a\":{\"b\":1]}",
        "{\"a\":{\"b\":1,}}",
        "{\"a\":[{}{}]}",
        "{\"a\":01}",
        "{\"a\":-}",
        "{\"a\":+1}",
        "{\"a\":.5}",
        "{\"a\":1.}",
        "{\"a\":1e}",
        "{\"a\":1e+}",
        "{\"a\":0x1}",
        "{\"a\":1_0}",
        "{\"a\":NaN}",
        "{\"a\":-Infinity}",
        "{\"a\":truefalse}",
        "{\"a\" /* */ :1}",
        "{\u{a0}\"a\":1}",
        "{\"a\":1\u{c}}",
        "{\"a\tb\":1}",
    ] {
        assert!(serde_json::from_str::<Value>(body).is_err(), "{body:?}");
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::NotJson),
            "{body:?}"
        );
    }
}

#[test]
fn malformed_text_that_is_used_is_unknown() {
    for around in [
        r#"{"jsonrpc":"2.0","id":1,"method":"ping","@":1}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"@"}"#,
        r#"{"jsonrpc":"2.0","method":"@"}"#,
        r#"{"jsonrpc":"2.0","id":"@","method":"ping"}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"@"}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"@":1}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"ping",
            "params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"@"}}}"#,
        r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"@"}}"#,
    ] {
        let (before, after) = around.split_once('@').unwrap();
        let body = |text: &[u8]| [before.as_bytes(), text, after.as_bytes()].concat();
        assert!(read(&body(b"x")).is_ok(), "{around}");
        for text in [
            &b"\xff"[..],
            b"\xc3",
            b"\xed\xa0\x80",
            b"\xc0\xaf",
            b"\n",
            b"\0",
        ] {
            assert_eq!(
                read(&body(text)),
                Err(ParseFailure::NotJson),
                "{around} {text:?}"
            );
        }
        for text in [&b"\\x"[..], b"\\ud800", b"\\u12", b"\\udc00\\ud800"] {
            // In a key, even a single escape makes the body unknown.
            let reason = read(&body(text)).unwrap_err();
            assert!(
                matches!(reason, ParseFailure::NotJson | ParseFailure::EscapedKey),
                "{around} {text:?} {reason:?}"
            );
        }
    }
}

#[test]
fn a_body_cut_anywhere_is_truncated() {
    let body = r#" {"jsonrpc":"2.0","id":-1.5e+3,"method":"tools/call","params":{"name":"é\"\\",
        "arguments":{"a":[true,false,null,{"b":"\\\""}],"n":0},"_meta":{"k":{}}}}"#;
    assert!(read(body.as_bytes()).is_ok());
    for end in 0..body.len() {
        let cut = &body.as_bytes()[..end];
        assert_eq!(
            read(cut),
            Err(ParseFailure::Truncated),
            "{}",
            cut.escape_ascii()
        );
    }
}

#[test]
fn anything_after_the_message_is_unknown() {
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    assert!(read(format!("{body} \r\n\t").as_bytes()).is_ok());
    for tail in ["x", "\0", "{}", ",", "}", "]", body] {
        let body = format!("{body}{tail}");
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::NotJson),
            "{tail:?}"
        );
    }
}

#[test]
fn a_doubtful_id_is_unknown() {
    for id in [
        "null",
        "true",
        "false",
        "{}",
        "[]",
        "[1]",
        "1.5",
        "1e-1",
        "9007199254740992.0",
        "9007199254740993.0",
        "-9007199254740992.0",
        "9223372036854775808",
        "-9223372036854775809",
        "18446744073709551616",
        "100000000000000000000000000000000",
        "1e300",
        r#"{"$serde_json::private::Number":"1"}"#,
        r#"{"$serde_json::private::RawValue":"1"}"#,
    ] {
        assert_eq!(id_in(id), Err(ParseFailure::BadId), "{id}");
    }
    // `serde_json` has no number for this id or, with `arbitrary_precision`, one that is not finite.
    assert!(id_in("1e999").is_err());
}

#[test]
fn a_body_with_a_duplicate_key_is_unknown() {
    for (key, value) in [
        ("jsonrpc", r#""2.0""#),
        ("id", "7"),
        ("method", r#""ping""#),
        ("params", "{}"),
    ] {
        let body =
            format!(r#"{{"jsonrpc":"2.0","id":7,"method":"ping","params":{{}},"{key}":{value}}}"#);
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::DuplicateKey),
            "{key}"
        );
    }
    for key in ["result", "error"] {
        let body = format!(r#"{{"jsonrpc":"2.0","id":7,"{key}":1,"{key}":1}}"#);
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::DuplicateKey),
            "{key}"
        );
    }
    for key in ["name", "task", "requestId", "_meta"] {
        let body = with_params(&format!(r#"{{"{key}":{{}},"x":0,"{key}":{{}}}}"#));
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::DuplicateKey),
            "{key}"
        );
    }
    let key = str::from_utf8(PROTOCOL_VERSION).unwrap();
    let body = with_params(&format!(r#"{{"_meta":{{"{key}":"a","{key}":"a"}}}}"#));
    assert_eq!(read(body.as_bytes()), Err(ParseFailure::DuplicateKey));
}

#[test]
fn a_duplicate_key_without_a_meaning_is_allowed() {
    let body = with_params(r#"{"name":"search","arguments":{"id":1,"id":2},"x":1,"x":2}"#);
    assert_eq!(request_in(body.as_bytes()), tool_call(7, "search"));
}

#[test]
fn an_escape_in_a_key_is_unknown_where_it_could_spell_id() {
    for body in [
        r#"{"jsonrpc":"2.0","\u0069d":1,"id":2,"method":"ping"}"#,
        r#"{"jsonrpc":"2.0","id":2,"method":"ping","i\u0064":1}"#,
        r#"{"jsonrpc":"2.0","id":2,"method":"ping","a\"b":1}"#,
        r#"{"jsonrpc":"2.0","id":2,"method":"ping","params":{"na\u006de":"x"}}"#,
    ] {
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::EscapedKey),
            "{body}"
        );
    }
    let below = with_params(r#"{"name":"search","arguments":{"\u0069d":1,"\"":2}}"#);
    assert_eq!(request_in(below.as_bytes()), tool_call(7, "search"));
}

#[test]
fn members_of_a_wrong_type_are_unknown() {
    for member in [
        r#""method":1"#,
        r#""method":null"#,
        r#""method":["ping"]"#,
        r#""method":"ping","params":[]"#,
        r#""method":"ping","params":"x""#,
        r#""params":0,"method":"ping""#,
    ] {
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,{member}}}"#);
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::WrongType),
            "{body}"
        );
    }
    let body = br#"{"jsonrpc":"2.0","method":{}}"#;
    assert_eq!(read(body), Err(ParseFailure::WrongType));
}

#[test]
fn a_body_that_is_not_a_message_is_unknown() {
    for body in [
        "1",
        "null",
        r#""x""#,
        "{}",
        r#"{"jsonrpc":"2.0"}"#,
        r#"{"jsonrpc":"2.0","id":1}"#,
        r#"{"jsonrpc":"2.0","ID":1,"Method":"ping"}"#,
        r#"{"id":1,"method":"ping"}"#,
        r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#,
        r#"{"jsonrpc":2.0,"id":1,"method":"ping"}"#,
        r#"{"jsonrpc":"2\u002e0","id":1,"method":"ping"}"#,
        r#"{"jsonrpc":" 2.0","method":"ping"}"#,
        r#"{"id":1,"result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"ping","result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"method":"ping","error":null}"#,
        r#"{"jsonrpc":"2.0","method":"ping","result":{}}"#,
        r#"{"jsonrpc":"2.0","id":1,"result":{},"error":{}}"#,
    ] {
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::NotAMessage),
            "{body}"
        );
    }
}

#[test]
fn an_array_is_unknown_whatever_is_in_it() {
    let ping = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;
    for body in [
        "[]",
        "[1]",
        "[[]]",
        "[",
        "[}",
        "[,]",
        &"[".repeat(1 << 20),
        &format!("[{ping}]"),
        &format!(" \r\n\t[{ping},{ping}] "),
        &format!("[{ping}"),
        &format!("[{ping}]{ping}"),
    ] {
        assert_eq!(
            read(body.as_bytes()),
            Err(ParseFailure::Batch),
            "{body:.99}"
        );
        let answers = answers(body.as_bytes());
        assert_eq!(
            answers,
            Answers::Ambiguous(ParseFailure::Batch),
            "{body:.99}"
        );
    }
}

#[test]
fn the_depth_limit_is_that_of_serde_json() {
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        for depth in 100..200 {
            let value = format!("{}0{}", open.repeat(depth), close.repeat(depth));
            let body = with_params(&format!(r#"{{"arguments":{value}}}"#));
            match serde_json::from_str::<Value>(&body) {
                Ok(_) => assert!(read(body.as_bytes()).is_ok(), "{depth}"),
                Err(_) => assert_eq!(read(body.as_bytes()), Err(ParseFailure::TooDeep), "{depth}"),
            }
        }
    }
    let body = with_params(&"[".repeat(1 << 20));
    assert_eq!(read(body.as_bytes()), Err(ParseFailure::TooDeep));
}

#[test]
fn every_reason_has_its_own_text() {
    let reasons = [
        ParseFailure::NotJson,
        ParseFailure::Truncated,
        ParseFailure::TooDeep,
        ParseFailure::DuplicateKey,
        ParseFailure::EscapedKey,
        ParseFailure::WrongType,
        ParseFailure::BadId,
        ParseFailure::NotAMessage,
        ParseFailure::Batch,
        ParseFailure::TooLarge,
        ParseFailure::ContentType,
        ParseFailure::ContentEncoding,
        ParseFailure::NotRead,
    ];
    let words: std::collections::HashSet<_> = reasons.iter().map(ToString::to_string).collect();
    assert_eq!(words.len(), reasons.len());
    for words in words {
        assert!(
            words.len() < 40 && words.starts_with(char::is_lowercase),
            "{words}"
        );
    }
}

// Properties, compared with how `serde_json` reads the whole body.

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_message_is_read_as_the_reference_reads_it(body in body(), layout in any::<u64>()) {
        let body = Printer::print(&body, layout);
        let whole = serde_json::from_str(&body).unwrap();
        prop_assert_eq!(read(body.as_bytes()).ok(), reference(&whole), "{}", body);
    }

    #[test]
    fn a_damaged_message_is_never_misread(
        body in body(),
        layout in any::<u64>(),
        damages in vec(damage(), 1..4),
    ) {
        let mut body = Printer::print(&body, layout).into_bytes();
        for damage in damages {
            damage.apply(&mut body);
        }
        never_misread(&body)?;
    }

    #[test]
    fn any_answer_is_read_as_the_reference_reads_it(data in answer_data(), layout in any::<u64>()) {
        let data = Printer::print(&data, layout);
        let whole = serde_json::from_str(&data).unwrap();
        let read = Some(answers(data.as_bytes())).filter(|answers| !matches!(answers, Answers::Ambiguous(_)));
        prop_assert_eq!(read, reference_answers(&whole), "{}", data);
    }

    #[test]
    fn a_damaged_answer_is_never_misread(
        data in answer_data(),
        layout in any::<u64>(),
        damages in vec(damage(), 1..4),
    ) {
        let mut data = Printer::print(&data, layout).into_bytes();
        for damage in damages {
            damage.apply(&mut data);
        }
        never_misread(&data)?;
    }

    #[test]
    fn any_bytes_are_never_misread(bytes in vec(any::<u8>(), 0..64)) {
        never_misread(&bytes)?;
    }

    #[test]
    fn any_json_like_bytes_are_never_misread(bytes in vec(structural(), 0..32)) {
        never_misread(&bytes.concat())?;
    }

    #[test]
    fn a_number_is_its_own_id_or_none(text in r"-?[0-9]{1,19}(\.[0-9]{1,9})?([eE][-+]?[0-9]{1,2})?") {
        never_misread(format!(r#"{{"jsonrpc":"2.0","method":"ping","id":{text}}}"#).as_bytes())?;
        if let Ok(id) = id_in(&text) {
            let exact = text.parse::<i64>().map(RequestId::Number);
            let nearest = RequestId::Number(text.parse::<f64>().unwrap() as i64);
            prop_assert_eq!(id, exact.unwrap_or(nearest), "{}", text);
        }
    }

    #[test]
    fn a_string_ends_where_serde_json_ends_it(text in r#"[\\"nu a]{0,40}"#) {
        let body = with_params(&format!(r#"{{"name":"search","arguments":["{text}"]}}"#));
        never_misread(body.as_bytes())?;
    }
}

fn never_misread(body: &[u8]) -> Result<(), TestCaseError> {
    let shown = body.escape_ascii().to_string();
    match (read(body), serde_json::from_slice::<Value>(body)) {
        (Ok(message), Ok(whole)) => {
            prop_assert_eq!(Some(message), reference(&whole), "{}", shown);
        }
        (Ok(_), Err(_)) => {
            // Only skipped text can be malformed, so without it, the body is JSON.
            let bare = without_text(body);
            prop_assert!(
                serde_json::from_slice::<IgnoredAny>(&bare).is_ok(),
                "{}",
                shown
            );
        }
        (Err(ParseFailure::NotJson | ParseFailure::Truncated | ParseFailure::TooDeep), whole) => {
            prop_assert!(whole.is_err(), "{}", shown);
        }
        (Err(ParseFailure::DuplicateKey | ParseFailure::EscapedKey), _) | (Err(_), Err(_)) => {}
        // `serde_json` may have misread a float, which the reference cannot detect, because it does not have the text.
        (Err(ParseFailure::BadId), Ok(whole)) if has_float_id(&whole) => {}
        (Err(_), Ok(whole)) => prop_assert_eq!(None, reference(&whole), "{}", shown),
    }
    match (answers(body), serde_json::from_slice::<Value>(body)) {
        (
            Answers::Ambiguous(
                ParseFailure::NotJson | ParseFailure::Truncated | ParseFailure::TooDeep,
            ),
            whole,
        ) => {
            prop_assert!(whole.is_err(), "{}", shown);
        }
        (Answers::Ambiguous(ParseFailure::DuplicateKey | ParseFailure::EscapedKey), _)
        | (Answers::Ambiguous(_), Err(_)) => {}
        (Answers::Ambiguous(ParseFailure::BadId), Ok(whole)) if has_float_id(&whole) => {}
        (Answers::Ambiguous(_), Ok(whole)) => {
            prop_assert_eq!(None, reference_answers(&whole), "{}", shown);
        }
        (answers, Ok(whole)) => {
            prop_assert_eq!(Some(answers), reference_answers(&whole), "{}", shown);
        }
        (answers, Err(_)) => {
            let bare = without_text(body);
            prop_assert!(
                serde_json::from_slice::<IgnoredAny>(&bare).is_ok()
                    || (body.trim_ascii().is_empty() && answers == Answers::Nothing),
                "{}",
                shown
            );
        }
    }
    Ok(())
}

/// Returns the body with every string emptied.
fn without_text(body: &[u8]) -> Vec<u8> {
    let mut bare = Vec::new();
    let mut inside = false;
    let mut bytes = body.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => inside = !inside,
            b'\\' if inside => {
                bytes.next();
            }
            _ => {}
        }
        if !inside || *byte == b'"' {
            bare.push(*byte);
        }
    }
    bare
}

// The reference, which uses neither spans nor a cursor. Its rule for ids is rmcp's.

fn reference(whole: &Value) -> Option<Message<'_>> {
    let message = whole.as_object().filter(|object| has_plain_keys(object))?;
    let params = message.get("params");
    let members = params.and_then(Value::as_object);
    let meta = members
        .and_then(|params| params.get("_meta"))
        .and_then(Value::as_object);
    if !members.is_none_or(has_plain_keys) || message.get("jsonrpc")? != "2.0" {
        return None;
    }
    let param = |key| members.and_then(|members| members.get(key));
    let has = |key| message.contains_key(key);
    match (has("method"), has("id"), has("result"), has("error")) {
        (true, true, false, false) => {
            let method = message["method"].as_str()?;
            if params.is_some_and(|params| !params.is_null()) && members.is_none() {
                return None;
            }
            let version = meta.and_then(|meta| meta.get("io.modelcontextprotocol/protocolVersion"));
            let tool = param("name").filter(|_| method == "tools/call");
            Some(Message::Request(Request {
                id: reference_id(&message["id"])?,
                method: method.into(),
                tool: tool.and_then(Value::as_str).map(Into::into),
                protocol_version: version.and_then(Value::as_str).map(Into::into),
                task: param("task").is_some_and(Value::is_object),
            }))
        }
        (true, false, false, false) => {
            let method = message["method"].as_str()?;
            let cancels = param("requestId").filter(|_| method == "notifications/cancelled");
            Some(Message::Notification(Notification {
                method: method.into(),
                cancels: cancels.and_then(reference_id),
            }))
        }
        (false, _, true, false) | (false, _, false, true) => Some(Message::Response),
        _ => None,
    }
}

fn reference_answers(whole: &Value) -> Option<Answers> {
    let message = whole.as_object().filter(|object| has_plain_keys(object))?;
    let has = |key| message.contains_key(key);
    match (has("method"), has("result"), has("error")) {
        _ if message.get("jsonrpc")? != "2.0" => None,
        (true, false, false) => Some(Answers::Nothing),
        (false, true, false) | (false, false, true) => {
            reference_id(message.get("id")?).map(Answers::One)
        }
        _ => None,
    }
}

fn has_plain_keys(object: &Map<String, Value>) -> bool {
    let escaped = |letter: char| letter < ' ' || letter == '"' || letter == '\\';
    !object.keys().any(|key| key.contains(escaped))
}

fn reference_id(id: &Value) -> Option<RequestId> {
    match id {
        Value::String(string) => Some(RequestId::String(string.as_str().into())),
        Value::Number(number) if number.is_i64() || number.is_u64() => {
            Some(RequestId::Number(i64::try_from(number.as_i128()?).ok()?))
        }
        Value::Number(number) => {
            let float = number.as_f64()?;
            let exact = float.trunc() == float && float.abs() <= 9_007_199_254_740_991.0;
            exact.then_some(RequestId::Number(float as i64))
        }
        _ => None,
    }
}

fn has_float_id(message: &Value) -> bool {
    message["id"].is_f64()
}

// Inputs for the properties.

fn body() -> impl Strategy<Value = Value> {
    prop_oneof![
        6 => message(),
        1 => vec(message(), 0..4).prop_map(Value::Array),
        1 => json_value(),
    ]
}

fn message() -> impl Strategy<Value = Value> {
    let method = prop_oneof![
        Just("tools/call"),
        Just("notifications/cancelled"),
        Just("prompts/get"),
        Just(""),
    ];
    let members = (
        mostly(Just("2.0")),
        option::weighted(0.8, mostly(id_value())),
        option::weighted(0.9, mostly(method)),
        option::weighted(0.8, mostly(params_value())),
        option::weighted(0.1, json_value()),
        option::weighted(0.1, json_value()),
        vec((key(), json_value()), 0..3),
    );
    members.prop_map(|(jsonrpc, id, method, params, result, error, others)| {
        let mut message: Map<_, _> = others.into_iter().collect();
        message.insert("jsonrpc".to_owned(), jsonrpc);
        for (key, value) in [
            ("id", id),
            ("method", method),
            ("params", params),
            ("result", result),
            ("error", error),
        ] {
            message.extend(value.map(|value| (key.to_owned(), value)));
        }
        Value::Object(message)
    })
}

/// Messages as a server would send them: mostly responses.
fn answer_data() -> impl Strategy<Value = Value> {
    let kind = prop_oneof![2 => Just("result"), 1 => Just("error"), 1 => Just("method")];
    (message(), kind, json_value()).prop_map(|(mut message, kind, value)| {
        if kind != "method" {
            message.as_object_mut().unwrap().remove("method");
            message[kind] = value;
        }
        message
    })
}

fn params_value() -> impl Strategy<Value = Value> {
    let version = mostly("[-0-9\"\\\\é]{0,10}").prop_map(
        |version| json!({ "io.modelcontextprotocol/protocolVersion": version, "progressToken": 1 }),
    );
    let members = (
        option::of(mostly(".{0,8}")),
        option::of(mostly(Just(json!({ "ttl": 60 })))),
        option::of(mostly(id_value())),
        option::of(mostly(version)),
        vec((key(), json_value()), 0..4),
    );
    members.prop_map(|(name, task, request_id, meta, others)| {
        let mut params: Map<_, _> = others.into_iter().collect();
        for (key, value) in [
            ("name", name),
            ("task", task),
            ("requestId", request_id),
            ("_meta", meta),
        ] {
            params.extend(value.map(|value| (key.to_owned(), value)));
        }
        Value::Object(params)
    })
}

/// Usually a value of the expected kind, and sometimes some other value.
fn mostly<T: Into<Value>>(usual: impl Strategy<Value = T>) -> impl Strategy<Value = Value> {
    prop_oneof![9 => usual.prop_map(Into::into), 1 => json_value()]
}

fn id_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<i32>().prop_map(|id| Value::from(f64::from(id))),
        any::<u64>().prop_map(Value::from),
        // Small enough that `serde_json` does not misread any of these as an integer.
        (-1e6..1e6).prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
        "[0-9]{1,3}".prop_map(Value::from),
    ]
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => "[a-zé_/]{0,6}",
        1 => ".{0,4}",
        1 => prop_oneof![
            Just("id"),
            Just("name"),
            Just("_meta"),
            Just("requestId"),
            Just("io.modelcontextprotocol/protocolVersion"),
        ]
        .prop_map(str::to_owned),
    ]
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        id_value(),
        "[\\\\\"{}:, nué\u{1F600}\u{0}\n]{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::Array),
            vec((key(), inner), 0..4).prop_map(|members| members.into_iter().collect()),
        ]
    })
}

fn structural() -> impl Strategy<Value = Vec<u8>> {
    let pieces: [&[u8]; 20] = [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\"",
        b"\\",
        b"\"a\"",
        b"\"id\":",
        b"1",
        b"0",
        b"-",
        b".",
        b"e",
        b"true",
        b"null",
        b" ",
        b"\"jsonrpc\":\"2.0\"",
        b"\"result\":1",
    ];
    (0..pieces.len()).prop_map(move |at| pieces[at].to_vec())
}

#[derive(Debug, Clone)]
enum Damage {
    Set(Index, u8),
    Insert(Index, u8),
    Remove(Index),
    Cut(Index),
    Repeat(Index, Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let byte = || prop_oneof![3 => structural().prop_map(|piece| piece[0]), 1 => any::<u8>()];
    prop_oneof![
        4 => (any::<Index>(), byte()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        4 => (any::<Index>(), byte()).prop_map(|(at, byte)| Damage::Insert(at, byte)),
        4 => any::<Index>().prop_map(Damage::Remove),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(from, to)| Damage::Repeat(from, to)),
    ]
}

impl Damage {
    fn apply(&self, body: &mut Vec<u8>) {
        let places = body.len() + 1;
        match self {
            Self::Insert(at, byte) => body.insert(at.index(places), *byte),
            Self::Cut(at) => body.truncate(at.index(places)),
            Self::Repeat(from, to) => {
                let (from, to) = (from.index(places), to.index(places));
                let piece = body[from.min(to)..from.max(to)].to_vec();
                body.splice(to..to, piece);
            }
            Self::Set(at, byte) if !body.is_empty() => body[at.index(places - 1)] = *byte,
            Self::Remove(at) if !body.is_empty() => {
                body.remove(at.index(places - 1));
            }
            Self::Set(..) | Self::Remove(_) => {}
        }
    }
}

/// Writes a value in one of many layouts.
///
/// The layout is compact or pretty, or has members in any order, white space anywhere and needless escapes in values.
struct Printer {
    out: String,
    seed: u64,
}

impl Printer {
    fn print(value: &Value, layout: u64) -> String {
        match layout % 4 {
            0 => value.to_string(),
            1 => serde_json::to_string_pretty(value).unwrap(),
            _ => {
                let mut printer = Self {
                    out: String::new(),
                    seed: layout | 1,
                };
                printer.value(value);
                printer.out
            }
        }
    }

    fn value(&mut self, value: &Value) {
        self.space();
        match value {
            Value::Array(elements) => {
                self.out.push('[');
                for (at, element) in elements.iter().enumerate() {
                    self.comma(at);
                    self.value(element);
                }
                self.space();
                self.out.push(']');
            }
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                members.sort_by_cached_key(|_| self.roll(u64::MAX));
                self.out.push('{');
                for (at, (key, value)) in members.into_iter().enumerate() {
                    self.comma(at);
                    self.space();
                    self.out.push_str(&Value::from(key.as_str()).to_string());
                    self.space();
                    self.out.push(':');
                    self.value(value);
                }
                self.space();
                self.out.push('}');
            }
            // An escape in the version makes a message unknown, see the tables above.
            Value::String(text) if text != "2.0" => {
                self.out.push('"');
                for letter in text.chars() {
                    if self.roll(6) == 0 {
                        for unit in letter.encode_utf16(&mut [0; 2]) {
                            self.out.push_str(&format!("\\u{unit:04x}"));
                        }
                    } else {
                        let quoted = Value::from(letter.to_string()).to_string();
                        self.out.push_str(&quoted[1..quoted.len() - 1]);
                    }
                }
                self.out.push('"');
            }
            other => self.out.push_str(&other.to_string()),
        }
        self.space();
    }

    fn comma(&mut self, at: usize) {
        if at > 0 {
            self.out.push(',');
        }
    }

    fn space(&mut self) {
        if self.roll(4) == 0 {
            let kind = self.roll(5) as usize;
            self.out.push_str([" ", "\n", "\r\n", "\t", "   "][kind]);
        }
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % sides
    }
}

// Helpers for the tables.

fn plain_request(id: i64, method: &str) -> Request<'_> {
    Request {
        id: RequestId::Number(id),
        method: method.into(),
        tool: None,
        protocol_version: None,
        task: false,
    }
}

fn tool_call(id: i64, tool: &str) -> Request<'_> {
    Request {
        tool: Some(tool.into()),
        ..plain_request(id, "tools/call")
    }
}

fn with_params(params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{params}}}"#)
}

fn request_in(body: &[u8]) -> Request<'_> {
    match read(body) {
        Ok(Message::Request(request)) => request,
        other => panic!("{other:?} in {}", body.escape_ascii()),
    }
}

fn id_in(text: &str) -> Result<RequestId, ParseFailure> {
    let body = format!(r#"{{"jsonrpc":"2.0","method":"ping","id":{text}}}"#);
    match read(body.as_bytes())? {
        Message::Request(request) => Ok(request.id),
        other => panic!("{other:?}"),
    }
}
