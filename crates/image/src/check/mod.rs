//! Verifying an image, and repairing it.
//!
//! A check counts the references to every host cluster (`survey.rs`), compares the counts with the refcounts in the
//! file (`refcounts.rs`), and then the COPIED flags with the refcounts (`copied.rs`). Its messages and numbers are
//! those of `qemu-img check`.
//!
//! Repairs are made so that a crash between any two writes leaves the image no worse than before:
//! entries of L2 tables first, then (all of that durable) refcounts, then COPIED flags, and the dirty
//! and corrupt bits last. Three rules go beyond QEMU's:
//!
//! - No refcount is lowered while the image has an entry with an invalid offset, or one that refers to one of the
//!   image's own tables: the clusters that it should refer to would be freed, although their data could still be
//!   rescued. Nor is the refcount of such a table raised, which would make the error look correct.
//! - A table is not written if something else refers to it too, or if one of its entries has an invalid offset: the
//!   reference to it may be wrong, and it may be guest data. While this applies to the L1 table, no L2 table is
//!   written.
//! - Entries are repaired only if that changes nothing that a guest could read before, and if there is only one way to
//!   repair them.

mod budget;
pub(crate) mod copied;
mod counts;
mod entry;
pub(crate) mod image;
pub(crate) mod log;
mod own;
pub(crate) mod rebuild;
pub(crate) mod refcounts;
mod report;
mod structure;
pub(crate) mod survey;

use crate::layer::ImageFormat;
use crate::memory::MemoryLimit;
use crate::recovery::Purpose;
use crate::{DiskError, Result};
use budget::Budget;
use image::Image;
use isobath_qcow2::IncompatibleFeatures;
use isobath_storage::{Locking, Storage};
use log::Log;
use std::path::Path;
use std::sync::Arc;
use survey::Survey;

pub use report::{CheckEvent, CheckReport, Repair};

/// How to check an image.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// What may be changed.
    pub repair: Repair,
    /// Image locks to take.
    pub locking: Locking,
    /// Bypass the page cache.
    pub direct: bool,
    /// The image's format; `None` probes.
    pub format: Option<ImageFormat>,
}

/// Corrects the refcounts of an image that was not closed (dirty bit), and clears the bit. The image has been
/// recovered, except for a restart log: its journal, if in use, is empty and stays in use.
///
/// Of an image that is not trusted this takes a bounded amount of time and memory.
///
/// # Errors
/// If the file cannot be read or written, or errors remain; the bit is then still set. If it takes too much; nothing is
/// then changed.
pub async fn repair_dirty<S: Storage>(
    storage: &Arc<S>,
    name: &Path,
    amount: Amount<'_>,
) -> Result<()> {
    let mut image = Image::open(storage, name, Some(ImageFormat::Qcow2), Purpose::Examine).await?;
    match amount {
        Amount::Bounded(memory) => {
            image.budget = Budget::of_file(&**storage, name, memory).await?;
        }
        Amount::Within(memory) => image.budget = Budget::of_trusted(name, memory),
        Amount::Any => {}
    }
    let mut first = String::new();
    let mut events = |event: CheckEvent<'_>| {
        if let CheckEvent::Finding(text) = event {
            tracing::debug!(image = %isobath_storage::shown(name), "{text}");
            if first.is_empty() && text.starts_with("ERROR") {
                text.clone_into(&mut first);
            }
        }
    };
    // Snapshots that are incomplete do no harm to the disk.
    let Checked { report, .. } =
        check_image(&mut image, Repair::All, &mut Log::new(&mut events)).await?;
    if report.corruptions > 0 || report.check_errors > 0 {
        return Err(DiskError::Corrupt {
            image: name.to_owned(),
            reason: format!(
                "it was not closed (dirty bit) and could not be repaired; {} errors remain, the \
                 first is '{first}'",
                report.corruptions + report.check_errors
            ),
        });
    }
    Ok(())
}

