//! One disk through several frontends at once, and servers that are killed while frontends are in use.

use crate::live::{DEVICE, ISOBATH, Live};
use crate::serving::QemuIo;
use isobath_testkit::guest::{Guest, until_a_line};
use isobath_testkit::process::{Ready, Server, run, run_program};
use isobath_testkit::{args, fuse, qemu, until};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A directory with an image of 64 MiB, `disk`, and a file to mount on, `file`.
fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("disk"), "qcow2", 64 * MIB, "");
    File::create(directory.path().join("file")).unwrap();
    directory
}

/// Whether something is mounted there.
fn is_mounted(path: &Path) -> bool {
    let path = path.to_str().unwrap();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(path))
}

/// Unmounts what a failed test leaves behind.
pub(crate) struct Unmounted(pub(crate) PathBuf);

impl Drop for Unmounted {
    fn drop(&mut self) {
        if is_mounted(&self.0) {
            let _ = run(Command::new("umount").arg("-l").arg(&self.0));
        }
    }
}

fn bytes(file: &File, offset: u64) -> [u8; 4096] {
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn exports(live: &Live) -> Vec<(String, String)> {
    let list = live.control().execute("query-block-exports", &json!({})).unwrap();
    let text = |export: &Value, key: &str| export[key].as_str().unwrap().to_owned();
    list.as_array().unwrap().iter().map(|one| (text(one, "id"), text(one, "type"))).collect()
}

#[test]
fn all_doors_show_one_disk() {
    let directory = directory();
    let path = directory.path().join("file");
    let _unmounted = Unmounted(path.clone());
    let frontends = ["--fuse", "file", "--vhost-user-blk", "unix:vhost"];
    let live = Live::start(directory.path(), "disk", &frontends);
    let kinds = [(DEVICE, "nbd"), ("vhost-user-blk-0", "vhost-user-blk"), ("fuse-0", "fuse")];
    assert_eq!(exports(&live), kinds.map(|(id, kind)| (id.to_owned(), kind.to_owned())));

    let mut client = QemuIo::open("raw", live.uri());
    let file = File::options().read(true).write(true).open(&path).unwrap();
    client.ok("write -P 7 1M 64k");
    assert_eq!(bytes(&file, MIB), [7; 4096]);
    file.write_all_at(&[9; 4096], 2 * MIB).unwrap();
    client.ok("read -P 9 2M 4k");
    client.ok("discard 1M 64k");
    assert_eq!(bytes(&file, MIB), [0; 4096]);
    let done = Guest::new().vhost_user(&directory.path().join("vhost"), 1).run(
        "dd if=/dev/vda bs=4096 skip=512 count=1 iflag=direct | hexdump -C | head -n 1
         yes | dd of=/dev/vda bs=4096 seek=768 count=1 oflag=direct",
    );
    assert!(done.output.contains("09 09 09 09"), "{}", done.output);
    assert_eq!(&bytes(&file, 3 * MIB)[..4], b"y\ny\n");
    let mut control = live.control();
    control.execute("block_resize", &json!({"device": DEVICE, "size": 80 * MIB})).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 80 * MIB);
    control.snapshot("overlay").unwrap();
    file.write_all_at(&[1; 4096], 79 * MIB).unwrap();
    file.sync_all().unwrap();
    drop((file, client));

    let _ = live.stop();
    assert!(!is_mounted(&path));
    for image in ["disk", "overlay"] {
        qemu::assert_clean(&directory.path().join(image));
    }
    let overlay = directory.path().join("overlay");
    let _ = qemu::io(&overlay, "qcow2", &["read -P 1 79M 4k", "read -P 9 2M 4k"]).ok();
}

