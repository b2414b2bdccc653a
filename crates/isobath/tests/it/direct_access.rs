//! The direct-access index: a disk with one reads as it does without, whatever happened to the
//! chain, to the index or to the writing of it.

use crate::common::{Beside, assert_consistent, export, random_fates};
use futures_executor::block_on;
use isobath_disk::{Below, Disk, IndexLimits, NewDisk, OpenOptions, WholeIndex, ZeroFlags, create};
use isobath_qcow2::index::{
    BlockHash, BlockPointer, IndexExtension, Page, PageEntry, PageRecord, Segment, WholeRoot,
};
use isobath_qcow2::{CompressedCluster, CompressionType, HostOffset};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::recorder::RecorderHost;
use isobath_testkit::{model::Model, qemu, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::path::{Path, PathBuf};

/// A chain in memory, and what its active layer reads as.
struct Chain {
    host: MemoryHost,
    layers: Vec<(String, &'static str)>,
    model: Model,
}

impl Chain {
    /// A chain that begins with nothing, or with a raw image.
    fn new(rng: &mut StdRng, size: u64) -> Self {
        let host = MemoryHost::new();
        let mut chain = Self { host, layers: Vec::new(), model: Model::new(size) };
        if rng.random_bool(0.3) {
            let mut bytes = vec![0; rng.random_range(1..=size as usize)];
            rng.fill_bytes(&mut bytes);
            chain.host.insert("base.raw", &bytes);
            chain.model = Model::from_bytes(&bytes);
            chain.layers.push(("base.raw".into(), "raw"));
        }
        chain
    }

    fn name(&self) -> PathBuf {
        self.layers.last().unwrap().0.clone().into()
    }

    /// Adds a layer, with an index or without.
    async fn add(&mut self, mut new: NewDisk) {
        let name = format!("layer{}.qcow2", self.layers.len());
        let below = self.layers.last();
        if let Some((name, format)) = below {
            new = new.backing_file(name, *format);
        }
        self.model.resize(new.size.unwrap());
        create(&self.host.any(), Path::new(&name), &new).await.unwrap();
        self.layers.push((name, "qcow2"));
    }

    async fn open(&self, writable: bool) -> Disk<AnyHost> {
        let options = OpenOptions::new().writable(writable);
        Disk::open(self.host.any(), &self.name(), &options).await.unwrap()
    }

    /// Writes, zeroes and compressed clusters in the active layer.
    async fn fill(&mut self, rng: &mut StdRng, requests: u32) {
        let disk = self.open(true).await;
        let header = disk.layers().next().unwrap().header().unwrap();
        let cluster = 1u64 << header.cluster_bits;
        for _ in 0..rng.random_range(0..requests) {
            let offset = rng.random_range(0..disk.size());
            let length = rng.random_range(1..=3 * cluster.min(1 << 15)).min(disk.size() - offset);
            match rng.random_range(0..10) {
                0..6 => {
                    let mut bytes = vec![0; length as usize];
                    rng.fill_bytes(&mut bytes);
                    self.model.write(offset, &bytes);
                    disk.write(offset, IoBuf::copy_of(&bytes)).await.unwrap();
                }
                6..8 => {
                    self.model.fill(offset, length, 0);
                    disk.write_zeroes(offset, length, ZeroFlags::default()).await.unwrap();
                }
                _ => {
                    let at = offset / cluster * cluster;
                    let length = cluster.min(disk.size() - at);
                    let byte = rng.random();
                    self.model.fill(at, length, byte);
                    let bytes = vec![byte; length as usize];
                    disk.write_compressed(at, IoBuf::copy_of(&bytes)).await.unwrap();
                }
            }
        }
        disk.close().await.unwrap();
    }

    /// The active layer reads as it should, and its index, if it is used, says what the layers say.
    /// Returns how many of them the index describes that serves, and whether it is the active's.
    async fn check(&self) -> (usize, bool) {
        let disk = self.open(false).await;
        compare(&disk, &self.model).await;
        self.check_beside(&disk).await;
        let own = match disk.verify_index(|_| {}).await {
            Ok(Ok(differ)) => {
                assert_eq!(differ, []);
                true
            }
            _ => false,
        };
        (disk.indexed_layers(), own)
    }

    /// An index of all layers in a file of its own gives the same.
    async fn check_beside(&self, disk: &Disk<AnyHost>) {
        let WholeIndex { root, bytes } = disk.whole_index().await.unwrap().unwrap();
        assert_eq!(root.layers as usize, self.layers.len());
        let beside = beside(self, &root, &bytes);
        // Indexes in the layers' own files are not used where formats are given.
        let below = disk.layers().nth(1).map(|layer| Below::NamedWithFormat(layer.format()));
        let options = OpenOptions::new().backing_files(below.into_iter().collect::<Vec<_>>());
        let disk = Disk::open(beside.any(), &self.name(), &options).await.unwrap();
        assert_eq!(disk.indexed_layers(), disk.depth());
        compare(&disk, &self.model).await;
    }

    async fn write_index(&self) {
        let disk = self.open(true).await;
        disk.write_index(|_| {}).await.unwrap();
        disk.close().await.unwrap();
    }

    /// QEMU finds the active image in order and reads the same.
    fn assert_qemu_agrees(&self) {
        let directory = export(&self.host);
        let image = directory.path().join(self.name());
        qemu::assert_clean(&image);
        self.model.check(&qemu::read_disk(&image, "qcow2")).unwrap();
    }
}

/// A host that has an index of a chain.
fn beside(chain: &Chain, root: &WholeRoot, bytes: &[u8]) -> Beside {
    Beside::new(&chain.host, chain.layers.iter().map(|(name, _)| name), root, bytes)
}

async fn compare<H: Host>(disk: &Disk<H>, model: &Model) {
    let bytes = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap();
    model.check(&bytes).unwrap();
}

fn random_disk(rng: &mut StdRng, size: u64) -> NewDisk {
    let version = if rng.random_bool(0.15) { 2 } else { 3 };
    let extended_l2 = version == 3 && rng.random_bool(0.2);
    let least = if extended_l2 { 14 } else { 9 };
    let zstd = version == 3 && rng.random();
    NewDisk::new(size)
        .version(version)
        .cluster_size(1 << rng.random_range(least..=21))
        .extended_l2(extended_l2)
        .compression_type(if zstd { CompressionType::Zstd } else { CompressionType::Zlib })
        .refcount_bits(if version == 3 { 1 << rng.random_range(0..=6) } else { 16 })
        .index(rng.random_bool(0.7))
}

/// Limits within which little is done for an overlay, or all of it.
fn random_limits(rng: &mut StdRng) -> IndexLimits {
    if rng.random() {
        return IndexLimits::default();
    }
    IndexLimits {
        most_at_once: 0,
        most_to_scan: if rng.random_bool(0.2) { 1 << 12 } else { u64::MAX },
        most_digested: 1 << rng.random_range(9..20),
        most_folds: rng.random_range(0..4),
        most_folded: rng.random_range(0..40),
    }
}

#[test]
fn random_chains_read_the_same_with_an_index_anywhere() {
    let mut rng = Seed::new().rng();
    for _ in 0..25 {
        let layers = rng.random_range(1..12);
        block_on(random_chain(&mut rng, 1 << 20, layers));
    }
    // Of several pages, whatever their units are.
    for _ in 0..3 {
        block_on(random_chain(&mut rng, 200 << 20, 4));
    }
}

/// A chain of disks of up to `most` bytes.
async fn random_chain(rng: &mut StdRng, most: u64, layers: usize) {
    let size = rng.random_range(1..=most / 512) * 512;
    let mut chain = Chain::new(rng, size);
    for _ in 0..layers {
        let size = rng.random_range(size / 1024 + 1..=size / 512) * 512;
        let new = random_disk(rng, size).index_limits(random_limits(rng));
        println!("{new:?}");
        chain.add(new).await;
        chain.fill(rng, 12).await;
        let below = chain.layers.len() > 1;
        let disk = chain.open(true).await;
        match rng.random_range(0..6) {
            // A header of 512 bytes may have no room.
            0 if below => drop(disk.write_index(|_| {}).await),
            1 if below => drop(disk.drop_index().await.unwrap()),
            _ => {}
        }
        disk.close().await.unwrap();
        drop(disk);
        chain.check().await;
    }
    chain.assert_qemu_agrees();
}

/// Enough layers for pages to be folded in turn and for chapters.
/// A chain of one qcow2 image of 1 MiB above a raw one, both with data.
async fn two_layers() -> Chain {
    let (host, layers) = (MemoryHost::new(), vec![("base.raw".to_owned(), "raw")]);
    let base = vec![7; 1 << 20];
    host.insert("base.raw", &base);
    let mut chain = Chain { host, layers, model: Model::from_bytes(&base) };
    chain.add(NewDisk::new(1 << 20).index(false)).await;
    let disk = chain.open(true).await;
    disk.write(0, IoBuf::copy_of(&vec![9; 1 << 16])).await.unwrap();
    disk.close().await.unwrap();
    chain.model.fill(0, 1 << 16, 9);
    chain
}

/// An index of two layers whose only page has these entries and is of so many layers.
fn crafted(entries: &[PageEntry], folded: u32) -> (WholeRoot, Vec<u8>) {
    let place = |at: usize, block: &[u8]| BlockPointer {
        layer: 0,
        offset: HostOffset::new(at as u64),
        length: block.len() as u32,
        hash: BlockHash::of(block),
    };
    let mut bytes = Page::new(0, 16, entries.iter().copied()).encode(16).unwrap();
    let page = Some(place(0, &bytes));
    let pages = vec![PageRecord { page, folded, newer: Vec::new() }];
    let segment = Segment { number: 0, pages }.encode();
    let segments = vec![Some(place(bytes.len(), &segment))];
    bytes.extend(segment);
    (WholeRoot { unit_bits: 16, layers: 2, size: 1 << 20, segments }, bytes)
}

/// Clusters that are larger than the units of an index of raw images: what the map takes at once is many of its pages.
#[test]
fn below_large_clusters_an_index_of_raw_images_is_read_in_all_its_parts() {
    const MIB: usize = 1 << 20;
    block_on(async {
        for bits in [16, 17, 21] {
            let mut bytes = vec![0; 200 * MIB];
            for at in [0, 63, 64, 100, 130, 191] {
                bytes[at * MIB + 700..][..70_000].fill(at as u8 + 1);
            }
            let (host, layers) = (MemoryHost::new(), vec![("base.raw".to_owned(), "raw")]);
            host.insert("base.raw", &bytes);
            let mut chain = Chain { host, layers, model: Model::from_bytes(&bytes) };
            let large = || NewDisk::new(200 << 20).cluster_size(1 << bits);
            let WholeIndex { root, bytes } =
                chain.open(false).await.whole_index().await.unwrap().unwrap();
            let beside = beside(&chain, &root, &bytes).any();
            // The index of the raw image, and of that and the first overlay, which has its units.
            for number in 0..3 {
                chain.add(large()).await;
                let disk = chain.open(true).await;
                assert_eq!(disk.indexed_layers(), number + 1);
                compare(&disk, &chain.model).await;
                let at = (75 + 60 * number as u64) << 20;
                disk.write(at, IoBuf::copy_of(&[0x99; 3000])).await.unwrap();
                chain.model.fill(at, 3000, 0x99);
                disk.close().await.unwrap();
                drop(disk);
                chain.check().await;
                if number == 0 {
                    let options = OpenOptions::new().index(false);
                    let disk = Disk::open(beside.clone(), &chain.name(), &options).await.unwrap();
                    assert_eq!(disk.indexed_layers(), 1);
                    compare(&disk, &chain.model).await;
                }
            }
        }
    });
}

#[test]
fn a_damaged_index_beside_a_chain_is_not_used_where_it_is_damaged() {
    block_on(async {
        let chain = two_layers().await;
        let disk = chain.open(false).await;
        let WholeIndex { root, bytes } = disk.whole_index().await.unwrap().unwrap();
        let options = OpenOptions::new();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            let host = beside(&chain, &root, &bytes).any();
            compare(&Disk::open(host, &chain.name(), &options).await.unwrap(), &chain.model).await;
        }
        for length in [0, 1, bytes.len() - 1] {
            let host = beside(&chain, &root, &bytes[..length]).any();
            compare(&Disk::open(host, &chain.name(), &options).await.unwrap(), &chain.model).await;
        }
        // Of another chain, or with a root that is none.
        let other = WholeRoot { layers: 3, ..root.clone() };
        let mut none = beside(&chain, &root, &bytes);
        none.index.root = root.encode()[1..].into();
        let longer = WholeRoot { size: 2 << 20, ..root.clone() };
        let others = [other, longer].map(|root| beside(&chain, &root, &bytes));
        // Of other layers, whatever their names are.
        let mut swapped = beside(&chain, &root, &bytes);
        swapped.index.layers.reverse();
        let mut shorter = beside(&chain, &root, &bytes);
        shorter.index.layers.pop();
        for host in others.into_iter().chain([none, swapped, shorter]) {
            let disk = Disk::open(host.any(), &chain.name(), &options).await.unwrap();
            assert_eq!(disk.indexed_layers(), 0);
            compare(&disk, &chain.model).await;
        }
        let host = beside(&chain, &root, &bytes).any();
        assert_eq!(Disk::open(host, &chain.name(), &options).await.unwrap().indexed_layers(), 2);
    });
}

#[test]
fn an_index_beside_a_chain_that_leads_out_of_its_layers_is_an_error_or_not_used() {
    block_on(async {
        let chain = two_layers().await;
        let data = |layer, host| PageEntry::Data { layer, host: HostOffset::new(host) };
        let cluster = CompressedCluster { offset: HostOffset::new(512), length: 512 };
        let compressed = |layer| PageEntry::Compressed { layer, cluster };
        // Past the ends of the files; a compressed cluster of a raw image.
        for entry in [data(1, 1 << 40), data(0, 1 << 20), compressed(0)] {
            let (root, bytes) = crafted(&[entry], 2);
            let host = beside(&chain, &root, &bytes).any();
            let disk = Disk::open(host, &chain.name(), &OpenOptions::new()).await.unwrap();
            assert_eq!(disk.indexed_layers(), 2);
            disk.read(0, IoBuf::zeroed(512)).await.expect_err(&format!("{entry:?}"));
        }
        // Layers that the page, or the chain, has not.
        for (entry, folded) in [(data(1, 0), 1), (data(2, 0), 2), (data(2, 0), 3)] {
            let (root, bytes) = crafted(&[entry], folded);
            let host = beside(&chain, &root, &bytes).any();
            let disk = Disk::open(host, &chain.name(), &OpenOptions::new()).await.unwrap();
            compare(&disk, &chain.model).await;
        }
        // What it says counts where it can be.
        let (root, bytes) = crafted(&[data(0, 0)], 2);
        let host = beside(&chain, &root, &bytes).any();
        let disk = Disk::open(host, &chain.name(), &OpenOptions::new()).await.unwrap();
        assert_eq!(disk.read(0, IoBuf::zeroed(512)).await.unwrap()[..], [7; 512]);
    });
}

#[test]
fn long_chains_share_what_did_not_change() {
    let mut rng = Seed::new().rng();
    block_on(async {
        // 32 pages of 512 KiB.
        let size = 16 << 20;
        let mut chain = Chain::new(&mut rng, size);
        let new = NewDisk::new(size).cluster_size(512);
        for number in 0..150 {
            chain.add(new.clone()).await;
            chain.fill(&mut rng, 12).await;
            if number % 29 == 28 {
                assert_eq!(chain.check().await, (chain.layers.len() - 1, true));
            }
        }
        chain.add(new).await;
        let file = chain.host.contents(chain.name()).unwrap();
        let header = isobath_qcow2::Header::parse(&file[..512]).unwrap();
        let index = *header.index().unwrap();
        let bytes = index.root_offset.get() + u64::from(index.root_length) - 512;
        // A whole index takes 8 bytes a cluster.
        assert!(bytes < size / 512 * 8 / 4, "{bytes}");
        chain.assert_qemu_agrees();
    });
}

/// An index that begins without digests in the middle of a chain, until long after its chapter is closed.
#[test]
fn an_index_that_later_overlays_complete_reads_the_same() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let size = 16 << 20;
        let mut chain = Chain::new(&mut rng, size);
        let limits = IndexLimits {
            most_at_once: 0,
            most_digested: 16 << 10,
            most_folds: 3,
            most_folded: 20,
            ..IndexLimits::default()
        };
        let new = NewDisk::new(size).cluster_size(512).index_limits(limits);
        for number in 0..100 {
            chain.add(new.clone().index(number > 25)).await;
            chain.fill(&mut rng, 12).await;
            if number % 13 == 12 && number > 25 {
                assert_eq!(chain.check().await, (chain.layers.len() - 1, true));
            }
        }
        let copy = MemoryHost::new();
        for name in chain.host.names() {
            copy.insert(&name, &[0]);
            copy.insert(&name, &chain.host.contents(&name).unwrap());
        }
        chain.host = copy;
        assert_eq!(chain.check().await, (chain.layers.len() - 1, true));
    });
}

