//! What a directory of images holds, to QEMU and to Isobath, and whether that may be.

use super::scenes::{FREE, FREE_LENGTH, IMAGES, State, Step, restore};
use crate::programs::{isobath, qemu_img};
use isobath_testkit::args;
use isobath_testkit::digest;
use isobath_testkit::process::Finished;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const SECTOR: usize = 512;

/// A disk's sectors, each as a number that stands for its bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Disk(Vec<u64>);

impl Disk {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self(bytes.chunks(SECTOR).map(digest).collect())
    }

    /// Whether each sector is that of one of two disks, and the size, too. A sector for which `free` holds may differ.
    fn is_between(
        &self,
        one: &Self,
        other: &Self,
        free: impl Fn(usize) -> bool,
    ) -> Result<(), String> {
        let sizes = [one.0.len(), other.0.len()];
        if !sizes.contains(&self.0.len()) {
            return Err(format!("has {} sectors, not one of {sizes:?}", self.0.len()));
        }
        let differs = |(at, sector): (usize, &u64)| {
            !free(at) && ![one, other].iter().any(|disk| disk.0.get(at) == Some(sector))
        };
        match self.0.iter().enumerate().position(differs) {
            Some(at) => Err(format!("sector {at} is neither as before nor as after")),
            None => Ok(()),
        }
    }
}

/// What an image holds.
#[derive(Debug)]
pub(super) struct Image {
    /// The disk, named "", and the internal snapshots.
    disks: BTreeMap<String, Disk>,
    /// What the header says.
    info: Value,
    pub(super) corruptions: u64,
    pub(super) leaks: u64,
    /// What is wrong with the image by itself.
    wrong: Option<String>,
}

/// What every image of a directory holds.
pub(super) struct View {
    pub(super) images: BTreeMap<&'static str, Arc<Image>>,
    files: BTreeSet<String>,
}

/// Which sectors another program wrote, to which image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub(super) image: &'static str,
}

fn is_free(at: usize) -> bool {
    let (first, count) = (FREE as usize / SECTOR, FREE_LENGTH as usize / SECTOR);
    (first..first + count).contains(&at)
}

impl View {
    /// Whether an image, if it is still there, holds these sectors.
    pub(super) fn has(
        &self,
        image: &str,
        at: usize,
        disk: &Disk,
        count: usize,
    ) -> Result<(), String> {
        let Some(image_now) = self.images.get(image) else { return Ok(()) };
        let now = image_now.disks.get("").and_then(|disk| disk.0.get(at..at + count));
        if now == Some(&disk.0[..]) { Ok(()) } else { Err(format!("a write to {image} is lost")) }
    }
}

/// Looks at directories, each state of an image once.
pub(super) struct Judge<'a> {
    scratch: TempDir,
    known: &'a Known,
}

/// What was seen, by all threads.
pub(super) type Known = Mutex<HashMap<(usize, u64), Arc<Image>>>;

impl<'a> Judge<'a> {
    pub(super) fn new(memory: &Path, known: &'a Known) -> Self {
        Self { scratch: TempDir::new_in(memory).unwrap(), known }
    }

    /// Looks at all images but one, which may be anything.
    pub(super) fn look(&self, state: &State, but: Option<&str>) -> View {
        let mut images = BTreeMap::new();
        let mut restored = false;
        let digests: Vec<_> = state.iter().map(|(file, bytes)| (file, digest(bytes))).collect();
        for (place, name) in IMAGES.into_iter().enumerate() {
            if !state.contains_key(name) || but == Some(name) {
                continue;
            }
            let mut below = String::new();
            for name in &IMAGES[..=place] {
                for (file, digest) in &digests {
                    if file == name
                        || file.strip_prefix(name).is_some_and(|end| end.starts_with('.'))
                    {
                        let _ = write!(below, "{file} {digest:x} ");
                    }
                }
            }
            let key = (place, digest(below.as_bytes()));
            let known = self.known.lock().unwrap().get(&key).cloned();
            let image = known.unwrap_or_else(|| {
                if !restored {
                    restore(self.scratch.path(), state);
                    restored = true;
                }
                let image = Arc::new(look_at(self.scratch.path(), name));
                self.known.lock().unwrap().insert(key, Arc::clone(&image));
                image
            });
            images.insert(name, image);
        }
        View { images, files: state.keys().cloned().collect() }
    }

    /// Whether an image that leaks is sound again after a repair.
    pub(super) fn is_mended(&self, state: &State, image: &str) -> Result<(), String> {
        restore(self.scratch.path(), state);
        let mended = isobath(self.scratch.path(), ["check", "-r", "leaks", image]);
        let check = qemu_img(self.scratch.path(), ["check", "-q", image]);
        if mended.code() == 0 && check.code() == 0 {
            return Ok(());
        }
        Err(format!("check -r leaks does not mend {image}\n{}{}", mended.report(), check.report()))
    }
}

