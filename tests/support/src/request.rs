//! A request as plain data, for both the HTTP/1.1 and the HTTP/2 client.

use std::fmt::Write as _;

use bytes::Bytes;

/// A method, path, headers and body.
///
/// The clients add `host`, `content-length` and `transfer-encoding`.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method, in capitals.
    pub method: &'static str,
    /// The path, including any query.
    pub path: String,
    /// The headers in order, possibly with repeated names.
    pub headers: Vec<(String, String)>,
    /// The body, which is empty if there is none.
    pub body: Bytes,
}

/// How an HTTP/1.1 request announces the length of its body.
#[derive(Clone, Copy, Debug)]
pub(super) enum Announced {
    Length(usize),
    Chunked,
}

// === impl Request ===

impl Request {
    /// Returns a request with neither headers nor a body.
    pub fn new(method: &'static str, path: &str) -> Self {
        Self {
            method,
            path: path.to_owned(),
            headers: Vec::new(),
            body: Bytes::new(),
        }
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds several headers.
    pub fn headers<'a>(self, headers: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        headers
            .into_iter()
            .fold(self, |request, (name, value)| request.header(name, value))
    }

    /// Sets the body.
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Returns the HTTP/1.1 head, including its blank line.
    pub(super) fn head(&self, authority: &str, announced: Announced) -> String {
        let Self { method, path, .. } = self;
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {authority}\r\n");
        for (name, value) in &self.headers {
            write!(head, "{name}: {value}\r\n").expect("writing to a string cannot fail");
        }
        head + &announced.header() + "\r\n"
    }

    /// Returns the same request for use with hyper.
    pub(super) fn to_http(&self, authority: &str) -> http::Request<Bytes> {
        let uri = format!("http://{authority}{}", self.path);
        let builder = http::Request::builder().method(self.method).uri(uri);
        let builder = self.headers.iter().fold(builder, |builder, (name, value)| {
            builder.header(name, value)
        });
        builder
            .body(self.body.clone())
            .expect("the test's request is valid")
    }
}

// === impl Announced ===

impl Announced {
    /// Returns the framing header's line, or an empty string if none is needed.
    fn header(self) -> String {
        match self {
            // A request without a body needs no header (RFC 9112, section 6.3).
            Self::Length(0) => String::new(),
            Self::Length(length) => format!("content-length: {length}\r\n"),
            Self::Chunked => "transfer-encoding: chunked\r\n".to_owned(),
        }
    }
}
