//! The job that a call gives its handler. It doubles as the call's key, so that any client can send it as a single string.

use std::{fmt, str::FromStr, time::Duration};

/// One call's work: `<name>~<milliseconds>~<steps>~<reaction>`. The name is a nonce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    pub name: String,
    pub work: Duration,
    /// How many progress reports to send, evenly spread.
    pub steps: u32,
    pub reaction: Reaction,
}

/// How the handler reacts to its token and its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// Ends as soon as its token fires.
    EndsOnToken,
    /// Ignores its token.
    IgnoresToken,
    /// Ends as soon as its token fires. Its progress stalls the server if the client does not read.
    Floods,
}

/// Size of one progress report from a flooding handler, in bytes. A few dozen of them fill the kernel's buffers.
pub const FLOOD: usize = 128 * 1024;

// === impl Job ===

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reaction = match self.reaction {
            Reaction::EndsOnToken => "heeds",
            Reaction::IgnoresToken => "deaf",
            Reaction::Floods => "floods",
        };
        let work = self.work.as_millis();
        write!(f, "{}~{work}~{}~{reaction}", self.name, self.steps)
    }
}

impl FromStr for Job {
    type Err = String;

    fn from_str(key: &str) -> Result<Self, String> {
        let parts: Vec<_> = key.split('~').collect();
        let &[name, work, steps, reaction] = parts.as_slice() else {
            return Err(format!("not a job: {key}"));
        };
        let number = |text: &str| text.parse::<u32>().map_err(|_| format!("not a job: {key}"));
        Ok(Self {
            name: name.to_owned(),
            work: Duration::from_millis(number(work)?.into()),
            steps: number(steps)?,
            reaction: match reaction {
                "heeds" => Reaction::EndsOnToken,
                "deaf" => Reaction::IgnoresToken,
                "floods" => Reaction::Floods,
                _ => return Err(format!("not a job: {key}")),
            },
        })
    }
}

/// Returns a handler's answer: its key, padded with dots if it is shorter than `bytes`.
#[must_use]
pub fn answer(key: &str, bytes: usize) -> String {
    let dots = bytes.saturating_sub(key.len());
    key.to_owned() + &".".repeat(dots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_round_trips_through_its_key() {
        let key = "a1.7~250~3~deaf";
        let job: Job = key.parse().expect("a job");
        assert_eq!(job.to_string(), key);
        assert!("a1.7~250~3".parse::<Job>().is_err());
    }
}
