//! The qcow2 format's parsers: what they accept is encoded again and says the same.

use isobath_qcow2::compress::{compress, decompress};
use isobath_qcow2::index::{
    BlockHash, HeadsBlock, IndexExtension, LayerRecord, PAGE_UNITS, Page, Root, Segment, WholeRoot,
};
use isobath_qcow2::{
    Bitmap, BitmapCluster, ClusterKind, CompressionType, Extension, Geometry, GuestOffset, Head,
    Header, HostOffset, L1Entry, L2Entry, NewImage, ParseMode, RefcountOrder, RefcountTableEntry,
    Snapshot, is_qcow2,
};

fn check_header(bytes: &[u8]) {
    let _ = is_qcow2(bytes);
    let _ = Header::probe_length(bytes);
    for mode in [ParseMode::Open, ParseMode::Check] {
        let Ok(mut header) = Header::parse_for(bytes, mode) else { continue };
        let geometry = header.geometry().expect("checked by the parser");
        assert!(geometry.l1_size_for(header.size) <= u64::from(header.l1_size));
        let Ok(encoded) = header.encode() else { continue };
        let mut again = Header::parse_for(&encoded, mode).expect("what was encoded here");
        for header in [&mut header, &mut again] {
            // These are completed with the known names.
            header.extensions.retain(|e| !matches!(e, Extension::FeatureNames(_)));
        }
        assert_eq!(header, again);
    }
}

/// The header: from arbitrary bytes, and from a valid one with changes.
pub fn header(data: &[u8]) {
    check_header(data);
    let Some((&[options, bits], rest)) = data.split_first_chunk() else { return };
    let version = if options & 1 != 0 { 2 } else { 3 };
    let image = NewImage {
        version,
        cluster_bits: 9 + u32::from(bits) % 6,
        extended_l2: options & 2 != 0,
        lazy_refcounts: options & 4 != 0,
        data_file: (options & 8 != 0).then(|| "data".into()),
        backing_file: (options & 16 != 0).then(|| "base".into()),
        backing_format: (options & 16 != 0).then(|| "raw".into()),
        ..NewImage::new(1 << 20)
    };
    let Ok(plan) = image.plan() else { return };
    let mut bytes = plan.header().encode().expect("a valid header");
    for change in rest.chunks_exact(4) {
        let at = usize::from(u16::from_be_bytes([change[0], change[1]])) % bytes.len();
        bytes[at] = change[2];
        if let Some(next) = bytes.get_mut(at + 1) {
            *next = change[3];
        }
    }
    check_header(&bytes);
}

/// Header extensions and the feature name table.
pub fn extensions(data: &[u8]) {
    let Ok(extensions) = Extension::parse_all(data) else { return };
    let geometry = Geometry::new(3, 16, 4, false, false).expect("a valid geometry");
    let mut encoded = Vec::new();
    for extension in &extensions {
        match extension {
            Extension::FeatureNames(table) => {
                for entry in &table.entries {
                    assert!(!entry.text().contains(char::is_control));
                    let _ = table.describe_incompatible(1 << (entry.bit & 63));
                }
                assert_eq!(table.completed().completed(), table.completed());
            }
            Extension::Bitmaps(bitmaps) => drop(bitmaps.validate(&geometry)),
            _ => {}
        }
    }
    Extension::encode_all(&extensions, &mut encoded);
    assert_eq!(Extension::parse_all(&encoded), Ok(extensions));
}

