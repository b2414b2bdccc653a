//! Disks that pause.

use crate::schema::{Command, EMPTY, Object, Type, object, opt, req};

static STATUS: Object = object(&[
    req("running", Type::Bool),
    // Until QEMU 9.
    req("singlestep", Type::Bool),
    req("status", Type::Enum(&["io-error", "paused", "running"])),
]);

static ON_FAILURE: Object = object(&[
    req("id", Type::Str),
    opt("werror", Type::Enum(&["report", "enospc", "stop"])),
    opt("rerror", Type::Enum(&["report", "stop"])),
]);

pub(super) static COMMANDS: &[Command] = &[
    Command { name: "query-status", arguments: &EMPTY, returns: Some(Type::Object(&STATUS)) },
    Command { name: "stop", arguments: &EMPTY, returns: None },
    Command { name: "cont", arguments: &EMPTY, returns: None },
    Command { name: "x-isobath-set-on-failure", arguments: &ON_FAILURE, returns: None },
];
