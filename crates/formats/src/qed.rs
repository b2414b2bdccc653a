//! QED, QEMU's enhanced disk, without backing file.

use crate::error::Result;
use crate::files::{File, Files};
use crate::le::{le32, le64};
use crate::run::Run;
use crate::tables::{Block, Entries, Table};
use isobath_storage::Storage;

const BACKING_FILE: u64 = 1;
const NEED_CHECK: u64 = 2;
const BACKING_FORMAT_NO_PROBE: u64 = 4;

pub(crate) struct Qed {
    cluster: u64,
    /// Entries in a table.
    pub(crate) entries: u64,
    pub(crate) l1: Table,
    /// Bytes of the header.
    pub(crate) header: u64,
    /// The end of the last whole cluster in the file.
    pub(crate) end: u64,
    features: u64,
    /// Features that a writer clears if it does not know them; none is known.
    autoclear: u64,
}

/// Reads the header. Returns the tables and the disk's size in bytes.
pub(crate) async fn open<S: Storage>(file: &File<S>) -> Result<(Qed, u64)> {
    let header = file.header("QED header", 0, 64).await?;
    let blame = file.blame();
    if !header.starts_with(b"QED\0") {
        let value = format!("'{}'", header[..4].escape_ascii());
        return Err(blame.invalid("magic", value, "this is not a QED image"));
    }
    let cluster = u64::from(le32(&header, 4));
    if !cluster.is_power_of_two() || !(4096..=64 << 20).contains(&cluster) {
        let reason = "it must be a power of two from 4 KiB to 64 MiB";
        return Err(blame.invalid("cluster_size", cluster, reason));
    }
    let table = u64::from(le32(&header, 8));
    if !table.is_power_of_two() || table > 16 {
        return Err(blame.invalid("table_size", table, "it must be a power of two up to 16"));
    }
    let header_clusters = u64::from(le32(&header, 12));
    if header_clusters == 0 || header_clusters > file.length / cluster {
        let reason = "the header must have at least one cluster and be in the file";
        return Err(blame.invalid("header_size", header_clusters, reason));
    }
    let features = le64(&header, 16);
    if features & BACKING_FILE != 0 {
        let reason = "QED images with a backing file are not supported; make it independent with \
                      'qemu-img rebase -b \"\"', or convert the chain with qemu-img";
        return Err(blame.unsupported("features", format!("{features:#x}"), reason));
    }
    if features & !(BACKING_FILE | NEED_CHECK | BACKING_FORMAT_NO_PROBE) != 0 {
        let reason = "it has unknown features";
        return Err(blame.unsupported("features", format!("{features:#x}"), reason));
    }
    let entries = table * cluster / 8;
    let size = le64(&header, 48);
    let most = u128::from(entries) * u128::from(entries) * u128::from(cluster);
    if !size.is_multiple_of(512) || u128::from(size) > most || i64::try_from(size).is_err() {
        let reason = format!("it must be a multiple of 512 of at most {most}");
        return Err(blame.invalid("image_size", size, reason));
    }
    let end = file.length - file.length % cluster;
    let l1 = le64(&header, 40);
    let qed = Qed {
        cluster,
        entries,
        l1: Table { file: 0, offset: l1, entries: Entries::Le64, block: cluster },
        header: header_clusters * cluster,
        end,
        features,
        autoclear: le64(&header, 32),
    };
    if !qed.holds(l1, table * cluster) {
        let reason = format!(
            "it must be a multiple of the cluster size with its table in the file ({} bytes)",
            file.length
        );
        return Err(blame.invalid("l1_table_offset", l1, reason));
    }
    Ok((qed, size))
}

impl Qed {
    /// Bytes in a cluster.
    pub(crate) const fn cluster(&self) -> u64 {
        self.cluster
    }

    /// Whether the image was not closed.
    pub(crate) const fn is_dirty(&self) -> bool {
        self.features & NEED_CHECK != 0
    }

    /// Whether the image has features that are to be cleared before anything is changed.
    pub(crate) const fn is_to_be_cleared(&self) -> bool {
        self.autoclear != 0
    }

    /// Where the header has the features.
    pub(crate) const FEATURES: u64 = 16;

    /// Where it has those that are cleared.
    pub(crate) const AUTOCLEAR_FEATURES: u64 = 32;

    /// The features of the image once it is closed.
    pub(crate) const fn features_when_closed(&self) -> u64 {
        self.features & !NEED_CHECK
    }

    /// Clusters in a table.
    pub(crate) const fn table_clusters(&self) -> u64 {
        self.entries * 8 / self.cluster
    }

    /// Whether whole clusters may begin at this offset.
    pub(crate) fn holds(&self, offset: u64, length: u64) -> bool {
        offset.is_multiple_of(self.cluster)
            && offset >= self.header
            && offset.checked_add(length).is_some_and(|end| end <= self.end)
    }

    pub(crate) async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        at: u64,
        length: u64,
    ) -> Result<Run> {
        let span = self.entries * self.cluster;
        let file = files.file(0)?;
        let wrong = |field: String, value: u64| {
            let reason = format!(
                "it must be a multiple of the cluster size, after the header and in the file ({} bytes)",
                file.length
            );
            Err(file.blame().invalid(&field, format!("{value:#x}"), reason))
        };
        let table_bytes = self.entries * 8;
        let decode = |index: u64, entry: u64| match entry {
            0 => Ok(Block::Absent),
            _ if self.holds(entry, table_bytes) => Ok(Block::At(entry)),
            _ => wrong(format!("L1 entry {index}"), entry),
        };
        let left = (at % span + length).div_ceil(span);
        let offset = match self.l1.run(files, at / span, left, decode).await? {
            (Block::At(offset), _) => offset,
            (block, count) => return Ok(Run::of_blocks(0, block, count, span, at, length)),
        };
        let within = at % span;
        let length = length.min(span - within);
        let l2 = Table { offset, ..self.l1 };
        let decode = |index: u64, entry: u64| match entry {
            0 => Ok(Block::Absent),
            1 => Ok(Block::Zero),
            _ if self.holds(entry, self.cluster) => Ok(Block::At(entry)),
            _ => wrong(format!("L2 entry {index} of the table at {offset:#x}"), entry),
        };
        let limit = (at % self.cluster + length).div_ceil(self.cluster);
        let (block, count) = l2.run(files, within / self.cluster, limit, decode).await?;
        Ok(Run::of_blocks(0, block, count, self.cluster, at, length))
    }
}
