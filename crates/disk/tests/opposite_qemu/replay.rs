//! Carrying out a history, and judging what comes of it after every step.

use crate::generate::NOISES;
use crate::history::{Base, DataFile, Fill, History, ImageOptions, Op, Session, Side, Step};
use crate::{generate, isobath_side, qemu_side};
use isobath_disk::Preallocation;
use isobath_testkit::model::Model;
use isobath_testkit::{args, qemu};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::fs;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) histories: u64,
    pub(crate) layers: u64,
    pub(crate) sessions: u64,
    pub(crate) isobath: u64,
    pub(crate) qemu: u64,
    pub(crate) bytes_compared: u64,
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.histories += other.histories;
        self.layers += other.layers;
        self.sessions += other.sessions;
        self.isobath += other.isobath;
        self.qemu += other.qemu;
        self.bytes_compared += other.bytes_compared;
    }
}

/// Carries the history out in `directory`; panics where something is wrong.
pub(crate) fn replay(history: &History, directory: &Path) -> Totals {
    let noises = Noises::make(directory);
    let sides: &[Option<Side>] =
        if history.twin { &[Some(Side::Isobath), Some(Side::Qemu)] } else { &[None] };
    let mut worlds: Vec<World> = sides
        .iter()
        .map(|only| {
            let name = only.map_or("both".to_owned(), |side| side.to_string());
            World::new(directory.join(name), *only, &noises, &history.base)
        })
        .collect();
    for part in parts(&history.steps) {
        for world in &mut worlds {
            world.take(part);
        }
        if let [one, other] = worlds.as_slice() {
            one.compare(other);
        }
    }
    let mut totals = Totals { histories: 1, ..Totals::default() };
    for world in worlds {
        world.end();
        totals += world.totals;
    }
    totals
}

/// The steps, those of one opening together.
fn parts(steps: &[Step]) -> Vec<&[Step]> {
    steps.chunk_by(|_, next| matches!(next, Step::Op(_))).collect()
}

struct Noises {
    directory: PathBuf,
    blocks: Arc<[Vec<u8>]>,
}

impl Noises {
    fn make(directory: &Path) -> Self {
        let mut rng = StdRng::seed_from_u64(1);
        let blocks: Arc<[_]> = (0..NOISES).map(|_| generate::noise(&mut rng)).collect();
        for (number, block) in blocks.iter().enumerate() {
            fs::write(directory.join(format!("noise{number}")), block).unwrap();
        }
        Self { directory: directory.to_owned(), blocks }
    }
}

/// One chain of files.
struct World<'a> {
    directory: PathBuf,
    /// The side that does everything, where only one does.
    only: Option<Side>,
    noises: &'a Noises,
    model: Model,
    /// From the base up.
    layers: Vec<Layer>,
    /// Images made so far.
    made: usize,
    /// Both sides must show the same bytes: nothing was left to their choice.
    exact: bool,
    totals: Totals,
}

struct Layer {
    path: PathBuf,
    format: &'static str,
    data: Option<PathBuf>,
    options: ImageOptions,
    size: u64,
    snapshots: Vec<(String, Model)>,
    bitmaps: usize,
    /// As they were when another layer came above.
    frozen: Vec<(PathBuf, SystemTime, u64)>,
}

impl Layer {
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.path).chain(&self.data)
    }
}