/// L1 and L2 tables of any geometry.
pub fn l1_l2(data: &[u8]) {
    let Some((&[version, bits, flags], table)) = data.split_first_chunk() else { return };
    let Ok(geometry) =
        Geometry::new(version.into(), bits.into(), 4, flags & 1 != 0, flags & 2 != 0)
    else {
        return;
    };
    let mut copy = table.to_vec();
    for index in 0.. {
        let Some(entry) = L1Entry::read(table, index) else { break };
        if let Ok(Some(offset)) = entry.offset(&geometry) {
            let again = L1Entry::new(offset, entry.is_copied(), &geometry).expect("valid");
            assert_eq!(again.raw(), entry.raw() & !entry.reserved_bits());
        }
        entry.write(&mut copy, index).expect("in the table");
    }
    assert_eq!(copy, table);
    for index in 0.. {
        let Some(entry) = L2Entry::read(table, index, &geometry) else { break };
        entry.write(&mut copy, index, &geometry).expect("in the table");
        let _ = entry.reserved_bits(&geometry);
        let Ok(kind) = entry.kind(&geometry) else { continue };
        let _ = kind.check_data_file(GuestOffset::new(0), &geometry);
        if let Some(offset) = kind.host_cluster() {
            assert!(geometry.is_aligned(offset) && offset.get() < 1 << 56);
        }
        match kind {
            ClusterKind::Compressed(c) => {
                assert!(c.length > 0 && c.length <= 2 * geometry.cluster_size());
                assert!(c.offset < c.end() && c.end().get() % 512 == 0);
                let bits = geometry.cluster_bits();
                let again = L2Entry::compressed(c.offset, c.length, bits).expect("valid");
                assert_eq!(again.kind(&geometry), Ok(kind));
            }
            ClusterKind::Subclusters { offset, allocated, zero, .. } => {
                assert!(allocated & zero == 0 && (offset.is_some() || allocated == 0));
            }
            _ => {}
        }
    }
    assert_eq!(copy, table);
}

/// Refcount tables and blocks of every width.
pub fn refcount(data: &[u8]) {
    let Some((&[order, bits, at, value], block)) = data.split_first_chunk() else { return };
    let Ok(geometry) = Geometry::new(3, bits.into(), order.into(), false, false) else { return };
    let order = RefcountOrder::new(order.into()).expect("checked by the geometry");
    for index in 0.. {
        let Some(entry) = RefcountTableEntry::read(block, index) else { break };
        if let Ok(Some(offset)) = entry.offset(&geometry) {
            let again = RefcountTableEntry::new(offset, &geometry).expect("valid");
            assert_eq!(again.raw(), entry.raw() & !entry.reserved_bits());
        }
    }
    let read =
        |block: &[u8]| -> Vec<u64> { (0..).map_while(|index| order.read(block, index)).collect() };
    let before = read(block);
    let mut changed = block.to_vec();
    let (at, value) = (usize::from(at), u64::from(value));
    if order.write(&mut changed, at, value).is_ok() {
        let mut expected = before;
        expected[at] = value;
        assert_eq!(read(&changed), expected);
    } else {
        assert!(at >= before.len() || value > order.max());
        assert_eq!(changed, block);
    }
}

/// Compressed clusters: arbitrary data, round trips, and what was compressed here, damaged.
pub fn compressed(data: &[u8]) {
    let Some((&[kind, bits], data)) = data.split_first_chunk() else { return };
    let kind = if kind & 1 == 0 { CompressionType::Zlib } else { CompressionType::Zstd };
    let mut cluster = vec![0; 1 << (9 + bits % 8)];
    let _ = decompress(kind, data, &mut cluster);
    if let Some(mut packed) = compress(kind, data) {
        assert!(packed.len() < data.len());
        let mut back = vec![0; data.len()];
        decompress(kind, &packed, &mut back).expect("what was compressed here");
        assert_eq!(back, data);
        // The input's ends say where and how.
        let [at, change] = [data.first(), data.last()].map(|byte| byte.copied().unwrap_or(0));
        let at = usize::from(at) % packed.len();
        packed[at] ^= change;
        let _ = decompress(kind, &packed, &mut back);
        let _ = decompress(kind, &packed[at..], &mut cluster);
        let _ = decompress(kind, &packed[..at], &mut cluster);
    }
}

/// The snapshot table.
pub fn snapshots(data: &[u8]) {
    let Some((&[count], table)) = data.split_first_chunk() else { return };
    let geometry = Geometry::new(3, 16, 4, false, false).expect("a valid geometry");
    let Ok((snapshots, length)) = Snapshot::parse_table(table, count.into()) else { return };
    assert!(length < table.len() + 8);
    let mut at = 0;
    for snapshot in &snapshots {
        at += Snapshot::entry_length(&table[at..]).expect("parsed before");
        let _ = snapshot.check(&geometry);
        assert!(!snapshot.name_text().contains(char::is_control));
        assert!(!snapshot.id_text().contains(char::is_control));
    }
    assert_eq!(at, length);
    let encoded = Snapshot::encode_table(&snapshots).expect("parsed before");
    assert_eq!(Snapshot::parse_table(&encoded, count.into()), Ok((snapshots, encoded.len())));
}

