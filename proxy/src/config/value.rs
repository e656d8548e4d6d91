//! Parses option values: durations, sizes, addresses and the like.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use clap::ValueEnum;
use http::{HeaderName, HeaderValue, Uri, header, uri::Authority};
use mcp_cancel_on_disconnect::Grace;

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[non_exhaustive]
pub enum LogFormat {
    /// Text for people to read.
    Text,
    /// One JSON object per line.
    Json,
}

/// A time limit, or `None` for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit(pub Option<Duration>);

/// The longest time accepted: a year. Adding a much longer time to an instant would overflow.
const MAX_TIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Minimum value of `--commit-after`.
///
/// Refusals usually arrive sooner than this, so they can be passed through unchanged.
const MIN_COMMIT_AFTER: Duration = Duration::from_millis(250);

/// Minimum value of `--buffer`. A single stream may take up this much.
const MIN_BUFFER: usize = 1024 * 1024;

type Parsed<T> = Result<T, String>;

/// Parses a time: a number and its unit. Zero is an error, and so is anything above [`MAX_TIME`].
pub(super) fn time(text: &str) -> Parsed<Duration> {
    let invalid = || not_a_time(text);
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let number: f64 = digits.parse().map_err(|_| invalid())?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(invalid()),
    };
    let time = Duration::try_from_secs_f64(seconds).map_err(|_| invalid())?;
    if time > MAX_TIME {
        return Err(format!("`{text}` is more than a year"));
    }
    if time.is_zero() {
        return Err("must be longer than zero".to_owned());
    }
    Ok(time)
}

fn not_a_time(text: &str) -> String {
    format!("`{text}` is not a valid time (expected, for example, 20s, 500ms, 30m or 1h)")
}

/// Parses a time, or `off` for no limit.
pub(super) fn limit(text: &str) -> Parsed<Limit> {
    match text {
        "off" => Ok(Limit(None)),
        text => time(text).map(|time| Limit(Some(time))),
    }
}

/// Parses a grace period.
///
/// A time on its own is [`Grace::AutoAfter`], and a time after `always=` is [`Grace::After`].
pub(super) fn grace(text: &str) -> Parsed<Grace> {
    match text {
        "auto" => Ok(Grace::Auto),
        "immediate" => Ok(Grace::Immediate),
        "never" => Ok(Grace::Never),
        text => {
            let always = text.strip_prefix("always=");
            let as_time = always.unwrap_or(text);
            let grace = time(as_time).map_err(|error| {
                if error == not_a_time(as_time) {
                    format!(
                        "`{text}` is not a valid grace period (expected auto, immediate, never, a time such as 20s, or always=20s)"
                    )
                } else {
                    error
                }
            })?;
            Ok(match always {
                Some(_) => Grace::After(grace),
                None => Grace::AutoAfter(grace),
            })
        }
    }
}

/// Parses a tool's name, trimming white space around it.
pub(super) fn tool(text: &str) -> Parsed<String> {
    match text.trim() {
        "" => Err("the tool's name is empty".to_owned()),
        tool => Ok(tool.to_owned()),
    }
}

/// Parses a tool and its grace period.
pub(super) fn tool_grace(text: &str) -> Parsed<(String, Grace)> {
    // A tool's name may contain `=`, but a grace period contains one only in `always=`.
    let separator = text.rfind("=always=").or_else(|| text.rfind('='));
    let (tool_name, rest) = separator
        .and_then(|separator| text.split_at_checked(separator))
        .ok_or("expected TOOL=GRACE, for example report=1h")?;
    Ok((
        tool(tool_name)?,
        grace(rest.trim_start_matches('=').trim())?,
    ))
}

/// Parses a number of bytes, with or without a unit.
pub(super) fn size(text: &str) -> Parsed<usize> {
    let invalid = || {
        format!(
            "`{text}` is not a valid size (expected, for example, 65536, 512KiB, 64MiB or 1GiB)"
        )
    };
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    let number: usize = digits.parse().map_err(|_| invalid())?;
    let shift = match text.get(digits.len()..).unwrap_or_default() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err(invalid()),
    };
    number.checked_mul(1 << shift).ok_or_else(invalid)
}

/// Parses the value of `--buffer`, which must be at least [`MIN_BUFFER`].
pub(super) fn buffer(text: &str) -> Parsed<usize> {
    let size = size(text)?;
    if size < MIN_BUFFER {
        return Err("must be at least 1MiB, the size of one stream".to_owned());
    }
    Ok(size)
}

/// Parses the value of `--commit-after`, which must be at least [`MIN_COMMIT_AFTER`].
pub(super) fn commit_after(text: &str) -> Parsed<Duration> {
    let time = time(text)?;
    if time < MIN_COMMIT_AFTER {
        return Err(
            "must be at least 250ms, so that fast refusals are passed through unchanged".to_owned(),
        );
    }
    Ok(time)
}

