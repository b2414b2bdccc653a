//! The initial images of histories.

use crate::content::Content;
use crate::executor::run;
use crate::host::{Conduct, SimHost};
use crate::look::look;
use crate::record::Files;
use crate::value::{Sort, Value};
use isobath_disk::{
    CheckEvent, CheckOptions, Disk, MetadataMode, NewDisk, OpenOptions, Repair, ZeroFlags, check,
    create,
};
use isobath_qcow2::{CompressionType, Header, HostOffset, Snapshot};
use isobath_storage::IoBuf;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The active image's file.
pub const IMAGE: &str = "disk.qcow2";
/// Its external data file.
const DATA: &str = "data.raw";

/// The kind of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// An image without a backing file.
    Plain,
    /// An overlay of a raw image.
    Overlay,
    /// An overlay of a chain of qcow2 images.
    Chain,
    /// An image with an internal snapshot.
    Snapshot,
    /// An image with compressed clusters; compressed writes.
    Compressed,
    /// Extended L2 entries.
    Subclusters,
    /// An external data file.
    DataFile,
    /// Refcounts of 1 to 64 bits; small clusters, so that their structure grows.
    Refcounts,
    /// An image that was not closed, with lazy refcounts.
    Lazy,
    /// Version 2.
    Version2,
    /// Changes of the disk's size.
    Resize,
    /// Direct-access indexes, written and dropped.
    Index,
    /// Patterns that test a journal: appends, overwrites and discards, each flushed.
    Flushes,
    /// Patterns that test embedded mappings: writes around lead blocks, and contents that look like the engine's own.
    Embedded,
    /// An external data file that is a raw image of the disk.
    RawDataFile,
    /// Clusters of 128 KiB to 2 MiB; disks of several MiB, or so large that they have several L2 tables.
    LargeClusters,
    /// Images of one kind and requests of another.
    Combined,
}

/// All kinds.
pub const KINDS: [Kind; 17] = [
    Kind::Plain,
    Kind::Overlay,
    Kind::Chain,
    Kind::Snapshot,
    Kind::Compressed,
    Kind::Subclusters,
    Kind::DataFile,
    Kind::Refcounts,
    Kind::Lazy,
    Kind::Version2,
    Kind::Resize,
    Kind::Index,
    Kind::Flushes,
    Kind::Embedded,
    Kind::RawDataFile,
    Kind::LargeClusters,
    Kind::Combined,
];

/// So many of the first kinds are equally likely. The others take the place of some of them: see [`Kind::instead`].
pub const COMMON: usize = 14;

/// The kinds of images that are combined with requests of another kind.
const IMAGES: [Kind; 9] = [
    Kind::Overlay,
    Kind::Chain,
    Kind::Snapshot,
    Kind::Compressed,
    Kind::Subclusters,
    Kind::DataFile,
    Kind::RawDataFile,
    Kind::Refcounts,
    Kind::Lazy,
];

/// The kinds of requests that are combined with images of another kind.
const REQUESTS: [Kind; 5] =
    [Kind::Compressed, Kind::Resize, Kind::Index, Kind::Flushes, Kind::Embedded];

impl Kind {
    /// The kind that a history with this seed has instead of a common one, if any. The draw is separate, so that other
    /// histories stay as they are. Large clusters take many times as long as others.
    pub fn instead(seed: u64) -> Option<Self> {
        let mut rng = SmallRng::seed_from_u64(seed ^ 0x1115_7EAD);
        match rng.random_range(0..128) {
            0..10 => Some(Self::RawDataFile),
            10..20 => Some(Self::Combined),
            20 => Some(Self::LargeClusters),
            _ => None,
        }
    }

