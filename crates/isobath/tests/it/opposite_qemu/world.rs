//! One chain of files, to which the steps of a history happen.

use crate::opposite_qemu::generate::{self, NOISES};
use crate::opposite_qemu::history::{Base, DataFile, ImageOptions, Session, Side, Step};
use crate::opposite_qemu::layer::{Layer, Tracked};
use crate::opposite_qemu::op::{Fill, Op};
use crate::opposite_qemu::replay::Totals;
use crate::opposite_qemu::{chain, daemon_side, isobath_side, qemu_side};
use isobath_disk::{MetadataMode, Preallocation};
use isobath_testkit::daemon::Daemon;
use isobath_testkit::model::Model;
use isobath_testkit::{args, qemu};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Random bytes, as blocks and as files.
pub(crate) struct Noises {
    pub(crate) directory: PathBuf,
    pub(crate) blocks: Arc<[Vec<u8>]>,
}

impl Noises {
    pub(crate) fn make(directory: &Path) -> Self {
        let mut rng = StdRng::seed_from_u64(1);
        let blocks: Arc<[_]> = (0..NOISES).map(|_| generate::noise(&mut rng)).collect();
        for (number, block) in blocks.iter().enumerate() {
            fs::write(directory.join(format!("noise{number}")), block).unwrap();
        }
        Self { directory: directory.to_owned(), blocks }
    }
}

/// One chain of files.
pub(crate) struct World<'a> {
    pub(crate) directory: PathBuf,
    /// The side that does everything, where only one does.
    pub(crate) only: Option<Side>,
    noises: &'a Noises,
    pub(crate) daemon: &'a RefCell<Daemon>,
    pub(crate) model: Model,
    /// From the base up.
    pub(crate) layers: Vec<Layer>,
    /// Images made so far.
    made: usize,
    /// Images below the active one that a job has changed, and that nobody has looked at since.
    pub(crate) touched: Vec<PathBuf>,
    /// Both sides must show the same bytes: nothing was left to their choice.
    pub(crate) exact: bool,
    pub(crate) totals: Totals,
}

