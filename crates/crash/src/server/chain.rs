//! The initial images of a server: layers that have much in common, as snapshots do.

use super::bitmaps;
use super::kind::Kind;
use crate::content::Content;
use crate::executor::run;
use crate::host::{Conduct, SimHost};
use crate::image::{IMAGE, Start};
use crate::look::look;
use crate::mode::Mode;
use crate::record::{Files, file};
use crate::recover::{header_of, leaks};
use crate::value::{Sort, Value};
use isobath_disk::{Disk, ImageFormat, MetadataMode, NewDisk, OpenOptions, ZeroFlags, create};
use isobath_qcow2::{Header, IncompatibleFeatures};
use isobath_storage::IoBuf;
use rand::RngExt;
use rand::rngs::SmallRng;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An image of the chain, and its contents together with those below it.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its file.
    pub name: PathBuf,
    /// Its contents.
    pub content: Arc<Content>,
    /// The files that it needs, including its own.
    pub needs: Vec<PathBuf>,
    /// Clusters leaked in it, since it was not closed.
    pub leaked: u64,
}

/// The initial state of a server.
#[derive(Clone, Debug)]
pub struct Begin {
    /// The disk.
    pub start: Start,
    /// All images, from the base up; the last is the active one.
    pub images: Vec<Image>,
    /// The raw image at the end of the chain, if there is one. A guest may copy a header into it.
    pub raw: Option<PathBuf>,
    /// Bytes at the disk's start that always exist.
    pub busy: u64,
    /// Whether files are block devices.
    pub fixed: bool,
    /// Whether there are bitmaps.
    pub bitmaps: bool,
    /// In a few words.
    pub text: String,
}

impl Begin {
    /// The header of an image that is not raw.
    pub fn header(&self, files: &Files, image: &Path) -> Option<Header> {
        if self.raw.as_deref() == Some(image) {
            return None;
        }
        file(files, image).and_then(header_of)
    }

    /// Whether an image that is not raw has this bit.
    pub(super) fn has_bit(&self, files: &Files, image: &Path, bit: IncompatibleFeatures) -> bool {
        self.header(files, image).is_some_and(|header| header.incompatible.contains(bit))
    }

    /// The format to open an image with, as a chain names it.
    pub fn format(&self, image: &Path) -> Option<ImageFormat> {
        (self.raw.as_deref() == Some(image)).then_some(ImageFormat::Raw)
    }
}

/// The raw image below the others.
const RAW: &str = "base.raw";

/// The common properties of layers.
struct Shape {
    new: NewDisk,
    /// Layers below the active one.
    below: usize,
    raw: bool,
    /// Layers are made alike, with different data.
    twins: bool,
    /// The share of compressed clusters.
    compressed: f64,
    bitmaps: bool,
    /// The share of images below that were not closed: their journals contain changes that their files do not.
    unclosed: f64,
    /// The length of each file, if it is a block device.
    device: Option<u64>,
}