    /// The kinds of a history's image and of its requests.
    pub fn parts(self, rng: &mut SmallRng) -> (Self, Self) {
        if self != Self::Combined {
            return (self, self);
        }
        let large = rng.random_bool(0.03);
        let image = IMAGES[rng.random_range(0..IMAGES.len())];
        let requests = REQUESTS[rng.random_range(0..REQUESTS.len())];
        if !large {
            return (image, requests);
        }
        // Twelve clusters at once would be too much.
        let requests = if requests == Self::Embedded { Self::Flushes } else { requests };
        (Self::LargeClusters, requests)
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Overlay => "overlay",
            Self::Chain => "chain",
            Self::Snapshot => "snapshot",
            Self::Compressed => "compressed",
            Self::Subclusters => "subclusters",
            Self::DataFile => "data-file",
            Self::Refcounts => "refcounts",
            Self::Lazy => "lazy",
            Self::Version2 => "version-2",
            Self::Resize => "resize",
            Self::Index => "index",
            Self::Flushes => "flushes",
            Self::Embedded => "embedded",
            Self::RawDataFile => "raw-data-file",
            Self::LargeClusters => "large-clusters",
            Self::Combined => "combined",
        }
    }

    /// The qcow2 version of its images.
    pub const fn version(self) -> u32 {
        if matches!(self, Self::Version2) { 2 } else { 3 }
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        KINDS.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An internal snapshot.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Where its L1 table is.
    pub l1_offset: u64,
    /// The number of its entries.
    pub l1_size: u32,
    /// The disk's contents at that time.
    pub content: Arc<Content>,
}

/// The initial state of a history.
#[derive(Clone, Debug)]
pub struct Start {
    /// Every file.
    pub files: Files,
    /// The active image's.
    pub image: PathBuf,
    /// What the disk holds.
    pub content: Arc<Content>,
    /// The options with which the image was created.
    pub new: NewDisk,
    /// Its internal snapshot.
    pub snapshot: Option<Kept>,
    /// The dirty bit is set.
    pub dirty: bool,
}

impl Start {
    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.content.len()
    }

    /// Whether discarded clusters read as zeroes.
    pub fn discards(&self) -> bool {
        self.new.version > 2 || self.new.backing_file.is_none()
    }

    /// Whether clusters can be compressed.
    pub fn compresses(&self) -> bool {
        self.new.data_file.is_none()
    }

    /// A short description.
    pub fn describe(&self) -> String {
        let new = &self.new;
        let mut text = format!(
            "{} bytes, clusters of {}, version {}, refcounts of {} bits",
            self.size(),
            new.cluster_size,
            new.version,
            new.refcount_bits
        );
        for (on, what) in [
            (new.extended_l2, ", extended L2"),
            (new.lazy_refcounts, ", lazy refcounts"),
            (self.dirty, ", dirty"),
            (new.data_file.is_some() && !new.data_file_raw, ", data file"),
            (new.data_file_raw, ", raw data file"),
            (new.backing_file.is_some(), ", backing file"),
            (self.snapshot.is_some(), ", internal snapshot"),
        ] {
            if on {
                text.push_str(what);
            }
        }
        text
    }
}

