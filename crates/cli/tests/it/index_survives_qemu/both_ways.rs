//! QEMU and isobath write to the same images in turn.

use super::chains::isobath;
use isobath_testkit::args;
use isobath_testkit::bytes::first_difference;
use isobath_testkit::chain::{Chain, Commands, Writer};
use isobath_testkit::ops::{Op, Shape};
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use std::fs;
use std::path::Path;

const SIZE: u64 = 1 << 20;

/// Fails the test unless the disk holds, as QEMU and as isobath read it, what was written.
#[track_caller]
fn verify(chain: &mut Chain, directory: &Path) {
    chain.verify();
    let raw = directory.join("ours.raw");
    let arguments = args!["convert", "-f", "qcow2", "-O", "raw", chain.active(), &raw];
    let finished = isobath(directory, arguments).ok();
    let (theirs, ours) = (qemu::read_disk(chain.active(), "qcow2"), fs::read(&raw).unwrap());
    assert_eq!(first_difference(&theirs, &ours), None, "{}", finished.report());
    // The index is whole, out of date, overwritten or not there; it never tells something else.
    let verified = isobath(directory, args!["index", "--verify", chain.active()]);
    assert!(!verified.text().contains("differs"), "{}", verified.report());
}

/// Makes an index anew, or removes it.
#[track_caller]
fn index(chain: &Chain, directory: &Path, drop: bool) {
    let mut arguments = args!["index", "-q", chain.active()];
    if drop {
        arguments.push("--drop".into());
    }
    let _ = isobath(directory, arguments).ok();
    if !drop {
        let _ = isobath(directory, args!["index", "--verify", chain.active()]).ok();
    }
}

#[test]
fn qemu_and_isobath_write_in_turn() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let qemu = Commands::qemu();
    let isobath = Commands::isobath(env!("CARGO_BIN_EXE_isobath").as_ref());
    let writers: [&dyn Writer; 2] = [&qemu, &isobath];
    for _ in 0..6 {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let cluster: u64 = 1 << rng.random_range(11..=16);
        let options = match (rng.random_range(0..4), cluster >= 16384) {
            (0, _) => format!("compat=0.10,cluster_size={cluster}"),
            (1, true) => format!("extended_l2=on,cluster_size={cluster}"),
            _ => format!("cluster_size={cluster}"),
        };
        let shape = Shape { size: SIZE, longest: 60_000, unit: cluster };
        let mut chain = Chain::new(path, SIZE);
        println!("{options}");
        chain.alternate(&writers, 3, |_| (options.clone(), shape.ops(&mut rng, 10)));
        verify(&mut chain, path);
        for _ in 0..10 {
            let count = rng.random_range(1..8);
            match rng.random_range(0..10) {
                0..3 => {
                    println!("QEMU writes");
                    chain.apply(&qemu, &shape.ops(&mut rng, count));
                }
                3..6 => {
                    println!("isobath writes");
                    chain.apply(&isobath, &shape.ops(&mut rng, count));
                }
                6 => {
                    println!("a new index");
                    index(&chain, path, false);
                }
                7 => {
                    println!("no index");
                    index(&chain, path, true);
                }
                8 => {
                    println!("QEMU makes an overlay");
                    chain.add(&qemu, &options, &[]);
                }
                _ => {
                    println!("isobath makes an overlay");
                    chain.add(&isobath, &options, &[]);
                }
            }
            verify(&mut chain, path);
        }
    }
}

/// The clusters of an index are QEMU's to take: it does, and nothing is lost but the index.
#[test]
fn qemu_writes_over_the_index() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let qemu = Commands::qemu();
    let isobath_commands = Commands::isobath(env!("CARGO_BIN_EXE_isobath").as_ref());
    let shape = Shape { size: SIZE, longest: 60_000, unit: 4096 };
    let seed = Seed::new();
    let mut rng = seed.rng();
    for appended in [false, true] {
        let mut chain = Chain::new(path, SIZE);
        let plan = |_| ("cluster_size=4k".to_owned(), shape.ops(&mut rng, 10));
        chain.alternate(&[&isobath_commands], 4, plan);
        if appended {
            index(&chain, path, false);
        }
        let area = extension(chain.active());
        let before = fs::read(chain.active()).unwrap()[area.clone()].to_vec();
        assert!(before.iter().any(|byte| *byte != 0));
        // In clusters, one by one, as makes QEMU use every free one.
        let write = |offset| Op::Write { offset, length: 4096, pattern: 0xa5 };
        let all: Vec<Op> = (0..SIZE).step_by(4096).map(write).collect();
        chain.apply(&qemu, &all);
        assert!(fs::read(chain.active()).unwrap()[area] != before, "QEMU left the index alone");
        verify(&mut chain, path);
        chain.apply(&isobath_commands, &shape.ops(&mut rng, 10));
        verify(&mut chain, path);
        index(&chain, path, false);
        verify(&mut chain, path);
        chain.apply(&qemu, &shape.ops(&mut rng, 10));
        index(&chain, path, true);
        verify(&mut chain, path);
        for layer in chain.layers() {
            fs::remove_file(&layer.path).unwrap();
        }
    }
}

/// Where an image's file has its index.
#[track_caller]
fn extension(image: &Path) -> std::ops::Range<usize> {
    let header = isobath_qcow2::Header::parse(&fs::read(image).unwrap()).unwrap();
    let extension = header.index().unwrap();
    let start = extension.area_offset.get() as usize;
    start..start + extension.area_length as usize
}
