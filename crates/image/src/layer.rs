//! One image of a chain.

use crate::encryption::{Key, Protection, locked, read_through};
use crate::l1_table::L1Table;
use crate::memory::Reserved;
use crate::replayed::Replayed;
use crate::restart_log::FoundLog;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result, always, violated};
use isobath_formats::{Format, Image, Run, RunKind};
use isobath_luks::{Cipher, Info, Secret};
use isobath_qcow2::header::HeaderWrite;
use isobath_qcow2::index::RecordedFormat;
use isobath_qcow2::{
    AutoclearFeatures, FormatError, FormatErrorKind, Geometry, Header, HostOffset, L1Entry,
};
use isobath_storage::{Allocation, IoBuf, Storage};
use parking_lot::{Mutex, RwLock};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// qcow2, version 2 or 3.
    Qcow2,
    /// The guest's bytes as they are.
    Raw,
    /// The guest's bytes encrypted, behind a header of LUKS, version 1.
    Luks,
    /// A format of another program, which is not written to in place.
    Foreign(Format),
}

impl ImageFormat {
    /// QEMU's name of the format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
            Self::Luks => "luks",
            Self::Foreign(format) => format.name(),
        }
    }

    /// The names of all formats, for messages.
    pub fn names() -> String {
        let foreign = Format::ALL.map(Format::name);
        format!("qcow2, raw, luks, {}", foreign.join(", "))
    }

    /// Whether images in this format can be written to once they exist.
    pub const fn is_written(self) -> bool {
        !matches!(self, Self::Foreign(_))
    }

    /// The format of that name, or `None` if it is not supported.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "qcow2" => Some(Self::Qcow2),
            "raw" => Some(Self::Raw),
            "luks" => Some(Self::Luks),
            _ => Format::from_name(name).map(Self::Foreign),
        }
    }

    /// The format that a header gives for a backing file, or `None` if it is not supported. QEMU writes the names of
    /// its drivers for files and devices there, too: those show what is in them.
    pub fn of_backing(name: &str) -> Option<Self> {
        match name {
            "file" | "host_device" | "host_cdrom" => Some(Self::Raw),
            _ => Self::from_name(name),
        }
    }
}

impl From<RecordedFormat> for ImageFormat {
    fn from(format: RecordedFormat) -> Self {
        match format {
            RecordedFormat::Raw => Self::Raw,
            RecordedFormat::Qcow2 => Self::Qcow2,
        }
    }
}

impl ImageFormat {
    /// How an index names the format; `None` for one that an index does not cover.
    pub const fn recorded(self) -> Option<RecordedFormat> {
        match self {
            Self::Raw => Some(RecordedFormat::Raw),
            Self::Qcow2 => Some(RecordedFormat::Qcow2),
            Self::Luks | Self::Foreign(_) => None,
        }
    }
}

/// An open image: its file and, for qcow2, its header and L1 table.
pub struct Layer<S> {
    /// The name, if it is not its file's.
    name: Option<Box<Path>>,
    storage: Arc<S>,
    data: Data<S>,
    /// Guest bytes.
    size: AtomicU64,
    /// Guest bytes that are visible through the layers above.
    visible: AtomicU64,
    /// Bytes in the file when last asked.
    file_length: AtomicU64,
    /// The end of the space that the writer has allocated, which may be past the end of the file.
    given_out: AtomicU64,
    /// The end of the guest's highest write so far.
    highest_write: AtomicU64,
    qcow2: Option<Arc<Qcow2>>,
    /// The format is raw because nothing else was detected.
    detected_raw: bool,
    /// The overlay of the journal of an image that was not closed.
    replayed: Option<Arc<Replayed>>,
    /// A killed process's restart log, which the writer must apply.
    found_log: Mutex<Option<Box<FoundLog>>>,
    /// What was made of one.
    log: Mutex<ShownLog>,
    /// Whether the data is encrypted.
    protection: Protection,
    /// The header of a file that is encrypted as a whole, which `storage` decrypts.
    luks: Option<Arc<Info>>,
    /// See [`given_data_file`](Self::given_data_file). Of thousands of layers hardly any has one.
    given_data_file: Option<Box<PathBuf>>,
}

/// What was made of a killed process's restart log when its image was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShownLog {
    /// There was none, or the image has everything now.
    None,
    /// It is overlaid on the image, which is only read, and whose file has none of it.
    Overlaid,
    /// It does not match the image, which is as after a power failure. A writer has set it aside.
    Unfit,
}

