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
    for name in ["one", "other"] {
        let _ = qemu_img(path, ["create", "-q", "-f", "qcow2", name, "1M"]).ok();
        let _ = isobath_testkit::qemu::io(&path.join(name), "qcow2", &["write -P 1 0 1M"]).ok();
    }
    // An entry of the L2 table that lies off the clusters.
    let mut bytes = fs::read(path.join("other")).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    let l2 = u64::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap()) & ((1 << 56) - 1);
    bytes[l2 as usize + 16 + 6] |= 2;
    fs::write(path.join("other"), bytes).unwrap();
    let ours = isobath(path, ["compare", "-U", "one", "other"]);
    assert_eq!(ours.code(), 4, "{}", ours.report());
    assert!(ours.stderr.contains("other"), "{}", ours.report());
}
