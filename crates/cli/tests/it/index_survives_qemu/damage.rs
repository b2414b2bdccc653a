//! Damage to an index itself: noticed wherever it is, and said once.

use super::chains::{Chain, Flavour, TOP, TOP_NAME, isobath, logged, name};
use super::judge::logged_of_indexes;
use isobath_qcow2::index::{
    BlockHash, BlockPointer, IndexExtension, MAX_BLOCK_BYTES, PAGE_UNITS, Page, PageEntry, PageRun,
    Root, Segment,
};
use isobath_qcow2::{CompressedCluster, Header, HostOffset};
use isobath_testkit::args;
use isobath_testkit::bytes::first_difference;
use isobath_testkit::chain::{Chain as Made, Commands};
use isobath_testkit::ops::{Op, Shape};
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use rand::{Rng, RngExt};
use std::fs;
use std::ops::Range;
use std::path::Path;

/// The disk as isobath reads it, and what it said of indexes.
#[track_caller]
fn read(image: &Path) -> (Vec<u8>, Vec<String>) {
    let directory = image.parent().unwrap();
    let raw = directory.join("read.raw");
    let arguments = args!["convert", "-f", "qcow2", "-O", "raw", image, &raw];
    let finished = logged(directory, arguments, "info").ok();
    assert!(!finished.stderr.contains("panicked"), "{}", finished.report());
    (fs::read(raw).unwrap(), logged_of_indexes(&finished.stderr))
}

/// The disk is read as it was, and nothing is said of indexes.
#[track_caller]
fn assert_reads(image: &Path, right: &[u8]) {
    let (read, messages) = read(image);
    assert_eq!((first_difference(right, &read), messages), (None, Vec::new()));
}

fn extension(bytes: &[u8]) -> IndexExtension {
    *Header::parse(bytes).unwrap().index().unwrap()
}

/// The bytes of an image's file that hold the blocks of its index.
fn blocks(bytes: &[u8]) -> Range<usize> {
    let extension = extension(bytes);
    let end = extension.root_offset.get() + u64::from(extension.root_length);
    extension.area_offset.get() as usize..end as usize
}

fn flip(file: &Path, bytes: &[u8], bit: usize) {
    let mut bytes = bytes.to_vec();
    bytes[bit / 8] ^= 1 << (bit % 8);
    fs::write(file, bytes).unwrap();
}

#[test]
fn any_bit_of_a_small_index() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for flavour in [Flavour::Grown, Flavour::Indexed] {
        let chain = Chain::new(0, flavour);
        let image = chain.path(TOP);
        let right = qemu::read_disk(&image, "qcow2");
        assert_reads(&image, &right);
        let bytes = fs::read(&image).unwrap();
        let area = blocks(&bytes);
        let mut at = area.start;
        let stride = area.len() / 60 + 1;
        while at < area.end {
            flip(&image, &bytes, at * 8 + rng.random_range(0..8));
            let (read, messages) = read(&image);
            assert_eq!(first_difference(&right, &read), None, "byte {at} of {area:?}");
            let said = messages.first().is_some_and(|line| line.contains("/l4'"));
            assert!(said, "byte {at} of {area:?}: {messages:#?}");
            qemu::assert_clean(&image);
            at += rng.random_range(1..=stride);
        }
        // And all zeroes, as QEMU makes of bytes of the header cluster that it does not know.
        let mut zeroed = bytes.clone();
        zeroed[area].fill(0);
        fs::write(&image, zeroed).unwrap();
        let (read, messages) = read(&image);
        assert!(read == right && !messages.is_empty());
    }
}

#[test]
fn any_bit_of_the_header_extension() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for flavour in [Flavour::Grown, Flavour::Indexed] {
        let chain = Chain::new(3, flavour);
        let image = chain.path(TOP);
        let right = qemu::read_disk(&image, "qcow2");
        let bytes = fs::read(&image).unwrap();
        let magic = IndexExtension::MAGIC.to_be_bytes();
        let start = bytes[..4096].windows(4).position(|window| window == magic).unwrap();
        // A length that is wrong makes the header one that QEMU does not read either.
        let bytes_of = (start..start + 4).chain(start + 8..start + 8 + IndexExtension::BYTES);
        for at in bytes_of {
            flip(&image, &bytes, at * 8 + rng.random_range(0..8));
            let (read, messages) = read(&image);
            assert_eq!(first_difference(&right, &read), None, "byte {at} from {start}");
            // Without a valid extension there is no index of this image to speak of.
            let has_index = Header::parse(&fs::read(&image).unwrap()).unwrap().index().is_some();
            let said = messages.first().is_some_and(|line| line.contains("/l4'"));
            assert_eq!(said, has_index && !is_harmless(at - start), "{at}: {messages:#?}");
            let info = isobath(chain.directory(), ["info", "--output=json", TOP_NAME]).ok();
            let index = &info.json()["format-specific"]["data"]["direct-access-index"];
            assert_eq!(index.is_object(), has_index);
        }
    }
}

