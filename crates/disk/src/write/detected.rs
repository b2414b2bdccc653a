//! Raw images whose format nobody named.
//!
//! Whoever can write to the first sector of such an image can make it begin as a qcow2 image, with a backing file of
//! their choice: opened once more, the disk would be another one, and show any file of the host. As in QEMU, such a
//! change is refused. The rule is here for everything that writes: a guest, a job, and the commands.

use crate::disk::Disk;
use isobath_image::range_lock::RangeGuard;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::writer::Writer;
use isobath_image::{DiskError, Result, always, invariant};
use isobath_qcow2::probe::{PROBE_BYTES, Probed, probe};
use isobath_storage::{Host, IoBuf, Storage};
use std::ops::Range;

impl<H: Host> Disk<H> {
    /// Makes sure that a raw image whose format was detected is still detected as raw after a change of `range`, which
    /// gets these bytes, or zeroes. The change is made while the returned guard exists, so that two changes of parts of
    /// the first sector cannot pass together. The caller is not inside the epoch.
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
        let change = range.end.checked_sub(range.start);
        let length = always(change, layer.name(), "a change does not end before it begins")?;
        let all = bytes.is_none_or(|bytes| bytes.len() as u64 == length);
        invariant(all, layer.name(), "a change has as many bytes as its range")?;
        let broken = sabotage::is(Sabotage::TrustedDetection);
        if range.start >= PROBE_BYTES as u64 || !layer.is_detected_raw() || broken {
            return Ok(None);
        }
        let guard = writer.ranges.lock(0..PROBE_BYTES as u64).await;
        let mut start = layer.storage().read_at(0, IoBuf::zeroed(PROBE_BYTES)).await?;
        let from = range.start as usize;
        let length = length.min((PROBE_BYTES - from) as u64) as usize;
        let changed = start.get_mut(from..from + length);
        let changed = always(changed, layer.name(), "the first sector is read as a whole")?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{must_violate, open};
    use futures_executor::block_on;
    use isobath_image::options::OpenOptions;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage_test::careless::{CarelessHost, Slip};
    use std::path::Path;

    #[test]
    fn what_is_judged_is_the_whole_change() {
        let host = MemoryHost::new();
        host.insert("raw", &[0; 4096]);
        let disk = open(&host, "raw");
        let writer = disk.writer().unwrap();
        let keep = |range, bytes: Option<&[u8]>| {
            let bytes = bytes.map(IoBuf::copy_of);
            block_on(disk.keep_detected_raw(writer, range, bytes.as_ref())).map(drop)
        };
        keep(0..4, Some(b"abcd")).unwrap();
        assert!(matches!(keep(0..8, Some(b"QFI\xfb\0\0\0\x03")), Err(DiskError::Disguise { .. })));
        let all = "a change has as many bytes as its range";
        must_violate(keep(0..4, Some(b"abc")), all);
        must_violate(keep(0..4, Some(b"abcde")), all);
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = 4..0;
        must_violate(keep(reversed, None), "a change does not end before it begins");
    }

    #[test]
    fn the_first_sector_is_judged_as_a_whole() {
        let inner = MemoryHost::new();
        inner.insert("raw", &[0; 4096]);
        let host = CarelessHost::around(inner);
        let options = OpenOptions::new().writable(true);
        let opened = Disk::open(host.clone(), Path::new("raw"), &options);
        let disk = block_on(Box::pin(opened)).unwrap();
        host.slips().set(Slip::ShortRead);
        let kept = block_on(disk.keep_detected_raw(disk.writer().unwrap(), 0..4, None));
        must_violate(kept.map(drop), "the first sector is read as a whole");
    }
}
