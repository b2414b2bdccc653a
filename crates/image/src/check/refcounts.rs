//! Comparing the refcounts in the file with the references that were counted.

use super::counts::{Counts, ENTRY_BYTES, PAGE};
use super::image::{Image, MAX_CLUSTERS};
use super::log::Log;
use super::rebuild;
use super::report::Repair;
use super::survey::{Survey, tables_at_once};
use crate::Result;
use futures_util::future::try_join_all;
use isobath_storage::Storage;
use std::ops::Range;

/// A repair looks at the refcounts of as many clusters past the end of the file as the file has, plus this many.
const PAST_END: u64 = 1 << 16;

/// The refcounts in the file, as far as they differ from the references counted.
pub(crate) struct Refcounts {
    /// Refcounts in the file, in pages of clusters where any differs.
    different: Counts,
    /// The last cluster with a refcount or a reference.
    highest: Option<u64>,
}

impl Refcounts {
    /// The refcount in the file.
    pub(crate) fn get(&self, survey: &Survey, cluster: u64) -> u64 {
        if self.different.has_page(cluster) {
            self.different.get(cluster)
        } else {
            survey.references(cluster)
        }
    }

    /// One past the last cluster in use, in bytes.
    pub(crate) fn end_offset<S: Storage>(&self, image: &Image<S>) -> u64 {
        self.highest.map_or(0, |last| (last + 1) << image.geometry.cluster_bits())
    }
}

/// Compares, and repairs as far as `repair` allows.
pub(crate) async fn check<S: Storage>(
    image: &mut Image<S>,
    survey: &mut Survey,
    repair: Repair,
    log: &mut Log<'_>,
) -> Result<Refcounts> {
    let compared = Comparison::run(image, survey, repair, log).await?;
    log.report.corruptions += compared.too_low;
    log.report.leaks += compared.too_high;
    let broken = survey.structure.broken;
    // All errors except those of the structure and its refcounts.
    let elsewhere = log.report.corruptions - compared.too_low - broken;
    let mut refcounts = compared.refcounts;
    match repair {
        Repair::None => {}
        Repair::All if broken > 0 || compared.without_block => {
            if survey.lost {
                log.say(
                    "ERROR the refcount structure is not rebuilt: clusters that corrupt entries \
                     should refer to would be lost",
                );
                return Ok(refcounts);
            }
            log.say("Rebuilding refcount structure");
            rebuild::rebuild(image, survey).await?;
            log.report.corruptions = elsewhere;
            log.report.leaks = 0;
            log.report.corruptions_fixed += compared.too_low + broken;
            log.report.leaks_fixed += compared.too_high;
            refcounts =
                Refcounts { different: Counts::default(), highest: survey.counts.highest() };
        }
        Repair::Leaks | Repair::All => {
            if survey.lost && compared.too_high > 0 {
                log.say(
                    "ERROR leaked clusters are not freed: corrupt entries may be meant to refer \
                     to them",
                );
            }
            let allowed = Allowed { raise: repair == Repair::All, lower: !survey.lost };
            mend(image, survey, &mut refcounts, allowed, log).await?;
        }
    }
    Ok(refcounts)
}

/// Checks that a repair after this survey, and everything that it reads, keeps and writes, is within the image's
/// bounds. Nothing has been changed yet.
///
/// # Errors
/// It is not.
pub(crate) fn afford<S: Storage>(image: &Image<S>, survey: &Survey, repair: Repair) -> Result<()> {
    let (budget, size) = (&image.budget, image.geometry.cluster_size());
    if !budget.is_bounded() {
        return Ok(());
    }
    let entries = image.geometry.refcount_block_entries();
    let numbers = blocks_to_compare(image, survey, compared_clusters(image, survey, repair));
    let count = numbers.len() as u64;
    // Blocks are compared, and then written; flags are compared.
    let tables = survey.tables.len() as u64;
    budget.read(count.saturating_mul(size.saturating_mul(2).saturating_add(entries)))?;
    budget.read(tables.saturating_mul(size))?;
    let mut kept = survey.bytes();
    if survey.has_fixes() {
        budget.read_again()?;
        kept = kept.saturating_mul(2);
    }
    let different = count.saturating_mul(entries.max(PAGE)).saturating_mul(2);
    budget.hold(kept.saturating_add(different).saturating_add(count.saturating_mul(ENTRY_BYTES)))
}

