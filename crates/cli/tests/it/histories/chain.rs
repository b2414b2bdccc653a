//! A chain of images in two copies, and how commands are run on both.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::ops::Shape;
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use tempfile::TempDir;

/// The largest disk, in bytes.
const LARGEST: u64 = 3 << 20;

/// One image of the chain.
pub(super) struct Image {
    pub(super) name: String,
    pub(super) format: &'static str,
    /// What `qemu-img info` says of QEMU's copy.
    pub(super) info: Value,
    /// The ids of internal snapshots that were taken over another backing file than the one of now: what they hold
    /// depends on what was allocated, which is each program's own affair.
    pub(super) loose: BTreeSet<String>,
    /// The sizes of the snapshots, in bytes, by id.
    pub(super) taken_at: BTreeMap<String, u64>,
}

impl Image {
    pub(super) fn new(name: &str, format: &'static str) -> Self {
        Self {
            name: name.to_owned(),
            format,
            info: Value::Null,
            loose: BTreeSet::new(),
            taken_at: BTreeMap::new(),
        }
    }

    pub(super) fn is_raw(&self) -> bool {
        self.format == "raw"
    }

    /// In bytes.
    pub(super) fn size(&self) -> u64 {
        self.info["virtual-size"].as_u64().unwrap()
    }

    fn data(&self) -> &Value {
        &self.info["format-specific"]["data"]
    }

    /// A size to which it may be changed: QEMU does not clear the rest of the cluster in which a smaller disk ends, and
    /// shows it when the disk grows again.
    pub(super) fn may_end_at(&self, size: u64) -> u64 {
        let whole = size.next_multiple_of(self.cluster());
        if size < self.size() { whole.min(self.size()) } else { size }
    }

    /// The rest of the cluster in which it ended before it grew from `old` bytes to `new`, if it ended within one: the
    /// guest's commands that fail unless there are zeroes, and that write them. QEMU's copy-on-write takes what a
    /// longer backing file has past the image's end, and shows it when the disk grows.
    pub(super) fn rest_of_end(&self, old: u64, new: u64) -> Option<[String; 2]> {
        let length = old.next_multiple_of(self.cluster()).min(new).checked_sub(old)?;
        (length > 0)
            .then(|| [format!("read -P 0 {old} {length}"), format!("write -z {old} {length}")])
    }

    pub(super) fn is_v2(&self) -> bool {
        self.data()["compat"] == "0.10"
    }

    pub(super) fn has_subclusters(&self) -> bool {
        self.data()["extended-l2"] == true
    }

    pub(super) fn has_data_file(&self) -> bool {
        self.data()["data-file"].is_string()
    }

    pub(super) fn has_backing(&self) -> bool {
        self.info["backing-filename"].is_string()
    }

    /// In bytes.
    pub(super) fn cluster(&self) -> u64 {
        self.info["cluster-size"].as_u64().unwrap_or(512)
    }

    /// The ids of the internal snapshots.
    pub(super) fn snapshots(&self) -> Vec<String> {
        let list = self.info["snapshots"].as_array().into_iter().flatten();
        list.map(|snapshot| snapshot["id"].as_str().unwrap().to_owned()).collect()
    }

    /// The name of a snapshot.
    pub(super) fn snapshot_name(&self, id: &str) -> String {
        let list = self.info["snapshots"].as_array().into_iter().flatten();
        let mut found = list.filter(|snapshot| snapshot["id"] == id);
        found.next().unwrap()["name"].as_str().unwrap().to_owned()
    }

