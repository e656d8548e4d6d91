//! Calls as they stand.

use std::time::Duration;

use crate::call::{CallId, CallInfo};

/// A call as it was when it was looked at, by [`Calls::snapshot`](crate::Calls::snapshot).
#[derive(Debug, Clone)]
pub struct CallSnapshot {
    pub(crate) info: CallInfo,
    pub(crate) age: Duration,
    pub(crate) state: CallState,
    pub(crate) time_left: Option<Duration>,
}

/// Whether a call has a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallState {
    /// A stream of it lives.
    Attached,
    /// Its client has gone.
    #[non_exhaustive]
    Detached {
        /// For how long.
        since: Duration,
        /// How long it may still wait for its client; `None` if it runs on to its end.
        grace_left: Option<Duration>,
    },
}

// === impl CallSnapshot ===

impl CallSnapshot {
    /// The call's identity in this process, for [`Calls::cancel`](crate::Calls::cancel).
    pub fn id(&self) -> CallId {
        self.info.id()
    }

    /// What is known of the call itself.
    pub fn info(&self) -> &CallInfo {
        &self.info
    }

    /// How long it has been known.
    pub fn age(&self) -> Duration {
        self.age
    }

    /// Whether it has a client.
    pub fn state(&self) -> CallState {
        self.state
    }

    /// How long it may still last, by its [`call_timeout`](crate::Policy::call_timeout).
    pub fn time_left(&self) -> Option<Duration> {
        self.time_left
    }
}

#[cfg(feature = "serde")]
mod serialize {
    use serde::{
        Serialize, Serializer,
        ser::{SerializeStruct as _, SerializeStructVariant as _},
    };

    use super::{CallSnapshot, CallState, Duration};

    impl Serialize for CallSnapshot {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut snapshot = serializer.serialize_struct("CallSnapshot", 4)?;
            snapshot.serialize_field("info", &self.info)?;
            snapshot.serialize_field("age", &seconds(self.age))?;
            snapshot.serialize_field("state", &self.state)?;
            snapshot.serialize_field("time_left", &self.time_left.map(seconds))?;
            snapshot.end()
        }
    }

    impl Serialize for CallState {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let (since, grace_left) = match *self {
                Self::Attached => {
                    return serializer.serialize_unit_variant("CallState", 0, "attached");
                }
                Self::Detached { since, grace_left } => (since, grace_left),
            };
            let mut state = serializer.serialize_struct_variant("CallState", 1, "detached", 2)?;
            state.serialize_field("since", &seconds(since))?;
            state.serialize_field("grace_left", &grace_left.map(seconds))?;
            state.end()
        }
    }

    fn seconds(time: Duration) -> f64 {
        time.as_secs_f64()
    }
}
