//! The answer to `query-qmp-schema`.

use super::{Member, Object, Schema, Type};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::ptr;

/// Describes a schema as QEMU does: a list of `SchemaInfo`, in which types other than JSON's own have numbers as names.
pub fn introspect(schema: &Schema) -> Value {
    let mut names = Names::default();
    let mut entries = Vec::new();
    for command in schema.commands() {
        let arguments = names.of(Type::Object(command.arguments));
        let returns = names.of(command.returns.unwrap_or(Type::Object(&super::EMPTY)));
        entries.push(json!({
            "name": command.name, "ret-type": returns, "meta-type": "command",
            "arg-type": arguments,
        }));
    }
    for event in schema.events {
        let data = names.of(Type::Object(event.data));
        entries.push(json!({"name": event.name, "meta-type": "event", "arg-type": data}));
    }
    while let Some((name, ty)) = names.undescribed.pop_front() {
        let entry = describe(&name, ty, &mut names);
        entries.push(entry);
    }
    Value::Array(entries)
}

fn describe(name: &str, ty: Type, names: &mut Names) -> Value {
    let builtin = |json: &str| json!({"name": name, "meta-type": "builtin", "json-type": json});
    match ty {
        Type::Str => builtin("string"),
        Type::Int | Type::Size => builtin("int"),
        Type::Number => builtin("number"),
        Type::Bool => builtin("boolean"),
        Type::Null => builtin("null"),
        Type::Any => builtin("value"),
        Type::Enum(values) => {
            let members: Vec<_> = values.iter().map(|value| json!({"name": value})).collect();
            json!({"name": name, "meta-type": "enum", "members": members, "values": values})
        }
        Type::Object(object) => describe_object(name, object, names),
        Type::Alternate(alternate) => {
            let members: Vec<_> =
                alternate.types.iter().map(|ty| json!({"type": names.of(*ty)})).collect();
            json!({"name": name, "meta-type": "alternate", "members": members})
        }
        Type::List(element) => {
            let element = names.of(*element);
            json!({"name": name, "meta-type": "array", "element-type": element})
        }
    }
}

fn describe_object(name: &str, object: &'static Object, names: &mut Names) -> Value {
    let members: Vec<_> =
        object.members.iter().map(|member| describe_member(member, names)).collect();
    let mut entry = json!({"name": name, "members": members, "meta-type": "object"});
    if let (Some(variants), Some(map)) = (&object.variants, entry.as_object_mut()) {
        let all = object.members.iter().find(|member| member.name == variants.tag);
        let all = match all.map(|member| member.ty) {
            Some(Type::Enum(values)) => values,
            _ => &[],
        };
        let mut cases = Vec::new();
        for case in all {
            let found = variants.cases.iter().find(|(name, _)| name == case);
            let ty = names.of(Type::Object(found.map_or(&super::EMPTY, |(_, object)| object)));
            cases.push(json!({"case": case, "type": ty}));
        }
        map.insert("tag".into(), variants.tag.into());
        map.insert("variants".into(), cases.into());
    }
    entry
}

fn describe_member(member: &Member, names: &mut Names) -> Value {
    let ty = names.of(member.ty);
    if member.optional {
        json!({"name": member.name, "default": null, "type": ty})
    } else {
        json!({"name": member.name, "type": ty})
    }
}

/// The names given to types so far.
#[derive(Default)]
struct Names {
    known: Vec<(Type, String)>,
    numbers: usize,
    undescribed: VecDeque<(String, Type)>,
}

impl Names {
    fn of(&mut self, ty: Type) -> String {
        if let Some((_, name)) = self.known.iter().find(|(known, _)| same(*known, ty)) {
            return name.clone();
        }
        let name = match ty {
            Type::Str => "str".to_owned(),
            Type::Int | Type::Size => "int".to_owned(),
            Type::Number => "number".to_owned(),
            Type::Bool => "bool".to_owned(),
            Type::Null => "null".to_owned(),
            Type::Any => "any".to_owned(),
            Type::List(element) => format!("[{}]", self.of(*element)),
            Type::Enum(_) | Type::Object(_) | Type::Alternate(_) => {
                self.numbers += 1;
                (self.numbers - 1).to_string()
            }
        };
        self.known.push((ty, name.clone()));
        self.undescribed.push_back((name.clone(), ty));
        name
    }
}

fn same(one: Type, other: Type) -> bool {
    match (one, other) {
        (Type::Str, Type::Str)
        | (Type::Int | Type::Size, Type::Int | Type::Size)
        | (Type::Number, Type::Number)
        | (Type::Bool, Type::Bool)
        | (Type::Null, Type::Null)
        | (Type::Any, Type::Any) => true,
        (Type::Enum(one), Type::Enum(other)) => one == other,
        (Type::Object(one), Type::Object(other)) => {
            ptr::eq(one, other) || (is_empty(one) && is_empty(other))
        }
        (Type::Alternate(one), Type::Alternate(other)) => ptr::eq(one, other),
        (Type::List(one), Type::List(other)) => same(*one, *other),
        _ => false,
    }
}

fn is_empty(object: &Object) -> bool {
    object.members.is_empty() && object.variants.is_none()
}

#[cfg(test)]
mod tests {
    use super::super::{Command, EMPTY, Variants, opt, req};
    use super::*;

    static NODE: Object = Object {
        members: &[req("kind", Type::Enum(&["leaf", "pair"]))],
        variants: Some(Variants { tag: "kind", cases: &[("pair", &PAIR)] }),
    };
    static PAIR: Object = super::super::object(&[
        req("nodes", Type::List(&Type::Object(&NODE))),
        opt("n", Type::Size),
    ]);
    static COMMANDS: &[Command] =
        &[Command { name: "go", arguments: &EMPTY, returns: Some(Type::Object(&NODE)) }];

    #[test]
    fn types_are_described_once_also_where_they_contain_themselves() {
        static SCHEMA: Schema = Schema { commands: &[COMMANDS], events: &[] };
        assert_eq!(
            introspect(&SCHEMA),
            json!([
                {"name": "go", "ret-type": "1", "meta-type": "command", "arg-type": "0"},
                {"name": "0", "members": [], "meta-type": "object"},
                {"name": "1", "members": [{"name": "kind", "type": "2"}], "meta-type": "object",
                 "tag": "kind",
                 "variants": [{"case": "leaf", "type": "0"}, {"case": "pair", "type": "3"}]},
                {"name": "2", "meta-type": "enum", "members": [{"name": "leaf"}, {"name": "pair"}],
                 "values": ["leaf", "pair"]},
                {"name": "3", "members": [{"name": "nodes", "type": "[1]"},
                 {"name": "n", "default": null, "type": "int"}], "meta-type": "object"},
                {"name": "[1]", "meta-type": "array", "element-type": "1"},
                {"name": "int", "meta-type": "builtin", "json-type": "int"},
            ])
        );
    }
}
