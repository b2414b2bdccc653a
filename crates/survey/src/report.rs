//! The summary of a survey.

use crate::chain::Advice;
use crate::fleet::{Flags, Fleet};
use crate::link::{Links, below};
use crate::problem::Problems;
use crate::statistics::{Lengths, Spread, Timeline};
use crate::{Progress, Survey, exact};
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering::Relaxed;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Directories read.
    pub directories: u64,
    /// Regular files examined.
    pub files: u64,
    /// qcow2 images with a usable header, each counted once.
    pub images: u64,
    /// Chains: images that are not the backing file of any other image.
    pub chains: u64,
    /// Files in chains, including bases of other formats.
    pub files_in_chains: u64,
    /// Files that are the backing file of several images.
    pub shared: u64,
    /// Bases that are not qcow2.
    pub raw_bases: u64,
    /// Files outside the paths surveyed, found through a name in a header.
    pub outside: u64,
    /// Incomplete chains.
    pub incomplete: u64,
    /// Images in loops, which belong to no chain.
    pub in_loops: u64,
    /// Images with an unusable header.
    pub broken: u64,
    /// Encrypted images.
    pub encrypted: u64,
    /// Images whose header refers to a direct-access index.
    pub indexed: u64,
    /// Additional names of files already counted.
    pub other_names: u64,
    /// Files whose birth time is unknown or not used.
    pub without_birth: u64,
    /// Symbolic links, which are not followed.
    pub symbolic_links: u64,
    /// FIFOs, sockets and devices, which are not opened.
    pub special_files: u64,
    /// Other file systems that were not entered.
    pub other_file_systems: u64,
}

impl Counts {
    pub(crate) fn of(fleet: &Fleet, links: &Links, progress: &Progress) -> Self {
        let count = |flag: Flags| -> u64 {
            fleet.numbers().filter(|&number| fleet.image(number).flags.has(flag)).count() as u64
        };
        let (directories, files, _) = progress.walked();
        let all = fleet.numbers().count() as u64;
        let (raw_bases, broken) = (count(Flags::RAW), count(Flags::BROKEN));
        Self {
            directories,
            files,
            images: all - raw_bases - broken,
            chains: links.active.len() as u64,
            files_in_chains: links.top_down.len() as u64,
            shared: links.children.iter().filter(|&&users| users > 1).count() as u64,
            raw_bases,
            outside: count(Flags::OUTSIDE),
            incomplete: 0,
            in_loops: links.in_loops,
            broken,
            encrypted: count(Flags::ENCRYPTED),
            indexed: count(Flags::INDEXED),
            other_names: fleet.len() as u64 - all,
            without_birth: count(Flags::NO_BIRTH),
            symbolic_links: progress.links.load(Relaxed),
            special_files: progress.special.load(Relaxed),
            other_file_systems: progress.mounts.load(Relaxed),
        }
    }
}

/// Bytes that files occupy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SpaceUsed {
    /// The total size of the disks.
    pub disk_bytes: u64,
    /// All files in chains, each counted once.
    pub held_bytes: u64,
    /// The active images.
    pub active_bytes: u64,
    /// The layers below them.
    pub lower_bytes: u64,
    /// The lower layers that several images use.
    pub shared_bytes: u64,
}

/// The counts from L1 and L2 tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Clusters {
    /// Images whose tables were read.
    pub images: u64,
    /// Bytes of host clusters that tables refer to.
    pub data_bytes: u64,
    /// The part of `data_bytes` that no disk can see; a lower bound.
    pub hidden_bytes: u64,
}

/// The summary of a survey. Times are in seconds since 1970, spans in seconds.
#[derive(Clone, Debug)]
pub struct Report {
    /// The paths surveyed.
    pub paths: Vec<String>,
    /// When the survey was taken.
    pub taken_at: i64,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// Whether it was interrupted; the results are then partial.
    pub interrupted: bool,
    /// What was found.
    pub counts: Counts,
    /// The lengths of chains.
    pub lengths: Lengths,
    /// The space used by files.
    pub held: SpaceUsed,
    /// The counts from tables, if they were read.
    pub clusters: Option<Clusters>,
    /// The time between the creation of a layer and of the layer above it. Clones, several overlays of one layer, are
    /// left out.
    pub intervals: Spread,
    /// The ages of backing files.
    pub ages: Spread,
    /// Layers that are older than the one below them; they do not result from snapshots.
    pub out_of_order: u64,
    /// Overlays of files with several overlays.
    pub clones: u64,
    /// When overlays were created.
    pub made: Timeline,
    /// The times at which the longest existing chain grew, each with the length reached.
    pub longest: Vec<(i64, u32)>,
    /// The length from which merging is advised.
    pub merge_at: u32,
    /// The number of chains for each advice.
    pub advice: Vec<(Advice, u64)>,
    /// Files that the advised merges would remove.
    pub files_merged: u64,
    /// Memory of all chains in QEMU, in bytes.
    pub qemu_memory_bytes: u64,
    /// Memory of all chains in Isobath, in bytes.
    pub isobath_memory_bytes: u64,
    /// The problems.
    pub problems: Problems,
}

