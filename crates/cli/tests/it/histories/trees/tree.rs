//! A tree of images in several directories, in two copies, and how commands are run on both.

use super::names::{DIRECTORIES, Form, LINKS, ROOT, hard, link};
use crate::histories::chain::{
    Guest, Image, compressed, guest_commands, io, random_options, strings,
};
use crate::programs::{isobath, qemu_img};
use crate::serving::ISOBATH;
use isobath_testkit::daemon::Daemon;
use isobath_testkit::process::{Finished, Ready, Server};
use isobath_testkit::qemu;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use tempfile::{Builder, TempDir};

/// The largest disk, in bytes.
const LARGEST: u64 = 384 << 10;

/// An image of the tree.
pub(super) struct Node {
    /// Its name is its path from the root.
    pub(super) image: Image,
    /// What it is an overlay of.
    pub(super) below: Option<usize>,
    /// How it names that.
    pub(super) form: Form,
    /// A server of Isobath's copy was killed; only Isobath can open it, until it has been opened for writing.
    pub(super) unsettled: bool,
    /// A killed server, or QEMU, may have left clusters that nothing uses.
    pub(super) leaky: bool,
}

/// An image that is in use while other commands run.
pub(super) struct Held {
    pub(super) id: usize,
    pub(super) writable: bool,
    /// Whether it is Isobath's server that uses it in Isobath's copy.
    ours: bool,
    pub(super) servers: [Server; 2],
    /// Steps until it is let go.
    pub(super) left: u32,
}

/// The files of a copy, by their paths from the root, and what they hold.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

pub(super) struct Tree {
    pub(super) root: TempDir,
    /// QEMU's copy and Isobath's; their paths are of one length.
    pub(super) sides: [PathBuf; 2],
    pub(super) nodes: BTreeMap<usize, Node>,
    made: usize,
    pub(super) log: Vec<String>,
    pub(super) done: BTreeMap<String, u64>,
    pub(super) daemons: [Daemon; 2],
    pub(super) held: Option<Held>,
    /// The files as they were judged last.
    pub(super) files: [Files; 2],
    /// And the time before.
    pub(super) before: [Files; 2],
    /// `qemu-img` goes on with Isobath's copy.
    pub(super) turn: bool,
    /// What a step does, for the judge.
    pub(super) doing: Doing,
    /// A guest has written what begins an image.
    pub(super) magic: bool,
}

/// What a step does.
#[derive(Default)]
pub(super) struct Doing {
    /// It changes what this image shows: what its overlays show depends on what each program has allocated there.
    pub(super) written: Option<usize>,
    /// Isobath refused it, and must have changed nothing.
    pub(super) refused: bool,
    /// It copies data that the disk shows already: QEMU marks it in the bitmaps, Isobath does not.
    pub(super) copies: bool,
    /// It commits an image that has other clusters in the one copy than in the other.
    pub(super) unlike: bool,
    /// The size that a disk had before it grew: Isobath marks all that is new in the bitmaps, QEMU what
    /// is written there.
    pub(super) grown_from: Option<u64>,
}

impl Tree {
    /// Makes a tree, by QEMU, and copies it.
    pub(super) fn random(rng: &mut StdRng) -> Self {
        let mut tree = Self::empty();
        let count = rng.random_range(3..=6);
        let size = random_size(rng);
        while tree.nodes.len() < count {
            let below = tree.any(rng);
            let format = if below.is_none() && rng.random_bool(0.4) { "raw" } else { "qcow2" };
            let size = if rng.random_bool(0.3) { random_size(rng) } else { size };
            let file = tree.new_file(rng, format);
            let create = tree.create(rng, &file, below, Form::Plain, format, size);
            let _ = tree.program(0, false, &create).ok();
            let commands = guest_commands(rng, size, 4096, 6, true);
            let _ = tree.io(0, true, &file, format, &commands).ok();
            if format == "qcow2" && rng.random_bool(0.3) {
                for command in compressed(rng, size, 1 << 16) {
                    let _ = tree.io(0, true, &file, format, &[command]);
                }
            }
            // QEMU 7.2 miscounts compressed clusters beside others.
            if format == "qcow2" && tree.program(0, false, &["check", &file]).code() != 0 {
                fs::remove_file(tree.sides[0].join(&file)).unwrap();
                continue;
            }
            tree.add(&file, format, below, Form::Plain);
        }
        for file in tree.nodes.values().map(|node| &node.image.name) {
            fs::copy(tree.sides[0].join(file), tree.sides[1].join(file)).unwrap();
        }
        for id in tree.nodes.keys().copied().collect::<Vec<_>>() {
            let Some(below) = tree.nodes[&id].below else { continue };
            let form = Form::random(rng);
            let rebase = tree.unsafe_rebase(rng, id, below, form);
            if tree.each(&rebase, &rebase) {
                tree.nodes.get_mut(&id).unwrap().form = form;
                if rng.random_bool(0.25) {
                    tree.unname_format(id);
                }
            }
        }
        tree.log.push("---".to_owned());
        tree.doing = Doing::default();
        tree.judge();
        tree
    }

