//! Images on a block device, as a logical volume is: it does not grow, and what lies behind the image's
//! last cluster is not zero.

use crate::serving::{ISOBATH, QemuIo, Served};
use isobath_testkit::locks::until_unlocked;
use isobath_testkit::loop_device::LoopDevice;
use isobath_testkit::process::run;
use isobath_testkit::qemu;
use std::fs;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// Writes clusters with a flush behind each, kills the server in one half of the cases, recovers the image
/// and reads it with QEMU.
fn survives(mode: &str, killed: bool) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("device");
    fs::write(&file, vec![0xa5; 128 * MIB as usize]).unwrap();
    let device = LoopDevice::new(&file);
    qemu::create(device.path(), "qcow2", 64 * MIB, "");
    let served = Served::start(&[device.path()], &["--metadata", mode, "--export-name", "disk"]);
    let mut client = QemuIo::open("raw", served.uri("disk"));
    for number in 0..100 {
        client.ok(&format!("write -P {} {}k 4k", number + 1, number * 192));
        client.ok("flush");
    }
    drop(client);
    if killed {
        let _ = served.server.kill();
        until_unlocked(device.path());
        let mut check = Command::new(ISOBATH);
        let _ = run(check.args(["check", "-q", "-r", "all"]).arg(device.path())).ok();
    } else {
        let _ = served.stop();
    }
    qemu::assert_clean(device.path());
    let reads: Vec<_> = (0..100)
        .flat_map(|number| {
            let at = number * 192;
            [format!("read -P {} {at}k 4k", number + 1), format!("read -P 0 {}k 60k", at + 4)]
        })
        .collect();
    let done = qemu::io(device.path(), "qcow2", &reads).ok();
    assert!(!done.text().contains("verification failed"), "{mode}: {}", done.report());
}

#[test]
fn every_mode_keeps_an_image_on_a_block_device() {
    for mode in ["ordered", "journal", "embedded"] {
        for killed in [false, true] {
            survives(mode, killed);
        }
    }
}