#[test]
fn a_changed_layer_is_noticed_and_the_index_below_it_serves() {
    let mut rng = Seed::new().rng();
    for _ in 0..20 {
        block_on(async {
            let size = 256 << 10;
            let mut chain = Chain::new(&mut rng, size);
            for _ in 0..6 {
                let new = NewDisk::new(size).cluster_size(4096);
                chain.add(new.index_limits(random_limits(&mut rng))).await;
                chain.fill(&mut rng, 8).await;
            }
            let count = chain.layers.len();
            assert_eq!(chain.check().await, (count - 1, true));
            // Somebody writes to a layer below, behind everybody's back.
            let changed = rng.random_range(1..count - 1);
            let name = PathBuf::from(&chain.layers[changed].0);
            let options = OpenOptions::new().writable(true);
            let disk = Disk::open(chain.host.any(), &name, &options).await.unwrap();
            for cluster in 0..size / 4096 {
                if rng.random() {
                    disk.write(cluster * 4096, IoBuf::copy_of(&[7; 4096])).await.unwrap();
                }
            }
            disk.close().await.unwrap();
            drop(disk);
            let directory = export(&chain.host);
            let image = directory.path().join(chain.name());
            chain.model = Model::from_bytes(&qemu::read_disk(&image, "qcow2"));
            let (indexed, own) = chain.check().await;
            assert!(indexed <= changed && !own, "{indexed}");
            chain.write_index().await;
            assert_eq!(chain.check().await, (count - 1, true));
        });
    }
}

