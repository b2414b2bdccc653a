//! Jobs over layers of equal layout, as snapshots of one image have: what lies at an offset of one file
//! must never be taken for what lies there in another.

use crate::common::{Beside, Ticking, complete};
use futures_executor::block_on;
use futures_util::join;
use isobath_disk::{
    BackingFile, Below, BlockDevice, Disk, LiveDisk, MetadataMode, NewDisk, OpenOptions, Overlay,
    WholeIndex, create,
};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{
    CommitOptions, Job, JobOptions, JobStatus, MirrorOptions, MirrorSync, StreamOptions,
};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{FileId, IoBuf, StorageExt};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::give_way;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;

const CLUSTER: usize = 64 << 10;
const LAYERS: usize = 4;

fn name(layer: usize) -> String {
    format!("layer{layer}.qcow2")
}

/// Puts a layer with this number and size on top of the one before, and opens it for writing.
async fn make(host: &MemoryHost, layer: usize, size: u64) -> Disk<AnyHost> {
    let mut new = NewDisk::new(size);
    if layer > 0 {
        new = new.backing_file(name(layer - 1), "qcow2");
    }
    create(&host.any(), Path::new(&name(layer)), &new).await.unwrap();
    let options = OpenOptions::new().writable(true);
    Disk::open(host.any(), Path::new(&name(layer)), &options).await.unwrap()
}

/// Layers of which each has one compressed cluster, all at the same host offset and of the same length.
async fn chain() -> MemoryHost {
    let host = MemoryHost::new();
    for layer in 0..LAYERS {
        let disk = make(&host, layer, (LAYERS * CLUSTER) as u64).await;
        let bytes = IoBuf::copy_of(&vec![0xa0 + layer as u8; CLUSTER]);
        disk.write_compressed((layer * CLUSTER) as u64, bytes).await.unwrap();
        disk.close().await.unwrap();
    }
    host
}

async fn whole<D: BlockDevice>(disk: &D) -> Vec<u8> {
    disk.read(0, IoBuf::zeroed(LAYERS * CLUSTER)).await.unwrap().to_vec()
}

fn expected() -> Vec<u8> {
    (0..LAYERS).flat_map(|layer| vec![0xa0 + layer as u8; CLUSTER]).collect()
}

#[track_caller]
fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    assert_eq!(differs.map(|at| (at, found[at], expected[at])), None, "{what}");
}

async fn finish(job: Arc<Job>, work: impl Future<Output = ()>) {
    join!(work, complete(&job));
    assert!(job.error().is_none(), "{:?}", job.error());
}

fn job() -> JobOptions {
    JobOptions { pacing: Pacing::None, ..JobOptions::new("job") }
}

#[derive(Clone, Copy, Debug)]
enum Change {
    /// From the layer above the first into the second, by numbers from the base.
    Stream(Option<usize>, usize),
    /// From the second down into the first.
    Commit(usize, usize),
    Mirror,
}

fn changes() -> Vec<Change> {
    let mut changes = vec![Change::Mirror];
    for top in 1..LAYERS {
        changes.push(Change::Stream(None, top));
        changes.extend((0..top).map(|base| Change::Stream(Some(base), top)));
        changes.extend((0..top).map(|base| Change::Commit(top, base)));
    }
    changes
}

async fn open(host: &impl ToAny, name: &str, options: &OpenOptions) -> Arc<LiveDisk<AnyHost>> {
    let disk = Disk::open(host.any(), Path::new(name), options).await.unwrap();
    LiveDisk::new(disk, options, Arc::new(Ticking::default()))
}

/// An index beside so many of the layers.
async fn beside(host: &MemoryHost, layers: usize) -> Beside {
    let names: Vec<_> = (0..layers).map(name).collect();
    let top = Disk::open(host.any(), Path::new(&names[layers - 1]), &OpenOptions::new()).await;
    let WholeIndex { root, bytes } = top.unwrap().whole_index().await.unwrap().unwrap();
    Beside::new(host, &names, &root, &bytes)
}

