//! The index of the first overlay of a chain that has none: if the layers have many tables, these are left to later
//! overlays, and reads are right all the time.

use crate::heads::{Reads, name};
use futures_executor::block_on;
use isobath_disk::{
    Created, Disk, IndexLimits, InfoOptions, NewDisk, OpenOptions, create, create_held, info,
};
use isobath_qcow2::{Header, L1Entry};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{IoBuf, Result, Storage, StorageError};
use isobath_storage_test::any::ToAny;
use isobath_storage_test::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use std::iter::once;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SIZE: u64 = 8 << 30;
/// What a table of 64 KiB covers.
const SPAN: u64 = 512 << 20;
/// What a page covers.
const PAGE: u64 = 64 << 20;
/// Layers without an index: together they have 5 MiB of tables.
const PLAIN: usize = 5;
/// Tables of one of them.
const TABLES: u64 = SIZE / SPAN;

fn overlay(layer: usize, indexed: bool) -> NewDisk {
    let new = NewDisk::new(SIZE).index(indexed);
    match layer.checked_sub(1) {
        Some(below) => new.backing_file(name(below).to_str().unwrap(), "qcow2"),
        None => new,
    }
}

/// A limit of so many layers' digests for each overlay.
fn digesting(layers: u64) -> IndexLimits {
    IndexLimits { most_digested: layers << 20, ..IndexLimits::default() }
}

/// Writes a sector in each of these places of a layer.
async fn fill(host: &MemoryHost, layer: usize, places: impl Iterator<Item = u64>) {
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), &name(layer), &options).await.unwrap();
    for place in places {
        let at = place + (layer as u64 % 7) * (64 << 10);
        disk.write(at, IoBuf::copy_of(&[layer as u8 + 1; 512])).await.unwrap();
    }
    disk.close().await.unwrap();
}

fn spans() -> impl Iterator<Item = u64> {
    (0..TABLES).map(|span| span * SPAN)
}

/// Layers without an index, each with a megabyte of tables.
async fn plain_chain(layers: usize) -> MemoryHost {
    let host = MemoryHost::new();
    for layer in 0..layers {
        create(&host.any(), &name(layer), &overlay(layer, false)).await.unwrap();
        fill(&host, layer, spans()).await;
    }
    host
}

/// Creates a layer; returns whether its index was left to others.
async fn add(host: &impl ToAny, layer: usize, limits: IndexLimits) -> bool {
    let new = overlay(layer, true).index_limits(limits);
    let host = host.any();
    let created = create_held(&host, &name(layer), &new).await;
    created.as_ref().map(Created::is_index_left).unwrap()
}

/// The index is that of all layers below the active one, and says what they say. Returns the number of those of which
/// it has no digest.
async fn assert_indexed(host: &MemoryHost, active: usize) -> u32 {
    let disk = Disk::open(host.any(), &name(active), &OpenOptions::new()).await.unwrap();
    assert_eq!(disk.indexed_layers(), active);
    assert_eq!(disk.verify_index(|_| {}).await.unwrap(), Ok(Vec::new()));
    drop(disk);
    undigested(host, active).await
}

async fn undigested(host: &impl ToAny, layer: usize) -> u32 {
    let info = info(&host.any(), &name(layer), &InfoOptions::default()).await.unwrap();
    info.qcow2.unwrap().index.unwrap().undigested
}

/// A host with other files of the same contents: stamps say nothing.
fn copy_of(host: &MemoryHost) -> MemoryHost {
    let copy = MemoryHost::new();
    for file in host.names() {
        copy.insert(&file, &[0]);
        copy.insert(&file, &host.contents(&file).unwrap());
    }
    copy
}

#[test]
fn the_first_overlay_reads_no_tables_and_has_a_valid_index() {
    block_on(async {
        for layers in [PLAIN, 31] {
            let memory = plain_chain(layers).await;
            let reads = Reads::default();
            let host = PassThrough::around(memory.clone(), reads.clone());
            assert!(add(&host, layers, IndexLimits::default()).await);
            let counted = reads.calls.lock().clone();
            // A layer has 16 tables.
            assert!(counted.values().max().is_some_and(|most| *most <= 4), "{counted:?}");
            assert_eq!(assert_indexed(&memory, layers).await, layers as u32);
        }
    });
}

