//! Commands and events of exports, and of the server's end.

use crate::schema::{Command, EMPTY, Object, Type, Variants, object, opt, req};

const EXPORT_TYPE: Type = Type::Enum(&["nbd", "vhost-user-blk", "fuse"]);

static NBD: Object = object(&[
    opt("name", Type::Str),
    opt("description", Type::Str),
    opt("allocation-depth", Type::Bool),
]);
static UNIX: Object = object(&[req("path", Type::Str)]);
static ADDRESS: Object = Object {
    members: &[req("type", Type::Enum(&["unix"]))],
    variants: Some(Variants { tag: "type", cases: &[("unix", &UNIX)] }),
};
static VHOST_USER_BLK: Object = object(&[
    req("addr", Type::Object(&ADDRESS)),
    opt("logical-block-size", Type::Size),
    opt("num-queues", Type::Int),
]);
static FUSE: Object = object(&[
    req("mountpoint", Type::Str),
    opt("growable", Type::Bool),
    opt("allow-other", Type::Enum(&["off", "on", "auto"])),
]);
static ADD: Object = Object {
    members: &[
        req("type", EXPORT_TYPE),
        req("id", Type::Str),
        req("node-name", Type::Str),
        opt("writable", Type::Bool),
        opt("writethrough", Type::Bool),
    ],
    variants: Some(Variants {
        tag: "type",
        cases: &[("nbd", &NBD), ("vhost-user-blk", &VHOST_USER_BLK), ("fuse", &FUSE)],
    }),
};
static DELETE: Object = object(&[req("id", Type::Str), opt("mode", Type::Enum(&["safe", "hard"]))]);
static INFO: Object = object(&[
    req("id", Type::Str),
    req("type", EXPORT_TYPE),
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
