//! A change of an image's structure that nobody uses meanwhile: snapshots, bitmaps, the header.
//!
//! No guest data moves. New tables are put next to the old ones, in clusters of their own, and one write of the header
//! switches to them. Refcounts and COPIED flags follow from the tables: they are counted as a check counts them, for
//! the image as it will be. To every crash there is an image in which no cluster is used twice:
//!
//! 1. the dirty bit is set (version 3), with which any program that opens the image counts again;
//! 2. refcounts that must be higher are raised, and durable;
//! 3. COPIED flags are cleared where a refcount is not 1;
//! 4. the header is written;
//! 5. refcounts that may be lower are lowered, and durable;
//! 6. COPIED flags are set where a refcount is 1;
//! 7. the dirty bit is cleared.
//!
//! Version 2 has no such bit: a crash in between leaves leaked clusters, and COPIED flags that a check reports.

use crate::check::copied;
use crate::check::image::Image;
use crate::check::log::Log;
use crate::check::refcounts::{self, Refcounts};
use crate::check::survey::Survey;
use crate::check::{CheckEvent, Repair, check_storage};
use crate::durability::MetadataMode;
use crate::layer::{ImageFormat, Layer, Qcow2Layer};
use crate::open::{Opening, load_qcow2, open_layer};
use crate::options::OpenOptions;
use crate::readers::Readers;
use crate::recovery::Purpose;
use crate::sabotage::{self, Sabotage};
use crate::writer::Writer;
use crate::{DiskError, Result};
use isobath_qcow2::header::field;
use isobath_qcow2::{Geometry, Header, HostOffset, IncompatibleFeatures};
use isobath_storage::{Host, IoBuf, Storage};
use std::path::Path;
use std::sync::Arc;

/// A change that is being prepared.
pub(crate) struct Change<S: Storage> {
    pub(crate) layer: Qcow2Layer<S>,
    writer: Writer<S>,
    readers: Readers,
    /// The header as it is.
    pub(crate) header: Header,
    /// Clusters were taken.
    taken: bool,
}

impl<S: Storage> Change<S> {
    /// Opens the image for a change of what `what` names, which only a qcow2 image has.
    pub(crate) async fn begin<H: Host<File = S>>(
        host: &H,
        name: &Path,
        options: &OpenOptions,
        what: &str,
    ) -> Result<Self> {
        let options = Self::options(options);
        let layer = open_layer(host, name, Opening::of(&options)).await?;
        Self::of(layer, &options, what).await
    }

    /// [Begins](Self::begin) a change of a qcow2 image that is open for writing as `storage`, under the locks that this
    /// holds.
    pub(crate) async fn begin_open<H: Host<File = S>>(
        host: &H,
        name: &Path,
        options: &OpenOptions,
        storage: &Arc<S>,
        what: &str,
    ) -> Result<Self> {
        let options = Self::options(options);
        let length = storage.len().await?;
        let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        let there = (length, start);
        let layer = load_qcow2(host, name, Opening::of(&options), storage, there).await?;
        Self::of(layer, &options, what).await
    }

    fn options(options: &OpenOptions) -> OpenOptions {
        options.clone().writable(true).backing(false).metadata(MetadataMode::Ordered)
    }

    async fn of(layer: Layer<S>, options: &OpenOptions, what: &str) -> Result<Self> {
        let layer = Arc::new(layer);
        let Some(layer) = Qcow2Layer::of(&layer) else {
            let reason = format!("its format has no {what}");
            return Err(DiskError::Refused { image: layer.name().to_owned(), reason });
        };
        let writer = Writer::open(&layer, options, true).await?;
        let header = layer.qcow2().header.read().clone();
        Ok(Self { layer, writer, readers: Readers::default(), header, taken: false })
    }

    pub(crate) fn refused(&self, reason: impl Into<String>) -> DiskError {
        DiskError::Refused { image: self.layer.name().to_owned(), reason: reason.into() }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.layer.qcow2().geometry
    }

    /// Reads a part of the image as it is; what lies past the end of the file reads as zeroes.
    pub(crate) async fn read(&self, offset: HostOffset, bytes: u64) -> Result<IoBuf> {
        Ok(self.layer.storage().read_at(offset.get(), IoBuf::zeroed(bytes as usize)).await?)
    }

    /// Writes to clusters that were [taken](Self::take).
    pub(crate) async fn write(&self, offset: HostOffset, bytes: IoBuf) -> Result<()> {
        self.layer.storage().write_at(offset.get(), bytes).await?;
        Ok(())
    }