#[test]
fn copied_layers_keep_their_index() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let size = 1 << 20;
        let mut chain = Chain::new(&mut rng, size);
        for _ in 0..5 {
            chain.add(random_disk(&mut rng, size)).await;
            chain.fill(&mut rng, 8).await;
        }
        chain.add(NewDisk::new(size)).await;
        // Other files with the same bytes: their stamps say nothing.
        let copy = MemoryHost::new();
        for name in chain.host.names() {
            copy.insert(&name, &[0]);
            copy.insert(&name, &chain.host.contents(&name).unwrap());
        }
        chain.host = copy;
        assert_eq!(chain.check().await, (chain.layers.len() - 1, true));
    });
}

#[test]
fn a_flipped_bit_anywhere_in_the_index_changes_no_byte() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let size = 1 << 20;
        let mut chain = Chain::new(&mut rng, size);
        for number in 0..40 {
            let cluster_size = 4096;
            let new = NewDisk::new(size).cluster_size(cluster_size);
            chain.add(new.index(number > 20)).await;
            chain.fill(&mut rng, 10).await;
        }
        let name = chain.name();
        chain.write_index().await;
        let good = chain.host.contents(&name).unwrap();
        let index: IndexExtension =
            *isobath_qcow2::Header::parse(&good[..4096]).unwrap().index().unwrap();
        let (start, length) = (index.area_offset.get(), index.area_length);
        let end = index.root_offset.get() + u64::from(index.root_length);
        let mut refused = 0;
        for step in 0..300 {
            let at = if step % 5 == 0 {
                rng.random_range(104..4096)
            } else {
                rng.random_range(start..(start + length).min(end))
            };
            let mut bad = good.clone();
            bad[at as usize] ^= 1 << rng.random_range(0..8);
            chain.host.insert(&name, &bad);
            let options = OpenOptions::default();
            // The rest of the header may become one that is refused.
            let opened = Disk::open(chain.host.any(), &name, &options).await;
            match opened {
                Ok(disk) => {
                    compare(&disk, &chain.model).await;
                    let noticed = match disk.verify_index(|_| {}).await {
                        Ok(Ok(differ)) => !differ.is_empty(),
                        _ => true,
                    };
                    let in_index = at >= start;
                    assert!(noticed || !in_index, "the flip at {at} was not noticed");
                    refused += u32::from(noticed);
                }
                Err(_) => assert!(step % 5 == 0, "refused by a bit at {at}"),
            }
        }
        assert!(refused > 200, "only {refused} of the flips were noticed");
    });
}

