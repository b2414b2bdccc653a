//! The commands of a history, drawn at random.

use super::chain::{
    Chain, Guest, Image, compressed, guest_commands, has_compressed, has_data, random_options,
    random_size, strings,
};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// The longest chain.
const LONGEST: usize = 6;

impl Chain {
    /// Draws a command that is possible, runs it on both copies, and compares them.
    #[track_caller]
    pub(super) fn step(&mut self, rng: &mut StdRng) {
        while !self.draw(rng) {}
        self.judge();
    }

    /// Whether there was anything to do.
    #[track_caller]
    fn draw(&mut self, rng: &mut StdRng) -> bool {
        if self.images.len() == 1 && self.images[0].is_raw() {
            return self.overlay(rng);
        }
        match rng.random_range(0..100) {
            0..28 => self.guest_step(rng),
            28..32 => self.compressed_step(rng),
            32..38 => self.overlay(rng),
            38..44 => self.commit(rng),
            44..52 => self.rebase(rng),
            52..56 => self.shorten(rng),
            56..70 => self.snapshot(rng),
            70..78 => self.amend(rng),
            78..88 => self.bitmap(rng),
            88..93 => self.resize(rng),
            93..97 => self.convert(rng),
            97..99 => self.bench(rng),
            _ => self.check(rng),
        }
    }

    fn top(&self) -> usize {
        self.images.len() - 1
    }

    /// Mostly the active image, or else another one that is qcow2.
    fn any_place(&self, rng: &mut StdRng) -> usize {
        let least = usize::from(self.images[0].is_raw());
        if rng.random_bool(0.7) { self.top() } else { rng.random_range(least..self.images.len()) }
    }

    fn any_guest(rng: &mut StdRng) -> Guest {
        match rng.random_range(0..3) {
            0 => Guest::Qemu,
            1 => Guest::Own,
            _ => Guest::Isobath,
        }
    }

    fn guest_step(&mut self, rng: &mut StdRng) -> bool {
        let place = if rng.random_bool(0.9) { self.top() } else { self.any_place(rng) };
        let guest = Self::any_guest(rng);
        let image = &self.images[place];
        let discards = guest != Guest::Own;
        let unit = if rng.random() { image.cluster() } else { 4096 };
        let commands = guest_commands(rng, image.size(), unit, 8, discards);
        self.guests(guest, place, &commands);
        self.forget_above(place);
        self.count("guest");
        true
    }

    /// Whole clusters, discarded first: QEMU compresses only into what is not allocated.
    fn compressed_step(&mut self, rng: &mut StdRng) -> bool {
        let place = self.top();
        let image = &self.images[place];
        if image.has_data_file() || image.is_v2() && image.has_backing() {
            return false;
        }
        let guest = Self::any_guest(rng);
        for command in compressed(rng, self.images[place].size(), self.images[place].cluster()) {
            let range = command.rsplitn(3, ' ').collect::<Vec<_>>();
            let discard = format!("discard {} {}", range[1], range[0]);
            self.guests(guest, place, &[discard]);
            self.guests(guest, place, &[command]);
        }
        self.count("compressed");
        true
    }

    fn overlay(&mut self, rng: &mut StdRng) -> bool {
        if self.images.len() >= LONGEST {
            return false;
        }
        let same = self.images.last().unwrap().size();
        let size = if rng.random_bool(0.5) { random_size(rng) } else { same };
        let name = self.new_name("qcow2");
        let create = self.create(rng, &name, "qcow2", size);
        if self.both(&create) {
            self.images.push(Image::new(&name, "qcow2"));
        }
        self.count("create");
        true
    }

