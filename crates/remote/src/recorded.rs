//! What is recorded of a layer in the heads, and whether it is the layer's.

use crate::digest::Digest;
use crate::heads::{Head, MOST_HEADER, MOST_L1};
use crate::keys;
use crate::manifest::Format;
use isobath_qcow2::Header;
use std::ops::Range;

/// What is recorded of a file that begins with these bytes, all of it or as much as the longest header cluster, whose
/// first cluster has this length: that cluster, or as much as is recorded at most if it is shorter, without the zeroes
/// at the end, unless that is too long.
pub(crate) fn header(mut start: Vec<u8>, cluster: usize) -> Vec<u8> {
    start.truncate(cluster.max(MOST_HEADER));
    let used = start.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    start.truncate(if used > MOST_HEADER { 0 } else { used });
    // Those of all layers are held, and each was as long as a cluster may be.
    start.shrink_to_fit();
    start
}

/// Where the L1 table is in a file of so many bytes, if it may be recorded.
pub(crate) fn l1(header: &Header, length: u64) -> Option<Range<u64>> {
    let (start, bytes) = (header.l1_table_offset.get(), u64::from(header.l1_size) * 8);
    let end = start.checked_add(bytes).filter(|end| *end <= length)?;
    (bytes <= MOST_L1 as u64).then_some(start..end)
}

/// Compares what is recorded of a layer with its file.
pub(crate) struct Comparison<'h> {
    head: &'h Head,
    /// Where the file has the L1 table that is recorded.
    l1: Range<u64>,
    differs: bool,
}

impl<'h> Comparison<'h> {
    /// With a file of so many bytes that begins with these: all of it, or all of the longest header cluster.
    pub(crate) fn new(head: &'h Head, format: Format, length: u64, start: &[u8]) -> Self {
        let parsed = || {
            let start = start.get(..start.len().min(Header::MAX_LENGTH))?;
            let cluster = Header::probe_length(start).ok()?;
            let parsed = Header::parse(start.get(..cluster.min(start.len()))?).ok()?;
            Some((header(start.to_vec(), cluster), l1(&parsed, length)))
        };
        let parsed = (format == Format::Qcow2).then(parsed).flatten();
        let (recorded, l1) = parsed.unwrap_or_default();
        // What has no bytes is not recorded.
        let l1 = l1.filter(|_| !head.l1.is_empty()).unwrap_or_default();
        let differs = (!head.header.is_empty() && head.header != recorded)
            || l1.end - l1.start != head.l1.len() as u64;
        Self { head, l1, differs }
    }

    /// The bytes of the file that must be shown besides.
    pub(crate) fn l1(&self) -> Range<u64> {
        self.l1.clone()
    }

    /// Shows it the bytes of the file from `at` on.
    pub(crate) fn show(&mut self, at: u64, bytes: &[u8]) {
        let common = self.l1.start.max(at)..self.l1.end.min(at + bytes.len() as u64);
        if self.differs || common.is_empty() {
            return;
        }
        let part = |bytes: &[u8], first: u64| -> Option<Vec<u8>> {
            let range = (common.start - first) as usize..(common.end - first) as usize;
            bytes.get(range).map(<[u8]>::to_vec)
        };
        self.differs = part(&self.head.l1, self.l1.start) != part(bytes, at);
    }

    /// Whether the file has been found to have something else than is recorded.
    pub(crate) fn differs(&self) -> bool {
        self.differs
    }
}

/// What to say of heads that have something else than this layer.
pub(crate) fn differ(layer: &Digest) -> String {
    format!(
        "the heads have another header or L1 table than the layer '{}': push the chain again",
        keys::layer(layer)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_testkit::qemu;
    use std::process::Command;

    #[test]
    fn a_head_is_compared_with_its_layer_byte_for_byte_in_whatever_pieces_that_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.qcow2");
        let mut create = Command::new(qemu::program("qemu-img"));
        create.args(["create", "-q", "-f", "qcow2", "-o", "refcount_bits=16"]);
        let _ = qemu::run(create.arg(&path).arg("4G")).ok();
        let file = std::fs::read(&path).unwrap();
        let start = &file[..file.len().min(Header::MAX_LENGTH)];
        let cluster = Header::probe_length(start).unwrap();
        let place = l1(&Header::parse(&start[..cluster]).unwrap(), file.len() as u64).unwrap();
        let table = file[place.start as usize..place.end as usize].to_vec();
        assert_eq!(table.len(), 64);
        let whole = Head { header: header(start.to_vec(), cluster), l1: table, table: Vec::new() };
        let differs = |head: &Head, format, piece: usize| {
            let mut compared = Comparison::new(head, format, file.len() as u64, start);
            for (number, bytes) in file.chunks(piece).enumerate() {
                compared.show((number * piece) as u64, bytes);
            }
            compared.differs()
        };
        let around = place.start as usize + 5;
        for piece in [file.len(), around, around + 3, 4096, 7] {
            assert!(!differs(&whole, Format::Qcow2, piece));
            for at in 0..whole.l1.len() {
                let mut changed = whole.clone();
                changed.l1[at] ^= 1;
                assert!(differs(&changed, Format::Qcow2, piece), "{piece} {at}");
            }
        }
        let piece = file.len();
        for at in 0..whole.header.len() {
            let mut changed = whole.clone();
            changed.header[at] ^= 1;
            assert!(differs(&changed, Format::Qcow2, piece), "{at}");
        }
        let [mut shorter, mut longer] = [whole.clone(), whole.clone()];
        shorter.l1.truncate(56);
        longer.l1.extend([0; 8]);
        assert!(differs(&shorter, Format::Qcow2, piece) && differs(&longer, Format::Qcow2, piece));
        // What is not recorded differs from nothing; of a raw layer nothing is.
        assert!(!differs(&Head::default(), Format::Qcow2, piece));
        assert!(!differs(&Head::default(), Format::Raw, piece));
        assert!(differs(&whole, Format::Raw, piece));
    }
}