/// How many clusters from the beginning of the file are compared.
fn compared_clusters<S: Storage>(image: &Image<S>, survey: &Survey, repair: Repair) -> u64 {
    let used = survey.counts.highest().map_or(0, |last| last + 1);
    match repair {
        Repair::None => image.clusters().max(used),
        // Refcounts past the end of the file are not leaks yet, but become leaks when it grows.
        _ => (image.clusters().max(used) * 2 + PAST_END).min(MAX_CLUSTERS),
    }
}

/// The places of the blocks that are there, and of those that clusters in use need.
fn blocks_to_compare<S: Storage>(image: &Image<S>, survey: &Survey, clusters: u64) -> Vec<u64> {
    let entries = image.geometry.refcount_block_entries();
    let mut numbers: Vec<u64> =
        survey.structure.blocks.keys().copied().filter(|n| n * entries < clusters).collect();
    let counted = survey.counts.nonzero().map(|cluster| cluster / entries);
    numbers.extend(Deduplicated(counted.peekable()));
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Compares, for an image that is about to have these references.
pub(crate) async fn compare<S: Storage>(image: &Image<S>, survey: &Survey) -> Result<Refcounts> {
    let compared = Comparison::run(image, survey, Repair::Leaks, &mut Log::quiet()).await?;
    if compared.without_block {
        return Err(
            image.refused("its refcount structure has gaps; run 'isobath check -r all'".into())
        );
    }
    Ok(compared.refcounts)
}

/// Raises the refcounts that are too low, durably. Returns whether there were any.
pub(crate) async fn raise<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: &mut Refcounts,
) -> Result<bool> {
    let allowed = Allowed { raise: true, lower: false };
    let mended = mend(image, survey, refcounts, allowed, &mut Log::quiet()).await?;
    Ok(mended.count > 0)
}

/// Lowers the refcounts that are too high, durably.
pub(crate) async fn lower<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: &mut Refcounts,
) -> Result<Mended> {
    let allowed = Allowed { raise: false, lower: true };
    mend(image, survey, refcounts, allowed, &mut Log::quiet()).await
}

struct Comparison {
    refcounts: Refcounts,
    too_low: u64,
    too_high: u64,
    /// A cluster in use has no usable refcount block.
    without_block: bool,
}

impl Comparison {
    async fn run<S: Storage>(
        image: &Image<S>,
        survey: &Survey,
        repair: Repair,
        log: &mut Log<'_>,
    ) -> Result<Self> {
        let entries = image.geometry.refcount_block_entries();
        let size = image.geometry.cluster_size() as usize;
        let order = image.geometry.refcount_order();
        let clusters = compared_clusters(image, survey, repair);
        let mut result = Self {
            refcounts: Refcounts { different: Counts::default(), highest: None },
            too_low: 0,
            too_high: 0,
            without_block: false,
        };
        let numbers = blocks_to_compare(image, survey, clusters);
        for batch in numbers.chunks(tables_at_once(image)) {
            let blocks = try_join_all(batch.iter().map(async |number| {
                match survey.structure.blocks.get(number) {
                    Some(at) => image.read(*at, size).await.map(Some),
                    None => Ok(None),
                }
            }))
            .await?;
            for (number, block) in batch.iter().zip(blocks) {
                let first = number * entries;
                for cluster in first..(first + entries).min(clusters) {
                    let index = (cluster - first) as usize;
                    let stored =
                        block.as_ref().and_then(|block| order.read(block, index)).unwrap_or(0);
                    let counted = survey.references(cluster);
                    if stored > 0 || counted > 0 {
                        result.refcounts.highest = Some(cluster);
                    }
                    if stored >= counted && survey.own.is_disputed(cluster) {
                        log.corruption(format_args!(
                            "ERROR cluster {cluster} holds one of the image's tables, and something \
                             else refers to it"
                        ));
                    }
                    if stored == counted {
                        continue;
                    }
                    result.note(survey, cluster, stored, counted, log);
                    result.without_block |= block.is_none();
                }
            }
        }
        Ok(result)
    }

