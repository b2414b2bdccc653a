//! Changing how an image that nobody uses is kept: its version, the width of its refcounts, its lazy refcounts, the
//! name of its data file. No guest data moves.
//!
//! After a crash the image is as before or as wanted, in each of these; a version changes by at most two writes of the
//! header, of which the one of its first sector counts.

use crate::change::{Change, count};
use crate::check::image::Image;
use crate::check::rebuild::rebuild;
use crate::check::survey::Survey;
use crate::layer::ImageFormat;
use crate::options::OpenOptions;
use crate::recovery::Purpose;
use crate::snapshots::complete_snapshots;
use crate::{DiskError, Result};
use isobath_qcow2::header::{HeaderWrite, V2_LENGTH, V3_LENGTH, field};
use isobath_qcow2::{
    AutoclearFeatures, CompatibleFeatures, CompressionType, Extension, FeatureNameTable, Header,
    IncompatibleFeatures,
};
use isobath_storage::{Host, Storage};
use std::path::Path;

const NOT_REWRITTEN: &str = "its refcounts are not rewritten while it has errors";

/// What is to change; `None` leaves it as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amend {
    /// The format's version: 2 or 3.
    pub version: Option<u32>,
    /// The width of a refcount: 1, 2, 4, 8, 16, 32 or 64 bits; 16 in version 2.
    pub refcount_bits: Option<u32>,
    /// Whether a program that knows lazy refcounts may postpone writing refcounts; version 3.
    pub lazy_refcounts: Option<bool>,
    /// The name of the external data file, of an image that has one.
    pub data_file: Option<String>,
}

/// Changes what `amend` names. Of an image that becomes version 2 the zero clusters were
/// expanded before (`Disk::expand_zeroes`); its bitmaps are dropped.
///
/// # Errors
/// If the image cannot be used, has errors, or does not allow the change, of which nothing is done then; or if the
/// storage fails.
pub async fn amend<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    amend: &Amend,
) -> Result<()> {
    let change = Change::begin(host, name, options, "options to amend").await?;
    if let Err(error) = check(&change, amend).await {
        change.close().await?;
        return Err(error);
    }
    let wanted = amend.version;
    let upgrades = change.header.version < 3 && wanted == Some(3);
    let mut layer = change.close().await?;
    if upgrades && layer.header().is_some_and(|header| header.nb_snapshots > 0) {
        // Each opens and locks the image.
        drop(layer);
        complete_snapshots(host, name, options).await?;
        layer = Change::begin(host, name, options, "options to amend").await?.close().await?;
    }
    let storage = layer.storage();
    let mut image = Image::open(storage, name, Some(ImageFormat::Qcow2), Purpose::Write).await?;
    if upgrades {
        let mut new = image.header.clone();
        new.version = 3;
        new.header_length = V3_LENGTH;
        rewrite(&mut image, new).await?;
    }
    if let Some(bits) = amend.refcount_bits.filter(|bits| *bits != 1 << image.header.refcount_order)
    {
        change_width(&mut image, bits).await?;
    }
    if let Some(file) = &amend.data_file {
        let cluster = image.read(0, image.geometry.cluster_size() as usize).await?;
        let writes = Header::edit_data_file(&cluster, file)
            .map_err(|source| DiskError::Format { image: name.to_owned(), source })?;
        write(&image, writes).await?;
    }
    if let Some(lazy) = amend.lazy_refcounts {
        let bits = image.header.compatible;
        let bits = if lazy {
            bits.with(CompatibleFeatures::LAZY_REFCOUNTS)
        } else {
            bits.without(CompatibleFeatures::LAZY_REFCOUNTS)
        };
        if bits != image.header.compatible {
            let field = (field::COMPATIBLE_FEATURES, bits.bits().to_be_bytes().to_vec());
            write(&image, vec![field]).await?;
            image.header.compatible = bits;
        }
    }
    if image.header.version == 3 && wanted == Some(2) {
        let mut new = image.header.clone();
        new.version = 2;
        new.header_length = V2_LENGTH;
        new.unknown_fields.clear();
        new.incompatible = IncompatibleFeatures::default();
        new.compatible = CompatibleFeatures::default();
        new.autoclear = AutoclearFeatures::default();
        new.compression_type = CompressionType::Zlib;
        new.extensions.retain(|extension| {
            !matches!(
                extension,
                Extension::FeatureNames(_) | Extension::Bitmaps(_) | Extension::Journal(_)
            )
        });
        rewrite(&mut image, new).await?;
        // What the bitmaps held.
        let mut quiet = |_: crate::check::CheckEvent<'_>| {};
        let leaks = crate::check::Repair::Leaks;
        crate::check::check_storage(storage, name, Some(ImageFormat::Qcow2), leaks, &mut quiet)
            .await?;
    }
    Ok(())
}

/// Whether [`amend`] would be possible.
///
/// # Errors
/// Those of [`amend`] that come before any change.
pub async fn check_amend<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    amend: &Amend,
) -> Result<()> {
    let change = Change::begin(host, name, options, "options to amend").await?;
    let checked = check(&change, amend).await;
    change.close().await?;
    checked
}

