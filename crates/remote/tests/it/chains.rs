//! Chains of files for tests, and what is done with them.

use isobath_qcow2::index::WholeRoot;
use isobath_remote::store::Store;
use isobath_remote::{
    BLOCK, Checked, Collected, Collection, Depth, Format, Index, LocalLayer, Names, Progress,
    Pulled, Pushed, Replace, Result, Target, check, collect, pull, push,
};
use isobath_testkit::process::run;
use isobath_testkit::qemu;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// The files of a chain, from the base to the top.
pub(crate) struct Chain {
    pub(crate) directory: TempDir,
    pub(crate) names: Vec<String>,
}

#[track_caller]
pub(crate) fn qemu_img(directory: &Path, arguments: &[&str]) {
    let _ =
        qemu::run(Command::new(qemu::program("qemu-img")).current_dir(directory).args(arguments))
            .ok();
}

#[track_caller]
fn write(directory: &Path, image: &str, what: &str) {
    let mut command = Command::new(qemu::program("qemu-io"));
    let _ = qemu::run(command.current_dir(directory).args(["-c", what, image])).ok();
}

impl Chain {
    /// A raw base that is sent in parts, with a hole, and two overlays.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut base = vec![0; (9 << 20) + 512];
        for (at, byte) in
            base.iter_mut().enumerate().filter(|(at, _)| !(1 << 20..7 << 20).contains(at))
        {
            *byte = (at / 512 + at) as u8;
        }
        fs::write(directory.path().join("base.raw"), base).unwrap();
        let mut chain = Self { directory, names: vec!["base.raw".to_owned()] };
        chain.grow("middle.qcow2");
        chain.grow("top.qcow2");
        chain
    }

    /// One small image.
    pub(crate) fn small(name: &str, byte: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        qemu_img(directory.path(), &["create", "-q", "-f", "qcow2", name, "1M"]);
        write(directory.path(), name, &format!("write -q -P {byte} 0 64k"));
        Self { directory, names: vec![name.to_owned()] }
    }

    /// So many images with L1 tables of 1 MiB each.
    pub(crate) fn of_long_tables(layers: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = "cluster_size=512";
        let create = ["create", "-q", "-f", "qcow2", "-o", options, "0.qcow2", "4G"];
        qemu_img(directory.path(), &create);
        let mut chain = Self { directory, names: vec!["0.qcow2".to_owned()] };
        for _ in 1..layers {
            chain.grow_by_long_table();
        }
        chain
    }

    /// Adds an overlay with an L1 table of 1 MiB.
    pub(crate) fn grow_by_long_table(&mut self) {
        let (backing, name) = (self.names.last().unwrap(), format!("{}.qcow2", self.names.len()));
        let path = self.directory.path();
        let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "-b", backing];
        qemu_img(path, &[&create[..], &["-F", "qcow2", &name]].concat());
        let number = self.names.len();
        write(path, &name, &format!("write -q -P {number} {}k 1k", number * 96));
        self.names.push(name);
    }

    /// Adds an overlay.
    pub(crate) fn grow(&mut self, name: &str) {
        self.grow_above(&self.names.last().unwrap().clone(), name);
    }

    /// Adds an overlay that calls its backing file so.
    pub(crate) fn grow_above(&mut self, backing: &str, name: &str) {
        let format =
            if self.names.len() == 1 && self.names[0] == "base.raw" { "raw" } else { "qcow2" };
        let path = self.directory.path();
        qemu_img(path, &["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, name]);
        let number = self.names.len();
        write(path, name, &format!("write -q -P {number} {}k 64k", number * 96));
        self.names.push(name.to_owned());
    }

    pub(crate) fn path(&self, number: usize) -> PathBuf {
        self.directory.path().join(&self.names[number])
    }

    pub(crate) fn top(&self) -> PathBuf {
        self.path(self.names.len() - 1)
    }

    /// Its layers, as they are pushed.
    pub(crate) fn layers(&self) -> Vec<LocalLayer> {
        let layers = (0..self.names.len()).map(|number| {
            let path = self.path(number);
            let raw = path.extension().is_some_and(|extension| extension == "raw");
            let format = if raw { Format::Raw } else { Format::Qcow2 };
            LocalLayer { file: File::open(&path).unwrap(), path, format }
        });
        layers.collect()
    }

    /// An index of all of them, as it is pushed: what it says of the layers is nothing that a store looks at. That of a
    /// chain with a base that is sent in parts is longer than a block.
    pub(crate) fn index(&self) -> Index {
        let layers = self.names.len() as u32;
        let raw = self.names[0] == "base.raw";
        let top = fs::read(self.top()).unwrap();
        // The size in a qcow2 header.
        let size = if top.starts_with(b"QFI\xfb") {
            u64::from_be_bytes(top[24..32].try_into().unwrap())
        } else {
            top.len() as u64
        };
        let root = WholeRoot { unit_bits: 16, layers, size, segments: vec![None] };
        let length = if raw { BLOCK as u32 + 1000 } else { 300 };
        let bytes = (0..length).map(|at| (at / 7 + layers) as u8).collect();
        Index { root: root.encode(), bytes }
    }

    /// All files of a directory are files of the chain, and those that must be there are.
    #[track_caller]
    pub(crate) fn is_part(&self, directory: &Path, whole: bool) {
        let mut found = 0;
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with(".isobath-pull-") {
                assert!(!whole, "{name} was left");
                continue;
            }
            let own = self.directory.path().join(name);
            assert!(fs::read(&path).unwrap() == fs::read(&own).unwrap(), "{name} differs");
            found += 1;
        }
        assert!(!whole || found == self.names.len(), "{found} files");
    }

    /// QEMU finds the pulled chain clean, and reads from it what is in this one.
    #[track_caller]
    pub(crate) fn reads_as(&self, image: &Path) {
        let directory = self.directory.path();
        let (own, pulled) = (self.top(), image.to_str().unwrap());
        qemu_img(directory, &["check", "-q", "-f", "qcow2", pulled]);
        qemu_img(
            directory,
            &["compare", "-q", "-f", "qcow2", "-F", "qcow2", own.to_str().unwrap(), pulled],
        );
    }
}

pub(crate) fn send(store: &dyn Store, name: &str, chain: &Chain) -> Result<Pushed> {
    push(
        store,
        name,
        &chain.layers(),
        Some(&chain.index()),
        Replace::Unchanged,
        &Progress::default(),
    )
}

pub(crate) fn fetch(store: &dyn Store, name: &str, directory: &Path) -> Result<Pulled> {
    let target = Target { directory: directory.to_owned(), name: None };
    pull(store, name, &target, Names::Kept, &Progress::default())
}

pub(crate) fn verify(store: &dyn Store, name: &str) -> Result<Checked> {
    check(store, name, Depth::Digests, &Progress::default())
}

#[track_caller]
pub(crate) fn is_whole(store: &dyn Store, name: &str) {
    assert_eq!(verify(store, name).unwrap().problems, Vec::<String>::new());
}

pub(crate) fn gc(store: &dyn Store, grace: Duration, break_lock: bool) -> Result<Collected> {
    collect(store, &Collection { grace, dry_run: false, break_lock }, &Progress::default())
}

/// The bytes of a file that `sha256sum` gives.
pub(crate) fn sha256(path: &Path) -> String {
    let done = run(Command::new("sha256sum").arg(path)).ok();
    done.text().split(' ').next().unwrap().to_owned()
}