impl<'a> World<'a> {
    fn new(directory: PathBuf, only: Option<Side>, noises: &'a Noises, base: &Base) -> Self {
        fs::create_dir(&directory).unwrap();
        let mut world = Self {
            directory,
            only,
            noises,
            model: Model::new(0),
            layers: Vec::new(),
            made: 0,
            exact: true,
            totals: Totals::default(),
        };
        match base {
            Base::None => {}
            Base::Raw(length) => {
                let path = world.new_file("raw");
                fs::write(&path, world.scattered(*length)).unwrap();
                world.add(path, "raw", None, ImageOptions::default());
            }
            Base::Converted(options, size, compressed) => {
                let raw = world.directory.join("source");
                fs::write(&raw, world.scattered(*size)).unwrap();
                let path = world.new_file("qcow2");
                let mut arguments = args!["convert", "-f", "raw", "-O", "qcow2"];
                if *compressed {
                    arguments.push("-c".into());
                }
                arguments.extend(args!["-o", options.for_qemu(Path::new("")), &raw, &path]);
                let _ = qemu::img(arguments).ok();
                fs::remove_file(raw).unwrap();
                world.add(path, "qcow2", None, *options);
                world.verify(false);
            }
        }
        world
    }

    /// A disk's bytes: noise, zeroes and what compresses, by turns.
    fn scattered(&mut self, length: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length as usize);
        let mut turn: u8 = 0;
        while (bytes.len() as u64) < length {
            let fill = match turn % 5 {
                0 | 3 => Fill::Noise(turn % NOISES),
                1 => Fill::Byte(0),
                _ => Fill::Byte(turn),
            };
            let part = 5000 + 3777 * u64::from(turn);
            bytes.extend(isobath_side::bytes(fill, &self.noises.blocks, part));
            turn = turn.wrapping_add(1);
        }
        bytes.truncate(length as usize);
        self.model = Model::from_bytes(&bytes);
        self.model.resize(length.next_multiple_of(512));
        bytes
    }

    fn new_file(&mut self, extension: &str) -> PathBuf {
        self.made += 1;
        self.directory.join(format!("{}.{extension}", self.made))
    }

    fn add(
        &mut self,
        path: PathBuf,
        format: &'static str,
        data: Option<PathBuf>,
        options: ImageOptions,
    ) {
        if let Some(below) = self.layers.last_mut() {
            below.frozen = below.files().map(|file| stamp(file)).collect();
        }
        let size = self.model.size();
        let snapshots = Vec::new();
        let frozen = Vec::new();
        self.layers.push(Layer {
            path,
            format,
            data,
            options,
            size,
            snapshots,
            bitmaps: 0,
            frozen,
        });
    }

    /// The active layer, if it is one that can be written.
    fn active(&mut self) -> Option<&mut Layer> {
        self.layers.last_mut().filter(|layer| layer.format == "qcow2")
    }

    fn take(&mut self, part: &[Step]) {
        let Some((first, rest)) = part.split_first() else { return };
        if let Step::Layer { by, options, size } = *first {
            self.layer(self.only.unwrap_or(by), options, size.unwrap_or(self.model.size()));
            return self.verify(false);
        }
        let backed = self.layers.len() > 1;
        let size = self.model.size();
        let Some(active) = self.layers.last_mut().filter(|layer| layer.format == "qcow2") else {
            return;
        };
        let options = active.options;
        let whole = options.data_file == DataFile::Inside;
        let path = active.path.clone();
        match first {
            Step::Layer { .. } | Step::Op(_) => return,
            Step::Open(session) => {
                let ops: Vec<Op> = rest
                    .iter()
                    .filter_map(|step| if let Step::Op(op) = step { Some(*op) } else { None })
                    .collect();
                return self.session(*session, &ops);
            }
            Step::Resize { by, size: to } => {
                // Version 2 cannot hide what a backing file has there, nor resize with snapshots.
                if options.v2 && (backed || !active.snapshots.is_empty()) {
                    return;
                }
                active.drop_bitmaps();
                active.size = *to;
                match self.only.unwrap_or(*by) {
                    Side::Isobath => isobath_side::resize(&path, *to),
                    Side::Qemu => {
                        let command = args!["resize", "-q", "--shrink", "-f", "qcow2"];
                        let _ = qemu::img([command, args![path, to.to_string()]].concat()).ok();
                    }
                }
            }
            Step::Snapshot => {
                // A refcount must hold one more.
                if !whole || options.refcount_order < 4 || active.snapshots.len() > 3 {
                    return;
                }
                let name = format!("s{}", self.made);
                self.made += 1;
                active.snapshots.push((name.clone(), self.model.clone()));
                let _ = qemu::img(args!["snapshot", "-c", name, path]).ok();
            }
            Step::Apply => {
                let Some((name, model)) = active.snapshots.last() else { return };
                if options.v2 && model.size() != size {
                    return;
                }
                let (name, model) = (name.clone(), model.clone());
                active.drop_bitmaps();
                active.size = model.size();
                let _ = qemu::img(args!["snapshot", "-a", name, path]).ok();
                self.model = model;
            }
            Step::Delete => {
                if active.snapshots.is_empty() {
                    return;
                }
                let (name, _) = active.snapshots.remove(0);
                let _ = qemu::img(args!["snapshot", "-d", name, path]).ok();
            }
            Step::Bitmap(granularity) => {
                if options.v2 || options.data_file == DataFile::Raw || active.bitmaps > 3 {
                    return;
                }
                let name = format!("b{}", active.bitmaps);
                active.bitmaps += 1;
                let granularity = granularity.to_string();
                let _ = qemu::img(args!["bitmap", "--add", "-g", granularity, path, name]).ok();
            }
            Step::Commit => return self.commit(),
        }
        if let Step::Resize { size, .. } = first {
            self.model.resize(*size);
        }
        self.verify(false);
    }

    fn layer(&mut self, by: Side, mut options: ImageOptions, size: u64) {
        let backing = self.layers.last().map(|layer| (layer.path.clone(), layer.format));
        if backing.is_some() {
            // As the generator has it: a history without its first layers is to stay possible.
            if options.data_file == DataFile::Raw {
                options.data_file = DataFile::Inside;
            }
            if !options.extended_l2 {
                options.preallocation = Preallocation::Off;
            }
        }
        let size = if size == 0 { 1 << 20 } else { size };
        let path = self.new_file("qcow2");
        let data = (options.data_file != DataFile::Inside).then(|| path.with_extension("data"));
        let data_name = data.clone().unwrap_or_default();
        let below = backing.as_ref().map(|(path, format)| (path.as_path(), *format));
        match by {
            Side::Qemu => {
                let mut arguments = args!["create", "-q", "-f", "qcow2"];
                if let Some((path, format)) = below {
                    arguments.extend(args!["-b", path, "-F", format]);
                }
                arguments.extend(args![
                    "-o",
                    options.for_qemu(&data_name),
                    &path,
                    size.to_string()
                ]);
                let _ = qemu::img(arguments).ok();
            }
            Side::Isobath => {
                isobath_side::make(&path, &options.for_isobath(size, below, &data_name));
            }
        }
        self.model.resize(size);
        self.add(path, "qcow2", data, options);
        self.totals.layers += 1;
    }

    fn commit(&mut self) {
        let [.., below, active] = self.layers.as_mut_slice() else { return };
        // Version 2 layers cannot hold a zero over data; another size would change what is seen.
        let possible = below.format == "qcow2" && !below.options.v2 && below.size == active.size;
        if !possible {
            return;
        }
        below.drop_bitmaps();
        below.frozen.clear();
        let path = &active.path;
        let _ = qemu::img(args!["commit", "-q", "-d", "-f", "qcow2", path]).ok();
        self.layers.pop();
        self.verify(false);
    }

    fn session(&mut self, mut session: Session, ops: &[Op]) {
        session.by = self.only.unwrap_or(session.by);
        let backed = self.layers.len() > 1;
        let size = self.model.size();
        let Some(active) = self.active() else { return };
        let options = active.options;
        let cluster = options.cluster();
        let compresses = options.data_file == DataFile::Inside
            && !(session.by == Side::Qemu && options.v2 && backed);
        let ops: Vec<Op> = ops
            .iter()
            .filter_map(|op| op.within(size, cluster))
            .map(|op| match op {
                Op::Compressed { fill, .. } if !compresses => {
                    let (offset, length) = op.range(size, cluster);
                    Op::Write { offset, length, fill }
                }
                other => other,
            })
            .collect();
        let path = active.path.clone();
        let valid = active.valid_bitmaps();
        let batches = batches(&ops, session.width, size, cluster);
        self.exact &= !ops.iter().any(|op| matches!(op, Op::Discard { .. } | Op::Race { .. }));
        self.totals.sessions += 1;
        match session.by {
            Side::Qemu => {
                let noises = &self.noises.directory;
                qemu_side::session(&path, noises, &batches, size, cluster, session.dropped);
                if session.dropped && options.lazy {
                    isobath_side::mend(&path);
                }
                for op in &ops {
                    isobath_side::apply(&mut self.model, *op, size, cluster, &self.noises.blocks);
                }
                self.totals.qemu += ops.len() as u64;
            }
            Side::Isobath => {
                let (model, noises) = (&mut self.model, &self.noises.blocks);
                let work = isobath_side::session(&path, session, &batches, noises, model);
                isobath_side::on_ring(work);
                if session.dropped {
                    recover(&path);
                }
                self.totals.isobath += ops.len() as u64;
                let changed = ops
                    .iter()
                    .any(|op| !matches!(op, Op::Read { .. } | Op::Flush | Op::Discard { .. }));
                let still = self.active().map(|layer| layer.valid_bitmaps()).unwrap_or_default();
                let wrong = changed && !still.is_empty();
                assert!(
                    !wrong,
                    "bitmaps {still:?} still claim to be valid after writes by isobath"
                );
                assert!(changed || still == valid, "bitmaps {valid:?} became {still:?}");
            }
        }
        self.verify(session.dropped);
    }

    /// The active image is in order, and shows both sides what the model says. The layers below are
    /// as they were.
    fn verify(&mut self, may_leak: bool) {
        let Some(active) = self.layers.last() else { return };
        if active.format == "qcow2" {
            let leaks = check(&active.path);
            assert!(may_leak || leaks == 0, "{leaks} clusters leaked");
            if leaks > 0 {
                let path = &active.path;
                let _ = qemu::img(args!["check", "-q", "-r", "leaks", "-f", "qcow2", path]).ok();
            }
        }
        for layer in &self.layers {
            for (path, time, length) in &layer.frozen {
                let (_, now, now_length) = stamp(path);
                let same = (now, now_length) == (*time, *length);
                assert!(same, "a backing file changed: {}", path.display());
            }
        }
        let raw = self.directory.join("shown");
        qemu::to_raw(&active.path, active.format, &raw);
        let shown = fs::read(&raw).unwrap();
        if let Err(mismatch) = self.model.adopt(&shown) {
            panic!("qemu reads otherwise: {mismatch}");
        }
        if let (DataFile::Raw, Some(data)) = (active.options.data_file, &active.data) {
            let mut bytes = fs::read(data).unwrap();
            bytes.resize(shown.len(), 0);
            if let Err(mismatch) = self.model.check(&bytes) {
                panic!("the raw external data file holds something else: {mismatch}");
            }
        }
        isobath_side::on_ring(isobath_side::verify(&active.path, &self.model));
        self.totals.bytes_compared += 2 * shown.len() as u64;
    }

    /// Nothing but what was left to each side's choice differs.
    fn compare(&self, other: &Self) {
        let (Some(one), Some(two)) = (self.layers.last(), other.layers.last()) else { return };
        if self.exact && other.exact {
            let formats = args!["-f", one.format, "-F", two.format];
            let arguments = [args!["compare"], formats, args![&one.path, &two.path]].concat();
            let _ = qemu::img(arguments).ok();
            assert!(self.model.size() == other.model.size(), "the sizes differ");
        }
    }

    /// Every layer is in order, and every internal snapshot holds what it held.
    fn end(&self) {
        for layer in self.layers.iter().filter(|layer| layer.format == "qcow2") {
            assert!(check(&layer.path) == 0, "clusters leaked in {}", layer.path.display());
            for (name, model) in &layer.snapshots {
                let raw = self.directory.join("snapshot");
                let option = format!("snapshot.name={name}");
                let arguments = args!["convert", "-l", option, "-O", "raw", &layer.path, &raw];
                let _ = qemu::img(arguments).ok();
                // It is shown as long as the disk is now.
                let mut bytes = fs::read(raw).unwrap();
                bytes.truncate(model.size() as usize);
                if let Err(mismatch) = model.check_range(0, &bytes) {
                    panic!("snapshot {name} of {} changed: {mismatch}", layer.path.display());
                }
            }
        }
    }
}

