//! The bodies. In some way, each refused body contains id 1, which is the held call's.

use bytes::Bytes;

use crate::support::*;

/// A body and how it is sent.
pub(super) struct Row {
    pub(super) what: &'static str,
    body: Bytes,
    /// Values for `Content-Type` in place of `application/json`.
    ///
    /// There may be none or several.
    content_types: &'static [&'static str],
    content_encoding: Option<&'static str>,
    pub(super) sent: Sent,
}

pub(super) enum Sent {
    Whole,
    /// In chunks of these sizes, followed by one chunk with the rest.
    Chunked(Vec<usize>),
    /// Too large to be written before the refusal is read.
    OverHttp2,
}

// === impl Row ===

impl Row {
    fn new(what: &'static str, body: impl Into<Bytes>) -> Self {
        Self {
            what,
            body: body.into(),
            content_types: &["application/json"],
            content_encoding: None,
            sent: Sent::Whole,
        }
    }

    fn content_types(mut self, types: &'static [&'static str]) -> Self {
        self.content_types = types;
        self
    }

    fn content_encoding(mut self, encoding: &'static str) -> Self {
        self.content_encoding = Some(encoding);
        self
    }

    fn chunked(mut self, sizes: impl IntoIterator<Item = usize>) -> Self {
        self.sent = Sent::Chunked(sizes.into_iter().collect());
        self
    }

    fn over_http2(mut self) -> Self {
        self.sent = Sent::OverHttp2;
        self
    }

    pub(super) fn request(&self, mcp: &Mcp) -> Request {
        let mut request = mcp.post_request(self.body.clone());
        request.headers.retain(|(name, _)| name != "content-type");
        let types = self.content_types.iter();
        request = types.fold(request, |request, value| {
            request.header("content-type", value)
        });
        match self.content_encoding {
            Some(encoding) => request.header("content-encoding", encoding),
            None => request,
        }
    }
}

/// Returns a call to `hold` that starts with these members.
fn call(members: &str) -> String {
    let label = r#"{"name":"hold","arguments":{"label":"never"}}"#;
    format!(r#"{{"jsonrpc":"2.0",{members}"method":"tools/call","params":{label}}}"#)
}

/// Returns a call with this id and text that is accepted.
fn echo(id: &str, text: &str) -> String {
    let params = format!(r#"{{"name":"echo","arguments":{{"text":"{text}"}}}}"#);
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{params}}}"#)
}

/// Returns a cancellation with these parameters.
fn cancel(params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{params}}}"#)
}

/// Returns a call with nested arguments.
fn nested(id: &str, levels: usize) -> String {
    let (open, close) = ("[".repeat(levels), "]".repeat(levels));
    let params = format!(r#"{{"name":"echo","arguments":{{"text":{open}{close}}}}}"#);
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{params}}}"#)
}

/// Returns a valid text with each `?` replaced by other bytes.
fn with_bytes(text: &str, bytes: &[u8]) -> Vec<u8> {
    text.split('?')
        .map(str::as_bytes)
        .collect::<Vec<_>>()
        .join(bytes)
}

/// `{"jsonrpc":"2.0","id":1,"method":"ping"}`, compressed.
const GZIP: &[u8] = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xab\x56\xca\x2a\xce\xcf\x2b\x2a\x48\x56\xb2\x52\x32\xd2\x33\x50\xd2\x51\xca\x4c\x51\xb2\x32\xd4\x51\xca\x4d\x2d\xc9\xc8\x07\x32\x95\x0a\x32\xf3\xd2\x95\x6a\x01\xf4\x17\x99\xac\x28\x00\x00\x00";