fn shape(kind: Kind, version: u32, rng: &mut SmallRng) -> Shape {
    let large = kind == Kind::Large;
    let bits = match kind {
        Kind::Large => [9, 12, 16, 16, 18, 20, 21][rng.random_range(0..7)],
        Kind::Deep => [9, 9, 12, 16][rng.random_range(0..4)],
        _ => [9, 9, 9, 10, 11, 12, 12, 13, 14, 16][rng.random_range(0..10)],
    };
    let cluster_size = 1_u64 << bits;
    let size = if large {
        // Only little of it is in use.
        let most = 64_u64 << 30;
        (most >> rng.random_range(0..14)).min(cluster_size << 21).max(cluster_size * 8)
    } else {
        let most = (1 << 20_u64).min(cluster_size * 256);
        let least = (cluster_size * 8).max(16 << 10);
        let more = rng.random_range(0..=most.saturating_sub(least)) >> rng.random_range(0..4);
        (least + more) / 512 * 512
    };
    let data_files = kind == Kind::DataFiles;
    let version = if version < 3 && rng.random_bool(0.05) && !data_files { 2 } else { 3 };
    let twins =
        kind == Kind::Twins || rng.random_bool(if kind == Kind::Commits { 0.2 } else { 0.4 });
    let compressed = match kind {
        Kind::Twins => 0.5,
        // A data file has none.
        Kind::DataFiles => 0.0,
        _ if rng.random_bool(0.3) => 0.3,
        _ => 0.0,
    };
    let below = match kind {
        Kind::Deep => [20, 40, 80, 199][rng.random_range(0..4)],
        Kind::Snapshots => rng.random_range(0..=2),
        Kind::DataFiles => [0, 0, 1, 1, 2, 3][rng.random_range(0..6)],
        Kind::Commits => rng.random_range(3..=6),
        Kind::Reflinks => rng.random_range(2..=4),
        _ => rng.random_range(1..=4),
    };
    let fixed = kind == Kind::Devices;
    let bitmaps = version > 2
        && match kind {
            Kind::Bitmaps => true,
            Kind::Reflinks => rng.random_bool(0.3),
            _ => rng.random_bool(0.1),
        };
    Shape {
        new: NewDisk::new(size)
            .cluster_size(cluster_size)
            .version(version)
            .refcount_bits(if version > 2 && rng.random_bool(0.2) {
                1 << rng.random_range(0..=6)
            } else {
                16
            })
            .extended_l2(version > 2 && bits >= 14 && rng.random_bool(0.3))
            .index(rng.random_bool(0.3)),
        below,
        raw: !fixed && !large && rng.random_bool(0.25) && (!data_files || below > 0),
        twins,
        compressed,
        bitmaps,
        unclosed: match kind {
            _ if version < 3 || bitmaps || fixed => 0.0,
            Kind::Reflinks => 0.8,
            _ => 0.1,
        },
        device: fixed.then(|| {
            let needed = if rng.random_bool(0.3) {
                // Not enough for all requests.
                size / 2 + cluster_size * 20
            } else {
                size * 2 + cluster_size * 40 + (384 << 10)
            };
            needed.next_multiple_of(cluster_size) + rng.random_range(0..8) * cluster_size
        }),
    }
}

/// A step of filling an image.
#[derive(Clone, Copy)]
enum Step {
    Write(u64, u64, Sort),
    Compressed(u64, u64, Sort),
    Zero(u64, u64),
    Discard(u64, u64),
}

fn step(size: u64, cluster: u64, compressed: f64, rng: &mut SmallRng) -> Step {
    let sort = [Sort::Plain, Sort::Plain, Sort::Text, Sort::Random][rng.random_range(0..4)];
    // Mostly where the guest will be busy too.
    let most = if rng.random_bool(0.7) { size.min(cluster * 12) } else { size };
    let offset = rng.random_range(0..most) / 512 * 512;
    let longest = (cluster * 4).min(512 << 10);
    let length = (rng.random_range(1..=longest) / 512 * 512 + 512).min(size - offset);
    if rng.random_bool(compressed) {
        let start = offset / cluster * cluster;
        // Incompressible data is not stored compressed.
        let sort = if sort == Sort::Random { Sort::Text } else { sort };
        return Step::Compressed(start, cluster.min(size - start), sort);
    }
    match rng.random_range(0..12) {
        0 => Step::Zero(offset, length),
        1 => Step::Discard(offset, length),
        2..7 => {
            let start = offset / cluster * cluster;
            Step::Write(start, cluster.min(size - start), sort)
        }
        _ => Step::Write(offset, length, sort),
    }
}

/// The same steps, some of them followed by a small write over a part of theirs, which a journal may keep.
fn overwritten(steps: &[Step], rng: &mut SmallRng) -> Vec<Step> {
    let mut more = Vec::new();
    for step in steps {
        more.push(*step);
        if let Step::Write(offset, length, sort) = *step
            && length >= 512
            && rng.random_bool(0.5)
        {
            let at = offset + rng.random_range(0..length / 512) * 512;
            more.push(Step::Write(at, 512, sort));
        }
    }
    more
}

/// Sizes of journals that stay in use: they have the last changes, or mostly all. No record fits into the smallest
/// possible one.
const JOURNALS: [u64; 2] = [64 << 10, 128 << 10];

