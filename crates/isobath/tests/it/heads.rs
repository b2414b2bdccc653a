//! Layers that are opened by their heads in an index: nothing of them is read, and whatever became of them since, the
//! disk is what it is without an index.

use futures_executor::block_on;
use isobath_disk::{Below, Disk, ImageFormat, MemoryLimit, NewDisk, OpenOptions, create};
use isobath_qcow2::index::{
    BlockHash, BlockPointer, CHAPTER_LAYERS, HeadsBlock, IndexExtension, LayerRecord, Root,
};
use isobath_qcow2::{Head, Header, HostOffset};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Result, Storage, StorageExt};
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

/// Counts the opens and the reads of each file.
#[derive(Clone, Default)]
pub(crate) struct Reads {
    pub(crate) calls: Counts,
    pub(crate) bytes: Counts,
    opens: Counts,
}

type Counts = Arc<Mutex<BTreeMap<PathBuf, u64>>>;

impl Reads {
    /// How often a file was opened.
    fn opens_of(&self, layer: usize) -> u64 {
        self.opens.lock().get(&name(layer)).copied().unwrap_or_default()
    }

    /// How often any file was opened.
    fn opens(&self) -> u64 {
        self.opens.lock().values().sum()
    }
}

impl HostHooks for Reads {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, request: HostCall, name: &Path, (): ()) {
        if request == HostCall::Open {
            *self.opens.lock().entry(name.to_owned()).or_default() += 1;
        }
    }

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Reads {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        if let Call::Read { length, .. } = request {
            *self.calls.lock().entry(file.name().to_owned()).or_default() += 1;
            *self.bytes.lock().entry(file.name().to_owned()).or_default() += length;
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

#[test]
fn the_progress_of_an_index_counts_its_layers_too() {
    block_on(async {
        let depth = 20;
        let host = chain(depth).await;
        let options = OpenOptions::new().writable(true).heads(false);
        let disk = Disk::open(host.any(), &name(depth - 1), &options).await.unwrap();
        let mut seen = Vec::new();
        disk.write_index(|now| seen.push((now.done, now.total))).await.unwrap();
        disk.close().await.unwrap();
        let total = seen[0].1;
        assert!(seen.len() >= depth, "{seen:?}");
        assert!(seen.iter().all(|(_, all)| *all == total), "{seen:?}");
        assert!(seen.is_sorted_by(|one, next| one.0 < next.0), "{seen:?}");
        assert_eq!(seen.last(), Some(&(total, total)));
    });
}

async fn write_index(host: &MemoryHost, layer: usize) {
    let options = OpenOptions::new().writable(true).heads(false);
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
        let counted = reads.calls.lock().clone();
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
        let counted = reads.calls.lock().clone();
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
        let counted = reads.calls.lock().clone();
        assert!((0..66).all(|layer| counted.contains_key(&name(layer))), "{counted:?}");
        assert_eq!(reads.opens(), 66);
    });
}