impl Survey {
    /// Whether it was interrupted.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Summarizes the survey.
    pub fn report(&self) -> Report {
        let (fleet, links) = (&self.fleet, &self.links);
        let mut counts = self.counts.clone();
        let mut advice = Advice::ALL.map(|one| (one, 0));
        let (mut files_merged, mut qemu_memory, mut our_memory) = (0, 0_u64, 0_u64);
        for row in self.chains() {
            counts.incomplete += u64::from(row.advice == Advice::Repair);
            for (one, count) in &mut advice {
                *count += u64::from(*one == row.advice);
            }
            files_merged += u64::from(row.length - row.length_after);
            qemu_memory = qemu_memory.saturating_add(row.qemu_memory_bytes);
            our_memory = our_memory.saturating_add(row.isobath_memory_bytes);
        }
        let layers = Layers::of(self);
        let chains = links.active.iter().map(|&number| self.length_of(number));
        let files = links.top_down.iter().filter_map(|&number| links.longest.get(number as usize));
        Report {
            paths: self.paths.iter().map(|path| exact(path.as_os_str().as_bytes())).collect(),
            taken_at: self.taken_at,
            seconds: (self.seconds * 1000.0).round() / 1000.0,
            interrupted: self.interrupted,
            counts,
            lengths: Lengths::of(chains, files.copied()),
            held: layers.held,
            clusters: self.clusters_report(),
            intervals: Spread::of(layers.intervals),
            ages: Spread::of(layers.ages),
            out_of_order: layers.out_of_order,
            clones: layers.clones,
            made: Timeline::of(
                links
                    .top_down
                    .iter()
                    .filter(|&&number| below(fleet, number).is_some())
                    .map(|&number| fleet.image(number).born),
            ),
            longest: self.growth(),
            merge_at: self.options.merge_at,
            advice: advice.to_vec(),
            files_merged,
            qemu_memory_bytes: qemu_memory,
            isobath_memory_bytes: our_memory,
            problems: fleet.problems.clone(),
        }
    }

    fn clusters_report(&self) -> Option<Clusters> {
        let counted = self.clusters.as_ref()?;
        let mut sum = Clusters::default();
        for own in &counted.own {
            sum.images += u64::from(own.counted);
            sum.data_bytes += own.data;
            sum.hidden_bytes += own.hidden;
        }
        Some(sum)
    }

    /// The growth of the longest chain, derived from the creation times of existing files.
    fn growth(&self) -> Vec<(i64, u32)> {
        let mut made: Vec<(i64, u32)> = self
            .links
            .top_down
            .iter()
            .map(|&number| (self.fleet.image(number).born, self.length_of(number)))
            .collect();
        made.sort_unstable();
        let mut steps: Vec<(i64, u32)> = Vec::new();
        for (time, length) in made {
            match steps.last_mut() {
                Some(last) if last.1 >= length => {}
                Some(last) if last.0 == time => last.1 = length,
                _ => steps.push((time, length)),
            }
        }
        steps
    }
}

/// Sums over files.
#[derive(Default)]
struct Layers {
    held: SpaceUsed,
    intervals: Vec<u32>,
    ages: Vec<u32>,
    out_of_order: u64,
    clones: u64,
}

impl Layers {
    fn of(survey: &Survey) -> Self {
        let (fleet, links) = (&survey.fleet, &survey.links);
        let users = |number: u32| links.children.get(number as usize).copied().unwrap_or(0);
        let span = |from: i64, to: i64| u32::try_from(to.saturating_sub(from)).ok();
        let mut sum = Self::default();
        for &number in &links.top_down {
            let image = fleet.image(number);
            sum.held.held_bytes = sum.held.held_bytes.saturating_add(image.held);
            if users(number) == 0 {
                sum.held.disk_bytes = sum.held.disk_bytes.saturating_add(image.disk);
                sum.held.active_bytes = sum.held.active_bytes.saturating_add(image.held);
            } else {
                sum.held.lower_bytes = sum.held.lower_bytes.saturating_add(image.held);
                sum.ages.push(span(image.born, survey.taken_at).unwrap_or(0));
            }
            if users(number) > 1 {
                sum.held.shared_bytes = sum.held.shared_bytes.saturating_add(image.held);
            }
            let Some(parent) = below(fleet, number) else { continue };
            if users(parent) > 1 {
                sum.clones += 1;
                continue;
            }
            match span(fleet.image(parent).born, image.born) {
                Some(interval) => sum.intervals.push(interval),
                None => sum.out_of_order += 1,
            }
        }
        sum
    }
}
