//! `serve --ublk`: a disk as a block device of a guest's kernel, with the server in the guest.

use crate::serving::ISOBATH;
use isobath_testkit::guest::Guest;
use isobath_testkit::process::{run, run_program};
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 64 << 20;

/// No request failed, as far as the guest's kernel knows.
const NO_ERRORS: &str =
    "if dmesg | grep -iE 'I/O error|error, dev|EXT4-fs.*(error|warning)|WARNING:'; then exit 1; fi";

/// Script lines with a file system at `/mnt` that has the images. `serve` starts a server and waits until it is ready,
/// with its number of process in `$pid` and its output in `/tmp/out`; `ends` waits for its end, whose status is in
/// `$status`; `fails` runs a command that has to fail. `byte` changes one of the record of the device 0, and
/// `is_set` tells whether one is 1; `killed` kills the server, and `until_waits` then waits until its keeper waits for
/// another one.
const BEGIN: &str = "
    mount -t ext4 -o commit=300 /dev/vda /mnt
    cd /mnt
    mkdir -p /var/tmp /var/lock /tmp/fs /dev/shm
    chmod 1777 /dev/shm
    ready() {
        while [ ! -s /tmp/out ]; do
            if [ ! -e /proc/$pid ]; then cat /tmp/err; return 1; fi
            sleep 0.1
        done
    }
    serve() {
        rm -f /tmp/out
        isobath serve \"$@\" >/tmp/out 2>/tmp/err &
        pid=$!
        ready
    }
    ends() { status=0; wait $pid || status=$?; cat /tmp/err; }
    stops() { kill $pid; ends; test $status = 0; test ! -s /tmp/err; }
    gone() { test ! -e /dev/ublkb$1; test ! -e /dev/ublkc$1; }
    until_gone() { while [ -e /dev/ublkb$1 ] || [ -e /dev/ublkc$1 ]; do sleep 0.1; done; }
    says() {
        while ! grep -q \"$1\" /tmp/err; do
            if [ ! -e /proc/$pid ]; then echo \"ended and has not said: $1\"; return 1; fi
            sleep 0.1
        done
    }
    keepers() {
        for line in /proc/[0-9]*/cmdline; do
            if grep -q '^isobath-ublk-keeper' $line 2>/dev/null; then line=${line%/cmdline}; echo ${line#/proc/}; fi
        done
    }
    until_no_keeper() { while [ -n \"$(keepers)\" ]; do sleep 0.1; done; }
    byte() { printf \"$2\" | dd of=/run/isobath/ublk-0 bs=1 seek=$1 conv=notrunc 2>/dev/null; }
    is_set() { test \"$(dd if=/run/isobath/ublk-0 bs=1 skip=$1 count=1 2>/dev/null)\" = \"$(printf '\\1')\"; }
    killed() { kill -9 $pid; ends; test $status = 137; }
    until_waits() { while ! is_set 44; do sleep 0.1; done; }
    flushes() { set -- $(cat /sys/block/vda/stat); echo ${16}; }
    fails() { if \"$@\" >/tmp/failed 2>&1; then echo \"not refused: $*\"; return 1; fi; cat /tmp/failed; }
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
        let world = Self { directory };
        fs::create_dir(world.at("files")).unwrap();
        let file = |name: &str| world.at("files").join(name);
        // Layers that each have something: whole clusters, parts of them, zeroes.
        qemu::create(&file("base.qcow2"), "qcow2", SIZE, "");
        let _ = qemu::io(&file("base.qcow2"), "qcow2", &["write -P 1 0 40M"]).ok();
        let layers = [("mid.qcow2", "base.qcow2"), ("top.qcow2", "mid.qcow2")];
        let changes = [
            ["write -P 2 4M 4M", "write -P 3 123k 77k", "write -z 8M 1M"],
            ["write -P 4 6M 100k", "write -P 5 63M 1M", "write -z 200k 10k"],
        ];
        for ((name, below), changes) in layers.iter().zip(&changes) {
            qemu::create_overlay(&file(name), Path::new(below), "qcow2", "");
            let _ = qemu::io(&file(name), "qcow2", changes).ok();
        }
        qemu::to_raw(&file("top.qcow2"), "qcow2", &world.at("top.raw"));
        qemu::create(&file("empty.qcow2"), "qcow2", SIZE, "");
        world
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn guest(&self) -> Guest {
        self.guest_with(Guest::with_ublk())
    }

    fn guest_with(&self, guest: Guest) -> Guest {
        let disk = self.at("disk.img");
        fs::File::create(&disk).unwrap().set_len(512 << 20).unwrap();
        let mut make = Command::new("mkfs.ext4");
        make.args(["-q", "-d"]).arg(self.at("files")).arg(&disk);
        let _ = run(&mut make).ok();
        guest
            .memory(768)
            .processors(2)
            .drive(&format!("file={},format=raw", disk.display()))
            .program_at(Path::new(ISOBATH))
    }

    /// Runs a script in a guest that has the images at `/mnt`, and takes them out of it again.
    fn run(&self, guest: Guest, script: &str) -> String {
        let done = guest.run(&format!("{BEGIN}\n{script}\n{END}"));
        for name in ["base.qcow2", "mid.qcow2", "top.qcow2", "empty.qcow2"] {
            let mut dump = Command::new("debugfs");
            dump.arg("-R").arg(format!("dump {name} {}", self.at(name).display()));
            let _ = run(dump.arg(self.at("disk.img"))).ok();
            qemu::assert_clean(&self.at(name));
        }
        done.output.trim_end().to_owned()
    }

    /// The SHA-256 of a raw file.
    fn sum(&self, name: &str) -> String {
        let text = run_program("sha256sum", args![self.at(name)]).ok().text();
        text.split(' ').next().unwrap().to_owned()
    }

    /// The contents of an image by QEMU, as a raw file of this name.
    fn raw(&self, image: &str, name: &str) -> PathBuf {
        let raw = self.at(name);
        qemu::to_raw(&self.at(image), "qcow2", &raw);
        raw
    }
}

#[test]
fn a_device_has_the_bytes_of_the_chain_and_writes_reach_it() {
    let world = World::new();
    let output = world.run(
        world.guest().program("blkdiscard"),
        &format!(
            "
            serve top.qcow2 --ublk auto
            cat /tmp/out
            test $(cat /sys/block/ublkb0/size) = 131072
            test $(cat /sys/block/ublkb0/ro) = 0
            cd /sys/block/ublkb0/queue
            echo blocks=$(cat logical_block_size physical_block_size minimum_io_size optimal_io_size)
            echo cache=$(cat write_cache) fua=$(cat fua) discard=$(cat discard_granularity)
            cd /mnt
            sha256sum /dev/ublkb0
            # In every size and at odd places, past the page cache and through it.
            dd if=/dev/urandom of=/tmp/random bs=1M count=4 2>/dev/null
            dd if=/tmp/random of=/dev/ublkb0 bs=512 count=1000 seek=7777 conv=notrunc oflag=direct 2>/dev/null
            dd if=/tmp/random of=/dev/ublkb0 bs=1M seek=20 conv=notrunc,fsync 2>/dev/null
            dd if=/dev/ublkb0 bs=512 count=1000 skip=7777 iflag=direct 2>/dev/null | cmp - /tmp/random -n 512000
            echo 3 >/proc/sys/vm/drop_caches
            dd if=/dev/ublkb0 bs=1M count=4 skip=20 2>/dev/null | cmp - /tmp/random
            /bin/blkdiscard -o 48M -l 4M /dev/ublkb0
            /bin/blkdiscard -o 1M -l 2M /dev/ublkb0
            /bin/blkdiscard -z -o 30M -l 1M /dev/ublkb0
            /bin/blkdiscard -z -o 512 -l 1536 /dev/ublkb0
            sync
            echo 3 >/proc/sys/vm/drop_caches
            sha256sum /dev/ublkb0
            {NO_ERRORS}
            stops
            gone 0
            "
        ),
    );
    // The first is the server's own line.
    let sums: Vec<&str> =
        output.lines().filter_map(|line| line.strip_suffix("  /dev/ublkb0")).skip(1).collect();
    assert_eq!(sums[0], world.sum("top.raw"), "{output}");
    assert!(output.contains("  /dev/ublkb0\n    -drive file=/dev/ublkb0,format=raw,if=virtio"));
    assert!(output.contains("blocks=512 4096 4096 65536"), "{output}");
    assert!(output.contains("cache=write back fua=1 discard=65536"), "{output}");
    let raw = world.raw("top.qcow2", "after.raw");
    assert_eq!(sums[1], world.sum("after.raw"), "{output}");
    let (before, after) = (fs::read(world.at("top.raw")).unwrap(), fs::read(raw).unwrap());
    let zeroes = |range: std::ops::Range<usize>| after[range].iter().all(|byte| *byte == 0);
    assert!(zeroes(30 << 20..31 << 20) && zeroes(512..2048));
    assert!(zeroes(1 << 20..3 << 20), "a whole cluster that is discarded reads as zeroes");
    assert_eq!(after[31 << 20..48 << 20], before[31 << 20..48 << 20]);
    assert_ne!(after[20 << 20..24 << 20], before[20 << 20..24 << 20]);
}

#[test]
fn a_file_system_on_a_device_survives_work_with_many_queues() {
    let world = World::new();
    let output = world.run(
        world.guest().program("mkfs.ext4").program("fsck.ext4").program("fio"),
        &format!(
            "
            serve empty.qcow2 --ublk 5 --threads 4
            grep -q '^  /dev/ublkb5$' /tmp/out
            test $(ls -d /sys/block/ublkb5/mq/* | wc -l) = 2
            mkfs.ext4 -q /dev/ublkb5
            mount -t ext4 -o discard,errors=panic /dev/ublkb5 /tmp/fs
            dd if=/dev/urandom of=/tmp/fs/random bs=1M count=8 conv=fsync 2>/dev/null
            sha256sum </tmp/fs/random >/tmp/sum
            mkdir /tmp/fs/many
            for number in $(seq 100); do echo $number >/tmp/fs/many/$number; done
            sync
            rm -r /tmp/fs/many
            # By every processor, each write read back and compared.
            fio --name=verify --filename=/tmp/fs/fio --size=12M --bsrange=512-128k --bs_unaligned=1 --rw=randwrite \
                --direct=0 --ioengine=psync --numjobs=1 --verify=crc32c --fsync=16 --minimal >/tmp/fio
            umount /tmp/fs
            fsck.ext4 -f -n /dev/ublkb5 >/tmp/fsck 2>&1
            fio --name=verify --filename=/dev/ublkb5 --offset=48M --size=4M --offset_increment=4M --bs=4k \
                --rw=randrw --direct=1 --ioengine=libaio --iodepth=16 --numjobs=3 --verify=crc32c \
                --verify_backlog=64 --trim_percentage=0 --minimal >/tmp/fio
            sync
            echo 3 >/proc/sys/vm/drop_caches
            mount -t ext4 -o ro /dev/ublkb5 /tmp/fs
            sha256sum </tmp/fs/random | cmp - /tmp/sum
            umount /tmp/fs
            {NO_ERRORS}
            stops
            gone 5
            # The next device of this number has it all.
            serve empty.qcow2 --ublk /dev/ublkb5 --read-only
            test $(cat /sys/block/ublkb5/ro) = 1
            mount -t ext4 -o ro /dev/ublkb5 /tmp/fs
            sha256sum </tmp/fs/random | cmp - /tmp/sum
            umount /tmp/fs
            fails dd if=/dev/zero of=/dev/ublkb5 bs=4k count=1 conv=notrunc
            stops
            echo whole=yes
            "
        ),
    );
    assert!(output.contains("whole=yes"), "{output}");
}

#[test]
fn what_was_flushed_survives_a_server_that_is_killed() {
    let world = World::new();
    let output = world.run(
        world.guest(),
        "
        serve top.qcow2 --ublk 0
        dd if=/dev/urandom of=/tmp/random bs=1M count=3 2>/dev/null
        dd if=/tmp/random of=/dev/ublkb0 bs=64k seek=100 conv=notrunc,fsync 2>/dev/null
        dd if=/tmp/random of=/dev/ublkb0 bs=4k seek=12000 count=5 conv=notrunc,fsync oflag=direct 2>/dev/null
        kill -9 $pid
        ends
        test $status = 137
        # Its keeper deletes the device.
        until_gone 0
        # The number is free again, and the image can be used.
        serve top.qcow2 --ublk 0
        dd if=/dev/ublkb0 bs=64k skip=100 count=48 2>/dev/null | cmp - /tmp/random
        dd if=/dev/ublkb0 bs=4k skip=12000 count=5 2>/dev/null | cmp - /tmp/random -n 20480
        stops
        gone 0
        sha256sum /tmp/random
        ",
    );
    let after = fs::read(world.raw("top.qcow2", "after.raw")).unwrap();
    fs::write(world.at("random"), &after[100 << 16..148 << 16]).unwrap();
    assert!(output.contains(&world.sum("random")), "{output}");
}

#[test]
fn a_server_ends_only_when_nobody_uses_its_device() {
    let world = World::new();
    let output = world.run(
        world.guest().program("mkfs.ext4"),
        &format!(
            "
            serve empty.qcow2 --ublk 0
            mkfs.ext4 -q /dev/ublkb0
            mount -t ext4 /dev/ublkb0 /tmp/fs
            kill $pid
            says 'waiting until /dev/ublkb0 is no longer used: it is mounted on /tmp/fs'
            # It goes on, and another signal changes nothing.
            dd if=/dev/urandom of=/tmp/fs/random bs=1M count=4 conv=fsync 2>/dev/null
            kill $pid
            says 'still ending: waiting for programs and file systems that use a block device'
            dd if=/dev/urandom of=/tmp/fs/more bs=1M count=4 2>/dev/null
            sha256sum /tmp/fs/random /tmp/fs/more | sed 's| .*||' >/tmp/sums
            umount /tmp/fs
            ends
            test $status = 0
            gone 0

            # A loop device, swap space, and a program that only has it open.
            serve empty.qcow2 --ublk 0
            losetup /dev/loop0 /dev/ublkb0
            kill $pid
            says 'no longer used: loop0 is a loop device on it'
            losetup -d /dev/loop0
            ends
            test $status = 0
            gone 0
            serve top.qcow2 --ublk 0
            mkswap /dev/ublkb0 >/dev/null
            swapon /dev/ublkb0
            kill $pid
            says 'no longer used: it is swap space'
            swapoff /dev/ublkb0
            ends
            test $status = 0
            serve empty.qcow2 --ublk 0
            exec 4<>/dev/ublkb0
            sleep 1000 4<&4 &
            other=$!
            exec 4<&-
            kill $pid
            says \"no longer used: process $other (sleep) has it open\"
            kill $other
            ends
            test $status = 0
            gone 0

            serve empty.qcow2 --ublk 0
            mount -t ext4 /dev/ublkb0 /tmp/fs
            sha256sum /tmp/fs/random /tmp/fs/more | sed 's| .*||' | cmp - /tmp/sums
            umount /tmp/fs
            stops
            {NO_ERRORS}
            echo whole=yes
            "
        ),
    );
    assert!(output.contains("whole=yes"), "{output}");
}

#[test]
fn two_disks_are_two_devices_and_what_cannot_be_is_refused() {
    let world = World::new();
    fs::write(world.at("files").join("odd.raw"), vec![5; 1_000_003]).unwrap();
    let output = world.run(
        world.guest(),
        "
        # Written and not flushed before the server is told to end.
        serve top.qcow2 empty.qcow2 --ublk auto --ublk 9 --threads 1
        sha256sum /dev/ublkb0 | sed 's/ .*//' | sed 's/^/sum=/'
        fails isobath serve mid.qcow2 --read-only --ublk 9 | grep 'there is a ublk device 9 already'
        dd if=/dev/ublkb0 of=/dev/ublkb9 bs=1M conv=notrunc 2>/dev/null
        cmp /dev/ublkb0 /dev/ublkb9
        stops
        gone 0
        gone 9

        # A device has whole blocks, the last of which has zeroes after the end of the file.
        # The server does without a ring for its files.
        export ISOBATH_IO=threads
        serve odd.raw --format raw --read-only --ublk auto
        unset ISOBATH_IO
        test $(cat /sys/block/ublkb0/size) = 1954
        head -c 1000003 /dev/ublkb0 | cmp - odd.raw
        test $(tail -c 445 /dev/ublkb0 | tr -d '\\0' | wc -c) = 0
        kill $pid
        ends
        test $status = 0
        gone 0

        # The server gives up its rights, and is confined.
        mkdir /etc
        echo 'nobody:x:65534:65534::/:/bin/sh' >/etc/passwd
        echo 'nogroup:x:65534:' >/etc/group
        chown -R 65534:65534 /mnt
        serve empty.qcow2 --ublk 3 --user nobody
        test \"$(stat -c %u /proc/$pid)\" = 65534
        grep -q '^Seccomp:.2' /proc/$pid/status
        dd if=/dev/zero of=/dev/ublkb3 bs=4k count=1 conv=notrunc,fsync 2>/dev/null
        stops
        gone 3
        ",
    );
    let (first, sum) =
        (output.lines().find_map(|line| line.strip_prefix("sum=")), world.sum("top.raw"));
    assert_eq!(first, Some(&*sum), "{output}");
    assert_eq!(
        fs::read(world.raw("empty.qcow2", "e.raw")).unwrap()[4096..],
        fs::read(world.at("top.raw")).unwrap()[4096..]
    );
}

#[test]
fn what_is_flushed_reaches_the_disk_below_the_image() {
    let world = World::new();
    let output = world.run(
        world.guest().program("fio"),
        "
        serve top.qcow2 --ublk 0
        write() { fio --name=w --filename=/dev/ublkb0 --rw=write --bs=4k --number_ios=12 --direct=1 \"$@\" >/tmp/fio; }
        write --offset=4M
        sync
        before=$(flushes)
        write --offset=4M
        echo plain=$(($(flushes) - before))
        before=$(flushes)
        write --offset=4M --fsync=1
        echo flushed=$(($(flushes) - before))
        before=$(flushes)
        write --offset=4M --sync=dsync
        echo durable=$(($(flushes) - before))
        stops
        ",
    );
    let count = |name: &str| -> u32 {
        let line = output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.and_then(|count| count.parse().ok()).expect(name)
    };
    assert_eq!(count("plain"), 0, "{output}");
    assert!(count("flushed") >= 12 && count("durable") >= 12, "{output}");
}

#[test]
fn a_device_is_served_on_where_nobody_can_tell_who_uses_it() {
    let world = World::new();
    let output = world.run(
        world.guest().program("mkfs.ext4"),
        &format!(
            "
            begin() {{
                serve empty.qcow2 --ublk 0
                mount -t ext4 /dev/ublkb0 /tmp/fs
            }}
            goes_on() {{
                dd if=/dev/urandom of=/tmp/fs/$1 bs=1M count=2 conv=fsync 2>/dev/null
                sha256sum </tmp/fs/$1 >>/tmp/sums
            }}
            serve empty.qcow2 --ublk 0
            mkfs.ext4 -q /dev/ublkb0
            stops

            # Its node has another name.
            begin
            mv /dev/ublkb0 /dev/renamed
            kill $pid
            says 'it cannot be told who uses it'
            goes_on one
            mv /dev/renamed /dev/ublkb0
            says 'it is mounted on /tmp/fs'
            umount /tmp/fs
            ends
            test $status = 0

            # The kernel's list of devices is not there.
            begin
            umount -l /sys
            kill $pid
            says 'it is not in /sys/class/block'
            goes_on two
            umount /tmp/fs
            mount -t sysfs sys /sys
            ends
            test $status = 0
            gone 0

            # Something does not answer: a file system whose server is stopped, below a loop device.
            touch /tmp/file
            isobath serve top.qcow2 --fuse /tmp/file >/tmp/other.out 2>/tmp/other.err &
            other=$!
            while [ ! -s /tmp/other.out ]; do sleep 0.1; done
            losetup /dev/loop0 /tmp/file
            begin
            kill -STOP $other
            kill $pid
            # What the kernel knows of the file is old after a second.
            says 'loop device loop0 does not answer'
            goes_on three
            umount /tmp/fs
            kill -CONT $other
            ends
            test $status = 0
            losetup -d /dev/loop0
            kill $other
            wait $other

            # Its keeper has ended.
            until_no_keeper
            begin
            kill -9 $(keepers)
            says 'who uses /dev/ublkb0, or remove it (the keeper of the device has ended'
            # It says so again.
            kill $pid
            while [ $(grep -c 'has ended' /tmp/err) != 2 ]; do sleep 0.1; done
            goes_on four
            umount /tmp/fs
            kill -9 $pid
            ends
            test $status = 137
            # What is left of the device makes way for the next one.
            test -e /dev/ublkc0
            begin
            for name in one two three four; do sha256sum </tmp/fs/$name; done | cmp - /tmp/sums
            umount /tmp/fs
            stops
            gone 0
            {NO_ERRORS}
            echo whole=yes
            "
        ),
    );
    assert!(output.contains("whole=yes"), "{output}");
}

#[test]
fn nothing_is_left_of_a_server_that_is_killed_while_it_starts() {
    let world = World::new();
    let output = world.run(
        world.guest(),
        "
        for round in $(seq 12); do
            isobath serve empty.qcow2 --ublk auto --threads 2 >/tmp/out 2>/tmp/err &
            pid=$!
            while [ ! -e /dev/ublkc0 ] && [ -e /proc/$pid ]; do :; done
            usleep $((round * 1500))
            kill -9 $pid
            wait $pid || true
            until_no_keeper
            until_gone 0
        done
        serve empty.qcow2 --ublk 0
        stops
        gone 0
        echo rounds=$round
        ",
    );
    assert!(output.contains("rounds=12"), "{output}");
}

#[test]
fn a_write_that_is_lost_at_the_end_is_the_servers_failure() {
    let world = World::new();
    let output = world.run(
        world.guest(),
        "
        mount -t tmpfs -o size=6m small /tmp/fs
        truncate -s 64M /tmp/fs/small.raw
        serve /tmp/fs/small.raw --format raw --ublk 0 --werror report
        # While it is open, the kernel has no reason to write it.
        exec 3<>/dev/ublkb0
        sleep 1000 3<&3 &
        other=$!
        exec 3<&-
        dd if=/dev/urandom of=/dev/ublkb0 bs=1M count=16 conv=notrunc 2>/dev/null
        kill $pid
        says 'has it open'
        kill $other
        ends
        echo status=$status
        gone 0
        umount /tmp/fs
        ",
    );
    assert!(output.contains("status=1"), "{output}");
    assert!(output.contains("last has not all reached the image"), "{output}");
}

#[test]
fn partitions_are_used_like_their_disk() {
    let world = World::new();
    let output = world.run(
        world.guest().program("mkfs.ext4"),
        &format!(
            "
            serve empty.qcow2 --ublk 0
            printf 'n\\np\\n1\\n\\n+20M\\nn\\np\\n2\\n\\n\\nw\\n' | fdisk /dev/ublkb0 >/tmp/fdisk 2>&1
            mkfs.ext4 -q /dev/ublkb0p1
            mount -t ext4 /dev/ublkb0p1 /tmp/fs
            kill $pid
            says 'it is mounted on /tmp/fs'
            exec 3</dev/ublkb0p2
            sleep 1000 3<&3 &
            other=$!
            exec 3<&-
            umount /tmp/fs
            says \"process $other (sleep) has it open\"
            kill $other
            ends
            test $status = 0
            serve empty.qcow2 --ublk 0
            mount -t ext4 /dev/ublkb0p1 /tmp/fs
            umount /tmp/fs
            stops
            {NO_ERRORS}
            echo whole=yes
            "
        ),
    );
    assert!(output.contains("whole=yes"), "{output}");
}

#[test]
fn programs_go_on_when_another_server_takes_the_device_of_a_killed_one() {
    let world = World::new();
    qemu::create(&world.at("files").join("old.qcow2"), "qcow2", SIZE, "compat=0.10");
    let output = world.run(
        world.guest().program("mkfs.ext4").program("fsck.ext4").program("fio"),
        &format!(
            "
            serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads 2
            test \"$(tr '\\0' ' ' </proc/$(keepers)/cmdline)\" = 'isobath-ublk-keeper 0 60 '
            test $(stat -c %a:%u /run/isobath) = 700:0
            test $(stat -c %a:%u /run/isobath/ublk-0) = 600:0
            mkfs.ext4 -q /dev/ublkb0
            mount -t ext4 -o errors=panic /dev/ublkb0 /tmp/fs
            dd if=/dev/urandom of=/tmp/random bs=1M count=3 2>/dev/null
            cp /tmp/random /tmp/fs/before
            # It has up to 16 requests in flight, flushes none of them, and reads all of them in the end.
            fio --name=w --filename=/tmp/fs/fio --size=12M --bs=4k --rw=randwrite --direct=1 --ioengine=libaio \
                --iodepth=16 --rate_iops=300 --verify=crc32c --minimal >/tmp/fio &
            writer=$!
            sleep 3
            for threads in 2 1 3; do
                killed
                test -e /proc/$writer
                serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads $threads
                sleep 1
                # The last server's has ended.
                test $(keepers | wc -w) = 1
            done
            echo 'written meanwhile' >/tmp/fs/meanwhile
            wait $writer
            cmp /tmp/random /tmp/fs/before
            umount /tmp/fs
            fsck.ext4 -f -n /dev/ublkb0 >/tmp/fsck 2>&1
            echo verified=yes

            # What has completed is there, without a flush.
            dd if=/tmp/random of=/dev/ublkb0 bs=64k seek=800 conv=notrunc oflag=direct 2>/dev/null
            killed
            # Nobody else gets the device.
            refused() {{ fails isobath serve --ublk 0 \"$@\" >/tmp/why; cat /tmp/why; }}
            refused top.qcow2 --ublk-recovery 60
            grep -q \"/dev/ublkb0 is of '/mnt/empty.qcow2', not of '/mnt/top.qcow2'\" /tmp/why
            refused empty.qcow2 --ublk-recovery 60 --read-only
            grep -q 'cannot be taken over: it is writable, and the disk is read-only' /tmp/why
            refused empty.qcow2
            grep -q 'there is a ublk device 0 already.*--ublk-recovery serves one that waits' /tmp/why
            # A program that reads waits.
            dd if=/dev/ublkb0 bs=64k skip=800 count=48 iflag=direct 2>/dev/null >/tmp/read &
            reader=$!
            serve empty.qcow2 --ublk 0 --ublk-recovery 2
            wait $reader
            cmp /tmp/read /tmp/random
            mount -t ext4 /dev/ublkb0 /tmp/fs
            echo 'written meanwhile' | cmp - /tmp/fs/meanwhile
            umount /tmp/fs
            {NO_ERRORS}

            # Without the last one's keeper the next server takes it over all the same, if the record says so.
            kill -9 $(keepers)
            killed
            cp /run/isobath/ublk-0 /tmp/record
            byte 40 '\\1'
            refused empty.qcow2 --ublk-recovery 2
            grep -q 'has lost a server that was just taking it over' /tmp/why
            byte 40 '\\0'
            byte 8 'another'
            refused empty.qcow2 --ublk-recovery 2
            grep -q 'there is a ublk device 0 already, and not one that waits for another server' /tmp/why
            cat /tmp/record >/run/isobath/ublk-0
            serve empty.qcow2 --ublk 0 --ublk-recovery 2
            dd if=/dev/ublkb0 bs=64k skip=800 count=48 iflag=direct 2>/dev/null | cmp - /tmp/random
            {NO_ERRORS}

            # Nobody comes, and the device is gone after the time.
            killed
            before=$(date +%s)
            sleep 1
            test -e /dev/ublkb0
            until_gone 0
            test $(($(date +%s) - before)) -le 30
            until_no_keeper
            test ! -e /run/isobath/ublk-0
            # One that ends by itself removes it at once.
            serve empty.qcow2 --ublk 0 --ublk-recovery 60
            dd if=/dev/ublkb0 bs=64k skip=800 count=48 2>/dev/null | cmp - /tmp/random
            stops
            gone 0
            until_no_keeper
            test ! -e /run/isobath/ublk-0

            # Where what has completed would be lost, nobody is promised that it survives.
            recovering() {{ fails isobath serve --ublk 0 --ublk-recovery 5 \"$@\" >/tmp/why; cat /tmp/why; }}
            recovering empty.qcow2 --metadata ordered
            grep -q \"metadata mode 'ordered'\" /tmp/why
            recovering old.qcow2
            grep -q 'version is 2' /tmp/why
            mv /dev/shm /dev/shm.away
            recovering empty.qcow2
            grep -q 'there is no restart memory' /tmp/why
            chmod 777 /run/isobath
            recovering empty.qcow2
            grep -q 'cannot use /run/isobath, which only root may: others may use it (mode 777)' /tmp/why
            until_no_keeper
            gone 0
            echo whole=yes
            "
        ),
    );
    assert!(output.contains("verified=yes") && output.contains("whole=yes"), "{output}");
}

#[test]
fn a_server_that_is_killed_while_it_takes_a_device_over_leaves_it_to_the_next_or_removes_it() {
    let world = World::new();
    let output = world.run(
        world.guest().program("fio").program("flock"),
        "
        dd if=/dev/urandom of=/tmp/random bs=1M count=2 2>/dev/null
        serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads 2
        dd if=/tmp/random of=/dev/ublkb0 bs=64k conv=notrunc oflag=direct 2>/dev/null
        next() {
            isobath serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads 2 >/tmp/out 2>/tmp/err 9<&- &
            pid=$!
        }
        is_whole() {
            dd if=/dev/ublkb0 bs=64k count=32 iflag=direct 2>/dev/null | cmp - /tmp/random
        }
        for round in $(seq 10); do
            killed
            next
            usleep $((100000 + round * 60000))
            killed
            serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads 2
            is_whole
        done

        # Server and keeper go on in turns until a condition holds when the keeper has carried out an order, and the
        # server does not know it.
        asks() {
            while ! cat /proc/$1/task/*/wchan 2>/dev/null | grep -q unix_stream; do
                if [ ! -e /proc/$1/fd/0 ]; then cat /tmp/err; return 1; fi
                sleep 0.01
            done
        }
        pauses() {
            kill -STOP $1
            while grep -h '^State' /proc/$1/task/*/status | grep -qv 'T (stopped)'; do sleep 0.01; done
        }
        until_done() {
            until_waits
            cp /run/isobath/ublk-0 /tmp/record
            # It waits for the record.
            exec 9</run/isobath/ublk-0
            flock -x 9
            next
            keeper=
            while [ -z \"$keeper\" ]; do
                sleep 0.01
                read -r keeper </proc/$pid/task/$pid/children || true
            done
            pauses $keeper
            exec 9<&-
            while :; do
                asks $pid
                pauses $pid
                kill -CONT $keeper
                asks $keeper
                if \"$@\"; then break; fi
                pauses $keeper
                kill -CONT $pid
            done
            killed
        }
        is_another_keepers() {
            dd if=/run/isobath/ublk-0 bs=8 skip=2 count=1 of=/tmp/number 2>/dev/null
            if dd if=/tmp/record bs=8 skip=2 count=1 2>/dev/null | cmp -s - /tmp/number; then return 1; fi
        }
        # It has the device, and serves nothing yet: the next one can, whatever the number of queues.
        killed
        until_done is_another_keepers
        if is_set 40; then exit 1; fi
        test -e /dev/ublkb0
        until_done is_another_keepers
        serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads 2
        is_whole
        # It is about to serve the queues. Of two nobody can tell which are served.
        killed
        until_done is_set 40
        until_gone 0
        until_no_keeper
        serve empty.qcow2 --ublk 0 --ublk-recovery 60 --threads 1
        is_whole
        # One either is or not.
        killed
        until_done is_set 40
        test -e /dev/ublkb0
        until_done is_set 40
        serve empty.qcow2 --ublk 0 --ublk-recovery 60
        is_whole
        stops
        until_no_keeper
        # It has all requests that a queue can have, and the kernel notices its end by their time.
        serve empty.qcow2 --ublk 0 --ublk-recovery 60 --throttle iops-total=1
        fio --name=w --filename=/dev/ublkb0 --size=4M --bs=4k --number_ios=200 --rw=randwrite --direct=1 \
            --ioengine=libaio --iodepth=100 --verify=crc32c --minimal >/tmp/fio &
        writer=$!
        sleep 3
        kill -9 $pid
        ends
        serve empty.qcow2 --ublk 0 --ublk-recovery 60
        wait $writer
        stops
        gone 0
        until_no_keeper
        # Servers that have given up their rights, and are confined.
        mkdir /etc
        echo 'nobody:x:65534:65534::/:/bin/sh' >/etc/passwd
        echo 'nogroup:x:65534:' >/etc/group
        chown -R 65534:65534 /mnt
        serve empty.qcow2 --ublk 0 --ublk-recovery 60 --user nobody
        dd if=/tmp/random of=/dev/ublkb0 bs=64k seek=300 conv=notrunc oflag=direct 2>/dev/null
        killed
        serve empty.qcow2 --ublk 0 --ublk-recovery 60 --user nobody
        test \"$(stat -c %u /proc/$pid)\" = 65534
        grep -q '^Seccomp:.2' /proc/$pid/status
        dd if=/dev/ublkb0 bs=64k skip=300 count=32 iflag=direct 2>/dev/null | cmp - /tmp/random
        stops
        gone 0
        until_no_keeper
        if dmesg | grep -E 'WARNING:|BUG:'; then exit 1; fi
        echo rounds=$round
        ",
    );
    assert!(output.contains("rounds=10"), "{output}");
}

#[test]
fn a_server_that_is_killed_while_a_device_starts_that_outlives_it_leaves_nothing() {
    let world = World::new();
    let output = world.run(
        world.guest(),
        "
        # If the kernel read the partition table, it would wait for a second after the first request.
        for round in $(seq 6); do
            isobath serve empty.qcow2 --ublk 0 --ublk-recovery 1 --throttle iops-total=1 >/tmp/out 2>/tmp/err &
            pid=$!
            while [ ! -e /dev/ublkb0 ]; do test -e /proc/$pid; done
            killed
            for moment in $(seq 600); do
                if [ -z \"$(keepers)\" ]; then break; fi
                sleep 0.1
            done
            test -z \"$(keepers)\"
            gone 0
        done
        serve empty.qcow2 --ublk 0 --ublk-recovery 60
        test $(cat /sys/block/ublkb0/partscan) = 0
        stops
        gone 0
        if dmesg | grep -E 'WARNING:|BUG:'; then exit 1; fi
        echo rounds=$round
        ",
    );
    assert!(output.contains("rounds=6"), "{output}");
}

#[test]
fn a_device_is_not_taken_over_with_an_image_that_is_not_as_its_server_left_it() {
    let world = World::new();
    let output = world.run(
        world.guest(),
        "
        dd if=/dev/urandom of=/tmp/random bs=1M count=2 2>/dev/null
        writes() { dd if=/tmp/random of=/dev/ublkb0 bs=64k seek=$1 conv=notrunc oflag=direct 2>/dev/null; }
        has() { dd if=/dev/ublkb0 bs=64k skip=$1 count=32 iflag=direct 2>/dev/null | cmp - /tmp/random; }
        refused() {
            fails isobath serve empty.qcow2 --ublk 0 --ublk-recovery 40 >/tmp/why
            cat /tmp/why
            grep -q \"$1\" /tmp/why
            grep -q \"'ublk del -n 0' removes\" /tmp/why
        }
        serve empty.qcow2 --ublk 0 --ublk-recovery 40
        writes 0
        killed
        # The log of what was not flushed is not there, and the image stays as it is.
        mv /dev/shm/isobath-0 /dev/shm/away
        refused 'the log of its unflushed writes is not there'
        refused 'the log of its unflushed writes is not there'
        mv /dev/shm/away /dev/shm/isobath-0
        serve empty.qcow2 --ublk 0 --ublk-recovery 40
        has 0
        # Several devices are taken over as well.
        stops
        gone 0
        serve empty.qcow2 top.qcow2 --ublk 0 --ublk 1 --ublk-recovery 40 --threads 2
        writes 40
        dd if=/tmp/random of=/dev/ublkb1 bs=64k seek=40 conv=notrunc oflag=direct 2>/dev/null
        killed
        serve empty.qcow2 top.qcow2 --ublk 0 --ublk 1 --ublk-recovery 40 --threads 2
        has 40
        dd if=/dev/ublkb1 bs=64k skip=40 count=32 iflag=direct 2>/dev/null | cmp - /tmp/random
        stops
        gone 0
        gone 1
        until_no_keeper
        # Somebody has changed it since.
        serve empty.qcow2 --ublk 0 --ublk-recovery 40
        writes 80
        killed
        until_waits
        touch empty.qcow2
        refused 'is not as the server of /dev/ublkb0 has left it'
        refused 'is not as the server of /dev/ublkb0 has left it'
        # Then it goes, and the image is served as after a power failure, or as the log says.
        until_gone 0
        until_no_keeper
        serve empty.qcow2 --ublk 0 --ublk-recovery 2
        has 80
        writes 120
        killed
        rm -r /dev/shm/isobath-0
        until_gone 0
        until_no_keeper
        serve empty.qcow2 --ublk 0 --ublk-recovery 40
        has 80
        stops
        gone 0
        if dmesg | grep -E 'WARNING:|BUG:'; then exit 1; fi
        echo whole=yes
        ",
    );
    assert!(output.contains("whole=yes"), "{output}");
}

#[test]
fn what_is_written_while_a_device_that_outlives_its_server_is_removed_is_refused_or_kept() {
    let world = World::new();
    let output = world.run(
        world.guest(),
        "
        serve empty.qcow2 --ublk 0 --ublk-recovery 40 --throttle bps-write=2M
        # While it is open, the kernel has no reason to write it.
        exec 3<>/dev/ublkb0
        sleep 1000 3<&3 &
        other=$!
        exec 3<&-
        dd if=/dev/urandom of=/dev/ublkb0 bs=1M count=12 conv=notrunc 2>/dev/null
        keeper=$(keepers)
        kill $pid
        says 'has it open'
        kill $other
        # The keeper has the disk, and writes for seconds: whoever only opens it meanwhile is not seen.
        claimed() { for link in /proc/$keeper/fd/*; do readlink $link; done | grep -q '^/dev/ublkb0$'; }
        while ! claimed; do sleep 0.05; done
        number=0
        while printf \"%4096s\" $number >/tmp/block &&
            dd if=/tmp/block of=/dev/ublkb0 bs=4k seek=$number count=1 conv=notrunc 2>/dev/null; do
            number=$((number + 1))
        done
        echo written=$number
        ends
        test $status = 0
        gone 0
        until_no_keeper
        serve empty.qcow2 --ublk 0
        for one in $(seq 0 $((number - 1))); do
            printf \"%4096s\" $one >/tmp/block
            dd if=/dev/ublkb0 bs=4k skip=$one count=1 2>/dev/null | cmp - /tmp/block
        done
        stops
        gone 0
        echo whole=yes
        ",
    );
    assert!(output.contains("whole=yes") && !output.contains("written=0"), "{output}");
}

#[test]
fn a_device_that_another_server_could_not_find_is_refused_at_once() {
    let serve = |options: &[&str]| {
        let mut command = Command::new(ISOBATH);
        command.args(["serve", "none.qcow2"]).args(options);
        run(&mut command).exits(1).report()
    };
    for (options, why) in [
        (&["--ublk", "auto", "--ublk-recovery", "5"][..], "say which with --ublk N"),
        (&["--ublk", "1", "--ublk-recovery", "0"], "at least a second"),
        (&["--ublk", "1", "--ublk-recovery", "5", "--qmp", "unix:q"], "not with --qmp"),
        (&["--ublk", "1", "--ublk-recovery", "5", "--snapshot", "a"], "not with --snapshot"),
        (&["--ublk", "1", "--ublk-recovery", "5", "--fuse", "m"], "not with --fuse"),
        (&["--ublk-recovery", "5"], "--ublk"),
    ] {
        let error = serve(options);
        assert!(error.contains(why), "{options:?}: {error}");
    }
}

#[test]
fn a_kernel_without_the_driver_is_told_what_it_lacks() {
    let world = World::new();
    let output =
        world.run(world.guest_with(Guest::new()), "fails isobath serve empty.qcow2 --ublk auto");
    assert!(
        output.contains("there is no /dev/ublk-control: load the driver with 'modprobe ublk_drv' (Linux 6.5 or newer)"),
        "{output}"
    );
}
