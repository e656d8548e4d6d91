//! `Serialize` implementations for snapshot types (feature `serde`).
//!
//! Request ids are serialized as in JSON-RPC, variants by their names in metrics, and times in seconds. Session ids are omitted, because a
//! client that knows one can act for the session.

use std::time::Duration;

use serde::{
    Serialize, Serializer,
    ser::{SerializeStruct as _, SerializeStructVariant as _},
};

use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause, Outcome, RequestId},
    observe::{CallSnapshot, CallState},
};

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_i64(*number),
            Self::String(string) => serializer.serialize_str(string),
        }
    }
}

// Not derived, so that a new field can't be exposed by accident.
impl Serialize for CallInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut info = serializer.serialize_struct("CallInfo", 5)?;
        info.serialize_field("id", &self.id())?;
        info.serialize_field("request_id", self.request_id())?;
        info.serialize_field("method", self.method())?;
        info.serialize_field("tool", &self.tool())?;
        info.serialize_field("protocol_version", &self.protocol_version())?;
        info.end()
    }
}

impl Serialize for CallId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_newtype_struct("CallId", &u64::from(*self))
    }
}

impl Serialize for CancelReason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit_variant("CancelReason", *self as u32, self.name())
    }
}

impl Serialize for DetachCause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit_variant("DetachCause", *self as u32, self.name())
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (index, reason) = match self {
            Self::Completed => (0, None),
            Self::Cancelled(reason) => (1, Some(reason)),
            Self::Abandoned(reason) => (2, Some(reason)),
            Self::ClientCancelled => (3, None),
            Self::Failed => (4, None),
            Self::Unknown => (5, None),
        };
        match reason {
            Some(reason) => {
                serializer.serialize_newtype_variant("Outcome", index, self.name(), reason)
            }
            None => serializer.serialize_unit_variant("Outcome", index, self.name()),
        }
    }
}

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
