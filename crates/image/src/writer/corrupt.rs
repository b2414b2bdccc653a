//! An image whose tables turn out to be inconsistent while it is written to.
//!
//! As in QEMU, it accepts no more changes from then on, and its header says that it is corrupt (version 3), so that it
//! is not opened for writing before a check. Reads continue.

use super::Writer;
use crate::layer::Qcow2;
use crate::{DiskError, Result};
use isobath_qcow2::header::field;
use isobath_qcow2::{FormatErrorKind, IncompatibleFeatures};
use isobath_storage::{IoBuf, Storage};

/// See [`Writer::stop_on_panic`].
pub struct StopOnPanic<'a, S: Storage>(&'a Writer<S>);

impl<S: Storage> Drop for StopOnPanic<'_, S> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "a request panicked, see the log".to_owned();
            self.0.group.poison("violated invariant", reason, false);
        }
    }
}

impl<S: Storage> Writer<S> {
    /// Passes on the result of a change. If the change found the tables to be inconsistent, it is the last one, and the
    /// image is marked.
    pub async fn or_mark_corrupt<T>(&self, done: Result<T>) -> Result<T> {
        if let Err(error) = &done {
            Box::pin(self.mark_corrupt(error)).await;
        }
        done
    }

    /// Marks the image if `error` or an earlier one says that its tables are inconsistent.
    async fn mark_corrupt(&self, error: &DiskError) {
        self.stop_on_internal(error);
        let Some(qcow2) = &self.qcow2 else { return };
        let invalid = matches!(error, DiskError::Format { image, source }
            if image == self.layer.name() && source.kind() == FormatErrorKind::Invalid);
        let image = qcow2.metadata.layer.qcow2();
        let known = image.header.read().incompatible.contains(IncompatibleFeatures::CORRUPT);
        if known || (!invalid && !qcow2.metadata.alloc.is_contradicted()) {
            return;
        }
        let marked = self.group.end(error, || self.set_corrupt_bit(image, error)).await;
        if let Err(failure) = marked {
            let image = isobath_storage::shown(self.layer.name());
            tracing::error!(%image, error = %failure, "cannot mark the image as corrupt");
        }
    }

    /// Accepts no more changes if `error` is [`DiskError::Internal`]: the writer's memory cannot be trusted then. The
    /// image is as after a crash.
    pub fn stop_on_internal(&self, error: &DiskError) {
        if let DiskError::Internal { .. } = error {
            self.group.poison("violated invariant", error.to_string(), false);
        }
    }

    /// Accepts no more changes if the thread panics before the returned guard is dropped.
    #[must_use]
    pub fn stop_on_panic(&self) -> StopOnPanic<'_, S> {
        StopOnPanic(self)
    }

    /// Sets the corrupt bit, durably, unless it is set or the version has none.
    async fn set_corrupt_bit(&self, qcow2: &Qcow2, error: &DiskError) -> Result<()> {
        let (version, bits) = {
            let header = qcow2.header.read();
            (header.version, header.incompatible)
        };
        if version < 3 || bits.contains(IncompatibleFeatures::CORRUPT) {
            return Ok(());
        }
        tracing::error!(%error, "the image is marked as corrupt and accepts no more writes");
        let bits = bits.with(IncompatibleFeatures::CORRUPT);
        let bytes = IoBuf::copy_of(&bits.bits().to_be_bytes());
        let storage = self.layer.storage();
        storage.write_at(field::INCOMPATIBLE_FEATURES as u64, bytes).await?;
        storage.flush().await?;
        qcow2.header.write().incompatible = bits;
        Ok(())
    }
}
