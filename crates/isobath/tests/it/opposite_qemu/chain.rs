//! What happens to the chain as a whole: jobs, commits, rebases, copies.

use crate::opposite_qemu::history::{DataFile, ImageOptions, Job, JobKind, Side};
use crate::opposite_qemu::isobath_side;
use crate::opposite_qemu::layer::Layer;
use crate::opposite_qemu::world::World;
use isobath_disk::Preallocation;
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::{Path, PathBuf};

/// A job on the layers that there are, which are counted from the bottom.
pub(crate) struct Task {
    pub(crate) kind: JobKind,
    pub(crate) top: usize,
    pub(crate) base: Option<usize>,
    /// Everything is read before it begins.
    pub(crate) warm: bool,
    /// Of all layers.
    pub(crate) files: Vec<PathBuf>,
    /// A mirror's.
    pub(crate) target: Option<PathBuf>,
}

impl World<'_> {
    /// What a job means here, if that is possible.
    pub(crate) fn task(&mut self, job: Job, by: Side) -> Option<Task> {
        let count = self.layers.len();
        // On copies by each side, both do a job or none does.
        let rules = if self.only.is_some() { Side::Qemu } else { by };
        let below = |number: u8, end: usize| usize::from(number) % end;
        let mut top = count - 1;
        let mut base = None;
        match job.kind {
            JobKind::Stream => {
                top -= below(job.top, count);
                base = Some(below(job.base, top + 1)).filter(|base| *base != top);
                if top == 0 || !self.layers[top].is_qcow2() {
                    return None;
                }
                // QEMU 7.2 reads ahead of a stream by whole clusters, and aborts where only some of the
                // subclusters are missing.
                if rules == Side::Qemu && self.layers[top].options.extended_l2 {
                    return None;
                }
                // Behind the end of a shorter image below, its guests read what is not zero.
                let size = self.size_of(top);
                if rules == Side::Qemu && (0..top).any(|below| self.size_of(below) < size) {
                    return None;
                }
            }
            JobKind::Commit => {
                top -= below(job.top, count);
                let number = if top == 0 { return None } else { below(job.base, top) };
                if !self.takes_a_commit(top, number, rules, by) {
                    return None;
                }
                base = Some(number);
            }
            JobKind::Mirror => {}
            JobKind::MirrorTop if count > 1 => {}
            JobKind::MirrorTop => return None,
        }
        let target = match job.kind {
            JobKind::Stream | JobKind::Commit => None,
            JobKind::Mirror => Some(self.target(by, None)),
            JobKind::MirrorTop => Some(self.target(by, Some(count - 2))),
        };
        let files = self.layers.iter().map(|layer| layer.path.clone()).collect();
        Some(Task { kind: job.kind, top, base, warm: job.warm, files, target })
    }

    /// Whether what is above `base`, up to `top`, can go there.
    fn takes_a_commit(&mut self, top: usize, base: usize, rules: Side, by: Side) -> bool {
        let to = self.size_of(top);
        let from = self.size_of(base);
        let layer = &mut self.layers[base];
        // QEMU leaves what the base has behind the end of the others, and lets it show.
        if from > to && rules == Side::Qemu {
            return false;
        }
        if !layer.is_qcow2() {
            return layer.path.metadata().unwrap().len().is_multiple_of(512);
        }
        // Version 2 cannot hide what a backing file has there, nor resize with snapshots.
        if from != to && layer.options.v2 && (base > 0 || !layer.snapshots.is_empty()) {
            return false;
        }
        match (from != to, by) {
            (true, Side::Isobath) => layer.drop_bitmaps(),
            _ => layer.drop_bitmaps_in_use(),
        }
        true
    }

    pub(crate) fn size_of(&self, number: usize) -> u64 {
        if number + 1 == self.layers.len() {
            self.model.size()
        } else {
            self.layers[number].view.size()
        }
    }

    /// A new image of the active one's options, for a mirror.
    fn target(&mut self, by: Side, below: Option<usize>) -> PathBuf {
        let path = self.new_file("qcow2");
        let options = self.target_options();
        let size = self.model.size();
        let below = below.map(|number| &self.layers[number]);
        let below = below.map(|layer| (layer.path.as_path(), layer.format));
        create(by, &path, &options, size, below, Path::new(""));
        path
    }

    fn target_options(&self) -> ImageOptions {
        let options = self.layers.last().map(|layer| layer.options).unwrap_or_default();
        let preallocation = Preallocation::Off;
        ImageOptions { data_file: DataFile::Inside, preallocation, ..options }
    }

    /// Keeps the books after a job that has ended well.
    pub(crate) fn finished(&mut self, task: &Task) {
        let last = self.layers.len() - 1;
        self.totals.jobs += 1;
        match task.kind {
            JobKind::Stream => {
                self.layers[task.top].lose_snapshots();
                let first = task.base.map_or(0, |base| base + 1);
                if task.top < last {
                    self.layers[task.top].freeze();
                    self.touched.push(self.layers[task.top].path.clone());
                }
                self.layers.drain(first..task.top);
            }
            JobKind::Commit => {
                let base = task.base.expect("a commit has a base");
                self.committed(task.top, base);
            }
            JobKind::Mirror | JobKind::MirrorTop => {
                let path = task.target.clone().expect("a mirror has a target");
                let options = self.target_options();
                self.layers.truncate(if task.kind == JobKind::Mirror { 0 } else { last });
                self.layers.push(Layer {
                    path,
                    format: "qcow2",
                    data: None,
                    options,
                    view: self.model.clone(),
                    snapshots: Vec::new(),
                    bitmaps: Vec::new(),
                    frozen: Vec::new(),
                });
            }
        }
    }

    /// The base shows what the top showed, which has left with those between.
    fn committed(&mut self, top: usize, base: usize) {
        let last = self.layers.len() - 1;
        if top == last {
            self.layers[base].frozen.clear();
        } else {
            let (below, above) = self.layers.split_at_mut(top);
            let size = below[base].view.size();
            below[base].view = above[0].view.clone();
            if size > below[base].view.size() {
                // It keeps its size, and zeroes there.
                below[base].view.resize(size);
            }
            below[base].freeze();
            self.touched.push(below[base].path.clone());
            if top + 1 < last {
                above[1].freeze();
            }
        }
        self.layers.drain(base + 1..=top);
    }

    /// `qemu-img commit` of the active layer.
    pub(crate) fn commit(&mut self, base: u8) {
        let top = self.layers.len() - 1;
        if top == 0 {
            return;
        }
        let base = usize::from(base) % top;
        // Another size would change what is seen.
        if self.size_of(base) != self.model.size()
            || !self.takes_a_commit(top, base, Side::Qemu, Side::Qemu)
        {
            return;
        }
        let (path, base_path) = (&self.layers[top].path, &self.layers[base].path);
        let _ = qemu::img(args!["commit", "-q", "-d", "-f", "qcow2", "-b", base_path, path]).ok();
        self.committed(top, base);
        self.verify(false);
    }

    /// A copy of the active image comes above it.
    pub(crate) fn copy(&mut self) {
        let Some(active) = self.active() else { return };
        if active.data.is_some() || !active.snapshots.is_empty() {
            return;
        }
        let (from, options, bitmaps) =
            (active.path.clone(), active.options, active.bitmaps.clone());
        let path = self.new_file("qcow2");
        let _bytes = fs::copy(&from, &path).unwrap();
        let _ =
            qemu::img(args!["rebase", "-u", "-f", "qcow2", "-b", from, "-F", "qcow2", &path]).ok();
        self.cover();
        self.add(path, "qcow2", None, options);
        if let Some(copy) = self.layers.last_mut() {
            copy.bitmaps = bitmaps;
        }
        self.totals.layers += 1;
        self.verify(false);
    }

    /// `qemu-img rebase` of the active layer, which goes on to show the same.
    pub(crate) fn rebase(&mut self, onto: u8) {
        let top = self.layers.len() - 1;
        let onto = Some(usize::from(onto) % (top + 1)).filter(|onto| *onto != top);
        let Some(active) = self.layers.last_mut().filter(|_| top > 0) else { return };
        active.lose_snapshots();
        let active = active.path.clone();
        let mut arguments = args!["rebase", "-q", "-f", "qcow2"];
        match onto.map(|onto| &self.layers[onto]) {
            Some(below) => arguments.extend(args!["-F", below.format, "-b", &below.path]),
            None => arguments.extend(args!["-b", ""]),
        }
        arguments.push(active.into());
        let _ = qemu::img(arguments).ok();
        self.layers.drain(onto.map_or(0, |onto| onto + 1)..top);
        self.verify(false);
    }

    /// One image with the same content takes the place of all below the active one.
    pub(crate) fn flatten(&mut self, compressed: bool) {
        let [.., below, active] = self.layers.as_slice() else { return };
        let (below_path, format, view) = (below.path.clone(), below.format, below.view.clone());
        let active = active.path.clone();
        let path = self.new_file("qcow2");
        let mut arguments = args!["convert", "-f", format, "-O", "qcow2"];
        if compressed {
            arguments.push("-c".into());
        }
        arguments.extend(args![below_path, &path]);
        let _ = qemu::img(arguments).ok();
        let rebase = args!["rebase", "-u", "-f", "qcow2", "-b", &path, "-F", "qcow2", active];
        let _ = qemu::img(rebase).ok();
        let last = self.layers.len() - 1;
        let mut flat = Layer {
            path,
            format: "qcow2",
            data: None,
            options: ImageOptions::default(),
            view,
            snapshots: Vec::new(),
            bitmaps: Vec::new(),
            frozen: Vec::new(),
        };
        flat.freeze();
        self.layers.splice(..last, [flat]);
        self.verify(false);
    }
}

impl Layer {
    /// What internal snapshots lack came from layers that are gone.
    fn lose_snapshots(&mut self) {
        self.snapshots.iter_mut().for_each(|(_, held)| *held = None);
    }
}

/// Makes an image, over another or not.
pub(crate) fn create(
    by: Side,
    path: &Path,
    options: &ImageOptions,
    size: u64,
    below: Option<(&Path, &str)>,
    data: &Path,
) {
    match by {
        Side::Qemu => {
            let mut arguments = args!["create", "-q", "-f", "qcow2"];
            if let Some((path, format)) = below {
                arguments.extend(args!["-b", path, "-F", format]);
            }
            arguments.extend(args!["-o", options.for_qemu(data), path, size.to_string()]);
            let _ = qemu::img(arguments).ok();
        }
        Side::Isobath => isobath_side::make(path, &options.for_isobath(size, below, data)),
    }
}
