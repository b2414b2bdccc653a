//! Commands and events of exports, and of server shutdown.

use crate::schema::{Command, EMPTY, Member, Object, Type, Variants, object, opt, req};
use isobath_export::frontend::{Parameter, Presence, Protocol, Takes};
use isobath_export::registry::PROTOCOLS;

/// The number of frontends over which clients can add exports.
const COUNT: usize = {
    let (mut count, mut number) = (0, 0);
    while number < PROTOCOLS.len() {
        count += can_be_added(PROTOCOLS[number]) as usize;
        number += 1;
    }
    count
};

/// These frontends.
const ADDED: [&Protocol; COUNT] = {
    let mut added = [PROTOCOLS[0]; COUNT];
    let (mut count, mut number) = (0, 0);
    while number < PROTOCOLS.len() {
        if can_be_added(PROTOCOLS[number]) {
            added[count] = PROTOCOLS[number];
            count += 1;
        }
        number += 1;
    }
    added
};

/// Whether clients can say where an export is to be, or need not.
const fn can_be_added(protocol: &Protocol) -> bool {
    protocol.shared || !matches!(protocol.location.qmp, Presence::Absent)
}

/// The maximum number of parameters of a frontend, including its location.
const MOST: usize = 8;

static UNIX: Object = object(&[req("path", Type::Str)]);
static FD: Object = object(&[req("str", Type::Str)]);
static ADDRESS: Object = Object {
    members: &[req("type", Type::Enum(&["unix", "fd"]))],
    variants: Some(Variants { tag: "type", cases: &[("unix", &UNIX), ("fd", &FD)] }),
};

/// The frontends' names.
static NAMES: [&str; PROTOCOLS.len()] = names(PROTOCOLS);
static ADDED_NAMES: [&str; COUNT] = names(&ADDED);

const fn names<const N: usize>(protocols: &[&Protocol]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut number = 0;
    while number < N {
        names[number] = protocols[number].name;
        number += 1;
    }
    names
}

/// The arguments of each frontend, and their number.
static MEMBERS: [([Member; MOST], usize); COUNT] = {
    let mut all = [([opt("", Type::Any); MOST], 0); COUNT];
    let mut number = 0;
    while number < COUNT {
        all[number] = members(ADDED[number]);
        number += 1;
    }
    all
};
static OBJECTS: [Object; COUNT] = {
    let mut objects = [const { object(&[]) }; COUNT];
    let mut number = 0;
    while number < COUNT {
        let (members, count) = &MEMBERS[number];
        objects[number] = object(members.split_at(*count).0);
        number += 1;
    }
    objects
};
static CASES: [(&str, &Object); COUNT] = {
    let mut cases = [("", &UNIX); COUNT];
    let mut number = 0;
    while number < COUNT {
        cases[number] = (ADDED[number].name, &OBJECTS[number]);
        number += 1;
    }
    cases
};

/// The arguments of `block-export-add` for a protocol.
const fn members(protocol: &Protocol) -> ([Member; MOST], usize) {
    let mut members = [opt("", Type::Any); MOST];
    let mut count = 0;
    if let Some(location) = member(&protocol.location) {
        members[count] = location;
        count += 1;
    }
    let mut number = 0;
    while number < protocol.parameters.len() {
        if let Some(other) = member(&protocol.parameters[number]) {
            members[count] = other;
            count += 1;
        }
        number += 1;
    }
    (members, count)
}

/// A parameter as a member of `block-export-add`'s arguments, if it is one.
const fn member(parameter: &Parameter) -> Option<Member> {
    let optional = match parameter.qmp {
        Presence::Absent => return None,
        Presence::Optional => true,
        Presence::Required => false,
    };
    let ty = match parameter.takes {
        // Nothing on the wire has a program.
        Takes::UblkDevice => return None,
        Takes::Text | Takes::Path => Type::Str,
        Takes::Flag => Type::Bool,
        Takes::Number { .. } => Type::Int,
        Takes::Bytes { .. } => Type::Size,
        Takes::Choice(words) => Type::Enum(words),
        Takes::UnixSocket | Takes::Socket => Type::Object(&ADDRESS),
    };
    Some(Member { name: parameter.name, ty, optional })
}

static ADD: Object = Object {
    members: &[
        req("type", Type::Enum(&ADDED_NAMES)),
        req("id", Type::Str),
        req("node-name", Type::Str),
        opt("writable", Type::Bool),
        opt("writethrough", Type::Bool),
    ],
    variants: Some(Variants { tag: "type", cases: &CASES }),
};
static DELETE: Object = object(&[req("id", Type::Str), opt("mode", Type::Enum(&["safe", "hard"]))]);
static INFO: Object = object(&[
    req("id", Type::Str),
    req("type", Type::Enum(&NAMES)),
    req("node-name", Type::Str),
    req("shutting-down", Type::Bool),
]);

pub(super) static DELETED: Object = object(&[req("id", Type::Str)]);
pub(super) static SHUTDOWN: Object = object(&[
    req("guest", Type::Bool),
    req("reason", Type::Enum(&["host-qmp-quit", "host-signal"])),
]);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "query-block-exports",
        arguments: &EMPTY,
        returns: Some(Type::List(&Type::Object(&INFO))),
    },
    Command { name: "block-export-add", arguments: &ADD, returns: None },
    Command { name: "block-export-del", arguments: &DELETE, returns: None },
    Command { name: "quit", arguments: &EMPTY, returns: None },
];
