//! Whether both copies of a chain hold the same.

use super::chain::{Chain, files};
use crate::qemu_img_options::described;
use isobath_testkit::daemon::Daemon;
use isobath_testkit::nbd::{Nbd, Run};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ops::Range;

/// A node of the storage daemon.
const NODE: &str = "image";

impl Chain {
    /// Compares what has changed since the last time, and notes what QEMU says of its copy.
    #[track_caller]
    pub(super) fn judge(&mut self) {
        let now = self.sides.each_ref().map(|side| files(side));
        self.before = std::mem::replace(&mut self.files, now);
        let [theirs, ours] = &self.files;
        assert!(theirs.keys().eq(ours.keys()), "{:?}\n{:?}", theirs.keys(), ours.keys());
        let changed: BTreeSet<_> = self
            .before
            .iter()
            .zip(&self.files)
            .flat_map(|(before, now)| {
                now.iter().filter(|(name, now)| before.get(*name) != Some(now))
            })
            .map(|(name, _)| name.clone())
            .collect();
        let has_changed = |name: &str| changed.contains(OsStr::new(name));
        let mut below = false;
        for place in 0..self.images.len() {
            let name = self.images[place].name.clone();
            let itself = has_changed(&name) || has_changed(&format!("{name}.data"));
            below |= itself;
            if itself || self.images[place].info.is_null() {
                self.same_description(place);
            }
            if below {
                self.same_bytes(place);
            }
            if itself && !self.images[place].bitmaps(true).is_empty() {
                self.same_bitmaps(place);
            }
        }
        // What was done to bitmaps meanwhile.
        self.files = self.sides.each_ref().map(|side| files(side));
        (self.copies, self.unlike, self.grown_from) = (false, false, None);
    }

    #[track_caller]
    fn same_description(&mut self, place: usize) {
        let name = self.images[place].name.clone();
        if !self.images[place].is_raw() {
            let check = ["check", "-f", "qcow2", "--output=json", &name];
            let [theirs, ours] = [0, 1].map(|side| self.qemu(side, &check));
            let count = |report: &Value, what: &str| report[what].as_u64().unwrap_or(0);
            if ours.code() != 0 {
                let (their, our) = (theirs.json(), ours.json());
                let worse = ["corruptions", "leaks", "check-errors"]
                    .iter()
                    .any(|what| count(&our, what) > count(&their, what));
                assert!(!worse, "{}", ours.report());
            }
        }
        let info = |chain: &Self| {
            let format = chain.images[place].format;
            [0, 1].map(|side| {
                let info = chain.qemu(side, &["info", "-f", format, "--output=json", &name]);
                described(info.ok().json())
            })
        };
        let [theirs, ours] = info(self);
        let mut differ = Vec::new();
        differences("", &theirs, &ours, &mut differ);
        assert!(differ.is_empty(), "{name}: {}", differ.join("\n"));
        let image = &mut self.images[place];
        image.info = theirs;
        let snapshots = image.snapshots();
        image.loose.retain(|id| snapshots.contains(id));
        image.taken_at.retain(|id, _| snapshots.contains(id));
    }

    #[track_caller]
    fn same_bytes(&self, place: usize) {
        let image = &self.images[place];
        let snapshots = image.snapshots();
        let fast = snapshots.iter().filter(|id| !image.loose.contains(*id)).map(Some);
        for snapshot in std::iter::once(None).chain(fast) {
            let snapshot = snapshot.map(String::as_str);
            let [theirs, ours] = [0, 1].map(|side| self.read(side, image, snapshot));
            let what = format!("{}, snapshot {snapshot:?}", image.name);
            assert!(theirs.len() == ours.len(), "{what}: {} and {}", theirs.len(), ours.len());
            if let Some(at) = theirs.iter().zip(&ours).position(|(one, other)| one != other) {
                panic!("{what}: byte {at} is {} to QEMU, and {}", theirs[at], ours[at]);
            }
        }
    }

    /// Bitmaps that QEMU takes for consistent have the same bits.
    #[track_caller]
    fn same_bitmaps(&mut self, place: usize) {
        let image = &self.images[place];
        let (file, names, info) = (image.name.clone(), image.bitmaps(true), image.info.clone());
        let contexts: Vec<_> =
            names.iter().map(|name| format!("qemu:dirty-bitmap:{name}")).collect();
        let [theirs, ours] = self.sides.each_ref().map(|side| {
            let mut daemon = Daemon::start_in(side);
            daemon.open_image(NODE, image.name.as_ref(), image.format, false);
            daemon.export(NODE, false, &names);
            Nbd::connect_with(&daemon.socket(), NODE, &contexts).unwrap().status().unwrap()
        });
        for (name, (theirs, ours)) in names.iter().zip(theirs.iter().zip(&ours)) {
            if theirs == ours {
                continue;
            }
            let new = self.grown_from.map(|size| first_new(size, granularity(&info, name)));
            let may_differ = self.unlike || may_differ(theirs, ours, self.copies, new);
            assert!(may_differ, "{file}: {name}: {theirs:?}\n{ours:?}");
            self.both(&["bitmap", "--clear", &file, name]);
        }
    }
}

