//! Numbers, in the notation of the pages and of the source.

use std::time::Duration;

/// A time in milliseconds, or a number of things or bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Number {
    Time(u64),
    Count(u64),
}

/// A time that grows with the `retry` of a server, written `max(20 s, 5 × ``retry`` + 5 s)`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ByRetry {
    least: Duration,
    times: u32,
    more: Duration,
}

#[test]
fn the_pages_numbers_are_read_as_people_read_them() {
    assert_eq!(Number::of_page("1,024"), Some(Number::Count(1024)));
    assert_eq!(Number::of_page("16 KiB"), Some(Number::Count(16384)));
    assert_eq!(Number::of_page("10 min"), Some(Number::Time(600_000)));
    assert_eq!(Number::of_page("5 × `retry` + 5 s"), None);
    let source = "idle: Duration::from_secs(60 * 60)";
    assert_eq!(Number::of_source(source), Some(Number::Time(3_600_000)));
    assert_eq!(Number::of_source("1_024"), Some(Number::Count(1024)));
    assert_eq!(Number::of_source("Bytes::from_static(b\":\")"), None);
    let grace = ByRetry::of_page("max(20 s, 3 × `retry` + 1 min)").expect("a time");
    assert_eq!(grace.at(Duration::from_secs(1)), Duration::from_secs(63));
    assert_eq!(ByRetry::of_page("20 s"), None);
}

// === impl Number ===

impl Number {
    pub(super) fn of_page(text: &str) -> Option<Self> {
        let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
        let number: u64 = number.replace(',', "").parse().ok()?;
        Some(match unit {
            "" => Self::Count(number),
            "KiB" => Self::Count(number << 10),
            "MiB" => Self::Count(number << 20),
            "ms" => Self::Time(number),
            "s" => Self::Time(number * 1000),
            "min" => Self::Time(number * 60_000),
            "h" => Self::Time(number * 3_600_000),
            _ => return None,
        })
    }

    /// Parses an expression, or a field with its expression.
    pub(super) fn of_source(text: &str) -> Option<Self> {
        let text = text.rsplit(": ").next()?;
        if let Some(seconds) = argument(text, "Duration::from_secs(") {
            return Some(Self::Time(product(seconds)? * 1000));
        }
        if let Some(millis) = argument(text, "Duration::from_millis(") {
            return Some(Self::Time(product(millis)?));
        }
        product(text).map(Self::Count)
    }

    pub(super) fn time(&self) -> Option<Duration> {
        match self {
            Self::Time(millis) => Some(Duration::from_millis(*millis)),
            Self::Count(_) => None,
        }
    }
}

impl From<Duration> for Number {
    fn from(time: Duration) -> Self {
        Self::Time(time.as_millis().try_into().expect("a time that fits"))
    }
}

impl From<usize> for Number {
    fn from(count: usize) -> Self {
        Self::Count(count as u64)
    }
}

fn argument<'a>(text: &'a str, function: &str) -> Option<&'a str> {
    text.strip_prefix(function)?.strip_suffix(')')
}

fn product(text: &str) -> Option<u64> {
    let factors = text.split(" * ").map(|factor| {
        let digits = factor.replace('_', "");
        digits.parse::<u64>().ok()
    });
    factors.product()
}

// === impl ByRetry ===

impl ByRetry {
    pub(super) fn of_page(text: &str) -> Option<Self> {
        let text = text.strip_prefix("max(")?.strip_suffix(')')?;
        let (least, text) = text.split_once(", ")?;
        let (times, more) = text.split_once(" × `retry` + ")?;
        Some(Self {
            least: Number::of_page(least)?.time()?,
            times: times.parse().ok()?,
            more: Number::of_page(more)?.time()?,
        })
    }

    pub(super) fn at(&self, retry: Duration) -> Duration {
        self.least.max(self.times * retry + self.more)
    }
}