#[test]
fn frontends_come_and_go_over_qmp() {
    let directory = directory();
    let path = directory.path().join("file");
    let _unmounted = Unmounted(path.clone());
    // A confined server cannot mount.
    let live = Live::start(directory.path(), "disk", &["--sandbox", "off"]);
    let mut control = live.control();
    let nodes = control.nodes().unwrap();
    let node = &nodes[0].0;
    let fuse = json!({
        "type": "fuse", "id": "f", "node-name": node, "mountpoint": path, "writable": true,
        "growable": true,
    });
    control.execute("block-export-add", &fuse).unwrap();
    let vhost = json!({
        "type": "vhost-user-blk", "id": "v", "node-name": node, "writable": true, "num-queues": 2,
        "addr": {"type": "unix", "path": directory.path().join("vhost")},
    });
    control.execute("block-export-add", &vhost).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[5; 4096], 64 * MIB).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 64 * MIB + 4096);
    drop(file);
    Guest::new()
        .vhost_user(&directory.path().join("vhost"), 2)
        .arguments(["-smp", "2"])
        .run("test $(cat /sys/block/vda/size) = 131080; test $(cat /sys/block/vda/serial) = vm");
    for id in ["f", "v"] {
        // The guest has ended; the server may still be about to notice.
        until("the export without users", || {
            match control.attempt("block-export-del", &json!({"id": id})) {
                Err(error) if error.to_string().contains("still in use") => false,
                done => {
                    done.unwrap();
                    true
                }
            }
        });
        let event = control.wait_for(&["BLOCK_EXPORT_DELETED"]).unwrap();
        assert_eq!(event.data["id"], id);
    }
    assert!(!is_mounted(&path) && !directory.path().join("vhost").exists());
    assert_eq!(exports(&live).len(), 1);
    let _ = live.stop();
    qemu::assert_clean(&directory.path().join("disk"));
}

#[test]
fn a_file_alone_is_served_until_it_is_unmounted() {
    let directory = directory();
    let path = directory.path().join("file");
    let _unmounted = Unmounted(path.clone());
    let start = || {
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory.path()).args(["serve", "disk", "--fuse", "file"]);
        Server::start_after_kill(&mut command, Ready::Line("losetup"))
    };
    let server = start();
    fs::write(&path, b"first").unwrap_err();
    File::options().write(true).open(&path).unwrap().write_all_at(b"first", 0).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let _ = server.kill();
    let error = File::open(&path).unwrap_err();
    assert!(error.raw_os_error().is_some_and(fuse::tells_kill), "{error}");

    // The next server finds the dead mount and takes its place.
    let server = start();
    assert_eq!(&bytes(&File::open(&path).unwrap(), 0)[..5], b"first");
    let _ = run(Command::new("umount").arg(&path)).ok();
    let _ = server.wait().ok();
    assert!(!is_mounted(&path));
    qemu::assert_clean(&directory.path().join("disk"));
}

#[test]
fn what_cannot_be_a_door_is_refused() {
    let directory = directory();
    let refused = |options: &[&str], words: &str| {
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory.path()).args(["serve", "disk"]).args(options);
        let done = run(&mut command).exits(1);
        assert!(done.stderr.contains(words), "{}", done.report());
    };
    refused(&["--fuse", "nowhere"], "nowhere");
    refused(&["--fuse", "."], "not a regular file");
    refused(&["--fuse", "file", "--fuse", "other"], "given 2 times for 1 images");
    refused(&["--fuse", "disk"], "an image of the disk itself");
    refused(&["--vhost-user-blk", "unix:none/v"], "none/v");
    refused(&["--vhost-user-blk", "unix:v", "--queues", "0"], "the number of queues is 0");
    assert!(!is_mounted(&directory.path().join("file")));
    let both = ["--fuse", "file", "--vhost-user-blk", "unix:none/v"];
    refused(&both, "none/v");
    assert!(!is_mounted(&directory.path().join("file")), "what was opened is closed again");
}