/// Parses the value of `--max-sessions`, which must not be zero.
pub(super) fn sessions(text: &str) -> Parsed<usize> {
    match text.parse() {
        Ok(0) => Err("must be at least 1, because each client has a session".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err(format!("`{text}` is not a number")),
    }
}

/// Parses the URL of an http or https server. The URL must not contain a user name.
pub(super) fn upstream(text: &str) -> Parsed<Uri> {
    // The error does not repeat the text, because it may contain a secret.
    let invalid =
        || "not a valid server URL (expected, for example, http://127.0.0.1:9000/mcp)".to_owned();
    let uri: Uri = text.parse().map_err(|_| invalid())?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = uri.authority().filter(|_| is_http).ok_or_else(invalid)?;
    if authority.as_str().contains('@') {
        return Err(
            "a password in the URL would appear in logs: use --header 'authorization: Basic ...'"
                .to_owned(),
        );
    }
    if is_complete(authority) {
        Ok(uri)
    } else {
        Err(invalid())
    }
}

/// Returns `true` if an authority without a user has a host, and either a valid port or none.
///
/// [`Authority`] also accepts an invalid port, for which a connector would use the default port.
fn is_complete(authority: &Authority) -> bool {
    let host = authority.host();
    let has_port = authority.port_u16().is_some();
    !host.is_empty() && (authority.as_str() == host || has_port)
}

/// Parses an address to listen on. A port on its own means 127.0.0.1.
pub(super) fn address(text: &str) -> Parsed<SocketAddr> {
    let invalid = || {
        format!(
            "`{text}` is not a valid address to listen on (expected, for example, 8000 or 127.0.0.1:8000)"
        )
    };
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let ip = match host {
        "" => Ipv4Addr::LOCALHOST.into(),
        host => ip(host).map_err(|_| invalid())?,
    };
    let port: u16 = port.parse().map_err(|_| invalid())?;
    Ok(SocketAddr::new(ip, port))
}

/// Parses the IP address of a host to listen on. `localhost` is 127.0.0.1.
pub(super) fn ip(text: &str) -> Parsed<IpAddr> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    if text.eq_ignore_ascii_case("localhost") {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    bare.parse().map_err(|_| {
        format!("`{text}` is not a valid IP address (expected, for example, 127.0.0.1 or 0.0.0.0; host names belong in --allow-host)")
    })
}

/// Parses a host, and returns it in lower case.
pub(super) fn host(text: &str) -> Parsed<String> {
    let text = text.trim();
    let invalid = || {
        format!(
            "`{text}` is not a valid host (expected, for example, mcp.example.com or mcp.example.com:8443)"
        )
    };
    if text.contains('*') {
        return Err(format!(
            "`{text}` contains a wildcard: list each host instead"
        ));
    }
    let authority: Authority = text.parse().map_err(|_| invalid())?;
    if authority.as_str().contains('@') || !is_complete(&authority) {
        return Err(invalid());
    }
    let host = authority.host().to_ascii_lowercase();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let host = match bare.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]"),
        Err(_) => host,
    };
    Ok(match authority.port_u16() {
        Some(port) => format!("{host}:{port}"),
        None => host,
    })
}

/// Parses an origin, and returns its normal form.
pub(super) fn origin(text: &str) -> Parsed<String> {
    let text = text.trim();
    if text.contains('*') {
        return Err(format!(
            "`{text}` contains a wildcard: list each origin instead"
        ));
    }
    let invalid = || {
        format!("`{text}` is not a valid origin (expected, for example, https://app.example.com)")
    };
    let uri: Uri = text.parse().map_err(|_| invalid())?;
    match (uri.scheme(), uri.authority(), uri.path(), uri.query()) {
        (Some(_), Some(authority), "/" | "", None) if is_complete(authority) => {
            Ok(normal_origin(&uri))
        }
        _ => Err(invalid()),
    }
}

/// Returns an origin in lower case, without its scheme's default port.
///
/// Browsers also omit the default port.
pub(crate) fn normal_origin(origin: &Uri) -> String {
    let scheme = origin.scheme_str().unwrap_or_default();
    let authority = origin
        .authority()
        .map(Authority::as_str)
        .unwrap_or_default();
    let default = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => "",
    };
    let authority = authority.strip_suffix(default).unwrap_or(authority);
    format!("{scheme}://{authority}").to_ascii_lowercase()
}

/// Parses a header, and marks its value as sensitive.
///
/// A header that the proxy sets itself is an error.
pub(super) fn header(text: &str) -> Parsed<(HeaderName, HeaderValue)> {
    let (name, value) = text.split_once(':').ok_or("expected NAME: VALUE")?;
    let name: HeaderName = name
        .trim()
        .parse()
        .map_err(|_| "the header's name is invalid")?;
    let mut value: HeaderValue = value
        .trim()
        .parse()
        .map_err(|_| "the header's value is invalid")?;
    value.set_sensitive(true);
    if [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::HOST,
        header::TRANSFER_ENCODING,
    ]
    .contains(&name)
    {
        return Err("the proxy sets this header itself".to_owned());
    }
    Ok((name, value))
}

/// Parses an environment variable.
pub(super) fn variable(text: &str) -> Parsed<(String, String)> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    if name.is_empty() || text.contains('\0') {
        Err("the variable's name is invalid".to_owned())
    } else {
        Ok((name.to_owned(), value.to_owned()))
    }
}
