//! Commands and events of block jobs.

use crate::schema::{Command, EMPTY, Member, Object, Type, object, opt, req};

const STR: Type = Type::Str;
const INT: Type = Type::Int;
const BOOL: Type = Type::Bool;
const NUMBER: Type = Type::Number;

const JOB_TYPE: Type = Type::Enum(&["commit", "stream", "mirror"]);
const STATUS: Type = Type::Enum(&[
    "undefined",
    "created",
    "running",
    "paused",
    "ready",
    "standby",
    "waiting",
    "pending",
    "aborting",
    "concluded",
    "null",
]);
const IO_STATUS: Type = Type::Enum(&["ok", "failed", "nospace"]);
const ON_ERROR: Type = Type::Enum(&["report", "ignore", "enospc", "stop", "auto"]);
const MODE: Type = Type::Enum(&["adaptive", "threshold", "none"]);

/// The arguments for throttling a job in favour of guest I/O; Isobath's own.
pub static PACING: &[&str] =
    &["pacing", "deadline", "max-impact", "adaptive-stream", "adaptive-threshold", "pause-time"];

/// `pacing`: the mode. `deadline`: seconds. `max-impact`: percent of the guest's bandwidth. `adaptive-stream`: the
/// dissertation's mode; `adaptive-threshold`: up to 1, a share of the mean throughput; above, bytes per second;
/// `pause-time`: seconds.
const fn pacing(index: usize) -> Member {
    match index {
        0 => opt("pacing", MODE),
        1 => opt("deadline", NUMBER),
        2 => opt("max-impact", NUMBER),
        3 => opt("adaptive-stream", BOOL),
        4 => opt("adaptive-threshold", NUMBER),
        _ => opt("pause-time", NUMBER),
    }
}

/// The arguments of a command that starts a job: its own, and those common to all jobs.
macro_rules! job {
    ([$($own:expr),* $(,)?]) => {
        object(&[
            $($own,)*
            opt("auto-finalize", BOOL),
            opt("auto-dismiss", BOOL),
            pacing(0),
            pacing(1),
            pacing(2),
            pacing(3),
            pacing(4),
            pacing(5),
        ])
    };
}

static STREAM: Object = job!([
    opt("job-id", STR),
    req("device", STR),
    opt("base", STR),
    opt("base-node", STR),
    opt("backing-file", STR),
    opt("bottom", STR),
    opt("change-snapshots", BOOL),
    opt("speed", INT),
    opt("on-error", ON_ERROR),
    opt("filter-node-name", STR),
]);
static COMMIT: Object = job!([
    opt("job-id", STR),
    req("device", STR),
    opt("base-node", STR),
    opt("base", STR),
    opt("top-node", STR),
    opt("top", STR),
    opt("backing-file", STR),
    opt("speed", INT),
    opt("on-error", ON_ERROR),
    opt("filter-node-name", STR),
]);
static MIRROR: Object = job!([
    opt("job-id", STR),
    req("device", STR),
    req("target", STR),
    opt("replaces", STR),
    req("sync", Type::Enum(&["top", "full", "none"])),
    opt("speed", INT),
    opt("granularity", INT),
    opt("buf-size", INT),
    opt("on-source-error", ON_ERROR),
    opt("on-target-error", ON_ERROR),
    opt("filter-node-name", STR),
    opt("copy-mode", Type::Enum(&["background", "write-blocking"])),
]);

static DEVICE: Object = object(&[req("device", STR)]);
static ID: Object = object(&[req("id", STR)]);
static CANCEL: Object = object(&[req("device", STR), opt("force", BOOL)]);
static SET_SPEED: Object = object(&[req("device", STR), req("speed", INT)]);

static BLOCK_JOB_INFO: Object = object(&[
    req("type", JOB_TYPE),
    req("device", STR),
    req("len", INT),
    req("offset", INT),
    req("busy", BOOL),
    req("paused", BOOL),
    req("speed", INT),
    req("io-status", IO_STATUS),
    req("ready", BOOL),
    req("status", STATUS),
    req("auto-finalize", BOOL),
    req("auto-dismiss", BOOL),
    opt("error", STR),
]);
static JOB_INFO: Object = object(&[
    req("id", STR),
    req("type", JOB_TYPE),
    req("status", STATUS),
    req("current-progress", INT),
    req("total-progress", INT),
    opt("error", STR),
]);

pub(super) static ENDED: Object = object(&[
    req("type", JOB_TYPE),
    req("device", STR),
    req("len", INT),
    req("offset", INT),
    req("speed", INT),
]);
pub(super) static COMPLETED: Object = object(&[
    req("type", JOB_TYPE),
    req("device", STR),
    req("len", INT),
    req("offset", INT),
    req("speed", INT),
    opt("error", STR),
]);
pub(super) static FAILED: Object = object(&[
    req("device", STR),
    req("operation", Type::Enum(&["read", "write"])),
    req("action", Type::Enum(&["ignore", "report", "stop"])),
]);
pub(super) static IO_FAILED: Object = object(&[
    req("device", STR),
    opt("node-name", STR),
    req("operation", Type::Enum(&["read", "write"])),
    req("action", Type::Enum(&["ignore", "report", "stop"])),
    opt("nospace", BOOL),
    req("reason", STR),
]);
pub(super) static PENDING: Object = object(&[req("type", JOB_TYPE), req("id", STR)]);
pub(super) static STATUS_CHANGE: Object = object(&[req("id", STR), req("status", STATUS)]);

const fn of_device(name: &'static str) -> Command {
    Command { name, arguments: &DEVICE, returns: None }
}

const fn of_id(name: &'static str) -> Command {
    Command { name, arguments: &ID, returns: None }
}

pub(super) static COMMANDS: &[Command] = &[
    Command {
        name: "query-block-jobs",
        arguments: &EMPTY,
        returns: Some(Type::List(&Type::Object(&BLOCK_JOB_INFO))),
    },
    Command {
        name: "query-jobs",
        arguments: &EMPTY,
        returns: Some(Type::List(&Type::Object(&JOB_INFO))),
    },
    Command { name: "block-stream", arguments: &STREAM, returns: None },
    Command { name: "block-commit", arguments: &COMMIT, returns: None },
    Command { name: "blockdev-mirror", arguments: &MIRROR, returns: None },
    Command { name: "block-job-set-speed", arguments: &SET_SPEED, returns: None },
    Command { name: "block-job-cancel", arguments: &CANCEL, returns: None },
    of_device("block-job-pause"),
    of_device("block-job-resume"),
    of_device("block-job-complete"),
    of_id("block-job-finalize"),
    of_id("block-job-dismiss"),
    of_id("job-pause"),
    of_id("job-resume"),
    of_id("job-cancel"),
    of_id("job-complete"),
    of_id("job-finalize"),
    of_id("job-dismiss"),
];