/// Fills an image, and closes it, or leaves its journal of this size in use.
async fn fill(
    host: &SimHost,
    name: &Path,
    steps: &[Step],
    first: u32,
    journal: Option<u64>,
) -> isobath_disk::Result<()> {
    let metadata = if journal.is_some() { MetadataMode::Journal } else { MetadataMode::Ordered };
    let options = OpenOptions::new().writable(true).metadata(metadata);
    let options = options.journal_size(journal.unwrap_or(0));
    let disk = Disk::open(host.any(), name, &options).await?;
    let size = disk.size();
    for (number, step) in (first..).zip(steps) {
        let bytes = |offset: u64, length: u64, sort| {
            IoBuf::from(Value::Pattern(sort, number).bytes(offset..offset + length))
        };
        let fits = |offset: u64, length: u64| offset + length <= size;
        match *step {
            Step::Write(offset, length, sort) if fits(offset, length) => {
                disk.write(offset, bytes(offset, length, sort)).await?;
            }
            Step::Compressed(offset, length, sort) if fits(offset, length) => {
                disk.write_compressed(offset, bytes(offset, length, sort)).await?;
            }
            Step::Zero(offset, length) if fits(offset, length) => {
                disk.write_zeroes(offset, length, ZeroFlags::default()).await?;
            }
            Step::Discard(offset, length) if fits(offset, length) => {
                disk.discard(offset, length).await?;
            }
            _ => {}
        }
        if journal.is_some() {
            disk.flush().await?;
        }
    }
    if journal.is_some() { Ok(()) } else { disk.close().await }
}

/// An image's contents.
pub(super) async fn content(host: &SimHost, name: &Path) -> isobath_disk::Result<Arc<Content>> {
    let disk = Disk::open(host.any(), name, &OpenOptions::default()).await?;
    Ok(Arc::new(look(&disk, &[]).await?.content))
}

/// The same new image with an external data file: a raw image of the disk in half of the cases, if nothing is below.
pub(super) fn with_data_file(new: NewDisk, image: &Path, rng: &mut SmallRng) -> NewDisk {
    let raw = new.backing_file.is_none() && rng.random();
    new.data_file(data_file(image).display().to_string()).data_file_raw(raw)
}

/// The name of an image's data file.
pub(super) fn data_file(image: &Path) -> PathBuf {
    image.with_extension("data")
}

/// Makes the images for a history of a kind.
///
/// # Errors
/// The engine cannot make them.
pub fn make(kind: Kind, mode: &Mode, rng: &mut SmallRng) -> Result<Begin, String> {
    run(make_chain(kind, mode, rng))?.map_err(|error| format!("while images were made: {error}"))
}

