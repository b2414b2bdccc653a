//! The examples work, and QEMU agrees with what they leave.

use isobath_testkit::qemu;

#[allow(dead_code, reason = "its main")]
#[path = "../../examples/chain.rs"]
mod chain;
#[allow(dead_code, reason = "its main")]
#[path = "../../examples/embed.rs"]
mod embed;
#[allow(dead_code, reason = "its main")]
#[path = "../../examples/read_disk.rs"]
mod read_disk;

#[test]
fn a_chain_is_made_and_merged() {
    let directory = tempfile::tempdir().unwrap();
    chain::run(directory.path()).unwrap();
    let merged = directory.path().join("layer4.qcow2");
    qemu::assert_clean(&merged);
    assert!(qemu::info(&merged)["backing-filename"].is_null());
    let disk = qemu::read_disk(&merged, "qcow2");
    assert!(disk[..5 << 20].iter().enumerate().all(|(at, byte)| *byte == (at >> 20) as u8 + 1));
    assert!(disk[5 << 20..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_disk_is_embedded() {
    let directory = tempfile::tempdir().unwrap();
    let (image, overlay) = (directory.path().join("disk"), directory.path().join("overlay"));
    qemu::create(&image, "qcow2", 64 << 20, "");
    embed::run(image.clone(), overlay.clone()).unwrap();
    qemu::assert_clean(&image);
    qemu::assert_clean(&overlay);
    let disk = qemu::read_disk(&overlay, "qcow2");
    assert!((0..256 * 4096).all(|at| disk[at] == (at / 4096) as u8));
}

#[test]
fn a_disk_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    // Longer than one step, and no multiple of it.
    qemu::create(&image, "qcow2", (5 << 19) + 512, "");
    let _ = qemu::io(&image, "qcow2", &["write -P 7 1m 64k", "write -P 8 2621440 512"]).ok();
    let mut read = Vec::new();
    read_disk::run(image.as_os_str(), &mut read).unwrap();
    assert!(read == qemu::read_disk(&image, "qcow2"));
}