    fn commit(&mut self, rng: &mut StdRng) -> bool {
        if self.images.len() < 2 {
            return false;
        }
        let place =
            if rng.random_bool(0.7) { self.top() } else { rng.random_range(1..self.images.len()) };
        let name = self.images[place].name.clone();
        let far = rng.random_bool(0.3);
        let base = if far { rng.random_range(0..place) } else { place - 1 };
        let size = self.images[place].size();
        if self.cannot_grow(base, size) {
            return false;
        }
        let old = self.images[base].size();
        (self.copies, self.grown_from) = (true, (size > old).then_some(old));
        if self.has_bitmaps(base) {
            self.unlike = !self.allocates_alike(place);
        }
        let mut commit = strings(["commit", "-q"]);
        if far {
            commit.extend(strings(["-b", &self.images[base].name]));
        } else if rng.random_bool(0.3) {
            commit.push("-d".into());
        }
        commit.push(name);
        let done = self.both(&commit);
        if done && far {
            // The images between are not valid any more.
            let held = self.images[place].name.clone();
            let image = Image::new(&held, "qcow2");
            self.forget_above(base);
            self.images.push(image);
            self.images[base + 1].loosen();
            self.judge_loosely(base + 1);
            self.forget_above(base);
        } else if done {
            self.images[place].loosen();
        }
        self.count("commit");
        true
    }

    /// Whether QEMU does not grow this image to that size: version 2 cannot hide what a longer backing file holds
    /// there, except by clusters of zeroes; nor can a compressed cluster with subclusters.
    fn cannot_grow(&self, place: usize, size: u64) -> bool {
        let image = &self.images[place];
        let Some(below) = place.checked_sub(1).map(|below| &self.images[below]) else {
            return false;
        };
        let unable = image.is_v2() || image.has_subclusters();
        unable && size > image.size() && below.size() > image.size()
    }

    /// Compares the disk of an image that is about to leave the chain, without its snapshots.
    #[track_caller]
    fn judge_loosely(&mut self, place: usize) {
        let image = &self.images[place];
        let [theirs, ours] = [0, 1].map(|side| self.read(side, image, None));
        assert!(theirs == ours, "{} differs", image.name);
    }

    fn rebase(&mut self, rng: &mut StdRng) -> bool {
        let place = self.any_place(rng);
        let image = &self.images[place];
        let name = image.name.clone();
        // QEMU lets the new backing file show in an image of version 2 that had none.
        let bare = image.is_v2() && !image.has_backing();
        match rng.random_range(0..5) {
            0 => {
                if self.both(&["rebase", "-b", "", &name]) {
                    self.images.drain(..place);
                    self.images[0].loosen();
                }
            }
            1 if place > 0 => {
                // Another image of the same contents.
                let below = self.images[place - 1].name.clone();
                let format = self.images[place - 1].format;
                let new = self.new_name("qcow2");
                let convert = ["convert", "-f", format, "-O", "qcow2", &below, &new];
                assert!(self.both(&convert), "it cannot be converted");
                let rebase = ["rebase", "-u", "-b", &new, "-F", "qcow2", &name];
                if self.both(&rebase) {
                    self.images.drain(..place);
                    self.images.insert(0, Image::new(&new, "qcow2"));
                    self.judge();
                }
            }
            2 if !bare => {
                // An image with other contents.
                let new = self.new_name("qcow2");
                let old = self.images[place].size();
                let size = if rng.random() { old } else { random_size(rng) };
                let options = random_options(rng, &new, true);
                let size_text = size.to_string();
                let create = ["create", "-q", "-f", "qcow2", "-o", &options, &new, &size_text];
                assert!(self.both(&create), "it cannot be created");
                let other = Image::new(&new, "qcow2");
                let kept = std::mem::replace(&mut self.images, vec![other]);
                let commands = guest_commands(rng, size, 4096, 8, false);
                self.guests(Guest::Qemu, 0, &commands);
                self.judge();
                let new_images = std::mem::replace(&mut self.images, kept);
                if self.both(&["rebase", "-b", &new, "-F", "qcow2", &name]) {
                    self.images.splice(..place, new_images);
                    self.images[1].loosen();
                }
            }
            _ if place > 0 => {
                let onto = rng.random_range(0..place);
                let (below, format) = (self.images[onto].name.clone(), self.images[onto].format);
                if self.both(&["rebase", "-b", &below, "-F", format, &name]) {
                    self.images[place].loosen();
                    self.images.drain(onto + 1..place);
                }
            }
            _ => return false,
        }
        self.copies = true;
        self.count("rebase");
        true
    }