/// With an index beside the lowest `indexed` layers, which describes what is looked up from then on.
async fn change(change: Change, indexed: usize) {
    let host = chain().await;
    let options = OpenOptions::new().writable(true).index(indexed == 0);
    let top = name(LAYERS - 1);
    let live = if indexed > 0 {
        open(&beside(&host, indexed).await, &top, &options).await
    } else {
        open(&host, &top, &options).await
    };
    if indexed == 0 {
        // From now on all of them are in memory.
        assert_same(&whole(&*live).await, &expected(), "before");
    }
    let file = |number: usize| -> FileId { live.layers()[LAYERS - 1 - number].storage().id() };
    match change {
        Change::Stream(base, top) => {
            let (base, top) = (base.map(file), Some(file(top)));
            let (job, work) = isobath_jobs::stream(
                &live,
                StreamOptions { base, top, ..StreamOptions::default() },
                job(),
            )
            .unwrap();
            Box::pin(finish(job, work)).await;
        }
        Change::Commit(top, base) => {
            let (base, top) = (Some(file(base)), (top < LAYERS - 1).then(|| file(top)));
            let (job, work) = isobath_jobs::commit(
                &live,
                CommitOptions { top, base, backing_file: None, ..CommitOptions::default() },
                job(),
            )
            .unwrap();
            Box::pin(finish(job, work)).await;
        }
        Change::Mirror => {
            let new = NewDisk::new(live.size());
            create(&host.any(), Path::new("mirror.qcow2"), &new).await.unwrap();
            let target = open(&host, "mirror.qcow2", &options).await;
            let sync = MirrorOptions { sync: MirrorSync::Full };
            let (job, work) = isobath_jobs::mirror(&live, &target, sync, job()).unwrap();
            Box::pin(finish(job, work)).await;
        }
    }
    let unchanged = match change {
        Change::Stream(base, _) => base.map_or(0, |base| base + 1),
        Change::Commit(_, base) => base,
        Change::Mirror => 0,
    };
    if indexed > 0 {
        assert_eq!(live.indexed_layers(), if indexed <= unchanged { indexed } else { 0 });
    }
    let mut model = expected();
    assert_same(&whole(&*live).await, &model, "after");
    // A write of a part takes the rest of its cluster along.
    for layer in 0..LAYERS {
        let at = layer * CLUSTER + 4096;
        live.write(at as u64, IoBuf::copy_of(&[0x11; 512])).await.unwrap();
        model[at..at + 512].fill(0x11);
    }
    assert_same(&whole(&*live).await, &model, "after writes");
    let active = live.layers()[0].name().to_owned();
    live.close().await.unwrap();
    drop(live);
    let disk = Disk::open(host.any(), &active, &OpenOptions::default()).await.unwrap();
    assert_same(&whole(&disk).await, &model, "reopened");
}

/// The layers above hide some of what a job below them changes; the overlay that remains shows it.
async fn hidden(change: Change) {
    let sizes = [8, 8, 8, 4, 4].map(|clusters| clusters * CLUSTER as u64);
    let host = MemoryHost::new();
    for (layer, size) in sizes.into_iter().enumerate() {
        let disk = make(&host, layer, size).await;
        for place in [layer as u64 % 4, size / CLUSTER as u64 - 1 - layer as u64 % 4] {
            let bytes = IoBuf::copy_of(&[0xb0 + layer as u8; 4096]);
            disk.write(place * CLUSTER as u64, bytes).await.unwrap();
        }
        disk.close().await.unwrap();
    }
    let content = async |layer: usize| {
        let disk = Disk::open(host.any(), Path::new(&name(layer)), &OpenOptions::default()).await;
        let disk = disk.unwrap();
        disk.read(0, IoBuf::zeroed(sizes[layer] as usize)).await.unwrap().to_vec()
    };
    let before = [content(2).await, content(4).await];
    let options = OpenOptions::new().writable(true);
    let live = open(&host, &name(4), &options).await;
    let file = |number: usize| -> FileId { live.layers()[4 - number].storage().id() };
    match change {
        Change::Commit(top, base) => {
            let options = CommitOptions {
                top: Some(file(top)),
                base: Some(file(base)),
                backing_file: None,
                ..CommitOptions::default()
            };
            let (job, work) = isobath_jobs::commit(&live, options, job()).unwrap();
            Box::pin(finish(job, work)).await;
        }
        Change::Stream(base, top) => {
            let options = StreamOptions {
                base: base.map(file),
                top: Some(file(top)),
                ..StreamOptions::default()
            };
            let (job, work) = isobath_jobs::stream(&live, options, job()).unwrap();
            Box::pin(finish(job, work)).await;
        }
        Change::Mirror => unreachable!("a mirror changes no layer below"),
    }
    live.close().await.unwrap();
    drop(live);
    assert_same(&content(2).await, &before[0], &format!("{change:?}: the overlay that remains"));
    assert_same(&content(4).await, &before[1], &format!("{change:?}: the disk"));
}

