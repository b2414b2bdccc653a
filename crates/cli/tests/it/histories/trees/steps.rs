//! The steps of a history, drawn at random.

use super::judge::bitmaps;
use super::names::{Form, ROOT};
use super::tree::{Tree, files, random_size, unname_format};
use crate::histories::chain::{Guest, guest_commands, has_compressed, has_data, strings};
use crate::live::clients::{Frontend, Kill};
use crate::serving::ISOBATH;
use isobath_testkit::locks::until_unlocked;
use isobath_testkit::nbd::Request;
use isobath_testkit::ops::{Op, Shape};
use isobath_testkit::process::{Ready, Server};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// The most images of a tree.
const MOST: usize = 9;

impl Tree {
    /// Draws a step that is possible, carries it out on both copies, and compares them.
    #[track_caller]
    pub(super) fn step(&mut self, rng: &mut StdRng) {
        if let Some(held) = &mut self.held {
            held.left -= 1;
            if held.left == 0 {
                self.release();
                self.judge();
            }
        }
        loop {
            let settled = self.nodes.values().all(|node| !node.unsettled);
            self.turn = settled && rng.random_bool(0.25);
            if let Some(what) = self.draw(rng) {
                self.count(what);
                break;
            }
        }
        if self.held.is_some() {
            self.count("beside a server");
        }
        self.judge();
    }

