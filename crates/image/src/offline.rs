//! Operations on an image that is not in use.

use crate::check::{
    CheckEvent, CheckOptions, CheckReport, Checked, Repair, check_storage, clear_corrupt,
    incomplete,
};
use crate::layer::{ImageFormat, Qcow2Layer, ShownLog};
use crate::open::{Opening, open_foreign, open_layer, read_header};
use crate::options::OpenOptions;
use crate::probe::format_of;
use crate::restart_log::{FoundLog, LogUse};
use crate::snapshots::complete_open_snapshots;
use crate::writer::Writer;
use crate::{DiskError, Result};
use isobath_formats::Format;
use isobath_qcow2::{IncompatibleFeatures, ParseMode};
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use std::path::Path;
use std::sync::Arc;

/// Bytes at the beginning of a file by which its format is detected.
const PROBED: usize = 4096;

/// Checks one image, without its backing files, and repairs it as far as `options` allow. If the image was not closed
/// and its journal is in use, any repair recovers it, including a killed process's [restart
/// log](crate::options::OpenOptions::restart_log); without a repair the check sees the image as after a crash.
///
/// # Errors
/// If the file cannot be opened, locked, read or written; there is no check for its format, or no repair
/// ([`DiskError::Unsupported`]); or its header cannot be used. Errors beyond the header
/// are in the report.
pub async fn check<H: Host>(
    host: &H,
    name: &Path,
    options: &CheckOptions,
    events: &mut dyn FnMut(CheckEvent<'_>),
) -> Result<CheckReport> {
    let writable = options.repair != Repair::None;
    let CheckOptions { locking, direct, .. } = *options;
    let mode = OpenMode { writable, direct, locking };
    if writable {
        let opening = OpenOptions::new().format(options.format).locking(options.locking);
        let opening = OpenOptions { unbounded_repair: true, ..opening };
        bring_in(host, name, &opening).await?;
    }
    let storage = Arc::new(host.open(name, mode).await?);
    let start = storage.read_at(0, IoBuf::zeroed(PROBED)).await?;
    if let ImageFormat::Foreign(format) = format_of(name, options.format, &start)? {
        return check_foreign(host, name, format, options, &storage, events).await;
    }
    let checked = check_storage(&storage, name, options.format, options.repair, events).await?;
    let Checked { report, incomplete: entries } = checked;
    if entries.is_empty() {
        return Ok(report);
    }
    // Under the same locks: what is changed is what was checked.
    let opening = OpenOptions::new().format(options.format).direct(direct).locking(options.locking);
    let opening = OpenOptions { repairing: true, ..opening };
    if let Err(error) = Box::pin(complete_open_snapshots(host, name, &opening, &storage)).await {
        if matches!(error, DiskError::Storage(_)) {
            return Err(error);
        }
        for number in &entries {
            events(CheckEvent::Finding(&format!("ERROR {}", incomplete(*number))));
        }
        events(CheckEvent::Finding(&format!(
            "ERROR the snapshot table cannot be completed: {error}"
        )));
        return Ok(CheckReport {
            corruptions: report.corruptions + entries.len() as u64,
            ..report
        });
    }
    for number in &entries {
        events(CheckEvent::Finding(&format!("Repairing {}", incomplete(*number))));
    }
    let again = check_storage(&storage, name, options.format, Repair::None, events).await?.report;
    if again.corruptions == 0 && again.check_errors == 0 {
        clear_corrupt(&storage, name).await?;
    }
    Ok(CheckReport {
        corruptions_fixed: report.corruptions_fixed + entries.len() as u64,
        leaks_fixed: report.leaks_fixed,
        ..again
    })
}

/// Checks an image of another program.
async fn check_foreign<H: Host>(
    host: &H,
    name: &Path,
    format: Format,
    options: &CheckOptions,
    storage: &Arc<H::File>,
    events: &mut dyn FnMut(CheckEvent<'_>),
) -> Result<CheckReport> {
    let unsupported = || DiskError::Unsupported("This image format does not support checks".into());
    let repairs = options.repair != Repair::None;
    if !format.can_be_checked() || repairs && !format.can_be_repaired() {
        return Err(unsupported());
    }
    let opening = OpenOptions::new().direct(options.direct).locking(options.locking);
    let image = Box::pin(open_foreign(host, name, format, &opening, storage)).await?;
    let mut tell = |text: &str| match format {
        Format::Vhdx => events(CheckEvent::Complaint(text)),
        _ => events(CheckEvent::Finding(text)),
    };
    let found = image.check(options.repair == Repair::All, &mut tell).await?;
    let found = found.ok_or_else(unsupported)?;
    Ok(CheckReport {
        total_clusters: found.total,
        allocated_clusters: found.allocated,
        fragmented_clusters: found.fragmented,
        corruptions: found.corruptions,
        leaks: found.leaks,
        corruptions_fixed: found.corruptions_fixed,
        foreign: Some(format),
        ended_early: found.ended_early,
        ..CheckReport::default()
    })
}

/// Applies the restart log that a killed process left, if there is one. Says what was made of it: one that
/// [does not match](ShownLog::Unfit) is set aside.
///
/// # Errors
/// If the image cannot be opened for writing.
pub async fn bring_in<H: Host>(host: &H, name: &Path, options: &OpenOptions) -> Result<ShownLog> {
    let OpenOptions { format, locking, named, .. } = *options;
    let trust = options.trust.clone();
    let (memory, unbounded_repair) = (options.memory.clone(), options.unbounded_repair);
    let options = OpenOptions::new().writable(true).locking(locking).trust(trust).named(named);
    let options = OpenOptions { memory, unbounded_repair, ..options };
    let storage = host.open(name, options.mode(true)).await?;
    if named {
        options.trust.check_place(&storage).await?;
    }
    let length = storage.len().await?;
    let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
    // Without a usable header there is no log either.
    let header = read_header(&storage, name, start, length, ParseMode::Open).await.ok();
    let header =
        header.filter(|header| header.incompatible.contains(IncompatibleFeatures::JOURNAL));
    let left = match &header {
        Some(header) => FoundLog::find(&storage, name, header, LogUse::Take).await?,
        None => None,
    };
    drop(storage);
    if left.is_none() {
        return Ok(ShownLog::None);
    }
    drop(left);
    let opening = Opening { format, ..Opening::of(&options) };
    let layer = Arc::new(open_layer(host, name, opening).await?);
    if let Some(layer) = Qcow2Layer::of(&layer) {
        let alone = layer.qcow2().header.read().backing_file.is_none();
        Writer::open(&layer, &options, alone).await?;
    }
    Ok(layer.shown_log())
}