/// The bytes that a bit of a bitmap is for.
pub(super) fn granularity(info: &Value, bitmap: &str) -> u64 {
    let list = info["format-specific"]["data"]["bitmaps"].as_array().into_iter().flatten();
    let mut found = list.filter(|one| one["name"] == bitmap);
    found.next().unwrap()["granularity"].as_u64().unwrap()
}

/// Where the space begins that a disk of `size` gets when it grows, as a bitmap sees it: a bit that is for some of it
/// counts as new.
pub(super) const fn first_new(size: u64, granularity: u64) -> u64 {
    size / granularity * granularity
}

/// Whether a step may leave bitmaps in which QEMU marks the one, and Isobath the other. Below `new` QEMU may mark more
/// if the step `copies` what the disk shows already; from there on Isobath may.
pub(super) fn may_differ(theirs: &[Run], ours: &[Run], copies: bool, new: Option<u64>) -> bool {
    let new = new.unwrap_or(u64::MAX);
    let contained = |inner: &[Range<u64>], outer: &[Range<u64>]| {
        let within =
            |run: &Range<u64>, other: &Range<u64>| other.start <= run.start && run.end <= other.end;
        inner.iter().all(|run| outer.iter().any(|other| within(run, other)))
    };
    let [theirs, ours] = [theirs, ours].map(dirty);
    let part = |ranges: &[Range<u64>], start: u64, end: u64| -> Vec<Range<u64>> {
        let clipped = ranges.iter().map(|run| run.start.max(start)..run.end.min(end));
        clipped.filter(|run| !run.is_empty()).collect()
    };
    let (their_old, our_old) = (part(&theirs, 0, new), part(&ours, 0, new));
    let (their_new, our_new) = (part(&theirs, new, u64::MAX), part(&ours, new, u64::MAX));
    (our_old == their_old || copies && contained(&our_old, &their_old))
        && contained(&their_new, &our_new)
}

#[test]
fn bitmaps_may_differ_where_data_is_copied_and_where_a_disk_grows() {
    let runs = |text: &str| -> Vec<Run> {
        text.bytes().map(|byte| (512, u32::from(byte == b'x'))).collect()
    };
    let differ =
        |theirs: &str, ours: &str, copies, new| may_differ(&runs(theirs), &runs(ours), copies, new);
    assert!(differ("x..x", "x..x", false, None));
    assert!(!differ("x..x", "x...", false, None) && !differ("x...", "x..x", false, None));
    assert!(differ("xx..", "x...", true, None) && !differ("x...", "xx..", true, None));
    assert!(
        differ("x.x.", "x.xx", false, Some(1024)) && !differ("x.xx", "x.x.", false, Some(1024))
    );
    assert!(differ("xxx.", "x.xx", true, Some(1024)) && !differ("xxx.", "x.xx", false, Some(1024)));
    assert!(!differ("x.x.", "xxxx", true, Some(1024)));
    assert_eq!((first_new(1536, 1024), first_new(2048, 1024)), (1024, 2048));
}

/// The dirty ranges.
fn dirty(runs: &[Run]) -> Vec<Range<u64>> {
    let mut at = 0;
    let ranges = runs.iter().map(|(length, flags)| {
        at += length;
        (at - length..at, *flags)
    });
    ranges.filter(|(_, flags)| flags & 1 == 1).map(|(range, _)| range).collect()
}

/// The values in which two descriptions differ: name, QEMU's, Isobath's.
pub(super) fn differences(name: &str, theirs: &Value, ours: &Value, found: &mut Vec<String>) {
    match (theirs, ours) {
        (Value::Object(one), Value::Object(other)) => {
            for key in one.keys().chain(other.keys()).collect::<BTreeSet<_>>() {
                let name = format!("{name}.{key}");
                differences(&name, &theirs[key], &ours[key], found);
            }
        }
        _ if theirs == ours => {}
        _ => found.push(format!("{name} is {theirs} from QEMU, and {ours}")),
    }
}
