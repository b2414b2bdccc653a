//! Layers that are opened by their heads in an index: nothing of them is read, and whatever became of them since, the
//! disk is what it is without an index.

use futures_executor::block_on;
use isobath_disk::{Below, Disk, ImageFormat, NewDisk, OpenOptions, create};
use isobath_qcow2::index::{
    BlockHash, CHAPTER_LAYERS, HeadsBlock, IndexExtension, LayerRecord, Root,
};
use isobath_qcow2::{Head, Header, HostOffset};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Result, Storage};
use isobath_storage_test::any::ToAny;
use isobath_storage_test::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_testkit::seed::Seed;
use parking_lot::Mutex;
use rand::RngExt;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const SIZE: u64 = 1 << 20;
const CLUSTER: u64 = 4096;
/// Two chapters, and a few layers whose records are in the root.
const DEPTH: usize = 131;

/// Counts the reads of each file.
#[derive(Clone, Default)]
pub(crate) struct Reads(pub(crate) Arc<Mutex<BTreeMap<PathBuf, u64>>>, Arc<AtomicUsize>);

impl Reads {
    /// How often any file was opened.
    fn opens(&self) -> usize {
        self.1.load(Ordering::Relaxed)
    }
}

impl HostHooks for Reads {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, request: HostCall, _name: &Path, (): ()) {
        if request == HostCall::Open {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Reads {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        if let Call::Read { .. } = request {
            *self.0.lock().entry(file.name().to_owned()).or_default() += 1;
        }
        Ok(())
    }

    async fn end(&self, _file: &impl Storage, (): (), _done: Option<Call<'_>>) -> Result<()> {
        Ok(())
    }
}

pub(crate) fn name(layer: usize) -> PathBuf {
    format!("layer{layer}").into()
}

/// A chain of so many layers, each of which has a cluster, with an index in the active layer.
async fn chain(depth: usize) -> MemoryHost {
    let host = MemoryHost::new();
    for layer in 0..depth {
        let mut new = NewDisk::new(SIZE).cluster_size(CLUSTER).index(false);
        if layer > 0 {
            new = new.backing_file(name(layer - 1).to_str().unwrap(), "qcow2");
        }
        create(&host.any(), &name(layer), &new).await.unwrap();
        write(&host, layer, layer as u64 % (SIZE / CLUSTER), layer as u8 + 1).await;
    }
    write_index(&host, depth - 1).await;
    host
}

async fn write(host: &MemoryHost, layer: usize, cluster: u64, byte: u8) {
    let options = OpenOptions::new().writable(true).backing(false);
    let disk = Disk::open(host.any(), &name(layer), &options).await.unwrap();
    let bytes = IoBuf::copy_of(&[byte; CLUSTER as usize]);
    disk.write(cluster * CLUSTER, bytes).await.unwrap();
    disk.close().await.unwrap();
}

async fn write_index(host: &MemoryHost, layer: usize) {
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), &name(layer), &options).await.unwrap();
    disk.write_index(|_| {}).await.unwrap();
    disk.close().await.unwrap();
}

/// What an active layer reads as, with the index or without, or why it does not.
async fn read(
    host: &MemoryHost,
    active: usize,
    indexed: bool,
) -> std::result::Result<Vec<u8>, String> {
    let mut options = OpenOptions::new();
    if !indexed {
        options = options.backing_files(vec![Below::NamedWithFormat(ImageFormat::Qcow2)]);
    }
    let disk = Disk::open(host.any(), &name(active), &options).await;
    let disk = disk.map_err(|error| error.to_string())?;
    let bytes = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await;
    bytes.map(|bytes| bytes.to_vec()).map_err(|error| error.to_string())
}

/// The disk is the same with the index and without.
async fn assert_same(host: &MemoryHost, active: usize, what: &str) {
    let (with, without) = (read(host, active, true).await, read(host, active, false).await);
    let (is, was) = (with.as_ref().map(Vec::len), without.as_ref().map(Vec::len));
    assert!(with == without, "{what}: {is:?}, without an index {was:?}");
}

#[test]
fn an_open_reads_nothing_of_a_layer_with_a_head() {
    block_on(async {
        let memory = chain(DEPTH).await;
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone());
        let disk = Disk::open(host.any(), &name(DEPTH - 1), &OpenOptions::new()).await.unwrap();
        assert_eq!((disk.depth(), disk.indexed_layers()), (DEPTH, DEPTH - 1));
        let counted = reads.0.lock().clone();
        let read: Vec<_> = (0..DEPTH - 1).filter(|n| counted.contains_key(&name(*n))).collect();
        assert_eq!(read, [128, 129], "{counted:?}");
        for (depth, layer) in disk.layers().enumerate() {
            let number = DEPTH - 1 - depth;
            assert_eq!(layer.name(), name(number));
            let options = OpenOptions::new().backing(false);
            let other = Disk::open(memory.any(), &name(number), &options).await.unwrap();
            let (own, alone) = (layer.as_qcow2().unwrap(), other.active_qcow2().unwrap());
            assert_eq!(*own.header.read(), *alone.header.read());
            assert!(own.l1.read().iter().eq(alone.l1.read().iter()));
        }
        assert_same(&memory, DEPTH - 1, "unchanged").await;
    });
}