fn shape(kind: Kind, small: bool, rng: &mut SmallRng) -> NewDisk {
    let bits = match kind {
        Kind::Subclusters => [14, 14, 15, 16][rng.random_range(0..4)],
        Kind::Refcounts => 9,
        Kind::Embedded if small => [12, 12, 13][rng.random_range(0..3)],
        Kind::Embedded => [12, 12, 12, 13, 14, 16][rng.random_range(0..6)],
        Kind::LargeClusters if small => 17,
        Kind::LargeClusters => [17, 17, 17, 18, 18, 19, 20, 21][rng.random_range(0..8)],
        _ if small => [9, 9, 12][rng.random_range(0..3)],
        _ => [9, 9, 9, 10, 11, 12, 12, 13, 14, 16][rng.random_range(0..10)],
    };
    let cluster_size = 1_u64 << bits;
    let version = kind.version();
    let (least, most) = match kind {
        // Only little of it is in use.
        Kind::LargeClusters if !small && rng.random_bool(0.2) => (9 << 20, 16 << 30),
        Kind::LargeClusters => (cluster_size * 4, 8 << 20),
        _ => ((cluster_size * 4).max(16 << 10), (1 << 20_u64).min(cluster_size * 256)),
    };
    // Mostly small, so that small sizes are tried more often.
    let more = rng.random_range(0..=most.saturating_sub(least)) >> rng.random_range(0..4);
    let size = least + if small { more.min(16 << 10) } else { more };
    let any_width = 1 << rng.random_range(0..=6);
    let refcount_bits = match kind {
        _ if version == 2 => 16,
        Kind::Snapshot => any_width.max(4),
        Kind::Refcounts | Kind::LargeClusters => any_width,
        _ if rng.random_bool(0.3) => any_width,
        _ => 16,
    };
    let zstd = version > 2 && rng.random_bool(0.3);
    let mut new = NewDisk::new(size / 512 * 512)
        .cluster_size(cluster_size)
        .version(version)
        .refcount_bits(refcount_bits)
        .extended_l2(
            kind == Kind::Subclusters
                || (version > 2 && bits >= 14 && kind != Kind::Embedded && rng.random_bool(0.3)),
        )
        .compression_type(if zstd { CompressionType::Zstd } else { CompressionType::Zlib })
        .lazy_refcounts(kind == Kind::Lazy)
        .index(kind == Kind::Index && rng.random());
    match kind {
        Kind::DataFile => new = new.data_file(DATA),
        Kind::RawDataFile => new = new.data_file(DATA).data_file_raw(true),
        Kind::LargeClusters if rng.random_bool(0.3) => {
            new = new.data_file(DATA).data_file_raw(rng.random());
        }
        _ => {}
    }
    new
}

/// The most bytes that are put into an image at once.
const MOST_FILLED: u64 = 1 << 20;

/// Puts something into an image: patterns from number `first` on.
pub(crate) async fn fill(
    host: &SimHost,
    name: &str,
    first: u32,
    compressed: bool,
    rng: &mut SmallRng,
) -> isobath_disk::Result<()> {
    let metadata = MetadataMode::Ordered;
    let options = OpenOptions::new().writable(true).metadata(metadata);
    let disk = Disk::open(host.any(), Path::new(name), &options).await?;
    let size = disk.size();
    let cluster = 1 << disk.layers().next().and_then(|l| l.header()).map_or(16, |h| h.cluster_bits);
    for number in 0..rng.random_range(0..8) {
        let sort = [Sort::Plain, Sort::Plain, Sort::Random, Sort::Text][rng.random_range(0..4)];
        let value = Value::Pattern(sort, first + number);
        let offset = rng.random_range(0..size) / 512 * 512;
        let most = (cluster * 6).min(MOST_FILLED);
        let length = (rng.random_range(1..=most) / 512 * 512 + 512).min(size - offset);
        match rng.random_range(0..10) {
            0 => disk.write_zeroes(offset, length, ZeroFlags::default()).await?,
            1 => disk.discard(offset, length).await?,
            draw if compressed && draw < 6 => {
                let start = offset / cluster * cluster;
                for at in (start..(start + 3 * cluster).min(size)).step_by(cluster as usize) {
                    let bytes = value.bytes(at..(at + cluster).min(size));
                    disk.write_compressed(at, IoBuf::copy_of(&bytes)).await?;
                }
            }
            _ => {
                let bytes = value.bytes(offset..offset + length);
                disk.write(offset, IoBuf::copy_of(&bytes)).await?;
            }
        }
    }
    disk.close().await
}

async fn content(host: &SimHost, name: &str) -> isobath_disk::Result<Arc<Content>> {
    let disk = Disk::open(host.any(), Path::new(name), &OpenOptions::default()).await?;
    // All of a raw data file is data, of which only parts are read if it is large.
    let interest: Vec<_> = host.contents(DATA).data().collect();
    Ok(Arc::new(look(&disk, &interest).await?.content))
}

/// The most bytes below the active image, about.
const MOST_BELOW: u64 = 4 << 20;