    /// Takes adjacent clusters for a table of so many bytes, durably: nothing refers to them yet.
    pub(crate) async fn take(&mut self, bytes: u64) -> Result<HostOffset> {
        let count = self.geometry().clusters_for(bytes).max(1);
        self.taken = true;
        let offset = Box::pin(self.writer.take_clusters(&self.readers, count)).await?;
        // Until the table is written it is zeroes, also where the file ended before.
        let length = (count << self.geometry().cluster_bits()) as usize;
        self.layer.storage().write_at(offset.get(), IoBuf::zeroed(length)).await?;
        Ok(offset)
    }

    /// Ends the change without one, and keeps the image open and locked.
    pub(crate) async fn close(self) -> Result<Arc<Layer<S>>> {
        Box::pin(self.writer.close(&self.readers)).await?;
        self.layer.storage().flush().await?;
        Ok(Arc::clone(self.layer.layer()))
    }

    /// Makes `header` the image's header, with the refcounts and flags that follow from it. If there is none because
    /// its tables could not be made, or it cannot be the image's, the image is as before.
    pub(crate) async fn switch(self, header: Result<Header>) -> Result<()> {
        let closed = Box::pin(self.writer.close(&self.readers)).await;
        let Self { layer, writer, taken, .. } = self;
        drop(writer);
        let (storage, name) = (layer.storage(), layer.name());
        let prepared = async {
            let header = header?;
            closed?;
            storage.flush().await?;
            let format = Some(ImageFormat::Qcow2);
            let mut now = Image::open(storage, name, format, Purpose::Write).await?;
            let prepared = prepare(&now, header).await?;
            if !sabotage::is(Sabotage::NoDirtyBit) {
                now.set_incompatible(IncompatibleFeatures::DIRTY).await?;
            }
            Ok::<_, DiskError>((now, prepared))
        };
        match prepared.await {
            Ok((mut now, prepared)) => prepared.run(&mut now).await,
            Err(error) => {
                // What was taken for the new tables; but after a failed flush nothing is written any more.
                if taken && !error.is_failed_flush() && !sabotage::is(Sabotage::KeptTaken) {
                    let mut quiet = |_: CheckEvent<'_>| {};
                    let format = Some(ImageFormat::Qcow2);
                    let freed = check_storage(storage, name, format, Repair::Leaks, &mut quiet);
                    if let Err(error) = freed.await {
                        let image = isobath_storage::shown(name);
                        tracing::warn!(%image, %error, "what a failed change took is not freed");
                    }
                }
                Err(error)
            }
        }
    }
}

/// The image as it will be, and what refers to its clusters.
struct Prepared<S> {
    then: Image<S>,
    target: Survey,
    /// What the active tables are now, if they are not those that they will be.
    now: Option<Survey>,
    refcounts: Refcounts,
}

/// Counts; changes nothing.
async fn prepare<S: Storage>(now: &Image<S>, mut header: Header) -> Result<Prepared<S>> {
    // What the change took may have let the table grow, and so move.
    header.refcount_table_offset = now.header.refcount_table_offset;
    header.refcount_table_clusters = now.header.refcount_table_clusters;
    let then = now.with_header(header);
    let target = count_after(&then).await?;
    let moves = then.header.l1_table_offset != now.header.l1_table_offset;
    let before = if moves {
        Some(count(now, "its snapshots are not changed while it has errors").await?)
    } else {
        None
    };
    let refcounts = refcounts::compare(&then, &target).await?;
    Ok(Prepared { then, target, now: before, refcounts })
}

/// Counts the references of an image as it would be after a change. If only its refcounts are too small for them, the
/// image itself is sound.
async fn count_after<S: Storage>(then: &Image<S>) -> Result<Survey> {
    let (survey, wrong) = look(then).await?;
    if let (Some(survey), Some(wrong)) = (&survey, &wrong)
        && survey.overflows == wrong.errors
        && !survey.lost
    {
        let bits = then.geometry.refcount_bits();
        let reason = format!(
            "a cluster would have more references than refcounts of {bits} bits can count; convert the image to one \
             with refcount_bits=16"
        );
        return Err(DiskError::Refused { image: then.name.clone(), reason });
    }
    sound(then, survey, wrong, "the change would leave it with errors")
}

/// Counts the references of an image without errors; `otherwise` is what is said of one with some.
pub(crate) async fn count<S: Storage>(image: &Image<S>, otherwise: &str) -> Result<Survey> {
    let (survey, wrong) = look(image).await?;
    sound(image, survey, wrong, otherwise)
}