/// Refuses what cannot be done, in QEMU's words.
async fn check<S: Storage>(change: &Change<S>, amend: &Amend) -> Result<()> {
    let header = &change.header;
    let refuse = |reason: &str| Err(change.refused(reason));
    let version = amend.version.unwrap_or(header.version);
    let bits = amend.refcount_bits.unwrap_or(1 << header.refcount_order);
    if !(2..=3).contains(&version) {
        return refuse(&format!("Unknown compatibility level {version}"));
    }
    if !bits.is_power_of_two() || bits > 64 {
        return refuse("Refcount width must be a power of two and may not exceed 64 bits");
    }
    let uses_data_file = header.incompatible.contains(IncompatibleFeatures::DATA_FILE);
    if amend.data_file.is_some() && !uses_data_file {
        return refuse("data-file can only be set for images that use an external data file");
    }
    if bits < 1 << header.refcount_order {
        let image = view(change).await?;
        let survey = count(&image, NOT_REWRITTEN).await?;
        check_width(&image, &survey, bits)?;
    }
    if version == 3 {
        return Ok(());
    }
    // Like all else that version 2 has not, it is dropped if it is on already.
    let lazy = header.compatible.contains(CompatibleFeatures::LAZY_REFCOUNTS);
    if amend.lazy_refcounts == Some(true) && !lazy {
        return refuse(
            "Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 \
             or greater)",
        );
    }
    if bits != 16 {
        return refuse(if amend.refcount_bits.is_some() {
            "Refcount widths other than 16 bits require compatibility level 1.1 or above (use \
             compat=1.1 or greater)"
        } else {
            "compat=0.10 requires refcount_bits=16"
        });
    }
    if uses_data_file {
        return refuse("Cannot downgrade an image with a data file");
    }
    // What is repaired before, or only says how compressed clusters are to be read.
    let dropped = IncompatibleFeatures::DIRTY
        .with(IncompatibleFeatures::JOURNAL)
        .with(IncompatibleFeatures::COMPRESSION_TYPE);
    let kept = header.incompatible.without(dropped);
    if !kept.is_empty() {
        let names = FeatureNameTable::known().describe_incompatible(kept.bits());
        return refuse(&format!(
            "Cannot downgrade an image with incompatible features {:#x} set: {names}; 'convert -O qcow2 -o \
             compat=0.10' makes a copy of what the disk reads now, without encryption, snapshots, bitmaps and \
             backing file",
            kept.bits()
        ));
    }
    if header.version == 3 && header.nb_snapshots > 0 {
        return refuse(
            "Internal snapshots prevent downgrade of image: they may hold zero clusters, which \
             version 2 does not have; delete them first",
        );
    }
    if header.incompatible.contains(IncompatibleFeatures::COMPRESSION_TYPE) {
        let image = view(change).await?;
        let survey = count(&image, "its version is not changed while it has errors").await?;
        if survey.compressed > 0 {
            return refuse(&format!(
                "Cannot downgrade an image with {} compression type and existing compressed clusters",
                header.compression_type
            ));
        }
    }
    Ok(())
}

/// The image, for counting.
async fn view<S: Storage>(change: &Change<S>) -> Result<Image<S>> {
    let (storage, name) = (change.layer.storage(), change.layer.name());
    Image::open(storage, name, Some(ImageFormat::Qcow2), Purpose::Examine).await
}

async fn write<S: Storage>(image: &Image<S>, writes: Vec<HeaderWrite>) -> Result<()> {
    image.flush().await?;
    for (at, bytes) in writes {
        image.write(at as u64, &bytes).await?;
        image.flush().await?;
    }
    Ok(())
}

async fn rewrite<S: Storage>(image: &mut Image<S>, new: Header) -> Result<()> {
    let error = |source| DiskError::Format { image: image.name.clone(), source };
    let cluster = image.read(0, image.geometry.cluster_size() as usize).await?;
    let writes = new.rewrite(&cluster).map_err(error)?;
    let geometry = new.geometry().map_err(error)?;
    write(image, writes).await?;
    image.geometry = geometry;
    image.header = new;
    Ok(())
}

async fn change_width<S: Storage>(image: &mut Image<S>, bits: u32) -> Result<()> {
    let mut survey = count(image, NOT_REWRITTEN).await?;
    check_width(image, &survey, bits)?;
    let mut wide = image.header.clone();
    wide.refcount_order = bits.trailing_zeros();
    image.geometry = wide
        .geometry()
        .map_err(|source| DiskError::Format { image: image.name.clone(), source })?;
    image.header = wide;
    rebuild(image, &mut survey).await
}

/// Whether refcounts of so many bits can count what there is.
fn check_width<S: Storage>(image: &Image<S>, survey: &Survey, bits: u32) -> Result<()> {
    let most = u64::MAX >> (64 - bits);
    let too_much = survey.counts.nonzero().find(|at| survey.counts.get(*at) > most);
    match too_much {
        None => Ok(()),
        Some(cluster) => Err(image.refused(format!(
            "Cannot decrease refcount entry width to {bits} bits: Cluster at offset {:#x} has a \
             refcount of {}",
            cluster << image.geometry.cluster_bits(),
            survey.counts.get(cluster)
        ))),
    }
}
