//! The model and QEMU agree on what chains hold.

use isobath_testkit::chain::{Chain, Commands};
use isobath_testkit::ops::{Op, Shape};
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;

#[test]
fn qemu_does_what_the_model_says() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let qemu = Commands::qemu();
    for options in ["cluster_size=512", "cluster_size=64k,extended_l2=on", "compat=0.10"] {
        let directory = tempfile::tempdir().unwrap();
        let mut chain = Chain::new(directory.path(), (1 << 20) + 512);
        for _ in 0..4 {
            let size = chain.model().size();
            let shape = Shape { size, longest: 150_000, unit: 4096 };
            let mut ops = shape.ops(&mut rng, 40);
            ops.push(Op::Resize {
                size: shape.range(&mut rng).0.next_multiple_of(512).max(200_192),
            });
            chain.add(&qemu, options, &ops);
            chain.verify();
        }
        assert_eq!(chain.layers().len(), 4);
    }
}

#[test]
#[should_panic(expected = "instead of")]
fn a_byte_that_the_model_does_not_know_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let mut chain = Chain::new(directory.path(), 1 << 20);
    chain.add(&Commands::qemu(), "", &[Op::Write { offset: 0, length: 1000, pattern: 1 }]);
    let _ = qemu::io(chain.active(), "qcow2", &["write -P 2 999 1"]).ok();
    chain.verify();
}
