//! Opening and reopening images.

use crate::cache::{CacheMode, Discard};
use crate::compressed::Compressed;
use crate::failure::Failure;
use crate::host::{ImageHost, images};
use crate::image_name::{Image, reason};
use crate::options::printable;
use crate::temporary;
use isobath_disk::{Disk, ImageFormat, SnapshotChoice};
use isobath_storage::Locking;
use isobath_sync::AsyncMutexGuard;
use std::fmt::Display;
use std::sync::Arc;

/// How to open an image.
#[derive(Clone, Debug)]
pub(super) struct Opening {
    pub(super) image: Image,
    /// The image as it was typed; `None` if it was described by options.
    pub(super) shown: Option<String>,
    pub(super) read_only: bool,
    pub(super) cache: CacheMode,
    pub(super) discard: Discard,
    /// Set by `-i native`.
    pub(super) native: bool,
    pub(super) copy_on_read: bool,
    /// Writes go to a temporary overlay.
    pub(super) overlay: bool,
    pub(super) force_share: bool,
    /// The internal snapshot to read.
    pub(super) snapshot: Option<SnapshotChoice>,
}

/// An open image.
pub(super) struct Opened {
    pub(super) disk: Arc<Disk<ImageHost>>,
    /// Compresses writes, if its options say so.
    pub(super) compressed: Option<Compressed>,
    opening: Opening,
}

/// A failure to open the image that was typed as `shown`.
pub(super) fn cannot_open(shown: Option<&str>, reason: impl Display) -> Failure {
    match shown {
        Some(name) => Failure::new(format_args!("can't open device {}: {reason}", printable(name))),
        None => Failure::new(format_args!("can't open: {reason}")),
    }
}

impl Opening {
    /// Opens it in this cache mode, whatever the options for the image say.
    pub(super) fn set_cache(&mut self, cache: CacheMode) {
        self.cache = cache;
        self.image.forget_direct();
    }

    /// Opens it read-only or not, whatever the options for the image say.
    pub(super) fn set_read_only(&mut self, read_only: bool) {
        self.read_only = read_only;
        self.image.set_read_only(read_only);
    }

    /// Whether the page cache is bypassed.
    pub(super) fn is_direct(&self) -> bool {
        self.image.is_direct(self.cache.is_direct())
    }

    /// Opens the image.
    pub(super) async fn open(self) -> Result<Opened, Failure> {
        let Self { cache, .. } = &self;
        let mut image = self.image.clone();
        let compress = image.take_compress();
        let failed = |reason: String| cannot_open(self.shown.as_deref(), reason);
        let refused = |text: &str| Err(failed(text.to_owned()));
        if self.force_share && !self.read_only && !self.overlay {
            return refused("force-share=on can only be used with read-only images");
        }
        if self.native && !cache.is_direct() {
            return refused(
                "aio=native was specified, but it requires cache.direct=on, which was not \
                 specified.",
            );
        }
        if self.copy_on_read && self.read_only && !self.overlay {
            return refused("Can't use copy-on-read on read-only device");
        }
        let reading = self.read_only || self.overlay || self.snapshot.is_some();
        let locking = if self.force_share { Locking::Present } else { Locking::Exclusive };
        let options = if reading {
            image.options(cache.is_direct(), locking)
        } else {
            image.writable(cache.is_direct())?
        };
        let options = options.snapshot(self.snapshot.clone());
        let open = Disk::open(images().clone(), &image.path, &options).await;
        let mut disk = Arc::new(open.map_err(|error| failed(reason(&error)))?);
        image.fits(&disk).map_err(failed)?;
        let mut compressed = None;
        if compress && !reading {
            let of = Compressed::of(disk.layers().next().map(|layer| &**layer));
            compressed = Some(of.map_err(failed)?);
        }
        if self.overlay {
            let format = disk.layers().next().map_or(ImageFormat::Raw, |layer| layer.format());
            let size = disk.size();
            disk.close().await?;
            let overlay = temporary::overlay(&image, format, size, cache.is_direct(), locking);
            disk = Arc::new(overlay.await?.0);
        }
        Ok(Opened { disk, compressed, opening: self })
    }
}

impl Opened {
    /// Whether writes are refused.
    pub(super) fn is_read_only(&self) -> bool {
        self.opening.read_only || self.disk.is_read_only()
    }

    /// Whether each write is made durable before it completes.
    pub(super) fn writes_through(&self) -> bool {
        matches!(self.opening.cache, CacheMode::Writethrough | CacheMode::Directsync)
    }

    /// Whether a flush does nothing.
    pub(super) fn ignores_flushes(&self) -> bool {
        self.opening.cache == CacheMode::Unsafe
    }

    pub(super) fn ignores_discards(&self) -> bool {
        self.opening.discard == Discard::Ignore
    }

    pub(super) fn copies_on_read(&self) -> bool {
        self.opening.copy_on_read && !self.is_read_only()
    }

    /// Keeps compressed writes from running concurrently with another change.
    pub(super) async fn alone(&self) -> Option<AsyncMutexGuard<'_, ()>> {
        match &self.compressed {
            Some(compressed) => Some(compressed.alone().await),
            None => None,
        }
    }

    /// How it was opened.
    pub(super) fn opening(&self) -> &Opening {
        &self.opening
    }

    /// Applies `opening` to the image. If the files must be reopened for that and cannot be, they are opened as before;
    /// if that fails too, the image is closed.
    ///
    /// # Errors
    /// The reason, with the image as before, or `None` if it is closed.
    pub(super) async fn reopen(self, opening: Opening) -> Result<Self, (Failure, Option<Self>)> {
        let Self { disk, compressed, opening: before } = self;
        let same_files =
            opening.read_only == before.read_only || (opening.read_only && !disk.is_read_only());
        let same_cache = opening.is_direct() == before.is_direct();
        if before.overlay || (same_files && same_cache) {
            if let Err(error) = disk.flush().await {
                return Err((error.into(), Some(Self { disk, compressed, opening: before })));
            }
            return Ok(Self { disk, compressed, opening });
        }
        if let Err(error) = disk.close().await {
            return Err((error.into(), None));
        }
        drop(disk);
        match opening.open().await {
            Ok(opened) => Ok(opened),
            Err(error) => Err((error, before.open().await.ok())),
        }
    }
}
