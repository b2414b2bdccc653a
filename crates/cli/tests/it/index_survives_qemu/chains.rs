//! Chains of five layers with an index, all alike, to do things to.

pub(crate) use crate::programs::{isobath, logged, qemu_img};

use isobath_qcow2::Header;
use isobath_qcow2::index::{BlockHash, Root};
use isobath_testkit::args;
use isobath_testkit::ops::Shape;
use isobath_testkit::process::run;
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use isobath_testkit::until;
use rand::RngExt;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Layers of a chain, and the number of its active one.
pub(crate) const LAYERS: usize = 5;
pub(crate) const TOP: usize = LAYERS - 1;

/// The name of the active image.
pub(crate) const TOP_NAME: &str = "l4";

/// How a chain came by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Every overlay was made and written by `isobath`, and has one. The files are copies, so that
    /// none of the stamps holds.
    Grown,
    /// QEMU made and wrote the chain; `isobath index` gave the active image one. Its stamps hold.
    Indexed,
}

pub(crate) const FLAVOURS: [Flavour; 2] = [Flavour::Grown, Flavour::Indexed];

/// What the layers are: format, options of `create`, size in bytes.
pub(crate) type Kind = [(&'static str, &'static str, u64); LAYERS];

const MIB: u64 = 1 << 20;

pub(crate) const KINDS: [Kind; 4] = [
    [("qcow2", "cluster_size=4k", MIB); LAYERS],
    [
        ("raw", "", MIB),
        ("qcow2", "cluster_size=64k", MIB),
        ("qcow2", "cluster_size=4k,refcount_bits=64", MIB),
        ("qcow2", "cluster_size=16k,extended_l2=on", MIB),
        ("qcow2", "cluster_size=4k", MIB),
    ],
    [
        ("qcow2", "cluster_size=8k,compression_type=zstd", 801 * 512),
        ("qcow2", "cluster_size=8k", MIB),
        ("qcow2", "cluster_size=4k", 1501 * 512),
        ("qcow2", "cluster_size=32k", MIB + 1536),
        ("qcow2", "cluster_size=8k", MIB + 1536),
    ],
    [("qcow2", "compat=0.10,cluster_size=4k", MIB); LAYERS],
];

/// A chain in a directory of its own: files l0 to l4, named without a path in each other's headers.
pub(crate) struct Chain {
    directory: tempfile::TempDir,
    pub(crate) kind: Kind,
    template: &'static Template,
}

impl Chain {
    /// A new one.
    #[track_caller]
    pub(crate) fn new(kind: usize, flavour: Flavour) -> Self {
        static TEMPLATES: [[OnceLock<Template>; 2]; KINDS.len()] =
            [const { [const { OnceLock::new() }; 2] }; KINDS.len()];
        let template = TEMPLATES[kind][flavour as usize]
            .get_or_init(|| Template::new(KINDS[kind], kind as u64, flavour));
        let chain = Self { directory: tempfile::tempdir().unwrap(), kind: KINDS[kind], template };
        for (layer, bytes) in template.files.iter().enumerate() {
            fs::write(chain.path(layer), bytes).unwrap();
        }
        if flavour == Flavour::Indexed {
            chain.until_settled();
            let _ = isobath(chain.directory(), ["index", "-q", TOP_NAME]).ok();
            assert!(chain.root().unwrap().tail.iter().all(|record| record.stamp.is_some()));
        }
        chain
    }

    /// Waits until the clock of file systems is so far past the last change that later ones differ from it.
    fn until_settled(&self) {
        let changed = |layer| {
            let found = fs::metadata(self.path(layer)).unwrap();
            found.ctime() * 1_000_000_000 + found.ctime_nsec()
        };
        let last = (0..LAYERS).map(changed).max().unwrap();
        until("a tick of the clock", || {
            let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: the kernel writes to `now`, which is live.
            let read = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &raw mut now) };
            assert_eq!(read, 0);
            now.tv_sec * 1_000_000_000 + now.tv_nsec - last > 20_000_000
        });
    }

    /// The directory.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A layer's file.
    pub(crate) fn path(&self, layer: usize) -> PathBuf {
        self.directory().join(name(layer))
    }

    /// A layer's format.
    pub(crate) fn format(&self, layer: usize) -> &'static str {
        self.kind[layer].0
    }

    pub(crate) fn is_qcow2(&self, layer: usize) -> bool {
        self.format(layer) == "qcow2"
    }

    /// Whether a layer's file is the one that was made for the chain, to the byte.
    pub(crate) fn is_as_made(&self, layer: usize) -> bool {
        fs::read(self.path(layer)).is_ok_and(|bytes| bytes == self.template.files[layer])
    }

    /// What a layer's own tables said at first.
    pub(crate) fn mapping(&self, layer: usize) -> &str {
        &self.template.mappings[layer]
    }

    /// Runs `qemu-img`; whether it did it.
    #[track_caller]
    pub(crate) fn qemu_img<I>(&self, arguments: I) -> bool
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        qemu_img(self.directory(), arguments).code() == 0
    }

    /// Runs `qemu-io` on one layer; whether it did it all.
    #[track_caller]
    pub(crate) fn qemu_io(&self, layer: usize, commands: &[&str]) -> bool {
        let mut arguments = args!["-d", "unmap", "-f", self.format(layer)];
        for command in commands {
            arguments.extend(args!["-c", *command]);
        }
        arguments.push(self.path(layer).into());
        run(Command::new(qemu::program("qemu-io")).args(arguments)).code() == 0
    }

    /// The root of the active image's index, if it is whole.
    pub(crate) fn root(&self) -> Option<Root> {
        let bytes = fs::read(self.path(TOP)).unwrap();
        let extension = *Header::parse(&bytes).unwrap().index()?;
        let start = extension.root_offset.get() as usize;
        let root = bytes.get(start..start + extension.root_length as usize)?;
        (BlockHash::of(root) == extension.root_hash).then(|| Root::decode(root))?
    }
}