/// A layer that is a qcow2 image.
pub struct Qcow2Layer<S> {
    layer: Arc<Layer<S>>,
    qcow2: Arc<Qcow2>,
}

impl<S> Clone for Qcow2Layer<S> {
    fn clone(&self) -> Self {
        Self { layer: Arc::clone(&self.layer), qcow2: Arc::clone(&self.qcow2) }
    }
}

impl<S> Deref for Qcow2Layer<S> {
    type Target = Layer<S>;

    fn deref(&self) -> &Layer<S> {
        &self.layer
    }
}

impl<S> Qcow2Layer<S> {
    /// The layer, if it is one.
    pub fn of(layer: &Arc<Layer<S>>) -> Option<Self> {
        let qcow2 = Arc::clone(layer.qcow2.as_ref()?);
        Some(Self { layer: Arc::clone(layer), qcow2 })
    }

    /// What it adds to a raw one.
    pub fn qcow2(&self) -> &Qcow2 {
        &self.qcow2
    }

    /// The layer as others share it.
    pub fn layer(&self) -> &Arc<Layer<S>> {
        &self.layer
    }
}

/// Where a layer's data is.
enum Data<S> {
    /// In the image's file.
    Own,
    /// In an external data file.
    File(Arc<S>),
    /// In an image of another program.
    Foreign(Arc<Image<S>>),
}

impl<S> Clone for Data<S> {
    fn clone(&self) -> Self {
        match self {
            Self::Own => Self::Own,
            Self::File(file) => Self::File(Arc::clone(file)),
            Self::Foreign(image) => Self::Foreign(Arc::clone(image)),
        }
    }
}

/// Identifies one opening of an image's tables in this process. Caches of a file's contents are valid for one opening
/// only: a layer's number can change, and so can the contents of a file that is written to through another handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpeningId(u64);

impl OpeningId {
    /// A new id.
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if sabotage::is(Sabotage::SharedOpening) {
            return Self(0);
        }
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a qcow2 layer adds to a raw one.
pub struct Qcow2 {
    /// Which opening of the image this is.
    pub opening: OpeningId,
    /// The header, as it is in the file.
    pub header: RwLock<Header>,
    /// Sizes that follow from the header.
    pub geometry: Geometry,
    /// Bytes in the image's file when it was opened, or when its writer finished.
    pub opened_length: AtomicU64,
    /// The active L1 table as it is in the file; the writer holds changes that are not there yet.
    pub l1: RwLock<L1Table>,
    /// What it takes of a memory limit.
    pub memory: Option<Reserved>,
}

/// A layer's name, unless it is its file's: there may be thousands of layers.
fn unless_file<S: Storage>(name: PathBuf, storage: &S) -> Option<Box<Path>> {
    (name != storage.identity().name).then(|| name.into())
}

impl<S: Storage> Layer<S> {
    /// The size of a raw disk is that of its file, rounded to whole sectors.
    pub fn raw(name: PathBuf, storage: Arc<S>, length: u64) -> Self {
        let size = length.next_multiple_of(512);
        Self {
            name: unless_file(name, &*storage),
            data: Data::Own,
            storage,
            size: AtomicU64::new(size),
            visible: AtomicU64::new(size),
            file_length: AtomicU64::new(length),
            given_out: AtomicU64::new(0),
            highest_write: AtomicU64::new(0),
            qcow2: None,
            detected_raw: false,
            replayed: None,
            found_log: Mutex::default(),
            log: Mutex::new(ShownLog::None),
            protection: Protection::None,
            luks: None,
            given_data_file: None,
        }
    }

    /// A disk behind a header of LUKS: `storage` decrypts it, and is `length` bytes long.
    pub fn luks(
        name: PathBuf,
        storage: Arc<S>,
        length: u64,
        protection: Protection,
        header: Info,
    ) -> Self {
        let luks = Some(Arc::new(header));
        Self { protection, luks, ..Self::raw(name, storage, length) }
    }

    /// The same, of an image whose format nobody named: it was detected.
    #[must_use]
    pub fn detected(self) -> Self {
        Self { detected_raw: self.format() == ImageFormat::Raw, ..self }
    }

    /// Whether the image is taken for a raw one because nothing else was detected. It must not come to begin as
    /// anything else: see [`DiskError::Disguise`].
    pub fn is_detected_raw(&self) -> bool {
        self.detected_raw
    }