    /// The names of the bitmaps; those that QEMU takes for consistent, or the others.
    pub(super) fn bitmaps(&self, consistent: bool) -> Vec<String> {
        let list = self.data()["bitmaps"].as_array().into_iter().flatten();
        let in_use = |bitmap: &&Value| {
            bitmap["flags"].as_array().unwrap().iter().any(|flag| flag == "in-use")
        };
        list.filter(|bitmap| in_use(bitmap) != consistent)
            .map(|bitmap| bitmap["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Whether its refcounts can count so many references. QEMU adds the references of a snapshot that it applies to
    /// those of the disk before it takes these away.
    pub(super) fn may_count(&self, references: u64) -> bool {
        let bits = self.data()["refcount-bits"].as_u64().unwrap_or(16);
        bits >= 64 || references < 1 << bits
    }

    /// Whether its refcounts are so narrow that compressed clusters in one host cluster can fill them. Each program
    /// puts together others.
    pub(super) fn is_narrow(&self) -> bool {
        self.data()["refcount-bits"].as_u64().is_some_and(|bits| bits < 16)
    }

    /// The newest snapshot has the size of the disk.
    pub(super) fn note_snapshot_size(&mut self) {
        let size = self.size();
        for id in self.snapshots() {
            self.taken_at.entry(id).or_insert(size);
        }
    }

    /// Other backing contents are below this image.
    pub(super) fn loosen(&mut self) {
        self.loose.extend(self.snapshots());
    }
}

/// Who writes for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guest {
    Qemu,
    Isobath,
    /// Each program into its own copy.
    Own,
}

/// The chain; the base comes first.
pub(super) struct Chain {
    root: TempDir,
    /// QEMU's copy and Isobath's.
    pub(super) sides: [PathBuf; 2],
    pub(super) images: Vec<Image>,
    made: u32,
    pub(super) log: Vec<String>,
    done: BTreeMap<&'static str, u64>,
    /// The files as they were judged last.
    pub(super) files: [Files; 2],
    /// And the time before.
    pub(super) before: [Files; 2],
    /// The step copies data that the disk shows already: QEMU marks it in the bitmaps, Isobath does not.
    pub(super) copies: bool,
    /// The step commits an image that has other clusters in the one copy than in the other.
    pub(super) unlike: bool,
    /// The size that a disk had before the step made it longer: Isobath marks all that is new in the bitmaps, QEMU what
    /// is written there.
    pub(super) grown_from: Option<u64>,
}

/// The files of a directory, and what they hold.
pub(super) type Files = BTreeMap<OsString, Vec<u8>>;

impl Chain {
    /// Makes a chain, by QEMU, and copies it.
    pub(super) fn random(rng: &mut StdRng) -> Self {
        let root = tempfile::tempdir().unwrap();
        let sides = ["qemu", "isobath"].map(|side| root.path().join(side));
        for side in &sides {
            fs::create_dir(side).unwrap();
        }
        let mut chain = Self {
            root,
            sides,
            images: Vec::new(),
            made: 0,
            log: Vec::new(),
            done: BTreeMap::new(),
            files: Default::default(),
            before: Default::default(),
            copies: false,
            unlike: false,
            grown_from: None,
        };
        let count = rng.random_range(2..=6);
        let size = random_size(rng);
        while chain.images.len() < count {
            let raw = chain.images.is_empty() && rng.random_bool(0.2);
            let name = chain.new_name(if raw { "raw" } else { "qcow2" });
            let format = if raw { "raw" } else { "qcow2" };
            let size = if rng.random_bool(0.3) { random_size(rng) } else { size };
            let create = chain.create(rng, &name, format, size);
            let _ = chain.qemu(0, &create).ok();
            let cluster = 1 << rng.random_range(9..=16);
            let commands = guest_commands(rng, size, cluster, 8, true);
            let _ = chain.guest(Guest::Qemu, 0, &name, format, &commands).ok();
            if !raw && rng.random_bool(0.4) && !create.join(" ").contains("data_file") {
                // QEMU 7.2 miscounts where compressed clusters and others are written by one process, and compresses
                // only into what is not allocated.
                for command in compressed(rng, size, 1 << 16) {
                    let _ = chain.guest(Guest::Qemu, 0, &name, format, &[command]);
                }
            }
            chain.images.push(Image::new(&name, format));
            if format == "qcow2" && chain.qemu(0, &["check", "-f", "qcow2", &name]).code() != 0 {
                return Self::random(rng);
            }
        }
        for entry in fs::read_dir(&chain.sides[0]).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), chain.sides[1].join(entry.file_name())).unwrap();
        }
        chain.judge();
        chain
    }

    /// What was done, and how often.
    pub(super) fn done(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.done.iter().map(|(what, times)| (*what, *times))
    }

    pub(super) fn count(&mut self, what: &'static str) {
        *self.done.entry(what).or_default() += 1;
    }

    pub(super) fn new_name(&mut self, suffix: &str) -> String {
        self.made += 1;
        format!("{}.{suffix}", self.made)
    }

    /// The arguments that create an image above the active one.
    pub(super) fn create(
        &self,
        rng: &mut StdRng,
        name: &str,
        format: &str,
        size: u64,
    ) -> Vec<String> {
        let mut create = strings(["create", "-q", "-f", format]);
        if let Some(below) = self.images.last() {
            create.extend(strings(["-b", &below.name, "-F", below.format]));
        }
        if format == "qcow2" {
            let options = random_options(rng, name, self.images.is_empty());
            create.extend(strings(["-o", &options]));
        }
        create.extend([name.to_owned(), size.to_string()]);
        create
    }

    /// Runs `qemu-img` on one copy.
    pub(super) fn qemu<S: AsRef<str>>(&self, side: usize, arguments: &[S]) -> Finished {
        qemu_img(&self.sides[side], arguments.iter().map(AsRef::as_ref))
    }

    /// Runs the guest's commands on one copy.
    pub(super) fn guest(
        &self,
        guest: Guest,
        side: usize,
        name: &str,
        format: &str,
        commands: &[String],
    ) -> Finished {
        let by_qemu = guest == Guest::Qemu || guest == Guest::Own && side == 0;
        io(&self.sides[side], by_qemu, name, format, commands)
    }

    /// Runs a command by each program on its own copy; returns whether both succeeded.
    #[track_caller]
    pub(super) fn both<S: AsRef<str>>(&mut self, arguments: &[S]) -> bool {
        self.each(arguments, arguments)
    }

    /// Runs `qemu-img` on its copy and `isobath` on the other one; returns whether both succeeded.
    #[track_caller]
    pub(super) fn each<S: AsRef<str>>(&mut self, theirs: &[S], ours: &[S]) -> bool {
        let words = |words: &[S]| words.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
        let (one, other) = (words(theirs), words(ours));
        self.log.push(if one == other { one } else { format!("{one} | {other}") });
        let theirs = self.qemu(0, theirs);
        let ours = isobath(&self.sides[1], ours.iter().map(AsRef::as_ref));
        self.alike(&theirs, &ours)
    }

    /// Has a guest write to both copies.
    #[track_caller]
    pub(super) fn guests(&mut self, guest: Guest, place: usize, commands: &[String]) -> bool {
        let image = &self.images[place];
        let (name, format) = (image.name.clone(), image.format);
        self.log.push(format!("{guest:?}: io -f {format} {name}: {}", commands.join("; ")));
        let [one, other] = [0, 1].map(|side| self.guest(guest, side, &name, format, commands));
        self.alike(&one, &other)
    }

    #[track_caller]
    fn alike(&mut self, theirs: &Finished, ours: &Finished) -> bool {
        let success = theirs.status.success();
        assert!(
            ours.code() == theirs.code(),
            "QEMU:\n{}Isobath:\n{}",
            theirs.report(),
            ours.report()
        );
        if !success {
            let line = self.log.last_mut().unwrap();
            line.push_str("   # ");
            line.push_str(ours.stderr.lines().next().unwrap_or("refused"));
        }
        success
    }

    /// QEMU's copy becomes what it was when it was judged last.
    pub(super) fn take_back(&mut self) {
        for (name, bytes) in &self.files[0] {
            fs::write(self.sides[0].join(name), bytes).unwrap();
        }
    }

    /// The images above this one are no longer part of the chain.
    pub(super) fn forget_above(&mut self, place: usize) {
        self.images.truncate(place + 1);
    }

    /// The bytes of a disk of one copy, as QEMU reads it; or of a snapshot.
    #[track_caller]
    pub(super) fn read(&self, side: usize, image: &Image, snapshot: Option<&str>) -> Vec<u8> {
        let mut convert = strings(["convert", "-f", image.format, "-O", "raw"]);
        if let Some(id) = snapshot {
            convert.extend(["-l".to_owned(), format!("snapshot.id={id}")]);
        }
        convert.extend(strings([&image.name, "../disk"]));
        let _ = self.qemu(side, &convert).ok();
        fs::read(self.root.path().join("disk")).unwrap()
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("after these commands:");
            for line in &self.log {
                eprintln!("  {line}");
            }
            if env::var_os("ISOBATH_HISTORIES_KEEP").is_some() {
                self.root.disable_cleanup(true);
                for (name, files) in ["qemu-before", "isobath-before"].iter().zip(&self.before) {
                    let directory = self.root.path().join(name);
                    fs::create_dir(&directory).unwrap();
                    for (name, bytes) in files {
                        fs::write(directory.join(name), bytes).unwrap();
                    }
                }
                eprintln!("the images are in {}", self.root.path().display());
            }
        }
    }
}