/// Whether the header says that the image must be recovered.
fn is_open(bytes: &[u8]) -> bool {
    // Not the bits of an external data file, of compression, and of extended L2 entries.
    bytes[4..8] == [0, 0, 0, 3] && bytes[72..80] != [0, 0, 0, 0, 0, 0, 0, bytes[79] & 0x1c]
}

/// Whether all that is wrong with an image, if anything is, are flags that say that a cluster is used once. Version 2
/// has no bit that tells whether they hold.
fn has_stale_flags(directory: &Path, name: &str, bytes: &[u8]) -> bool {
    if bytes[4..8] != [0, 0, 0, 2] {
        return false;
    }
    let check = qemu_img(directory, ["check", "-f", "qcow2", name]).report();
    let mut errors = check.lines().filter(|line| line.starts_with("ERROR")).peekable();
    errors.peek().is_some() && errors.all(|line| line.starts_with("ERROR OFLAG_COPIED"))
}

fn look_at(directory: &Path, name: &'static str) -> Image {
    let mut disks = BTreeMap::new();
    let mut wrong = None;
    let mut complain = |what: String| {
        wrong.get_or_insert(what);
    };
    let ours = read(directory, name, None, isobath);
    let bytes = fs::read(directory.join(name)).unwrap();
    if is_open(&bytes) || has_stale_flags(directory, name, &bytes) {
        let done = isobath(directory, ["check", "-r", "all", name]);
        if done.code() != 0 {
            complain(format!("cannot be recovered\n{}", done.report()));
        }
    }
    let info = qemu_img(directory, ["info", "--output=json", name]);
    let info = if info.code() == 0 { info.json() } else { json!({}) };
    let mut snapshots: Vec<String> = Vec::new();
    for snapshot in info["snapshots"].as_array().into_iter().flatten() {
        snapshots.push(snapshot["name"].as_str().unwrap().to_owned());
    }
    match (ours, read(directory, name, None, qemu_img)) {
        (Ok(ours), Ok(theirs)) => {
            if ours != theirs {
                complain("QEMU reads another disk than Isobath".into());
            }
            disks.insert(String::new(), theirs);
        }
        (Err(failed), _) | (_, Err(failed)) => complain(format!("cannot be read\n{failed}")),
    }
    for snapshot in &snapshots {
        let read =
            [isobath, qemu_img].map(|program| read(directory, name, Some(snapshot), program));
        match read {
            // To QEMU a snapshot is as large as the disk is now.
            [Ok(ours), Ok(theirs)]
                if ours.0.iter().zip(&theirs.0).all(|(one, other)| one == other) =>
            {
                disks.insert(snapshot.clone(), ours);
            }
            [Err(failed), _] | [_, Err(failed)] => {
                complain(format!("'{snapshot}' cannot be read\n{failed}"));
            }
            _ => complain(format!("QEMU reads another snapshot '{snapshot}' than Isobath")),
        }
    }
    let check = qemu_img(directory, ["check", "-f", "qcow2", "--output=json", name]);
    let report: Value = serde_json::from_slice(&check.stdout).unwrap_or_default();
    if !matches!(check.code(), 0 | 2 | 3) {
        complain(format!("cannot be checked\n{}", check.report()));
    }
    let count = |what: &str| report[what].as_u64().unwrap_or(0);
    let data = &info["format-specific"]["data"];
    let bitmaps = data["bitmaps"].as_array().into_iter().flatten();
    // Their flags say, too, that a writer was killed.
    let bitmaps: Vec<_> = bitmaps.map(|bitmap| &bitmap["name"]).collect();
    let described = json!({
        "size": info["virtual-size"],
        "backing": info["backing-filename"],
        "backing format": info["backing-filename-format"],
        "version": data["compat"],
        "lazy": data["lazy-refcounts"],
        "corrupt": data["corrupt"],
        "bitmaps": bitmaps,
        "snapshots": snapshots,
    });
    let (corruptions, leaks) = (count("corruptions") + count("check-errors"), count("leaks"));
    Image { disks, info: described, corruptions, leaks, wrong }
}

/// Reads a disk by one of the programs.
fn read(
    directory: &Path,
    name: &str,
    snapshot: Option<&str>,
    program: fn(&Path, Vec<std::ffi::OsString>) -> Finished,
) -> Result<Disk, String> {
    let mut arguments = args!["convert", "-O", "raw"];
    if let Some(snapshot) = snapshot {
        arguments.extend(args!["-l", snapshot]);
    }
    arguments.extend(args![name, "raw"]);
    let done = program(directory, arguments);
    if done.code() != 0 {
        return Err(done.report());
    }
    let bytes = fs::read(directory.join("raw")).unwrap();
    fs::remove_file(directory.join("raw")).unwrap();
    Ok(Disk::of(&bytes))
}

