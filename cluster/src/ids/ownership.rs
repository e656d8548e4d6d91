//! Session owners, the epochs of their claims, and the records in the directory.
//!
//! Every value has exactly one text form, which is stored in the directory. Parsing it yields the same value.

use std::{
    cmp::Ordering,
    fmt::{self, Debug, Display, Formatter},
    net::SocketAddr,
    str::FromStr,
};

use super::{Incarnation, ParseIdError, parse_number};

/// The instance on which a session is open, identified by its peer address and incarnation.
///
/// The text form is `<address> <incarnation>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Owner {
    pub(crate) address: SocketAddr,
    pub(crate) incarnation: Incarnation,
}

/// Minimum difference between a claim's epoch and the previous epoch.
///
/// The epochs in between are reserved for the owner, which takes the next epoch each time the directory loses its record
/// ([`Epoch::after_loss`]).
const CLAIM_STEP: u64 = 1_000;

/// Orders a session's successive ownerships. The text form is a decimal number.
///
/// Every claim increases the epoch, even if an owner reclaims its own session, so if there are two records for a session, the record with
/// the lower epoch is older. An epoch is at least the time of the claim in milliseconds since the Unix epoch. As long as the clocks agree,
/// it is therefore also higher than any epoch that the directory has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(u64);

/// A session's owner, and the epoch of its claim.
///
/// A claim specifies the ownership that it is meant to replace, and fails if the directory has a different record.
///
/// The text form is `<address> <incarnation> <epoch>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Ownership {
    pub(crate) owner: Owner,
    pub(crate) epoch: Epoch,
}

/// A session's record in the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Record {
    Owned(Ownership),
    /// The session has ended. The text form is `- <incarnation> <epoch>`.
    ///
    /// Either its client ended it, or it could not be restored. The tombstone outlives the session so that no former owner can re-register
    /// it.
    Deleted(Tombstone),
}

/// The instance that deleted a session, and an epoch at least as high as the session's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tombstone {
    pub(crate) by: Incarnation,
    pub(crate) epoch: Epoch,
}

// === impl Owner ===

impl Display for Owner {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.address, self.incarnation)
    }
}

impl FromStr for Owner {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let (address, incarnation) = text.split_once(' ').ok_or(ParseIdError)?;
        Ok(Self {
            address: address.parse().map_err(|_| ParseIdError)?,
            incarnation: incarnation.parse()?,
        })
    }
}

// === impl Epoch ===

impl Epoch {
    /// Returns the epoch for a session being opened now.
    ///
    /// A tombstone also gets this epoch if the session's own epoch is unknown.
    pub(crate) fn now() -> Self {
        Self(wall_clock())
    }

    /// Returns the epoch for a claim made now, which supersedes this epoch.
    ///
    /// An owner also uses it to renew its own epoch.
    pub(crate) fn next(self) -> Self {
        Self(wall_clock().max(self.0.saturating_add(CLAIM_STEP)))
    }

    /// Returns the owner's next epoch after the directory has lost its record.
    ///
    /// It is lower than the epoch of any claim that may have superseded this epoch.
    pub(crate) fn after_loss(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

#[cfg(not(test))]
fn wall_clock() -> u64 {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // Treat a clock set before 1970 as 0. A claim's epoch is still higher than the previous epoch.
    since_1970.map_or(0, |since| since.as_millis().try_into().unwrap_or(u64::MAX))
}

/// Returns the simulated time, or else the time on tokio's clock, which tests pause.
#[cfg(test)]
fn wall_clock() -> u64 {
    if let Some(simulated) = crate::tests::simulated_clock() {
        return simulated;
    }
    use std::sync::OnceLock;
    static START: OnceLock<tokio::time::Instant> = OnceLock::new();
    let start = *START.get_or_init(tokio::time::Instant::now);
    let since = tokio::time::Instant::now().saturating_duration_since(start);
    1_000_000_000_000 + since.as_millis() as u64
}

impl Display for Epoch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(&self.0, f)
    }
}

impl FromStr for Epoch {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        parse_number(text).map(Self)
    }
}

// === impl Ownership ===

impl Ownership {
    /// Returns the ownership for a session starting now.
    #[cfg(test)]
    pub(crate) fn begin(owner: Owner) -> Self {
        let epoch = Epoch::now();
        Self { owner, epoch }
    }

    /// Returns the ownership that replaces this one if `owner` claims the session.
    pub(crate) fn claimed_by(self, owner: Owner) -> Self {
        let epoch = self.epoch.next();
        Self { owner, epoch }
    }
}

impl Display for Ownership {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.owner, self.epoch)
    }
}

impl FromStr for Ownership {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let (owner, epoch) = text.rsplit_once(' ').ok_or(ParseIdError)?;
        Ok(Self {
            owner: owner.parse()?,
            epoch: epoch.parse()?,
        })
    }
}

// === impl Record ===

impl Record {
    /// Returns `true` if `ownership` may replace this record.
    ///
    /// The higher epoch prevails or, if the epochs are equal, the higher incarnation. If the incarnations are equal too, the record may be
    /// replaced unless it is a tombstone.
    pub(crate) fn yields_to(&self, ownership: &Ownership) -> bool {
        let (epoch, incarnation) = match self {
            Self::Owned(ownership) => (ownership.epoch, ownership.owner.incarnation),
            Self::Deleted(tombstone) => (tombstone.epoch, tombstone.by),
        };
        let new = (ownership.epoch, ownership.owner.incarnation);
        match (epoch, incarnation).cmp(&new) {
            Ordering::Less => true,
            Ordering::Equal => matches!(self, Self::Owned(_)),
            Ordering::Greater => false,
        }
    }
}

