//! Commands that QEMU does not have.

use crate::schema::{Command, EMPTY, Object, Type, object, opt, req};

const INT: Type = Type::Int;

static MAP: Object = object(&[
    req("hits", INT),
    req("unallocated-hits", INT),
    req("misses", INT),
    req("bytes", INT),
    req("budget", INT),
    req("lookup-median-ns", INT),
    req("lookup-p99-ns", INT),
]);
static FAILURE: Object = object(&[
    req("operation", Type::Enum(&["read", "write"])),
    req("nospace", Type::Bool),
    req("reason", Type::Str),
]);
static DISK: Object = object(&[
    req("device", Type::Str),
    req("node-name", Type::Str),
    req("size", INT),
    req("layers", INT),
    req("indexed-layers", INT),
    req("in-flight", INT),
    req("waiting", INT),
    req("werror", Type::Str),
    req("rerror", Type::Str),
    req("stopped", Type::Bool),
    req("held", INT),
    req("failures", Type::List(&Type::Object(&FAILURE))),
    opt("paused-seconds", INT),
    req("map", Type::Object(&MAP)),
]);
static DISKS: Object = object(&[req("syncs", INT), req("disks", Type::List(&Type::Object(&DISK)))]);

static JOB: Object = object(&[
    req("id", Type::Str),
    req("device", Type::Str),
    req("interrupted", Type::Bool),
    req("command", Type::Str),
    req("arguments", Type::Any),
    opt("yields", Type::Bool),
    opt("copied", INT),
    opt("cloned", INT),
    opt("misses-deadline", Type::Bool),
]);
static RECORD: Object =
    object(&[req("id", Type::Str), req("type", Type::Str), req("record", Type::Any)]);
static ID: Object = object(&[req("id", Type::Str)]);

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "x-isobath-query-disks",
        arguments: &EMPTY,
        returns: Some(Type::Object(&DISKS)),
    },
    Command {
        name: "x-isobath-query-jobs",
        arguments: &EMPTY,
        returns: Some(Type::List(&Type::Object(&JOB))),
    },
    Command {
        name: "x-isobath-query-job-records",
        arguments: &EMPTY,
        returns: Some(Type::List(&Type::Object(&RECORD))),
    },
    Command { name: "x-isobath-restart-job", arguments: &ID, returns: None },
    Command { name: "x-isobath-forget-job", arguments: &ID, returns: None },
];
