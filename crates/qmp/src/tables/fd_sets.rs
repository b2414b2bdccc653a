//! Commands about descriptors of images.

use crate::schema::{Command, EMPTY, Object, Type, object, opt, req};

static ADD: Object = object(&[opt("fdset-id", Type::Int), opt("opaque", Type::Str)]);
static ADDED: Object = object(&[req("fdset-id", Type::Int), req("fd", Type::Int)]);
static REMOVE: Object = object(&[req("fdset-id", Type::Int), opt("fd", Type::Int)]);
static DESCRIPTOR: Object = object(&[req("fd", Type::Int), opt("opaque", Type::Str)]);
static SET: Object =
    object(&[req("fdset-id", Type::Int), req("fds", Type::List(&Type::Object(&DESCRIPTOR)))]);

pub(super) static COMMANDS: &[Command] = &[
    Command { name: "add-fd", arguments: &ADD, returns: Some(Type::Object(&ADDED)) },
    Command { name: "remove-fd", arguments: &REMOVE, returns: None },
    Command {
        name: "query-fdsets",
        arguments: &EMPTY,
        returns: Some(Type::List(&Type::Object(&SET))),
    },
];