impl Display for Record {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owned(ownership) => Display::fmt(ownership, f),
            Self::Deleted(Tombstone { by, epoch }) => write!(f, "- {by} {epoch}"),
        }
    }
}

impl FromStr for Record {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let Some(tombstone) = text.strip_prefix("- ") else {
            return text.parse().map(Self::Owned);
        };
        let (by, epoch) = tombstone.split_once(' ').ok_or(ParseIdError)?;
        Ok(Self::Deleted(Tombstone {
            by: by.parse()?,
            epoch: epoch.parse()?,
        }))
    }
}

// === impl Tombstone ===

impl Tombstone {
    /// Returns the tombstone that replaces `record`, with the higher of the two epochs.
    ///
    /// Returns `None` if `record` belongs to another instance and its epoch is not lower than this tombstone's epoch. An instance may
    /// always replace its own record, even if it no longer knows the record's epoch.
    pub(crate) fn supersede(self, record: Option<Record>) -> Option<Self> {
        let (holder, epoch) = match record {
            None => return Some(self),
            Some(Record::Owned(ownership)) => (ownership.owner.incarnation, ownership.epoch),
            Some(Record::Deleted(tombstone)) => (tombstone.by, tombstone.epoch),
        };
        let may_replace = holder == self.by || epoch < self.epoch;
        let epoch = epoch.max(self.epoch);
        may_replace.then_some(Self { epoch, ..self })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn malformed_owners_are_rejected() {
        for text in [
            "",
            "10.0.0.7:9000",
            "10.0.0.7 0123456789abcdef",
            "peer:9000 0123456789abcdef",
            "10.0.0.7:9000 0123456789abcdef ",
            "10.0.0.7:9000  0123456789abcdef",
        ] {
            assert_eq!(text.parse::<Owner>(), Err(ParseIdError), "{text}");
        }
    }

    #[test]
    fn malformed_ownerships_and_records_are_rejected() {
        for text in [
            "",
            "10.0.0.7:9000 0123456789abcdef",
            "10.0.0.7:9000 0123456789abcdef 07",
            "10.0.0.7:9000 0123456789abcdef  7",
            "- 0123456789abcdef 7",
        ] {
            assert_eq!(text.parse::<Ownership>(), Err(ParseIdError), "{text}");
        }
        for text in ["-", "- 7", "- 0123456789abcdef", "- 0123456789abcdef -7"] {
            assert_eq!(text.parse::<Record>(), Err(ParseIdError), "{text}");
        }
    }

    #[test]
    fn a_record_yields_to_a_later_ownership_but_not_to_one_that_it_ended() {
        let address = (std::net::Ipv4Addr::LOCALHOST, 9).into();
        let ownership = |incarnation, epoch| Ownership {
            owner: Owner {
                address,
                incarnation: Incarnation(incarnation),
            },
            epoch: Epoch(epoch),
        };
        let tombstone = |incarnation, epoch| Tombstone {
            by: Incarnation(incarnation),
            epoch: Epoch(epoch),
        };
        for (record, incarnation, epoch, expected) in [
            (Record::Owned(ownership(2, 5)), 1, 6, true),
            (Record::Owned(ownership(2, 5)), 3, 5, true),
            (Record::Owned(ownership(2, 5)), 2, 5, true),
            (Record::Owned(ownership(2, 5)), 1, 5, false),
            (Record::Owned(ownership(2, 5)), 3, 4, false),
            (Record::Deleted(tombstone(2, 5)), 2, 5, false),
            (Record::Deleted(tombstone(2, 5)), 9, 4, false),
            (Record::Deleted(tombstone(2, 5)), 1, 6, true),
        ] {
            assert_eq!(
                record.yields_to(&ownership(incarnation, epoch)),
                expected,
                "{record} {incarnation} {epoch}"
            );
        }
    }

    /// The claimant's clock may be far behind.
    #[test]
    fn a_claim_supersedes_the_former_owner_even_if_its_record_was_lost() {
        let opened = Epoch(Epoch::now().0 + 1_000_000);
        assert!(opened < opened.after_loss());
        assert!(opened.after_loss().after_loss() < opened.next());
    }

    #[test]
    fn a_claim_has_a_later_epoch_whatever_the_clock() {
        let ahead = Epoch(u64::MAX - 1);
        assert!(ahead.next() > ahead && Epoch(3).next() > Epoch(3));
        assert!(Epoch(3).next() >= Epoch(1_000_000_000_000));
    }

    proptest! {
        #[test]
        fn text_forms_round_trip(number: u64, ip: std::net::IpAddr, port: u16) {
            let owner = Owner { address: (ip, port).into(), incarnation: Incarnation(number) };
            prop_assert_eq!(owner.to_string().parse(), Ok(owner));
            let ownership = Ownership::begin(owner);
            prop_assert_eq!(ownership.to_string().parse(), Ok(ownership));
            let tombstone = Tombstone { by: owner.incarnation, epoch: Epoch(number) };
            for record in [Record::Owned(ownership), Record::Deleted(tombstone)] {
                prop_assert_eq!(record.to_string().parse(), Ok(record));
            }
        }
    }
}
