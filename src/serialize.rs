//! Types as data (feature `serde`): ids as they are in JSON-RPC, names in snake case as in metrics, times in seconds.
//!
//! A session id is left out. Who knows it can speak for the session.

use std::time::Duration;

use serde::{Serialize, Serializer, ser::SerializeStruct as _};

use crate::call::{CallInfo, RequestId};

impl Serialize for RequestId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_i64(*number),
            Self::String(string) => serializer.serialize_str(string),
        }
    }
}

// Not derived: what is to be seen of a call is chosen field by field.
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

pub(crate) fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

pub(crate) fn seconds_if_any<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}
