//! Whether images are in order, and show both programs what they must.

use crate::opposite_qemu::chain::Task;
use crate::opposite_qemu::history::DataFile;
use crate::opposite_qemu::layer::Layer;
use crate::opposite_qemu::world::World;
use crate::opposite_qemu::{daemon_side, isobath_side};
use isobath_testkit::model::Model;
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::Path;

impl World<'_> {
    /// The active image is in order, and shows both sides what the model says. The layers below are
    /// as they were; those that a job has changed show what they must.
    pub(crate) fn verify(&mut self, may_leak: bool) {
        let Some(active) = self.layers.last() else { return };
        if active.is_qcow2() {
            look_for_leaks(&active.path, may_leak);
        }
        for layer in &self.layers {
            layer.assert_frozen();
        }
        let daemon = &mut self.daemon.borrow_mut();
        let tracked = !active.bitmaps.is_empty();
        let (shown, bitmaps) = daemon_side::show(daemon, &active.path, active.format, tracked);
        if let Err(mismatch) = self.model.adopt(&shown) {
            panic!("qemu reads otherwise: {mismatch}");
        }
        active.assert_covered(&self.model, &bitmaps);
        if let (DataFile::Raw, Some(data)) = (active.options.data_file, &active.data) {
            let mut bytes = fs::read(data).unwrap();
            bytes.resize(shown.len(), 0);
            if let Err(mismatch) = self.model.check(&bytes) {
                panic!("the raw external data file holds something else: {mismatch}");
            }
        }
        isobath_side::on_ring(isobath_side::verify(&active.path, &self.model));
        self.totals.bytes_compared += 2 * shown.len() as u64;
        for path in std::mem::take(&mut self.touched) {
            let last = self.layers.len() - 1;
            let Some(layer) = self.layers[..last].iter().find(|layer| layer.path == path) else {
                continue;
            };
            if layer.is_qcow2() {
                look_for_leaks(&layer.path, may_leak);
            }
            let (shown, bitmaps) =
                daemon_side::show(daemon, &path, layer.format, !layer.bitmaps.is_empty());
            let checked = layer.view.check(&shown);
            checked
                .unwrap_or_else(|error| panic!("qemu reads {} otherwise: {error}", path.display()));
            layer.assert_covered(&layer.view, &bitmaps);
            isobath_side::on_ring(isobath_side::verify(&path, &layer.view));
            self.totals.bytes_compared += 2 * shown.len() as u64;
        }
    }

    /// Recovers what was dropped with journals in use.
    pub(crate) fn recover(&self, task: Option<&Task>) {
        let layers = self.layers.iter().filter(|layer| layer.is_qcow2());
        let target = task.and_then(|task| task.target.as_ref());
        layers.map(|layer| &layer.path).chain(target).for_each(|path| recover(path));
    }

    /// Nothing but what was left to each side's choice differs.
    pub(crate) fn compare(&self, other: &Self) {
        let (Some(one), Some(two)) = (self.layers.last(), other.layers.last()) else { return };
        if self.exact && other.exact {
            let formats = args!["-f", one.format, "-F", two.format];
            let arguments = [args!["compare"], formats, args![&one.path, &two.path]].concat();
            let _ = qemu::img(arguments).ok();
            assert!(self.model.size() == other.model.size(), "the sizes differ");
        }
    }

    /// Every layer is in order and shows what it must, and every internal snapshot holds what it held.
    pub(crate) fn end(&mut self) {
        let below = self.layers.len().saturating_sub(1);
        for layer in &self.layers[..below] {
            let daemon = &mut self.daemon.borrow_mut();
            let (shown, _) = daemon_side::show(daemon, &layer.path, layer.format, false);
            let checked = layer.view.check(&shown);
            checked.unwrap_or_else(|error| panic!("{}: {error}", layer.path.display()));
            self.totals.bytes_compared += shown.len() as u64;
        }
        for layer in self.layers.iter().filter(|layer| layer.is_qcow2()) {
            assert!(check(&layer.path) == 0, "clusters leaked in {}", layer.path.display());
            for (name, held) in &layer.snapshots {
                if let Some(model) = held {
                    self.assert_snapshot(layer, name, model);
                }
            }
        }
    }

    fn assert_snapshot(&self, layer: &Layer, name: &str, model: &Model) {
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

fn look_for_leaks(image: &Path, may_leak: bool) {
    let leaks = check(image);
    assert!(may_leak || leaks == 0, "{leaks} clusters leaked in {}", image.display());
    if leaks > 0 {
        let _ = qemu::img(args!["check", "-q", "-r", "leaks", "-f", "qcow2", image]).ok();
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