/// Whether a byte of the extension does not decide whether the root is found: the area's place and
/// length, if the root is still within.
fn is_harmless(at: usize) -> bool {
    (16..32).contains(&at)
}

/// A chain so long that its index has chapters of layers and pages, in the files of many layers.
fn long_chain(directory: &Path, seed: &Seed) -> Made {
    let writer = Commands::isobath(env!("CARGO_BIN_EXE_isobath").as_ref());
    let mut rng = seed.rng();
    let size = 12 << 20;
    let shape = Shape { size, longest: 30_000, unit: 4096 };
    let mut chain = Made::new(directory, size);
    for layer in 0..70 {
        let mut ops = shape.ops(&mut rng, 2);
        ops.push(Op::Write { offset: (layer % 24) << 19, length: 9000, pattern: layer as u8 + 1 });
        chain.add(&writer, "cluster_size=4k", &ops);
    }
    chain
}

#[test]
fn random_bits_of_the_index_of_a_long_chain() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let directory = tempfile::tempdir().unwrap();
    let chain = long_chain(directory.path(), &seed);
    let active = chain.active();
    let right = qemu::read_disk(active, "qcow2");
    assert_reads(active, &right);
    for (what, block) in blocks_in_use(&chain) {
        let image = &chain.layers()[usize::from(block.layer)].path;
        let bytes = fs::read(image).unwrap();
        let start = block.offset.get() as usize;
        for _ in 0..4 {
            let bit = rng.random_range(start * 8..(start + block.length as usize) * 8);
            flip(image, &bytes, bit);
            let (read, messages) = read(active);
            assert_eq!(first_difference(&right, &read), None, "{what}, {block:?}, bit {bit}");
            let said = messages.first().is_some_and(|line| line.contains("/layer69.qcow2'"));
            assert!(said, "{what}, {block:?}, bit {bit}: {messages:#?}");
        }
        fs::write(image, bytes).unwrap();
    }
    assert_reads(active, &right);
}

/// The blocks of the active image's index, wherever they are.
fn blocks_in_use(chain: &Made) -> Vec<(&'static str, BlockPointer)> {
    let bytes = fs::read(chain.active()).unwrap();
    let root = Root::decode(&root(&bytes)).unwrap();
    let mut found: Vec<_> = root.chapters.iter().map(|block| ("chapter", *block)).collect();
    for (number, segment) in root.segments.iter().enumerate() {
        let segment = segment.unwrap();
        found.push(("segment", segment));
        let holder = fs::read(&chain.layers()[usize::from(segment.layer)].path).unwrap();
        let start = segment.offset.get() as usize;
        let block = &holder[start..start + segment.length as usize];
        let segment = Segment::decode(block, number as u32, root.covers).unwrap();
        found.extend(segment.pages.iter().filter_map(|page| Some(("page", page.page?))));
    }
    for what in ["chapter", "segment", "page"] {
        assert!(found.iter().any(|(kind, _)| *kind == what), "no {what}");
    }
    found
}

fn root(bytes: &[u8]) -> Vec<u8> {
    let extension = extension(bytes);
    let start = extension.root_offset.get() as usize;
    bytes[start..start + extension.root_length as usize].to_vec()
}