#[test]
fn what_smaller_layers_above_hide_is_moved_too() {
    for change in [Change::Commit(1, 0), Change::Stream(Some(0), 2), Change::Stream(None, 2)] {
        block_on(hidden(change));
    }
}

/// A base that a commit has made longer no longer hides by its size what lies below it: it has zeroes there.
#[test]
fn a_commit_that_is_cancelled_shows_nothing_that_was_hidden() {
    block_on(async {
        let host = MemoryHost::new();
        let sizes = [8, 4, 8].map(|clusters| clusters * CLUSTER as u64);
        for (layer, size) in sizes.into_iter().enumerate() {
            let disk = make(&host, layer, size).await;
            if layer == 0 {
                disk.write(0, IoBuf::copy_of(&vec![7; 8 * CLUSTER])).await.unwrap();
            }
            disk.close().await.unwrap();
        }
        let options = OpenOptions::new().writable(true);
        let live = open(&host, &name(2), &options).await;
        let read = async || live.read(0, IoBuf::zeroed(8 * CLUSTER)).await.unwrap().to_vec();
        let mut model = vec![7; 4 * CLUSTER];
        model.resize(8 * CLUSTER, 0);
        assert_same(&read().await, &model, "before");
        let base = Some(live.layers()[1].storage().id());
        let options = CommitOptions { base, ..CommitOptions::default() };
        let (committing, work) = isobath_jobs::commit(&live, options, job()).unwrap();
        let cancel = async {
            while committing.status() != JobStatus::Ready {
                give_way(1).await;
            }
            committing.cancel(false).unwrap();
        };
        Box::pin(async { join!(work, cancel) }).await;
        assert_same(&read().await, &model, "cancelled");
        let base = Some(live.layers()[2].storage().id());
        let options = StreamOptions { base, ..StreamOptions::default() };
        let (streaming, work) = isobath_jobs::stream(&live, options, job()).unwrap();
        Box::pin(finish(streaming, work)).await;
        assert_same(&read().await, &model, "streamed");
        live.close().await.unwrap();
        drop(live);
        let disk =
            Disk::open(host.any(), Path::new(&name(2)), &OpenOptions::default()).await.unwrap();
        let found = disk.read(0, IoBuf::zeroed(8 * CLUSTER)).await.unwrap();
        assert_same(&found, &model, "reopened");
    });
}

#[test]
fn a_commit_leaves_what_a_longer_base_has_past_the_end_until_it_is_completed() {
    for (top, cancelled) in [(2, true), (1, true), (2, false), (1, false)] {
        block_on(async {
            let host = MemoryHost::new();
            let sizes = [8, 4, 4].map(|clusters| clusters * CLUSTER as u64);
            for (layer, size) in sizes.into_iter().enumerate() {
                let disk = make(&host, layer, size).await;
                let bytes = vec![layer as u8 + 7; size as usize >> layer];
                disk.write(0, IoBuf::copy_of(&bytes)).await.unwrap();
                disk.close().await.unwrap();
            }
            let options = OpenOptions::new().writable(true);
            let live = open(&host, &name(2), &options).await;
            let before = whole(&*live).await;
            let file = |number: usize| Some(live.layers()[2 - number].storage().id());
            let options = CommitOptions {
                top: file(top).filter(|_| top < 2),
                base: file(0),
                ..CommitOptions::default()
            };
            let (committing, work) = isobath_jobs::commit(&live, options, job()).unwrap();
            if cancelled && top == 1 {
                // It ends by itself.
                committing.cancel(false).unwrap();
            }
            let steer = async {
                if !cancelled || top == 1 {
                    return complete(&committing).await;
                }
                while committing.status() != JobStatus::Ready {
                    give_way(1).await;
                }
                committing.cancel(false).unwrap();
            };
            Box::pin(async { join!(work, steer) }).await;
            assert_same(&whole(&*live).await, &before, "the disk");
            live.close().await.unwrap();
            drop(live);
            let base = Disk::open(host.any(), Path::new(&name(0)), &OpenOptions::default()).await;
            let base = base.unwrap();
            let found = base.read(0, IoBuf::zeroed(base.size() as usize)).await.unwrap();
            let past = match (cancelled, top) {
                (true, _) => vec![7; 4 * CLUSTER],
                (false, 1) => vec![0; 4 * CLUSTER],
                (false, _) => Vec::new(),
            };
            assert_same(&found[4 * CLUSTER..], &past, "past the end");
            assert_eq!(found.len(), 4 * CLUSTER + past.len());
        });
    }
}