    fn empty() -> Self {
        let shared = Path::new("/dev/shm");
        let shared = if shared.is_dir() { shared.to_owned() } else { env::temp_dir() };
        let root = Builder::new().prefix("isobath-trees-").tempdir_in(shared).unwrap();
        let sides = ["q", "i"].map(|side| root.path().join(side));
        for side in &sides {
            for directory in DIRECTORIES {
                fs::create_dir_all(side.join(directory)).unwrap();
            }
            for (name, directory) in LINKS {
                symlink(directory, side.join(name)).unwrap();
            }
        }
        let daemons = sides.each_ref().map(|side| Daemon::start_in(side));
        Self {
            root,
            sides,
            nodes: BTreeMap::new(),
            made: 0,
            log: Vec::new(),
            done: BTreeMap::new(),
            daemons,
            held: None,
            files: Default::default(),
            before: Default::default(),
            turn: false,
            doing: Doing::default(),
            magic: false,
        }
    }

    pub(super) fn count(&mut self, what: impl Into<String>) {
        *self.done.entry(what.into()).or_default() += 1;
    }

    pub(super) fn add(
        &mut self,
        file: &str,
        format: &'static str,
        below: Option<usize>,
        form: Form,
    ) {
        let image = Image::new(file, format);
        let node = Node { image, below, form, unsettled: false, leaky: false };
        self.nodes.insert(self.made, node);
    }

    /// The path of a new image, in any of the directories.
    pub(super) fn new_file(&mut self, rng: &mut StdRng, suffix: &str) -> String {
        self.made += 1;
        let directory = DIRECTORIES.choose(rng).unwrap();
        let slash = if directory.is_empty() { "" } else { "/" };
        format!("{directory}{slash}{}.{suffix}", self.made)
    }

    pub(super) fn any(&self, rng: &mut StdRng) -> Option<usize> {
        self.nodes.keys().copied().collect::<Vec<_>>().choose(rng).copied()
    }

    /// Any image of which this holds.
    pub(super) fn pick(&self, rng: &mut StdRng, holds: impl Fn(usize) -> bool) -> Option<usize> {
        let all: Vec<_> = self.nodes.keys().copied().filter(|id| holds(*id)).collect();
        all.choose(rng).copied()
    }

    pub(super) fn image(&self, id: usize) -> &Image {
        &self.nodes[&id].image
    }

    pub(super) fn file(&self, id: usize) -> String {
        self.nodes[&id].image.name.clone()
    }

    /// The images of a chain, the active one first.
    pub(super) fn chain(&self, id: usize) -> Vec<usize> {
        std::iter::successors(Some(id), |id| self.nodes[id].below).collect()
    }

    pub(super) fn overlays(&self, id: usize) -> Vec<usize> {
        let all = self.nodes.iter();
        all.filter(|(_, node)| node.below == Some(id)).map(|(overlay, _)| *overlay).collect()
    }

    /// All images that are somewhere above this one.
    pub(super) fn above(&self, id: usize) -> Vec<usize> {
        let is_above = |other: &usize| *other != id && self.chain(*other).contains(&id);
        self.nodes.keys().copied().filter(is_above).collect()
    }