/// The bitmap directory and bitmap tables.
pub fn bitmaps(data: &[u8]) {
    let Some((&[count, bits], data)) = data.split_first_chunk() else { return };
    let Ok(geometry) = Geometry::new(3, bits.into(), 4, false, false) else { return };
    let mut copy = data.to_vec();
    for index in 0.. {
        let Some(entry) = BitmapCluster::read(data, index, &geometry) else { break };
        if let Ok(cluster) = entry {
            cluster.write(&mut copy, index).expect("in the table");
        }
    }
    assert_eq!(copy, data);
    let Ok(bitmaps) = Bitmap::parse_directory(data, count.into()) else { return };
    for bitmap in &bitmaps {
        for size in [0, 1 << 30, u64::MAX] {
            let _ = bitmap.validate(&geometry, size);
            let _ = bitmap.table_size_for(&geometry, size);
        }
        assert!(!bitmap.name_text().contains(char::is_control));
    }
    if let Ok(encoded) = Bitmap::encode_directory(&bitmaps) {
        assert_eq!(Bitmap::parse_directory(&encoded, count.into()), Ok(bitmaps));
    }
}

/// The blocks of a direct-access index, and the edit of a header that points to one.
pub fn index(data: &[u8]) {
    let Some((&[kind, unit], bytes)) = data.split_first_chunk() else { return };
    let unit_bits = 9 + u32::from(unit) % 13;
    match kind % 6 {
        0 => {
            if let Some(root) = Root::decode(bytes) {
                assert_eq!(Root::decode(&root.encode()), Some(root));
            }
            if let Some(whole) = WholeRoot::decode(bytes) {
                assert_eq!(WholeRoot::decode(&whole.encode()), Some(whole));
            }
        }
        1 => {
            let covers = u32::from(unit) * 64;
            let Some(segment) = Segment::decode(bytes, 0, covers) else { return };
            assert_eq!(Segment::decode(&segment.encode(), 0, covers), Some(segment));
        }
        2 => {
            let Some(page) = Page::decode(bytes, 0, unit_bits) else { return };
            assert_eq!(page.runs.iter().map(|run| run.count).sum::<usize>(), PAGE_UNITS);
            let again = page.encode(unit_bits).expect("what was decoded here");
            assert_eq!(Page::decode(&again, 0, unit_bits), Some(page));
        }
        3 => {
            let count = usize::from(unit);
            let Some(records) = LayerRecord::decode_chapter(bytes, count) else { return };
            let heads = HeadsBlock::of_chapter(bytes, count);
            let again = LayerRecord::encode_chapter(&records, heads.as_ref());
            assert_eq!(HeadsBlock::of_chapter(&again, count), heads);
            assert_eq!(LayerRecord::decode_chapter(&again, count), Some(records));
        }
        4 => edit_header(bytes),
        _ => {
            let count = usize::from(unit);
            let Some(heads) = Head::decode_all(bytes, count) else { return };
            assert_eq!(Head::decode_all(&Head::encode_all(&heads), count), Some(heads.clone()));
            for head in heads.into_iter().flatten() {
                let _ = head.header();
            }
        }
    }
}

/// After each write of an edit the header is whole.
fn edit_header(bytes: &[u8]) {
    let Ok(before) = Header::parse(bytes) else { return };
    let index = IndexExtension {
        area_offset: HostOffset::new(1 << 21),
        area_length: 1 << 21,
        root_offset: HostOffset::new(1 << 21),
        root_length: 1,
        root_hash: BlockHash::of(bytes),
    };
    for wanted in [Some(&index), None] {
        let mut cluster = bytes.to_vec();
        cluster.resize(cluster.len().max(1 << before.cluster_bits), 0);
        let Ok(writes) = Header::edit_index(&cluster, wanted) else { continue };
        for (at, new) in writes {
            cluster[at..at + new.len()].copy_from_slice(&new);
            let now = Header::parse(&cluster).expect("a whole header");
            assert_eq!(now.backing_file, before.backing_file);
        }
        if wanted.is_some() {
            let now = Header::parse(&cluster).expect("a whole header");
            assert!(now.extensions.contains(&Extension::Index(index)));
        }
    }
}
