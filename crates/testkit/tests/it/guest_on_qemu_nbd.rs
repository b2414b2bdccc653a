//! Guests on disks served by qemu-nbd: the harness's features, and its detection of failures.

use isobath_testkit::chain::Commands;
use isobath_testkit::guest::Guest;
use isobath_testkit::scenario::RootChain;
use isobath_testkit::seed::Seed;
use isobath_testkit::{fs, qemu};

#[test]
fn a_root_file_system_on_a_chain_survives_a_workload() {
    let directory = tempfile::tempdir().unwrap();
    let seed = Seed::new();
    let root = RootChain::make(directory.path(), 4, &[&Commands::qemu()], &seed);
    let picture = root.picture(30);
    assert_eq!(picture.lines().filter(|line| line.contains('#')).count(), 4, "{picture}");
    let socket = directory.path().join("nbd.sock");
    let server = qemu::nbd(root.chain.active(), "qcow2", &socket, &[]);
    let done = Guest::new().nbd(&socket, "").root().run(RootChain::workload());
    let _ = server.stop_qemu();
    assert_eq!(root.check(&done).len(), 4);
}

#[test]
fn programs_of_the_host_run_in_the_guest_on_two_disks() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    qemu::create(&path("one.qcow2"), "qcow2", 16 << 20, "cluster_size=4k");
    fs::make_ext4(&path("two.raw"), 16 << 20);
    let server = qemu::nbd(&path("one.qcow2"), "qcow2", &path("nbd.sock"), &[]);
    let done = Guest::new()
        .nbd(&path("nbd.sock"), "")
        .drive(&format!("file={},format=raw", path("two.raw").display()))
        .program("fio")
        .file("/note", b"from the host")
        .memory(512)
        .run(
            "fio --name=verify --filename=/dev/vda --rw=randwrite --bsrange=512-16k --size=8m \
                 --ioengine=io_uring --iodepth=8 --direct=1 --verify=crc32c --do_verify=1 \
                 --fsync=100 --output=/tmp/report || { cat /tmp/report; exit 9; }
             mount -t ext4 /dev/vdb /mnt
             cp /note /mnt/note
             umount /mnt",
        );
    assert_eq!(done.status, 0);
    let _ = server.stop_qemu();
    qemu::assert_clean(&path("one.qcow2"));
    fs::assert_ext4_clean(&path("two.raw"), "raw");
    fs::read_ext4_file(&path("two.raw"), "raw", "note", &path("note"));
    assert_eq!(std::fs::read(path("note")).unwrap(), b"from the host");
}

#[test]
fn a_test_talks_to_a_running_guest_and_pulls_its_plug() {
    let mut guest = Guest::new().spawn("read -r word; echo heard $word; sleep 1000");
    guest.type_line("hello");
    guest.wait_for("heard hello");
    let console = guest.kill();
    assert!(!console.contains("GUEST-EXIT"), "{console}");
}

#[test]
fn a_failing_script_gives_its_status() {
    let done = Guest::new().spawn("echo before; false; echo after").wait();
    assert_eq!((done.status, done.output.trim()), (1, "before"));
}

#[test]
#[should_panic(expected = "the guest did not power off by itself")]
fn a_guest_that_crashes_fails_the_test() {
    let _ = Guest::new().spawn("echo c >/proc/sysrq-trigger; sleep 1000").wait();
}