/// Chapters that earlier snapshots wrote come with heads, too.
#[test]
fn an_open_reads_nothing_of_layers_whose_chapter_is_in_another_file() {
    block_on(async {
        let memory = MemoryHost::new();
        for layer in 0..DEPTH {
            let mut new = NewDisk::new(SIZE).cluster_size(CLUSTER);
            if layer > 0 {
                new = new.backing_file(name(layer - 1).to_str().unwrap(), "qcow2");
            }
            create(&memory.any(), &name(layer), &new).await.unwrap();
            write(&memory, layer, layer as u64 % 20, layer as u8).await;
        }
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone());
        let disk = Disk::open(host.any(), &name(DEPTH - 1), &OpenOptions::new()).await.unwrap();
        assert_eq!(disk.indexed_layers(), DEPTH - 1);
        let counted = reads.0.lock().clone();
        let read: Vec<_> = (0..DEPTH - 1).filter(|n| counted.contains_key(&name(*n))).collect();
        // Layer 64 holds the first chapter.
        assert_eq!(read, [64, 128, 129], "{counted:?}");
        assert_same(&memory, DEPTH - 1, "unchanged").await;
    });
}

/// Other programs change layers between the writing of the index and the open.
#[test]
fn a_layer_that_changed_since_is_as_it_is_now() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let good = chain(70).await;
        let changed = |host: &MemoryHost, layer: usize, change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = host.contents(name(layer)).unwrap();
            change(&mut bytes);
            host.insert(name(layer), &bytes);
        };
        for step in 0..60 {
            let host = good.deep_copy();
            let layer = rng.random_range(0..64);
            let other = rng.random_range(0..64);
            let what = match step % 6 {
                0 => {
                    write(&host, layer, rng.random_range(0..SIZE / CLUSTER), 255).await;
                    "written to"
                }
                1 => {
                    changed(&host, layer, &|bytes| bytes.truncate(bytes.len() / 2));
                    "truncated"
                }
                2 => {
                    changed(&host, layer, &|bytes| *bytes = good.contents(name(other)).unwrap());
                    "replaced by another layer"
                }
                3 => {
                    let backing = name(other);
                    changed(&host, layer, &|bytes| {
                        let header = &bytes[..CLUSTER as usize];
                        let backing = Some((backing.to_str().unwrap(), "qcow2"));
                        for (at, new) in Header::edit_backing(header, backing).unwrap() {
                            bytes[at..at + new.len()].copy_from_slice(&new);
                        }
                    });
                    "rebased"
                }
                4 => {
                    host.remove(&name(layer)).await.unwrap();
                    "removed"
                }
                _ => {
                    // The whole L1 table: nothing is mapped any more.
                    changed(&host, layer, &|bytes| {
                        let header = Header::parse(&bytes[..CLUSTER as usize]).unwrap();
                        let at = header.l1_table_offset.get() as usize;
                        bytes[at..at + header.l1_size as usize * 8].fill(0);
                    });
                    "emptied"
                }
            };
            assert_same(&host, 69, &format!("layer {layer} {what} ({other})")).await;
        }
    });
}

/// A stamp that is wrong is noticed by others that are right: then no layer is taken for what its head says.
#[test]
fn heads_are_not_used_without_their_index() {
    block_on(async {
        let memory = chain(66).await;
        write(&memory, 3, 0, 255).await;
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone());
        let disk = Disk::open(host.any(), &name(65), &OpenOptions::new()).await.unwrap();
        assert_eq!(disk.indexed_layers(), 0);
        let counted = reads.0.lock().clone();
        assert!((0..66).all(|layer| counted.contains_key(&name(layer))), "{counted:?}");
        assert_eq!(reads.opens(), 66);
    });
}

