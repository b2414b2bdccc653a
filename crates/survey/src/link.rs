//! Linking images into chains by their backing files.

use crate::fleet::{Flags, Fleet, NONE};
use crate::probe::{self, Backing, Id, Kind};
use crate::problem::Trouble;
use crate::walk::look;
use crate::{Options, Progress, name};
use rustc_hash::FxHashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The positions of a fleet's images in their chains.
#[derive(Debug)]
pub(crate) struct Links {
    /// The number of overlays of each image.
    pub(crate) children: Vec<u32>,
    /// The number of files from each image down to its base, both included.
    pub(crate) depth: Vec<u32>,
    /// The length of the longest chain that each image belongs to.
    pub(crate) longest: Vec<u32>,
    /// Active images, which are not the backing file of any other image.
    pub(crate) active: Vec<u32>,
    /// All images except those in loops, each after all of its overlays.
    pub(crate) top_down: Vec<u32>,
    /// Images in loops.
    pub(crate) in_loops: u64,
}

/// Finds duplicates, follows names that lead out of the surveyed directories, and links all images.
pub(crate) fn link(
    fleet: &mut Fleet,
    roots: &[PathBuf],
    options: &Options,
    progress: &Progress,
) -> Links {
    let mut known = by_id(fleet);
    let roots: Vec<PathBuf> = roots.iter().filter_map(|root| fs::canonicalize(root).ok()).collect();
    // Grows, as the fleet does, while names lead to files that are not in the fleet yet.
    let mut extra: FxHashMap<Id, u32> = FxHashMap::default();
    let mut number = 0;
    while (number as usize) < fleet.len() {
        if let Some(id) = fleet.backing_id(number)
            && !fleet.image(number).flags.has(Flags::DUPLICATE)
        {
            let found = lookup(fleet, &known, id).or_else(|| extra.get(&id).copied());
            let parent = found.or_else(|| {
                if progress.is_stopped() {
                    return None;
                }
                let followed = follow(fleet, number, id, &roots, options, progress)?;
                extra.insert(id, followed);
                Some(followed)
            });
            match parent {
                Some(parent) => attach(fleet, number, parent),
                None => fleet.image_mut(number).flags.set(Flags::CUT, true),
            }
        }
        number += 1;
    }
    known.clear();
    fleet.settle();
    let links = measure(fleet);
    fleet.problems.sort();
    links
}

/// The images, sorted by identity. If a file has several names, only the first in byte order counts.
fn by_id(fleet: &mut Fleet) -> Vec<u32> {
    let mut order: Vec<u32> = fleet.all_numbers().collect();
    order.sort_unstable_by_key(|&number| fleet.id(number));
    let mut kept = Vec::with_capacity(order.len());
    for same in order.chunk_by(|&one, &other| fleet.id(one) == fleet.id(other)) {
        kept.extend(match same {
            [only] => Some(*only),
            several => several.iter().copied().min_by_key(|&number| fleet.path_bytes(number)),
        });
    }
    let mut unique = vec![false; fleet.len()];
    for &number in &kept {
        if let Some(unique) = unique.get_mut(number as usize) {
            *unique = true;
        }
    }
    for (number, unique) in (0..).zip(unique) {
        fleet.image_mut(number).flags.set(Flags::DUPLICATE, !unique);
    }
    kept
}

fn lookup(fleet: &Fleet, known: &[u32], id: Id) -> Option<u32> {
    let at = known.binary_search_by_key(&id, |&number| fleet.id(number)).ok()?;
    known.get(at).copied()
}

/// Probes a backing file that is not among the images: a base of another format, or one outside the surveyed
/// directories.
fn follow(
    fleet: &mut Fleet,
    image: u32,
    id: Id,
    roots: &[PathBuf],
    options: &Options,
    progress: &Progress,
) -> Option<u32> {
    let referrer = fleet.path(image);
    let refer_trouble = |fleet: &mut Fleet, trouble: Trouble, detail: &str| {
        fleet.problems.add(&fleet.path_bytes(image), trouble, detail);
        None
    };
    let named = match named(&referrer) {
        Ok(Some(named)) => named,
        Ok(None) => return refer_trouble(fleet, Trouble::BackingUnreadable, "the image changed"),
        Err(error) => return refer_trouble(fleet, Trouble::of_image(&error), &error.to_string()),
    };
    let shown = name::exact(named.name.as_bytes());
    let path = match probe::find(&referrer, &named) {
        Ok((path, found)) if found == id => path,
        Ok(_) => return refer_trouble(fleet, Trouble::BackingUnreadable, "the image changed"),
        Err(trouble) => return refer_trouble(fleet, trouble, &shown),
    };
    let outside =
        !fs::canonicalize(&path).is_ok_and(|real| roots.iter().any(|root| real.starts_with(root)));
    progress.files.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    match probe::open(&path).and_then(|opened| look(path, &opened, outside)) {
        Ok((seen, trouble)) => {
            let number = fleet.add(&seen, options.births)?;
            if let Some((trouble, detail)) = trouble {
                fleet.problems.add(&fleet.path_bytes(number), trouble, detail);
            }
            Some(number)
        }
        Err(error) => refer_trouble(fleet, Trouble::of_backing(&error), &shown),
    }
}

