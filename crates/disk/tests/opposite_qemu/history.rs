//! A history: what happens to a disk, in steps that are readable, and that mean something wherever
//! others are left out.

use isobath_disk::{NewDisk, Preallocation};
use isobath_qcow2::CompressionType;
use std::fmt;
use std::path::Path;

/// A program that reads and writes images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Isobath,
    Qemu,
}

/// The whole of it.
#[derive(Clone, Debug)]
pub(crate) struct History {
    /// Carried out twice, on copies of its own by each side, instead of once by both in turn.
    pub(crate) twin: bool,
    pub(crate) base: Base,
    /// Each layer begins with a [`Step::Layer`]; without one before them, steps do nothing.
    pub(crate) steps: Vec<Step>,
}

/// What lies below the first layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    None,
    /// A raw file of that many bytes.
    Raw(u64),
    /// A qcow2 image of that size by `qemu-img convert`, compressed or not.
    Converted(ImageOptions, u64, bool),
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A new image over what was active.
    Layer {
        by: Side,
        options: ImageOptions,
        size: Option<u64>,
    },
    /// A new size.
    Resize {
        by: Side,
        size: u64,
    },
    /// `qemu-img snapshot -c`.
    Snapshot,
    /// `qemu-img snapshot -a`, of the newest.
    Apply,
    /// `qemu-img snapshot -d`, of the oldest.
    Delete,
    /// `qemu-img bitmap --add`, with that granularity.
    Bitmap(u32),
    /// `qemu-img commit`: the active layer goes into the one below.
    Commit,
    /// The operations from here to the next step of another kind are one opening of the image.
    Open(Session),
    Op(Op),
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) by: Side,
    /// Requests in flight together.
    pub(crate) width: usize,
    /// Bytes of memory for the map, of Isobath.
    pub(crate) map_cache: usize,
    /// Past the page cache, by Isobath.
    pub(crate) direct: bool,
    /// Every other request comes from a second thread, to Isobath.
    pub(crate) two_threads: bool,
    /// Flushed at its end and not closed: by Isobath dropped, by QEMU killed. Clusters may leak, and
    /// refcounts that QEMU keeps lazily are wrong until they are repaired.
    pub(crate) dropped: bool,
}

/// What a write writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    Byte(u8),
    /// One of a few random blocks, over and over.
    Noise(u8),
}

/// One request. Where it reaches past the disk's end, it is cut off there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Write {
        offset: u64,
        length: u64,
        fill: Fill,
    },
    Zero {
        offset: u64,
        length: u64,
        unmap: bool,
    },
    Discard {
        offset: u64,
        length: u64,
    },
    /// Whole clusters, by number.
    Compressed {
        cluster: u64,
        count: u64,
        fill: Fill,
    },
    Read {
        offset: u64,
        length: u64,
    },
    /// Writes of different bytes, each a step further on and overlapping the one before, at once.
    Race {
        offset: u64,
        length: u64,
        step: u64,
        count: u8,
    },
    Flush,
}

/// The options of `qemu-img create`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageOptions {
    pub(crate) v2: bool,
    pub(crate) cluster_bits: u32,
    pub(crate) refcount_order: u32,
    pub(crate) extended_l2: bool,
    pub(crate) zstd: bool,
    pub(crate) lazy: bool,
    pub(crate) data_file: DataFile,
    pub(crate) preallocation: Preallocation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataFile {
    Inside,
    External,
    Raw,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            v2: false,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            zstd: false,
            lazy: false,
            data_file: DataFile::Inside,
            preallocation: Preallocation::Off,
        }
    }
}

impl ImageOptions {
    pub(crate) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// As after `qemu-img create -o`.
    pub(crate) fn for_qemu(&self, data_file: &Path) -> String {
        match self.data_file {
            DataFile::Inside => self.to_string(),
            _ => format!("{self},data_file={}", data_file.display()),
        }
    }

    pub(crate) fn for_isobath(
        &self,
        size: u64,
        backing: Option<(&Path, &str)>,
        data: &Path,
    ) -> NewDisk {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        NewDisk {
            size: Some(size),
            version: if self.v2 { 2 } else { 3 },
            cluster_size: self.cluster(),
            refcount_bits: 1 << self.refcount_order,
            extended_l2: self.extended_l2,
            compression_type: if self.zstd { CompressionType::Zstd } else { CompressionType::Zlib },
            lazy_refcounts: self.lazy,
            preallocation: self.preallocation,
            backing_file: backing.map(|(path, _)| text(path)),
            backing_format: backing.map(|(_, format)| format.to_owned()),
            data_file: (self.data_file != DataFile::Inside).then(|| text(data)),
            data_file_raw: self.data_file == DataFile::Raw,
            ..NewDisk::default()
        }
    }
}

impl fmt::Display for ImageOptions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compat = if self.v2 { "0.10" } else { "1.1" };
        write!(out, "compat={compat},cluster_size={}", self.cluster())?;
        if self.refcount_order != 4 {
            write!(out, ",refcount_bits={}", 1 << self.refcount_order)?;
        }
        for (on, text) in [
            (self.extended_l2, ",extended_l2=on"),
            (self.zstd, ",compression_type=zstd"),
            (self.lazy, ",lazy_refcounts=on"),
            (self.data_file == DataFile::Raw, ",data_file_raw=on"),
            (self.preallocation == Preallocation::Metadata, ",preallocation=metadata"),
            (self.preallocation == Preallocation::Falloc, ",preallocation=falloc"),
            (self.preallocation == Preallocation::Full, ",preallocation=full"),
        ] {
            if on {
                out.write_str(text)?;
            }
        }
        Ok(())
    }
}