#[rustfmt::skip]
pub(super) fn table() -> Vec<Row> {
    let one = call(r#""id":1,"#);
    let half = one.len() / 2;
    let rows = [
        // Not JSON, or only part of it.
        ("nothing", String::new()),
        ("white space", " \r\n\t ".to_owned()),
        ("an opening brace", "{".to_owned()),
        ("a closing brace", "}".to_owned()),
        ("a word", "hello".to_owned()),
        ("half a call", one[..half].to_owned()),
        ("a call without its closing brace", one[..one.len() - 1].to_owned()),
        ("a call that ends in its id", r#"{"jsonrpc":"2.0","method":"ping","id":1"#.to_owned()),
        ("a call that ends in a string", r#"{"jsonrpc":"2.0","id":1,"method":"tools/ca"#.to_owned()),
        ("a call that ends in an escape", r#"{"jsonrpc":"2.0","id":1,"method":"tools\"#.to_owned()),
        ("one comma too many", call(r#""id":1,,"#)),
        ("a trailing comma", r#"{"jsonrpc":"2.0","id":1,"method":"ping",}"#.to_owned()),
        ("a missing colon", r#"{"jsonrpc":"2.0","id" 1,"method":"ping"}"#.to_owned()),
        ("single quotes", one.replace('"', "'")),
        ("keys without quotes", "{jsonrpc:\"2.0\",id:1,method:\"ping\"}".to_owned()),
        ("a comment", format!("/* a call */ {one}")),
        ("two calls in a row", format!("{one}{one}")),
        ("two calls on two lines", format!("{one}\n{one}\n")),
        ("a call and a word", format!("{one} hello")),
        ("a call and a brace", format!("{one}}}")),
        ("an event with a call", format!("data: {one}\n\n")),
        ("a form with a call", format!("body={one}")),
        // JSON, but not a message.
        ("null", "null".to_owned()),
        ("true", "true".to_owned()),
        ("a number", "1".to_owned()),
        ("a string", r#""{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}""#.to_owned()),
        ("an empty object", "{}".to_owned()),
        ("an id alone", r#"{"id":1}"#.to_owned()),
        ("no version", r#"{"id":1,"method":"ping"}"#.to_owned()),
        ("another version", r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#.to_owned()),
        ("a version that is a number", r#"{"jsonrpc":2.0,"id":1,"method":"ping"}"#.to_owned()),
        ("no method", r#"{"jsonrpc":"2.0","id":1}"#.to_owned()),
        ("a method that is a number", r#"{"jsonrpc":"2.0","id":1,"method":1}"#.to_owned()),
        ("a method that is null", r#"{"jsonrpc":"2.0","id":1,"method":null}"#.to_owned()),
        ("a method that is a list", r#"{"jsonrpc":"2.0","id":1,"method":["ping"]}"#.to_owned()),
        ("a message in a message", format!(r#"{{"jsonrpc":"2.0","message":{one}}}"#)),
        // Ids.
        ("the id null", call(r#""id":null,"#)),
        ("the id true", call(r#""id":true,"#)),
        ("the id {}", call(r#""id":{},"#)),
        ("the id [1]", call(r#""id":[1],"#)),
        ("the id {\"id\":1}", call(r#""id":{"id":1},"#)),
        ("a fractional id", call(r#""id":1.5,"#)),
        ("the id NaN", call(r#""id":NaN,"#)),
        ("an id with a plus sign", call(r#""id":+1,"#)),
        ("an id with a leading zero", call(r#""id":01,"#)),
        ("a hexadecimal id", call(r#""id":0x1,"#)),
        ("the id 1e400", call(r#""id":1e400,"#)),
        ("an id with 1,000 digits", call(&format!(r#""id":{},"#, "1".repeat(1_000)))),
        ("an id one above i64", call(r#""id":9223372036854775808,"#)),
        ("an id one above u64", call(r#""id":18446744073709551617,"#)),
        ("an id that is a half surrogate", call(r#""id":"\ud800","#)),
        ("a duplicate id, 1 first", call(r#""id":1,"id":99,"#)),
        ("a duplicate id, 1 last", call(r#""id":99,"id":1,"#)),
        ("the same id twice", call(r#""id":1,"id":1,"#)),
        // Other members.
        ("a duplicate method", call(r#""id":1,"method":"ping","#)),
        ("a duplicate version", call(r#""id":1,"jsonrpc":"2.0","#)),
        ("parameters that are a list", r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":["hold"]}"#.to_owned()),
        ("parameters that are a string", r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":"hold"}"#.to_owned()),
        ("a call with a result", call(r#""id":99,"result":{},"#)),
        ("a result and an error", r#"{"jsonrpc":"2.0","id":99,"result":{},"error":{"code":1,"message":"x"}}"#.to_owned()),
        // Batches.
        ("an empty batch", "[]".to_owned()),
        ("a batch with one call", format!("[{one}]")),
        ("a batch with two calls", format!("[{one},{}]", call(r#""id":2,"#))),
        ("a batch of numbers", "[1,2,3]".to_owned()),
        ("a batch with a cancel", format!("[{}]", cancel(r#"{"requestId":1}"#))),
        ("a batch in a batch", format!("[[{one}]]")),
        ("an unterminated batch", format!("[{one},")),
        // Depth.
        ("127 levels of nesting", nested("99", 124)),
        ("128 levels of nesting", nested("1", 125)),
        ("100,000 levels of nesting", nested("1", 100_000)),
        ("100,000 unterminated levels", "[".repeat(100_000)),
        // Messages that are accepted but are not calls, or do not refer to the held call.
        ("an answer to a request from the server", r#"{"jsonrpc":"2.0","id":1,"result":{}}"#.to_owned()),
        ("an error for a request from the server", r#"{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"x"}}"#.to_owned()),
        ("a notification of another kind", r#"{"jsonrpc":"2.0","method":"notifications/1","params":{"requestId":1}}"#.to_owned()),
        ("a cancel without an id", cancel("{}")),
        ("a cancel for null", cancel(r#"{"requestId":null}"#)),
        ("a cancel for true", cancel(r#"{"requestId":true}"#)),
        ("a cancel for the string 1", cancel(r#"{"requestId":"1"}"#)),
        ("a cancel for a list", cancel(r#"{"requestId":[1]}"#)),
        ("a cancel for a fraction", cancel(r#"{"requestId":1.5}"#)),
        ("a cancel for an unknown call", cancel(r#"{"requestId":99}"#)),
        ("a cancel with its parameters in a list", cancel(r#"[{"requestId":1}]"#)),
        ("a call with the string 1 as its id", echo(r#""1""#, "x")),
        ("a call with an empty id", echo(r#""""#, "x")),
        ("a call with a negative id", echo("-1", "x")),
        ("a call with an id in float form", echo("98.0", "x")),
        ("a call with an id in exponent form", echo("97e0", "x")),
        ("a call with an escaped id", echo(r#""\u0031""#, "x")),
        ("a call with an escape in a key", echo("96", "x").replace("id", r"\u0069d")),
        ("a call that names the held one in its text", echo("95", r#"\"id\":1,\"method\":\"ping\""#)),
        ("a call to an unknown method", r#"{"jsonrpc":"2.0","id":94,"method":"tools/fly"}"#.to_owned()),
        ("a call to an empty method", r#"{"jsonrpc":"2.0","id":93,"method":""}"#.to_owned()),
        ("a call to an unknown tool", echo("92", "x").replace("echo", "fly")),
        ("a call to a tool with a number as its name", echo("91", "x").replace(r#""echo""#, "7")),
        ("a call with parameters of the wrong type", echo("90", "x").replace(r#""x""#, "{}")),
        ("a call with a very long id", echo(&format!(r#""{}""#, "1".repeat(100_000)), "x")),
        ("a call with 200 kB of text", echo("89", &"x".repeat(200_000))),
        ("a call surrounded by white space", format!("\r\n\t {} \n", echo("88", "x"))),
    ];
    let mut rows: Vec<Row> = rows.into_iter().map(|(what, body)| Row::new(what, body)).collect();
    rows.extend([
        // Bytes that are not text.
        Row::new("a byte order mark", format!("\u{feff}{one}")),
        Row::new("a call in UTF-16", one.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>()),
        Row::new("NUL before a call", format!("\0{one}")),
        Row::new("NUL after a call", format!("{one}\0")),
        Row::new("NUL in an id", call("\"id\":\"1\0\",")),
        Row::new("NUL in a key", call("\"id\0\":1,")),
        Row::new("an id that is not UTF-8", with_bytes(&call(r#""id":"1?","#), b"\xff")),
        Row::new("a key that is not UTF-8", with_bytes(&call(r#""id?":1,"#), b"\xff")),
        Row::new("a text that is not UTF-8", with_bytes(&echo("1", "?"), b"\xc3\x28")),
        Row::new("a method that is not UTF-8", with_bytes(r#"{"jsonrpc":"2.0","id":1,"method":"?"}"#, b"\xed\xa0\x80")),
        Row::new("random bytes", (0..4_096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect::<Vec<u8>>()),
        // Size.
        Row::new("a call of 5 MB", echo("1", &"x".repeat(5_000_000))).over_http2(),
        Row::new("5 MB of white space", vec![b' '; 5_000_000]).over_http2(),
        Row::new("a call and 5 MB of white space", format!("{one}{}", " ".repeat(5_000_000))).over_http2(),
        // Headers.
        Row::new("a call as text", one.clone()).content_types(&["text/plain"]),
        Row::new("a call without a type", one.clone()).content_types(&[]),
        Row::new("a call with an empty type", one.clone()).content_types(&[""]),
        Row::new("a call as another kind of JSON", one.clone()).content_types(&["application/json-rpc"]),
        Row::new("a call as text and as JSON", one.clone()).content_types(&["text/plain", "application/json"]),
        Row::new("a call as JSON and as text", echo("87", "x")).content_types(&["application/json", "text/plain"]),
        Row::new("a call as JSON with a charset", echo("86", "x")).content_types(&["Application/JSON; charset=utf-8"]),
        Row::new("a compressed call", GZIP).content_encoding("gzip"),
        Row::new("a compressed call without a Content-Encoding", GZIP),
        Row::new("a plain call with a Content-Encoding", echo("85", "x")).content_encoding("gzip"),
        // Chunks.
        Row::new("a call in chunks of one byte", echo("84", "x")).chunked([1; 60]),
        Row::new("a call in chunks that cut its id", echo("8333", "x")).chunked([r#"{"jsonrpc":"2.0","id":83"#.len(), 1]),
        Row::new("a call in chunks that cut a character", echo("82", "\u{1f980}")).chunked([r#"{"jsonrpc":"2.0","id":82,"method":"tools/call","params":{"name":"echo","arguments":{"text":""#.len() + 2]),
        Row::new("half a call in chunks", one[..half].to_owned()).chunked([3, 5, 7]),
        Row::new("nothing in chunks", "").chunked([]),
    ]);
    rows
}
