//! One layer's file: header, refcount table, refcount blocks, L1 table, L2 tables and guest clusters, in this order.

use crate::data::{Data, Filler};
use crate::error::GenerateError;
use crate::output::Output;
use crate::shape::{Chain, Progress};
use isobath_qcow2::geometry::{HOST_OFFSET_LIMIT, MAX_REFCOUNT_TABLE_BYTES};
use isobath_qcow2::{
    ClusterIndex, FormatError, Geometry, Header, HostOffset, L1Entry, L2Entry, NewImage, ParseMode,
    RefcountOrder, RefcountTableEntry,
};
use std::fs::File;
use std::io;

/// The number of clusters in each part of the file.
struct Layout {
    geometry: Geometry,
    refcount_table: u64,
    refcount_blocks: u64,
    l1: u64,
    l2: u64,
    data: u64,
}

impl Layout {
    fn new(
        geometry: Geometry,
        chain: &Chain,
        layer: u32,
        clusters: &[ClusterIndex],
    ) -> Result<Self, GenerateError> {
        let l1 = geometry.clusters_for(geometry.l1_size_for(chain.size) * 8);
        let l2 =
            clusters.chunk_by(|a, b| table(geometry, *a) == table(geometry, *b)).count() as u64;
        let data = clusters.len() as u64;
        let mut layout = Self { geometry, refcount_table: 1, refcount_blocks: 1, l1, l2, data };
        // The refcounts count themselves too, so grow them until they suffice.
        loop {
            let blocks = layout.total().div_ceil(geometry.refcount_block_entries());
            let table = geometry.clusters_for(blocks * 8);
            if blocks <= layout.refcount_blocks && table <= layout.refcount_table {
                break;
            }
            layout.refcount_blocks = layout.refcount_blocks.max(blocks);
            layout.refcount_table = layout.refcount_table.max(table);
        }
        if layout.total() > HOST_OFFSET_LIMIT >> geometry.cluster_bits()
            || layout.refcount_table > MAX_REFCOUNT_TABLE_BYTES >> geometry.cluster_bits()
        {
            return Err(GenerateError::LayerTooLarge { layer, clusters: layout.total() });
        }
        Ok(layout)
    }

    fn total(&self) -> u64 {
        self.first_data() + self.data
    }

    fn first_block(&self) -> u64 {
        1 + self.refcount_table
    }

    fn first_l1(&self) -> u64 {
        self.first_block() + self.refcount_blocks
    }

    fn first_l2(&self) -> u64 {
        self.first_l1() + self.l1
    }

    fn first_data(&self) -> u64 {
        self.first_l2() + self.l2
    }

    fn at(&self, cluster: u64) -> HostOffset {
        HostOffset::new(cluster << self.geometry.cluster_bits())
    }

    /// The entries in cluster `number` of a table with `count` entries: each one's index in that cluster, and its
    /// number.
    fn entries(&self, number: u64, count: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let each = self.geometry.cluster_size() / 8;
        let first = number * each;
        (0..).zip(first..count.min(first + each))
    }
}

/// The L2 table that maps a cluster.
fn table(geometry: Geometry, cluster: ClusterIndex) -> u64 {
    geometry.table_position(cluster).0
}

/// Writes the image of one layer to an empty file.
pub(crate) fn write(
    chain: &Chain,
    layer: u32,
    backing: Option<String>,
    clusters: &[ClusterIndex],
    file: &File,
    buffer: &mut Vec<u8>,
    progress: &Progress,
) -> Result<(), Failed> {
    let geometry = chain.geometry()?;
    let layout = Layout::new(geometry, chain, layer, clusters)?;
    let header = header(chain, &layout, backing)?;
    let mut output = Output::new(file, geometry.cluster_size(), buffer);
    let first = header.encode()?;
    output.cluster()?[..first.len()].copy_from_slice(&first);
    for number in 0..layout.refcount_table {
        let place = output.cluster()?;
        for (index, block) in layout.entries(number, layout.refcount_blocks) {
            let offset = layout.at(layout.first_block() + block);
            put(RefcountTableEntry::new(offset, &geometry)?.write(place, index));
        }
    }
    let per_block = geometry.refcount_block_entries();
    for block in 0..layout.refcount_blocks {
        let used = layout.total().saturating_sub(block * per_block).min(per_block);
        let place = output.cluster()?;
        for index in 0..used as usize {
            RefcountOrder::BITS_16.write(place, index, 1)?;
        }
    }
    let mut tables = clusters.chunk_by(|a, b| table(geometry, *a) == table(geometry, *b));
    let mut next = (layout.first_l2()..).zip(tables.clone()).peekable();
    for number in 0..layout.l1 {
        let place = output.cluster()?;
        let each = geometry.cluster_size() / 8;
        while let Some((host, of)) = next.next_if(|(_, of)| table(geometry, of[0]) / each == number)
        {
            let index = table(geometry, of[0]) % each;
            let entry = L1Entry::new(layout.at(host), true, &geometry)?;
            put(entry.write(place, index as usize));
        }
    }
    let mut host = layout.first_data();
    for of in tables.by_ref() {
        let place = output.cluster()?;
        for cluster in of {
            let (_, index) = geometry.table_position(*cluster);
            put(L2Entry::data(layout.at(host), true).write(place, index, &geometry));
            host += 1;
        }
    }
    let mut filler = Filler::new(chain.data.clone(), chain.seed, layer);
    for some in clusters.chunks(64) {
        if progress.is_stopped() {
            return Err(GenerateError::Stopped.into());
        }
        if matches!(chain.data, Data::Zero) {
            output.skip(some.len() as u64)?;
        } else {
            for cluster in some {
                let place = output.cluster()?;
                let start = geometry.cluster_start(*cluster).unwrap_or_default();
                let inside = chain.size.saturating_sub(start.get()).min(place.len() as u64);
                filler
                    .fill(start, &mut place[..inside as usize])
                    .map_err(|error| Failed::Other(GenerateError::Source(error)))?;
            }
        }
        progress.advance(some.len() as u64);
    }
    Ok(output.end()?)
}

fn header(chain: &Chain, layout: &Layout, backing: Option<String>) -> Result<Header, FormatError> {
    let empty = NewImage {
        cluster_bits: chain.cluster_bits,
        backing_format: backing.is_some().then(|| "qcow2".to_owned()),
        backing_file: backing,
        ..NewImage::new(chain.size)
    };
    let mut header = empty.plan()?.header().clone();
    header.refcount_table_clusters = layout.refcount_table as u32;
    header.l1_table_offset = layout.at(layout.first_l1());
    header.validate(ParseMode::Open)?;
    Ok(header)
}

/// Checks that an entry was written; the layout has room for it.
fn put(done: Option<()>) {
    debug_assert!(done.is_some(), "the entry is inside its table");
}

/// Why a layer was not written.
pub(crate) enum Failed {
    /// The file could not be written.
    Io(io::Error),
    /// Anything else.
    Other(GenerateError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<FormatError> for Failed {
    fn from(error: FormatError) -> Self {
        Self::Other(error.into())
    }
}

impl From<GenerateError> for Failed {
    fn from(error: GenerateError) -> Self {
        Self::Other(error)
    }
}
