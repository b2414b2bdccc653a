//! The main job: a Linux guest boots from a disk that `isobath serve` gives it, over a chain of ten
//! layers by different writers, and works on it.

use crate::serving::{ISOBATH, Served};
use isobath_testkit::chain::Commands;
use isobath_testkit::guest::Guest;
use isobath_testkit::scenario::RootChain;
use isobath_testkit::seed::Seed;
use std::path::Path;

#[test]
fn a_guest_boots_from_ten_layers_and_leaves_all_of_them_clean() {
    let directory = tempfile::tempdir().unwrap();
    let seed = Seed::new();
    let (qemu, own) = (Commands::qemu(), Commands::isobath(Path::new(ISOBATH)));
    let root = RootChain::make(directory.path(), 10, &[&qemu, &own], &seed);
    let writers: Vec<_> = root.chain.layers().iter().map(|layer| layer.writer.as_str()).collect();
    assert_eq!(writers.iter().filter(|writer| **writer == "isobath").count(), 4);
    assert_eq!(writers.iter().filter(|writer| **writer == "qemu").count(), 5);

    let served = Served::start(&[root.chain.active()], &[]);
    let done = Guest::new().nbd(&served.socket, "").root().run(RootChain::workload());
    let _ = served.stop();
    assert_eq!(root.check(&done).len(), 4);
}
