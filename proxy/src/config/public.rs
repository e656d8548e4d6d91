//! The options for the proxy's public URL and for the reverse proxies in front of it.

use std::net::IpAddr;

use clap::Args;
use http::Uri;

use super::{ConfigError, value};

/// The options for the public URL, and for the reverse proxies in front of this proxy.
#[derive(Debug, Clone, Args)]
#[non_exhaustive]
pub struct PublicOptions {
    /// URL at which clients reach the proxy, such as https://mcp.example.com. Replaces the upstream URL in the OAuth metadata and challenges that clients read (requires --upstream)
    #[allow(
        rustdoc::bare_urls,
        reason = "the doc is the text of `--help`, where angle brackets would be shown"
    )]
    #[arg(long, env = "MCP_PROXY_PUBLIC_URL", value_name = "URL", value_parser = public_url)]
    pub public_url: Option<Uri>,

    /// Address or network of a reverse proxy, such as 10.0.0.0/8, whose Forwarded and X-Forwarded-* headers are trusted (requires --upstream)
    #[arg(
        long,
        env = "MCP_PROXY_TRUST_FORWARDED",
        value_name = "ADDRESS",
        value_delimiter = ',',
        value_parser = Network::new
    )]
    pub trust_forwarded: Vec<Network>,
}

/// An IP address or a network in CIDR notation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix_len: u8,
}

// === impl PublicOptions ===

impl PublicOptions {
    /// Checks that the public URL has either the upstream's path or none.
    ///
    /// Any other path would be wrong, because the proxy does not change paths.
    pub(super) fn check(&self, upstream: Option<&Uri>) -> Result<(), ConfigError> {
        let (Some(public), Some(upstream)) = (&self.public_url, upstream) else {
            return Ok(());
        };
        let (public, upstream) = (public.path(), upstream.path());
        if public == "/" || public == upstream {
            return Ok(());
        }
        Err(ConfigError::Usage(format!(
            "the path of --public-url ({public}) must match that of --upstream ({upstream}), because the proxy does not rewrite paths"
        )))
    }
}

// === impl Network ===

impl Network {
    /// Parses an address or a network such as 10.0.0.0/8.
    ///
    /// An IPv4-mapped IPv6 address is converted to IPv4. So is a network of IPv4-mapped addresses, if its prefix is at least 96
    /// bits long.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let invalid = || {
            format!(
                "`{text}` is not an IP address or network (expected, for example, 127.0.0.1 or 10.0.0.0/8)"
            )
        };
        let (address, prefix_len) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length.parse().map_err(|_| invalid())?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| invalid())?;
        let max_len = if address.is_ipv4() { 32 } else { 128 };
        let prefix_len: u8 = prefix_len.unwrap_or(max_len);
        if prefix_len > max_len {
            return Err(invalid());
        }
        // The first 96 bits are the same in all IPv4-mapped addresses.
        match (address.to_canonical(), prefix_len.checked_sub(96)) {
            (IpAddr::V4(address), Some(prefix_len)) if max_len == 128 => Ok(Self {
                address: address.into(),
                prefix_len,
            }),
            _ => Ok(Self {
                address,
                prefix_len,
            }),
        }
    }

    /// Returns `true` if an address is in this network.
    ///
    /// An IPv4-mapped IPv6 address is treated as the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (a, b, max_len) = match (self.address, address.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits().into(), b.to_bits().into(), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
            _ => return false,
        };
        let difference: u128 = a ^ b;
        let ignored = max_len - u32::from(self.prefix_len);
        difference.checked_shr(ignored).is_none_or(|rest| rest == 0)
    }
}

/// Parses the value of `--public-url`.
fn public_url(text: &str) -> Result<Uri, String> {
    let uri = value::upstream(text).map_err(|_| {
        format!("`{text}` is not a valid URL (expected, for example, https://mcp.example.com)")
    })?;
    if uri.query().is_some() || text.contains('#') {
        return Err(format!("`{text}` must not have a query or fragment"));
    }
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_the_addresses_with_its_first_bits() {
        for (network, address, expected) in [
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "127.0.0.2", false),
            ("127.0.0.1", "::ffff:127.0.0.1", true),
            ("::ffff:127.0.0.1", "127.0.0.1", true),
            ("::ffff:10.0.0.0/104", "10.255.0.1", true),
            ("::ffff:10.0.0.0/104", "11.0.0.1", false),
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.1.0.0/15", "10.0.0.1", true),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "2001:db8::1", true),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::1", "::1", true),
            ("::1/128", "::2", false),
        ] {
            let parsed = Network::new(network).unwrap();
            assert_eq!(
                parsed.contains(address.parse().unwrap()),
                expected,
                "{network} {address}"
            );
        }
        for invalid in [
            "",
            "localhost",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "1.2.3",
        ] {
            assert!(Network::new(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn a_public_url_is_an_origin_and_may_have_a_path() {
        for right in [
            "https://mcp.example.com",
            "http://localhost:8000/",
            "https://a.example/mcp",
        ] {
            assert!(public_url(right).is_ok(), "{right}");
        }
        for invalid in [
            "mcp.example.com",
            "/mcp",
            "ftp://a",
            "https://a/?b",
            "https://a/#b",
            "https://u:p@a",
            "https://a:x",
        ] {
            assert!(public_url(invalid).is_err(), "{invalid}");
        }
    }
}