impl Op {
    /// The operation within a disk of `size` bytes and clusters of `cluster`; `None` where nothing of
    /// it is.
    pub(crate) fn within(self, size: u64, cluster: u64) -> Option<Self> {
        let cut = |offset: u64, length: u64| size.saturating_sub(offset).min(length);
        let op = match self {
            Self::Write { offset, length, fill } => {
                Self::Write { offset, length: cut(offset, length), fill }
            }
            Self::Zero { offset, length, unmap } => {
                Self::Zero { offset, length: cut(offset, length), unmap }
            }
            Self::Discard { offset, length } => {
                Self::Discard { offset, length: cut(offset, length) }
            }
            Self::Read { offset, length } => Self::Read { offset, length: cut(offset, length) },
            Self::Race { offset, length, step, count } => {
                let reach = length + step * u64::from(count - 1);
                return (offset + reach <= size).then_some(self);
            }
            Self::Compressed { cluster: first, count, fill } => {
                let count = count.min(size.div_ceil(cluster).saturating_sub(first));
                Self::Compressed { cluster: first, count, fill }
            }
            Self::Flush => self,
        };
        (op == Self::Flush || op.range(size, cluster).1 > 0).then_some(op)
    }

    /// The bytes it may touch: where they start, and how many they are.
    pub(crate) fn range(self, size: u64, cluster: u64) -> (u64, u64) {
        match self {
            Self::Write { offset, length, .. }
            | Self::Zero { offset, length, .. }
            | Self::Discard { offset, length }
            | Self::Read { offset, length } => (offset, length),
            Self::Race { offset, length, step, count } => {
                (offset, length + step * u64::from(count - 1))
            }
            Self::Compressed { cluster: first, count, .. } => {
                let offset = first * cluster;
                (offset, (count * cluster).min(size.saturating_sub(offset)))
            }
            Self::Flush => (0, 0),
        }
    }

    /// The writes of a race.
    pub(crate) fn racers(self) -> Vec<(u64, u64, u8)> {
        match self {
            Self::Race { offset, length, step, count } => {
                (0..count).map(|n| (offset + step * u64::from(n), length, n + 1)).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Isobath => "isobath",
            Self::Qemu => "qemu",
        })
    }
}

impl fmt::Display for Fill {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(byte) => write!(out, "-P {byte:#04x}"),
            Self::Noise(number) => write!(out, "-s noise{number}"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { offset, length, fill } => write!(out, "write {fill} {offset} {length}"),
            Self::Zero { offset, length, unmap } => {
                write!(out, "write -z {}{offset} {length}", if *unmap { "-u " } else { "" })
            }
            Self::Discard { offset, length } => write!(out, "discard {offset} {length}"),
            Self::Compressed { cluster, count, fill } => {
                write!(out, "write -c {fill}, {count} clusters from number {cluster}")
            }
            Self::Read { offset, length } => write!(out, "read {offset} {length}"),
            Self::Race { offset, length, step, count } => {
                write!(out, "{count} writes at once, {length} each, at {offset} and {step} on")
            }
            Self::Flush => out.write_str("flush"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layer { by, options, size } => {
                write!(out, "{by}: create -o {options}")?;
                size.map_or(Ok(()), |size| write!(out, " {size}"))
            }
            Self::Resize { by, size } => write!(out, "{by}: resize {size}"),
            Self::Snapshot => out.write_str("qemu: snapshot -c"),
            Self::Apply => out.write_str("qemu: snapshot -a"),
            Self::Delete => out.write_str("qemu: snapshot -d"),
            Self::Bitmap(granularity) => write!(out, "qemu: bitmap --add -g {granularity}"),
            Self::Commit => out.write_str("qemu: commit"),
            Self::Open(Session { by, width, map_cache, direct, two_threads, dropped }) => {
                write!(out, "{by}: open, {width} at once")?;
                if *by == Side::Isobath {
                    write!(out, ", map cache {map_cache}")?;
                    out.write_str(if *direct { ", direct" } else { "" })?;
                    out.write_str(if *two_threads { ", two threads" } else { "" })?;
                }
                out.write_str(if *dropped { ", dropped at the end:" } else { ":" })
            }
            Self::Op(op) => write!(out, "    {op}"),
        }
    }
}

impl fmt::Display for History {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.twin {
            writeln!(out, "  on a copy by each side:")?;
        }
        match &self.base {
            Base::None => {}
            Base::Raw(length) => writeln!(out, "  a raw base of {length} bytes")?,
            Base::Converted(options, size, compressed) => {
                let flag = if *compressed { " -c" } else { "" };
                writeln!(out, "  qemu: convert{flag} -o {options}, of {size} bytes")?;
            }
        }
        for step in &self.steps {
            writeln!(out, "  {step}")?;
        }
        Ok(())
    }
}
