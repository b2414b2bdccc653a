//! Valid inputs for the fuzzers to start from.

use crate::nbd_session::{FRAMED, GREETED, STRUCTURED, script};
use isobath_export::nbd::request::Request;
use isobath_qcow2::embedded::{LEAD, Mapping, ZoneId, embed};
use isobath_qcow2::index::{
    BlockHash, BlockPointer, HeadsBlock, LayerRecord, LayerStamp, Page, PageEntry, PageRecord,
    RecordedFormat, Root, Segment, WholeRoot,
};
use isobath_qcow2::journal::{Operation, Record, Zone, Zones};
use isobath_qcow2::{
    ClusterIndex, CompressionType, Extension, Head, HostOffset, Lsn, NewImage, Snapshot, compress,
};
use std::fs;
use std::path::Path;

/// Inputs of a target, by its name: valid ones, and those that earlier runs have found to reach more.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let mut seeds = valid(target);
    seeds.extend(kept(target));
    seeds
}

/// What the repository keeps in `fuzz/kept/`: an input a line, in hexadecimal digits.
fn kept(target: &str) -> Vec<Vec<u8>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("kept").join(target);
    let lines = fs::read_to_string(&file).expect("every target has a file in fuzz/kept");
    let digit = |digit: u8| char::from(digit).to_digit(16).expect("hexadecimal digits") as u8;
    let input = |line: &str| -> Vec<u8> {
        line.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    };
    lines.lines().map(input).collect()
}

