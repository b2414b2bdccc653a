//! The COPIED flags of the active tables: set exactly where the refcount is 1.

use super::image::Image;
use super::log::Log;
use super::refcounts::Refcounts;
use super::report::Repair;
use super::survey::{Survey, tables_at_once, write_entries, write_l1_entry};
use crate::Result;
use futures_util::future::try_join_all;
use isobath_qcow2::{HostOffset, L2Entry};
use isobath_storage::Storage;

/// Compares the flags with the refcounts in the file, and corrects them where `repair` allows. The refcounts come with
/// the survey that they were compared with.
pub(crate) async fn check<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: (&Refcounts, &Survey),
    repair: Repair,
    log: &mut Log<'_>,
) -> Result<()> {
    let sound = |log: &Log<'_>| {
        log.report.corruptions == 0 && log.report.leaks == 0 && log.report.check_errors == 0
    };
    let repair = match repair {
        Repair::None => false,
        // Only with correct refcounts.
        Repair::Leaks => sound(log),
        Repair::All => true,
    };
    let mend_l1 = repair && survey.l1_certain;
    let word = if mend_l1 { "Repairing" } else { "ERROR" };
    let wrong = check_l1(image, survey, refcounts, word, log);
    if mend_l1 {
        for (index, copied) in wrong {
            let entry = survey.l1.get(index).copied().unwrap_or_default().with_copied(copied);
            write_l1_entry(image, index, entry).await?;
            log.report.corruptions -= 1;
            log.report.corruptions_fixed += 1;
        }
    }
    let tables: Vec<(u64, u64)> = (survey.tables.iter())
        .filter(|(_, uses)| uses.active > 0)
        .map(|(at, uses)| (*at, uses.active))
        .collect();
    let size = image.geometry.cluster_size() as usize;
    for batch in tables.chunks(tables_at_once(image)) {
        let contents = try_join_all(batch.iter().map(|(at, _)| image.read(*at, size))).await?;
        for ((table, _), bytes) in batch.iter().zip(contents) {
            let wrong = wrong_entries(image, refcounts, &bytes);
            let mend = repair && survey.may_write_table(image, *table);
            let word = if mend { "Repairing" } else { "ERROR" };
            for (_, entry, refcount) in &wrong {
                log.corruption(format_args!(
                    "{word} OFLAG_COPIED data cluster: l2_entry={:x} refcount={refcount}",
                    entry.descriptor
                ));
            }
            if mend && !wrong.is_empty() {
                log.report.corruptions -= wrong.len() as u64;
                log.report.corruptions_fixed += wrong.len() as u64;
                let entries = wrong
                    .into_iter()
                    .map(|(index, entry, refcount)| (index, entry.with_copied(refcount == 1)));
                write_entries(image, *table, entries).await?;
            }
        }
    }
    if repair {
        image.flush().await?;
    }
    Ok(())
}

fn refcount_of((refcounts, compared): (&Refcounts, &Survey), cluster: u64) -> u64 {
    refcounts.get(compared, cluster)
}

/// Reports the entries of the active L1 table whose flag is wrong, with what it should be.
fn check_l1<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: (&Refcounts, &Survey),
    word: &str,
    log: &mut Log<'_>,
) -> Vec<(usize, bool)> {
    let mut wrong = Vec::new();
    for (index, entry) in survey.l1.iter().enumerate() {
        let Ok(Some(offset)) = entry.offset(&image.geometry) else { continue };
        let refcount = refcount_of(refcounts, image.geometry.host_cluster_of(offset).get());
        if (refcount == 1) != entry.is_copied() {
            wrong.push((index, refcount == 1));
            log.corruption(format_args!(
                "{word} OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={:x} \
                 refcount={refcount}",
                entry.raw()
            ));
        }
    }
    wrong
}

/// The entries of an L2 table whose flag is wrong, with their cluster's refcount.
fn wrong_entries<S: Storage>(
    image: &Image<S>,
    refcounts: (&Refcounts, &Survey),
    table: &[u8],
) -> Vec<(usize, L2Entry, u64)> {
    let geometry = &image.geometry;
    let mut wrong = Vec::new();
    for index in 0..geometry.l2_entries() as usize {
        let entry = L2Entry::read(table, index, geometry).unwrap_or(L2Entry::unallocated());
        if entry == L2Entry::unallocated() || entry.is_compressed() {
            continue;
        }
        let Ok(Some(offset)) = entry.kind(geometry).map(|kind| kind.host_cluster()) else {
            continue;
        };
        let refcount = if geometry.has_data_file() {
            1
        } else {
            let cluster = geometry.host_cluster_of(HostOffset::new(offset.get()));
            refcount_of(refcounts, cluster.get())
        };
        if (refcount == 1) != entry.is_copied() {
            wrong.push((index, entry, refcount));
        }
    }
    wrong
}
