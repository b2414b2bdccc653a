//! Arguments written as text: `NAME=VALUE`, with dots between the names of nested objects, as on QEMU's command line.

use super::{Object, Type};
use crate::error::QmpError;
use serde_json::{Map, Value};

/// Arguments from pairs of names and values; if a name is repeated, the last value counts. The object's type resolves
/// what the pairs leave open, such as whether `1` is a number. The result still needs a [`check`](super::check()).
///
/// # Errors
/// Names the argument whose value does not match its type.
pub fn from_text(
    object: &Object,
    pairs: &[(String, String)],
) -> Result<Map<String, Value>, QmpError> {
    let mut map = Map::new();
    for (name, value) in pairs {
        nest(&mut map, name, value)?;
    }
    typed_object(object, &mut map, "")?;
    Ok(map)
}

fn nest(map: &mut Map<String, Value>, name: &str, value: &str) -> Result<(), QmpError> {
    let Some((first, rest)) = name.split_once('.') else {
        map.insert(name.to_owned(), value.into());
        return Ok(());
    };
    let inner = map.entry(first).or_insert_with(|| Value::Object(Map::new()));
    match inner {
        Value::Object(inner) => nest(inner, rest, value),
        _ => Err(QmpError::new(format_args!("Parameters '{first}.*' used inconsistently"))),
    }
}

fn typed_object(object: &Object, map: &mut Map<String, Value>, path: &str) -> Result<(), QmpError> {
    for member in object.members {
        if let Some(value) = map.get_mut(member.name) {
            typed(member.ty, value, &super::below(path, member.name))?;
        }
    }
    if let Some(variants) = &object.variants
        && let Some(tag) = map.get(variants.tag).and_then(Value::as_str)
        && let Some((_, case)) = variants.cases.iter().find(|(name, _)| *name == tag)
    {
        typed_object(case, map, path)?;
    }
    Ok(())
}

fn typed(ty: Type, value: &mut Value, path: &str) -> Result<(), QmpError> {
    match (ty, &mut *value) {
        (Type::Int | Type::Number, Value::String(text)) => {
            let number = text.parse::<i64>().map_err(|_| expects(path, "an integer"))?;
            *value = number.into();
        }
        (Type::Size, Value::String(text)) => {
            let bytes = size(text).ok_or_else(|| expects(path, "a size"))?;
            *value = bytes.into();
        }
        (Type::Bool, Value::String(text)) => {
            *value = match text.as_str() {
                "on" | "yes" | "true" | "y" => true.into(),
                "off" | "no" | "false" | "n" => false.into(),
                _ => return Err(expects(path, "'on' or 'off'")),
            };
        }
        (Type::Null, Value::String(text)) if text.is_empty() => *value = Value::Null,
        (Type::Object(object), Value::Object(map)) => typed_object(object, map, path)?,
        (Type::List(ty), Value::Object(map)) => {
            let mut items = Vec::with_capacity(map.len());
            for number in 0..map.len() {
                let name = format!("{path}.{number}");
                let Some(mut item) = map.remove(&number.to_string()) else {
                    return Err(QmpError::new(format_args!("Parameter '{name}' missing")));
                };
                typed(*ty, &mut item, &name)?;
                items.push(item);
            }
            *value = Value::Array(items);
        }
        (Type::Alternate(alternate), _) => {
            let alike = |ty: &&Type| match (ty, &*value) {
                (Type::Object(_), Value::Object(_)) => true,
                (Type::Null, Value::String(text)) => text.is_empty(),
                (Type::Str, Value::String(text)) => !text.is_empty(),
                _ => false,
            };
            if let Some(ty) = alternate.types.iter().find(alike) {
                typed(*ty, value, path)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// A number of bytes, with an optional suffix for a power of 1,024.
fn size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        b'T' => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn expects(path: &str, what: &str) -> QmpError {
    QmpError::new(format_args!("Parameter '{path}' expects {what}"))
}

#[cfg(test)]
mod tests {
    use super::super::{Alternate, Object, Variants, object, opt, req};
    use super::*;
    use serde_json::json;

    static FILE: Object = object(&[req("path", Type::Str), opt("size", Type::Size)]);
    static REFERENCE: Alternate =
        Alternate { name: "RefOrNull", types: &[Type::Str, Type::Object(&FILE), Type::Null] };
    static IMAGE: Object = object(&[req("file", Type::Alternate(&REFERENCE))]);
    static TABLE: Object = Object {
        members: &[
            req("driver", Type::Enum(&["qcow2", "null"])),
            opt("names", Type::List(&Type::Str)),
            opt("on", Type::Bool),
            opt("speed", Type::Int),
        ],
        variants: Some(Variants { tag: "driver", cases: &[("qcow2", &IMAGE)] }),
    };

    fn parsed(text: &str) -> Result<Value, String> {
        let pairs: Vec<_> = text
            .split(',')
            .filter_map(|pair| pair.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        from_text(&TABLE, &pairs).map(Value::Object).map_err(|error| error.to_string())
    }

    #[test]
    fn text_gets_the_types_of_the_schema() {
        let image = json!({"driver": "qcow2", "file": {"path": "7", "size": 1 << 20}, "on": true});
        assert_eq!(parsed("driver=qcow2,file.path=7,file.size=1M,on=on").unwrap(), image);
        let names = json!({"driver": "null", "names": ["a", "b"], "speed": -3});
        assert_eq!(parsed("driver=null,names.1=b,names.0=a,speed=-3").unwrap(), names);
        assert_eq!(parsed("driver=qcow2,file=").unwrap()["file"], Value::Null);
        assert_eq!(parsed("driver=qcow2,file=x").unwrap()["file"], "x");
        assert_eq!(parsed("speed=1,speed=2").unwrap()["speed"], 2);
        for (text, error) in [
            ("on=maybe", "Parameter 'on' expects 'on' or 'off'"),
            ("speed=x", "Parameter 'speed' expects an integer"),
            ("driver=qcow2,file.path=a,file.size=1X", "Parameter 'file.size' expects a size"),
            ("names.0=a,names.2=b", "Parameter 'names.1' missing"),
            ("file=a,file.path=b", "Parameters 'file.*' used inconsistently"),
        ] {
            assert_eq!(parsed(text), Err(error.to_owned()), "{text}");
        }
    }
}
