//! A server's own description of its types (`query-qmp-schema`), and values judged by it.

use serde_json::{Map, Value};
use std::collections::HashMap;

pub(crate) struct Introspection(HashMap<String, Map<String, Value>>);

impl Introspection {
    pub(crate) fn new(answer: &Value) -> Self {
        let entries = answer.as_array().unwrap().iter().map(|entry| {
            (entry["name"].as_str().unwrap().to_owned(), entry.as_object().unwrap().clone())
        });
        Self(entries.collect())
    }

    fn entry(&self, name: &Value) -> &Map<String, Value> {
        &self.0[name.as_str().unwrap()]
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// What is wrong with what a command has returned.
    pub(crate) fn judge_return(&self, command: &str, value: &Value) -> Vec<String> {
        let mut wrong = Vec::new();
        self.judge(&self.0[command]["ret-type"], value, command, &mut wrong);
        wrong
    }

    /// What is wrong with an event's data.
    pub(crate) fn judge_event(&self, event: &str, value: &Value) -> Vec<String> {
        let mut wrong = Vec::new();
        self.judge(&self.0[event]["arg-type"], value, event, &mut wrong);
        wrong
    }

    fn judge(&self, ty: &Value, value: &Value, path: &str, wrong: &mut Vec<String>) {
        let entry = self.entry(ty);
        let mut fail = |what: &str| wrong.push(format!("{path}: {what}, not {value}"));
        match entry["meta-type"].as_str().unwrap() {
            "builtin" => {
                let fits = match entry["json-type"].as_str().unwrap() {
                    "string" => value.is_string(),
                    "int" => value.is_i64() || value.is_u64(),
                    "number" => value.is_number(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    _ => true,
                };
                if !fits {
                    fail(entry["json-type"].as_str().unwrap());
                }
            }
            "enum" => {
                if !entry["values"].as_array().unwrap().contains(value) {
                    fail("one of an enumeration");
                }
            }
            "array" => match value.as_array() {
                Some(items) => {
                    for (index, item) in items.iter().enumerate() {
                        let path = format!("{path}[{index}]");
                        self.judge(&entry["element-type"], item, &path, wrong);
                    }
                }
                None => fail("an array"),
            },
            "object" => {
                let Some(map) = value.as_object() else { return fail("an object") };
                let members = self.members(ty, map);
                for (name, member) in &members {
                    match map.get(name.as_str()) {
                        Some(value) => {
                            let path = format!("{path}.{name}");
                            self.judge(&member["type"], value, &path, wrong);
                        }
                        None if member.contains_key("default") => {}
                        None => wrong.push(format!("{path}.{name} is missing")),
                    }
                }
                for key in map.keys() {
                    if !members.contains_key(key) {
                        wrong.push(format!("{path}.{key} is unknown"));
                    }
                }
            }
            other => panic!("{other}"),
        }
    }

    /// The members of an object with these values, or of all of its variants.
    fn members(
        &self,
        ty: &Value,
        value: &Map<String, Value>,
    ) -> HashMap<String, Map<String, Value>> {
        let entry = self.entry(ty);
        let own = entry["members"].as_array().unwrap().iter();
        let mut members: HashMap<_, _> = own
            .map(|member| {
                let member = member.as_object().unwrap();
                (member["name"].as_str().unwrap().to_owned(), member.clone())
            })
            .collect();
        if let Some(tag) = entry.get("tag").and_then(Value::as_str) {
            let chosen = value.get(tag);
            for variant in entry["variants"].as_array().unwrap() {
                if chosen == Some(&variant["case"]) {
                    members.extend(self.members(&variant["type"], value));
                }
            }
        }
        members
    }

    /// How a command's arguments differ from what another server takes: each that the other does not
    /// know, or takes as something else, and each that it needs.
    pub(crate) fn differences(&self, command: &str, other: &Self) -> Vec<String> {
        let mut found = Vec::new();
        let (mine, others) = (&self.0[command]["arg-type"], &other.0[command]["arg-type"]);
        self.compare(mine, other, others, command, 0, &mut found);
        found
    }

    fn compare(
        &self,
        mine: &Value,
        other: &Self,
        others: &Value,
        path: &str,
        depth: usize,
        found: &mut Vec<String>,
    ) {
        let (my, its) = (self.entry(mine), other.entry(others));
        if my["meta-type"] != its["meta-type"] {
            found.push(format!("{path}: {} instead of {}", my["meta-type"], its["meta-type"]));
            return;
        }
        match my["meta-type"].as_str().unwrap() {
            "builtin" if my["json-type"] != its["json-type"] => {
                found.push(format!("{path}: {} instead of {}", my["json-type"], its["json-type"]));
            }
            "enum" => {
                for value in my["values"].as_array().unwrap() {
                    if !its["values"].as_array().unwrap().contains(value) {
                        found.push(format!("{path}: {value}"));
                    }
                }
            }
            "array" => {
                let (mine, others) = (&my["element-type"], &its["element-type"]);
                self.compare(mine, other, others, &format!("{path}[]"), depth, found);
            }
            "object" if depth < 4 => {
                let empty = Map::new();
                let mut pairs = vec![(self.members(mine, &empty), other.members(others, &empty))];
                for variant in my.get("variants").and_then(Value::as_array).into_iter().flatten() {
                    let tag = my["tag"].as_str().unwrap().to_owned();
                    let chosen = Map::from_iter([(tag, variant["case"].clone())]);
                    pairs.push((self.members(mine, &chosen), other.members(others, &chosen)));
                }
                for (mine, others) in pairs {
                    for (name, member) in &mine {
                        let path = format!("{path}.{name}");
                        let Some(its) = others.get(name) else {
                            found.push(path);
                            continue;
                        };
                        if member.contains_key("default") != its.contains_key("default") {
                            found.push(format!("{path}: whether it can be left out"));
                        }
                        self.compare(&member["type"], other, &its["type"], &path, depth + 1, found);
                    }
                    for (name, member) in &others {
                        if !mine.contains_key(name) && !member.contains_key("default") {
                            found.push(format!("{path}.{name} is needed"));
                        }
                    }
                }
            }
            _ => {}
        }
    }
}