/// Its header does not lead there, so that it is still another disk for everyone who opens it by its name.
#[test]
fn what_was_given_below_an_image_stays_so_when_it_takes_the_place_of_the_active_one() {
    block_on(async {
        let host = MemoryHost::new();
        let size = LAYERS as u64 * CLUSTER as u64;
        for layer in 0..3 {
            make(&host, layer, size).await.close().await.unwrap();
        }
        create(&host.any(), Path::new("other"), &NewDisk::new(size)).await.unwrap();
        let other = BackingFile { name: "other".into(), format: None };
        let below = vec![Below::Named, Below::Given(other)];
        let options = OpenOptions::new().writable(true).backing_files(below);
        let live = open(&host, &name(2), &options).await;
        let refused = async || {
            let done = live.snapshot(&Overlay::Create("new".into())).await;
            assert!(host.contents("new").is_none());
            done.unwrap_err().to_string()
        };
        let before = refused().await;
        assert!(before.contains("its header does not name the backing file"), "{before}");
        let base = Some(live.layers()[1].storage().id());
        let options = CommitOptions { base, ..CommitOptions::default() };
        let (committing, work) = isobath_jobs::commit(&live, options, job()).unwrap();
        Box::pin(finish(committing, work)).await;
        assert_eq!(live.depth(), 2);
        assert_eq!(refused().await, before);
    });
}

/// A crash has left a layer of which its journal has what its file has not: a write over data that a record
/// vouches for. Space is not shared with that.
async fn crashed(change: Change) {
    let host = MemoryHost::new();
    let size = 4 * CLUSTER as u64;
    for layer in 0..3 {
        let disk = make(&host, layer, size).await;
        if layer != 1 {
            disk.close().await.unwrap();
            continue;
        }
        drop(disk);
        let options = OpenOptions::new().writable(true).metadata(MetadataMode::Journal);
        let disk = Disk::open(host.any(), Path::new(&name(1)), &options).await.unwrap();
        // The first flush puts the journal into use.
        for at in [3 * CLUSTER, 0] {
            disk.write(at as u64, IoBuf::copy_of(&vec![1; CLUSTER])).await.unwrap();
            disk.flush().await.unwrap();
        }
        let first = host.contents(name(1)).unwrap();
        disk.write(4096, IoBuf::copy_of(&[2; 4096])).await.unwrap();
        disk.flush().await.unwrap();
        drop(disk);
        // What went to its place after the record is lost; the record has it.
        let mut file = host.contents(name(1)).unwrap();
        for (now, then) in file.chunks_mut(4096).zip(first.chunks(4096)) {
            if *now == [2; 4096] && *then == [1; 4096] {
                now.fill(1);
            }
        }
        let runs = file.split(|byte| *byte != 2).filter(|run| run.len() >= 4096).count();
        assert_eq!(runs, 1, "the record has it, and no other place");
        host.insert(name(1), &file);
    }
    let mut model = vec![0; size as usize];
    model[..CLUSTER].fill(1);
    model[3 * CLUSTER..].fill(1);
    model[4096..8192].fill(2);
    let options = OpenOptions::new().writable(true);
    let live = open(&host, &name(2), &options).await;
    let read = async || live.read(0, IoBuf::zeroed(size as usize)).await.unwrap().to_vec();
    assert_same(&read().await, &model, "before");
    let file = |number: usize| -> FileId { live.layers()[2 - number].storage().id() };
    match change {
        Change::Stream(base, top) => {
            let (base, top) = (base.map(file), (top < 2).then(|| file(top)));
            let options = StreamOptions { base, top, ..StreamOptions::default() };
            let (job, work) = isobath_jobs::stream(&live, options, job()).unwrap();
            Box::pin(finish(job, work)).await;
        }
        Change::Commit(top, base) => {
            let (base, top) = (Some(file(base)), (top < 2).then(|| file(top)));
            let options =
                CommitOptions { top, base, backing_file: None, ..CommitOptions::default() };
            let (job, work) = isobath_jobs::commit(&live, options, job()).unwrap();
            Box::pin(finish(job, work)).await;
        }
        Change::Mirror => {
            let new = NewDisk::new(size);
            create(&host.any(), Path::new("mirror.qcow2"), &new).await.unwrap();
            let target = open(&host, "mirror.qcow2", &options).await;
            let sync = MirrorOptions { sync: MirrorSync::Full };
            let (job, work) = isobath_jobs::mirror(&live, &target, sync, job()).unwrap();
            Box::pin(finish(job, work)).await;
        }
    }
    assert_same(&read().await, &model, "after");
    let active = live.layers()[0].name().to_owned();
    live.close().await.unwrap();
    drop(live);
    let disk = Disk::open(host.any(), &active, &OpenOptions::default()).await.unwrap();
    let found = disk.read(0, IoBuf::zeroed(size as usize)).await.unwrap();
    assert_same(&found, &model, "reopened");
}