    /// An image of another program.
    pub fn foreign(name: PathBuf, storage: Arc<S>, image: Image<S>) -> Self {
        let size = image.size();
        Self { data: Data::Foreign(Arc::new(image)), ..Self::raw(name, storage, size) }
    }

    /// A qcow2 image whose header and L1 table were read.
    pub fn qcow2(
        name: PathBuf,
        storage: Arc<S>,
        data: Option<Arc<S>>,
        file_length: u64,
        qcow2: Qcow2,
        replayed: Option<Replayed>,
        protection: Protection,
    ) -> Self {
        let (size, l1_size) = {
            let header = qcow2.header.read();
            (header.disk_size(), header.l1_size)
        };
        if qcow2.l1.read().len() != l1_size as usize {
            violated("the L1 table is as long as the header says");
        }
        Self {
            name: unless_file(name, &*storage),
            data: data.map_or(Data::Own, Data::File),
            storage,
            size: AtomicU64::new(size),
            visible: AtomicU64::new(size),
            file_length: AtomicU64::new(file_length),
            given_out: AtomicU64::new(0),
            highest_write: AtomicU64::new(0),
            qcow2: Some(Arc::new(qcow2)),
            detected_raw: false,
            replayed: replayed.map(Arc::new),
            found_log: Mutex::default(),
            log: Mutex::new(ShownLog::None),
            protection,
            luks: None,
            given_data_file: None,
        }
    }

    /// The same image as part of another chain, where more of it may be visible.
    #[must_use]
    pub fn in_other_chain(&self) -> Self {
        Self {
            name: self.name.clone(),
            storage: Arc::clone(&self.storage),
            data: self.data.clone(),
            size: AtomicU64::new(self.size()),
            visible: AtomicU64::new(self.size()),
            file_length: AtomicU64::new(self.file_length()),
            given_out: AtomicU64::new(0),
            highest_write: AtomicU64::new(0),
            qcow2: self.qcow2.clone(),
            detected_raw: self.detected_raw,
            replayed: self.replayed.clone(),
            found_log: Mutex::default(),
            log: Mutex::new(self.shown_log()),
            protection: self.protection.clone(),
            luks: self.luks.clone(),
            given_data_file: self.given_data_file.clone(),
        }
    }

    /// Sets the restart log that the image's writer must apply.
    pub fn set_found_log(&self, found_log: Option<FoundLog>) {
        *self.found_log.lock() = found_log.map(Box::new);
    }

    /// Takes the restart log that the writer must apply.
    pub fn take_found_log(&self) -> Option<FoundLog> {
        self.found_log.lock().take().map(|found| *found)
    }

    /// What was made of a killed process's restart log.
    pub fn shown_log(&self) -> ShownLog {
        *self.log.lock()
    }

    /// Notes what was made of a killed process's restart log.
    pub(crate) fn note_log(&self, log: ShownLog) {
        *self.log.lock() = log;
    }

    /// The same with the overlay of a restart log, and of the journal, with which the file ends there.
    #[must_use]
    pub(crate) fn with_overlay(self, (overlay, end): (Replayed, u64)) -> Self {
        self.note_log(ShownLog::Overlaid);
        self.give_out(end);
        if let Some(qcow2) = &self.qcow2 {
            qcow2.opened_length.fetch_max(end, Ordering::Relaxed);
        }
        self.file_length.fetch_max(end, Ordering::Relaxed);
        Self { replayed: Some(Arc::new(overlay)), ..self }
    }

    /// A copy of the overlay of a journal in use.
    pub(crate) fn overlay(&self) -> Replayed {
        self.replayed.as_deref().cloned().unwrap_or_default()
    }

    /// The length of the image's file in bytes, with the overlay of a journal in use.
    pub async fn length(&self) -> Result<u64> {
        let end = self.replayed.as_ref().map_or(0, |replayed| replayed.end());
        Ok(self.storage.len().await?.max(end))
    }

    /// Reads the image's file, with the overlay of a journal in use.
    pub async fn read_at(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let mut buf = self.storage.read_at(at, buf).await?;
        if let Some(replayed) = &self.replayed {
            replayed.put_over(at, &mut buf);
        }
        Ok(buf)
    }

