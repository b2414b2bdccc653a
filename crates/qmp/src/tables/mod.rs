//! The commands and events of a server of live disks.
//!
//! Names, types and meanings are QEMU's (its QMP Reference Manual). Isobath's own additions are the members of
//! [`PACING`] in `block-stream`, `block-commit` and `blockdev-mirror`, `shrink` and `relative` in `block_resize`,
//! `change-snapshots` in `block-stream`, and the commands whose names begin with `x-isobath-`.

mod exports;
mod fd_sets;
mod isobath;
mod jobs;
mod nodes;
mod pausing;
mod throttle;

use crate::schema::{EMPTY, EventType, Schema};
use crate::server::CONTROL;

pub use jobs::PACING;

/// All commands and events of `isobath serve`.
pub static SCHEMA: Schema = Schema {
    commands: &[
        CONTROL,
        nodes::COMMANDS,
        throttle::COMMANDS,
        pausing::COMMANDS,
        jobs::COMMANDS,
        exports::COMMANDS,
        fd_sets::COMMANDS,
        isobath::COMMANDS,
    ],
    events: EVENTS,
};

static EVENTS: &[EventType] = &[
    EventType { name: "BLOCK_JOB_COMPLETED", data: &jobs::COMPLETED },
    EventType { name: "BLOCK_JOB_CANCELLED", data: &jobs::ENDED },
    EventType { name: "BLOCK_JOB_ERROR", data: &jobs::FAILED },
    EventType { name: "BLOCK_JOB_READY", data: &jobs::ENDED },
    EventType { name: "BLOCK_JOB_PENDING", data: &jobs::PENDING },
    EventType { name: "JOB_STATUS_CHANGE", data: &jobs::STATUS_CHANGE },
    EventType { name: "BLOCK_IO_ERROR", data: &jobs::IO_FAILED },
    EventType { name: "STOP", data: &EMPTY },
    EventType { name: "RESUME", data: &EMPTY },
    EventType { name: "BLOCK_EXPORT_DELETED", data: &exports::DELETED },
    EventType { name: "SHUTDOWN", data: &exports::SHUTDOWN },
];
