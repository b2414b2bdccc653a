//! Parses one JSON value.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// Parses a value, rejecting objects with duplicate keys, which readers could interpret differently.
///
/// # Errors
/// A message in QEMU's form, `JSON parse error, ...`.
pub fn parse(text: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(text)
        .map(|Strict(value)| value)
        .map_err(|error| format!("JSON parse error, {error}"))
}

struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some((key, Strict(value))) = entries.next_entry::<String, Strict>()? {
            if map.insert(key, value).is_some() {
                return Err(A::Error::custom("duplicate key"));
            }
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_kept_and_duplicates_refused() {
        let text = br#"{"a":[null,true,-1,18446744073709551615,1.5,"\u00e9"],"b":{}}"#;
        assert_eq!(parse(text), Ok(json!({"a": [null, true, -1, u64::MAX, 1.5, "é"], "b": {}})));
        assert!(parse(br#"[{"a":1,"a":1}]"#).unwrap_err().contains("duplicate key"));
        for broken in [&b"{"[..], b"{\"a\":1,}", b"'x'", b"\"\xff\"", b"", b"1e999", b"\"\n\""] {
            let error = parse(broken).unwrap_err();
            assert!(error.starts_with("JSON parse error, "), "{error}");
        }
    }
}