/// The backing file that an image's header names.
fn named(image: &Path) -> io::Result<Option<Backing>> {
    let (_, kind) = probe::look(image)?;
    Ok(match kind {
        Kind::Qcow2(summary) => summary.backing,
        Kind::Other(_) | Kind::Broken(_) => None,
    })
}

fn attach(fleet: &mut Fleet, image: u32, parent: u32) {
    let below = fleet.image(parent).flags;
    let own = fleet.image_mut(image);
    own.parent = parent;
    let trouble = if below.has(Flags::RAW) && own.flags.has(Flags::QCOW2_BACKING) {
        Trouble::NotQcow2
    } else if below.has(Flags::FOREIGN) && !own.flags.has(Flags::RAW_BACKING) {
        Trouble::Foreign
    } else {
        return;
    };
    own.flags.set(Flags::CUT, true);
    let path = fleet.path_bytes(parent);
    fleet.problems.add(&fleet.path_bytes(image), trouble, name::exact(&path));
}

/// The next image down the chain. A backing file that is treated as raw ends the chain.
pub(crate) fn below(fleet: &Fleet, number: u32) -> Option<u32> {
    Some(fleet.image(number).parent).filter(|&parent| parent != NONE)
}

/// Computes depths and lengths, and finds the active images.
fn measure(fleet: &mut Fleet) -> Links {
    let count = fleet.len();
    let mut children = vec![0_u32; count];
    for number in fleet.numbers() {
        if let Some(parent) = below(fleet, number).and_then(|at| children.get_mut(at as usize)) {
            *parent += 1;
        }
    }
    let (depth, loops) = depths(fleet);
    for circle in &loops {
        for &number in circle {
            fleet.image_mut(number).flags.set(Flags::CUT, true);
            let next = name::exact(&fleet.path_bytes(fleet.image(number).parent));
            fleet.problems.add(&fleet.path_bytes(number), Trouble::Loop, next);
        }
    }
    let at = |list: &[u32], number: u32| list.get(number as usize).copied().unwrap_or(0);
    let active: Vec<u32> = fleet
        .numbers()
        .filter(|&number| {
            let flags = fleet.image(number).flags;
            at(&children, number) == 0 && !flags.has(Flags::RAW) && !flags.has(Flags::BROKEN)
        })
        .collect();
    let mut longest = depth.clone();
    let mut waiting = children.clone();
    let mut top_down = active.clone();
    let mut next = 0;
    while let Some(&number) = top_down.get(next) {
        next += 1;
        let Some(parent) = below(fleet, number) else { continue };
        let reach = at(&longest, number);
        if let Some(longest) = longest.get_mut(parent as usize) {
            // A base's own depth is not the length of a chain with other images above it.
            *longest = reach.max(*longest);
        }
        if let Some(waiting) = waiting.get_mut(parent as usize) {
            *waiting -= 1;
            if *waiting == 0 {
                top_down.push(parent);
            }
        }
    }
    let in_loops = loops.iter().map(|circle| circle.len() as u64).sum();
    Links { children, depth, longest, active, top_down, in_loops }
}

/// The number of files from each image down to its base, and the loops.
fn depths(fleet: &Fleet) -> (Vec<u32>, Vec<Vec<u32>>) {
    const UNKNOWN: u32 = 0;
    const ON_THE_WAY: u32 = u32::MAX;
    let mut depth = vec![UNKNOWN; fleet.len()];
    let mut loops = Vec::new();
    let mut way = Vec::new();
    for start in fleet.numbers() {
        let mut number = start;
        let mut reached = 0;
        loop {
            match depth.get(number as usize).copied() {
                Some(UNKNOWN) => {}
                Some(ON_THE_WAY) => {
                    let from = way.iter().position(|&one| one == number).unwrap_or(0);
                    let circle = way.split_off(from);
                    reached = circle.len() as u32;
                    for &one in &circle {
                        set(&mut depth, one, reached);
                    }
                    loops.push(circle);
                    break;
                }
                known => {
                    reached = known.unwrap_or(0);
                    break;
                }
            }
            set(&mut depth, number, ON_THE_WAY);
            way.push(number);
            match below(fleet, number) {
                Some(parent) => number = parent,
                None => break,
            }
        }
        while let Some(number) = way.pop() {
            // A file treated as raw ends the chain, whatever it contains.
            let raw_below =
                fleet.image(number).flags.has(Flags::RAW_BACKING) && below(fleet, number).is_some();
            reached = if raw_below { 2 } else { reached.saturating_add(1) };
            set(&mut depth, number, reached);
        }
    }
    (depth, loops)
}

fn set(list: &mut [u32], number: u32, value: u32) {
    if let Some(entry) = list.get_mut(number as usize) {
        *entry = value;
    }
}

/// The files of an image's chain, from the image to the base.
pub(crate) fn chain<'a>(
    fleet: &'a Fleet,
    links: &Links,
    active: u32,
) -> impl Iterator<Item = u32> + 'a {
    let length = links.depth.get(active as usize).copied().unwrap_or(0);
    let mut next = Some(active);
    std::iter::from_fn(move || {
        let number = next?;
        next = below(fleet, number);
        Some(number)
    })
    .take(length as usize)
}