/// What the repair of an image that was not closed may take.
#[derive(Clone, Copy, Debug)]
pub enum Amount<'a> {
    /// No more than any image of a file with so much space takes, and as part of this limit.
    Bounded(Option<&'a Arc<MemoryLimit>>),
    /// As much memory as this limit has left.
    Within(&'a Arc<MemoryLimit>),
    /// Whatever it takes.
    Any,
}

/// Checks an open image, and repairs it as far as `repair` allows, except for incomplete entries of its snapshot table.
///
/// # Errors
/// See [`offline::check`](crate::offline::check).
pub async fn check_storage<S: Storage>(
    storage: &Arc<S>,
    name: &Path,
    format: Option<ImageFormat>,
    repair: Repair,
    events: &mut dyn FnMut(CheckEvent<'_>),
) -> Result<Checked> {
    let purpose = if repair == Repair::None { Purpose::Examine } else { Purpose::Write };
    let mut image = Image::open(storage, name, format, purpose).await?;
    check_image(&mut image, repair, &mut Log::new(events)).await
}

/// What a check found and did.
pub struct Checked {
    pub(crate) report: CheckReport,
    /// Entries of the snapshot table without a field that version 3 demands, to be completed as the last step of the
    /// repair. They are not in the report, which has no errors that remain.
    pub(crate) incomplete: Vec<u32>,
}

/// Says that a qcow2 image is not corrupt, after a check found no errors in it.
pub(crate) async fn clear_corrupt<S: Storage>(storage: &Arc<S>, name: &Path) -> Result<()> {
    let mut image = Image::open(storage, name, Some(ImageFormat::Qcow2), Purpose::Write).await?;
    image.clear_incompatible(IncompatibleFeatures::CORRUPT).await
}

async fn check_image<S: Storage>(
    image: &mut Image<S>,
    repair: Repair,
    log: &mut Log<'_>,
) -> Result<Checked> {
    let incomplete = find_and_repair(image, repair, log).await?;
    let clean = log.report.corruptions == 0 && log.report.check_errors == 0;
    if repair != Repair::None && clean {
        let corrupt = IncompatibleFeatures::CORRUPT;
        let dirty = IncompatibleFeatures::DIRTY;
        // While an entry is incomplete the repair is not complete either.
        let wrong_no_more = if incomplete.is_empty() { dirty.with(corrupt) } else { dirty };
        image.clear_incompatible(wrong_no_more).await?;
    }
    Ok(Checked { report: log.report, incomplete })
}

/// Repairs everything but entries of the snapshot table that are incomplete, and returns those. While anything else is
/// wrong they are errors like the others.
async fn find_and_repair<S: Storage>(
    image: &mut Image<S>,
    repair: Repair,
    log: &mut Log<'_>,
) -> Result<Vec<u32>> {
    log.report.total_clusters = image.geometry.clusters_for(image.header.disk_size());
    if image.geometry.has_data_file() && image.header.data_file().is_none() {
        log.check_error(
            "ERROR the image keeps its data in an external data file but does not name it; name it with \
             'qemu-img amend -o data_file=NAME'",
        );
        return Ok(Vec::new());
    }
    let Some(mut survey) = Survey::take(image, log).await? else { return Ok(Vec::new()) };
    refcounts::afford(image, &survey, repair)?;
    image.budget.settle();
    if repair != Repair::None {
        image.clear_unknown_autoclear().await?;
    }
    if repair == Repair::All && survey.has_fixes() {
        let fixed = survey.apply_fixes(image).await?;
        if fixed > 0 {
            // The counts have changed, and what remains is to be told from what was there.
            let mut again = Log::quiet();
            again.report.total_clusters = log.report.total_clusters;
            let Some(second) = Survey::take(image, &mut again).await? else {
                report_incomplete(&survey.incomplete, log);
                return Ok(Vec::new());
            };
            again.report.corruptions_fixed = fixed;
            log.report = again.report;
            survey = second;
        }
    }
    let refcounts = refcounts::check(image, &mut survey, repair, log).await?;
    copied::check(image, &survey, (&refcounts, &survey), repair, log).await?;
    log.report.image_end_offset = refcounts.end_offset(image);
    // A new table takes clusters, which needs an image without errors.
    let clean = log.report.corruptions == 0 && log.report.check_errors == 0 && !survey.lost;
    if repair == Repair::All && clean && !image.geometry.has_data_file() {
        return Ok(survey.incomplete);
    }
    report_incomplete(&survey.incomplete, log);
    Ok(Vec::new())
}

fn report_incomplete(entries: &[u32], log: &mut Log<'_>) {
    for number in entries {
        log.corruption(format_args!("ERROR {}", incomplete(*number)));
    }
}

/// What is said of an incomplete entry of the snapshot table.
pub(crate) fn incomplete(number: u32) -> String {
    format!("snapshot table entry {number} is incomplete")
}
