//! Whether both copies of a tree hold the same.

use super::names::ROOT;
use super::tree::{Doing, Files, Tree, files};
use crate::histories::chain::strings;
use crate::histories::judge::{differences, first_new, granularity, may_differ};
use crate::qemu_img_options::described;
use isobath_testkit::nbd::{Nbd, Run};
use isobath_testkit::process::Finished;
use isobath_testkit::{args, qemu};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;

/// A node of the storage daemon.
const NODE: &str = "image";

/// What QEMU says of an image, and reads from it.
struct Look {
    info: Value,
    bytes: Vec<u8>,
    /// For each of the bitmaps that QEMU takes for consistent.
    bits: Vec<Vec<Run>>,
}

impl Tree {
    /// Compares what has changed since the last time, and notes what QEMU says of its copy.
    #[track_caller]
    pub(super) fn judge(&mut self) {
        let now = self.sides.each_ref().map(|side| files(side));
        self.before = std::mem::replace(&mut self.files, now);
        let [theirs, ours] = &self.files;
        assert!(theirs.keys().eq(ours.keys()), "{:?}\n{:?}", theirs.keys(), ours.keys());
        if self.doing.refused && self.nodes.values().all(|node| !node.unsettled) {
            for (name, before) in &self.before[1] {
                // What failed on the way may have made the file longer.
                let same = ours[name].starts_with(before) || self.leaks_are_freed(name, before);
                assert!(same, "refused, but {name} has changed");
            }
        }
        let changed: BTreeSet<String> =
            (0..2).flat_map(|side| changed(&self.before[side], &self.files[side])).collect();
        let itself = |tree: &Self, id: usize| {
            changed.contains(&tree.image(id).name) || tree.image(id).info.is_null()
        };
        let all: Vec<usize> = self.nodes.keys().copied().collect();
        let mut gone = Vec::new();
        let mut last = None;
        for id in all {
            let chain = self.chain(id);
            if chain.iter().any(|id| itself(self, *id)) {
                let is_itself = itself(self, id);
                match self.same(id, is_itself) {
                    Some(bytes) => last = Some((id, bytes)),
                    None => gone.push(id),
                }
                self.count("disks compared");
            }
        }
        if let Some((id, bytes)) = last.filter(|(id, _)| !self.foreign(*id)) {
            assert!(
                self.read_by_isobath(id, None) == bytes,
                "Isobath reads {} differently",
                self.file(id)
            );
        }
        for id in gone {
            if self.nodes.contains_key(&id) {
                self.forget(id);
            }
        }
        // What was done to bitmaps meanwhile.
        self.files = self.sides.each_ref().map(|side| files(side));
        self.doing = Doing::default();
    }

    /// Compares an image; returns what its disk holds, or nothing if that may differ, and does.
    #[track_caller]
    fn same(&mut self, id: usize, itself: bool) -> Option<Vec<u8>> {
        let file = self.file(id);
        let theirs = self.look(0, id, None).unwrap_or_else(|error| panic!("{file}: {error}"));
        if itself && self.nodes[&id].unsettled && self.held.is_none() {
            let settled = self.program(1, false, &["info", &file]).code() == 0;
            self.nodes.get_mut(&id).unwrap().unsettled = !settled;
        }
        let names = bitmaps(&theirs.info);
        let mut bits = None;
        let (info, bytes) = if self.unsettled(id) {
            self.count("disks with an open journal");
            let settled = !self.nodes[&id].unsettled;
            let info = || self.program(1, false, &["info", "-U", "--output=json", &file]).ok();
            (settled.then(|| info().json()), self.read_by_isobath(id, None))
        } else {
            let ours = self.look(1, id, None).unwrap_or_else(|error| panic!("{file}: {error}"));
            bits = Some(ours.bits);
            (Some(ours.info), ours.bytes)
        };
        if let Some(info) = info {
            let root = self.sides.each_ref().map(|side| side.to_str().unwrap().to_owned());
            let mut differ = Vec::new();
            let [one, other] = [(&theirs.info, &root[0]), (&info, &root[1])].map(|(info, root)| {
                let mut info = described(info.clone());
                if let Some(name) = info["backing-filename"].as_str() {
                    info["backing-filename"] = name.replace(root, ROOT).into();
                }
                info
            });
            differences("", &one, &other, &mut differ);
            assert!(differ.is_empty(), "{file}: {}", differ.join("\n"));
        }
        let image = &mut self.nodes.get_mut(&id).unwrap().image;
        image.info = theirs.info;
        let snapshots = image.snapshots();
        image.loose.retain(|id| snapshots.contains(id));
        image.taken_at.retain(|id, _| snapshots.contains(id));
        image.note_snapshot_size();
        if itself && !image.is_raw() && !self.unsettled(id) {
            self.no_more_errors(id);
        }
        if let Some(at) = differ_at(&theirs.bytes, &bytes) {
            let above = self.doing.written.is_some_and(|below| self.above(below).contains(&id));
            let allowed = above && self.allocated_differently(id, &theirs.bytes, &bytes);
            assert!(
                allowed,
                "{file}: byte {at} is {} to QEMU, and {}",
                theirs.bytes[at], bytes[at]
            );
            self.count("overlays with other allocations");
            return None;
        }
        if let Some(ours) = bits.filter(|_| itself) {
            self.same_bitmaps(id, &names, &theirs.bits, &ours);
        }
        let image = self.image(id);
        let held: Vec<_> = snapshots.iter().filter(|id| !image.loose.contains(*id)).collect();
        for snapshot in held {
            let mut one = self.read_snapshot(0, id, snapshot);
            let other = if self.unsettled(id) {
                // QEMU copies a snapshot of another size as if it had that of the disk.
                let ours = self.read_by_isobath(id, Some(snapshot));
                one.truncate(ours.len());
                ours[..one.len()].to_vec()
            } else {
                self.read_snapshot(1, id, snapshot)
            };
            assert!(one == other, "{file}: snapshot {snapshot} differs");
        }
        Some(bytes)
    }