/// Puts another root into the index of an active layer, with a hash that is right.
fn forge_root(host: &MemoryHost, active: usize, change: impl Fn(&mut Root)) {
    let mut bytes = host.contents(name(active)).unwrap();
    let header = bytes[..CLUSTER as usize].to_vec();
    let index = *Header::parse(&header).unwrap().index().unwrap();
    let start = index.root_offset.get() as usize;
    let mut root = Root::decode(&bytes[start..start + index.root_length as usize]).unwrap();
    change(&mut root);
    let forged = root.encode();
    let root_offset = HostOffset::new(bytes.len() as u64);
    bytes.extend(&forged);
    bytes.resize(bytes.len().next_multiple_of(CLUSTER as usize), 0);
    let index = IndexExtension {
        area_length: bytes.len() as u64 - index.area_offset.get(),
        root_offset,
        root_length: forged.len() as u32,
        root_hash: BlockHash::of(&forged),
        ..index
    };
    for (at, new) in Header::edit_index(&header, Some(&index)).unwrap() {
        bytes[at..at + new.len()].copy_from_slice(&new);
    }
    host.insert(name(active), &bytes);
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
        let moved = |heads: &mut Vec<Option<Head>>| moved(heads);
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

/// Each table of each layer is said to be elsewhere.
fn moved(heads: &mut [Option<Head>]) {
    for head in heads.iter_mut() {
        let l1 = l1_of(head.as_ref().unwrap(), |entry| entry + CLUSTER);
        let cluster = head.as_ref().unwrap().header().unwrap().encode().unwrap();
        *head = Some(Head::new(&cluster, &l1).unwrap());
    }
}

/// What an index says is compared with the files, and another one is made of them, not of what it says.
#[test]
fn an_index_with_a_wrong_head_is_found_and_made_right_again() {
    block_on(async {
        let host = chain(66).await;
        let good = read(&host, 65, false).await;
        let verify = async |heads| {
            let options = OpenOptions::new().heads(heads);
            let disk = Disk::open(host.any(), &name(65), &options).await.unwrap();
            disk.verify_index(|_| {}).await.map_err(|error| error.to_string())
        };
        for heads in [false, true] {
            assert_eq!(verify(heads).await, Ok(Ok(Vec::new())));
        }
        forge(&host, 65, |heads| moved(heads));
        let reason = verify(false).await.unwrap().unwrap_err();
        assert_eq!(reason, "'layer0' begins otherwise, although its times are the same");
        let refused = "'layer65': its backing file 'layer0' cannot be read, or is not what an index says of it; open \
                       the disk without heads, as 'isobath index' does";
        assert_eq!(verify(true).await.unwrap_err(), refused);
        let write = async |heads| {
            let options = OpenOptions::new().writable(true).heads(heads);
            let disk = Disk::open(host.any(), &name(65), &options).await.unwrap();
            let written = disk.write_index(|_| {}).await;
            disk.close().await.unwrap();
            written.map(|info| info.layers).map_err(|error| error.to_string())
        };
        assert_eq!(write(true).await, Err(refused.into()));
        assert_eq!(write(false).await, Ok(65));
        for heads in [false, true] {
            assert_eq!(verify(heads).await, Ok(Ok(Vec::new())));
        }
        assert!(read(&host, 65, true).await == good);
    });
}

/// The heads of a chapter are as many bytes as its layers need: a file that is named again and again is opened once.
#[test]
fn a_file_that_an_index_names_again_and_again_is_opened_for_the_first_name() {
    block_on(async {
        let memory = chain(66).await;
        forge_root(&memory, 65, |root| {
            root.chapters = vec![BlockPointer { layer: 6400, ..root.chapters[0] }; 100];
            root.tail.clear();
            (root.covers, root.position) = (6400, 6400);
        });
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone());
        let disk = Disk::open(host.any(), &name(65), &OpenOptions::new()).await.unwrap();
        assert_eq!((disk.depth(), disk.indexed_layers()), (66, 0));
        assert!(reads.opens() < 400, "{}", reads.opens());
        drop(disk);
        assert_same(&memory, 65, "6,400 names").await;
    });
}

/// What a layer may take is the same whatever way it was opened.
#[test]
fn a_layer_with_a_head_counts_for_the_memory_limit() {
    block_on(async {
        let host = chain(66).await;
        let reserved = async |heads, mebibytes: u64| {
            let limit = MemoryLimit::new(mebibytes << 20);
            let options = OpenOptions::new().heads(heads).memory(Some(limit.clone()));
            let disk = Disk::open(host.any(), &name(65), &options).await;
            disk.map(|_disk| limit.reserved()).map_err(|error| error.to_string())
        };
        assert_eq!(reserved(true, 64).await, reserved(false, 64).await);
        // That is less than 66 times 4,200 bytes.
        let refused = MemoryLimit::new(200 << 10);
        let options = OpenOptions::new().memory(Some(refused));
        let error = Disk::open(host.any(), &name(65), &options).await.err().unwrap().to_string();
        assert!(error.contains("raise the memory limit"), "{error}");
    });
}

