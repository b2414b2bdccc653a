//! Images that no disk has open.

use isobath_disk::{
    CheckEvent, CheckOptions, CheckReport, ImageInfo, InfoOptions, Measure, NewDisk, OpenOptions,
    Result, Secrets,
};
use isobath_storage::Host;
use std::path::Path;

/// Creates an image. Returns the size of its disk in bytes, which for an overlay may be its backing file's.
///
/// # Errors
/// If the file is in use or cannot be written, its backing file cannot be opened, or the options exclude each other. A
/// file that was not there before is removed again.
///
/// ```
/// use isobath::storage::memory::MemoryHost;
/// use isobath::{NewDisk, create};
///
/// # futures_executor::block_on(async {
/// let host = MemoryHost::default();
/// create(&host, "base.qcow2", &NewDisk::new(1 << 30)).await?;
/// let overlay = NewDisk::overlay("base.qcow2", "qcow2");
/// assert_eq!(create(&host, "overlay.qcow2", &overlay).await?, 1 << 30);
/// # Ok::<(), isobath::DiskError>(())
/// # }).unwrap();
/// ```
pub async fn create<H: Host>(host: &H, name: impl AsRef<Path>, new: &NewDisk) -> Result<u64> {
    isobath_disk::create(host, name.as_ref(), new).await
}

/// Reads what an image's header says.
///
/// # Errors
/// If the file cannot be opened, locked or read, or its header cannot be used.
///
/// ```
/// # use isobath::storage::memory::MemoryHost;
/// # use isobath::{NewDisk, create};
/// use isobath::{InfoOptions, info};
///
/// # futures_executor::block_on(async {
/// # let host = MemoryHost::default();
/// # create(&host, "base.qcow2", &NewDisk::new(1 << 30)).await?;
/// # create(&host, "overlay.qcow2", &NewDisk::overlay("base.qcow2", "qcow2")).await?;
/// let overlay = info(&host, "overlay.qcow2", &InfoOptions::default()).await?;
/// assert_eq!(overlay.backing_filename.as_deref(), Some("base.qcow2"));
/// # Ok::<(), isobath::DiskError>(())
/// # }).unwrap();
/// ```
pub async fn info<H: Host>(
    host: &H,
    name: impl AsRef<Path>,
    options: &InfoOptions,
) -> Result<ImageInfo> {
    isobath_disk::info(host, name.as_ref(), options).await
}

/// As [`info`], for an image and all its backing files, from the active one down to the base.
///
/// # Errors
/// As there, for any of them, or if the chain is a loop.
pub async fn backing_chain_info<H: Host>(
    host: &H,
    name: impl AsRef<Path>,
    options: &InfoOptions,
) -> Result<Vec<ImageInfo>> {
    isobath_disk::backing_chain_info(host, name.as_ref(), options).await
}

/// Checks one image, without its backing files, and repairs it as far as `options` allow. `events` is called with what
/// is found and with the progress.
///
/// # Errors
/// If the file cannot be opened, locked, read or written, is no qcow2 image, or its header cannot be used. What else is
/// wrong with it is in the report.
///
/// ```
/// # use isobath::storage::memory::MemoryHost;
/// # use isobath::{NewDisk, create};
/// use isobath::{CheckOptions, check};
///
/// # futures_executor::block_on(async {
/// # let host = MemoryHost::default();
/// # create(&host, "disk.qcow2", &NewDisk::new(1 << 30)).await?;
/// let report = check(&host, "disk.qcow2", &CheckOptions::default(), &mut |_| {}).await?;
/// assert!(report.is_clean());
/// # Ok::<(), isobath::DiskError>(())
/// # }).unwrap();
/// ```
pub async fn check<H: Host>(
    host: &H,
    name: impl AsRef<Path>,
    options: &CheckOptions,
    events: &mut dyn FnMut(CheckEvent<'_>),
) -> Result<CheckReport> {
    isobath_disk::check(host, name.as_ref(), options, events).await
}

/// Brings an image into its final form, in which every program that reads qcow2 finds all its data: replays a journal
/// that a crash left in use, and applies what a killed server had not yet written.
///
/// # Errors
/// If the image cannot be opened for writing.
pub async fn seal<H: Host>(host: H, name: impl AsRef<Path>) -> Result<()> {
    let options = OpenOptions::new().writable(true).backing(false).secrets(Secrets::unneeded());
    isobath_disk::Disk::open(host, name.as_ref(), &options).await?.close().await
}

/// The space in bytes that an image with these options would need, without its backing file.
///
/// # Errors
/// If the options exclude each other.
///
/// ```
/// use isobath::{NewDisk, measure};
///
/// # futures_executor::block_on(async {
/// let sizes = measure(&NewDisk::new(1 << 30)).await?;
/// assert!(sizes.required < 1 << 20 && sizes.fully_allocated > 1 << 30);
/// # Ok::<(), isobath::DiskError>(())
/// # }).unwrap();
/// ```
pub async fn measure(new: &NewDisk) -> Result<Measure> {
    Ok(isobath_disk::measure::<isobath_storage::memory::MemoryHost>(new, None).await?)
}