    /// Like [`read_at`](Self::read_at), for the guest's data.
    pub async fn read_data_at(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        if let Some(cipher) = self.cipher()? {
            let stored = async |at, buf| self.read_stored_data_at(at, buf).await;
            return Box::pin(read_through(cipher, at, buf, stored)).await;
        }
        self.read_stored_data_at(at, buf).await
    }

    /// The key in use, to open the image once more.
    pub fn key(&self) -> Key {
        match &self.protection {
            Protection::None => Key::Known(None),
            Protection::Unlocked(unlocked) => Key::Known(Some(unlocked.clone())),
            Protection::Locked => Key::Unneeded,
        }
    }

    /// Whether the image's data is encrypted, which makes a host cluster's bytes meaningless in another place.
    pub fn is_encrypted(&self) -> bool {
        !matches!(self.protection, Protection::None)
    }

    /// The header of a file that is encrypted as a whole.
    pub fn luks_header(&self) -> Option<&Info> {
        self.luks.as_deref()
    }

    /// The secret that unlocked the image, if it is encrypted and its data is accessible.
    pub const fn secret(&self) -> Option<&Arc<Secret>> {
        match &self.protection {
            Protection::Unlocked(unlocked) => Some(&unlocked.secret),
            Protection::None | Protection::Locked => None,
        }
    }

    /// The cipher of the guest's data, if what [`data`](Self::data) holds is encrypted.
    ///
    /// # Errors
    /// If the image was opened without its key.
    #[inline]
    pub fn cipher(&self) -> Result<Option<&Cipher>> {
        match &self.protection {
            Protection::None => Ok(None),
            Protection::Unlocked(_) if self.luks.is_some() => Ok(None),
            Protection::Unlocked(unlocked) => Ok(Some(&unlocked.cipher)),
            Protection::Locked => Err(locked(self.name())),
        }
    }

    /// The guest's data as it is stored.
    async fn read_stored_data_at(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        match &self.data {
            Data::Own => self.read_at(at, buf).await,
            Data::File(file) => Ok(file.read_at(at, buf).await?),
            Data::Foreign(image) => Ok(Box::pin(image.read(at, buf)).await?),
        }
    }

    /// Whether the overlay of a journal in use contains any of a range of the guest's data.
    pub fn is_newer_than_data(&self, range: &Range<u64>) -> bool {
        matches!(self.data, Data::Own)
            && self
                .replayed
                .as_ref()
                .is_some_and(|replayed| replayed.touches(range.start, range.end - range.start))
    }

    /// Returns whether the guest's data from `at` on takes space.
    pub async fn allocation(&self, at: u64) -> Result<Allocation> {
        if let Data::Foreign(image) = &self.data {
            let left = image.size().saturating_sub(at);
            if left == 0 {
                return Ok(Allocation { length: 0, data: false });
            }
            let Run { length, kind } = Box::pin(image.run(at, left)).await?;
            return Ok(Allocation {
                length,
                data: !matches!(kind, RunKind::Absent | RunKind::Zero),
            });
        }
        let found = self.data().allocation(at).await?;
        let newer = self.is_newer_than_data(&(at..at + found.length.max(1)));
        Ok(Allocation { data: found.data || newer, ..found })
    }

    /// Where the bytes from `at` on of an image of another program are, for at most `length` bytes.
    pub async fn foreign_run(&self, at: u64, length: u64) -> Result<Run> {
        match &self.data {
            Data::Foreign(image) => Ok(Box::pin(image.run(at, length)).await?),
            _ => Err(DiskError::internal(self.name(), "the layer is another program's image")),
        }
    }

    /// The name under which it was opened.
    pub fn name(&self) -> &Path {
        self.name.as_deref().unwrap_or_else(|| self.storage.identity().name)
    }

    /// The image's file.
    pub fn storage(&self) -> &Arc<S> {
        &self.storage
    }

    /// The file with the guest's data: an external data file, or the image's own.
    pub fn data(&self) -> &Arc<S> {
        match &self.data {
            Data::Own | Data::Foreign(_) => &self.storage,
            Data::File(file) => file,
        }
    }

    /// The external data file that was given in place of the one that the header names.
    pub fn given_data_file(&self) -> Option<&Path> {
        self.given_data_file.as_ref().map(|path| path.as_path())
    }

    /// Notes that this external data file was given.
    #[must_use]
    pub(crate) fn with_data_file(self, given: Option<PathBuf>) -> Self {
        Self { given_data_file: given.map(Box::new), ..self }
    }

