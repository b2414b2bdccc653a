//! `qemu-nbd -c` and `-d`: a disk as a device of a guest's kernel, by us and by QEMU.

use crate::serving::ISOBATH;
use isobath_testkit::guest::Guest;
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::{Path, PathBuf};

const SIZE: u64 = 64 << 20;

/// No request failed, as far as the guest's kernel knows.
const NO_ERRORS: &str =
    "if dmesg | grep -iE 'I/O error|blk_update|nbd.*(fail|timed out)'; then exit 1; fi";

/// Script lines with a file system at `/mnt` that has the images; `ours` and `theirs` are the two programs, and `gone
/// PID` waits until a process has ended.
const BEGIN: &str = "
    mount -t ext4 /dev/vda /mnt
    cd /mnt
    mkdir -p /var/tmp /var/lock
    ours() { isobath qemu-nbd \"$@\"; }
    theirs() { qemu-nbd \"$@\"; }
    gone() { while [ -e /proc/$1 ]; do sleep 0.1; done; }
    freed() { while [ -e /sys/block/$1/pid ]; do sleep 0.1; done; }
    free() { [ ! -e /sys/block/$1/pid ]; }
    fails() { if \"$@\" >out 2>&1; then echo \"not refused: $*\"; cat out; return 1; fi; cat out; }
";
const END: &str = "
    cd /
    umount /mnt
";

/// A file system for the guest, with images in it.
struct World {
    directory: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let files = directory.path().join("files");
        fs::create_dir(&files).unwrap();
        qemu::create(&files.join("base.qcow2"), "qcow2", SIZE, "");
        let _ = qemu::io(&files.join("base.qcow2"), "qcow2", &["write -P 1 32M 1M"]).ok();
        let _ = qemu::img(args!["snapshot", "-c", "before", files.join("base.qcow2")]).ok();
        qemu::create_overlay(&files.join("top.qcow2"), Path::new("base.qcow2"), "qcow2", "");
        fs::write(files.join("odd.raw"), vec![5; 1_000_003]).unwrap();
        Self { directory }
    }

    /// Runs a script in a guest that has the images at `/mnt`, and takes them out of it again.
    fn run(&self, script: &str) -> String {
        let disk = self.at("disk.img");
        fs::File::create(&disk).unwrap().set_len(256 << 20).unwrap();
        let mut make = std::process::Command::new("mkfs.ext4");
        make.args(["-q", "-d"]).arg(self.at("files")).arg(&disk);
        let _ = isobath_testkit::process::run(&mut make).ok();
        let done = Guest::new()
            .memory(1024)
            .processors(2)
            .drive(&format!("file={},format=raw", disk.display()))
            .program_at(Path::new(ISOBATH))
            .program_at(&qemu::program("qemu-nbd"))
            .program("mkfs.ext4")
            .program("blkdiscard")
            .run(&format!("{BEGIN}\n{script}\n{END}"));
        for name in ["base.qcow2", "top.qcow2"] {
            let mut dump = std::process::Command::new("debugfs");
            dump.arg("-R").arg(format!("dump {name} {}", self.at(name).display())).arg(&disk);
            let _ = isobath_testkit::process::run(&mut dump).ok();
            let _ = qemu::img(args!["check", self.at(name)]).ok();
        }
        done.output.trim_end().to_owned()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

#[test]
fn a_file_system_on_a_kernel_device_is_in_the_image_after_the_disconnection() {
    let world = World::new();
    let output = world.run(&format!(
        "
        ours -c /dev/nbd0 --discard=unmap --pid-file=/tmp/pid top.qcow2
        pid=$(cat /tmp/pid)
        test $(cat /sys/block/nbd0/pid) = $pid
        test $(cat /sys/block/nbd0/size) = 131072
        test $(cat /sys/block/nbd0/ro) = 0
        test ! -e /var/lock/qemu-nbd-nbd0

        # Nobody else gets it, and the image stays locked.
        fails ours -c /dev/nbd0 -r odd.raw | grep 'in use: process '$pid' has connected it'
        fails ours -c /dev/nbd1 top.qcow2 | grep lock
        test $(cat /sys/block/nbd0/pid) = $pid
        free nbd1

        mkfs.ext4 -q /dev/nbd0
        mkdir /tmp/mnt
        mount -t ext4 -o discard /dev/nbd0 /tmp/mnt
        fails ours -c /dev/nbd0 -r odd.raw | grep 'in use'
        head -c 20000000 /dev/urandom >/tmp/mnt/random
        sha256sum </tmp/mnt/random >/tmp/sum
        sync
        umount /tmp/mnt
        echo 3 >/proc/sys/vm/drop_caches
        mount -t ext4 -o discard /dev/nbd0 /tmp/mnt
        sha256sum </tmp/mnt/random | cmp - /tmp/sum
        umount /tmp/mnt
        {NO_ERRORS}

        test \"$(ours -d /dev/nbd0)\" = '/dev/nbd0 disconnected'
        gone $pid
        free nbd0
        test ! -e /tmp/pid

        # Another server of the same device has it all.
        ours -c /dev/nbd0 -r top.qcow2
        mount -t ext4 -o ro /dev/nbd0 /tmp/mnt
        sha256sum </tmp/mnt/random | cmp - /tmp/sum
        umount /tmp/mnt
        ours -d /dev/nbd0
        # Not connected: as QEMU says.
        test \"$(ours -d /dev/nbd0)\" = \"$(theirs -d /dev/nbd0)\"
        echo whole
        "
    ));
    assert!(output.ends_with("whole"), "{output}");
}

#[test]
fn the_devices_flags_are_those_of_the_options_and_what_is_discarded_leaves_the_image() {
    let world = World::new();
    let output = world.run(
        "
        # In the foreground it ends with 0.
        (ours -v -c /dev/nbd0 -r base.qcow2 2>said; echo $? >status) &
        while free nbd0; do sleep 0.1; done
        test $(cat /sys/block/nbd0/ro) = 1
        fails dd if=/dev/zero of=/dev/nbd0 bs=4096 count=1 conv=fsync
        ours -d /dev/nbd0
        wait
        test $(cat status) = 0
        grep 'NBD device /dev/nbd0 is now connected to base.qcow2' said

        # A snapshot is read only.
        ours -c /dev/nbd3 -l before base.qcow2
        test $(cat /sys/block/nbd3/ro) = 1
        ours -d /dev/nbd3

        # What is written with -s is nowhere afterwards.
        sha256sum base.qcow2 >/tmp/base
        ours -c /dev/nbd0 -s --pid-file=/tmp/pid base.qcow2
        pid=$(cat /tmp/pid)
        dd if=/dev/urandom of=/dev/nbd0 bs=1M count=4 conv=fsync 2>/dev/null
        ours -d /dev/nbd0
        gone $pid
        sha256sum base.qcow2 | cmp - /tmp/base

        # A size that is no multiple of a sector.
        ours -v -c /dev/nbd0 -r -o 100 odd.raw 2>said &
        while free nbd0; do sleep 0.1; done
        test $(cat /sys/block/nbd0/size) = 1953
        ours -d /dev/nbd0
        wait
        grep 'ends 412 bytes before the disk' said

        ours -c /dev/nbd0 --discard=unmap --pid-file=/tmp/pid base.qcow2
        pid=$(cat /tmp/pid)
        echo ones=$(dd if=/dev/nbd0 bs=1M skip=32 count=1 2>/dev/null | tr -cd '\\001' | wc -c)
        blkdiscard -o 33554432 -l 1048576 /dev/nbd0
        echo zeroes=$(dd if=/dev/nbd0 bs=1M skip=32 count=1 2>/dev/null | tr -cd '\\000' | wc -c)
        # Written and not synced: the disconnection does that.
        head -c 1048576 /dev/zero | tr '\\000' '\\007' >/tmp/sevens
        exec 5<>/dev/nbd0
        cat /tmp/sevens >&5
        ours -d /dev/nbd0
        exec 5>&-
        gone $pid
        echo whole
        ",
    );
    assert!(output.contains("\nones=1048576\nzeroes=1048576\n"), "{output}");
    assert!(output.ends_with("whole"), "{output}");
    let image = world.at("base.qcow2");
    let _ = qemu::io(&image, "qcow2", &["read -P 7 0 1M", "read -P 0 32M 1M"]).ok();
    let map = qemu::img(args!["map", "--output=json", image]).ok().json();
    let data =
        |run: &serde_json::Value| run["data"] == true && run["start"].as_u64() >= Some(32 << 20);
    assert!(!map.as_array().unwrap().iter().any(data), "{map}");
}

#[test]
fn a_signal_writes_what_the_kernel_holds_and_disconnects_the_device() {
    let world = World::new();
    let output = world.run(
        "
        # A file system that is mounted, with what nobody has synced.
        ours -c /dev/nbd0 --pid-file=/tmp/pid -t -e 2 -k /tmp/socket top.qcow2
        pid=$(cat /tmp/pid)
        ours -L -k /tmp/socket | grep 'exports available: 1'
        mkfs.ext4 -q /dev/nbd0
        mkdir /tmp/mnt
        mount -t ext4 /dev/nbd0 /tmp/mnt
        head -c 5000000 /dev/urandom >/tmp/random
        cp /tmp/random /tmp/mnt/random
        kill $pid
        gone $pid
        umount /tmp/mnt
        free nbd0
        test ! -e /tmp/socket
        ours -c /dev/nbd0 --pid-file=/tmp/pid -r top.qcow2
        mount -t ext4 -o ro,noload /dev/nbd0 /tmp/mnt
        cmp /tmp/random /tmp/mnt/random
        umount /tmp/mnt
        pid=$(cat /tmp/pid)
        kill -INT $pid
        gone $pid
        free nbd0

        # A file system on a partition, which is there when the command returns.
        ours -c /dev/nbd0 --pid-file=/tmp/pid base.qcow2
        pid=$(cat /tmp/pid)
        printf 'n\np\n1\n\n\nw\n' | fdisk /dev/nbd0 >/dev/null
        mkfs.ext4 -q /dev/nbd0p1
        kill $pid
        gone $pid
        ours -c /dev/nbd0 --pid-file=/tmp/pid base.qcow2
        pid=$(cat /tmp/pid)
        mount -t ext4 /dev/nbd0p1 /tmp/mnt
        cp /tmp/random /tmp/mnt/random
        ours -d /dev/nbd0
        gone $pid
        umount /tmp/mnt
        ours -c /dev/nbd0 -r base.qcow2
        mount -t ext4 -o ro,noload /dev/nbd0p1 /tmp/mnt
        cmp /tmp/random /tmp/mnt/random
        umount /tmp/mnt
        fails ours -c /dev/nbd0p1 -r odd.raw | grep 'a part of an NBD device'
        ours -d /dev/nbd0

        # A server that is killed leaves the device, and an error says so.
        ours -c /dev/nbd0 --pid-file=/tmp/pid top.qcow2
        pid=$(cat /tmp/pid)
        kill -KILL $pid
        gone $pid
        fails ours -c /dev/nbd0 top.qcow2 | grep \"qemu-nbd -d /dev/nbd0\"
        ours -d /dev/nbd0
        free nbd0
        ours -c /dev/nbd0 top.qcow2
        ours -d /dev/nbd0
        echo whole
        ",
    );
    assert!(output.ends_with("whole"), "{output}");
}

/// What was written through a name that is gone, and writes that fail.
#[test]
fn what_is_written_by_a_name_that_is_gone_is_in_the_image_and_lost_writes_are_told() {
    let world = World::new();
    let output = world.run(
        "
        head -c 1048576 /dev/zero | tr '\\000' '\\007' >/tmp/sevens
        ours -c /dev/nbd0 --pid-file=/tmp/pid base.qcow2
        pid=$(cat /tmp/pid)
        printf 'n\np\n1\n\n\nw\n' | fdisk /dev/nbd0 >/dev/null
        start=$(cat /sys/block/nbd0/nbd0p1/start)
        exec 5<>/dev/nbd0p1
        cat /tmp/sevens >&5
        rm /dev/nbd0p1
        test \"$(ours -d /dev/nbd0)\" = '/dev/nbd0 disconnected'
        exec 5>&-
        gone $pid
        ours -c /dev/nbd0 -r base.qcow2
        dd if=/dev/nbd0 bs=512 skip=$start count=2048 2>/dev/null | cmp - /tmp/sevens
        ours -d /dev/nbd0

        ln -s /dev/nbd1 /tmp/link
        ours -c /tmp/link --pid-file=/tmp/pid top.qcow2
        pid=$(cat /tmp/pid)
        exec 5<>/dev/nbd1
        cat /tmp/sevens >&5
        rm /tmp/link
        kill $pid
        gone $pid
        exec 5>&-
        ours -c /dev/nbd1 -r top.qcow2
        dd if=/dev/nbd1 bs=1M count=1 2>/dev/null | cmp - /tmp/sevens
        ours -d /dev/nbd1

        # An image whose storage is full.
        mkdir /tmp/small
        mount -t tmpfs -o size=4m tmpfs /tmp/small
        isobath create -q -f qcow2 /tmp/small/image.qcow2 32M
        ours -c /dev/nbd2 --pid-file=/tmp/pid /tmp/small/image.qcow2
        pid=$(cat /tmp/pid)
        exec 5<>/dev/nbd2
        dd if=/dev/zero bs=1M count=16 2>/dev/null | tr '\\000' '\\007' >&5
        fails ours -d /dev/nbd2 | grep 'not everything that was written to it has reached the disk'
        exec 5>&-
        gone $pid
        free nbd2
        umount /tmp/small
        echo whole
        ",
    );
    assert!(output.ends_with("whole"), "{output}");
}

#[test]
fn qemus_program_disconnects_our_devices_and_ours_disconnects_its() {
    let world = World::new();
    let output = world.run(
        "
        ours -c /dev/nbd0 --pid-file=/tmp/pid top.qcow2
        pid=$(cat /tmp/pid)
        dd if=/dev/urandom of=/dev/nbd0 bs=1M count=2 conv=fsync 2>/dev/null
        dd if=/dev/nbd0 bs=1M count=2 2>/dev/null | sha256sum >/tmp/sum
        theirs -d /dev/nbd0
        gone $pid
        freed nbd0
        theirs -c /dev/nbd0 --pid-file=/tmp/pid top.qcow2
        while free nbd0; do sleep 0.1; done
        pid=$(cat /tmp/pid)
        dd if=/dev/nbd0 bs=1M count=2 2>/dev/null | sha256sum | cmp - /tmp/sum
        fails ours -c /dev/nbd0 -r odd.raw | grep 'in use'
        ours -d /dev/nbd0
        gone $pid
        free nbd0
        ours -c /dev/nbd0 top.qcow2
        dd if=/dev/nbd0 bs=1M count=2 2>/dev/null | sha256sum | cmp - /tmp/sum
        ours -d /dev/nbd0
        echo whole
        ",
    );
    assert!(output.ends_with("whole"), "{output}");
}
