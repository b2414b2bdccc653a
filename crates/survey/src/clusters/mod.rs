//! Counting clusters that no disk can see, from the L1 and L2 tables.
//!
//! A tree of images is traversed from its active images down. An active image is wanted entirely. The wanted part of
//! any other image is the union, over its overlays, of the part that is wanted in the overlay but not allocated there.
//! A cluster of which nothing is wanted is *hidden*: in every chain that uses the file, some image above has allocated
//! it. Hidden clusters are counted conservatively: none in images with internal snapshots or a data file, and none in
//! bases that are not qcow2; tables that cannot be read hide nothing.

mod tables;
mod wanted;

use crate::fleet::{Flags, Fleet, NONE};
use crate::link::{Links, below};
use crate::problem::{Problems, Trouble};
use crate::{Options, Progress};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use wanted::Wanted;

/// The maximum number of units of a disk to count: 512 TiB in units of 64 KiB.
const MAX_UNITS: u64 = 1 << 33;

/// The counts of an image.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Own {
    /// Bytes of host clusters that its L2 tables refer to.
    pub(crate) data: u64,
    /// The part of those that no disk can see.
    pub(crate) hidden: u64,
    /// The number of L2 tables.
    pub(crate) tables: u32,
    /// Whether its tables were read to the end.
    pub(crate) counted: bool,
}

/// The counts, one entry per image.
#[derive(Debug)]
pub(crate) struct Counted {
    pub(crate) own: Vec<Own>,
}

impl Counted {
    pub(crate) fn of(&self, number: u32) -> Own {
        self.own.get(number as usize).copied().unwrap_or_default()
    }
}

/// The overlays of every image, in one list.
struct Children {
    starts: Vec<u32>,
    list: Vec<u32>,
    /// For each image, the number of wanted sets needed at a time to count it and all images above it.
    needs: Vec<u8>,
}

impl Children {
    fn new(fleet: &Fleet, links: &Links) -> Self {
        let mut starts = Vec::with_capacity(fleet.len() + 1);
        let mut total = 0;
        starts.push(0);
        for &count in &links.children {
            total += count;
            starts.push(total);
        }
        let mut list = vec![NONE; total as usize];
        let mut next = starts.clone();
        for number in fleet.numbers() {
            if let Some(parent) = below(fleet, number)
                && let Some(at) = next.get_mut(parent as usize)
                && let Some(entry) = list.get_mut(*at as usize)
            {
                *entry = number;
                *at += 1;
            }
        }
        let mut children = Self { starts, list, needs: vec![1; fleet.len()] };
        // The image that needs the most sets comes first: while it is counted, no set of a sibling is kept.
        for &number in &links.top_down {
            let (from, to) = children.range(number);
            let needs = |number: &u32| children.needs.get(*number as usize).copied().unwrap_or(1);
            let mut own = children.list.get(from..to).unwrap_or_default().to_vec();
            own.sort_by_key(|number| std::cmp::Reverse(needs(number)));
            let need = match own.as_slice() {
                [] => 1,
                [only] => needs(only),
                [first, second, ..] => needs(first).max(needs(second).saturating_add(1)),
            };
            if let Some(place) = children.list.get_mut(from..to) {
                place.copy_from_slice(&own);
            }
            if let Some(place) = children.needs.get_mut(number as usize) {
                *place = need;
            }
        }
        children
    }

    fn range(&self, number: u32) -> (usize, usize) {
        let at = |index: usize| self.starts.get(index).map_or(0, |&at| at as usize);
        (at(number as usize), at(number as usize + 1))
    }

    fn of(&self, number: u32) -> &[u32] {
        let (from, to) = self.range(number);
        self.list.get(from..to).unwrap_or_default()
    }
}