fn valid(target: &str) -> Vec<Vec<u8>> {
    let images = || images().iter().map(image).collect::<Vec<_>>();
    let prefixed = |prefix: &[u8], bytes: &[u8]| [prefix, bytes].concat();
    match target {
        "header" | "image" => images(),
        "extensions" => {
            let mut area = Vec::new();
            let extensions =
                [Extension::BackingFormat("qcow2".into()), Extension::DataFile("data.raw".into())];
            Extension::encode_all(&extensions, &mut area);
            vec![area]
        }
        "l1_l2" | "refcount" | "bitmaps" => {
            // Whatever is in an image, as if it were a table of it.
            let prefixes: &[&[u8]] = match target {
                "l1_l2" => &[&[2, 9, 0], &[3, 12, 2], &[3, 14, 1]],
                "refcount" => &[&[0, 9, 3, 1], &[4, 12, 200, 7], &[6, 16, 1, 255]],
                _ => &[&[0, 9], &[1, 16]],
            };
            let ends = images().into_iter().map(|image| image[image.len() / 2..].to_vec());
            ends.flat_map(|end| prefixes.iter().map(move |prefix| prefixed(prefix, &end))).collect()
        }
        "compressed" => {
            let cluster: Vec<u8> = (0..4096u32).map(|at| (at / 7) as u8).collect();
            [(0, CompressionType::Zlib), (1, CompressionType::Zstd)]
                .into_iter()
                .filter_map(|(kind, name)| {
                    Some(prefixed(&[kind, 3], &compress::compress(name, &cluster)?))
                })
                .collect()
        }
        "snapshots" => {
            let snapshot = Snapshot { name: b"one".into(), id: b"1".into(), ..Snapshot::default() };
            let table = Snapshot::encode_table(&[snapshot.clone(), snapshot]).expect("valid");
            vec![prefixed(&[2], &table)]
        }
        "index" => {
            let mut seeds: Vec<_> =
                indexes().iter().map(|(kind, bytes)| prefixed(&[*kind, 7], bytes)).collect();
            seeds.extend(images().iter().map(|image| prefixed(&[4, 0], image)));
            seeds
        }
        "journal" => journals(),
        "embedded" => leads(),
        "nbd_handshake" => vec![handshake(255), handshake(0)],
        "nbd_starttls" => vec![starttls(true), starttls(false)],
        "remote" => {
            let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
            let layer = |more: &str| {
                format!(
                    r#"{{"digest":"{digest}","length":9,"format":"qcow2","size":512,"file":"a",{more}"table":"{digest}"}}"#
                )
            };
            let manifest = format!(
                r#"{{"format":"isobath-chain","version":2,"size":512,"heads":{{"digest":"{digest}","length":16}},"index":{{"digest":"{digest}","length":9}},"layers":[{},{}]}}"#,
                layer(""),
                layer(r#""backing":"a","backing_format":"qcow2","#)
            );
            let first = b"\x02IHDS\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\x08\0\0\0\0\0\0\0\x01QFI12345678x";
            let words = [2_u32, 1, 3, 16, 0, 3, 8, 16].map(u32::to_be_bytes).concat();
            let second = [b"\x01IHDS", &words[..], b"ALLchecksums of itQFI12345678checksums of it!"].concat();
            let numbers = [1_u32, 2, 1].map(u32::to_be_bytes).concat();
            let run = [1_u32, 0, 7, 3].map(u32::to_be_bytes).concat();
            let trace = [b"ITRC", &numbers[..], &[7; 64], &run].concat();
            vec![manifest.into_bytes(), first.to_vec(), second, trace]
        }
        "tls_name" => vec![
            b"\x31\x0b\x30\x09\x06\x03\x55\x04\x06\x13\x02GB\x31\x0c\x30\x0a\x06\x03\x55\x04\x03\x0c\x03a,b"
                .to_vec(),
        ],
        "tls_channel" => crate::tls_channel::valid_inputs(),
        "nbd_session" => sessions(),
        "fuse" => crate::fuse::valid_inputs(),
        "qmp" => crate::qmp::conversations(),
        "job_file" => crate::qmp::job_files(),
        "formats" => crate::formats::valid_inputs(),
        "luks" => crate::luks::valid_inputs(),
        "restart_log" => crate::restart_log::valid_inputs(),
        "vhost_messages" => crate::vhost_messages::valid_inputs(),
        "vhost_user" => crate::vhost_user::valid_inputs(),
        "nbd_request" => {
            let request = |command, offset, length| {
                let header = Request { flags: 0, command, cookie: 7, offset, length }.encode();
                prefixed(&[6, 0, 0, 0, 0, 0x40, 0, 0, 0], &header)
            };
            (0..8).map(|command| request(command, 4096, 512)).collect()
        }
        _ => Vec::new(),
    }
}

/// Blocks of an index, by their kind.
fn indexes() -> Vec<(u8, Vec<u8>)> {
    let pointer = BlockPointer {
        layer: 1,
        offset: HostOffset::new(1 << 16),
        length: 100,
        hash: BlockHash::of(b"block"),
    };
    let record = LayerRecord {
        name: "base.qcow2".into(),
        format: RecordedFormat::Qcow2,
        stamp: Some(LayerStamp { length: 1 << 20, modified: 5, changed: 6, inode: 7 }),
        digest: Some(BlockHash::of(b"tables")),
    };
    let image = NewImage::new(1 << 30).plan().and_then(|plan| plan.header().encode());
    let head = image.ok().and_then(|image| Head::new(&image, &[0, 0, 0, 0, 0, 6, 0, 0]));
    let heads = Head::encode_all(&vec![head; 7]);
    let block = HeadsBlock { length: heads.len() as u32, hash: BlockHash::of(&heads) };
    let root = Root {
        unit_bits: 16,
        position: 3,
        covers: 3,
        size: 1 << 30,
        chapters: Vec::new(),
        tail: vec![record.clone(), record.clone(), record.clone()],
        segments: vec![Some(pointer)],
    };
    let whole = WholeRoot { unit_bits: 16, layers: 3, size: 1 << 30, segments: vec![None] };
    let listed = PageRecord { page: Some(pointer), folded: 1, newer: vec![1, 2] };
    let segment = Segment { number: 0, pages: vec![listed, PageRecord::default()] };
    let data = (0..500).map(|n| PageEntry::Data { layer: n % 3, host: HostOffset::new(1 << 20) });
    let page = Page::new(0, 16, data).encode(16).expect("small offsets");
    vec![
        (0, root.encode()),
        (0, whole.encode()),
        (1, segment.encode()),
        (2, page),
        (3, LayerRecord::encode_chapter(&vec![record; 7], Some(&block))),
        (5, heads),
    ]
}

/// A record, an area of several, and headers to be edited.
fn journals() -> Vec<Vec<u8>> {
    let offset = HostOffset::new(1 << 16);
    let operations = vec![
        Operation::Patch { offset, bytes: vec![1; 100] },
        Operation::Zero { offset, length: 1 << 16 },
        Operation::Revoke { offset, length: 50 },
        Operation::Data { offset, bytes: vec![2; 5000] },
        Operation::Checksum { offset, length: 512, crc: 3 },
        Operation::Zones(Zones {
            checkpoint_lsn: Lsn::new(9),
            durable_lsn: Lsn::new(7),
            zones: vec![
                Zone { start: offset, clusters: 10, id: ZoneId([4; 16]), plain: vec![1, 2] },
                Zone {
                    start: HostOffset::new(0),
                    clusters: 8,
                    id: ZoneId([5; 16]),
                    plain: vec![0],
                },
            ],
        }),
    ];
    let record = |n| Record {
        lsn: Lsn::new(n),
        previous: Lsn::new(n - 1),
        tail: Lsn::new(1),
        data_from: Lsn::new(1),
        operations: operations.clone(),
    };
    let blocks = |n| record(n).encode(crate::journal::ID).expect("a valid record");
    let area = [blocks(2), blocks(3), blocks(1)].concat();
    let mut seeds = vec![[&[0][..], &blocks(3)].concat(), [&[1][..], &area].concat()];
    seeds.extend(images().iter().map(|new| [&[2][..], &image(new)].concat()));
    seeds
}

/// Lead blocks with a record in each span, and data that may get one.
fn leads() -> Vec<Vec<u8>> {
    let dense: Vec<u8> =
        (0..512u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8 ^ (at / 3) as u8).collect();
    let data = [vec![b'a'; LEAD], [dense, vec![7; LEAD - 512]].concat()];
    let mapping = Mapping {
        cluster: ClusterIndex::new(7),
        lsn: Lsn::new(9),
        durable_lsn: Lsn::new(5),
        rest: Some(0x0102_0304),
    };
    let records = data.iter().map(|plain| {
        let mut block = plain.clone();
        embed(&mut block, &mapping, crate::embedded::ZONE).expect("it compresses");
        block
    });
    let mut seeds: Vec<_> =
        records.flat_map(|block| [0, 2].map(|kind| [&[kind][..], &block].concat())).collect();
    let numbers = [7u64, 9, 5].map(u64::to_be_bytes).concat();
    seeds.extend(data.iter().map(|plain| [&[3][..], &numbers, &[1, 2, 3, 4], plain].concat()));
    seeds
}

/// Small images of many kinds.
fn images() -> Vec<NewImage> {
    let plain = |cluster_bits| NewImage {
        cluster_bits,
        preallocate: true,
        ..NewImage::new(20 * (1 << cluster_bits))
    };
    vec![
        NewImage { version: 2, ..plain(9) },
        NewImage { refcount_order: 0, lazy_refcounts: true, ..plain(9) },
        NewImage { refcount_order: 6, compression_type: CompressionType::Zstd, ..plain(9) },
        NewImage {
            backing_file: Some("base".into()),
            backing_format: Some("raw".into()),
            preallocate: false,
            ..plain(12)
        },
        NewImage { extended_l2: true, size: 100_000, ..plain(14) },
        NewImage {
            backing_file: Some("image".into()),
            backing_format: Some("qcow2".into()),
            preallocate: false,
            ..plain(9)
        },
    ]
}

fn image(new: &NewImage) -> Vec<u8> {
    let plan = new.plan().expect("valid options");
    let mut bytes = vec![0; plan.file_length() as usize];
    for (offset, part) in plan.writes() {
        let start = offset.get() as usize;
        bytes[start..start + part.len()].copy_from_slice(&part);
    }
    bytes
}

/// A client's part of a handshake that it encrypts: structured replies, `STARTTLS` at the end of a piece, and a whole
/// handshake after it.
fn starttls(required: bool) -> Vec<u8> {
    let first: [&[u8]; 2] = [b"IHAVEOPT\0\0\0\x08\0\0\0\0", b"IHAVEOPT\0\0\0\x05\0\0\0\0"];
    let first = [&3u32.to_be_bytes()[..], &first.concat()].concat();
    let prefix = [first.len() as u8 - 1, u8::from(required)];
    [&prefix[..], &first, &handshake(0)[5..]].concat()
}

/// A client's part of a handshake: structured replies, a list, a context, and the export `disk`.
fn handshake(piece: u8) -> Vec<u8> {
    let mut bytes = vec![piece];
    bytes.extend(3u32.to_be_bytes());
    let mut option = |number: u32, data: &[u8]| {
        bytes.extend(b"IHAVEOPT");
        bytes.extend(number.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    };
    let text = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    let context = [text("disk"), 1u32.to_be_bytes().to_vec(), text("base:allocation")].concat();
    option(8, &[]);
    option(3, &[]);
    option(9, &context);
    option(10, &context);
    option(6, &[text("disk"), vec![0, 1, 0, 3]].concat());
    option(7, &[text("disk"), vec![0, 0]].concat());
    bytes
}

/// NBD sessions: the requests in short form, and whole conversations as a client sends them.
fn sessions() -> Vec<Vec<u8>> {
    let short: Vec<u8> = (0..8).flat_map(|command| [command, 1, 16, 0, 2, 0, 9, command]).collect();
    let framed = [[GREETED | STRUCTURED | FRAMED, 60, 1, 0].as_slice(), &short].concat();
    let write = script::request(1, 1, 7, (4096, 3), b"abc");
    let read = script::request(0, 4, 8, (4095, 5), &[]);
    let status = script::request(7, 0, 9, (0, 65536), &[]);
    let greeted = [&[GREETED | STRUCTURED, 200, 0, 0][..], &write, &read, &status].concat();
    // The flags come before the input.
    let whole = [&[0, 30, 0, 0][..], &script::handshake(true)[4..], &write, &read].concat();
    vec![framed, greeted, whole]
}