/// Each adds what the limits allow, until none is missing; then a copy has an index, too.
#[test]
fn later_overlays_complete_the_index() {
    block_on(async {
        let host = plain_chain(PLAIN).await;
        let mut missing = Vec::new();
        for layer in PLAIN..PLAIN + 4 {
            let left = add(&host, layer, digesting(2)).await;
            assert_eq!(left, layer == PLAIN);
            missing.push(assert_indexed(&host, layer).await);
            fill(&host, layer, once(0)).await;
        }
        assert_eq!(missing, [5, 3, 1, 0]);
        let last = PLAIN + 3;
        assert_eq!(assert_indexed(&copy_of(&host), last).await, 0);
    });
}

/// The longest chain whose digests are left to others: they are made before a chapter closes, a layer with each
/// overlay.
#[test]
fn no_chapter_closes_without_the_digests_of_its_layers() {
    block_on(async {
        const LONGEST: usize = 31;
        let host = plain_chain(LONGEST).await;
        for layer in LONGEST..=64 {
            assert_eq!(add(&host, layer, digesting(1)).await, layer == LONGEST);
            fill(&host, layer, once(0)).await;
        }
        assert_eq!(assert_indexed(&host, 64).await, 0);
        assert_eq!(assert_indexed(&copy_of(&host), 64).await, 0);
    });
}

/// Other programs add layers until a chapter is full: the overlay that closes it makes all digests.
#[test]
fn a_chapter_that_closes_early_has_the_digests_of_its_layers() {
    block_on(async {
        let host = plain_chain(PLAIN).await;
        assert!(add(&host, PLAIN, digesting(1)).await);
        for layer in PLAIN + 1..64 {
            create(&host.any(), &name(layer), &overlay(layer, false)).await.unwrap();
        }
        assert!(!add(&host, 64, digesting(1)).await);
        assert_eq!(assert_indexed(&host, 64).await, 0);
        assert_eq!(assert_indexed(&copy_of(&host), 64).await, 0);
    });
}

/// Later overlays could not make all digests in time: these are made at once, as they always were.
#[test]
fn a_long_chain_has_all_digests_from_the_first_overlay_on() {
    block_on(async {
        let host = plain_chain(32).await;
        assert!(!add(&host, 32, IndexLimits::default()).await);
        assert_eq!(assert_indexed(&host, 32).await, 0);
        // The same if a layer has more tables than later overlays read.
        let host = plain_chain(PLAIN).await;
        assert!(!add(&host, PLAIN, digesting(0)).await);
        assert_eq!(assert_indexed(&host, PLAIN).await, 0);
    });
}

/// A few tables are read at once, as for every overlay.
#[test]
fn the_first_overlay_of_a_small_chain_has_a_whole_index() {
    block_on(async {
        let host = MemoryHost::new();
        for layer in 0..PLAIN {
            create(&host.any(), &name(layer), &overlay(layer, false)).await.unwrap();
            fill(&host, layer, spans().take(8)).await;
        }
        assert!(!add(&host, PLAIN, IndexLimits::default()).await);
        assert_eq!(assert_indexed(&host, PLAIN).await, 0);
    });
}

/// Where nothing was written since, a cold read takes a read of each layer at most, as with any index.
#[test]
fn a_cold_read_reads_a_table_of_each_layer_at_most() {
    block_on(async {
        let memory = plain_chain(PLAIN).await;
        for layer in PLAIN..PLAIN + 60 {
            add(&memory, layer, IndexLimits::default()).await;
            fill(&memory, layer, once(0)).await;
        }
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone());
        let active = PLAIN + 59;
        let disk = Disk::open(host.any(), &name(active), &OpenOptions::new()).await.unwrap();
        assert_eq!(disk.indexed_layers(), active);
        reads.calls.lock().clear();
        disk.read(5 * SPAN, IoBuf::zeroed(512)).await.unwrap();
        let counted = reads.calls.lock().clone();
        let owners = counted.keys().filter(|file| (0..PLAIN).any(|layer| **file == name(layer)));
        assert!(owners.count() == PLAIN && counted.values().sum::<u64>() < 10, "{counted:?}");
        // Where every overlay wrote, the pages were folded.
        reads.calls.lock().clear();
        disk.read(0, IoBuf::zeroed(512)).await.unwrap();
        let counted = reads.calls.lock().clone();
        assert!(counted.values().sum::<u64>() < 36, "{counted:?}");
    });
}

