//! The state of a virtual machine, which a qcow2 image keeps behind the end of its disk, where no guest sees it, until
//! a snapshot takes it over.

use crate::disk::Disk;
use isobath_chain::map::Map;
use isobath_image::layer::{Layer, Qcow2};
use isobath_image::{DiskError, Result};
use isobath_qcow2::GuestOffset;
use isobath_storage::{Host, IoBuf, Storage};
use isobath_sync::order::in_order;
use std::ops::Range;

/// Shows more of the active layer than the disk, until it is dropped. The caller is the only one who changes what is
/// shown.
struct Shown<'a, S: Storage> {
    layer: &'a Layer<S>,
    map: &'a Map,
}

impl<'a, S: Storage> Shown<'a, S> {
    fn until(end: u64, layer: &'a Layer<S>, map: &'a Map) -> Self {
        layer.set_visible(end);
        // It may say of the part behind the disk that there is nothing.
        map.clear();
        Self { layer, map }
    }
}

impl<S: Storage> Drop for Shown<'_, S> {
    fn drop(&mut self) {
        self.layer.set_visible(self.layer.size());
        self.map.clear();
    }
}

impl<H: Host> Disk<H> {
    /// Reads `buf.len()` bytes of the virtual machine's state in the active image, at `offset` within that, and returns
    /// the buffer. What was never written is zeroes.
    ///
    /// # Errors
    /// As for [`read`](Self::read); or if the image [has none](Self::write_vm_state).
    pub async fn read_vm_state(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        in_order(async {
            let alone = self.writer.as_ref().map_or(&self.showing, |writer| &writer.resizing);
            let _alone = alone.lock().await;
            let image = self.with_vm_state()?;
            let range = self.vm_state_range(image, offset, buf.len() as u64)?;
            let tables = (image.l1.read().len() as u64) * image.geometry.l1_entry_span();
            let there = range.end.min(tables).saturating_sub(range.start);
            if there == 0 {
                buf.fill(0);
                return Ok(buf);
            }
            let first = buf.split_to(there as usize);
            buf.fill(0);
            let shown = Shown::until(range.start + there, self.chain.active(), &self.map);
            let read = self.read_range(range.start, first).await;
            drop(shown);
            let mut read = read.map_err(|error| self.stop_on_internal(error))?;
            read.unsplit(buf);
            Ok(read)
        })
        .await
    }

    /// Writes `buf` to the virtual machine's state in the active image, at `offset` within that, durably, and returns
    /// the buffer. A snapshot of the image takes the state with it; a disk that grows loses it.
    ///
    /// # Errors
    /// As for [`write`](Self::write); or if the image has none, because it is not qcow2 or its data is in an external
    /// file, or its tables cannot describe so much.
    pub async fn write_vm_state(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let writer = self.writer()?;
        let _stop = self.stop_on_panic();
        in_order(async {
            let _alone = writer.resizing.lock().await;
            let image = self.with_vm_state()?;
            let range = self.vm_state_range(image, offset, buf.len() as u64)?;
            if buf.is_empty() {
                return Ok(buf);
            }
            // What a journal or a restart log has of a disk ends with it.
            let change = async {
                let entries = image.geometry.l1_size_for(range.end);
                writer.grow_l1(&self.readers, entries).await?;
                let shown = Shown::until(range.end, self.chain.active(), &self.map);
                let buf = self.write_range(range.start, buf).await;
                drop(shown);
                writer.commit(&self.readers).await?;
                buf
            };
            let changed = Box::pin(writer.without_journal(&self.readers, change)).await;
            self.or_mark_corrupt(changed).await
        })
        .await
    }

    /// The active image, if it can hold the state of a virtual machine.
    fn with_vm_state(&self) -> Result<&Qcow2> {
        let image = self.active_qcow2().filter(|image| !image.geometry.has_data_file());
        image.ok_or_else(|| {
            let what = "only a qcow2 image without an external data file has a machine's state";
            DiskError::Unsupported(what.into())
        })
    }