/// Runs a guest's commands on an image, by `qemu-io` or `isobath io`.
pub(super) fn io(
    directory: &Path,
    by_qemu: bool,
    name: &str,
    format: &str,
    commands: &[String],
) -> Finished {
    let mut arguments = args!["-f", format];
    for command in commands {
        arguments.extend(args!["-c", command]);
    }
    arguments.push(name.into());
    if by_qemu {
        let program = qemu::program("qemu-io");
        run(Command::new(program).current_dir(directory).args(arguments))
    } else {
        isobath(directory, [args!["io"], arguments].concat())
    }
}

pub(super) fn strings<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

/// A disk's size in bytes: whole sectors.
pub(super) fn random_size(rng: &mut StdRng) -> u64 {
    let unit: u64 = if rng.random() { 512 } else { 1 << 16 };
    rng.random_range(1..=LARGEST / unit) * unit
}

/// Options of a qcow2 image, as for `-o`.
pub(super) fn random_options(rng: &mut StdRng, name: &str, base: bool) -> String {
    if rng.random_bool(0.2) {
        return format!("compat=0.10,cluster_size={}", 512 << rng.random_range(0..8));
    }
    let extended = rng.random_bool(0.3);
    let cluster = 512_u64 << rng.random_range(if extended { 5..8 } else { 0..8 });
    let mut options = format!("compat=1.1,cluster_size={cluster}");
    if extended {
        options.push_str(",extended_l2=on");
    }
    if rng.random_bool(0.4) {
        options += &[",refcount_bits=", &(1 << rng.random_range(0..=6)).to_string()].concat();
    } else if rng.random_bool(0.3) {
        options.push_str(",lazy_refcounts=on");
    }
    if rng.random_bool(0.3) {
        options.push_str(",compression_type=zstd");
    }
    if rng.random_bool(0.15) {
        options += &[",data_file=", name, ".data"].concat();
        if base && rng.random() {
            options.push_str(",data_file_raw=on");
        }
    }
    options
}