/// As in QEMU: of the guest's writes for an image, and of the server's for its file.
#[test]
fn the_highest_offset_written_is_that_of_the_disk_and_that_of_its_file() {
    let directory = directory();
    let [raw, over] = ["raw", "over"].map(|name| directory.path().join(name));
    qemu::create_overlay(&over, &directory.path().join("disk"), "qcow2", "");
    File::create(&raw).unwrap().set_len(8 << 20).unwrap();
    let highest = |node: &Value| node["stats"]["wr_highest_offset"].as_u64().unwrap();
    let stats =
        |live: &Live| live.control().execute("query-blockstats", &json!({})).unwrap()[0].clone();
    let commands = ["write 2M 100k", "write -z 3M 64k", "write 4k 4k", "discard 5M 64k", "flush"];
    for (image, options) in [("over", &[][..]), ("raw", &["--format", "raw"][..])] {
        let live = Live::start(directory.path(), image, options);
        let before = stats(&live);
        assert_eq!((highest(&before), highest(&before["parent"])), (0, 0), "{before}");
        let uri = format!("nbd+unix:///{DEVICE}?socket={}", live.nbd().display());
        let mut client = QemuIo::open("raw", uri);
        for command in commands {
            client.ok(command);
        }
        let after = stats(&live);
        assert_eq!(highest(&after), (3 << 20) + (64 << 10), "{after}");
        let of_file = highest(&after["parent"]);
        if image == "raw" {
            assert_eq!(of_file, (3 << 20) + (64 << 10));
            assert_eq!(after["backing"], Value::Null);
        } else {
            let length = directory.path().join(image).metadata().unwrap().len();
            // The data of the first write lies behind the tables.
            assert!(of_file > 100 << 10 && of_file <= length, "{of_file} of {length}");
            let backing = &after["backing"];
            assert_eq!((highest(backing), highest(&backing["parent"])), (0, 0), "{after}");
        }
        drop(client);
        let _ = live.server.stop().ok();
    }
}

/// Random writes of all sizes, zero-writes and discards by the file system, each read again and compared.
const VERIFY: &str = "[global]\nfilename=/dev/vda\ndirect=1\nioengine=libaio\niodepth=16\nrw=randwrite\n\
     bsrange=512-128k\nblocksize_unaligned=0\nsize=24m\nverify=crc32c\nverify_fatal=1\ndo_verify=1\n\
     time_based=1\nruntime=1\nverify_backlog=64\n[low]\noffset=0\n[high]\noffset=32m\n";

/// How many writes the server's clients have made.
fn writes(live: &Live) -> u64 {
    let stats = live.control().execute("query-blockstats", &json!({})).unwrap();
    stats[0]["stats"]["wr_operations"].as_u64().unwrap()
}

/// What was under way, and what had been acknowledged, outlives servers that are killed: the guest notices
/// nothing but a delay.
#[test]
fn a_guest_goes_on_when_its_server_is_killed() {
    let directory = directory();
    let start = || Live::start(directory.path(), "disk", &["--vhost-user-blk", "unix:vhost"]);
    let mut live = start();
    let mut guest = Guest::new()
        .memory(320)
        .program("fio")
        .file("/job", VERIFY.as_bytes())
        .vhost_user(&directory.path().join("vhost"), 2)
        .arguments(["-smp", "2"])
        .spawn(&format!(
            "{}
             if dmesg | grep -iE 'I/O error|blk_update|timeout|virtio_blk.*fail'; then exit 1; fi",
            until_a_line("fio --output-format=terse /job >/tmp/fio || { cat /tmp/fio; exit 1; }")
        ));
    guest.wait_for("go");
    for round in 0..6_u64 {
        // Not in the middle of the greeting: QEMU 7.2 was seen not to connect again then.
        until("writes by the guest", || writes(&live) > 0 || guest.has_exited());
        thread::sleep(Duration::from_millis(300 + 37 * round));
        let killed = live.server.kill();
        assert!(!killed.status.success(), "{}", killed.report());
        live = start();
    }
    guest.type_line("stop");
    let done = guest.wait();
    assert_eq!(done.status, 0, "{}", done.console);
    let _ = live.stop();
    // A kill during a commit before the journal is in use leaves space, and nothing else.
    let disk = directory.path().join("disk");
    let check = qemu::img(args!["check", &disk]);
    assert!(matches!(check.code(), 0 | 3), "{}", check.report());
    let _ = run_program(ISOBATH, args!["check", "-r", "leaks", &disk]).ok();
    qemu::assert_clean(&disk);
}