/// A crash while an index is written or removed: the disk is as it was, and so is its order.
#[test]
fn a_crash_leaves_the_disk_and_a_whole_index_or_none() {
    let mut rng = Seed::new().rng();
    for _ in 0..12 {
        block_on(async {
            let size = rng.random_range(100..2048) * 512;
            let mut chain = Chain::new(&mut rng, size);
            for _ in 0..3 {
                let new = random_disk(&mut rng, size);
                let cluster_size = new.cluster_size.max(1024);
                chain.add(new.cluster_size(cluster_size)).await;
                chain.fill(&mut rng, 8).await;
            }
            let host = RecorderHost::new(chain.host.deep_copy());
            let record = host.record();
            let options = OpenOptions::new().writable(true);
            let disk = Disk::open(host.any(), &chain.name(), &options).await.unwrap();
            disk.write_index(|_| {}).await.unwrap();
            if rng.random() {
                disk.drop_index().await.unwrap();
                if rng.random() {
                    disk.write_index(|_| {}).await.unwrap();
                }
            }
            drop(disk);
            for _ in 0..12 {
                let keep: f64 = rng.random();
                let end = rng.random_range(0..=record.len());
                let fate = random_fates(&mut rng, keep);
                let left = record.replay(&chain.host, end, fate).await.unwrap();
                assert_consistent(&left, chain.name());
                let disk = Disk::open(left.any(), &chain.name(), &options).await.unwrap();
                compare(&disk, &chain.model).await;
                if let Ok(Ok(differ)) = disk.verify_index(|_| {}).await {
                    assert_eq!(differ, []);
                }
                disk.write_index(|_| {}).await.unwrap();
                assert_eq!(disk.verify_index(|_| {}).await.unwrap(), Ok(Vec::new()));
                disk.close().await.unwrap();
            }
        });
    }
}

