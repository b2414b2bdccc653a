//! Raw images whose format nobody named.
//!
//! Whoever can write to the first sector of such an image can make it begin as a qcow2 image, with a backing file of
//! their choice: opened once more, the disk would be another one, and show any file of the host. As in QEMU, such a
//! change is refused. The rule is here for everything that writes: a guest, a job, and the commands.

use crate::disk::Disk;
use isobath_image::range_lock::RangeGuard;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::writer::Writer;
use isobath_image::{DiskError, Result};
use isobath_qcow2::probe::{PROBE_BYTES, Probed, probe};
use isobath_storage::{Host, IoBuf, Storage};
use std::ops::Range;

impl<H: Host> Disk<H> {
    /// Makes sure that a raw image whose format was detected is still detected as raw after a change of `range`, which
    /// gets these bytes, or zeroes. The change is made while the returned guard exists, so that two changes of parts of
    /// the first sector cannot pass together. The caller is not inside the gate.
    ///
    /// # Errors
    /// [`DiskError::Disguise`] if it would be taken for anything else; if the storage fails.
    pub(crate) async fn keep_detected_raw<'a>(
        &self,
        writer: &'a Writer<H::File>,
        range: Range<u64>,
        bytes: Option<&IoBuf>,
    ) -> Result<Option<RangeGuard<'a>>> {
        let layer = writer.layer();
        let broken = sabotage::is(Sabotage::TrustedDetection);
        if range.start >= PROBE_BYTES as u64 || !layer.is_detected_raw() || broken {
            return Ok(None);
        }
        let guard = writer.ranges.lock(0..PROBE_BYTES as u64).await;
        let mut start = layer.storage().read_at(0, IoBuf::zeroed(PROBE_BYTES)).await?;
        let from = range.start as usize;
        let length = (range.end - range.start).min((PROBE_BYTES - from) as u64) as usize;
        let Some(changed) = start.get_mut(from..from + length) else { return Ok(Some(guard)) };
        match bytes.and_then(|bytes| bytes.get(..length)) {
            Some(bytes) => changed.copy_from_slice(bytes),
            None => changed.fill(0),
        }
        let becomes = match probe(&start, layer.name()) {
            Probed::Raw => return Ok(Some(guard)),
            Probed::Qcow2 => "a qcow2 image".to_owned(),
            Probed::Foreign(foreign) => foreign.to_string(),
        };
        Err(DiskError::Disguise { image: layer.name().to_owned(), becomes })
    }
}
