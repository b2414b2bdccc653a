//! `isobath map` prints what `qemu-img map` prints, on chains of every kind.

use super::chains::{assert_same, qemu_img, random_chain};
use isobath_testkit::args;
use isobath_testkit::seed::Seed;
use rand::RngExt;

#[test]
fn random_chains() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..16 {
        let chain = random_chain(&mut rng);
        for output in ["human", "json"] {
            let mut arguments = args!["map", "-f", chain.format, format!("--output={output}")];
            arguments.push(chain.name().into());
            assert_same(chain.path(), &arguments);
            let start = rng.random_range(0..chain.size);
            let length = rng.random_range(0..=chain.size);
            arguments.extend(args![format!("--start-offset={start}"), "-U"]);
            assert_same(chain.path(), &arguments);
            arguments.extend(args!["-l", length.to_string()]);
            assert_same(chain.path(), &arguments);
        }
    }
}

#[test]
fn an_empty_disk_has_one_entry() {
    let directory = tempfile::tempdir().unwrap();
    let _ = qemu_img(directory.path(), ["create", "-q", "-f", "qcow2", "empty", "0"]).ok();
    assert_same(directory.path(), &args!["map", "--output=json", "empty"]);
    assert_same(directory.path(), &args!["map", "empty"]);
}

#[test]
fn a_huge_sparse_disk_is_described_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", "huge", "1P"];
    let _ = qemu_img(directory.path(), create).ok();
    let image = directory.path().join("huge");
    let _ = isobath_testkit::qemu::io(&image, "qcow2", &["write -P 1 500T 64k"]).ok();
    assert_same(directory.path(), &args!["map", "--output=json", "huge"]);
}