/// What is wrong with an image.
struct Wrong {
    errors: u64,
    first: String,
}

/// What was counted, if that was possible, and what was found wrong.
async fn look<S: Storage>(image: &Image<S>) -> Result<(Option<Survey>, Option<Wrong>)> {
    let mut first = None;
    let mut events = |event: CheckEvent<'_>| {
        if let CheckEvent::Finding(text) = event {
            first.get_or_insert_with(|| text.to_owned());
        }
    };
    let mut log = Log::new(&mut events);
    let survey = Survey::take(image, &mut log).await?;
    let errors = log.report.corruptions + log.report.check_errors;
    let lost = survey.as_ref().is_none_or(|survey| survey.lost);
    let wrong = (errors > 0 || lost).then(|| Wrong { errors, first: first.unwrap_or_default() });
    Ok((survey, wrong))
}

/// What was counted of an image in which nothing is wrong.
fn sound<S: Storage>(
    image: &Image<S>,
    survey: Option<Survey>,
    wrong: Option<Wrong>,
    otherwise: &str,
) -> Result<Survey> {
    match (survey, wrong) {
        (Some(survey), None) => Ok(survey),
        (_, wrong) => {
            let first = wrong.map(|wrong| wrong.first).unwrap_or_default();
            let reason = format!("{otherwise}; the first is '{first}'");
            Err(DiskError::Corrupt { image: image.name.clone(), reason })
        }
    }
}

impl<S: Storage> Prepared<S> {
    async fn run(self, now: &mut Image<S>) -> Result<()> {
        let Self { mut then, target, now: before, mut refcounts } = self;
        then.header.incompatible = now.header.incompatible;
        if refcounts::raise(&then, &target, &mut refcounts).await? {
            flags(now, before.as_ref().unwrap_or(&target), (&refcounts, &target)).await?;
        }
        if before.is_some() {
            flags(&then, &target, (&refcounts, &target)).await?;
        }
        write_header(&then, &now.header).await?;
        let lowered = refcounts::lower(&then, &target, &mut refcounts).await?;
        if lowered.ones {
            flags(&then, &target, (&refcounts, &target)).await?;
        }
        then.clear_incompatible(IncompatibleFeatures::DIRTY).await?;
        let bits = then.geometry.cluster_bits();
        for run in lowered.freed {
            let (offset, length) = (run.start << bits, (run.end - run.start) << bits);
            if let Err(error) = then.storage.discard(offset, length).await {
                tracing::debug!(%error, "cannot release the space of a deleted snapshot");
                break;
            }
        }
        Ok(())
    }
}

/// Makes the COPIED flags of an image's active tables true.
async fn flags<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: (&Refcounts, &Survey),
) -> Result<()> {
    let mut log = Log::quiet();
    copied::check(image, survey, refcounts, Repair::All, &mut log).await?;
    if log.report.corruptions > 0 {
        return Err(image.refused("the COPIED flags of its tables cannot be written".into()));
    }
    Ok(())
}

/// Writes what changes in the header, durably: the fields in one piece, the bitmaps extension as
/// [`Header::edit_bitmaps`] says.
async fn write_header<S: Storage>(image: &Image<S>, before: &Header) -> Result<()> {
    image.flush().await?;
    let header = &image.header;
    let fields = fields(header);
    if fields != self::fields(before) {
        image.write_fields(fields).await?;
    }
    if header.bitmaps() != before.bitmaps() || header.autoclear != before.autoclear {
        let cluster = image.read(0, image.geometry.cluster_size() as usize).await?;
        let writes = Header::edit_bitmaps(&cluster, header.bitmaps());
        let writes =
            writes.map_err(|source| DiskError::Format { image: image.name.clone(), source })?;
        for (at, bytes) in writes {
            image.write(at as u64, &bytes).await?;
            image.flush().await?;
        }
    }
    Ok(())
}

/// The fields of a header that a change may change.
fn fields(header: &Header) -> [(usize, Vec<u8>); 5] {
    [
        (field::SIZE, header.size.to_be_bytes().into()),
        (field::L1_SIZE, header.l1_size.to_be_bytes().into()),
        (field::L1_TABLE_OFFSET, header.l1_table_offset.get().to_be_bytes().into()),
        (field::NB_SNAPSHOTS, header.nb_snapshots.to_be_bytes().into()),
        (field::SNAPSHOTS_OFFSET, header.snapshots_offset.get().to_be_bytes().into()),
    ]
}
