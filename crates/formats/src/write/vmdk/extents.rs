//! Images whose descriptor lists other files: flat ones, which contain the disk's bytes as they are, and sparse ones.

use super::sparse::WriteSparse;
use super::{VmdkOptions, descriptor};
use crate::error::{Blame, Result};
use crate::vmdk::SECTOR;
use crate::write::piece::Piece;
use crate::write::placed::write_placed;
use isobath_storage::{IoBuf, Storage};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

pub(crate) struct Extents<S> {
    descriptor: String,
    /// In the order of the disk.
    list: Vec<Extent<S>>,
}

struct Extent<S> {
    storage: Arc<S>,
    /// Its size in guest bytes.
    length: u64,
    /// `None` for a flat extent.
    sparse: Option<WriteSparse>,
}

impl<S: Storage> Extents<S> {
    pub(super) fn new(
        name: &Path,
        files: Vec<Arc<S>>,
        capacity: u64,
        options: &VmdkOptions,
    ) -> Result<Self> {
        let size = capacity * SECTOR;
        let names = options.extent_names(name, size)?;
        let span = options.subformat.extent().unwrap_or(u64::MAX);
        if names.len() != files.len() {
            let reason = format!("the image has {}", names.len());
            return Err(Blame(name).invalid("number of extents", files.len(), reason));
        }
        let (mut list, mut lines, mut left) = (Vec::new(), String::new(), size);
        for (extent, storage) in names.iter().zip(files) {
            let length = span.min(left);
            left -= length;
            let sectors = length / SECTOR;
            let (kind, offset) =
                if options.subformat.is_flat() { ("FLAT", " 0") } else { ("SPARSE", "") };
            // Writing to a string cannot fail.
            let _ = writeln!(lines, "RW {sectors} {kind} \"{extent}\"{offset}");
            let sparse = if options.subformat.is_flat() {
                None
            } else {
                let name = storage.identity().name;
                Some(WriteSparse::new(name, sectors, None, options.zeroed_grains))
            };
            list.push(Extent { storage, length, sparse });
        }
        Ok(Self { descriptor: descriptor(options, capacity, &lines), list })
    }

    pub(super) async fn write(&mut self, pieces: Vec<Piece>) -> Result<()> {
        let mut pieces = pieces.into_iter().peekable();
        let mut start = 0;
        for extent in &mut self.list {
            let end = start + extent.length;
            let mut here = Vec::new();
            // No piece is in two extents.
            while let Some(Piece { at, bytes }) = pieces.next_if(|piece| piece.at < end) {
                here.push(Piece { at: at - start, bytes });
            }
            if let Some(sparse) = &mut extent.sparse {
                sparse.write(&*extent.storage, here).await?;
            } else {
                let placed = here.into_iter().map(|piece| (piece.at, piece.bytes));
                write_placed(&*extent.storage, placed).await?;
            }
            start = end;
        }
        Ok(())
    }

    /// The descriptor, which makes the files an image, is written last.
    pub(super) async fn finish(self, storage: &S) -> Result<()> {
        for extent in self.list {
            if let Some(sparse) = extent.sparse {
                sparse.finish(&*extent.storage).await?;
            } else {
                extent.storage.set_len(extent.length).await?;
                extent.storage.flush().await?;
            }
        }
        storage.write_at(0, IoBuf::copy_of(self.descriptor.as_bytes())).await?;
        Ok(storage.flush().await?)
    }
}
