//! Headers that lie.

use super::images::{Image, at, made, overlay, plain, with_snapshot_and_bitmap};
use super::survive::{guarded, host_with, open, read_all, survive, writable, write_all};
use futures_executor::block_on;
use isobath_disk::OpenOptions;

/// What opening and reading the image says; empty where nothing is wrong.
fn reading(image: &Image) -> String {
    let bytes = image.bytes.clone();
    guarded("read", move || {
        block_on(async {
            match open(host_with(&bytes), &OpenOptions::default()).await {
                Ok(disk) => read_all(&disk).await.err(),
                Err(error) => Some(error),
            }
            .map_or(String::new(), |error| error.to_string())
        })
    })
}

/// What opening for writing and writing says.
fn writing(image: &Image) -> String {
    let bytes = image.bytes.clone();
    guarded("write", move || {
        block_on(async {
            match open(host_with(&bytes), &writable()).await {
                Ok(disk) => write_all(disk).await.err(),
                Err(error) => Some(error),
            }
            .map_or(String::new(), |error| error.to_string())
        })
    })
}

#[track_caller]
fn says(message: &str, words: &[&str]) {
    for word in ["image.qcow2"].iter().chain(words) {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
}

/// What is done to an image, and words of what is then said.
type Case<'a> = (&'a dyn Fn(&mut Image), &'a [&'a str]);

#[test]
fn a_field_out_of_range_is_named_with_its_value() {
    let valid = block_on(made(&plain()));
    let snapshots = with_snapshot_and_bitmap();
    let end = valid.bytes.len() as u64;
    let cases: &[Case] = &[
        (&|i| i.put32(4, 4), &["version", "4"]),
        (&|i| i.put32(at::CLUSTER_BITS, 8), &["cluster_bits", "8"]),
        (&|i| i.put32(at::CLUSTER_BITS, 22), &["cluster_bits", "22"]),
        (&|i| i.put32(at::CLUSTER_BITS, u32::MAX), &["cluster_bits"]),
        (&|i| i.put64(at::SIZE, u64::MAX), &["size"]),
        (&|i| i.put64(at::SIZE, 1 << 50), &["size"]),
        (&|i| i.put32(at::CRYPT_METHOD, 1), &["ncrypt"]),
        (&|i| i.put32(at::CRYPT_METHOD, 2), &["ncrypt"]),
        (&|i| i.put32(at::CRYPT_METHOD, 77), &["crypt_method", "77"]),
        (&|i| i.put32(at::L1_SIZE, u32::MAX), &["l1_size"]),
        (&|i| i.put32(at::L1_SIZE, 0), &["l1_size"]),
        (&|i| i.put64(at::L1_OFFSET, 5), &["l1_table_offset", "5"]),
        (&|i| i.put64(at::L1_OFFSET, 1 << 40), &["l1_table_offset"]),
        (&|i| i.put64(at::L1_OFFSET, end), &["l1_table_offset"]),
        (&|i| i.put64(at::L1_OFFSET, u64::MAX << 12), &["l1_table_offset"]),
        (&|i| i.put32(at::REFCOUNT_ORDER, 7), &["refcount_order", "7"]),
        (&|i| i.put32(at::HEADER_LENGTH, 50), &["header_length", "50"]),
        (&|i| i.put32(at::HEADER_LENGTH, u32::MAX), &["header_length"]),
        (&|i| i.bytes[at::COMPRESSION] = 9, &["compression_type", "9"]),
        (
            &|i| {
                i.put32(at::BACKING_SIZE, 1024);
                i.put64(at::BACKING_OFFSET, 200);
            },
            &["backing_file_size", "1024"],
        ),
        (
            &|i| {
                i.put32(at::BACKING_SIZE, 9);
                i.put64(at::BACKING_OFFSET, 1 << 40);
            },
            &["backing_file_offset"],
        ),
        (&|i| i.put64(at::INCOMPATIBLE, 1 << 63), &["feature"]),
        (&|i| i.put64(at::INCOMPATIBLE, 1 << 4), &["extended"]),
    ];
    for (index, (change, words)) in cases.iter().enumerate() {
        let mut image = valid.clone();
        change(&mut image);
        let message = reading(&image);
        assert!(!message.is_empty(), "case {index}, {words:?}: is read as if nothing were wrong");
        says(&message, words);
        survive(&format!("case {index}"), &image.bytes);
    }
    // These matter to those who write.
    let cases: &[Case] = &[
        (&|i| i.put32(at::L1_SIZE, 4 << 20), &["l1_table_offset"]),
        (&|i| i.put64(at::REFCOUNT_TABLE, 513), &["refcount_table_offset", "0x201"]),
        (&|i| i.put32(at::REFCOUNT_CLUSTERS, u32::MAX), &["refcount_table_clusters"]),
        (&|i| i.put32(at::SNAPSHOTS, 65_537), &["nb_snapshots", "65537"]),
        (&|i| i.put64(at::REFCOUNT_TABLE, 1 << 40), &["refcount_table_offset"]),
        (&|i| i.put64(at::REFCOUNT_TABLE, 0), &["refcount"]),
        (&|i| i.put32(at::REFCOUNT_CLUSTERS, 2048), &["refcount_table_offset"]),
        (&|i| i.put32(at::REFCOUNT_CLUSTERS, 0), &["refcount_table_clusters"]),
        (&|i| i.put64(at::SNAPSHOTS_OFFSET, 1 << 40), &["snapshot"]),
        (&|i| i.put32(at::SNAPSHOTS, 65_536), &["snapshot"]),
        (&|i| i.put64(at::INCOMPATIBLE, 2), &["corrupt"]),
    ];
    for (index, (change, words)) in cases.iter().enumerate() {
        let mut image = snapshots.clone();
        change(&mut image);
        let message = writing(&image);
        assert!(
            !message.is_empty(),
            "case {index}, {words:?}: is written as if nothing were wrong"
        );
        says(&message, words);
        survive(&format!("case {index} of writes"), &image.bytes);
    }
}

