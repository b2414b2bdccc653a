//! The place of a direct-access index in its image's file.

use crate::layer::{Layer, Qcow2};
use isobath_qcow2::head::{MAX_HEAD_HEADER_BYTES, MAX_HEAD_L1_ENTRIES};
use isobath_qcow2::index::{
    BlockHash, BlockPointer, IndexExtension, LayerStamp, MAX_BLOCK_BYTES, Root,
};
use isobath_qcow2::l1::L1_ENTRY_SIZE;
use isobath_qcow2::{Head, Header, IncompatibleFeatures};
use isobath_storage::{IoBuf, Stamp, Storage};
use std::ops::Range;

/// The root that an image's header points to, if it is present and intact.
pub async fn read_root<S: Storage>(layer: &Layer<S>) -> Option<Root> {
    let extension = *layer.as_qcow2()?.header.read().index()?;
    let pointer = BlockPointer {
        layer: 0,
        offset: extension.root_offset,
        length: extension.root_length,
        hash: extension.root_hash,
    };
    Root::decode(&read_block(&**layer.storage(), &pointer, MAX_BLOCK_BYTES).await?)
}

/// Reads a block from a file; `None` if it does not match the pointer.
pub async fn read_block<S: Storage>(file: &S, pointer: &BlockPointer, most: u32) -> Option<IoBuf> {
    if pointer.length > most {
        return None;
    }
    let buf = IoBuf::zeroed(pointer.length as usize);
    match file.read_at(pointer.offset.get(), buf).await {
        Ok(bytes) => (BlockHash::of(&bytes) == pointer.hash).then_some(bytes),
        Err(error) => {
            tracing::debug!("{error}");
            None
        }
    }
}

/// A file's stamp as an index records it.
pub fn recorded_stamp(stamp: Stamp) -> LayerStamp {
    LayerStamp {
        length: stamp.length,
        modified: stamp.modified,
        changed: stamp.changed,
        inode: stamp.inode,
    }
}

/// Whether a file has this stamp.
pub async fn has_stamp<S: Storage>(storage: &S, recorded: LayerStamp) -> bool {
    let stamp = storage.stamp().await.ok().flatten();
    stamp.map(recorded_stamp) == Some(recorded)
}

/// Whether an image with this header is in its file and nowhere else, as it was closed: an open looks at nothing but
/// the header and the L1 table. Such an image may have a head in an index.
pub(crate) fn is_plain(header: &Header) -> bool {
    let mapping = IncompatibleFeatures::EXTENDED_L2.with(IncompatibleFeatures::COMPRESSION_TYPE);
    header.incompatible.bits() & !mapping.bits() == 0 && header.crypt_method == 0
}

/// The head of an image that has this stamp, read from its file; `None` if it has another by now, cannot be read, or
/// may have no head.
pub async fn read_head<S: Storage>(storage: &S, stamp: LayerStamp) -> Option<Head> {
    if !has_stamp(storage, stamp).await {
        return None;
    }
    let start = storage.read_at(0, IoBuf::zeroed(MAX_HEAD_HEADER_BYTES)).await.ok()?;
    let there = usize::try_from(stamp.length).unwrap_or(usize::MAX);
    let start = start.get(..there).unwrap_or(&start);
    let header = Header::parse(start).ok().filter(is_plain)?;
    let entries = header.l1_size as usize;
    if entries > MAX_HEAD_L1_ENTRIES {
        return None;
    }
    let l1 = IoBuf::zeroed(entries * L1_ENTRY_SIZE);
    let l1 = storage.read_at(header.l1_table_offset.get(), l1).await.ok()?;
    let head = Head::new(start, &l1)?;
    // It was the same file, unchanged, all the time.
    has_stamp(storage, stamp).await.then_some(head)
}