/// Where no head can be why a chain is not opened, it is opened once; the active layer is never opened twice.
#[test]
fn a_refusal_is_not_asked_for_twice() {
    block_on(async {
        let good = chain(70).await;
        let open = async |memory: &MemoryHost| {
            let reads = Reads::default();
            let host = PassThrough::around(memory.clone(), reads.clone());
            let options = OpenOptions::new().writable(true);
            let opened = Disk::open(host.any(), &name(69), &options).await;
            (reads, opened.err().unwrap().to_string())
        };
        let host = good.deep_copy();
        host.remove(&name(66)).await.unwrap();
        let (reads, error) = open(&host).await;
        assert!(error.contains("layer66"), "{error}");
        assert_eq!([69, 68, 67].map(|layer| reads.opens_of(layer)), [1; 3]);
        let host = good.deep_copy();
        host.remove(&name(0)).await.unwrap();
        let (reads, error) = open(&host).await;
        assert!(error.contains("layer0"), "{error}");
        assert_eq!([69, 68, 63].map(|layer| reads.opens_of(layer)), [1, 2, 2]);
    });
}

/// The refusal to write above a killed server's image is not asked for once more, even if heads led to that image.
#[test]
fn a_refusal_that_a_restart_log_causes_is_not_asked_for_twice() {
    block_on(async {
        let memory = chain(66).await;
        let options = OpenOptions::new().writable(true).restart_log(true);
        let disk = Disk::open(memory.any(), &name(3), &options).await.unwrap();
        let write = async |cluster: u64| {
            let bytes = IoBuf::copy_of(&[255; CLUSTER as usize]);
            disk.write(cluster * CLUSTER, bytes).await.unwrap();
        };
        write(40).await;
        disk.flush().await.unwrap();
        let before = memory.contents(name(3)).unwrap();
        write(41).await;
        write(42).await;
        disk.flush().await.unwrap();
        disk.discard(41 * CLUSTER, CLUSTER).await.unwrap();
        write(43).await;
        // The server is killed, and an earlier copy is put back.
        drop(disk);
        let mode = OpenMode { writable: true, ..OpenMode::default() };
        let file = memory.open(&name(3), mode).await.unwrap();
        file.set_len(before.len() as u64).await.unwrap();
        file.write_at(0, IoBuf::copy_of(&before)).await.unwrap();
        drop(file);
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone());
        let options = OpenOptions::new().writable(true);
        let error = Disk::open(host.any(), &name(65), &options).await.err().unwrap().to_string();
        assert!(error.contains("does not match it"), "{error}");
        assert_eq!([65, 64, 63, 4].map(|layer| reads.opens_of(layer)), [1; 4]);
    });
}

/// Otherwise a crash of the machine could leave the new header with the old times, and the head would count.
#[test]
fn a_rebase_makes_the_times_of_the_file_durable() {
    block_on(async {
        let memory = chain(3).await;
        let stamps = Stamped::default();
        let host = PassThrough::around(memory.clone(), stamps.clone());
        let options = OpenOptions::new().writable(true);
        let disk = Disk::open(host.any(), &name(2), &options).await.unwrap();
        disk.set_backing(Some(("layer0", "qcow2"))).await.unwrap();
        assert!(stamps.0.load(Ordering::Relaxed) > 0);
        disk.close().await.unwrap();
    });
}

/// Counts how often stamps are made durable.
#[derive(Clone, Default)]
struct Stamped(Arc<AtomicUsize>);

impl HostHooks for Stamped {
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

impl Hooks for Stamped {
    type Begun = ();

    async fn begin(&self, _file: &impl Storage, _request: Call<'_>) -> Result<()> {
        Ok(())
    }

    async fn end(&self, _file: &impl Storage, (): (), _done: Option<Call<'_>>) -> Result<()> {
        Ok(())
    }

    fn sync_stamp(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
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