    /// Where a range of the state lies in the image's tables.
    fn vm_state_range(&self, image: &Qcow2, offset: u64, length: u64) -> Result<Range<u64>> {
        let geometry = &image.geometry;
        let start = geometry.vm_state_start(self.size()).map_or(u64::MAX, GuestOffset::get);
        let most = geometry.max_disk_size();
        let start = start.checked_add(offset);
        let range = start.and_then(|start| Some(start..start.checked_add(length)?));
        range.filter(|range| range.end <= most).ok_or_else(|| {
            self.refused(format!(
                "a machine's state of {length} bytes at {offset} is too large for clusters of {} bytes, which allow \
                 {most} with the disk",
                geometry.cluster_size()
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, SIZE, disk, disk_of};
    use futures_executor::block_on;
    use isobath_chain::create::{NewDisk, Preallocation, create};
    use isobath_image::check::{CheckEvent, CheckOptions, CheckReport};
    use isobath_image::durability::MetadataMode;
    use isobath_image::offline::check;
    use isobath_image::options::OpenOptions;
    use isobath_storage::memory::MemoryHost;
    use std::path::Path;

    /// Bytes that one L1 entry describes.
    const SPAN: u64 = 512 << 20;

    fn write(disk: &Disk<MemoryHost>, offset: u64, byte: u8, length: usize) {
        let buf = IoBuf::copy_of(&vec![byte; length]);
        let _ = block_on(Box::pin(disk.write_vm_state(offset, buf))).unwrap();
    }

    fn read(disk: &Disk<MemoryHost>, offset: u64, length: usize) -> Vec<u8> {
        let dirty = IoBuf::copy_of(&vec![9; length]);
        block_on(Box::pin(disk.read_vm_state(offset, dirty))).unwrap().to_vec()
    }

    #[test]
    fn a_state_is_read_as_it_was_written_and_no_guest_sees_it() {
        let disk = disk();
        assert_eq!(read(&disk, 0, 1000), [0; 1000]);
        // Across two tables, parts of clusters.
        write(&disk, SPAN - 700, 1, 1400);
        write(&disk, 512, 2, 512);
        assert_eq!(read(&disk, SPAN - 701, 1402), [&[0][..], &[1; 1400], &[0]].concat());
        assert_eq!(read(&disk, 0, 2048), [[0; 512], [2; 512], [0; 512], [0; 512]].concat());
        // Past all tables, in part and wholly.
        assert_eq!(read(&disk, 2 * SPAN - SIZE, 2 * SIZE as usize), vec![0; 2 * SIZE as usize]);
        assert_eq!(read(&disk, 9 * SPAN, 7), [0; 7]);
        assert_eq!(disk.size(), SIZE);
        assert!(block_on(disk.read(SIZE - 512, IoBuf::zeroed(1024))).is_err());
        assert!(block_on(Box::pin(disk.write(SIZE, IoBuf::zeroed(512)))).is_err());
        assert_eq!(
            block_on(disk.read(0, IoBuf::zeroed(SIZE as usize))).unwrap()[..],
            vec![0; SIZE as usize]
        );
        // Nor when the disk grows over it.
        let larger = 3 * SPAN;
        block_on(Box::pin(disk.resize(larger, Preallocation::Off, false))).unwrap();
        let seen = block_on(disk.read(2 * SPAN - 4096, IoBuf::zeroed(8192))).unwrap();
        assert_eq!(seen[..], [0; 8192]);
        assert_eq!(read(&disk, 512, 512), [0; 512]);
    }

    #[test]
    fn a_state_survives_a_process_that_does_not_close_its_image() {
        for mode in MetadataMode::ALL {
            let host = MemoryHost::new();
            let name = Path::new("disk");
            block_on(Box::pin(create(&host, name, &NewDisk::new(SIZE)))).unwrap();
            let options = OpenOptions::new().writable(true).metadata(mode);
            let disk = block_on(Box::pin(Disk::open(host.clone(), name, &options))).unwrap();
            let guest = |at: u64, byte| {
                let buf = IoBuf::copy_of(&[byte; 4096]);
                let _ = block_on(Box::pin(disk.write(at, buf))).unwrap();
                block_on(Box::pin(disk.flush())).unwrap();
            };
            guest(0, 1);
            write(&disk, 3 * CLUSTER, 2, 4096);
            guest(CLUSTER, 3);
            write(&disk, SPAN, 4, 4096);
            drop(disk);
            let disk = block_on(Box::pin(Disk::open(host.clone(), name, &options))).unwrap();
            assert_eq!(read(&disk, 3 * CLUSTER, 4096), [2; 4096], "{mode:?}");
            assert_eq!(read(&disk, SPAN, 4096), [4; 4096], "{mode:?}");
            for (at, byte) in [(0, 1), (CLUSTER, 3)] {
                let there = block_on(disk.read(at, IoBuf::zeroed(4096))).unwrap();
                assert_eq!(there[..], [byte; 4096], "{mode:?}");
            }
            block_on(Box::pin(disk.close())).unwrap();
            drop(disk);
            let (options, mut events) = (CheckOptions::default(), |_: CheckEvent<'_>| {});
            let found = block_on(check(&host, name, &options, &mut events));
            let CheckReport { corruptions, leaks, check_errors, .. } = found.unwrap();
            assert_eq!((corruptions, leaks, check_errors), (0, 0, 0), "{mode:?}");
        }
    }

    #[test]
    fn what_has_no_room_for_a_state_refuses_it() {
        let with_file = disk_of(&NewDisk::new(SIZE).data_file("data"));
        let write = |disk: &Disk<MemoryHost>, at| {
            block_on(Box::pin(disk.write_vm_state(at, IoBuf::zeroed(512)))).unwrap_err()
        };
        assert_eq!(write(&with_file, 0).errno(), libc::ENOTSUP);
        let disk = disk();
        for at in [u64::MAX, u64::MAX - SPAN, 1 << 62] {
            let error = write(&disk, at).to_string();
            assert!(error.contains("too large for clusters of 65536 bytes"), "{error}");
        }
        assert_eq!(disk.active_qcow2().unwrap().l1.read().len(), 1);
    }
}