/// The pages of all layers become due at once, but are not folded at once.
#[test]
fn an_overlay_reads_no_more_than_its_limits_allow() {
    block_on(async {
        const LAYERS: usize = 31;
        let memory = plain_chain(LAYERS).await;
        let limits = IndexLimits { most_folded: 64, ..digesting(1) };
        add(&memory, LAYERS, limits).await;
        let pages = SIZE / PAGE;
        for layer in LAYERS..LAYERS + 8 {
            fill(&memory, layer, (0..pages).map(|page| page * PAGE)).await;
            let reads = Reads::default();
            let host = PassThrough::around(memory.clone(), reads.clone());
            add(&host, layer + 1, limits).await;
            let read: u64 = reads.bytes.lock().values().sum();
            // The tables of a layer for its digest, those of the new one, and a block of 8 KiB for each layer listed,
            // besides headers and what there is of the index.
            let most = (2 << 20) + (8 << 10) * (64 + 2 * pages) + (256 << 10) * LAYERS as u64 / 8;
            assert!(read < most, "{read} of {most} bytes above layer {layer}");
        }
        assert_indexed(&memory, LAYERS + 8).await;
    });
}

/// What may be asked of a host: no stamps, or failing reads of a layer's tables.
#[derive(Clone, Default)]
struct Odd {
    stampless: bool,
    /// Reads of this layer past its first 256 KiB fail while this is set.
    failing: Option<(PathBuf, Arc<AtomicBool>)>,
}

impl HostHooks for Odd {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Odd {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        if let Call::Read { offset, length } = request
            && let Some((layer, fails)) = &self.failing
            && fails.load(Ordering::Relaxed)
            && layer == file.name()
            && offset >= 256 << 10
        {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            let operation = isobath_storage::Operation::Read;
            return Err(StorageError::at(operation, file.name(), offset, length, error));
        }
        Ok(())
    }

    async fn end(&self, _file: &impl Storage, (): (), _done: Option<Call<'_>>) -> Result<()> {
        Ok(())
    }

    fn has_stamps(&self) -> bool {
        !self.stampless
    }
}

/// There the digests alone tell that a layer is unchanged.
#[test]
fn without_stamps_the_first_overlay_has_all_digests() {
    block_on(async {
        let memory = plain_chain(PLAIN).await;
        let host = PassThrough::around(memory, Odd { stampless: true, ..Odd::default() });
        assert!(!add(&host, PLAIN, IndexLimits::default()).await);
        let disk = Disk::open(host.any(), &name(PLAIN), &OpenOptions::new()).await.unwrap();
        assert_eq!((disk.indexed_layers(), undigested(&host, PLAIN).await), (PLAIN, 0));
        drop(disk);
        // If they are too much to read, there is no index, rather than one that is never valid.
        let limits = IndexLimits { most_to_scan: 1 << 10, ..IndexLimits::default() };
        let new = overlay(PLAIN, true).index_limits(limits);
        let created = create_held(&host, &name(PLAIN), &new).await.unwrap();
        assert!(!created.is_index_left());
        drop(created);
        let info = info(&host, &name(PLAIN), &InfoOptions::default()).await.unwrap();
        assert_eq!(info.qcow2.unwrap().index, None);
    });
}

#[test]
fn a_table_that_cannot_be_read_delays_no_other_layers_digest_and_fails_no_overlay() {
    block_on(async {
        let memory = plain_chain(PLAIN).await;
        let fails = Arc::new(AtomicBool::new(true));
        let failing = Some((name(1), Arc::clone(&fails)));
        let host = PassThrough::around(memory.clone(), Odd { failing, ..Odd::default() });
        for (layer, missing) in (PLAIN..).zip([5, 4, 3, 2, 1, 1]) {
            add(&host, layer, digesting(1)).await;
            assert_eq!(undigested(&memory, layer).await, missing, "layer {layer}");
            fill(&memory, layer, once(0)).await;
        }
        // Pages become due, too.
        for layer in PLAIN + 6..PLAIN + 40 {
            add(&host, layer, digesting(1)).await;
            fill(&memory, layer, once(0)).await;
        }
        let last = PLAIN + 40;
        add(&host, last, digesting(1)).await;
        assert_eq!(assert_indexed(&memory, last).await, 1);
        fails.store(false, Ordering::Relaxed);
        add(&host, last, digesting(1)).await;
        assert_eq!(assert_indexed(&memory, last).await, 0);
    });
}