    /// The commands for chains, each beside what `qemu-img rebase` does of it.
    fn shorten(&mut self, rng: &mut StdRng) -> bool {
        if self.images.len() < 2 {
            return false;
        }
        let place = rng.random_range(1..self.images.len());
        let name = self.images[place].name.clone();
        let active = self.images[self.top()].name.clone();
        let onto = match rng.random_range(0..3) {
            0 => None,
            _ => rng.random_range(0..place).checked_sub(1),
        };
        let mut rebase = strings(["rebase", "-b"]);
        match onto.map(|onto| &self.images[onto]) {
            Some(below) => rebase.extend(strings([&below.name, "-F", below.format])),
            None => rebase.push(String::new()),
        }
        rebase.push(name.clone());
        let first = onto.map_or(0, |onto| onto + 1);
        let removed = self.images[place - 1].name.clone();
        let ours = match (rng.random_range(0..3), onto) {
            (0, None) => strings(["chain", "flatten", "-q", "--change-snapshots", &name]),
            (1, _) if first + 1 == place => strings([
                "chain",
                "delete",
                "-q",
                "--change-snapshots",
                "--keep",
                &active,
                &removed,
            ]),
            _ => strings([
                "chain",
                "merge",
                "-q",
                "--change-snapshots",
                &self.images[first].name,
                &name,
            ]),
        };
        if self.each(&rebase, &ours) {
            self.images[place].loosen();
            self.images.drain(first..place);
        }
        self.copies = true;
        self.count("chain");
        true
    }

    fn snapshot(&mut self, rng: &mut StdRng) -> bool {
        let place = self.any_place(rng);
        let image = &self.images[place];
        let name = image.name.clone();
        let present = image.snapshots();
        let any = present.choose(rng).cloned();
        let draw = rng.random_range(0..10);
        let check = ["check", "-f", "qcow2", "--output=json", &name];
        if draw < 8 && image.is_narrow() && has_compressed(&self.qemu(0, &check).json()) {
            return false;
        }
        match (draw, any) {
            (0..5, _) if present.len() < 4 => {
                let counted = image.may_count(present.len() as u64 + 2);
                let map = || self.qemu(0, &["map", "--output=json", &name]).ok().json();
                if !counted && !has_data(&map()) {
                    return false;
                }
                let new = format!("s{}", rng.random_range(0..6));
                if self.both(&["snapshot", "-c", &new, &name]) {
                    self.judge();
                    self.images[place].note_snapshot_size();
                }
            }
            (5..8, Some(id)) if !image.loose.contains(&id) => {
                if !image.may_count(present.len() as u64 + 2) {
                    return false;
                }
                let given = if rng.random() { id } else { image.snapshot_name(&id) };
                // The first of two of the same name may be a loose one.
                let meant =
                    |other: &&String| **other == given || image.snapshot_name(other) == given;
                if present.iter().filter(meant).any(|other| image.loose.contains(other)) {
                    return false;
                }
                if self.both(&["snapshot", "-a", &given, &name]) {
                    self.forget_above(place);
                }
            }
            (8.., Some(id)) => {
                let given = image.snapshot_name(&id);
                self.both(&["snapshot", "-d", &given, &name]);
            }
            _ => return false,
        }
        self.count("snapshot");
        true
    }

