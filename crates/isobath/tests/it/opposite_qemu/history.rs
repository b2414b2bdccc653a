//! A history: what happens to a disk, in steps that are readable, and that mean something wherever
//! others are left out.

use crate::opposite_qemu::op::Op;
use isobath_disk::{MetadataMode, NewDisk, Preallocation};
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
    /// `qemu-img commit`: the active layer goes into one below, by number.
    Commit {
        base: u8,
    },
    /// A copy of the active image's file becomes the layer above it.
    Copy,
    /// `qemu-img rebase`: a lower layer, by number, or none becomes the backing file of the active one.
    Rebase {
        onto: u8,
    },
    /// What lies below the active layer is converted to one new image, and `qemu-img rebase -u` puts
    /// that in its place.
    Flatten {
        compressed: bool,
    },
    /// The operations from here to the next step of another kind are one opening of the image.
    Open(Session),
    Op(Op),
}

/// A block job of an opening, beside its requests. Layers are counted modulo what there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) kind: JobKind,
    /// How far below the active layer the top is.
    pub(crate) top: u8,
    /// The number of the base, from the bottom; of a stream, that of the top means none.
    pub(crate) base: u8,
    /// Everything is read before it begins.
    pub(crate) warm: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobKind {
    Stream,
    Commit,
    /// To a new image of the active one's options, without a backing file.
    Mirror,
    /// The same, above what lies below the active image.
    MirrorTop,
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) by: Side,
    pub(crate) job: Option<Job>,
    /// How Isobath stores metadata.
    pub(crate) metadata: MetadataMode,
    /// By `qemu-io`, not by `qemu-storage-daemon` over NBD, on QEMU's side.
    pub(crate) program: bool,
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
        let compression = if self.zstd { CompressionType::Zstd } else { CompressionType::Zlib };
        let mut new = NewDisk::new(size)
            .version(if self.v2 { 2 } else { 3 })
            .cluster_size(self.cluster())
            .refcount_bits(1 << self.refcount_order)
            .extended_l2(self.extended_l2)
            .compression_type(compression)
            .lazy_refcounts(self.lazy)
            .preallocation(self.preallocation)
            .data_file_raw(self.data_file == DataFile::Raw);
        if let Some((path, format)) = backing {
            new = new.backing_file(text(path), format);
        }
        if self.data_file != DataFile::Inside {
            new = new.data_file(text(data));
        }
        new
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

impl fmt::Display for Side {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Isobath => "isobath",
            Self::Qemu => "qemu",
        })
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
            Self::Commit { base } => write!(out, "qemu: commit into layer {base}"),
            Self::Copy => out.write_str("a copy of the active image above it"),
            Self::Rebase { onto } => write!(out, "qemu: rebase onto layer {onto}"),
            Self::Flatten { compressed } => {
                let flag = if *compressed { " -c" } else { "" };
                write!(out, "qemu: convert{flag} what is below, and rebase -u onto that")
            }
            Self::Open(session) => write!(out, "{session}"),
            Self::Op(op) => write!(out, "    {op}"),
        }
    }
}

impl fmt::Display for Session {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: open, {} at once", self.by, self.width)?;
        match self.by {
            Side::Isobath => {
                write!(out, ", {}, map cache {}", self.metadata.name(), self.map_cache)?;
                out.write_str(if self.direct { ", direct" } else { "" })?;
                out.write_str(if self.two_threads { ", two threads" } else { "" })?;
            }
            Side::Qemu => out.write_str(if self.program { ", qemu-io" } else { "" })?,
        }
        if let Some(Job { kind, top, base, warm }) = self.job {
            let warm = if warm { ", all read before" } else { "" };
            write!(out, ", {kind:?} from {top} below the top to layer {base}{warm}")?;
        }
        out.write_str(if self.dropped { ", dropped at the end:" } else { ":" })
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
