//! The job that a call gives its handler. It is the call's key as well, so that every client can bring it as one string.

use std::{fmt, str::FromStr, time::Duration};

/// The work of one call: `<name>~<milliseconds>~<steps>~<manner>`, where the name is a nonce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    pub name: String,
    pub work: Duration,
    /// How often progress is reported, evenly spread.
    pub steps: u32,
    pub manner: Manner,
}

/// How the handler treats its token, and its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// Ends as soon as its token fires.
    Heeds,
    /// Does not look at its token.
    Deaf,
    /// Heeds it, and reports progress at such length that a client which does not read stalls the server.
    Floods,
}

/// A flooding handler's progress, in bytes: with a few dozen the kernel's buffers are full.
pub const FLOOD: usize = 128 * 1024;

// === impl Job ===

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let manner = match self.manner {
            Manner::Heeds => "heeds",
            Manner::Deaf => "deaf",
            Manner::Floods => "floods",
        };
        let work = self.work.as_millis();
        write!(f, "{}~{work}~{}~{manner}", self.name, self.steps)
    }
}

impl FromStr for Job {
    type Err = String;

    fn from_str(key: &str) -> Result<Self, String> {
        let parts: Vec<_> = key.split('~').collect();
        let &[name, work, steps, manner] = parts.as_slice() else {
            return Err(format!("not a job: {key}"));
        };
        let number = |text: &str| text.parse::<u32>().map_err(|_| format!("not a job: {key}"));
        Ok(Self {
            name: name.to_owned(),
            work: Duration::from_millis(number(work)?.into()),
            steps: number(steps)?,
            manner: match manner {
                "heeds" => Manner::Heeds,
                "deaf" => Manner::Deaf,
                "floods" => Manner::Floods,
                _ => return Err(format!("not a job: {key}")),
            },
        })
    }
}

/// The text with which a handler answers: its key, filled up to the length asked for.
#[must_use]
pub fn answer(key: &str, bytes: usize) -> String {
    let dots = bytes.saturating_sub(key.len());
    key.to_owned() + &".".repeat(dots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_read_as_it_is_written() {
        let key = "a1.7~250~3~deaf";
        let job: Job = key.parse().expect("a job");
        assert_eq!(job.to_string(), key);
        assert!("a1.7~250~3".parse::<Job>().is_err());
    }
}