impl<'a> World<'a> {
    pub(crate) fn new(
        directory: PathBuf,
        only: Option<Side>,
        noises: &'a Noises,
        daemon: &'a RefCell<Daemon>,
        base: &Base,
    ) -> Self {
        fs::create_dir(&directory).unwrap();
        let mut world = Self {
            directory,
            only,
            noises,
            daemon,
            model: Model::new(0),
            layers: Vec::new(),
            made: 0,
            touched: Vec::new(),
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

    pub(crate) fn new_file(&mut self, extension: &str) -> PathBuf {
        self.made += 1;
        self.directory.join(format!("{}.{extension}", self.made))
    }

    /// Another layer comes above the active one.
    pub(crate) fn cover(&mut self) {
        if let Some(below) = self.layers.last_mut() {
            below.freeze();
            below.view = self.model.clone();
        }
    }

    pub(crate) fn add(
        &mut self,
        path: PathBuf,
        format: &'static str,
        data: Option<PathBuf>,
        options: ImageOptions,
    ) {
        self.layers.push(Layer {
            path,
            format,
            data,
            options,
            view: Model::default(),
            snapshots: Vec::new(),
            bitmaps: Vec::new(),
            frozen: Vec::new(),
        });
    }

    /// The active layer, if it is one that can be written.
    pub(crate) fn active(&mut self) -> Option<&mut Layer> {
        self.layers.last_mut().filter(|layer| layer.is_qcow2())
    }

    pub(crate) fn take(&mut self, part: &[Step]) {
        let Some((first, rest)) = part.split_first() else { return };
        if let Step::Layer { by, options, size } = *first {
            self.layer(self.only.unwrap_or(by), options, size.unwrap_or(self.model.size()));
            return self.verify(false);
        }
        let backed = self.layers.len() > 1;
        let size = self.model.size();
        let Some(active) = self.layers.last_mut().filter(|layer| layer.is_qcow2()) else {
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
                match self.only.unwrap_or(*by) {
                    Side::Isobath => {
                        active.drop_bitmaps();
                        isobath_side::resize(&path, *to);
                    }
                    Side::Qemu => {
                        active.drop_bitmaps_in_use();
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
                active.snapshots.push((name.clone(), Some(self.model.clone())));
                let _ = qemu::img(args!["snapshot", "-c", name, path]).ok();
            }
            Step::Apply => {
                let Some((name, Some(model))) = active.snapshots.last() else { return };
                if options.v2 && model.size() != size {
                    return;
                }
                let (name, model) = (name.clone(), model.clone());
                active.drop_bitmaps();
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
                if options.v2 || options.data_file == DataFile::Raw || active.bitmaps.len() > 3 {
                    return;
                }
                let name = format!("b{}", self.made);
                self.made += 1;
                let since = self.model.clone();
                active.bitmaps.push(Tracked { name: name.clone(), since });
                let granularity = granularity.to_string();
                let _ = qemu::img(args!["bitmap", "--add", "-g", granularity, path, name]).ok();
            }
            Step::Commit { base } => return self.commit(*base),
            Step::Copy => return self.copy(),
            Step::Rebase { onto } => return self.rebase(*onto),
            Step::Flatten { compressed } => return self.flatten(*compressed),
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
        chain::create(by, &path, &options, size, below, &data_name);
        self.cover();
        self.model.resize(size);
        self.add(path, "qcow2", data, options);
        self.totals.layers += 1;
    }

    fn session(&mut self, mut session: Session, ops: &[Op]) {
        session.by = self.only.unwrap_or(session.by);
        let backed = self.layers.len() > 1;
        let size = self.model.size();
        let Some(active) = self.active() else { return };
        let options = active.options;
        let cluster = options.cluster();
        let path = active.path.clone();
        let task = session.job.and_then(|job| self.task(job, session.by));
        let compresses = options.data_file == DataFile::Inside
            && !(session.by == Side::Qemu && options.v2 && backed)
            && task.is_none();
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
        if self.layers.iter().any(|layer| layer.options.v2) {
            // Version 2 cannot have a journal.
            session.metadata = MetadataMode::Auto;
        }
        // QEMU 7.2 loses writes, and refcounts, where a write of zeroes to a part of a cluster goes on
        // together with another request there.
        let grain = if session.by == Side::Qemu { cluster } else { 1 };
        let batches = batches(&ops, session.width, size, cluster, grain);
        self.exact &= !ops.iter().any(|op| matches!(op, Op::Discard { .. } | Op::Race { .. }));
        self.totals.sessions += 1;
        // A job that the daemon carries out ends before the daemon would be killed.
        session.dropped &= session.by == Side::Isobath || task.is_none();
        match session.by {
            Side::Qemu if task.is_none() && (session.program || session.dropped) => {
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
            Side::Qemu => {
                let daemon = &mut self.daemon.borrow_mut();
                let (model, task) = (&mut self.model, task.as_ref());
                daemon_side::session(daemon, &path, self.noises, &batches, cluster, model, task);
                self.totals.qemu += ops.len() as u64;
            }
            Side::Isobath => {
                let valid = self.active().map(|layer| layer.valid_bitmaps()).unwrap_or_default();
                let (model, noises) = (&mut self.model, &self.noises.blocks);
                match &task {
                    None => {
                        let work = isobath_side::session(&path, session, &batches, noises, model);
                        isobath_side::on_ring(work);
                    }
                    Some(task) => {
                        let work = isobath_side::job(&path, session, task, &batches, noises, model);
                        isobath_side::on_ring(work);
                    }
                }
                self.totals.isobath += ops.len() as u64;
                if session.dropped {
                    self.recover(task.as_ref());
                }
                let changed = ops.iter().any(|op| op.changes());
                let still = self.active().map(|layer| layer.valid_bitmaps()).unwrap_or_default();
                let wrong = changed && task.is_none() && session.dropped && !still.is_empty();
                assert!(
                    !wrong,
                    "bitmaps {still:?} still claim to be valid after writes that were cut off"
                );
                // A discard may change something. What valid bitmaps say is verified below.
                let reads = ops.iter().all(|op| matches!(op, Op::Read { .. } | Op::Flush));
                let cut = session.dropped && !reads;
                let same = cut || task.is_some() || still == valid;
                assert!(same, "bitmaps {valid:?} became {still:?}");
            }
        }
        if let Some(task) = &task {
            self.finished(task);
        }
        self.verify(session.dropped);
    }
}

/// The operations in order, in groups that do not overlap, and touch no unit of `grain` bytes twice.
fn batches(ops: &[Op], width: usize, size: u64, cluster: u64, grain: u64) -> Vec<Vec<Op>> {
    let mut batches: Vec<Vec<Op>> = vec![Vec::new()];
    for op in ops {
        let (offset, length) = op.range(size, cluster);
        let batch = batches.last_mut().unwrap();
        let meets = |other: &Op| {
            let (start, reach) = other.range(size, cluster);
            let round = |end: u64| end.next_multiple_of(grain);
            offset / grain * grain < round(start + reach)
                && start / grain * grain < round(offset + length)
        };
        if batch.len() >= width || batch.iter().any(meets) {
            batches.push(vec![*op]);
        } else {
            batch.push(*op);
        }
    }
    batches
}
