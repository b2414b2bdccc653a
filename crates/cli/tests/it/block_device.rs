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

#[test]
fn what_is_copied_to_a_device_by_its_drivers_name_is_on_the_device() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    // What is copied ends with a hole.
    let copied = [vec![7; MIB as usize], vec![0; MIB as usize]].concat();
    let old = vec![0xa5; 8 * MIB as usize];
    fs::write(path("device"), &old).unwrap();
    fs::write(path("raw"), vec![7; MIB as usize]).unwrap();
    fs::OpenOptions::new().write(true).open(path("raw")).unwrap().set_len(2 * MIB).unwrap();
    let device = LoopDevice::new(&path("device"));
    let name = format!("host_device:{}", device.path().display());
    fs::write(path("other"), &copied).unwrap();
    let other = LoopDevice::new(&path("other"));
    let copy = other.path().to_str().unwrap();
    let run_both = |arguments: &[&str]| {
        [qemu::program("qemu-img"), path("qemu-img")].map(|program| {
            if matches!(arguments[0], "convert" | "dd") {
                fs::write(device.path(), &old).unwrap();
            }
            let mut command = Command::new(program);
            run(command.current_dir(directory.path()).args(arguments))
        })
    };
    std::os::unix::fs::symlink(ISOBATH, path("qemu-img")).unwrap();
    let plain = device.path().to_str().unwrap();
    let of = format!("of={plain}");
    for (arguments, format) in [
        (&["convert", "-O", "host_device", "raw", plain][..], "raw"),
        (&["convert", "-O", "raw", "raw", &name], "raw"),
        (&["convert", "-n", "-O", "raw", "raw", &name], "raw"),
        (&["convert", "-O", "qcow2", "raw", &name], "qcow2"),
        (&["create", "-f", "raw", &name, "2M"], "raw"),
        (&["create", "-f", "qcow2", &name, "2M"], "qcow2"),
        (&["create", "-f", "raw", &name, "20M"], ""),
        (&["create", "-f", "host_device", plain, "2M"], "raw"),
        (&["create", "-f", "host_device", &name, "1M"], "raw"),
        (&["create", "-f", "file", plain, "2M"], ""),
        (&["convert", "-f", "file", "-O", "host_device", "raw", plain], "raw"),
        (&["convert", "-f", "host_device", "-O", "host_device", copy, plain], "raw"),
        (&["dd", "-f", "raw", "-O", "raw", "bs=64k", "if=raw", &of], "raw"),
        (&["dd", "-f", "raw", "-O", "host_device", "bs=64k", "if=raw", &of], "raw"),
        (&["info", "-f", "host_device", "--output=json", plain], "raw"),
        (&["info", "-f", "host_cdrom", plain], "raw"),
        (&["info", "-f", "file", plain], ""),
        (&["map", "-f", "host_device", plain], "raw"),
        (&["compare", "-f", "host_device", "-F", "host_device", plain, plain], "raw"),
        (&["measure", "-f", "host_device", "-O", "qcow2", plain], "raw"),
        (&["create", "-f", "qcow2", "-b", plain, "-F", "host_cdrom", "above"], "raw"),
    ] {
        let [theirs, ours] = run_both(arguments);
        assert_eq!(theirs.code(), ours.code(), "{}{}", theirs.report(), ours.report());
        assert_eq!(theirs.code() == 0, !format.is_empty(), "{}", theirs.report());
        assert_eq!(theirs.text(), ours.text(), "{}", ours.report());
        if matches!(arguments[0], "convert" | "dd") {
            let disk = qemu::read_disk(device.path(), format);
            assert!(disk[..2 * MIB as usize] == copied, "{arguments:?}");
        }
    }
}