    /// What QEMU says of an image, and reads from it, whoever else uses it. With a context, its runs are what is told.
    fn look(&mut self, side: usize, id: usize, context: Option<&str>) -> Result<Look, String> {
        let (file, format) = (self.file(id), self.image(id).format);
        let daemon = &mut self.daemons[side];
        let below = json!({"driver": "file", "filename": file});
        let open = json!({"node-name": NODE, "driver": format, "read-only": true,
            "force-share": true, "file": below});
        let _ = daemon.execute("blockdev-add", &open)?;
        let nodes = daemon.ok("query-named-block-nodes", &json!({"flat": true}));
        let mut nodes = nodes.as_array().unwrap().iter();
        let info = nodes.find(|node| node["node-name"] == NODE).unwrap()["image"].clone();
        let names = if context.is_some() { Vec::new() } else { bitmaps(&info) };
        let mut export = json!({"type": "nbd", "id": NODE, "node-name": NODE, "name": NODE});
        if !names.is_empty() {
            export["bitmaps"] = names.clone().into();
        }
        export["allocation-depth"] = context.is_some().into();
        let _ = daemon.ok("block-export-add", &export);
        let contexts: Vec<_> = match context {
            Some(context) => vec![context.to_owned()],
            None => names.iter().map(|name| format!("qemu:dirty-bitmap:{name}")).collect(),
        };
        let bytes = daemon.connect(NODE).read_all().unwrap();
        let mut bits = Vec::new();
        if !contexts.is_empty() {
            let client = Nbd::connect_with(&daemon.socket(), NODE, &contexts);
            bits = client.unwrap().status().unwrap();
        }
        daemon.unexport(NODE);
        daemon.close(NODE);
        Ok(Look { info, bytes, bits })
    }

    #[track_caller]
    fn read_snapshot(&self, side: usize, id: usize, snapshot: &str) -> Vec<u8> {
        let named = format!("snapshot.id={snapshot}");
        let convert = ["convert", "-U", "-O", "raw", "-l", &named, &self.file(id), "../disk"];
        let _ = self.program(side, false, &convert).ok();
        fs::read(self.root.path().join("disk")).unwrap()
    }

    #[track_caller]
    pub(super) fn read_by_isobath(&self, id: usize, snapshot: Option<&str>) -> Vec<u8> {
        let image = self.image(id);
        let mut convert = strings(["convert", "-U", "-f", image.format, "-O", "raw"]);
        if let Some(id) = snapshot {
            convert.extend(["-l".to_owned(), format!("snapshot.id={id}")]);
        }
        convert.extend(strings([&image.name, "../disk"]));
        let _ = self.program(1, true, &convert).ok();
        fs::read(self.root.path().join("disk")).unwrap()
    }

    /// Isobath's copy of an image has no more leaks and errors than QEMU's.
    #[track_caller]
    fn no_more_errors(&mut self, id: usize) {
        let file = self.file(id);
        let check = |side| self.program(side, false, &["check", "-U", "--output=json", &file]);
        let ours = check(1);
        if ours.code() == 0 {
            self.nodes.get_mut(&id).unwrap().leaky = false;
            return;
        }
        let theirs = check(0);
        let count = |done: &Finished, what: &str| done.json()[what].as_u64().unwrap_or(0);
        for what in ["corruptions", "check-errors", "leaks"] {
            let worse = count(&ours, what) > count(&theirs, what);
            let leaks = what == "leaks" && self.nodes[&id].leaky;
            assert!(!worse || leaks, "{}", ours.report());
        }
        // What QEMU leaves of a command that it refuses, its commit frees with everything else, and ours does not.
        self.nodes.get_mut(&id).unwrap().leaky |= self.turn && count(&ours, "leaks") > 0;
    }