/// Commands of a guest, for a disk of this many bytes.
pub(super) fn guest_commands(
    rng: &mut StdRng,
    size: u64,
    unit: u64,
    most: usize,
    discards: bool,
) -> Vec<String> {
    let longest = if rng.random() { 200 << 10 } else { 3 * unit };
    let shape = Shape { size, longest, unit };
    let count = rng.random_range(1..=most);
    let mut commands: Vec<_> =
        shape.ops(rng, count).iter().filter_map(isobath_testkit::ops::Op::io_command).collect();
    commands.retain(|command| discards || !command.starts_with("discard"));
    if commands.is_empty() {
        commands.push("flush".to_owned());
    }
    commands
}

/// Commands that write compressed clusters, of this size or smaller ones.
pub(super) fn compressed(rng: &mut StdRng, size: u64, cluster: u64) -> Vec<String> {
    let mut commands = Vec::new();
    for _ in 0..rng.random_range(1..=4) {
        let first = rng.random_range(0..size.div_ceil(cluster));
        let offset = first * cluster;
        let length = (cluster * rng.random_range(1..=3)).min(size - offset);
        commands.push(format!("write -c -P {} {offset} {length}", rng.random_range(1..=255)));
    }
    commands
}

/// The files of a directory.
pub(super) fn files(directory: &Path) -> Files {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap())).collect()
}

/// Whether the image has compressed clusters, by its `check`.
pub(super) fn has_compressed(check: &Value) -> bool {
    check["compressed-clusters"].as_u64().is_some_and(|count| count > 0)
}

/// Whether the image itself has data, by its `map`. Without, QEMU's commit has left it no table, and so nothing that a
/// snapshot refers to; Isobath's leaves the tables.
pub(super) fn has_data(map: &Value) -> bool {
    map.as_array().unwrap().iter().any(|run| run["depth"] == 0 && run["data"] == true)
}
