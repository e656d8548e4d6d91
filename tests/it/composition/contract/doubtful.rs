//! Unreadable bodies without a session.
//!
//! These tests show for which of them the token fires at a disconnect.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response, header};
use mcp_cancel_on_disconnect::{CancelReason::ClientDisconnected, body::TeeBody};
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::{
    exchange::{CALL, Tokens, event_stream, immediate},
    script::{
        End,
        Reading::{self, Nothing, OneFrame, ToEnd},
        Script, Scripted, read,
    },
};

const JSON: (header::HeaderName, &str) = (header::CONTENT_TYPE, "application/json");

const TEXT: (header::HeaderName, &str) = (header::CONTENT_TYPE, "text/plain");

/// A POST whose call the layer cannot read.
struct Post {
    headers: Vec<(header::HeaderName, &'static str)>,
    body: Script,
    reading: Reading,
}

impl Post {
    fn new(body: impl Into<Bytes>) -> Self {
        Self {
            headers: vec![JSON],
            body: Script::whole(body),
            reading: ToEnd,
        }
    }

    fn headers(self, headers: &[(header::HeaderName, &'static str)]) -> Self {
        let headers = headers.to_vec();
        Self { headers, ..self }
    }

    fn read_as(self, reading: Reading) -> Self {
        Self { reading, ..self }
    }

    fn request(&self) -> Request<Scripted> {
        let mut request = Request::post("/plain");
        for (name, value) in &self.headers {
            request = request.header(name, *value);
        }
        request.body(self.body.body()).expect("a request")
    }

    /// Returns whether the token fires at a disconnect, first before the head and then after it.
    fn fires(&self) -> [bool; 2] {
        [true, false].map(|is_pending| {
            let (layer, log) = immediate();
            let tokens = Tokens::default();
            let recording = tokens.clone();
            let reading = self.reading;
            let service = layer.layer(service_fn(move |request: Request<TeeBody<Scripted>>| {
                recording.record(&request);
                read(&mut request.into_body(), reading);
                async move {
                    if is_pending {
                        std::future::pending::<()>().await;
                    }
                    let response: Response<Scripted> = event_stream(Script::stalled().body());
                    Ok::<_, Infallible>(response)
                }
            }));
            let mut answer = Box::pin(service.oneshot(self.request()));
            let response = answer.as_mut().now_or_never();
            assert_eq!(response.is_none(), is_pending);
            drop((answer, response));
            assert_eq!(log.started(), 0);
            let reason = tokens.latest().reason();
            assert!(reason.is_none_or(|reason| reason == ClientDisconnected));
            reason.is_some()
        })
    }
}

fn deep() -> String {
    let (open, close) = ("[".repeat(200), "]".repeat(200));
    format!(r#"{{"jsonrpc":"2.0","id":1,"method":"m","params":{{"deep":{open}{close}}}}}"#)
}

#[test]
fn a_disconnect_from_a_body_that_may_be_json_rpc_does_not_fire_the_token() {
    let gzip = (header::CONTENT_ENCODING, "gzip");
    for (what, post) in [
        (
            "a repeated key",
            Post::new(r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"m"}"#),
        ),
        (
            "an escape",
            Post::new(r#"{"jsonrpc":"2.0","\u0069d":1,"method":"m"}"#),
        ),
        (
            "a wrong type",
            Post::new(r#"{"jsonrpc":"2.0","id":1,"method":"m","params":7}"#),
        ),
        (
            "a bad id",
            Post::new(r#"{"jsonrpc":"2.0","id":1.5,"method":"m"}"#),
        ),
        ("too deep", Post::new(deep())),
        ("a batch", Post::new(format!("[{CALL}]"))),
        ("a truncated batch", Post::new(format!(" [{CALL}"))),
        (
            "too large",
            Post::new(format!("{CALL}{}", " ".repeat(4 * 1024 * 1024))),
        ),
        ("compressed", Post::new("?").headers(&[JSON, gzip])),
        ("two media types", Post::new(CALL).headers(&[TEXT, JSON])),
        ("truncated", Post::new(&CALL[..40])),
        ("with trailing text", Post::new(format!("{CALL}}}"))),
        (
            "after a byte order mark",
            Post::new(format!("\u{feff}{CALL}")),
        ),
        (
            "another version",
            Post::new(r#"{"jsonrpc":"2.1","id":1,"method":"m"}"#),
        ),
        (
            "neither call nor answer",
            Post::new(r#"{"id":1,"jsonrpc":"2.0"}"#),
        ),
        ("read in part", Post::new(CALL).read_as(OneFrame)),
    ] {
        assert_eq!(post.fires(), [false; 2], "{what}");
    }
    let mut silent = Post::new(CALL);
    silent.body = silent.body.end(End::Silent);
    assert_eq!(silent.fires(), [false; 2], "without an announced end");
}

#[test]
fn a_disconnect_from_a_body_that_is_not_json_rpc_fires_the_token() {
    for (what, post) in [
        ("a text", Post::new(CALL).headers(&[TEXT])),
        ("no media type", Post::new(CALL).headers(&[])),
        ("nothing", Post::new("")),
        ("no JSON", Post::new("name=value")),
        ("another JSON value", Post::new(r#""hello""#)),
        (
            "an object of another protocol",
            Post::new(r#"{"id":1,"method":"POST","name":"x"}"#),
        ),
        ("left unread", Post::new(CALL).read_as(Nothing)),
        (
            "not JSON and read in part",
            Post::new("name=value").read_as(OneFrame),
        ),
    ] {
        assert_eq!(post.fires(), [true; 2], "{what}");
    }
}
