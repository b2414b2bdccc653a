//! Block status: what is allocated where, from the map.

use crate::device::BlockStatus;
use crate::disk::Disk;
use isobath_chain::map::{Extent, Source};
use isobath_formats::{Run, RunKind};
use isobath_image::Result;
use isobath_storage::Host;

/// Guest bytes examined at once.
const WINDOW: u64 = 64 << 20;

impl<H: Host> Disk<H> {
    pub(crate) async fn status_of(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> Result<Vec<BlockStatus>> {
        let _pass = self.readers.gate.enter();
        let end = offset + length;
        let mut runs: Vec<BlockStatus> = Vec::new();
        let mut at = offset;
        while at < end {
            let untouched = self.untouched_until(at, end);
            if untouched > at {
                let extent = Extent { guest: at, length: untouched - at, source: Source::Absent };
                if push_run(&mut runs, self.run(&extent, 0).await?) > max_runs {
                    runs.pop();
                    return Ok(runs);
                }
                at = untouched;
                continue;
            }
            let next = end.min(at - at % WINDOW + WINDOW);
            for extent in self.extents(at..next).await? {
                let mut done = 0;
                while done < extent.length {
                    let run = self.run(&extent, done).await?;
                    done += run.length;
                    if push_run(&mut runs, run) > max_runs {
                        runs.pop();
                        return Ok(runs);
                    }
                }
            }
            at = next;
        }
        Ok(runs)
    }

    /// The run that begins `skip` bytes into an extent.
    async fn run(&self, extent: &Extent, skip: u64) -> Result<BlockStatus> {
        let length = extent.length - skip;
        let depth = |layer| u32::from(self.active_index().get() - crate::LayerIndex::get(layer));
        let none = BlockStatus {
            length,
            allocated: false,
            zero: true,
            compressed: false,
            depth: self.depth() as u32,
            host: None,
        };
        Ok(match extent.source {
            Source::Absent => none,
            Source::Zero(layer) => BlockStatus { allocated: true, depth: depth(layer), ..none },
            Source::Compressed { layer, .. } => BlockStatus {
                allocated: true,
                zero: false,
                compressed: true,
                depth: depth(layer),
                ..none
            },
            Source::Invalid(layer) => {
                BlockStatus { allocated: true, zero: false, depth: depth(layer), ..none }
            }
            Source::Data { layer: index, host, .. } => {
                let host = host + skip;
                let data = BlockStatus {
                    allocated: true,
                    zero: false,
                    depth: depth(index),
                    host: Some((depth(index), host)),
                    ..none
                };
                match self.chain.get(index) {
                    Some(layer) if layer.as_foreign().is_some() => {
                        let Run { length: known, kind } = layer.foreign_run(host, length).await?;
                        let none = BlockStatus { length: known, host: None, ..data };
                        match kind {
                            RunKind::Absent => BlockStatus {
                                allocated: false,
                                zero: true,
                                depth: self.depth() as u32,
                                ..none
                            },
                            RunKind::Zero => BlockStatus { zero: true, ..none },
                            RunKind::Data { file: 0, offset } => {
                                BlockStatus { host: Some((depth(index), offset)), ..none }
                            }
                            RunKind::Data { .. } => none,
                            RunKind::Deflated { .. } => BlockStatus { compressed: true, ..none },
                        }
                    }
                    // A raw layer has no tables, but its file's holes are known.
                    Some(layer) if layer.as_qcow2().is_none() => {
                        let found = layer.allocation(host).await?;
                        // The disk's last sector may be longer than the file.
                        let known = (host + found.length).next_multiple_of(512) - host;
                        let known = if found.length == 0 { length } else { known };
                        let zero = !found.data || found.length == 0;
                        BlockStatus { length: length.min(known), zero, ..data }
                    }
                    // As in QEMU, whose users would take the bytes there for the guest's.
                    Some(layer) if layer.is_encrypted() => BlockStatus { host: None, ..data },
                    _ => data,
                }
            }
        })
    }
}

/// Appends a run, or extends the last one if the new one continues it. Returns the number of runs.
fn push_run(runs: &mut Vec<BlockStatus>, run: BlockStatus) -> usize {
    if let Some(last) = runs.last_mut() {
        let adjacent = match (last.host, run.host) {
            (Some((layer, host)), Some((next_layer, next_host))) => {
                layer == next_layer && host + last.length == next_host
            }
            (None, None) => true,
            _ => false,
        };
        let same = BlockStatus { length: run.length, host: run.host, ..*last } == run;
        if adjacent && same {
            last.length += run.length;
            return runs.len();
        }
    }
    runs.push(run);
    runs.len()
}
