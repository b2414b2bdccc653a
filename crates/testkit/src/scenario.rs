//! A guest's root disk on a chain: the engine's work from end to end, for tests and the demo.
//!
//! The base is an ext4 file system with busybox and a file of random bytes, `/data/field`. Every layer above overwrites
//! parts of that file and nothing else, so that its content is spread over the whole chain while the file system stays
//! intact. The guest boots from the active layer, checksums the field and a file that it writes with fsync;
//! [`RootChain::check`] verifies the result.

use crate::args;
use crate::chain::{Chain, Writer};
use crate::fs;
use crate::guest::Done;
use crate::model::Model;
use crate::ops::Op;
use crate::process::run_program;
use crate::qemu;
use crate::seed::Seed;
use rand::{Rng, RngExt};
use std::path::{Path, PathBuf};

const DISK: u64 = 96 << 20;
const FIELD: usize = 8 << 20;

/// A chain that a guest can boot from.
#[derive(Debug)]
pub struct RootChain {
    /// The chain.
    pub chain: Chain,
    directory: PathBuf,
    runs: Vec<(u64, u64)>,
}

impl RootChain {
    /// Creates a chain of `layers` layers in `directory`: the base with `qemu-img convert`, the others with the writers
    /// in turn.
    #[track_caller]
    pub fn make(directory: &Path, layers: usize, writers: &[&dyn Writer], seed: &Seed) -> Self {
        let mut rng = seed.rng();
        let mut field = vec![0; FIELD];
        rng.fill_bytes(&mut field);
        let raw = directory.join("root.raw");
        fs::make_root(&raw, DISK, &[("field", &field)]);
        let runs = fs::file_runs(&raw, "/data/field");
        let base = directory.join("base.qcow2");
        let _ = qemu::img(args!["convert", "-f", "raw", "-O", "qcow2", &raw, &base]).ok();
        std::fs::remove_file(raw).expect("remove a file");
        let chain = Chain::on(directory, &base, "qcow2");
        let mut made = Self { chain, directory: directory.to_owned(), runs };
        assert!(made.field() == field, "the field is not where debugfs says");

        for (index, writer) in writers.iter().cycle().take(layers - 1).enumerate() {
            let options =
                ["", "cluster_size=4k", "extended_l2=on", "lazy_refcounts=on", "compat=0.10"];
            let ops: Vec<_> = (0..8).map(|_| made.op(&mut rng)).collect();
            made.chain.add(*writer, options[index % options.len()], &ops);
        }
        made
    }

    /// The script for a guest that has the disk as its root.
    pub fn workload() -> &'static str {
        "echo field=$(md5sum </data/field | cut -d ' ' -f 1)
         dd if=/dev/urandom of=/data/random bs=64k count=64 conv=fsync 2>/dev/null
         cp /data/random /data/copy
         mkdir /data/many
         for number in $(seq 100); do echo $number >/data/many/$number; done
         sync
         rm -r /data/many
         for number in $(seq 20); do
             dd if=/dev/zero of=/data/random bs=4096 count=1 seek=$((number * 7)) conv=notrunc,fsync \
                 2>/dev/null
         done
         echo random=$(md5sum </data/random | cut -d ' ' -f 1)
         sync
         echo 3 >/proc/sys/vm/drop_caches
         echo random=$(md5sum </data/random | cut -d ' ' -f 1)
         echo field=$(md5sum </data/field | cut -d ' ' -f 1)
         rm /data/copy
         fstrim /
         grep ' / ' /proc/mounts"
    }

    /// Fails the test unless the guest saw and left the expected data; call it when the disk is no longer served.
    /// Returns the findings as lines of text.
    #[track_caller]
    pub fn check(&self, done: &Done) -> Vec<String> {
        assert!(done.output.contains("/dev/vda / ext4"), "{}", done.output);
        let expected = self.md5(&self.field());
        assert_eq!(done.values("field"), [&expected, &expected], "in the guest\n{}", done.output);
        self.chain.assert_clean();
        fs::assert_ext4_clean(self.chain.active(), "qcow2");
        assert_eq!(self.file_md5("/data/field"), expected, "/data/field, read by QEMU");
        let written = self.file_md5("/data/random");
        assert_eq!(done.values("random"), [&written, &written], "in the guest\n{}", done.output);
        let count = self.chain.layers().len();
        vec![
            format!("the guest read {FIELD} bytes from {count} layers as they were written"),
            "the data it wrote with fsync is on the disk, as read by QEMU".to_owned(),
            format!("qemu-img check: all {count} layers are clean"),
            "e2fsck -fn: the file system is clean".to_owned(),
        ]
    }

    /// The chain as lines of text, the base first: file, writer, size, and a bar of `width` characters that marks the
    /// parts of `/data/field` that are read from the layer.
    #[track_caller]
    pub fn picture(&self, width: usize) -> String {
        let layers = self.chain.layers();
        let mut bars = vec![vec![b'.'; width]; layers.len()];
        for extent in qemu::map(self.chain.active()).as_array().into_iter().flatten() {
            let number = |name: &str| extent[name].as_u64().expect("a number in qemu-img map");
            let (start, end) = (number("start"), number("start") + number("length"));
            let bar = layers.len().checked_sub(1 + number("depth") as usize);
            let Some(bar) = bar.map(|layer| &mut bars[layer]) else { continue };
            let mut before = 0;
            for (run, length) in &self.runs {
                let column = |at: u64| (before + at - run) as usize * width / FIELD;
                let (first, last) = (start.max(*run), end.min(run + length));
                if first < last {
                    bar[column(first)..=column(last - 1)].fill(b'#');
                }
                before += length;
            }
        }
        let lines = self.chain.picture();
        let lines = lines.lines().zip(&bars);
        lines
            .flat_map(|(line, bar)| {
                [line.into(), "  ".into(), String::from_utf8_lossy(bar), "\n".into()]
            })
            .collect()
    }

    /// The expected bytes of `/data/field`.
    fn field(&self) -> Vec<u8> {
        let model: &Model = self.chain.model();
        let read = |(offset, length): &(u64, u64)| model.read(*offset, *length as usize);
        self.runs.iter().flat_map(read).collect()
    }

    /// A random write within the field.
    fn op<R: Rng>(&self, rng: &mut R) -> Op {
        let (start, space) = self.runs[rng.random_range(0..self.runs.len())];
        let at = rng.random_range(0..space);
        let offset = start + at;
        let length = rng.random_range(1..=200_000).min(space - at);
        if rng.random_ratio(1, 5) {
            Op::Zero { offset, length, unmap: false }
        } else {
            Op::Write { offset, length, pattern: rng.random() }
        }
    }

    #[track_caller]
    fn file_md5(&self, name: &str) -> String {
        let copy = self.directory.join("copy");
        fs::read_ext4_file(self.chain.active(), "qcow2", name, &copy);
        let bytes = std::fs::read(&copy).expect("read a file");
        std::fs::remove_file(&copy).expect("remove a file");
        self.md5(&bytes)
    }

    #[track_caller]
    fn md5(&self, bytes: &[u8]) -> String {
        let file = self.directory.join("bytes");
        std::fs::write(&file, bytes).expect("write a file");
        let text = run_program("md5sum", args!["--", &file]).ok().text();
        std::fs::remove_file(&file).expect("remove a file");
        text.split_whitespace().next().unwrap_or_default().to_owned()
    }
}