/// Counts the clusters of all trees in parallel.
pub(crate) fn count(
    fleet: &mut Fleet,
    links: &Links,
    options: &Options,
    progress: &Progress,
) -> Counted {
    let children = Children::new(fleet, links);
    let roots: Vec<u32> =
        links.top_down.iter().copied().filter(|&number| below(fleet, number).is_none()).collect();
    let results = Mutex::new((vec![Own::default(); fleet.len()], Problems::default()));
    let next = AtomicUsize::new(0);
    let shared: &Fleet = fleet;
    let work = || {
        while let Some(&root) = roots.get(next.fetch_add(1, Relaxed)) {
            if progress.is_stopped() {
                break;
            }
            let mut tree = Tree {
                fleet: shared,
                children: &children,
                progress,
                own: Vec::new(),
                problems: Problems::default(),
            };
            tree.count(root);
            let mut results = results.lock();
            for (number, own) in tree.own {
                if let Some(place) = results.0.get_mut(number as usize) {
                    *place = own;
                }
            }
            results.1.merge(tree.problems);
        }
    };
    thread::scope(|scope| {
        for _ in 1..options.threads.max(1) {
            // If no thread can be started, this one does all the work.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let (own, problems) = results.into_inner();
    fleet.problems.merge(problems);
    fleet.problems.sort();
    Counted { own }
}

struct Tree<'a> {
    fleet: &'a Fleet,
    children: &'a Children,
    progress: &'a Progress,
    own: Vec<(u32, Own)>,
    problems: Problems,
}

/// An image whose overlays are being counted.
struct Frame {
    number: u32,
    next_child: usize,
    /// The part that the overlays counted so far want.
    wanted: Option<Wanted>,
}

impl Tree<'_> {
    fn count(&mut self, root: u32) {
        let Some((unit_bits, units)) = self.size(root) else { return };
        if units > MAX_UNITS {
            let path = self.fleet.path_bytes(root);
            self.problems.add(&path, Trouble::TooLarge, format_args!("{units} units"));
            return;
        }
        let mut stack = vec![Frame { number: root, next_child: 0, wanted: None }];
        while let Some(frame) = stack.last_mut() {
            if self.progress.is_stopped() {
                // A partial tree says nothing about the images below.
                return;
            }
            if let Some(&child) = self.children.of(frame.number).get(frame.next_child) {
                frame.next_child += 1;
                stack.push(Frame { number: child, next_child: 0, wanted: None });
                continue;
            }
            let Some(Frame { number, wanted, .. }) = stack.pop() else { return };
            let passed_on = self.image(number, wanted, unit_bits);
            if let Some(parent) = stack.last_mut() {
                parent.wanted = Some(match parent.wanted.take() {
                    Some(mut wanted) => {
                        wanted.unite(passed_on);
                        wanted
                    }
                    None => passed_on,
                });
            }
        }
    }

    /// The base-2 logarithm of the smallest unit of a tree's images, and the number of such units in its largest disk.
    fn size(&self, root: u32) -> Option<(u32, u64)> {
        let mut waiting = vec![root];
        let (mut bits, mut disk) = (u32::MAX, 0);
        while let Some(number) = waiting.pop() {
            let image = self.fleet.image(number);
            if !image.flags.has(Flags::RAW) && !image.flags.has(Flags::BROKEN) {
                let sub = if image.flags.has(Flags::EXTENDED_L2) { 5 } else { 0 };
                bits = bits.min(u32::from(image.cluster_bits).saturating_sub(sub));
                disk = disk.max(image.disk);
            }
            waiting.extend(self.children.of(number));
        }
        (bits != u32::MAX).then(|| (bits, disk.div_ceil(1 << bits)))
    }

    /// Counts the clusters of an image, given its wanted part (`None` if it is active); returns the wanted part of the
    /// image below.
    fn image(&mut self, number: u32, wanted: Option<Wanted>, unit_bits: u32) -> Wanted {
        let image = self.fleet.image(number);
        let units = image.disk.div_ceil(1 << unit_bits).min(MAX_UNITS);
        // An overlay that reads the file as raw may see every byte of it.
        let raw_above = self
            .children
            .of(number)
            .iter()
            .any(|&child| self.fleet.image(child).flags.has(Flags::RAW_BACKING));
        let active = wanted.is_none();
        let mut wanted = match wanted {
            Some(mut wanted) if !raw_above => {
                wanted.cut(units);
                wanted
            }
            _ => Wanted::everything(units),
        };
        let mut own = Own::default();
        if image.flags.has(Flags::RAW) || image.flags.has(Flags::BROKEN) {
            self.own.push((number, own));
            return wanted;
        }
        let may_hide = !active && !image.flags.has(Flags::SHARED_CLUSTERS);
        let read = tables::read(self.fleet, number, &mut |cluster: &tables::Cluster| {
            own.data += cluster.bytes;
            let seen = cluster.units(unit_bits).any(|unit| wanted.has(unit));
            if may_hide && cluster.exclusive && !seen {
                own.hidden += cluster.bytes;
            }
            for unit in cluster.own_units(unit_bits) {
                wanted.remove(unit);
            }
        });
        match read {
            Ok(tables) => {
                own.tables = tables;
                own.counted = true;
            }
            Err(error) => {
                let path = self.fleet.path_bytes(number);
                self.problems.add(&path, Trouble::BadTables, error);
            }
        }
        self.progress.counted.fetch_add(1, Relaxed);
        self.own.push((number, own));
        if image.flags.has(Flags::RAW_BACKING) {
            // The image below is counted on its own.
            wanted = Wanted::everything(0);
        }
        wanted
    }
}