/// Changes the first page of the active image's own index, with hashes that hold.
fn forge(image: &Path, change: impl FnOnce(&mut Page)) {
    let mut bytes = fs::read(image).unwrap();
    let mut extension = extension(&bytes);
    let mut root = Root::decode(&root(&bytes)).unwrap();
    let pointer = root.segments[0].unwrap();
    let at = pointer.offset.get() as usize;
    let block = &bytes[at..at + pointer.length as usize];
    let mut segment = Segment::decode(block, 0, root.covers).unwrap();
    let pointer = segment.pages[0].page.as_mut().unwrap();
    let page_at = pointer.offset.get() as usize;
    let block = &bytes[page_at..page_at + pointer.length as usize];
    let mut page = Page::decode(block, 0, root.unit_bits).unwrap();
    change(&mut page);
    let page = page.encode(root.unit_bits).unwrap();
    assert!(page.len() <= pointer.length as usize);
    pointer.length = page.len() as u32;
    pointer.hash = BlockHash::of(&page);
    bytes[page_at..page_at + page.len()].copy_from_slice(&page);
    let segment = segment.encode();
    bytes[at..at + segment.len()].copy_from_slice(&segment);
    root.segments[0].as_mut().unwrap().hash = BlockHash::of(&segment);
    let encoded = root.encode();
    assert!(encoded.len() < MAX_BLOCK_BYTES as usize);
    let root_at = extension.root_offset.get() as usize;
    bytes[root_at..root_at + encoded.len()].copy_from_slice(&encoded);
    extension.root_hash = BlockHash::of(&encoded);
    for (at, part) in Header::edit_index(&bytes[..4096], Some(&extension)).unwrap() {
        bytes[at..at + part.len()].copy_from_slice(&part);
    }
    fs::write(image, bytes).unwrap();
}

/// An index that is wrong, with hashes that hold, is believed: so the others were used, and right.
#[test]
fn a_forged_index_would_be_believed() {
    let chain = Chain::new(0, Flavour::Indexed);
    let image = chain.path(TOP);
    let right = qemu::read_disk(&image, "qcow2");
    let unit = 1 << Root::decode(&root(&fs::read(&image).unwrap())).unwrap().unit_bits;
    let mut lied = 0..0;
    forge(&image, |page| {
        // The newest data is said to be zeroes.
        let newest = |entry: &PageEntry| matches!(entry, PageEntry::Data { layer: 3, .. });
        let run = page.runs.iter_mut().find(|run| newest(&run.entry)).unwrap();
        run.entry = PageEntry::Zero { layer: 3 };
        lied = run.first * unit..(run.first + run.count) * unit;
    });
    let (read, messages) = read(&image);
    assert_eq!(messages, Vec::<String>::new());
    assert!(read != right, "the index of '{}' is not used", name(TOP));
    let outside = |at: usize| !lied.contains(&at);
    assert!((0..right.len()).all(|at| !outside(at) || right[at] == read[at]));
    let verified = isobath(chain.directory(), ["index", "--verify", TOP_NAME]).exits(2);
    assert!(verified.text().contains("differs at 0"), "{}", verified.report());
}

/// A hostile index says of a raw layer what only a qcow2 one can have: the read fails, and the image is not called
/// wrong by more than that.
#[test]
fn a_raw_layer_has_no_compressed_clusters_whatever_an_index_says() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut bytes = vec![7; 4 << 20];
    Seed::new().rng().fill_bytes(&mut bytes);
    fs::write(path("base"), &bytes).unwrap();
    for (below, format, name) in [("base", "raw", "middle"), ("middle", "qcow2", "top")] {
        let create = ["create", "-f", "qcow2", "-b", below, "-F", format, name];
        let _ = isobath(directory.path(), create).ok();
        // So many runs that the page has room for what is said of them.
        let writes =
            (10..20).map(|n| format!("write {}k 64k", n * 192)).flat_map(|w| ["-c".into(), w]);
        let io = ["io", "-f", "qcow2"].map(String::from).into_iter().chain(writes);
        let _ = isobath(directory.path(), io.chain([name.into()])).ok();
    }
    let _ = isobath(directory.path(), ["index", "top"]).ok();
    forge(&path("top"), |page| {
        let cluster = CompressedCluster { offset: HostOffset::new(512), length: 512 };
        let entry = PageEntry::Compressed { layer: 0, cluster };
        page.runs = vec![
            PageRun { first: 0, count: 1, entry },
            PageRun { first: 1, count: PAGE_UNITS - 1, entry: PageEntry::Absent },
        ];
    });
    // Reads and the copies for writes fail, and nothing else does.
    let steps =
        ["read 0 512", "write 512 512", "write -P 9 1M 64k", "read -P 9 1M 64k", "read 2M 64k"];
    let arguments = steps.iter().flat_map(|step| ["-c", step]).chain(["top"]);
    let finished = isobath(directory.path(), ["io", "-f", "qcow2"].into_iter().chain(arguments));
    let text = format!("{}{}", finished.text(), finished.stderr);
    assert_eq!(text.matches("failed").count(), 2, "{}", finished.report());
    assert!(!text.contains("internal error"), "{}", finished.report());
}
