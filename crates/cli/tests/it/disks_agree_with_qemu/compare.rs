//! `isobath compare` says what `qemu-img compare` says, with the same exit code.

use super::chains::{assert_same, isobath, qemu_img, random_chain, scribble};
use isobath_testkit::args;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use std::fs;

#[test]
fn random_chains_and_copies() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..15 {
        let chain = random_chain(&mut rng);
        let other = if rng.random() { "raw" } else { "qcow2" };
        let convert = args!["convert", "-f", chain.format, "-O", other, chain.name(), "other"];
        let _ = qemu_img(chain.path(), convert).ok();
        let mut arguments = args!["compare", "-f", chain.format, "-F", other];
        arguments.extend(args![chain.name(), "other"]);
        assert_same(chain.path(), &arguments);
        let copy = chain.path().join("other");
        if rng.random() {
            let size = rng.random_range(1..=chain.size / 256) * 512;
            let size = size.to_string();
            let _ =
                qemu_img(chain.path(), ["resize", "-q", "--shrink", "-f", other, "other", &size])
                    .ok();
            assert_same(chain.path(), &arguments);
        }
        let size = isobath_testkit::qemu::info(&copy)["virtual-size"].as_u64().unwrap();
        scribble(&copy, other, size, &mut rng);
        assert_same(chain.path(), &arguments);
        arguments.push("-q".into());
        assert_same(chain.path(), &arguments);
    }
}

#[test]
fn strict_mode_looks_at_sizes_and_allocation() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for (name, size) in [("one", "1M"), ("other", "1M"), ("longer", "2M")] {
        let _ = qemu_img(path, ["create", "-q", "-f", "qcow2", name, size]).ok();
    }
    let _ = isobath_testkit::qemu::io(&path.join("other"), "qcow2", &["write -P 0 64k 64k"]).ok();
    assert_same(path, &args!["compare", "-s", "one", "one", "-U"]);
    // QEMU's offset is that of the first run which ends with one of the disks alone.
    let ours = isobath(path, ["compare", "-s", "one", "other"]).exits(1);
    assert_eq!(ours.text(), "Strict mode: Offset 65536 block status mismatch!\n");
    let _ = qemu_img(path, ["compare", "-s", "one", "other"]).exits(1);
    assert_same(path, &args!["compare", "-s", "one", "longer"]);
    assert_same(path, &args!["compare", "one", "other"]);
    assert_same(path, &args!["compare", "longer", "one"]);
    assert_same(path, &args!["compare", "one", "missing"]);
    assert_same(path, &args!["compare", "one"]);
}

#[test]
fn an_unreadable_disk_has_its_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for (name, write) in [
        ("one", "write -P 1 0 1M"),
        ("other", "write -P 1 0 1M"),
        ("packed", "write -c -P 1 128k 64k"),
    ] {
        let _ = qemu_img(path, ["create", "-q", "-f", "qcow2", name, "1M"]).ok();
        let _ = isobath_testkit::qemu::io(&path.join(name), "qcow2", &[write]).ok();
    }
    let number = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & ((1 << 54) - 1)
    };
    let change = |name: &str, change: fn(&mut [u8], usize, usize)| {
        let mut bytes = fs::read(path.join(name)).unwrap();
        let l1 = number(&bytes, 40) as usize;
        let entry = number(&bytes, l1) as usize + 16;
        let place = number(&bytes, entry) as usize;
        change(&mut bytes, entry, place);
        fs::write(path.join(name), bytes).unwrap();
    };
    // An entry of the L2 table that lies off the clusters, and compressed data that is none.
    change("other", |bytes, entry, _| bytes[entry + 6] |= 2);
    change("packed", |bytes, _, place| bytes[place..place + 8].fill(0xff));
    for (name, code) in [("other", 3), ("packed", 4)] {
        let arguments = ["compare", "-U", name, name];
        let theirs = qemu_img(path, arguments);
        assert_eq!(theirs.code(), code, "{}", theirs.report());
        let ours = isobath(path, arguments);
        assert_eq!(ours.code(), code, "{}", ours.report());
        assert!(ours.stderr.contains(name), "{}", ours.report());
    }
}