    /// Whether an image's disk differs only where the programs have allocated different clusters.
    #[track_caller]
    fn allocated_differently(&mut self, id: usize, theirs: &[u8], ours: &[u8]) -> bool {
        let [one, other] = self.depths(id);
        let same_depth = |at: usize| one.get(at) == other.get(at);
        theirs.len() == ours.len()
            && (0..theirs.len()).all(|at| theirs[at] == ours[at] || !same_depth(at))
    }

    /// How far down the data of each byte of a disk is in each copy.
    #[track_caller]
    pub(super) fn depths(&mut self, id: usize) -> [Vec<u32>; 2] {
        [0, 1].map(|side| {
            if side == 1 && self.unsettled(id) {
                return self.depths_by_isobath(id);
            }
            let look = self.look(side, id, Some("qemu:allocation-depth")).unwrap();
            each_byte(look.bits.into_iter().flatten())
        })
    }

    /// How far down the data of each byte of a disk is, as in QEMU's metadata context.
    #[track_caller]
    fn depths_by_isobath(&self, id: usize) -> Vec<u32> {
        let map = self.program(1, true, &["map", "-U", "--output=json", &self.file(id)]).ok();
        let map = map.json();
        each_byte(map.as_array().unwrap().iter().map(|run| {
            let depth = run["depth"].as_u64().unwrap() as u32 + 1;
            let present = run["present"] != false;
            (run["length"].as_u64().unwrap(), if present { depth } else { 0 })
        }))
    }

    /// Whether Isobath's image `name` had leaks and nothing else wrong with it, as after a kill, and has none any more:
    /// a change that fails frees what it took by freeing all that is leaked.
    fn leaks_are_freed(&self, name: &str, before: &[u8]) -> bool {
        let now = self.sides[1].join(name);
        let then = now.with_extension("before");
        fs::write(&then, before).unwrap();
        let errors = [&then, &now].map(|image| {
            let check = args!["check", "-U", "-f", "qcow2", "--output=json", image];
            let report = qemu::img(check).json();
            ["leaks", "corruptions", "check-errors"].map(|what| report[what].as_u64().unwrap_or(0))
        });
        fs::remove_file(&then).unwrap();
        errors[0][0] > 0 && errors[0][1..] == [0, 0] && errors[1] == [0, 0, 0]
    }

    /// Bitmaps that QEMU takes for consistent have the same bits.
    #[track_caller]
    fn same_bitmaps(
        &mut self,
        id: usize,
        names: &[String],
        theirs: &[Vec<Run>],
        ours: &[Vec<Run>],
    ) {
        let file = &self.file(id);
        for (name, (theirs, ours)) in names.iter().zip(theirs.iter().zip(ours)) {
            if theirs == ours {
                continue;
            }
            let Doing { copies, unlike, grown_from, .. } = self.doing;
            let new =
                grown_from.map(|size| first_new(size, granularity(&self.image(id).info, name)));
            // QEMU on both copies marks what it copied in each, which is what was not allocated there. A commit marks
            // what is allocated in each.
            let may_differ = copies && self.turn || unlike || may_differ(theirs, ours, copies, new);
            assert!(may_differ, "{file}: {name}: {theirs:?}\n{ours:?}");
            for side in [0, 1] {
                let clear = self.program(side, false, &["bitmap", "--clear", file, name]);
                let _ = clear.ok();
            }
        }
    }
}

/// The bitmaps that QEMU takes for consistent.
pub(super) fn bitmaps(info: &Value) -> Vec<String> {
    let list = info["format-specific"]["data"]["bitmaps"].as_array().into_iter().flatten();
    let consistent = list
        .filter(|bitmap| bitmap["flags"].as_array().unwrap().iter().all(|flag| flag != "in-use"));
    consistent.map(|bitmap| bitmap["name"].as_str().unwrap().to_owned()).collect()
}

/// The values of runs for each byte.
fn each_byte(runs: impl Iterator<Item = Run>) -> Vec<u32> {
    runs.flat_map(|(length, value)| std::iter::repeat_n(value, length as usize)).collect()
}

/// The files that are new or have changed.
fn changed(before: &Files, now: &Files) -> Vec<String> {
    let is_new = |(name, bytes): &(&String, &Vec<u8>)| before.get(*name) != Some(*bytes);
    now.iter().filter(is_new).map(|(name, _)| name.clone()).collect()
}

fn differ_at(one: &[u8], other: &[u8]) -> Option<usize> {
    let at = one.iter().zip(other).position(|(one, other)| one != other);
    at.or((one.len() != other.len()).then(|| one.len().min(other.len()) - 1))
}