/// The name of a layer's file.
pub(crate) fn name(layer: usize) -> String {
    format!("l{layer}")
}

/// Where a layer has a cluster of data for certain that no other has written in: the offset of
/// 64 KiB.
pub(crate) fn own(layer: usize) -> u64 {
    layer as u64 * (128 << 10)
}

/// What a layer's own tables say, as QEMU reads them.
#[track_caller]
pub(crate) fn mapping(path: &Path, format: &str) -> String {
    if format == "raw" {
        return format!("raw, {} sectors", path.metadata().unwrap().len().div_ceil(512));
    }
    let alone = serde_json::json!({
        "driver": format,
        "backing": null,
        "file": { "driver": "file", "filename": path.to_str().unwrap() },
    });
    let map = qemu::img(args!["map", "-U", "--output=json", format!("json:{alone}")]);
    if map.code() != 0 {
        // Another mapping than any that there can be.
        return map.stderr;
    }
    // Holes in the file are none of the mapping.
    let mut extents: Vec<Extent> = Vec::new();
    for extent in map.json().as_array().unwrap() {
        let number = |name: &str| extent[name].as_u64();
        let next = Extent {
            what: if extent["data"].as_bool().unwrap() {
                "data".to_owned()
            } else {
                format!("zero {}, present {}", extent["zero"], extent["present"])
            },
            length: number("length").unwrap(),
            offset: number("offset"),
        };
        match extents.last_mut() {
            Some(last) if last.is_continued_by(&next) => last.length += next.length,
            _ => extents.push(next),
        }
    }
    format!("{extents:?}")
}

/// A piece of a layer's disk.
#[derive(Debug)]
struct Extent {
    what: String,
    length: u64,
    /// Where it is in the layer's file.
    offset: Option<u64>,
}

impl Extent {
    fn is_continued_by(&self, next: &Self) -> bool {
        self.what == next.what && self.offset.map(|offset| offset + self.length) == next.offset
    }
}

/// The files of a chain.
struct Template {
    files: Vec<Vec<u8>>,
    mappings: Vec<String>,
}

impl Template {
    #[track_caller]
    fn new(kind: Kind, seed: u64, flavour: Flavour) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mut rng = Seed::from(seed).rng();
        for (layer, (format, options, size)) in kind.into_iter().enumerate() {
            let by_isobath = flavour == Flavour::Grown && layer > 0;
            let mut arguments = args!["create", "-q", "-f", format];
            if layer > 0 {
                arguments.extend(args!["-b", name(layer - 1), "-F", kind[layer - 1].0]);
            }
            if !options.is_empty() {
                arguments.extend(args!["-o", options]);
            }
            arguments.extend(args![name(layer), size.to_string()]);
            let made =
                if by_isobath { isobath(path, arguments) } else { qemu_img(path, arguments) };
            let _ = made.ok();
            let shape = Shape { size, longest: 60_000, unit: 4096 };
            let mut commands = Vec::new();
            if format == "qcow2" && layer == 1 {
                commands.push(format!("write -c -P {} 640k 64k", rng.random_range(1..=255)));
            }
            commands.extend(shape.ops(&mut rng, 12).iter().map(ToString::to_string));
            commands.push(format!("write -P {} {} 64k", layer + 1, own(layer)));
            let mut arguments = args!["-f", format];
            for command in commands {
                arguments.extend(args!["-c", command]);
            }
            arguments.push(name(layer).into());
            let _ = if by_isobath {
                isobath(path, [args!["io"], arguments].concat()).ok()
            } else {
                let program = qemu::program("qemu-io");
                run(Command::new(program).current_dir(path).args(arguments)).ok()
            };
        }
        let all = 0..LAYERS;
        Self {
            files: all.clone().map(|layer| fs::read(path.join(name(layer))).unwrap()).collect(),
            mappings: all.map(|layer| mapping(&path.join(name(layer)), kind[layer].0)).collect(),
        }
    }
}