#[test]
fn a_file_cut_short_is_refused_or_read_up_to_there() {
    let images = [block_on(made(&plain())), block_on(made(&overlay())), with_snapshot_and_bitmap()];
    for image in images {
        let length = image.bytes.len();
        let edges = image.tables.iter().flat_map(|range| [range.start, range.end]);
        let mut cuts: Vec<usize> = edges
            .flat_map(|edge| [edge.saturating_sub(1), edge, edge + 1, edge + 8])
            .chain([0, 1, 3, 4, 8, 71, 72, 73, 103, 104, 105, 111, 112, 120, 511, 512, 513])
            .filter(|cut| *cut < length)
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        for cut in cuts {
            survive(&format!("cut to {cut} of {length}"), &image.bytes[..cut]);
        }
        let mut nothing = image.clone();
        nothing.bytes.truncate(104);
        says(&reading(&nothing), &[]);
    }
}

#[test]
fn a_huge_claim_in_a_sparse_file_takes_bounded_memory() {
    // An L1 table of 32 MiB, all holes, and a refcount table of 8 MiB.
    let mut image = block_on(made(&plain()));
    image.put64(at::SIZE, 1 << 43);
    image.put32(at::L1_SIZE, 4 << 20);
    image.put64(at::L1_OFFSET, 1 << 30);
    image.put64(at::REFCOUNT_TABLE, 2 << 30);
    image.put32(at::REFCOUNT_CLUSTERS, 2048);
    let message = guarded("a sparse file", move || {
        block_on(async {
            let host = host_with(&image.bytes);
            super::survive::lengthen(&host, 1 << 42).await;
            let disk = open(host.clone(), &OpenOptions::default()).await.unwrap();
            read_all(&disk).await.unwrap();
            drop(disk);
            match open(host.clone(), &writable()).await {
                Ok(disk) => write_all(disk).await,
                Err(error) => Err(error),
            }
            .map_or_else(|error| error.to_string(), |()| String::new())
        })
    });
    assert!(message.is_empty() || message.contains("image.qcow2"), "{message}");
}

#[test]
fn unknown_features_with_hostile_names_are_shown_harmlessly() {
    let mut image = block_on(made(&plain()));
    image.put64(at::INCOMPATIBLE, 1 << 40);
    // A feature name table with one name: of bit 40, with an escape sequence and a newline.
    let mut table = vec![0_u8; 48];
    table[1] = 40;
    let name = b"\x1b[31mred\nroot:x:0:0";
    table[2..2 + name.len()].copy_from_slice(name);
    image.put32(112, 0x6803_f857);
    image.put32(116, 48);
    image.bytes[120..168].copy_from_slice(&table);
    image.put64(168, 0);
    let message = reading(&image);
    says(&message, &["red"]);
    assert!(!message.contains(['\x1b', '\n']), "{message:?}");
    survive("hostile feature names", &image.bytes);
}
