//! JSON objects without duplicate keys, of which readers might take different ones.

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// A value.
pub(super) enum Entry {
    Text(String),
    Object(Vec<(String, Entry)>),
    /// Anything else.
    Other,
}

/// Parses an object.
pub(super) fn object(json: &str) -> Result<Vec<(String, Entry)>, String> {
    match serde_json::from_str(json) {
        Ok(Entry::Object(object)) => Ok(object),
        Ok(_) => Err("it is another value".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Entry, E> {
        Ok(Entry::Text(text.to_owned()))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Entry, E> {
        Ok(Entry::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Entry, E> {
        Ok(Entry::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Entry, E> {
        Ok(Entry::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Entry, E> {
        Ok(Entry::Other)
    }

    fn visit_unit<E>(self) -> Result<Entry, E> {
        Ok(Entry::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Entry, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Entry::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Entry, A::Error> {
        let mut object: Vec<(String, Entry)> = Vec::new();
        while let Some((key, value)) = entries.next_entry::<String, Entry>()? {
            if object.iter().any(|(other, _)| *other == key) {
                return Err(A::Error::custom("duplicate key"));
            }
            object.push((key, value));
        }
        Ok(Entry::Object(object))
    }
}
