//! Commands about nodes: queries, statistics, and changes of a chain.

use super::throttle;
use crate::schema::{Alternate, Command, EMPTY, Object, Type, Variants, object, opt, req};

const STR: Type = Type::Str;
const INT: Type = Type::Int;
const BOOL: Type = Type::Bool;

const FORMAT_DATA: Type = Type::Object(&QCOW2_DATA);
const SPECIFIC: Type = Type::Object(&IMAGE_SPECIFIC);
const IMAGE: Type = Type::Object(&IMAGE_INFO);
const CACHE: Type = Type::Object(&CACHE_INFO);
const DEVICE: Type = Type::Object(&DEVICE_INFO);
const BLOCK: Type = Type::Object(&BLOCK_INFO);
const STATS: Type = Type::Object(&BLOCK_STATS);
const HISTOGRAM: Type = Type::Object(&LATENCY_HISTOGRAM);
const DETECT_ZEROES: Type = Type::Enum(&["off", "on", "unmap"]);

static SLOT: Object =
    object(&[req("active", BOOL), opt("iters", INT), opt("stripes", INT), req("key-offset", INT)]);
static LUKS_INFO: Object = object(&[
    req("cipher-alg", STR),
    req("cipher-mode", STR),
    req("ivgen-alg", STR),
    opt("ivgen-hash-alg", STR),
    req("hash-alg", STR),
    req("payload-offset", INT),
    req("master-key-iters", INT),
    req("uuid", STR),
    req("slots", Type::List(&Type::Object(&SLOT))),
]);
static ENCRYPTION_INFO: Object = Object {
    members: &[req("format", Type::Enum(&["luks"]))],
    variants: Some(Variants { tag: "format", cases: &[("luks", &LUKS_INFO)] }),
};
static QCOW2_DATA: Object = object(&[
    req("compat", STR),
    opt("data-file", STR),
    opt("data-file-raw", BOOL),
    opt("extended-l2", BOOL),
    opt("lazy-refcounts", BOOL),
    opt("corrupt", BOOL),
    req("refcount-bits", INT),
    opt("encrypt", Type::Object(&ENCRYPTION_INFO)),
    req("compression-type", Type::Enum(&["zlib", "zstd"])),
]);
static IMAGE_SPECIFIC_QCOW2: Object = object(&[req("data", FORMAT_DATA)]);
static IMAGE_SPECIFIC_LUKS: Object = object(&[req("data", Type::Object(&LUKS_INFO))]);
static IMAGE_SPECIFIC: Object = Object {
    members: &[req("type", Type::Enum(&["qcow2", "luks"]))],
    variants: Some(Variants {
        tag: "type",
        cases: &[("qcow2", &IMAGE_SPECIFIC_QCOW2), ("luks", &IMAGE_SPECIFIC_LUKS)],
    }),
};
static IMAGE_INFO: Object = object(&[
    req("filename", STR),
    req("format", STR),
    opt("dirty-flag", BOOL),
    opt("actual-size", INT),
    req("virtual-size", INT),
    opt("cluster-size", INT),
    opt("encrypted", BOOL),
    opt("backing-filename", STR),
    opt("full-backing-filename", STR),
    opt("backing-filename-format", STR),
    opt("backing-image", Type::Object(&IMAGE_INFO)),
    opt("format-specific", SPECIFIC),
]);
static CACHE_INFO: Object =
    object(&[req("writeback", BOOL), req("direct", BOOL), req("no-flush", BOOL)]);
static DEVICE_INFO: Object = object(&[
    req("file", STR),
    opt("node-name", STR),
    req("ro", BOOL),
    // Since QEMU 10.
    req("active", BOOL),
    req("drv", STR),
    opt("backing_file", STR),
    req("backing_file_depth", INT),
    req("encrypted", BOOL),
    req("detect_zeroes", DETECT_ZEROES),
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
    opt("group", STR),
    req("image", IMAGE),
    req("cache", CACHE),
    req("write_threshold", INT),
]);
static BLOCK_INFO: Object = object(&[
    req("device", STR),
    opt("qdev", STR),
    req("type", STR),
    req("removable", BOOL),
    req("locked", BOOL),
    opt("inserted", DEVICE),
    opt("io-status", Type::Enum(&["ok", "failed", "nospace"])),
]);