    fn note(
        &mut self,
        survey: &Survey,
        cluster: u64,
        stored: u64,
        counted: u64,
        log: &mut Log<'_>,
    ) {
        let different = &mut self.refcounts.different;
        if !different.has_page(cluster) {
            // From now on the page covers all its clusters.
            let first = cluster - cluster % PAGE;
            for other in first..first + PAGE {
                different.set(other, survey.references(other));
            }
        }
        different.set(cluster, stored);
        let word = if stored < counted {
            self.too_low += 1;
            "ERROR"
        } else {
            self.too_high += 1;
            "Leaked"
        };
        log.say(format_args!("{word} cluster {cluster} refcount={stored} reference={counted}"));
    }
}

/// Removes adjacent duplicates.
struct Deduplicated<I: Iterator>(std::iter::Peekable<I>);

impl<I: Iterator<Item: PartialEq>> Iterator for Deduplicated<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let item = self.0.next()?;
        while self.0.next_if_eq(&item).is_some() {}
        Some(item)
    }
}

/// Which refcounts may be changed.
#[derive(Clone, Copy)]
struct Allowed {
    raise: bool,
    lower: bool,
}

/// What was done to refcounts.
#[derive(Default)]
pub(crate) struct Mended {
    /// Refcounts that were changed.
    count: u64,
    /// Some of them are 1 now.
    pub(crate) ones: bool,
    /// The clusters that are free now.
    pub(crate) freed: Vec<Range<u64>>,
}

/// Writes the right refcounts into the blocks that there are, durably.
async fn mend<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: &mut Refcounts,
    allowed: Allowed,
    log: &mut Log<'_>,
) -> Result<Mended> {
    let mut mended = Mended::default();
    let entries = image.geometry.refcount_block_entries();
    let order = image.geometry.refcount_order();
    let size = image.geometry.cluster_size() as usize;
    let end = refcounts.different.end();
    for (&number, &at) in &survey.structure.blocks {
        let first = number * entries;
        let clusters = first..(first + entries).min(end);
        let wrong: Vec<(u64, u64, u64)> = clusters
            .filter(|cluster| refcounts.different.has_page(*cluster))
            .map(|at| (at, refcounts.different.get(at), survey.references(at)))
            .filter(|(at, stored, counted)| match stored.cmp(counted) {
                // A refcount that counts both would make the error look correct.
                std::cmp::Ordering::Less => allowed.raise && !survey.own.is_disputed(*at),
                std::cmp::Ordering::Greater => allowed.lower,
                std::cmp::Ordering::Equal => false,
            })
            .collect();
        if wrong.is_empty() {
            continue;
        }
        let mut block = image.read(at, size).await?.to_vec();
        for (cluster, stored, counted) in wrong {
            log.say(format_args!(
                "Repairing cluster {cluster} refcount={stored} reference={counted}"
            ));
            order
                .write(&mut block, (cluster - first) as usize, counted)
                .map_err(|error| image.refused(error.to_string()))?;
            refcounts.different.set(cluster, counted);
            mended.count += 1;
            mended.ones |= counted == 1;
            match mended.freed.last_mut() {
                _ if counted > 0 => {}
                Some(run) if run.end == cluster => run.end += 1,
                _ => mended.freed.push(cluster..cluster + 1),
            }
            if stored < counted {
                log.report.corruptions = log.report.corruptions.saturating_sub(1);
                log.report.corruptions_fixed += 1;
            } else {
                log.report.leaks = log.report.leaks.saturating_sub(1);
                log.report.leaks_fixed += 1;
            }
        }
        image.write(at, &block).await?;
    }
    image.flush().await?;
    if log.report.leaks == 0 && log.report.corruptions == 0 {
        refcounts.highest = survey.counts.highest();
    }
    Ok(mended)
}
