//! Block status: what is allocated where, from the map.

use crate::device::BlockStatus;
use crate::disk::Disk;
use crate::parts::Parts;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::resolve::explain_invalid;
use isobath_chain::map::{Extent, Source};
use isobath_formats::{Run, RunKind};
use isobath_image::{Result, always};
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
        let _pass = self.readers.epoch.enter();
        let end = offset + length;
        let mut runs: Vec<BlockStatus> = Vec::new();
        let mut covered = Parts::of(offset..end, self.name());
        while covered.next() < end {
            let at = covered.next();
            let untouched = self.untouched_until(at, end);
            if untouched > at {
                let extent = Extent { guest: at, length: untouched - at, source: Source::Absent };
                let run = self.run_of(&extent, 0).await?;
                covered.add(at, run.length)?;
                if push_run(&mut runs, run) > max_runs {
                    runs.pop();
                    return Ok(runs);
                }
                continue;
            }
            let next = end.min(at - at % WINDOW + WINDOW);
            for extent in self.extents(at..next).await? {
                if let Source::Invalid(layer) = extent.source {
                    // What comes before it is known: only who asks for this part gets the error.
                    if !runs.is_empty() {
                        return Ok(runs);
                    }
                    return Err(Box::pin(explain_invalid(self.layer(layer)?, extent.guest)).await);
                }
                let mut done = 0;
                while done < extent.length {
                    let run = self.run_of(&extent, done).await?;
                    covered.add(extent.guest + done, run.length)?;
                    done += run.length;
                    if push_run(&mut runs, run) > max_runs {
                        runs.pop();
                        return Ok(runs);
                    }
                }
            }
        }
        covered.end()?;
        Ok(runs)
    }

    /// The place of a layer as users count them: 0 is the active one.
    fn depth_of(&self, layer: LayerIndex) -> Result<u32> {
        let depth = self.active_index().get().checked_sub(layer.get());
        always(depth, self.name(), "a run is of a layer of the chain").map(u32::from)
    }

    /// The run that begins `skip` bytes into an extent.
    async fn run_of(&self, extent: &Extent, skip: u64) -> Result<BlockStatus> {
        let length = extent.length - skip;
        let depth = match extent.source.layer() {
            Some(layer) => self.depth_of(layer)?,
            None => self.depth() as u32,
        };
        let none = BlockStatus {
            length,
            allocated: false,
            zero: true,
            compressed: false,
            depth,
            host: None,
        };
        Ok(match extent.source {
            Source::Absent => none,
            Source::Zero(_) => BlockStatus { allocated: true, ..none },
            Source::Compressed { .. } => {
                BlockStatus { allocated: true, zero: false, compressed: true, ..none }
            }
            Source::Invalid(layer) => {
                return Err(Box::pin(explain_invalid(self.layer(layer)?, extent.guest)).await);
            }
            Source::Data { layer: index, host, .. } => {
                let host = host + skip;
                let host_at = Some((depth, host));
                let data = BlockStatus { allocated: true, zero: false, host: host_at, ..none };
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
                                BlockStatus { host: Some((depth, offset)), ..none }
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
                        let host = data.host.filter(|_| !layer.is_encrypted());
                        BlockStatus { length: length.min(known), zero, host, ..data }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{disk, must_violate};
    use futures_executor::block_on;

    #[test]
    fn a_run_is_the_rest_of_its_extent_and_of_a_layer() {
        let disk = disk();
        let run = |source, skip| {
            let extent = Extent { guest: 0, length: 1024, source };
            block_on(disk.run_of(&extent, skip))
        };
        assert_eq!(run(Source::Absent, 512).unwrap().length, 512);
        let stray = Source::Zero(LayerIndex::new(1));
        must_violate(run(stray, 0), "a run is of a layer of the chain");
    }
}