static LATENCY_HISTOGRAM: Object =
    object(&[req("boundaries", Type::List(&Type::Int)), req("bins", Type::List(&Type::Int))]);
static DEVICE_STATS: Object = object(&[
    req("rd_bytes", INT),
    req("wr_bytes", INT),
    req("unmap_bytes", INT),
    req("rd_operations", INT),
    req("wr_operations", INT),
    req("flush_operations", INT),
    req("unmap_operations", INT),
    req("rd_total_time_ns", INT),
    req("wr_total_time_ns", INT),
    req("flush_total_time_ns", INT),
    req("unmap_total_time_ns", INT),
    req("wr_highest_offset", INT),
    req("rd_merged", INT),
    req("wr_merged", INT),
    req("unmap_merged", INT),
    req("failed_rd_operations", INT),
    req("failed_wr_operations", INT),
    req("failed_flush_operations", INT),
    req("failed_unmap_operations", INT),
    req("invalid_rd_operations", INT),
    req("invalid_wr_operations", INT),
    req("invalid_flush_operations", INT),
    req("invalid_unmap_operations", INT),
    // Since QEMU 8.1.
    req("zone_append_bytes", INT),
    req("zone_append_operations", INT),
    req("zone_append_total_time_ns", INT),
    req("zone_append_merged", INT),
    req("failed_zone_append_operations", INT),
    req("invalid_zone_append_operations", INT),
    req("account_invalid", BOOL),
    req("account_failed", BOOL),
    req("timed_stats", Type::List(&Type::Object(&EMPTY))),
    opt("rd_latency_histogram", HISTOGRAM),
    opt("wr_latency_histogram", HISTOGRAM),
    opt("flush_latency_histogram", HISTOGRAM),
]);
static BLOCK_STATS: Object = object(&[
    opt("device", STR),
    opt("qdev", STR),
    opt("node-name", STR),
    req("stats", Type::Object(&DEVICE_STATS)),
    opt("parent", Type::Object(&BLOCK_STATS)),
    opt("backing", Type::Object(&BLOCK_STATS)),
]);

static FLAT: Object = object(&[opt("flat", BOOL)]);
static QUERY_NODES: Object = object(&[opt("query-nodes", BOOL)]);

static SNAPSHOT_SYNC: Object = object(&[
    opt("device", STR),
    opt("node-name", STR),
    req("snapshot-file", STR),
    opt("snapshot-node-name", STR),
    opt("format", STR),
    opt("mode", Type::Enum(&["existing", "absolute-paths"])),
]);
static SNAPSHOT: Object = object(&[req("node", STR), req("overlay", STR)]);
static ACTION: Object = Object {
    members: &[req("type", Type::Enum(&["blockdev-snapshot", "blockdev-snapshot-sync"]))],
    variants: Some(Variants {
        tag: "type",
        cases: &[
            ("blockdev-snapshot", &SNAPSHOT_ACTION),
            ("blockdev-snapshot-sync", &SNAPSHOT_SYNC_ACTION),
        ],
    }),
};
static SNAPSHOT_ACTION: Object = object(&[req("data", Type::Object(&SNAPSHOT))]);
static SNAPSHOT_SYNC_ACTION: Object = object(&[req("data", Type::Object(&SNAPSHOT_SYNC))]);
static PROPERTIES: Object =
    object(&[opt("completion-mode", Type::Enum(&["individual", "grouped"]))]);
static TRANSACTION: Object = object(&[
    req("actions", Type::List(&Type::Object(&ACTION))),
    opt("properties", Type::Object(&PROPERTIES)),
]);

static CACHE_OPTIONS: Object = object(&[opt("direct", BOOL), opt("no-flush", BOOL)]);
static FILE_OPTIONS: Object = object(&[
    req("filename", STR),
    opt("locking", Type::Enum(&["auto", "on", "off"])),
    opt("aio", Type::Enum(&["threads", "native", "io_uring"])),
]);
static REFERENCE: Alternate =
    Alternate { name: "BlockdevRef", types: &[Type::Object(&BLOCKDEV), Type::Str] };