#[test]
fn a_layer_that_has_no_digest_delays_no_other_layers() {
    block_on(async {
        let host = plain_chain(PLAIN).await;
        // An entry that is no offset of a cluster.
        let mut bytes = host.contents(name(0)).unwrap();
        let header = Header::parse(&bytes[..65536]).unwrap();
        let at = header.l1_table_offset.get() as usize + 3 * 8;
        let entry = L1Entry::read(&bytes, at / 8).unwrap().raw() | 512;
        bytes[at..at + 8].copy_from_slice(&entry.to_be_bytes());
        host.insert(name(0), &bytes);
        for (layer, missing) in (PLAIN..).zip([5, 4, 3, 2, 1, 1]) {
            assert_eq!(add(&host, layer, digesting(1)).await, layer == PLAIN);
            assert_eq!(undigested(&host, layer).await, missing, "layer {layer}");
        }
    });
}

/// What an index has is not given up for one without digests.
#[test]
fn an_index_that_is_damaged_or_coarser_is_made_anew_with_all_digests() {
    block_on(async {
        let good = plain_chain(PLAIN).await;
        let whole = IndexLimits { most_at_once: u64::MAX, ..IndexLimits::default() };
        assert!(!add(&good, PLAIN, whole).await);
        fill(&good, PLAIN, spans()).await;

        let host = good.deep_copy();
        let mut bytes = host.contents(name(PLAIN)).unwrap();
        let index = *Header::parse(&bytes[..65536]).unwrap().index().unwrap();
        // The first block is that of a segment.
        bytes[index.area_offset.get() as usize + 64] ^= 1;
        host.insert(name(PLAIN), &bytes);
        assert!(!add(&host, PLAIN + 1, IndexLimits::default()).await);
        assert_eq!(assert_indexed(&host, PLAIN + 1).await, 0);

        let host = good;
        let new = overlay(PLAIN + 1, false).extended_l2(true);
        create(&host.any(), &name(PLAIN + 1), &new).await.unwrap();
        fill(&host, PLAIN + 1, spans()).await;
        assert!(!add(&host, PLAIN + 2, IndexLimits::default()).await);
        assert_eq!(assert_indexed(&host, PLAIN + 2).await, 0);
    });
}

/// Too much even for later overlays: there is no index, and whoever creates the overlay is told, if one can be made.
#[test]
fn an_index_that_takes_too_long_is_not_made() {
    block_on(async {
        let host = plain_chain(33).await;
        let limits = IndexLimits { most_to_scan: 1 << 20, ..IndexLimits::default() };
        let made = async |new: NewDisk| {
            let host = host.any();
            let created = create_held(&host, &name(33), &new.index_limits(limits)).await.unwrap();
            let left = created.is_index_left();
            drop(created);
            let info = info(&host, &name(33), &InfoOptions::default()).await.unwrap();
            (left, info.qcow2.unwrap().index.is_some())
        };
        assert_eq!(made(overlay(33, true)).await, (true, false));
        assert_eq!(made(overlay(33, false)).await, (false, false));
        // A header of 512 bytes with a long name has no room for an index, so that nobody can make one.
        let long = "long".repeat(85);
        host.insert(&long, &host.contents(name(32)).unwrap());
        let small = overlay(33, true).cluster_size(512).backing_file(long, "qcow2");
        assert_eq!(made(small).await, (false, false));
    });
}

/// A layer that grows once it is listed makes the index invalid: what it has new is read, whatever the lists say.
#[test]
fn what_a_layer_gains_after_it_was_listed_is_read() {
    block_on(async {
        let host = MemoryHost::new();
        for layer in 0..PLAIN {
            create(&host.any(), &name(layer), &overlay(layer, false)).await.unwrap();
            fill(&host, layer, spans().skip(1)).await;
        }
        let limits = IndexLimits { most_at_once: 0, ..IndexLimits::default() };
        assert!(add(&host, PLAIN, limits).await);
        fill(&host, 2, once(0)).await;
        let disk = Disk::open(host.any(), &name(PLAIN), &OpenOptions::new()).await.unwrap();
        let read = disk.read(2 * (64 << 10), IoBuf::zeroed(512)).await.unwrap();
        assert_eq!((disk.indexed_layers(), read.to_vec()), (0, vec![3; 512]));
        drop(disk);
        assert!(add(&host, PLAIN + 1, limits).await);
        assert_eq!(assert_indexed(&host, PLAIN + 1).await, PLAIN as u32);
    });
}