/// Makes the layers below the active image.
async fn layers(
    host: &SimHost,
    kind: Kind,
    new: &mut NewDisk,
    rng: &mut SmallRng,
) -> isobath_disk::Result<()> {
    let (raw, depth) = match kind {
        // A raw data file would not hold what is below.
        _ if new.data_file_raw => (false, 0),
        Kind::Overlay => (true, 0),
        Kind::Chain | Kind::Index => (rng.random(), rng.random_range(1..=3)),
        Kind::Embedded => (rng.random_bool(0.4), u32::from(rng.random_bool(0.4))),
        Kind::Plain | Kind::Refcounts | Kind::Lazy | Kind::Flushes => (false, 0),
        _ => (rng.random_bool(0.3), u32::from(rng.random_bool(0.3))),
    };
    let size = new.size.unwrap_or(0).min(MOST_BELOW);
    // A backing file is as long as the disk, or shorter, or longer.
    let length = |rng: &mut SmallRng| match rng.random_range(0..3) {
        0 => size,
        1 => rng.random_range(1..=size / 512) * 512,
        _ => size + rng.random_range(1..64) * 512,
    };
    if raw {
        let length = length(rng);
        let bytes = Value::Pattern(Sort::Plain, 1).bytes(0..length);
        host.insert("base.raw", Content::from(&bytes[..]));
        new.backing_file = Some("base.raw".into());
        new.backing_format = Some("raw".into());
    }
    for layer in 0..depth {
        let name = format!("layer{layer}.qcow2");
        let mut image =
            NewDisk::new(length(rng)).cluster_size(1 << rng.random_range(9..=13)).index(false);
        image.backing_file = new.backing_file.take();
        image.backing_format = new.backing_format.take();
        create(&host.any(), Path::new(&name), &image).await?;
        fill(host, &name, 10 * (layer + 1), true, rng).await?;
        new.backing_file = Some(name);
        new.backing_format = Some("qcow2".into());
    }
    Ok(())
}

/// Adds an internal snapshot of the disk.
async fn take_snapshot(host: &SimHost) -> Result<Kept, String> {
    let shown = |error: &dyn fmt::Display| format!("the internal snapshot: {error}");
    let content = content(host, IMAGE).await.map_err(|error| shown(&error))?;
    let mut bytes = host.contents(IMAGE).to_vec();
    let mut header = Header::parse(&bytes).map_err(|error| shown(&error))?;
    let cluster = 1 << header.cluster_bits;
    bytes.resize(bytes.len().next_multiple_of(cluster), 0);
    let l1_offset = bytes.len() as u64;
    let start = header.l1_table_offset.get() as usize;
    let mut l1 = bytes[start..start + header.l1_size as usize * 8].to_vec();
    for entry in l1.chunks_exact_mut(8) {
        entry[0] &= 0x7f;
    }
    bytes.extend(l1);
    bytes.resize(bytes.len().next_multiple_of(cluster), 0);
    let snapshot = Snapshot {
        l1_table_offset: HostOffset::new(l1_offset),
        l1_size: header.l1_size,
        id: b"1".to_vec(),
        name: b"kept".to_vec(),
        date_sec: 0,
        date_nsec: 0,
        vm_clock_nsec: 0,
        vm_state_size: 0,
        disk_size: Some(header.size),
        icount: None,
        unknown_extra: Vec::new(),
    };
    header.snapshots_offset = HostOffset::new(bytes.len() as u64);
    header.nb_snapshots = 1;
    bytes.extend(Snapshot::encode_table(&[snapshot]).map_err(|error| shown(&error))?);
    bytes.resize(bytes.len().next_multiple_of(cluster), 0);
    let first = header.encode().map_err(|error| shown(&error))?;
    bytes[..first.len()].copy_from_slice(&first);
    host.insert(IMAGE, Content::from(&bytes[..]));
    // The new references are counted by a repair.
    repair(host).await?;
    Ok(Kept { l1_offset, l1_size: header.l1_size, content })
}