    fn amend(&mut self, rng: &mut StdRng) -> bool {
        let place = self.any_place(rng);
        let image = &self.images[place];
        let name = image.name.clone();
        let mut options = Vec::new();
        for _ in 0..rng.random_range(1..=2) {
            options.push(match rng.random_range(0..7) {
                0 | 1 if image.snapshots().is_empty() => "compat=0.10".to_owned(),
                0..=2 => "compat=1.1".to_owned(),
                3 => format!("lazy_refcounts={}", if rng.random() { "on" } else { "off" }),
                4 => format!("refcount_bits={}", 1 << rng.random_range(0..=6)),
                5 if place == self.top() => {
                    let size = random_size(rng);
                    let size = if self.cannot_grow(place, size) { image.size() } else { size };
                    format!("size={}", image.may_end_at(size))
                }
                _ => {
                    let below = place.checked_sub(1).map(|below| &self.images[below]);
                    let below = below.filter(|_| image.has_backing());
                    match below {
                        Some(below) if rng.random() => format!("backing_file={}", below.name),
                        Some(below) => format!("backing_fmt={}", below.format),
                        None => "refcount_bits=16".to_owned(),
                    }
                }
            });
        }
        options.dedup_by_key(|option| option.split('=').next().unwrap().to_owned());
        if options.iter().any(|option| option == "compat=0.10") {
            // What keeps an image from version 2 may lie past its new end: QEMU shrinks it before it looks.
            let old = image.size();
            let shrinks =
                |size: Option<&str>| size.is_some_and(|size| size.parse::<u64>().unwrap() < old);
            options.retain(|option| !shrinks(option.strip_prefix("size=")));
        }
        let size = options.iter().find_map(|option| option.strip_prefix("size="));
        let grown = size.is_some_and(|size| size.parse::<u64>().unwrap() > image.size());
        self.grown_from = grown.then_some(image.size());
        if !self.both(&["amend", "-q", "-o", &options.join(","), &name]) {
            // QEMU has done what came before the option that it refuses, and has turned lazy refcounts off before it
            // refuses version 2; Isobath, nothing.
            self.take_back();
        }
        self.count("amend");
        true
    }

    fn bitmap(&mut self, rng: &mut StdRng) -> bool {
        let place = self.any_place(rng);
        let image = &self.images[place];
        let name = image.name.clone();
        let bitmap = format!("b{}", rng.random_range(0..4));
        let mut arguments = strings(["bitmap"]);
        match rng.random_range(0..10) {
            0..4 => {
                arguments.push("--add".into());
                if rng.random() {
                    let granularity: u64 = 512 << rng.random_range(0..8);
                    arguments.extend(["-g".to_owned(), granularity.to_string()]);
                }
                if rng.random_bool(0.3) {
                    arguments.push("--disable".into());
                }
            }
            4 => arguments.push("--remove".into()),
            5 => arguments.push("--clear".into()),
            6 => arguments.push("--enable".into()),
            7 => arguments.push("--disable".into()),
            _ => {
                let merged = format!("b{}", rng.random_range(0..4));
                arguments.extend(["--merge".to_owned(), merged]);
                let other = rng.random_range(0..self.images.len());
                if rng.random() && other != place && !self.images[other].is_raw() {
                    let other = self.images[other].name.clone();
                    arguments.extend(strings(["-b", &other, "-F", "qcow2"]));
                }
            }
        }
        arguments.extend([name, bitmap]);
        self.both(&arguments);
        self.count("bitmap");
        true
    }

    fn resize(&mut self, rng: &mut StdRng) -> bool {
        let place = self.any_place(rng);
        let image = &self.images[place];
        let (name, old) = (image.name.clone(), image.size());
        let new =
            if rng.random() { random_size(rng) } else { old + 512 * rng.random_range(1..200) };
        let new = image.may_end_at(new);
        if self.cannot_grow(place, new) {
            return false;
        }
        self.grown_from = (new > old).then_some(old);
        let (format, rest) = (image.format, image.rest_of_end(old, new));
        let mut resize = strings(["resize", "-q"]);
        if new < old || rng.random_bool(0.2) {
            resize.push("--shrink".into());
        }
        resize.extend([name.clone(), new.to_string()]);
        let resized = self.both(&resize);
        if resized && new < old {
            self.forget_above(place);
        }
        if resized && let Some([look, clear]) = rest {
            let own =
                |side, command: String| self.guest(Guest::Own, side, &name, format, &[command]);
            let _ = own(1, look.clone()).ok();
            if own(0, look).code() != 0 {
                let _ = [0, 1].map(|side| own(side, clear.clone()).ok());
                self.log.push(format!("io {name}: {clear}"));
            }
        }
        self.count("resize");
        true
    }