/// A command on a scene, before and after an undisturbed run.
pub(super) struct Rules<'a> {
    pub(super) step: &'a Step,
    pub(super) before: &'a View,
    pub(super) after: &'a View,
}

impl Rules<'_> {
    /// Whether a state may be that of an interrupted run, and of other programs' writes.
    pub(super) fn between(&self, now: &View, written: Option<Written>) -> Result<(), String> {
        for (name, before) in &self.before.images {
            if self.step.target == Some(name) {
                continue;
            }
            let after = self.after.images.get(name);
            let Some(image) = now.images.get(name) else {
                if after.is_none() {
                    continue;
                }
                return Err(format!("{name} is gone"));
            };
            let after = after.unwrap_or(before);
            let mixed = self.step.mixed.contains(name);
            image_between(image, before, after, mixed, written.is_some())
                .map_err(|what| format!("{name}: {what}"))?;
        }
        Ok(())
    }

    /// Whether a state is that after a complete run.
    pub(super) fn complete(&self, now: &View) -> Result<(), String> {
        if now.files != self.after.files {
            return Err(format!("the files are {:?}, not {:?}", now.files, self.after.files));
        }
        for (name, after) in &self.after.images {
            let Some(image) = now.images.get(name) else { return Err(format!("{name} is gone")) };
            let same = image_between(image, after, after, false, false);
            same.map_err(|what| format!("{name}: {what}"))?;
        }
        Ok(())
    }

    /// Whether a reader may have read this from the top.
    pub(super) fn has_read(&self, disk: &Disk) -> Result<(), String> {
        let mixed = self.step.mixed.contains(&"top");
        let known = [self.before, self.after].map(|view| &view.images["top"].disks[""]);
        if mixed {
            return disk.is_between(known[0], known[1], |_| false);
        }
        if known.contains(&disk) { Ok(()) } else { Err("a reader read a mixture".into()) }
    }

    /// Whether a state is sound after another command has changed the chain, too; or taken a snapshot beside this one.
    pub(super) fn sound(&self, now: &View, beside: bool) -> Result<(), String> {
        let what = ["top", "mid", "low", "base"];
        for name in what.into_iter().filter(|name| now.images.contains_key(name)) {
            let image = &now.images[name];
            if let Some(wrong) = &image.wrong {
                return Err(format!("{name}: {wrong}"));
            }
            let before = self.before.images[name].corruptions;
            if image.corruptions > before {
                return Err(format!("{name}: qemu-img check finds {} errors", image.corruptions));
            }
        }
        let top = |view: &View| Arc::clone(&view.images["top"]);
        let (now, before, after) = (top(now), top(self.before), top(self.after));
        let (before, after) = (&before.disks[""], &after.disks[""]);
        now.disks[""]
            .is_between(before, after, |_| false)
            .map_err(|what| format!("top: {what}"))?;
        match now.disks.get("beside") {
            Some(taken) => taken
                .is_between(before, after, |_| false)
                .map_err(|what| format!("snapshot: {what}")),
            None if beside => Err("the snapshot is lost".into()),
            None => Ok(()),
        }
    }
}

fn image_between(
    image: &Image,
    before: &Image,
    after: &Image,
    mixed: bool,
    written: bool,
) -> Result<(), String> {
    if let Some(wrong) = &image.wrong {
        return Err(wrong.clone());
    }
    if image.corruptions > before.corruptions.max(after.corruptions) {
        return Err(format!("qemu-img check finds {} errors", image.corruptions));
    }
    for (what, value) in image.info.as_object().unwrap() {
        let (before, after) = (&before.info[what], &after.info[what]);
        if value != before && value != after {
            return Err(format!("{what} is {value}, neither {before} nor {after}"));
        }
    }
    for (snapshot, disk) in &image.disks {
        let [before, after] = [before, after].map(|image| image.disks.get(snapshot));
        let Some(before) = before.or(after) else { return Err(format!("'{snapshot}' appeared")) };
        let after = after.unwrap_or(before);
        if mixed || written {
            disk.is_between(before, after, |at| written && is_free(at))?;
        } else if disk != before && disk != after {
            let mut what = format!("disk '{snapshot}' is neither as before nor as after");
            if let Err(where_) = disk.is_between(before, after, |_| false) {
                let _ = write!(what, ": {where_}");
            }
            return Err(what);
        }
    }
    Ok(())
}