impl Layer {
    /// The bitmaps that claim to know every write.
    fn valid_bitmaps(&self) -> Vec<String> {
        if self.bitmaps == 0 {
            return Vec::new();
        }
        let info = qemu::info(&self.path);
        let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
        let has = |bitmap: &serde_json::Value, flag: &str| {
            bitmap["flags"].as_array().is_some_and(|flags| flags.iter().any(|f| f == flag))
        };
        bitmaps
            .unwrap_or_default()
            .iter()
            .filter(|bitmap| has(bitmap, "auto") && !has(bitmap, "in-use"))
            .filter_map(|bitmap| bitmap["name"].as_str().map(str::to_owned))
            .collect()
    }

    /// QEMU neither resizes nor commits into an image with a bitmap that is in use.
    fn drop_bitmaps(&mut self) {
        for number in 0..std::mem::take(&mut self.bitmaps) {
            let name = format!("b{number}");
            let _ = qemu::img(args!["bitmap", "--remove", &self.path, name]).ok();
        }
    }
}

/// Recovers an image that was dropped with a journal in use. It is clean before that and after.
fn recover(image: &Path) {
    if qemu::check(image).stderr.contains("isobath check -r all") {
        let (report, lines) = isobath_side::checked(image);
        assert!(report.is_clean(), "before the recovery: {lines:?}");
        isobath_side::recover(image);
        qemu::assert_clean(image);
    }
}

