//! JSON as `serde_json` parses it, with all of an object's members, including duplicates.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};

/// A JSON value, without the details that the judge does not use.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    Null,
    Bool,
    Integer(i64),
    /// A number that does not fit into an `i64`.
    Float(f64),
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

struct AnyValue;

// === impl Json ===

impl Json {
    pub fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    /// Returns the member named `name`, or `Err` if there are several.
    pub fn member(&self, name: &str) -> Result<Option<&Self>, DuplicateMember> {
        let Self::Object(members) = self else {
            return Ok(None);
        };
        let mut found = members.iter().filter(|(key, _)| key == name);
        match (found.next(), found.next()) {
            (_, Some(_)) => Err(DuplicateMember),
            (first, None) => Ok(first.map(|(_, value)| value)),
        }
    }
}

/// A member is duplicated, so two parsers may read different messages.
#[derive(Debug)]
pub struct DuplicateMember;

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

impl<'de> Visitor<'de> for AnyValue {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Json, E> {
        Ok(Json::Bool)
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Integer(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(i64::try_from(number).map_or(Json::Float(number as f64), Json::Integer))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Json, A::Error> {
        let mut array = Vec::new();
        while let Some(element) = elements.next_element()? {
            array.push(element);
        }
        Ok(Json::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Json, A::Error> {
        let mut object = Vec::new();
        while let Some(member) = members.next_entry()? {
            object.push(member);
        }
        Ok(Json::Object(object))
    }
}
