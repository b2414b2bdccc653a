//! What is done to an image that nobody uses.

use crate::Result;
use crate::check::{CheckEvent, CheckOptions, CheckReport, Repair, check_storage};
use crate::layer::ImageFormat;
use crate::open::{open_layer, read_header};
use crate::options::OpenOptions;
use crate::restart_log::FoundLog;
use crate::writer::Writer;
use isobath_qcow2::IncompatibleFeatures;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage};
use std::path::Path;
use std::sync::Arc;

/// Checks one image, without its backing files, and repairs it as far as `options` allow. An image
/// whose journal is in use, since it was not closed, is recovered by any repair, with what a killed
/// process [left](crate::options::OpenOptions::restart_log); without one the check sees it as after a crash.
///
/// # Errors
/// If the file cannot be opened, locked, read or written; it is no qcow2 image
/// ([`DiskError::Unsupported`](crate::DiskError::Unsupported)); or its header cannot be used. What is wrong beyond the
/// header is in the report.
pub async fn check<H: Host>(
    host: &H,
    name: &Path,
    options: &CheckOptions,
    events: &mut dyn FnMut(CheckEvent<'_>),
) -> Result<CheckReport> {
    let writable = options.repair != Repair::None;
    let mode = OpenMode { writable, direct: false, locking: options.locking };
    if writable {
        bring_in(host, name, options.format, options.locking).await?;
    }
    let storage = Arc::new(host.open(name, mode).await?);
    check_storage(&storage, name, options.format, options.repair, events).await
}

/// Brings into an image what a killed process left of it, if there is anything.
///
/// # Errors
/// If the image cannot be opened for writing.
async fn bring_in<H: Host>(
    host: &H,
    name: &Path,
    format: Option<ImageFormat>,
    locking: Locking,
) -> Result<()> {
    let options = OpenOptions::new().writable(true).locking(locking);
    let storage = host.open(name, options.mode(true)).await?;
    let length = storage.len().await?;
    let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
    // What has no header that can be used has no log either.
    let header = read_header(&storage, name, start, length).await.ok();
    let header =
        header.filter(|header| header.incompatible.contains(IncompatibleFeatures::JOURNAL));
    let left = match &header {
        Some(header) => FoundLog::find(&storage, name, header).await?,
        None => None,
    };
    drop(storage);
    if left.is_none() {
        return Ok(());
    }
    drop(left);
    let layer = Arc::new(open_layer(host, name, format, true, &options).await?);
    if let Some(qcow2) = layer.as_qcow2() {
        let alone = qcow2.header.read().backing_file.is_none();
        Writer::open(&layer, qcow2, &options, alone).await?;
    }
    Ok(())
}
