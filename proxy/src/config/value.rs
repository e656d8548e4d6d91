//! The values of options: durations, sizes, addresses and the like.

use std::time::Duration;

use clap::ValueEnum;
use http::{HeaderName, HeaderValue, Uri, header, uri::Authority};
use mcp_cancel_on_disconnect::Grace;

/// How lines are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[non_exhaustive]
pub enum LogFormat {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

/// A time after which something happens, or never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit(pub Option<Duration>);

type Parsed<T> = Result<T, String>;

pub(super) fn time(text: &str) -> Parsed<Duration> {
    let wrong = || format!("`{text}` is no time, such as 20s, 500ms, 30m or 1h");
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    let time = Duration::try_from_secs_f64(seconds).map_err(|_| wrong())?;
    if time.is_zero() {
        return Err("a time of nothing makes no sense here".to_owned());
    }
    Ok(time)
}

pub(super) fn limit(text: &str) -> Parsed<Limit> {
    match text {
        "off" => Ok(Limit(None)),
        text => time(text).map(|time| Limit(Some(time))),
    }
}

pub(super) fn grace(text: &str) -> Parsed<Grace> {
    match text {
        "auto" => Ok(Grace::Auto),
        "immediate" => Ok(Grace::Immediate),
        "never" => Ok(Grace::Never),
        text => time(text).map(Grace::After).map_err(|_| {
            format!("`{text}` is no grace: auto, immediate, never, or a time such as 20s")
        }),
    }
}

pub(super) fn tool_grace(text: &str) -> Parsed<(String, Grace)> {
    // Names may have a `=`, graces have none.
    let (tool, text) = text
        .rsplit_once('=')
        .ok_or("it must be TOOL=GRACE, such as report=1h")?;
    Ok((tool.to_owned(), grace(text)?))
}

pub(super) fn size(text: &str) -> Parsed<usize> {
    let wrong = || format!("`{text}` is no size, such as 65536, 512KiB, 64MiB or 1GiB");
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let number: usize = digits.parse().map_err(|_| wrong())?;
    let shift = match text.get(digits.len()..).unwrap_or_default() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err(wrong()),
    };
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

pub(super) fn upstream(text: &str) -> Parsed<Uri> {
    let wrong = || format!("`{text}` is no URL of a server, such as http://127.0.0.1:9000/mcp");
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = uri.authority().filter(|_| is_http).ok_or_else(wrong)?;
    if authority.as_str().contains('@') {
        return Err(
            "a URL with a password shows it in logs: use --header 'authorization: Basic ...'"
                .to_owned(),
        );
    }
    Ok(uri)
}

/// In lower case, as hosts are compared.
pub(super) fn host(text: &str) -> Parsed<String> {
    let wrong = || format!("`{text}` is no host, such as mcp.example.com or mcp.example.com:8443");
    let authority: Authority = text.parse().map_err(|_| wrong())?;
    match authority.as_str().contains('@') {
        true => Err(wrong()),
        false => Ok(text.to_ascii_lowercase()),
    }
}

/// In lower case, without a slash at its end.
pub(super) fn origin(text: &str) -> Parsed<String> {
    let wrong = || format!("`{text}` is no origin, such as https://app.example.com");
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    match (uri.scheme(), uri.authority(), uri.path(), uri.query()) {
        (Some(scheme), Some(authority), "/" | "", None) => {
            Ok(format!("{scheme}://{authority}").to_ascii_lowercase())
        }
        _ => Err(wrong()),
    }
}

pub(super) fn header(text: &str) -> Parsed<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':').ok_or("it must be NAME: VALUE")?;
    let name: HeaderName = name
        .trim()
        .parse()
        .map_err(|_| "this is no name of a header")?;
    let mut value: HeaderValue = value
        .trim()
        .parse()
        .map_err(|_| "this is no value of a header")?;
    value.set_sensitive(true);
    if [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::HOST,
        header::TRANSFER_ENCODING,
    ]
    .contains(&name)
    {
        return Err("this header is made anew for each request".to_owned());
    }
    Ok((name, value))
}

pub(super) fn variable(text: &str) -> Parsed<(String, String)> {
    let (name, value) = text.split_once('=').ok_or("it must be NAME=VALUE")?;
    match name.is_empty() || text.contains('\0') {
        true => Err("this is no name of a variable".to_owned()),
        false => Ok((name.to_owned(), value.to_owned())),
    }
}