async fn make_chain(kind: Kind, mode: &Mode, rng: &mut SmallRng) -> Result<Begin, String> {
    let shown = |error: isobath_disk::DiskError| error.to_string();
    let host = SimHost::new(Files::new(), Conduct::default());
    let shape = shape(kind, mode.version, rng);
    let size = shape.new.size.unwrap_or(0);
    let cluster = shape.new.cluster_size;
    let mut images: Vec<Image> = Vec::new();
    let mut new = shape.new.clone();
    let mut active = new.clone();
    if shape.raw {
        let length = if rng.random() { size } else { rng.random_range(1..=size / 512) * 512 };
        let bytes = Value::Pattern(Sort::Plain, 1).bytes(0..length);
        let content = Content::from(&bytes[..]);
        let name = PathBuf::from(RAW);
        host.insert(&name, content.clone());
        let (content, needs) = (Arc::new(content), vec![name.clone()]);
        images.push(Image { name, content, needs, leaked: 0 });
        (new.backing_file, new.backing_format) = (Some(RAW.into()), Some("raw".into()));
    }
    let few = if shape.below > 8 { 4 } else { 12 };
    let steps = |rng: &mut SmallRng, size: u64, cluster: u64| -> Vec<Step> {
        let count = rng.random_range(1..=few);
        (0..count).map(|_| step(size, cluster, shape.compressed, rng)).collect()
    };
    let model = steps(rng, size, cluster);
    for layer in 0..=shape.below {
        let top = layer == shape.below;
        let name = if top { IMAGE.to_owned() } else { format!("layer{layer}.qcow2") };
        let mut image = new.clone();
        let twin = shape.twins && rng.random_bool(0.85);
        let other_size = if kind == Kind::Commits { 0.7 } else { 0.4 };
        if !top && !twin && shape.device.is_none() && rng.random_bool(other_size) {
            // Other layers' data goes on past the end.
            let most =
                if kind == Kind::Commits && rng.random() { size.min(cluster * 12) } else { size };
            image.size = Some(rng.random_range(1..=most / 512) * 512);
            if rng.random() && !image.extended_l2 && kind != Kind::Large {
                image.cluster_size = 1 << rng.random_range(9..=13);
            }
        }
        // The newest layers of a chain of snapshots hold little.
        let mut made = if twin {
            let change = |step: &Step, rng: &mut SmallRng| {
                if rng.random_bool(0.1) {
                    self::step(size, cluster, shape.compressed, rng)
                } else {
                    *step
                }
            };
            let mut made: Vec<Step> = model.iter().map(|step| change(step, rng)).collect();
            if rng.random_bool(0.3) {
                made.truncate(rng.random_range(0..=made.len()));
            }
            made
        } else {
            let held = image.size.unwrap_or(size);
            steps(rng, held, image.cluster_size)
        };
        let path = PathBuf::from(&name);
        if kind == Kind::DataFiles && (top || rng.random()) {
            image = with_data_file(image, &path, rng);
        }
        if top {
            active = image.clone();
        }
        create(&host.any(), &path, &image).await.map_err(shown)?;
        let unclosed = !top && rng.random_bool(shape.unclosed);
        let journal = unclosed.then(|| JOURNALS[rng.random_range(0..JOURNALS.len())]);
        if unclosed {
            made = overwritten(&made, rng);
        }
        fill(&host, &path, &made, 100 * (layer as u32 + 1), journal).await.map_err(shown)?;
        if shape.bitmaps && rng.random_bool(0.8) {
            bitmaps::add(&host, &path, rng).await?;
        }
        let content = content(&host, &path).await.map_err(shown)?;
        let below = images.last().map_or(&[][..], |image| &image.needs);
        let needs = below.iter().cloned().chain([path.clone()]).collect();
        let leaked = if unclosed { leaks(&host.files(), &path).await? } else { 0 };
        images.push(Image { name: path, content, needs, leaked });
        (new.backing_file, new.backing_format) = (Some(name), Some("qcow2".into()));
    }
    let content = images.last().map(|image| Arc::clone(&image.content)).unwrap_or_default();
    let mut files = host.files();
    if let Some(length) = shape.device {
        for (_, file) in &mut files {
            to_device(Arc::make_mut(file), length);
        }
    }
    let start =
        Start { files, image: IMAGE.into(), content, new: active, snapshot: None, dirty: false };
    let text = format!(
        "{}, {} images{}{}{}{}",
        start.describe(),
        images.len(),
        if shape.twins { ", much alike" } else { "" },
        if shape.compressed > 0.0 { ", compressed clusters" } else { "" },
        if shape.bitmaps { ", bitmaps" } else { "" },
        if shape.device.is_some() { ", on block devices" } else { "" },
    );
    let busy = if kind == Kind::Sizes { (size / 2).max(cluster).min(size) } else { size };
    let (fixed, bitmaps) = (shape.device.is_some(), shape.bitmaps);
    let raw = shape.raw.then(|| RAW.into());
    Ok(Begin { start, images, raw, busy, fixed, bitmaps, text })
}

/// Bytes past the end of a file in which it may have clusters.
const MARGIN: u64 = 64 << 10;

/// A file as on a block device: longer, with other data after it.
pub(super) fn to_device(content: &mut Content, length: u64) {
    // Space past the end of the file in the image's last clusters is zero.
    let end = (content.len() + MARGIN).next_multiple_of(MARGIN).min(length.max(content.len()));
    if end < length {
        content.set_len(end);
        content.fill(end..length, 0xd7);
    }
}