static REFERENCE_OR_NULL: Alternate = Alternate {
    name: "BlockdevRefOrNull",
    types: &[Type::Object(&BLOCKDEV), Type::Str, Type::Null],
};
static KEY_SECRET: Object = object(&[opt("key-secret", STR)]);
static ENCRYPTION: Object = Object {
    members: &[req("format", Type::Enum(&["luks"]))],
    variants: Some(Variants { tag: "format", cases: &[("luks", &KEY_SECRET)] }),
};
static QCOW2_OPTIONS: Object = object(&[
    opt("encrypt", Type::Object(&ENCRYPTION)),
    req("file", Type::Alternate(&REFERENCE)),
    opt("backing", Type::Alternate(&REFERENCE_OR_NULL)),
]);
static LUKS_OPTIONS: Object =
    object(&[opt("key-secret", STR), req("file", Type::Alternate(&REFERENCE))]);
static THROTTLE_OPTIONS: Object =
    object(&[req("throttle-group", STR), req("file", Type::Alternate(&REFERENCE))]);
static RAW_OPTIONS: Object = object(&[req("file", Type::Alternate(&REFERENCE))]);
static BLOCKDEV: Object = Object {
    members: &[
        req("driver", Type::Enum(&["file", "host_device", "luks", "qcow2", "raw", "throttle"])),
        opt("node-name", STR),
        opt("discard", Type::Enum(&["ignore", "unmap"])),
        opt("cache", Type::Object(&CACHE_OPTIONS)),
        opt("read-only", BOOL),
        opt("auto-read-only", BOOL),
        opt("force-share", BOOL),
        opt("detect-zeroes", DETECT_ZEROES),
    ],
    variants: Some(Variants {
        tag: "driver",
        cases: &[
            ("file", &FILE_OPTIONS),
            ("host_device", &FILE_OPTIONS),
            ("luks", &LUKS_OPTIONS),
            ("qcow2", &QCOW2_OPTIONS),
            ("raw", &RAW_OPTIONS),
            ("throttle", &THROTTLE_OPTIONS),
        ],
    }),
};
static NODE_NAME: Object = object(&[req("node-name", STR)]);
static RESIZE: Object = object(&[
    opt("device", STR),
    opt("node-name", STR),
    req("size", INT),
    opt("shrink", BOOL),
    opt("relative", BOOL),
]);

static SECRET: Object = object(&[
    opt("file", STR),
    opt("data", STR),
    opt("format", Type::Enum(&["raw", "base64"])),
    opt("keyid", STR),
    opt("iv", STR),
]);
static OBJECT_ADD: Object = Object {
    members: &[req("qom-type", Type::Enum(&["secret", "throttle-group"])), req("id", STR)],
    variants: Some(Variants {
        tag: "qom-type",
        cases: &[("secret", &SECRET), ("throttle-group", &throttle::GROUP)],
    }),
};
static OBJECT_DEL: Object = object(&[req("id", STR)]);

pub(super) static COMMANDS: &[Command] = &[
    Command { name: "query-block", arguments: &EMPTY, returns: Some(Type::List(&BLOCK)) },
    Command {
        name: "query-named-block-nodes",
        arguments: &FLAT,
        returns: Some(Type::List(&DEVICE)),
    },
    Command {
        name: "query-blockstats",
        arguments: &QUERY_NODES,
        returns: Some(Type::List(&STATS)),
    },
    Command { name: "blockdev-snapshot-sync", arguments: &SNAPSHOT_SYNC, returns: None },
    Command { name: "blockdev-snapshot", arguments: &SNAPSHOT, returns: None },
    Command { name: "transaction", arguments: &TRANSACTION, returns: None },
    Command { name: "object-add", arguments: &OBJECT_ADD, returns: None },
    Command { name: "object-del", arguments: &OBJECT_DEL, returns: None },
    Command { name: "blockdev-add", arguments: &BLOCKDEV, returns: None },
    Command { name: "blockdev-del", arguments: &NODE_NAME, returns: None },
    Command { name: "block_resize", arguments: &RESIZE, returns: None },
];
