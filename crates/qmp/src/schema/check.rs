//! Checking the types of values, with QEMU's messages.

use super::{Object, Type, below};
use crate::error::QmpError;
use serde_json::{Map, Value};

/// Checks a command's arguments, or its result.
///
/// # Errors
/// Names what is missing, has the wrong type or is unexpected, by its path (`actions[0].type`), in QEMU's wording.
pub fn check(object: &Object, value: &Map<String, Value>) -> Result<(), QmpError> {
    check_object(object, value, "")
}

fn check_object(object: &Object, value: &Map<String, Value>, path: &str) -> Result<(), QmpError> {
    let mut known = Vec::with_capacity(object.members.len());
    check_members(object, value, path, &mut known)?;
    match value.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => {
            Err(QmpError::new(format_args!("Parameter '{}' is unexpected", below(path, key))))
        }
        None => Ok(()),
    }
}

fn check_members(
    object: &Object,
    value: &Map<String, Value>,
    path: &str,
    known: &mut Vec<&'static str>,
) -> Result<(), QmpError> {
    for member in object.members {
        known.push(member.name);
        match value.get(member.name) {
            Some(value) => check_value(member.ty, value, &below(path, member.name))?,
            None if member.optional => {}
            None => {
                let name = below(path, member.name);
                return Err(QmpError::new(format_args!("Parameter '{name}' is missing")));
            }
        }
    }
    if let Some(variants) = &object.variants
        && let Some(tag) = value.get(variants.tag).and_then(Value::as_str)
        && let Some((_, case)) = variants.cases.iter().find(|(name, _)| *name == tag)
    {
        check_members(case, value, path, known)?;
    }
    Ok(())
}

fn check_value(ty: Type, value: &Value, path: &str) -> Result<(), QmpError> {
    let expected = |name: &str| {
        let message = format_args!("Invalid parameter type for '{path}', expected: {name}");
        Err(QmpError::new(message))
    };
    match (ty, value) {
        (Type::Any, _)
        | (Type::Str, Value::String(_))
        | (Type::Bool, Value::Bool(_))
        | (Type::Number, Value::Number(_))
        | (Type::Null, Value::Null) => Ok(()),
        (Type::Int, value) if value.is_i64() => Ok(()),
        (Type::Size, value) if value.is_u64() => Ok(()),
        (Type::Enum(values), Value::String(text)) => {
            if values.contains(&text.as_str()) {
                return Ok(());
            }
            let message = format_args!("Parameter '{path}' does not accept value '{text}'");
            Err(QmpError::new(message))
        }
        (Type::Object(object), Value::Object(map)) => check_object(object, map, path),
        (Type::List(ty), Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                check_value(*ty, item, &format!("{path}[{index}]"))?;
            }
            Ok(())
        }
        (Type::Alternate(alternate), value) => {
            match alternate.types.iter().find(|ty| is_alike(**ty, value)) {
                Some(ty) => check_value(*ty, value, path),
                None => expected(alternate.name),
            }
        }
        (Type::Str | Type::Enum(_), _) => expected("string"),
        (Type::Bool, _) => expected("boolean"),
        (Type::Number, _) => expected("number"),
        (Type::Int | Type::Size, _) => expected("integer"),
        (Type::Null, _) => expected("null"),
        (Type::Object(_), _) => expected("object"),
        (Type::List(_), _) => expected("array"),
    }
}

/// Whether a value has the same JSON type as a type's values.
fn is_alike(ty: Type, value: &Value) -> bool {
    match ty {
        Type::Any => true,
        Type::Str | Type::Enum(_) => value.is_string(),
        Type::Bool => value.is_boolean(),
        Type::Int | Type::Size | Type::Number => value.is_number(),
        Type::Null => value.is_null(),
        Type::Object(_) => value.is_object(),
        Type::List(_) => value.is_array(),
        Type::Alternate(alternate) => alternate.types.iter().any(|ty| is_alike(*ty, value)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Alternate, Variants, object, opt, req};
    use super::*;
    use serde_json::json;

    static FILE: Object = object(&[req("path", Type::Str)]);
    static REFERENCE: Alternate =
        Alternate { name: "BlockdevRef", types: &[Type::Str, Type::Object(&FILE)] };
    static IMAGE: Object = object(&[req("file", Type::Alternate(&REFERENCE))]);
    static TABLE: Object = Object {
        members: &[
            req("driver", Type::Enum(&["qcow2", "null"])),
            opt("sizes", Type::List(&Type::Size)),
            opt("speed", Type::Int),
        ],
        variants: Some(Variants { tag: "driver", cases: &[("qcow2", &IMAGE)] }),
    };

    fn verdict(value: &Value) -> String {
        let map = value.as_object().unwrap();
        check(&TABLE, map).err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn members_are_checked_in_qemus_words() {
        for good in [
            json!({"driver": "qcow2", "file": "a", "sizes": [0, u64::MAX], "speed": -1}),
            json!({"driver": "qcow2", "file": {"path": "p"}}),
            json!({"driver": "null"}),
        ] {
            assert_eq!(verdict(&good), "", "{good}");
        }
        for (bad, message) in [
            (json!({}), "Parameter 'driver' is missing"),
            (json!({"driver": 1}), "Invalid parameter type for 'driver', expected: string"),
            (json!({"driver": "x"}), "Parameter 'driver' does not accept value 'x'"),
            (json!({"driver": "qcow2"}), "Parameter 'file' is missing"),
            (json!({"driver": "null", "file": "a"}), "Parameter 'file' is unexpected"),
            (
                json!({"driver": "qcow2", "file": 1}),
                "Invalid parameter type for 'file', expected: BlockdevRef",
            ),
            (json!({"driver": "qcow2", "file": {}}), "Parameter 'file.path' is missing"),
            (
                json!({"driver": "qcow2", "file": {"path": "a", "x": 1}}),
                "Parameter 'file.x' is unexpected",
            ),
            (
                json!({"driver": "null", "sizes": [1, -1]}),
                "Invalid parameter type for 'sizes[1]', expected: integer",
            ),
            (
                json!({"driver": "null", "speed": 1.0}),
                "Invalid parameter type for 'speed', expected: integer",
            ),
            (
                json!({"driver": "null", "sizes": {}}),
                "Invalid parameter type for 'sizes', expected: array",
            ),
        ] {
            assert_eq!(verdict(&bad), message, "{bad}");
        }
    }
}
