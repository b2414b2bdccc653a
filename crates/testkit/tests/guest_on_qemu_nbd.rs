//! A guest works on a chain that qemu-nbd serves: what the harness itself can and cannot do.

use isobath_testkit::chain::{Chain, Commands};
use isobath_testkit::guest::Guest;
use isobath_testkit::ops::Op;
use isobath_testkit::{args, fs, qemu};
use std::time::Instant;

#[test]
fn a_root_file_system_on_a_chain_survives_a_workload() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::make_root(&path("root.raw"), 64 << 20);
    let _ = qemu::img(args!["convert", "-O", "qcow2", path("root.raw"), path("base.qcow2")]).ok();
    let mut chain = Chain::on(directory.path(), &path("base.qcow2"), "qcow2");
    let writer = Commands::qemu();
    chain.alternate(&[&writer], 3, |_| (String::new(), vec![Op::Flush]));
    let server = qemu::nbd(chain.active(), "qcow2", &path("nbd.sock"), &[]);
    let start = Instant::now();
    let done = Guest::new().nbd(&path("nbd.sock"), "").root().run(
        "dd if=/dev/urandom of=/data/random bs=64k count=40 conv=fsync 2>/dev/null
         cp /data/random /data/copy
         sync
         echo 3 >/proc/sys/vm/drop_caches
         echo sum=$(md5sum </data/random)
         echo sum=$(md5sum </data/copy)
         rm /data/random
         fstrim /
         grep ' / ' /proc/mounts",
    );
    eprintln!("{:?}\n{}", start.elapsed(), done.console);
    let _ = server.stop();
    let sums = done.values("sum");
    assert_eq!(sums.len(), 2, "{}", done.output);
    assert_eq!(sums[0], sums[1]);
    assert!(done.output.contains("/dev/vda / ext4"), "{}", done.output);
    chain.assert_clean();
    fs::assert_ext4_clean(chain.active(), "qcow2");
    // The workload's bytes are in the active layer, and only there.
    let copy = path("copy");
    fs::read_ext4_file(chain.active(), "qcow2", "/data/copy", &copy);
    assert_eq!(copy.metadata().unwrap().len(), 40 << 16);
}
