//! Commands that query disks.

use super::arguments::{Arguments, flag};
use super::image::{Node, device_info};
use super::{Drive, Monitor, Result, pausing, throttle};
use isobath_disk::live::LATENCY_BUCKETS;
use isobath_disk::{IoStats, RequestStats};
use isobath_storage::{Host, StorageExt};
use isobath_storage_file::syncs;
use serde_json::{Value, json};

/// The maximum number of images described below a node, and in one reply: a client's parser may limit nesting, and a
/// reply that describes all images of each of n nodes would grow with the square of n.
const NESTED: usize = 100;
const NESTED_IN_ALL: usize = 10_000;

impl<H: Host + Clone> Monitor<H> {
    pub(super) async fn query_block(&self) -> Result<Value> {
        let mut blocks = Vec::new();
        for drive in self.drives() {
            if drive.device().is_empty() {
                continue;
            }
            let info = self.node_info(&drive, 0, NESTED).await;
            blocks.push(json!({
                "device": drive.device(),
                "type": "unknown",
                "removable": false,
                "locked": false,
                "inserted": info,
                "io-status": pausing::io_status(&drive.disk().pausing().state()),
            }));
        }
        Ok(blocks.into())
    }

    pub(super) async fn query_named_block_nodes(&self, arguments: &Arguments) -> Result<Value> {
        let flat = flag(arguments, "flat").unwrap_or(false);
        let drives = self.drives();
        let nodes: usize = drives.iter().map(|drive| drive.disk().depth()).sum();
        let nested = if flat { 0 } else { NESTED.min(NESTED_IN_ALL / nodes.max(1)) };
        let mut infos = Vec::new();
        for drive in drives {
            for depth in 0..drive.disk().depth() {
                let info = self.node_info(&drive, depth, nested).await;
                if !info.is_null() {
                    infos.push(info);
                }
            }
        }
        Ok(infos.into())
    }

    async fn node_info(&self, drive: &Drive<H>, depth: usize, images: usize) -> Value {
        let layers = drive.layers();
        let Some(layer) = layers.get(depth) else { return Value::Null };
        let mut info = device_info(Node {
            host: &self.host,
            name: self.node_name(drive, layer),
            layers: &layers,
            depth,
            read_only: depth > 0 || drive.is_read_only(),
            direct: drive.disk().options().direct,
            images,
        })
        .await;
        if let (0, Some(info)) = (depth, info.as_object_mut()) {
            throttle::describe(drive.disk().throttle(), info);
        }
        info
    }

    pub(super) fn query_blockstats(&self, arguments: &Arguments) -> Value {
        let nodes = flag(arguments, "query-nodes").unwrap_or(false);
        let drives = self.drives();
        let most = if nodes { 1 } else { NESTED.min(NESTED_IN_ALL / drives.len().max(1)).max(1) };
        let shown = drives.iter().filter(|drive| nodes || !drive.device().is_empty());
        let mut all = Vec::new();
        for drive in shown {
            let mut stats = self.stats(drive, most);
            if let (Some(stats), false) = (stats.as_object_mut(), nodes) {
                stats.insert("device".into(), drive.device().into());
            }
            all.push(stats);
        }
        all.into()
    }

    /// The statistics of a drive's image, and of at most `most` images with it: as in QEMU those of an image's file are
    /// in `parent`, and those of the image below in `backing`.
    fn stats(&self, drive: &Drive<H>, most: usize) -> Value {
        let mut whole = Value::Null;
        for (depth, layer) in drive.layers().iter().enumerate().take(most).rev() {
            let io = (depth == 0).then(|| drive.disk().io_stats());
            let name =
                if depth == 0 { self.root_name(drive) } else { self.node_name(drive, layer) };
            let mut stats = json!({
                "node-name": name,
                "stats": counts(io.as_ref(), layer.highest_guest_write()),
            });
            let Some(members) = stats.as_object_mut() else { continue };
            if let Some(highest) = layer.storage().highest_write() {
                let file = json!({"stats": counts(None, highest)});
                members.insert("parent".into(), file);
            }
            if !whole.is_null() {
                members.insert("backing".into(), whole);
            }
            whole = stats;
        }
        whole
    }

    pub(super) fn query_disks(&self) -> Value {
        let disks = self.drives().into_iter().map(|drive| {
            let disk = drive.disk();
            let map = disk.map_stats();
            let mut shown = json!({
                "device": drive.device(),
                "node-name": self.root_name(&drive),
                "size": disk.size(),
                "layers": disk.depth(),
                "indexed-layers": disk.indexed_layers(),
                "in-flight": disk.io_stats().in_flight,
                "waiting": disk.throttle().waiting(),
                "map": {
                    "hits": map.hits,
                    "unallocated-hits": map.unallocated_hits,
                    "misses": map.misses,
                    "bytes": map.bytes,
                    "budget": map.budget,
                    "lookup-median-ns": map.lookup_median_ns,
                    "lookup-p99-ns": map.lookup_p99_ns,
                },
            });
            if let Some(shown) = shown.as_object_mut() {
                pausing::describe(&disk.pausing().state(), shown);
            }
            shown
        });
        json!({"syncs": syncs(), "disks": disks.collect::<Vec<_>>()})
    }
}

/// QEMU's `BlockDeviceStats`: of a node to which the guest's requests go, or that only has a highest offset written.
fn counts(guest: Option<&IoStats>, highest: u64) -> Value {
    let nanoseconds = |stats: &RequestStats| stats.latency.as_nanos() as u64;
    let io = guest.copied().unwrap_or_default();
    let mut counts = json!({
        "rd_bytes": io.reads.bytes,
        "wr_bytes": io.writes.bytes,
        "unmap_bytes": io.unmaps.bytes,
        "rd_operations": io.reads.requests,
        "wr_operations": io.writes.requests,
        "flush_operations": io.flushes.requests,
        "unmap_operations": io.unmaps.requests,
        "rd_total_time_ns": nanoseconds(&io.reads),
        "wr_total_time_ns": nanoseconds(&io.writes),
        "flush_total_time_ns": nanoseconds(&io.flushes),
        "unmap_total_time_ns": nanoseconds(&io.unmaps),
        "wr_highest_offset": highest,
        "rd_merged": 0, "wr_merged": 0, "unmap_merged": 0,
        "failed_rd_operations": io.reads.failed,
        "failed_wr_operations": io.writes.failed,
        "failed_flush_operations": io.flushes.failed,
        "failed_unmap_operations": io.unmaps.failed,
        "invalid_rd_operations": 0, "invalid_wr_operations": 0,
        "invalid_flush_operations": 0, "invalid_unmap_operations": 0,
        "zone_append_bytes": 0, "zone_append_operations": 0, "zone_append_total_time_ns": 0,
        "zone_append_merged": 0, "failed_zone_append_operations": 0,
        "invalid_zone_append_operations": 0,
        "account_invalid": false,
        "account_failed": false,
        "timed_stats": [],
    });
    if let (Some(io), Some(counts)) = (guest, counts.as_object_mut()) {
        counts.insert("rd_latency_histogram".into(), histogram(&io.reads));
        counts.insert("wr_latency_histogram".into(), histogram(&io.writes));
        counts.insert("flush_latency_histogram".into(), histogram(&io.flushes));
    }
    counts
}

/// QEMU's `BlockLatencyHistogramInfo`: boundaries in nanoseconds, and one more bin than boundaries.
fn histogram(stats: &RequestStats) -> Value {
    let boundaries: Vec<u64> = (0..LATENCY_BUCKETS - 1).map(|n| 1000 << n).collect();
    json!({"boundaries": boundaries, "bins": stats.histogram})
}