/// The host clusters of an index's area; `None` if the area does not consist of whole clusters.
pub fn clusters(image: &Qcow2, index: &IndexExtension) -> Option<Range<u64>> {
    let size = image.geometry.cluster_size();
    let (start, length) = (index.area_offset.get(), index.area_length);
    let whole = start.is_multiple_of(size) && length.is_multiple_of(size) && start > 0;
    whole.then(|| start / size..(start + length) / size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{NAME, host};
    use crate::encryption::Key;
    use crate::layer::ImageFormat;
    use crate::open::{Known, Opening, open_known_layer};
    use crate::options::OpenOptions;
    use futures_executor::block_on;
    use isobath_qcow2::IncompatibleFeatures as Incompatible;
    use isobath_qcow2::header::field;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage::{Host, OpenMode, StorageExt};
    use std::path::Path;

    /// The stamp and the head of the image of a host.
    fn of(host: &MemoryHost) -> (LayerStamp, Option<Head>) {
        block_on(async {
            let file = host.open(Path::new(NAME), OpenMode::default()).await.unwrap();
            let stamp = recorded_stamp(file.stamp().await.unwrap().unwrap());
            (stamp, read_head(&file, stamp).await)
        })
    }

    #[test]
    fn only_an_image_that_was_closed_and_is_one_file_has_a_head() {
        let (stamp, head) = of(&host());
        let header = head.unwrap().header().unwrap();
        assert!(is_plain(&header));
        for bit in [
            Incompatible::DIRTY,
            Incompatible::CORRUPT,
            Incompatible::DATA_FILE,
            Incompatible::JOURNAL,
        ] {
            let incompatible = header.incompatible.with(bit);
            assert!(!is_plain(&Header { incompatible, ..header.clone() }), "{bit:?}");
        }
        assert!(!is_plain(&Header { crypt_method: Header::LUKS, ..header.clone() }));
        let later = LayerStamp { changed: stamp.changed + 1, ..stamp };
        let host = host();
        let file = block_on(host.open(Path::new(NAME), OpenMode::default())).unwrap();
        assert!(block_on(read_head(&file, later)).is_none());
        let dirty = host;
        let mut bytes = dirty.contents(NAME).unwrap();
        bytes[field::INCOMPATIBLE_FEATURES + 7] |= 1;
        dirty.insert(NAME, &bytes);
        assert!(of(&dirty).1.is_none());
    }

    /// Whoever makes an index may put any head into it: where no image could be like that, the file counts.
    #[test]
    fn an_impossible_head_is_not_used() {
        let host = host();
        let start = host.contents(NAME).unwrap()[..4096].to_vec();
        let l1 = 1_u64.to_be_bytes();
        let forged = |change: &dyn Fn(&mut Vec<u8>), l1: &[u8]| {
            let mut start = start.clone();
            change(&mut start);
            Head::new(&start, l1)
        };
        let past_end = forged(&|start| start[field::L1_TABLE_OFFSET] = 0x7f, &[]);
        let outside =
            forged(&|_| {}, &[[0; 8]; 100].concat().into_iter().chain(l1).collect::<Vec<_>>());
        let dirty = forged(&|start| start[field::INCOMPATIBLE_FEATURES + 7] |= 1, &[]);
        let large = forged(
            &|start| {
                let size = MAX_HEAD_L1_ENTRIES as u32 + 1;
                start[field::L1_SIZE..field::L1_SIZE + 4].copy_from_slice(&size.to_be_bytes());
            },
            &[],
        );
        // Its file is long enough for that.
        let mut file = host.contents(NAME).unwrap();
        file.resize(1 << 20, 0);
        host.insert(NAME, &file);
        let (stamp, _) = of(&host);
        for (what, head) in
            [("past the end", past_end), ("outside", outside), ("dirty", dirty), ("large", large)]
        {
            // A header like that is not read either.
            let Some(head) = head else { continue };
            let options = OpenOptions::new();
            let format = Some(ImageFormat::Qcow2);
            let opening =
                Opening { format, writable: false, options: &options, key: &Key::Unneeded };
            let known = Known { stamp, head: &head };
            let opened = open_known_layer(&host, Path::new(NAME), opening, known);
            let (layer, by_head) = block_on(Box::pin(opened)).unwrap();
            assert!(!by_head, "{what}");
            let header = layer.header().unwrap();
            assert_eq!(header.l1_size, Header::parse(&start).unwrap().l1_size, "{what}");
            assert_eq!(header.incompatible, IncompatibleFeatures::default(), "{what}");
            assert_eq!(layer.as_qcow2().unwrap().l1.read().allocated().count(), 0, "{what}");
        }
    }
}