/// Both programs find no errors in the image, and as many leaks, which are returned.
fn check(image: &Path) -> u64 {
    let done = qemu::check(image);
    let (report, lines) = isobath_side::checked(image);
    assert!([0, 3].contains(&done.code()), "qemu-img check finds errors\n{}", done.report());
    let theirs = done.json();
    for (name, ours) in [
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("check-errors", report.check_errors),
        ("image-end-offset", report.image_end_offset),
        ("allocated-clusters", report.allocated_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        let value = theirs[name].as_u64().unwrap_or(0);
        assert!(
            value == ours,
            "check: {name} is {ours} for isobath\n{lines:#?}\n{}",
            done.report()
        );
    }
    report.leaks
}

/// The operations in order, in groups that do not overlap.
fn batches(ops: &[Op], width: usize, size: u64, cluster: u64) -> Vec<Vec<Op>> {
    let mut batches: Vec<Vec<Op>> = vec![Vec::new()];
    for op in ops {
        let (offset, length) = op.range(size, cluster);
        let batch = batches.last_mut().unwrap();
        let meets = |other: &Op| {
            let (start, reach) = other.range(size, cluster);
            offset < start + reach && start < offset + length
        };
        if batch.len() >= width || batch.iter().any(meets) {
            batches.push(vec![*op]);
        } else {
            batch.push(*op);
        }
    }
    batches
}

fn stamp(path: &Path) -> (PathBuf, SystemTime, u64) {
    let data = path.metadata().unwrap();
    (path.to_owned(), data.modified().unwrap(), data.len())
}