#[test]
fn space_is_not_shared_with_what_a_journal_has_newer() {
    let commits = [(1, 0), (2, 0), (2, 1)].map(|(top, base)| Change::Commit(top, base));
    let streams = [(None, 2), (Some(0), 2), (None, 1)].map(|(base, top)| Change::Stream(base, top));
    for each in commits.into_iter().chain(streams).chain([Change::Mirror]) {
        println!("{each:?}");
        block_on(crashed(each));
    }
}

#[test]
fn compressed_clusters_of_layers_of_equal_layout_are_told_apart_after_any_job() {
    for each in changes() {
        println!("{each:?}");
        for indexed in 0..LAYERS {
            block_on(change(each, indexed));
        }
    }
}

/// What a commit moved in the base is free space when the next one writes there.
async fn committed_twice(cancel: bool) {
    const PART: usize = 4 << 10;
    let host = MemoryHost::new();
    let base = make(&host, 0, (LAYERS * CLUSTER) as u64).await;
    // One after another in as many host clusters, of which the last two share one.
    let mut model: Vec<u8> = (0..3 * CLUSTER as u32)
        .flat_map(|n| if n % 3 == 0 { n.wrapping_mul(0x9e37_79b9).to_le_bytes() } else { [7; 4] })
        .take(3 * CLUSTER)
        .collect();
    model.resize(LAYERS * CLUSTER, 0);
    for cluster in 0..3 {
        let bytes = IoBuf::copy_of(&model[cluster * CLUSTER..(cluster + 1) * CLUSTER]);
        base.write_compressed((cluster * CLUSTER) as u64, bytes).await.unwrap();
    }
    base.close().await.unwrap();
    drop(base);
    let small = NewDisk::new((LAYERS * CLUSTER) as u64).cluster_size(PART as u64);
    let small = small.backing_file(name(0), "qcow2");
    create(&host.any(), Path::new(&name(1)), &small).await.unwrap();
    let options = OpenOptions::new().writable(true).index(false);
    let live = open(&host, &name(1), &options).await;
    let overlay = |number: usize| Overlay::Create(name(number).into());
    let commit = async |cancel: bool| {
        let file = |at: usize| Some(live.layers()[live.layers().len() - 1 - at].storage().id());
        let (top, base) = (if cancel { None } else { file(1) }, file(0));
        let options = CommitOptions { top, base, ..CommitOptions::default() };
        let (job, work) = isobath_jobs::commit(&live, options, job()).unwrap();
        if cancel {
            let cancelled = async {
                while job.status() != JobStatus::Ready {
                    job.changed().await;
                }
                job.cancel(true).unwrap();
            };
            join!(Box::pin(work), cancelled);
        } else {
            Box::pin(finish(job, work)).await;
        }
    };
    for cluster in 0..3 {
        let at = cluster * CLUSTER;
        live.write(at as u64, IoBuf::copy_of(&[0x11; PART])).await.unwrap();
        model[at..at + PART].fill(0x11);
    }
    // From now on all of them are in memory.
    for _ in 0..2 {
        assert_same(&whole(&*live).await, &model, "before");
    }
    if cancel {
        commit(true).await;
    }
    live.snapshot(&overlay(2)).await.unwrap();
    commit(false).await;
    assert_same(&whole(&*live).await, &model, "committed once");
    let last = 3 * CLUSTER;
    live.write(last as u64, IoBuf::copy_of(&vec![0xee; CLUSTER])).await.unwrap();
    model[last..].fill(0xee);
    live.snapshot(&overlay(3)).await.unwrap();
    commit(false).await;
    assert_same(&whole(&*live).await, &model, "committed twice");
}

#[test]
fn what_a_commit_moved_in_the_base_is_not_read_from_where_it_was() {
    for cancel in [false, true] {
        block_on(committed_twice(cancel));
    }
}
