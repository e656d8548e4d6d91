//! A filter for peers' addresses, applied both to incoming connections and to relays.
//!
//! Without it, anyone who can write to the directory could choose the addresses to which requests, including their credentials, are
//! relayed.

use std::{
    fmt,
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

/// A predicate that peers' addresses must satisfy. Clones share it.
#[derive(Clone)]
pub(crate) struct PeersFilter(Arc<dyn Fn(IpAddr) -> bool + Send + Sync>);

// === impl PeersFilter ===

impl PeersFilter {
    pub(crate) fn new(admits: impl Fn(IpAddr) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(admits))
    }

    /// Returns `true` if a peer may have this address. IPv4-mapped IPv6 addresses are tested as IPv4.
    ///
    /// If the predicate panics, the address is rejected.
    pub(crate) fn admits(&self, address: IpAddr) -> bool {
        catch_unwind(AssertUnwindSafe(|| (self.0)(address.to_canonical()))).unwrap_or(false)
    }
}

/// Admits private networks (RFC 1918, RFC 4193) and loopback.
///
/// Link-local addresses are excluded, because cloud providers serve credentials on them.
impl Default for PeersFilter {
    fn default() -> Self {
        Self::new(|address| match address {
            IpAddr::V4(v4) => v4.is_private() || v4.is_loopback(),
            IpAddr::V6(v6) => v6.is_unique_local() || v6.is_loopback(),
        })
    }
}

impl fmt::Debug for PeersFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeersFilter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_and_loopback_addresses_are_admitted_by_default() {
        let filter = PeersFilter::default();
        for admitted in [
            "10.0.0.7",
            "172.16.0.1",
            "172.31.255.254",
            "192.168.1.1",
            "127.0.0.1",
            "127.8.8.8",
            "::1",
            "fd00::1",
            "::ffff:10.0.0.7",
        ] {
            assert!(filter.admits(admitted.parse().unwrap()), "{admitted}");
        }
        for excluded in [
            "8.8.8.8",
            "172.15.255.255",
            "172.32.0.1",
            "192.169.0.1",
            "100.64.0.1",
            "169.254.169.254",
            "fe80::1",
            "0.0.0.0",
            "255.255.255.255",
            "2001:db8::1",
            "::",
            "::ffff:8.8.8.8",
        ] {
            assert!(!filter.admits(excluded.parse().unwrap()), "{excluded}");
        }
        let custom = PeersFilter::new(|address| address == IpAddr::from([8, 8, 8, 8]));
        assert!(custom.admits("8.8.8.8".parse().unwrap()));
        assert!(custom.admits("::ffff:8.8.8.8".parse().unwrap()));
        assert!(!custom.admits("10.0.0.7".parse().unwrap()));
    }

    #[test]
    fn an_address_is_rejected_if_the_filter_panics() {
        let filter = PeersFilter::new(|_| panic!("on purpose"));
        assert!(!filter.admits("10.0.0.7".parse().unwrap()));
    }
}
