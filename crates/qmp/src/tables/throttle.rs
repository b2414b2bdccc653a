//! Limits on the requests of disks.

use crate::schema::{Command, Object, Type, object, opt, req};

const INT: Type = Type::Int;

pub(super) static LIMITS: Object = object(&[
    opt("iops-total", INT),
    opt("iops-total-max", INT),
    opt("iops-total-max-length", INT),
    opt("iops-read", INT),
    opt("iops-read-max", INT),
    opt("iops-read-max-length", INT),
    opt("iops-write", INT),
    opt("iops-write-max", INT),
    opt("iops-write-max-length", INT),
    opt("bps-total", INT),
    opt("bps-total-max", INT),
    opt("bps-total-max-length", INT),
    opt("bps-read", INT),
    opt("bps-read-max", INT),
    opt("bps-read-max-length", INT),
    opt("bps-write", INT),
    opt("bps-write-max", INT),
    opt("bps-write-max-length", INT),
    opt("iops-size", INT),
]);

/// A `throttle-group` object. QEMU's members with `x-` mean the same as those of `limits`.
pub(super) static GROUP: Object = object(&[
    opt("limits", Type::Object(&LIMITS)),
    opt("x-iops-total", INT),
    opt("x-iops-total-max", INT),
    opt("x-iops-total-max-length", INT),
    opt("x-iops-read", INT),
    opt("x-iops-read-max", INT),
    opt("x-iops-read-max-length", INT),
    opt("x-iops-write", INT),
    opt("x-iops-write-max", INT),
    opt("x-iops-write-max-length", INT),
    opt("x-bps-total", INT),
    opt("x-bps-total-max", INT),
    opt("x-bps-total-max-length", INT),
    opt("x-bps-read", INT),
    opt("x-bps-read-max", INT),
    opt("x-bps-read-max-length", INT),
    opt("x-bps-write", INT),
    opt("x-bps-write-max", INT),
    opt("x-bps-write-max-length", INT),
    opt("x-iops-size", INT),
]);

static SET: Object = object(&[
    opt("device", Type::Str),
    opt("id", Type::Str),
    req("bps", INT),
    req("bps_rd", INT),
    req("bps_wr", INT),
    req("iops", INT),
    req("iops_rd", INT),
    req("iops_wr", INT),
    opt("bps_max", INT),
    opt("bps_rd_max", INT),
    opt("bps_wr_max", INT),
    opt("iops_max", INT),
    opt("iops_rd_max", INT),
    opt("iops_wr_max", INT),
    opt("bps_max_length", INT),
    opt("bps_rd_max_length", INT),
    opt("bps_wr_max_length", INT),
    opt("iops_max_length", INT),
    opt("iops_rd_max_length", INT),
    opt("iops_wr_max_length", INT),
    opt("iops_size", INT),
    opt("group", Type::Str),
]);

pub(super) static COMMANDS: &[Command] =
    &[Command { name: "block_set_io_throttle", arguments: &SET, returns: None }];