/// Puts other heads into the index of an active layer, which has one chapter, with hashes that are right.
fn forge(host: &MemoryHost, active: usize, change: impl Fn(&mut Vec<Option<Head>>)) {
    let mut bytes = host.contents(name(active)).unwrap();
    let header = bytes[..CLUSTER as usize].to_vec();
    let index = *Header::parse(&header).unwrap().index().unwrap();
    let part = |at: HostOffset, length: u32| at.get() as usize..at.get() as usize + length as usize;
    let place = part(index.root_offset, index.root_length);
    let mut root = Root::decode(&bytes[place.clone()]).unwrap();
    let pointer = &mut root.chapters[0];
    let chapter = part(pointer.offset, pointer.length);
    let block = HeadsBlock::of_chapter(&bytes[chapter.clone()], CHAPTER_LAYERS).unwrap();
    let there = chapter.end..chapter.end + block.length as usize;
    let mut heads = Head::decode_all(&bytes[there.clone()], CHAPTER_LAYERS).unwrap();
    change(&mut heads);
    let forged = Head::encode_all(&heads);
    bytes[there].copy_from_slice(&forged);
    let block = HeadsBlock { hash: BlockHash::of(&forged), ..block };
    let records = LayerRecord::decode_chapter(&bytes[chapter.clone()], CHAPTER_LAYERS).unwrap();
    let forged = LayerRecord::encode_chapter(&records, Some(&block));
    pointer.hash = BlockHash::of(&forged);
    bytes[chapter].copy_from_slice(&forged);
    let forged = root.encode();
    let index = IndexExtension { root_hash: BlockHash::of(&forged), ..index };
    bytes[place].copy_from_slice(&forged);
    for (at, new) in Header::edit_index(&header, Some(&index)).unwrap() {
        bytes[at..at + new.len()].copy_from_slice(&new);
    }
    host.insert(name(active), &bytes);
}

/// As after a crash of the machine that has left new contents with old times.
#[test]
fn a_head_that_is_wrong_is_not_used_without_its_index() {
    block_on(async {
        let good = chain(66).await;
        // Each layer is said to have another backing file.
        let rebased = |heads: &mut Vec<Option<Head>>| {
            for head in heads.iter_mut().skip(1) {
                let mut header = head.as_ref().unwrap().header().unwrap();
                let place = header.backing_file.as_mut().unwrap();
                let length = place.len();
                *place = format!("{:.<1$}", "layer0", length);
                let l1 = l1_of(head.as_ref().unwrap(), |entry| entry);
                let cluster = header.encode().unwrap();
                *head = Some(Head::new(&cluster, &l1).unwrap());
            }
        };
        // Each table of each layer is said to be elsewhere.
        let moved = |heads: &mut Vec<Option<Head>>| {
            for head in heads.iter_mut() {
                let l1 = l1_of(head.as_ref().unwrap(), |entry| entry + CLUSTER);
                let cluster = head.as_ref().unwrap().header().unwrap().encode().unwrap();
                *head = Some(Head::new(&cluster, &l1).unwrap());
            }
        };
        for (what, change) in [("rebased", &rebased as &dyn Fn(&mut Vec<_>)), ("moved", &moved)] {
            let host = good.deep_copy();
            forge(&host, 65, change);
            if what == "rebased" {
                // There is no file of that name.
                assert_same(&host, 65, what).await;
            }
            write(&host, 64, 0, 255).await;
            assert_same(&host, 65, what).await;
        }
    });
}

/// The bytes of the L1 table of a head, with its entries changed.
fn l1_of(head: &Head, change: impl Fn(u64) -> u64) -> Vec<u8> {
    let size = head.header().unwrap().l1_size as usize;
    let mut bytes = vec![0; size * 8];
    for (at, entry) in head.l1() {
        let at = *at as usize * 8;
        bytes[at..at + 8].copy_from_slice(&change(entry.raw()).to_be_bytes());
    }
    bytes
}

#[test]
fn a_flipped_bit_in_a_chapter_or_its_heads_changes_no_byte() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let host = chain(66).await;
        let good = host.contents(name(65)).unwrap();
        let index = *Header::parse(&good[..CLUSTER as usize]).unwrap().index().unwrap();
        let expected = read(&host, 65, false).await.unwrap();
        for _ in 0..200 {
            let at = rng.random_range(index.area_offset.get()..index.root_offset.get());
            let mut bad = good.clone();
            bad[at as usize] ^= 1 << rng.random_range(0..8);
            host.insert(name(65), &bad);
            assert!(read(&host, 65, true).await.as_ref() == Ok(&expected), "bit at {at}");
        }
    });
}

/// A writer keeps to itself whatever way its image was opened.
#[test]
fn a_layer_with_a_head_is_locked_like_others() {
    block_on(async {
        let host = chain(66).await;
        let disk = Disk::open(host.any(), &name(65), &OpenOptions::new()).await.unwrap();
        let mode = OpenMode { writable: true, ..OpenMode::default() };
        assert!(host.open(&name(3), mode).await.is_err());
        drop(disk);
        let writer = host.open(&name(3), mode).await.unwrap();
        assert!(Disk::open(host.any(), &name(65), &OpenOptions::new()).await.is_err());
        drop(writer);
    });
}