    /// Whether an image has the same clusters in both copies.
    fn allocates_alike(&self, place: usize) -> bool {
        let image = &self.images[place];
        let map = ["map", "-f", image.format, "--output=json", &image.name];
        let [theirs, ours] = [0, 1].map(|side| {
            let map = self.qemu(side, &map).ok().json();
            let runs = map.as_array().unwrap().iter();
            let runs = runs.map(|run| (run["length"].as_u64().unwrap(), run["depth"].clone()));
            runs.flat_map(|(length, depth)| std::iter::repeat_n(depth, (length / 512) as usize))
                .collect::<Vec<_>>()
        });
        theirs == ours
    }

    fn has_bitmaps(&self, place: usize) -> bool {
        let image = &self.images[place];
        !image.bitmaps(true).is_empty() || !image.bitmaps(false).is_empty()
    }

    /// A copy takes the place of the active image.
    fn convert(&mut self, rng: &mut StdRng) -> bool {
        let place = self.top();
        let image = &self.images[place];
        let name = image.name.clone();
        let new = self.new_name("qcow2");
        let image = &self.images[place];
        let mut convert = strings(["convert", "-q", "-f", image.format, "-O", "qcow2"]);
        let options = random_options(rng, &new, true);
        if rng.random_bool(0.3) && !options.contains("data_file") {
            convert.push("-c".into());
        }
        let mut over = place > 0 && rng.random();
        match image.snapshots().choose(rng) {
            // QEMU copies a snapshot of another size as if it had that of the disk.
            Some(id)
                if rng.random()
                    && !image.loose.contains(id)
                    && image.taken_at.get(id) == Some(&image.size()) =>
            {
                convert.extend(["-l".to_owned(), format!("snapshot.id={id}")]);
                over = false;
            }
            _ if !image.bitmaps(true).is_empty() && rng.random() => {
                convert.push("--bitmaps".into());
                if rng.random() {
                    convert.push("--skip-broken-bitmaps".into());
                }
            }
            _ => {}
        }
        if over {
            let below = &self.images[place - 1];
            convert.extend(strings(["-B", &below.name, "-F", below.format]));
        }
        convert.extend(["-o".to_owned(), options, name, new.clone()]);
        if self.both(&convert) {
            self.images.truncate(place);
            if !over {
                self.images.clear();
            }
            self.images.push(Image::new(&new, "qcow2"));
        }
        self.count("convert");
        true
    }

    fn bench(&mut self, rng: &mut StdRng) -> bool {
        let place = self.top();
        let image = &self.images[place];
        let (name, size) = (image.name.clone(), image.size());
        let length = 512 * rng.random_range(1..=64_u64);
        let count = rng.random_range(1..40);
        // Where a request fails, how many went before it depends on time.
        let Some(room) = size.checked_sub(length * count) else { return false };
        let bench = [
            "bench".to_owned(),
            "-w".to_owned(),
            format!("-c{count}"),
            format!("-d{}", rng.random_range(1..8)),
            format!("-s{length}"),
            format!("-o{}", rng.random_range(0..=room) / 512 * 512),
            format!("--pattern={}", rng.random_range(0..=255)),
            format!("--flush-interval={}", rng.random_range(8..20)),
            format!("-f{}", image.format),
            name,
        ];
        self.both(&bench);
        self.forget_above(place);
        self.count("bench");
        true
    }

    fn check(&mut self, rng: &mut StdRng) -> bool {
        let place = self.any_place(rng);
        let repair = if rng.random() { "all" } else { "leaks" };
        let name = self.images[place].name.clone();
        let ours = ["check", "-q", "-f", "qcow2", "-r", repair, &name];
        // With bitmaps and internal snapshots QEMU's deletes the snapshots.
        let loses = self.has_bitmaps(place) && !self.images[place].snapshots().is_empty();
        let theirs = if loses { &["check", "-q", "-f", "qcow2", &name][..] } else { &ours };
        self.each(theirs, &ours);
        self.count("check");
        true
    }
}