    /// Ends what is in use, and closes what was killed: QEMU opens every image then.
    #[track_caller]
    pub(super) fn end(&mut self, rng: &mut StdRng) {
        self.release();
        self.turn = false;
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            if self.nodes[&id].unsettled {
                let file = self.argument(rng, id);
                let open = ["io", "-f", "qcow2", "-c", "flush", &file];
                let recover = ["check", "-q", "-r", "all", &file];
                let recover = if rng.random() { &recover[..] } else { &open };
                self.log.push(format!("isobath {}", recover.join(" ")));
                let _ = self.program(1, true, recover).ok();
                let _ = self.program(1, false, &["info", &self.file(id)]).ok();
                self.nodes.get_mut(&id).unwrap().unsettled = false;
            }
        }
        self.judge();
    }

    /// What was done, if there was anything to do.
    #[track_caller]
    fn draw(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        match rng.random_range(0..100) {
            0..16 => self.guest_step(rng),
            16..27 => self.overlay(rng),
            27..34 => self.commit(rng),
            34..44 => self.rebase(rng),
            44..54 => self.delete(rng),
            54..63 => self.merge(rng),
            63..70 => self.snapshot(rng),
            70..76 => self.bitmap(rng),
            76..80 => self.amend(rng),
            80..83 => self.resize(rng),
            83..85 => self.check(rng),
            85..89 => self.index(rng),
            89..94 => self.kill(rng),
            _ => self.hold_any(rng),
        }
    }

    /// A layer of a chain as the argument of a command. A hard link is another file to `isobath chain`.
    fn layer(&self, rng: &mut StdRng, id: usize, overlay: usize) -> String {
        let forms = [Form::Plain, Form::Plain, Form::Absolute, Form::Link, Form::Directory];
        let hard = self.nodes[&overlay].form == Form::Hard;
        let form = if hard { Form::Hard } else { *forms.choose(rng).unwrap() };
        self.name(rng, "", id, form)
    }

    /// Whether it is qcow2, and no server may write to what is below it. For what concerns the image alone QEMU opens
    /// that too, and Isobath does not.
    fn is_alone(&self, id: usize) -> bool {
        let held = self.held.as_ref().filter(|held| held.writable && held.id != id);
        self.is_qcow2(id) && held.is_none_or(|held| !self.chain(id).contains(&held.id))
    }

    /// Mostly an image without overlays.
    fn leaf(&self, rng: &mut StdRng, holds: impl Fn(usize) -> bool) -> Option<usize> {
        let most = rng.random_bool(0.8);
        self.pick(rng, |id| holds(id) && (!most || self.overlays(id).is_empty()))
    }

    fn is_qcow2(&self, id: usize) -> bool {
        !self.image(id).is_raw()
    }

    /// Whether Isobath opens it.
    fn is_ours(&self, id: usize) -> bool {
        !self.foreign(id) && self.is_qcow2(id)
    }

    /// An image that only QEMU opens is its turn.
    fn turn_for(&mut self, id: usize) {
        self.turn |= self.foreign(id);
    }

    fn guest_step(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |_| true)?;
        let guest = match rng.random_range(0..3) {
            _ if self.foreign(id) => Guest::Qemu,
            0 if !self.unsettled(id) => Guest::Qemu,
            1 => Guest::Own,
            _ => Guest::Isobath,
        };
        let image = self.image(id);
        let unit = if rng.random() { image.cluster() } else { 4096 };
        let mut commands = guest_commands(rng, image.size(), unit, 6, guest != Guest::Own);
        let base = *self.chain(id).last().unwrap();
        let nameless = self.overlays(base).iter().all(|overlay| self.nameless(*overlay));
        if base != id && !self.is_qcow2(base) && nameless && rng.random_bool(0.5) {
            commands.push(format!("write -s ../{} 0 512", self.sector(rng)));
            self.magic = true;
            self.count("begins of images written");
        }
        self.guests(guest, id, &commands);
        // Requests before one that fails were carried out.
        self.doing.refused &= self.in_use(id);
        self.wrote(id);
        Some("guest")
    }

    /// A file that begins as an image of some format does.
    fn sector(&self, rng: &mut StdRng) -> &'static str {
        let all: [(&str, &[u8]); 4] = [
            ("qcow2", b"QFI\xfb\0\0\0\x03"),
            ("qed", b"QED\0\0\0\x01\0"),
            ("vmdk", b"KDMV\x01\0\0\0"),
            ("luks", b"LUKS\xba\xbe\0\x01"),
        ];
        let (name, start) = all.choose(rng).unwrap();
        let mut bytes = start.to_vec();
        bytes.resize(512, 0);
        fs::write(self.root.path().join(name), bytes).unwrap();
        name
    }

    fn overlay(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        if self.nodes.len() >= MOST {
            return None;
        }
        let below = self.any(rng)?;
        let same = self.image(below).size();
        let size = if rng.random() { random_size(rng) } else { same };
        let file = self.new_file(rng, "qcow2");
        let json = rng.random_bool(0.1) && !self.unsettled(below);
        let form = if json { Form::Json } else { Form::random(rng) };
        let create = self.create(rng, &file, Some(below), form, "qcow2", size);
        self.turn |= json || self.foreign(below);
        if self.both(&create) {
            self.add(&file, "qcow2", Some(below), form);
            self.count(format!("named {form:?}"));
            if form != Form::Json && rng.random_bool(0.2) {
                let id = self.pick(rng, |id| self.image(id).name == file)?;
                self.unname_format(id);
            }
        }
        Some("create")
    }

    /// Whether QEMU does not grow this image to that size, as in the other histories; or shows what it wrote beyond
    /// the end when it copied whole clusters into it.
    fn cannot_grow(&self, id: usize, size: u64) -> bool {
        let image = self.image(id);
        if size > image.size() && !image.size().is_multiple_of(image.cluster()) {
            return true;
        }
        let Some(below) = self.nodes[&id].below else { return false };
        let unable = image.is_v2() || image.has_subclusters();
        unable && size > image.size() && self.image(below).size() > image.size()
    }

    fn commit(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.nodes[&id].below.is_some())?;
        let chain = self.chain(id);
        let far = rng.random_bool(0.3);
        let depth = if far { rng.random_range(1..chain.len()) } else { 1 };
        let (base, over) = (chain[depth], chain[depth - 1]);
        let size = self.image(id).size();
        if self.cannot_grow(base, size) {
            return None;
        }
        if self.magic && !self.is_qcow2(base) {
            // It would be an image of another format to overlays that do not say that it is raw.
            let mut overlays = self.overlays(base).into_iter();
            if overlays.any(|overlay| self.nameless(overlay)) && !self.nameless(over) {
                return None;
            }
        }
        self.turn_for(id);
        let old = self.image(base).size();
        (self.doing.copies, self.doing.grown_from) = (true, (size > old).then_some(old));
        if !bitmaps(&self.image(base).info).is_empty() {
            let [theirs, ours] = self.depths(id);
            self.doing.unlike = theirs != ours;
        }
        let mut commit = strings(["commit", "-q"]);
        if far {
            let stored = self.image(over).info["backing-filename"].as_str().unwrap();
            let root = self.sides[0].to_str().unwrap();
            commit.extend(["-b".to_owned(), stored.replace(root, ROOT)]);
        } else if rng.random_bool(0.3) {
            commit.push("-d".into());
        }
        commit.push(self.argument(rng, id));
        if self.both(&commit) {
            self.wrote(base);
            return Some("commit");
        }
        if !self.is_qcow2(base) && self.nameless(over) {
            // What was committed before the first sector was refused is there.
            let sector = |files: &[u8]| files[..files.len().min(512)].to_vec();
            let now = files(&self.sides[1]);
            let file = self.file(base);
            assert!(sector(&now[&file]) == sector(&self.files[1][&file]), "{file} was turned");
            self.take_back();
            return Some("commit to a raw image of no format");
        }
        Some("commit that is refused")
    }

    fn rebase(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_qcow2(id))?;
        self.turn_for(id);
        let image = self.image(id);
        let below = self.nodes[&id].below;
        let form = Form::random(rng);
        match rng.random_range(0..6) {
            0 => {
                let rebase = ["rebase", "-b", "", &self.argument(rng, id)];
                if self.both(&rebase) {
                    self.reparent(id, None, form);
                }
            }
            // Another name for the same file.
            1 | 2 => {
                let below = below?;
                let mut rebase = self.unsafe_rebase(rng, id, below, form);
                if rng.random() {
                    rebase.remove(1);
                }
                if self.both(&rebase) {
                    self.reparent(id, Some(below), form);
                }
            }
            _ => {
                // QEMU lets the new backing file show in an image of version 2 that had none.
                if image.is_v2() && below.is_none() {
                    return None;
                }
                let by_qemu = self.foreign(id);
                let fits = |onto: usize| {
                    let closed = self.foreign(onto) || by_qemu && self.unsettled(onto);
                    !closed && !self.chain(onto).contains(&id)
                };
                let lower = rng.random_bool(0.6);
                let chain = self.chain(id);
                let onto =
                    self.pick(rng, |onto| fits(onto) && (!lower || chain.contains(&onto)))?;
                let name = self.name(rng, &self.file(id), onto, form);
                let format = self.image(onto).format;
                let rebase = ["rebase", "-b", &name, "-F", format, &self.argument(rng, id)];
                if self.both(&rebase) {
                    self.reparent(id, Some(onto), form);
                }
            }
        }
        Some("rebase")
    }

    /// Notes what an image is an overlay of now.
    fn reparent(&mut self, id: usize, below: Option<usize>, form: Form) {
        let node = self.nodes.get_mut(&id).unwrap();
        if node.below != below {
            node.image.loosen();
        }
        (node.below, node.form) = (below, form);
        if below.is_some() {
            self.count(format!("named {form:?}"));
        }
        self.doing.copies = true;
    }

    /// `chain merge` and `flatten`, each beside what `qemu-img rebase` does of it.
    fn merge(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_ours(id) && self.nodes[&id].below.is_some())?;
        let chain = self.chain(id);
        self.turn = false;
        let change = rng.random();
        let mut ours = strings(["chain"]);
        let depth = rng.random_range(1..chain.len());
        let flatten = depth + 1 == chain.len() && rng.random();
        ours.push(if flatten { "flatten" } else { "merge" }.to_owned());
        if change {
            ours.push("--change-snapshots".into());
        }
        if !flatten {
            ours.push(self.layer(rng, chain[depth], chain[depth - 1]));
        }
        ours.push(self.argument(rng, id));
        let kept = !change && !self.image(id).snapshots().is_empty();
        let done = self.merged(rng, &ours, id, chain.get(depth + 1).copied(), kept);
        Some(match done {
            Some(_) if flatten => "flatten",
            Some(_) => "merge",
            None => "merge that is refused",
        })
    }

    /// Runs a command that merges everything above `onto` into an image, beside QEMU's `rebase`; returns what it
    /// printed unless it was refused, as it must be if internal snapshots are `kept`.
    #[track_caller]
    fn merged(
        &mut self,
        rng: &mut StdRng,
        ours: &[String],
        id: usize,
        onto: Option<usize>,
        kept: bool,
    ) -> Option<String> {
        self.log.push(ours.join(" "));
        let done = self.program(1, true, ours);
        let file = self.file(id);
        let locked = done.code() != 0 && done.stderr.contains("lock");
        if kept && !locked {
            let said = done.code() == 1
                && done.stderr.contains("internal snapshots")
                && done.stderr.contains(file.rsplit('/').next().unwrap());
            assert!(said, "{}", done.report());
            self.note_refusal(&done);
            self.count("refused: internal snapshots");
            return None;
        }
        let named = match onto {
            Some(onto) if done.code() == 0 => self.name_that_merge_left(id, onto),
            Some(onto) => (Form::Plain.name(rng, &file, &self.file(onto), ""), None),
            None => (String::new(), None),
        };
        let mut rebase = strings(["rebase", "-b", &named.0]);
        if let Some(onto) = onto {
            rebase.extend(strings(["-F", self.image(onto).format]));
        }
        rebase.push(file.clone());
        self.log.push(format!("  beside {}", rebase.join(" ")));
        let theirs = self.program(0, false, &rebase);
        let (their, our) = (theirs.report(), done.report());
        assert!(theirs.code() == done.code(), "QEMU:\n{their}Isobath:\n{our}");
        if done.code() != 0 {
            self.note_refusal(&done);
            return None;
        }
        if onto.is_some_and(|_| named.1.is_none()) {
            unname_format(&self.sides[0].join(&file));
        }
        let form = if named.0.contains("hard-") { Form::Hard } else { Form::Plain };
        self.reparent(id, onto, form);
        Some(done.text())
    }

    /// The name that an image has for what is below it after a merge, and the format there. It is relative as long as
    /// the names that led there are.
    #[track_caller]
    fn name_that_merge_left(&self, id: usize, onto: usize) -> (String, Option<String>) {
        let file = self.file(id);
        let info = self.program(1, true, &["info", "-U", "--output=json", &file]).ok().json();
        let name = info["backing-filename"].as_str().unwrap().to_owned();
        let root = self.sides[1].to_str().unwrap();
        let plain = name.strip_prefix("file:").unwrap_or(&name);
        let directory = Path::new(&file).parent().unwrap();
        let named = fs::metadata(self.sides[1].join(directory).join(plain)).unwrap().ino();
        let meant = fs::metadata(self.sides[1].join(self.file(onto))).unwrap().ino();
        assert!(named == meant, "{file}: '{name}' is not {}", self.file(onto));
        let led = self.chain(id).into_iter().take_while(|id| *id != onto);
        let led: Vec<_> = led.map(|id| &self.image(id).info["backing-filename"]).collect();
        let is_full = |name: &str| name.trim_start_matches("file:").starts_with('/');
        let full = led.iter().any(|name| is_full(name.as_str().unwrap()));
        assert!(full || !is_full(&name), "{file}: '{name}' is not relative, but {led:?} are");
        let format = info["backing-filename-format"].as_str().map(str::to_owned);
        let right = format.as_ref().is_none_or(|format| *format == self.image(onto).format);
        assert!(right, "{file}: {format:?}");
        (name.replace(root, ROOT), format)
    }

    /// `chain delete`: a layer that nobody else needs goes.
    fn delete(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let active = self.leaf(rng, |id| self.is_ours(id) && self.nodes[&id].below.is_some())?;
        let chain = self.chain(active);
        self.turn = false;
        let depth = rng.random_range(1..chain.len());
        let (layer, overlay) = (chain[depth], chain[depth - 1]);
        let onto = chain.get(depth + 1).copied();
        let (keep, change) = (rng.random_bool(0.3), rng.random());
        let mut ours = strings(["chain", "delete"]);
        for (option, given) in [("--keep", keep), ("--change-snapshots", change)] {
            if given {
                ours.push(option.into());
            }
        }
        if !chain.iter().any(|id| !self.image(*id).name.contains('/')) {
            ours.extend(strings(["--search", "."]));
        }
        let by_link = self.nodes[&overlay].form == Form::Hard;
        let form = if by_link { Form::Hard } else { Form::Plain };
        let removed = self.name(rng, "", layer, form);
        ours.extend([self.argument(rng, active), self.layer(rng, layer, overlay)]);
        let snapshots = |tree: &Self, id| !tree.image(id).snapshots().is_empty();
        let reason = if snapshots(self, layer) && !keep {
            Some(("refused: snapshots would be lost", "internal snapshots"))
        } else if self.nodes.keys().any(|id| self.depends_on_directory(*id)) && !keep {
            Some(("refused: unknown names", "which may need the layer"))
        } else if self.in_use(layer) && !keep {
            Some(("refused: the layer is in use", "lock"))
        } else {
            None
        };
        if let Some((what, said)) = reason {
            self.log.push(ours.join(" "));
            let done = self.program(1, true, &ours);
            assert!(done.code() == 1 && done.stderr.contains(said), "{}", done.report());
            self.note_refusal(&done);
            self.count(what);
            return Some("delete that is refused");
        }
        let kept = !change && snapshots(self, overlay);
        let Some(said) = self.merged(rng, &ours, overlay, onto, kept) else {
            return Some("delete that is refused");
        };
        let users = self.overlays(layer);
        let there = self.sides[1].join(&removed).exists();
        assert!(there == (keep || !users.is_empty()), "{said}");
        if there {
            let named = |user: &usize| {
                let file = self.file(*user);
                said.contains(file.rsplit('/').next().unwrap())
            };
            assert!(keep || users.iter().any(named), "{said}");
            return Some(if keep { "delete --keep" } else { "delete of a layer with users" });
        }
        self.remove_file(layer);
        self.nodes.remove(&layer);
        Some("delete")
    }

    fn snapshot(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_alone(id))?;
        self.turn_for(id);
        let image = self.image(id);
        let present = image.snapshots();
        let any = present.choose(rng).cloned();
        let file = self.argument(rng, id);
        let draw = rng.random_range(0..10);
        let check = ["check", "-U", "-f", "qcow2", "--output=json", &self.file(id)];
        let narrow = draw < 7 && image.is_narrow();
        if narrow && has_compressed(&self.program(0, false, &check).json()) {
            return None;
        }
        match (draw, any) {
            (0..5, _) if present.len() < 3 => {
                let counted = image.may_count(present.len() as u64 + 2);
                let map = ["map", "-U", "--output=json", &self.file(id)];
                if !counted && !has_data(&self.program(0, false, &map).ok().json()) {
                    return None;
                }
                let new = format!("s{}", rng.random_range(0..6));
                self.both(&["snapshot", "-c", &new, &file]);
            }
            (5..7, Some(one)) if !image.loose.contains(&one) => {
                if !image.may_count(present.len() as u64 + 2) {
                    return None;
                }
                let same_name =
                    |other: &&String| **other == one || image.snapshot_name(other) == one;
                if present.iter().filter(same_name).any(|other| image.loose.contains(other)) {
                    return None;
                }
                if self.both(&["snapshot", "-a", &one, &file]) {
                    self.wrote(id);
                }
            }
            (7.., Some(one)) => {
                let given = image.snapshot_name(&one);
                self.both(&["snapshot", "-d", &given, &file]);
            }
            _ => return None,
        }
        Some("snapshot")
    }

    fn bitmap(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_alone(id))?;
        self.turn_for(id);
        let action = ["--add", "--add", "--remove", "--clear", "--enable", "--disable"];
        let action = *action.choose(rng).unwrap();
        let name = format!("b{}", rng.random_range(0..3));
        let bitmap = ["bitmap", action, &self.argument(rng, id), &name];
        self.both(&bitmap);
        Some("bitmap")
    }

    fn amend(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_alone(id))?;
        self.turn_for(id);
        let image = self.image(id);
        let option = match rng.random_range(0..5) {
            0 if image.snapshots().is_empty() => "compat=0.10".to_owned(),
            0 | 1 => "compat=1.1".to_owned(),
            2 => format!("refcount_bits={}", 1 << rng.random_range(3..=6)),
            _ => format!("lazy_refcounts={}", if rng.random() { "on" } else { "off" }),
        };
        let amend = ["amend", "-q", "-o", &option, &self.argument(rng, id)];
        if !self.both(&amend) && !self.turn {
            // QEMU has turned lazy refcounts off before it refuses version 2.
            let file = self.file(id);
            fs::write(self.sides[0].join(&file), &self.files[0][&file]).unwrap();
        }
        Some("amend")
    }

    fn resize(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_qcow2(id))?;
        self.turn_for(id);
        let image = self.image(id);
        let (old, new) = (image.size(), image.may_end_at(random_size(rng)));
        if self.cannot_grow(id, new) || new < old && !self.overlays(id).is_empty() {
            return None;
        }
        self.doing.grown_from = (new > old).then_some(old);
        let resize = ["resize", "-q", "--shrink", &self.argument(rng, id), &new.to_string()];
        if self.both(&resize) {
            self.wrote(id);
        }
        Some("resize")
    }

    fn check(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| self.is_alone(id))?;
        self.turn_for(id);
        // With bitmaps and internal snapshots QEMU's repair deletes the snapshots.
        let image = self.image(id);
        let bitmaps = !image.bitmaps(true).is_empty() || !image.bitmaps(false).is_empty();
        if bitmaps && !image.snapshots().is_empty() || self.nodes[&id].leaky {
            return None;
        }
        let repair = if rng.random() { "all" } else { "leaks" };
        let check = ["check", "-q", "-r", repair, &self.argument(rng, id)];
        self.both(&check);
        Some("check -r")
    }

    /// Isobath's copy gets an index, or loses it.
    fn index(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| {
            self.is_ours(id) && self.nodes[&id].below.is_some() && !self.image(id).is_v2()
        })?;
        let used = self.held.as_ref().is_some_and(|held| {
            self.chain(held.id).contains(&id) || held.writable && self.chain(id).contains(&held.id)
        });
        if used {
            return None;
        }
        let mut index = strings(["index", "-q"]);
        if rng.random_bool(0.2) {
            index.push("--drop".into());
        }
        index.push(self.argument(rng, id));
        self.log.push(format!("isobath {}", index.join(" ")));
        let _ = self.program(1, true, &index).ok();
        Some("index")
    }

    fn hold_any(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        if self.held.is_some() {
            return None;
        }
        let writable = rng.random_bool(0.4);
        let id = self.pick(rng, |id| {
            let image = self.image(id);
            let bitmaps = !image.bitmaps(true).is_empty() || !image.bitmaps(false).is_empty();
            let foreign = self.above(id).into_iter().any(|above| self.foreign(above));
            let unsettled = self.unsettled(id);
            // A qemu-nbd that reads lets others write to a raw base, which isobath does not.
            let raw = self.chain(id).iter().any(|id| !self.is_qcow2(*id));
            !raw && !unsettled && !(writable && (bitmaps || foreign))
        })?;
        self.hold(rng, id, writable);
        Some("server")
    }

    /// A server of Isobath's copy is killed when it has answered some writes.
    fn kill(&mut self, rng: &mut StdRng) -> Option<&'static str> {
        let id = self.leaf(rng, |id| {
            let image = self.image(id);
            let bitmaps = !image.bitmaps(true).is_empty() || !image.bitmaps(false).is_empty();
            let foreign = self.above(id).into_iter().any(|above| self.foreign(above));
            let used = self.held.as_ref().is_some_and(|held| {
                self.chain(held.id).contains(&id) || self.chain(id).contains(&held.id)
            });
            self.is_ours(id) && !image.is_v2() && !bitmaps && !foreign && !used
        })?;
        let (file, size) = (self.argument(rng, id), self.image(id).size());
        let shape = Shape { size, longest: 40 << 10, unit: self.image(id).cluster() };
        let count = rng.random_range(1..=6);
        let ops: Vec<Op> = shape.ops(rng, count).into_iter().filter_map(whole_sectors).collect();
        if ops.is_empty() {
            return None;
        }
        let metadata = *["auto", "journal", "ordered", "embedded"].choose(rng).unwrap();
        let machine = rng.random_bool(0.6);
        let socket = self.root.path().join("killed");
        let mut command = Command::new(ISOBATH);
        command.current_dir(&self.sides[1]).args(["serve", "--metadata", metadata]);
        command.args(["--export-name", "d", if machine { "--vhost-user-blk" } else { "--nbd" }]);
        command.arg(format!("unix:{}", socket.display()));
        command.arg(file.replace(ROOT, self.sides[1].to_str().unwrap()));
        let commands: Vec<_> = ops.iter().filter_map(Op::io_command).collect();
        let what = if machine { "vhost-user-blk" } else { "nbd" };
        self.log.push(format!("{what}, {metadata}, {file}, killed: {}", commands.join("; ")));
        let _ = fs::remove_file(&socket);
        let server = Server::start(
            &mut command,
            Ready::Line(if machine { "-chardev" } else { "-blockdev" }),
        );
        let frontend =
            if machine { Frontend::Vhost(socket) } else { Frontend::Nbd(socket, "d".into()) };
        let kill = Kill::default();
        // What a machine was answered outlives a kill as it is.
        let flush = !machine || metadata == "ordered" || rng.random_bool(0.2);
        let buffers: Vec<Vec<u8>> = ops.iter().map(data).collect();
        let requests = ops.iter().zip(&buffers).map(|(op, data)| match *op {
            Op::Zero { offset, length, unmap } => {
                Request::Zero { offset, length: length as u32, unmap }
            }
            Op::Write { offset, .. } => Request::Write { offset, data, fua: false },
            _ => Request::Flush,
        });
        let mut requests: Vec<_> = requests.collect();
        if flush {
            requests.push(Request::Flush);
        }
        let sent = frontend.with(&kill, |client| {
            // One after another: what overlaps is in their order.
            for request in &requests {
                client.submit(std::slice::from_ref(request)).unwrap();
            }
            kill.carry_out(|| server.signal(libc::SIGKILL));
        });
        sent.unwrap();
        drop(server.kill());
        self.sides.iter().for_each(|side| until_unlocked(&side.join(self.file(id))));
        let done = self.io(0, true, &self.file(id), "qcow2", &commands).ok();
        drop(done);
        let node = self.nodes.get_mut(&id).unwrap();
        (node.unsettled, node.leaky) = (true, true);
        self.wrote(id);
        Some(if machine { "kill, vhost-user-blk" } else { "kill, nbd" })
    }
}

/// A request of whole sectors, as those of virtual machines are; discards are each program's own affair.
fn whole_sectors(op: Op) -> Option<Op> {
    let whole = |offset: u64, length: u64| {
        let start = offset / 512 * 512;
        (start, (offset + length).next_multiple_of(512) - start)
    };
    match op {
        Op::Write { offset, length, pattern } => {
            let (offset, length) = whole(offset, length);
            Some(Op::Write { offset, length, pattern })
        }
        Op::Zero { offset, length, unmap } => {
            let (offset, length) = whole(offset, length);
            Some(Op::Zero { offset, length, unmap })
        }
        _ => None,
    }
}

/// What a write writes.
fn data(op: &Op) -> Vec<u8> {
    match *op {
        Op::Write { length, pattern, .. } => vec![pattern; length as usize],
        _ => Vec::new(),
    }
}