/// Writes after an index was written stay out of it, and what is written into the freed place of
/// one is not lost.
#[test]
fn writes_keep_off_the_index() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let size = 4 << 20;
        let mut chain = Chain::new(&mut rng, size);
        for _ in 0..4 {
            let new = NewDisk::new(size).cluster_size(4096);
            chain.add(new).await;
            chain.fill(&mut rng, 40).await;
        }
        for _ in 0..6 {
            chain.fill(&mut rng, 60).await;
            assert!(chain.check().await.1);
            chain.write_index().await;
            chain.fill(&mut rng, 60).await;
            chain.assert_qemu_agrees();
        }
    });
}

/// While the layer below is in use, it may still change: the index leaves it out.
#[test]
fn an_overlay_of_an_image_in_use_describes_what_is_below_that() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let size = 1 << 20;
        let mut chain = Chain::new(&mut rng, size);
        for _ in 0..3 {
            chain.add(NewDisk::new(size)).await;
            chain.fill(&mut rng, 20).await;
        }
        for _ in 0..20 {
            let count = chain.layers.len();
            let running = chain.open(true).await;
            chain.add(NewDisk::new(size)).await;
            let bytes = IoBuf::copy_of(&vec![rng.random(); 70_000]);
            let offset = rng.random_range(0..size - 70_000);
            chain.model.write(offset, &bytes);
            running.write(offset, bytes).await.unwrap();
            running.close().await.unwrap();
            drop(running);
            assert_eq!(chain.check().await, (count - 1, true));
        }
    });
}

#[test]
fn an_index_that_lies_about_its_area_costs_nothing() {
    let mut rng = Seed::new().rng();
    block_on(async {
        let size = 1 << 20;
        let mut chain = Chain::new(&mut rng, size);
        for _ in 0..2 {
            chain.add(NewDisk::new(size)).await;
            chain.fill(&mut rng, 5).await;
        }
        let name = chain.name();
        let good = chain.host.contents(&name).unwrap();
        let header = &good[..65536];
        let parsed = isobath_qcow2::Header::parse(header).unwrap();
        let index = *parsed.index().unwrap();
        for (area_offset, area_length) in [(1 << 16, 1 << 55), (0, 1 << 20), (1 << 16, 3 << 16)] {
            let lie = IndexExtension {
                area_offset: isobath_qcow2::HostOffset::new(area_offset),
                area_length,
                ..index
            };
            let mut lying = good.clone();
            for (at, bytes) in isobath_qcow2::Header::edit_index(header, Some(&lie)).unwrap() {
                lying[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            chain.host.insert(&name, &lying);
            chain.check().await;
        }
        chain.fill(&mut rng, 30).await;
        chain.check().await;
        chain.assert_qemu_agrees();
    });
}