    /// Whether it is left to QEMU: Isobath opens it depending on where it runs.
    pub(super) fn foreign(&self, id: usize) -> bool {
        self.chain(id)
            .iter()
            .any(|id| self.nodes[id].below.is_some() && self.nodes[id].form == Form::Json)
    }

    /// Whether its backing file is another one to a program that runs elsewhere.
    pub(super) fn depends_on_directory(&self, id: usize) -> bool {
        let node = &self.nodes[&id];
        let name = self.image(id).info["backing-filename"].as_str().unwrap_or_default();
        let absolute = name.contains(r#""filename":"/"#);
        node.below.is_some() && node.form == Form::Json && !absolute
    }

    pub(super) fn unsettled(&self, id: usize) -> bool {
        self.chain(id).iter().any(|id| self.nodes[id].unsettled)
    }

    /// Whether the image's header does not say of which format the image below is.
    pub(super) fn nameless(&self, id: usize) -> bool {
        let info = &self.image(id).info;
        info["backing-filename"].is_string() && !info["backing-filename-format"].is_string()
    }

    /// Whether an image is in use that needs this one.
    pub(super) fn in_use(&self, id: usize) -> bool {
        self.held.as_ref().is_some_and(|held| self.chain(held.id).contains(&id))
    }

    /// An image's contents have changed: what its overlays' snapshots hold depends on what was allocated.
    pub(super) fn wrote(&mut self, id: usize) {
        self.doing.written = Some(id);
        for above in self.above(id) {
            self.nodes.get_mut(&above).unwrap().image.loosen();
        }
    }

    /// The name of an image for a form, with the links that it needs.
    pub(super) fn name(&self, rng: &mut StdRng, from: &str, id: usize, form: Form) -> String {
        let image = self.image(id);
        for side in &self.sides {
            let path = side.join(&image.name);
            let name = path.file_name().unwrap().to_str().unwrap();
            let (link, hard) = (path.with_file_name(link(name)), path.with_file_name(hard(name)));
            if form == Form::Link && !link.is_symlink() {
                symlink(name, link).unwrap();
            } else if form == Form::Hard && !hard.exists() {
                fs::hard_link(&path, hard).unwrap();
            }
        }
        form.name(rng, from, &image.name, image.format)
    }

    /// An image as the argument of a command.
    pub(super) fn argument(&self, rng: &mut StdRng, id: usize) -> String {
        let form = match rng.random_range(0..10) {
            0 => Form::Absolute,
            1 => Form::Link,
            2 => Form::Hard,
            3 => Form::Directory,
            _ => Form::Plain,
        };
        self.name(rng, "", id, form)
    }

    /// The arguments that create an image.
    pub(super) fn create(
        &self,
        rng: &mut StdRng,
        file: &str,
        below: Option<usize>,
        form: Form,
        format: &str,
        size: u64,
    ) -> Vec<String> {
        let mut create = strings(["create", "-q", "-f", format]);
        if let Some(below) = below {
            let name = self.name(rng, file, below, form);
            create.extend(strings(["-b", &name, "-F", self.image(below).format]));
        }
        if format == "qcow2" {
            let options = random_options(rng, file, true);
            let here = |option: &&str| !option.starts_with("data_file");
            let options: Vec<_> = options.split(',').filter(here).collect();
            create.extend(strings(["-o", &options.join(",")]));
        }
        create.extend([file.to_owned(), size.to_string()]);
        create
    }

    pub(super) fn unsafe_rebase(
        &self,
        rng: &mut StdRng,
        id: usize,
        onto: usize,
        form: Form,
    ) -> Vec<String> {
        let name = self.name(rng, &self.file(id), onto, form);
        strings(["rebase", "-u", "-b", &name, "-F", self.image(onto).format, &self.file(id)])
    }

    /// The header does not say of which format the image below is, as in images that QEMU made until version 6.0.
    pub(super) fn unname_format(&mut self, id: usize) {
        let file = self.file(id);
        self.log.push(format!("{file}: without the format of its backing file"));
        for side in &self.sides {
            unname_format(&side.join(&file));
        }
        self.count("without a format");
    }

    /// Runs a program on one copy: `qemu-img` or `isobath`.
    pub(super) fn program<S: AsRef<str>>(
        &self,
        side: usize,
        ours: bool,
        arguments: &[S],
    ) -> Finished {
        let directory = &self.sides[side];
        let root = directory.to_str().unwrap();
        let arguments = arguments.iter().map(|word| word.as_ref().replace(ROOT, root));
        if ours { isobath(directory, arguments) } else { qemu_img(directory, arguments) }
    }

    /// Runs the guest's commands on one copy, by `qemu-io` or `isobath`.
    pub(super) fn io(
        &self,
        side: usize,
        by_qemu: bool,
        file: &str,
        format: &str,
        commands: &[String],
    ) -> Finished {
        io(&self.sides[side], by_qemu, file, format, commands)
    }

    /// Runs a command by each program on its own copy; returns whether both succeeded.
    #[track_caller]
    pub(super) fn both<S: AsRef<str>>(&mut self, arguments: &[S]) -> bool {
        self.each(arguments, arguments)
    }

    /// Runs `qemu-img` on its copy and `isobath` on the other one, or `qemu-img` if it is its turn there; returns
    /// whether both succeeded.
    #[track_caller]
    pub(super) fn each<S: AsRef<str>>(&mut self, theirs: &[S], ours: &[S]) -> bool {
        let words = |words: &[S]| words.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
        let (one, other) = (words(theirs), words(ours));
        let turn = self.turn;
        if turn {
            self.log.push(format!("qemu-img: {one}"));
            self.count("by qemu-img on Isobath's copy");
        } else {
            self.log.push(if one == other { one } else { format!("{one} | {other}") });
        }
        let done = [
            self.program(0, false, theirs),
            self.program(1, !turn, if turn { theirs } else { ours }),
        ];
        self.alike(&done)
    }

    /// Has a guest write to both copies.
    #[track_caller]
    pub(super) fn guests(&mut self, guest: Guest, id: usize, commands: &[String]) -> bool {
        let (file, format) = (self.file(id), self.image(id).format);
        self.log.push(format!("{guest:?}: io -f {format} {file}: {}", commands.join("; ")));
        let by_qemu = [guest != Guest::Isobath, guest == Guest::Qemu];
        let done = [0, 1].map(|side| self.io(side, by_qemu[side], &file, format, commands));
        self.alike(&done)
    }

    #[track_caller]
    fn alike(&mut self, done: &[Finished; 2]) -> bool {
        let [theirs, ours] = done;
        let (their, our) = (theirs.report(), ours.report());
        assert!(ours.code() == theirs.code(), "QEMU:\n{their}Isobath:\n{our}");
        let success = theirs.status.success();
        if !success {
            self.note_refusal(ours);
        }
        success
    }

    /// Notes what was said of a refusal; that an image is in use must be said with by whom.
    #[track_caller]
    pub(super) fn note_refusal(&mut self, ours: &Finished) {
        let line = self.log.last_mut().unwrap();
        line.push_str("   # ");
        line.push_str(ours.stderr.lines().next().unwrap_or("refused"));
        // QEMU may have written before it refused.
        self.doing.refused = !self.turn;
        let Some(held) = self.held.as_ref().filter(|_| !self.turn) else { return };
        // Who has opened a file by another hard link is not found.
        let mut chain = self.chain(held.id).into_iter();
        let by_link =
            ours.stderr.contains("hard-") || chain.any(|id| self.nodes[&id].form == Form::Hard);
        if ours.command.contains("isobath ") && ours.stderr.contains("lock") && !by_link {
            let process = format!("process {}", held.servers[1].pid());
            assert!(ours.stderr.contains(&process), "it is {process}: {}", ours.report());
            self.count("refused: in use");
        }
    }

    /// Begins to use an image, beside what comes next.
    pub(super) fn hold(&mut self, rng: &mut StdRng, id: usize, writable: bool) {
        let file = self.file(id);
        let ours = !self.foreign(id) && rng.random();
        let who = if ours { "isobath" } else { "qemu-nbd" };
        let how = if writable { "" } else { ", read-only" };
        self.log.push(format!("{file} is served by {who}{how}"));
        let servers = [0, 1].map(|side| {
            let socket = self.root.path().join(format!("held{side}"));
            let pid = socket.with_extension("pid");
            let mut command = if side == 1 && ours {
                let mut command = Command::new(ISOBATH);
                command.args(["serve", "--export-name", "d", "--nbd"]);
                command.arg(format!("unix:{}", socket.display()));
                command
            } else {
                let mut command = Command::new(qemu::program("qemu-nbd"));
                command.args(["-t", "-f", "qcow2", "-k"]).arg(&socket).arg("--pid-file").arg(&pid);
                command
            };
            if !writable {
                command.arg("-r");
            }
            command.arg(&file).current_dir(&self.sides[side]);
            let _ = fs::remove_file(&socket);
            let _ = fs::remove_file(&pid);
            // A qemu-nbd has the socket before it has opened the image.
            let line = Ready::Line("-blockdev");
            let ready = if side == 1 && ours { line } else { Ready::File(&pid) };
            Server::start(&mut command, ready)
        });
        self.count(format!("served by {who}"));
        self.nodes.get_mut(&id).unwrap().unsettled |= ours && writable;
        self.held = Some(Held { id, writable, ours, servers, left: rng.random_range(1..=4) });
    }

    /// Lets go of what is in use.
    pub(super) fn release(&mut self) {
        let Some(held) = self.held.take() else { return };
        let [theirs, ours] = held.servers;
        // A qemu-nbd that has just begun is killed by the signal.
        let end = |server: Server, ours| if ours { server.stop().ok() } else { server.stop_qemu() };
        drop((end(theirs, false), end(ours, held.ours)));
        self.log.push(format!("{} is not served any more", self.file(held.id)));
        if held.writable {
            self.nodes.get_mut(&held.id).unwrap().unsettled = false;
        }
    }

    /// An image and all above it are no longer part of the tree.
    pub(super) fn forget(&mut self, id: usize) {
        for gone in [self.above(id), vec![id]].concat() {
            self.remove_file(gone);
            self.nodes.remove(&gone);
        }
    }

    /// An image's file is gone from both copies, and so are its links.
    pub(super) fn remove_file(&mut self, id: usize) {
        let file = self.file(id);
        for (side, files) in self.sides.iter().zip(&mut self.files) {
            let path = side.join(&file);
            let name = path.file_name().unwrap().to_str().unwrap();
            for other in [name.to_owned(), link(name), hard(name)] {
                let _ = fs::remove_file(path.with_file_name(other));
            }
            files.retain(|name, _| side.join(name).exists());
        }
    }

    /// Both copies become what they were when they were judged last.
    pub(super) fn take_back(&mut self) {
        for (side, files) in self.sides.iter().zip(&self.files) {
            for (name, bytes) in files {
                fs::write(side.join(name), bytes).unwrap();
            }
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("after these commands:");
            for line in &self.log {
                eprintln!("  {line}");
            }
            if env::var_os("ISOBATH_HISTORIES_KEEP").is_some() {
                self.root.disable_cleanup(true);
                for (name, files) in ["q-before", "i-before"].iter().zip(&self.before) {
                    for (file, bytes) in files {
                        let path = self.root.path().join(name).join(file);
                        fs::create_dir_all(path.parent().unwrap()).unwrap();
                        fs::write(path, bytes).unwrap();
                    }
                }
                eprintln!("the images are in {}", self.root.path().display());
            }
        }
    }
}

/// A disk's size in bytes: whole sectors.
pub(super) fn random_size(rng: &mut StdRng) -> u64 {
    let unit: u64 = if rng.random() { 512 } else { 1 << 16 };
    rng.random_range(1..=LARGEST / unit) * unit
}

/// Removes the format of an image's backing file from its header.
pub(super) fn unname_format(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let place = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]);
    bytes[place.unwrap()..][..4].copy_from_slice(b"none");
    fs::write(path, bytes).unwrap();
}

/// The files of a copy.
pub(super) fn files(root: &Path) -> Files {
    let mut files = Files::new();
    for directory in DIRECTORIES {
        for entry in fs::read_dir(root.join(directory)).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_file() {
                let path = entry.path();
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(path).unwrap());
            }
        }
    }
    files
}
