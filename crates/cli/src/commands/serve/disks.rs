//! The served disks: opening, upkeep, closing.

use super::Order;
use super::args::Args;
use super::record::Record;
use crate::cache::Cache;
use crate::failure::Failure;
use crate::host::{is_stored, remotes};
use crate::stored;
use crate::{layers, overlays};
use isobath_disk::encryption::Secrets;
use isobath_disk::{ImageFormat, LiveDisk, MemoryLimit, OpenOptions};
use isobath_qmp::monitor::Opening;
use isobath_remote::served::Chain;
use isobath_ring::spawn;
use isobath_storage::Host;
use isobath_storage_file as file;
use std::path::Path;
use std::sync::Arc;

/// Opens every image.
pub(super) async fn open<H: Host + Clone>(
    host: &H,
    order: &Order<'_>,
) -> Result<Vec<Arc<LiveDisk<H>>>, Failure> {
    let mut disks = Vec::new();
    for number in 0..order.args.images().len() {
        let disk = open_one(host, order, number).await;
        disks.push(disk.map_err(|failure| order.keepers.explain(number, failure))?);
    }
    Ok(disks)
}

/// Opens the image with this number.
async fn open_one<H: Host + Clone>(
    host: &H,
    Order { args, secrets, memory, keepers, .. }: &Order<'_>,
    number: usize,
) -> Result<Arc<LiveDisk<H>>, Failure> {
    let (image, memory) = (&args.images()[number], memory.as_ref());
    let restart_log = args.frontends.outlives(number);
    let mut options = args.files_of(number, options(args, secrets, memory))?;
    if let Some(address) = stored::address(image)? {
        args.check_stored(number)?;
        let chain = args.stored.open(&address, memory).await?;
        if let Some(overlay) = args.overlay_of(number) {
            let options = options.index(false).format(ImageFormat::Qcow2);
            let options = options.restart_log(restart_log);
            let (options, _opening) = keepers.begin_opening(number, overlay, options)?;
            let disk = open_overlay(host, overlay, &chain, &options).await?;
            return disk_that_outlives(disk, args, number).await;
        }
        options = stored::options_of(&chain, options);
    }
    let writable = options.writable;
    let options = options.restart_log(restart_log);
    let (options, opening) = keepers.begin_opening(number, image, options)?;
    let disk = LiveDisk::open(host.clone(), image, &options).await?;
    drop(opening);
    if !is_stored(image)
        && let Err(failure) = overlays::check_none(&disk, image)
    {
        disk.close().await?;
        return Err(failure);
    }
    if args.is_layered() {
        layers::check(disk.layers().iter()).map_err(Failure::new)?;
    }
    let format = disk.layers().first().map(|layer| layer.format());
    if format == Some(ImageFormat::Raw) && args.format.is_none() && writable {
        return Err(Failure::new(format_args!(
            "'{}' was detected as raw. A guest that can write to a raw image can make it look \
             like another format at the next start; use --format raw to confirm that it is raw",
            image.display()
        )));
    }
    disk_that_outlives(disk, args, number).await
}

/// A disk whose completed writes survive a kill of this server, if those who use it rely on that.
async fn disk_that_outlives<H: Host + Clone>(
    disk: Arc<LiveDisk<H>>,
    args: &Args,
    number: usize,
) -> Result<Arc<LiveDisk<H>>, Failure> {
    if let Some(option) = args.frontends.must_outlive(number)
        && let Err(error) = disk.require_restart_log().await
    {
        disk.close().await?;
        return Err(Failure::from(error).context(option));
    }
    Ok(disk)
}

/// Opens the local image above a chain in a store, which is made if it does not exist.
async fn open_overlay<H: Host + Clone>(
    host: &H,
    overlay: &Path,
    chain: &Chain,
    options: &OpenOptions,
) -> Result<Arc<LiveDisk<H>>, Failure> {
    overlays::prepare(host, overlay, chain, options.writable).await?;
    let disk = LiveDisk::open(host.clone(), overlay, options).await?;
    if let Err(failure) = overlays::check_opened(&disk, overlay, chain) {
        disk.close().await?;
        return Err(failure);
    }
    Ok(disk)
}

/// The options for opening images, except for trust and the files that are given for one.
pub(super) fn options(
    args: &Args,
    secrets: &Secrets,
    memory: Option<&Arc<MemoryLimit>>,
) -> OpenOptions {
    let mut options = OpenOptions::new()
        .writable(!args.is_read_only())
        .snapshot(args.snapshot.clone())
        .direct(args.cache == Cache::None)
        .format(args.format)
        .metadata(args.metadata)
        .memory(memory.cloned())
        .secrets(secrets.clone());
    options.zones = args.zones;
    options.zone_size = args.zone_size;
    options.map_cache = args.map_cache.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    options
}

/// How images that clients add are opened: like those of the command line, but with the format that the client
/// specifies.
/// Each is trusted as it would be there, with the same directories.
pub(super) fn opening_of_added(
    args: &Args,
    secrets: &Secrets,
    memory: Option<&Arc<MemoryLimit>>,
) -> Opening {
    let options = options(args, secrets, memory).format(None).snapshot(None).writable(true);
    // They may be above a chain in a store.
    let options = options.index(!args.images().iter().any(|image| is_stored(image)));
    let trusting = args.trusting.clone();
    let trust = move || trusting.trust().map_err(|failure| failure.to_string());
    Opening { options, trust: Box::new(trust) }
}

/// Runs each disk's background work.
pub(super) fn look_after<H: Host + Clone>(disks: &[Arc<LiveDisk<H>>]) {
    for disk in disks {
        let disk = disk.clone();
        spawn(async move {
            if let Err(error) = disk.upkeep().await {
                tracing::warn!(%error, "background upkeep ended");
            }
        });
    }
}

/// Fetches ahead what the traces of the chains in stores have, and records what is read from now on.
pub(super) fn follow_traces(args: &Args, record: Option<&Record>) {
    let addresses = args.images().iter().filter_map(|image| stored::address(image).ok().flatten());
    for chain in addresses.filter_map(|address| remotes().chain(&address.to_string())) {
        if let Some(record) = record {
            record.begin(&chain);
        }
        if let Err(error) = chain.follow_trace() {
            tracing::warn!("the trace of '{}' is not fetched ahead: {error}", chain.address());
        }
    }
}

/// Flushes and closes every disk, even if one fails, and logs its map's counters and the number of syncs.
pub(super) async fn close<H: Host>(disks: &[Arc<LiveDisk<H>>]) -> Result<(), Failure> {
    let mut result = Ok(());
    for disk in disks {
        if let Err(error) = disk.close().await {
            if let Err(Failure { message: Some(message), .. }) = &result {
                tracing::error!("{message}");
            }
            result = Err(error.into());
        }
        let map = disk.map_stats();
        tracing::info!(
            hits = map.hits,
            unallocated_hits = map.unallocated_hits,
            misses = map.misses,
            bytes = map.bytes,
            lookup_median_ns = map.lookup_median_ns,
            lookup_p99_ns = map.lookup_p99_ns,
            "the map's counters"
        );
    }
    tracing::info!(syncs = file::syncs(), "fdatasyncs of all images");
    result
}