async fn repair(host: &SimHost) -> Result<(), String> {
    let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
    let mut findings = String::new();
    let mut events = |event: CheckEvent<'_>| {
        if let CheckEvent::Finding(text) = event {
            findings += "\n    ";
            findings += text;
        }
    };
    let report = check(&host.any(), Path::new(IMAGE), &options, &mut events)
        .await
        .map_err(|error| format!("the first image: {error}"))?;
    if report.is_clean() {
        return Ok(());
    }
    Err(format!("the first image is not repaired: {report:?}{findings}"))
}

/// Creates the initial state for a history of a kind, with a small disk if `small` is set.
///
/// # Errors
/// The engine cannot make it.
pub fn make(kind: Kind, small: bool, rng: &mut SmallRng) -> Result<Start, String> {
    run(make_image(kind, small, rng))?.map_err(|error| format!("while the image was made: {error}"))
}

async fn make_image(kind: Kind, small: bool, rng: &mut SmallRng) -> Result<Start, String> {
    let host = SimHost::new(Files::new(), Conduct::default());
    let shown = |error: isobath_disk::DiskError| error.to_string();
    let mut new = shape(kind, small, rng);
    if kind == Kind::Snapshot {
        // The snapshot refers once more to host clusters that compressed data shares.
        new.refcount_bits = new.refcount_bits.max(8);
    }
    layers(&host, kind, &mut new, rng).await.map_err(shown)?;
    create(&host.any(), Path::new(IMAGE), &new).await.map_err(shown)?;
    let compressed = kind == Kind::Compressed || new.data_file.is_none() && rng.random_bool(0.2);
    fill(&host, IMAGE, 50, compressed, rng).await.map_err(shown)?;
    let mut snapshot = None;
    if kind == Kind::Snapshot {
        snapshot = Some(take_snapshot(&host).await?);
        if rng.random() {
            fill(&host, IMAGE, 60, compressed, rng).await.map_err(shown)?;
        }
    }
    let content = content(&host, IMAGE).await.map_err(shown)?;
    let dirty = kind == Kind::Lazy && rng.random_bool(0.7);
    if dirty {
        let mut bytes = host.contents(IMAGE).to_vec();
        spoil(&mut bytes, rng)?;
        host.insert(IMAGE, Content::from(&bytes[..]));
    }
    Ok(Start { files: host.files(), image: IMAGE.into(), content, new, snapshot, dirty })
}

/// Sets the dirty bit, and makes some refcounts wrong as lazy ones may be: those of the first block, from the clusters
/// after the tables on.
fn spoil(bytes: &mut [u8], rng: &mut SmallRng) -> Result<(), String> {
    let header = Header::parse(bytes).map_err(|error| error.to_string())?;
    bytes[79] |= 1;
    let table = header.refcount_table_offset.get() as usize;
    let block = bytes.get(table..table + 8).and_then(|entry| entry.first_chunk::<8>());
    let block = block.map_or(0, |entry| u64::from_be_bytes(*entry)) as usize;
    let clusters = bytes.len() >> header.cluster_bits;
    let first = (header.l1_table_offset.get() >> header.cluster_bits) as usize + 1;
    let bits = 1_usize << header.refcount_order;
    for cluster in first.min(clusters)..clusters {
        if rng.random_bool(0.5) {
            for bit in cluster * bits..(cluster + 1) * bits {
                if bit / 8 < 1 << header.cluster_bits {
                    bytes[block + bit / 8] &= !(1 << (bit % 8));
                }
            }
        }
    }
    Ok(())
}

/// The files of a disk with the contents of the snapshot of `image`: the header refers to the snapshot's tables.
pub fn show_snapshot(files: &Files, image: &Path, kept: &Kept) -> Files {
    files
        .iter()
        .map(|(name, content)| {
            if name != image {
                return (name.clone(), content.clone());
            }
            let mut content = (**content).clone();
            content.write(24, &kept.content.len().to_be_bytes());
            content.write(36, &kept.l1_size.to_be_bytes());
            content.write(40, &kept.l1_offset.to_be_bytes());
            (name.clone(), Arc::new(content))
        })
        .collect()
}