    /// The image's file, and the others that it consists of: an external data file, or extents.
    pub fn files(&self) -> impl Iterator<Item = &S> {
        let (data, foreign) = match &self.data {
            Data::Own => (None, None),
            Data::File(file) => (Some(&**file), None),
            Data::Foreign(image) => (None, Some(image)),
        };
        // The first file of another program's image is its own.
        let extents = foreign.into_iter().flat_map(|image| image.storages().skip(1));
        std::iter::once(&*self.storage).chain(data).chain(extents.map(|file| &**file))
    }

    /// The image of another program that the layer is.
    pub fn as_foreign(&self) -> Option<&Image<S>> {
        match &self.data {
            Data::Foreign(image) => Some(image),
            _ => None,
        }
    }

    /// Its format.
    pub fn format(&self) -> ImageFormat {
        match &self.data {
            Data::Foreign(image) => ImageFormat::Foreign(image.format()),
            _ if self.qcow2.is_some() => ImageFormat::Qcow2,
            _ if self.luks.is_some() => ImageFormat::Luks,
            _ => ImageFormat::Raw,
        }
    }

    /// The guest's size of this layer, in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Sets the disk's size.
    pub fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Relaxed);
    }

    /// Guest bytes of this layer that are not hidden by the sizes of the layers above.
    pub fn visible(&self) -> u64 {
        self.visible.load(Ordering::Relaxed)
    }

    /// Sets how much of it is visible.
    pub fn set_visible(&self, to: u64) {
        self.visible.store(to, Ordering::Relaxed);
    }

    /// Limits how much of it is visible.
    pub fn limit_visible(&self, to: u64) {
        self.visible.fetch_min(to, Ordering::Relaxed);
    }

    /// Bytes in the file when last asked, or the number that the writer has allocated.
    pub fn file_length(&self) -> u64 {
        let given_out = self.given_out.load(Ordering::Relaxed);
        self.file_length.load(Ordering::Relaxed).max(given_out)
    }

    /// Notes that the writer uses the file up to here.
    pub fn give_out(&self, end: u64) {
        self.given_out.fetch_max(end, Ordering::Relaxed);
    }

    /// Notes that the writer has truncated the file here.
    pub fn cut_at(&self, end: u64) {
        self.given_out.fetch_min(end, Ordering::Relaxed);
    }

    /// No cluster of data starts at or after this offset, because the file ends before. Raw data and external data
    /// files may be short.
    pub fn data_end(&self) -> u64 {
        match self.as_qcow2() {
            Some(qcow2) if !qcow2.geometry.has_data_file() => {
                self.file_length().next_multiple_of(qcow2.geometry.cluster_size())
            }
            _ => u64::MAX,
        }
    }

    /// Asks for the file's length again: an active layer grows.
    pub async fn refresh_file_length(&self) -> Result<u64> {
        let length = match &self.data {
            Data::Foreign(image) => image.size(),
            _ => self.data().len().await?,
        };
        self.file_length.store(length, Ordering::Relaxed);
        Ok(length)
    }

    /// The image is no longer written to: others may read it.
    pub async fn retire(&self) -> Result<()> {
        for file in self.files() {
            file.retire().await?;
        }
        Ok(())
    }

    /// Allows or forbids this process to open the image for writing besides this handle.
    pub async fn admit_writer(&self, admit: bool) -> Result<()> {
        for file in self.files() {
            file.admit_writer(admit).await?;
        }
        Ok(())
    }

    /// The writer has added tables to the file, all of which are in it now: whoever reads them there finds them within
    /// its length.
    pub async fn note_new_tables(&self) -> Result<()> {
        self.refresh_file_length().await?;
        if let Some(qcow2) = &self.qcow2 {
            qcow2.opened_length.store(self.storage.len().await?, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Writes another backing file's name into the header, durably. The file is open for writing.
    ///
    /// # Errors
    /// [`DiskError::Refused`] if the image's external data file is a raw image of the disk; if the header has no room
    /// for the name, or the storage fails.
    pub async fn edit_backing(&self, backing: Option<(&str, &str)>) -> Result<()> {
        let qcow2 = match (self.as_qcow2(), backing) {
            (None, None) => return Ok(()),
            (qcow2, _) => always(qcow2, self.name(), "an image with a backing file is qcow2")?,
        };
        let raw = qcow2.header.read().autoclear.contains(AutoclearFeatures::DATA_FILE_RAW);
        if raw && backing.is_some() {
            return Err(DiskError::Refused {
                image: self.name().to_owned(),
                reason: "it cannot have a backing file: its external data file is to hold the whole disk \
                         (data_file_raw=on), and would not hold what the backing file does; convert the image \
                         instead"
                    .into(),
            });
        }
        let storage = self.storage();
        let size = qcow2.geometry.cluster_size() as usize;
        let cluster = storage.read_at(0, IoBuf::zeroed(size)).await?;
        let writes: Vec<HeaderWrite> =
            Header::edit_backing(&cluster, backing).map_err(|error| self.format_error(error))?;
        for (at, bytes) in writes {
            storage.write_at(at as u64, IoBuf::copy_of(&bytes)).await?;
            // An index of the images above may know the header by the file's stamp.
            storage.sync_stamp().await?;
        }
        let owned = backing.map(|(name, format)| (name.to_owned(), Some(format.to_owned())));
        qcow2.header.write().set_backing(owned);
        Ok(())
    }

    /// Notes a write by the guest that ends there.
    pub fn note_guest_write(&self, end: u64) {
        // Most writes are below: they leave the cache line shared.
        if end > self.highest_guest_write() {
            self.highest_write.fetch_max(end, Ordering::Relaxed);
        }
    }

    /// The end of the guest's highest write to this layer while it was open, in guest bytes; zeroes count, discards do
    /// not.
    pub fn highest_guest_write(&self) -> u64 {
        self.highest_write.load(Ordering::Relaxed)
    }

    /// What a qcow2 layer adds to a raw one.
    pub fn as_qcow2(&self) -> Option<&Qcow2> {
        self.qcow2.as_deref()
    }

    /// A copy of the header, of a qcow2 layer.
    pub fn header(&self) -> Option<Header> {
        self.qcow2.as_ref().map(|q| q.header.read().clone())
    }

    /// log2 of the smallest piece of the disk that the layer's tables can map, in bytes; `None` for raw.
    pub fn unit_bits(&self) -> Option<u32> {
        self.qcow2.as_ref().map(|q| q.geometry.subcluster_size().trailing_zeros())
    }

    /// An error of the format, with this image's name.
    pub fn format_error(&self, source: FormatError) -> DiskError {
        DiskError::Format { image: self.name().to_owned(), source }
    }
}

impl Qcow2 {
    /// The offset of an L1 entry's L2 table, which must be within the file.
    pub fn l2_table(&self, entry: L1Entry) -> std::result::Result<Option<HostOffset>, FormatError> {
        let offset = entry.offset(&self.geometry)?;
        match offset {
            Some(offset) if offset.get() >= self.opened_length.load(Ordering::Relaxed) => {
                Err(FormatError::new(
                    FormatErrorKind::Truncated,
                    "L1 entry",
                    format!("{:#x}", entry.raw()),
                    "is past the end of the file, which may be truncated",
                ))
            }
            _ => Ok(offset),
        }
    }

    /// The entry of the L1 table in the file; unallocated past its end.
    pub fn l1_entry(&self, index: u64) -> L1Entry {
        self.l1.read().get(index as usize).unwrap_or(L1Entry::unallocated())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{layer, must_panic, must_violate};
    use futures_executor::block_on;

    #[test]
    fn an_image_has_the_l1_table_of_its_header() {
        let layer = layer();
        let opened = layer.as_qcow2().unwrap();
        let qcow2 = Qcow2 {
            opening: OpeningId::next(),
            header: opened.header.read().clone().into(),
            geometry: opened.geometry,
            opened_length: 0.into(),
            l1: L1Table::default().into(),
            memory: None,
        };
        let (name, storage) = (layer.name().to_owned(), Arc::clone(layer.storage()));
        let of = || Layer::qcow2(name, storage, None, 0, qcow2, None, Protection::None);
        must_panic(of, "the L1 table is as long as the header says");
    }

    #[test]
    fn a_raw_image_has_no_backing_file() {
        let layer = layer();
        let raw = Layer::raw(layer.name().to_owned(), Arc::clone(layer.storage()), 512);
        let edited = block_on(Box::pin(raw.edit_backing(Some(("base", "raw")))));
        must_violate(edited, "an image with a backing file is qcow2");
    }
}
