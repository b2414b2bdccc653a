//! `isobath resize` does what `qemu-img resize` does.

use super::chains::{
    assert_same_content, isobath, qemu_img, random_chain, random_size, scribble_without,
};
use isobath_testkit::bytes::first_other_than;
use isobath_testkit::process::run_program;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;

#[test]
fn random_chains_grow_alike() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..10 {
        let chain = random_chain(&mut rng);
        let copy = chain.path().join("copy");
        let _ = run_program("cp", [&chain.top, &copy]).ok();
        let mut size = chain.size;
        for _ in 0..3 {
            let more = random_size(&mut rng);
            size += more;
            let by = if rng.random() { format!("+{more}") } else { size.to_string() };
            let mode = ["off", "metadata", "falloc", "full"][rng.random_range(0..4)];
            let mode = if chain.format == "raw" { "off" } else { mode };
            let preallocation = format!("--preallocation={mode}");
            println!("{by} {mode}");
            let before = qemu::read_disk(&copy, chain.format);
            let arguments = |name| args!["resize", "-f", chain.format, &preallocation, name, &by];
            let ours = isobath(chain.path(), arguments(chain.name())).ok();
            assert_eq!(ours.text(), "Image resized.\n");
            let theirs = qemu_img(chain.path(), arguments("copy".as_ref()));
            // QEMU cannot hide a backing file with version 2.
            let _ = if theirs.stderr.contains("not supported") {
                let raw = chain.path().join("raw");
                qemu::to_raw(&copy, "qcow2", &raw);
                let _ = qemu_img(chain.path(), args!["resize", "-q", "-f", "raw", "raw", &by]).ok();
                qemu_img(chain.path(), args!["convert", "-O", "qcow2", "raw", "copy"]).ok()
            } else {
                theirs.ok()
            };
            if chain.format == "qcow2" {
                qemu::assert_clean(&chain.top);
            }
            let own = qemu::read_disk(&chain.top, chain.format);
            assert!(own.starts_with(&before));
            let zero = |added: &[u8]| first_other_than(0, added).is_none();
            assert!(zero(&own[before.len()..]));
            let other = qemu::read_disk(&copy, chain.format);
            if !other.starts_with(&before) {
                // QEMU 7.2 preallocates over a last cluster that is compressed, and loses it.
                break;
            }
            if mode == "metadata" && !zero(&other[before.len()..]) {
                // QEMU takes free clusters without clearing them (docs/format.md).
                break;
            }
            assert_same_content(&chain.top, chain.format, &copy, chain.format);
            // The same into both, for what comes next. What a discard or a
            // compressed write does depends on what is allocated.
            let twin = Seed::from(rng.random::<u64>());
            scribble_without(
                &["discard", "write -c"],
                &chain.top,
                chain.format,
                size,
                &mut twin.rng(),
            );
            scribble_without(&["discard", "write -c"], &copy, chain.format, size, &mut twin.rng());
        }
    }
}

#[test]
fn shrinking_must_be_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for (name, format) in [("a.qcow2", "qcow2"), ("a.raw", "raw")] {
        let _ = qemu_img(path, ["create", "-q", "-f", format, name, "4M"]).ok();
        let _ = qemu::io(&path.join(name), format, &["write -P 7 0 4M"]).ok();
        let refused = isobath(path, ["resize", "-f", format, name, "1M"]).exits(1);
        assert!(refused.stderr.contains("Use the --shrink option"), "{}", refused.report());
        let shrink = ["resize", "-f", format, "--shrink", name, "-3M"];
        let _ = isobath(path, shrink).ok();
        assert!(qemu::read_disk(&path.join(name), format) == vec![7; 1 << 20]);
        assert!(path.join(name).metadata().unwrap().len() < 3 << 19);
        for (arguments, why) in [
            (vec!["--shrink", name, "0"], "must be positive"),
            (vec!["--shrink", name, "-1M"], "must be positive"),
            (vec!["--preallocation=full", "--shrink", name, "512"], "only be used for growing"),
            (vec!["--preallocation=some", name, "512"], "Invalid preallocation mode 'some'"),
            (vec![name, "x"], "Parameter 'size' expects"),
        ] {
            let arguments = [vec!["resize", "-f", format], arguments].concat();
            let refused = isobath(path, arguments).exits(1);
            assert!(refused.stderr.contains(why), "{}", refused.report());
        }
        assert!(qemu::read_disk(&path.join(name), format) == vec![7; 1 << 20]);
    }
    qemu::assert_clean(&path.join("a.qcow2"));
}
