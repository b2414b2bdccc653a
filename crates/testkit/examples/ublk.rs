//! Instructions that a request to a block device takes: `bench/run --part ublk frontends` runs it.
//!
//! `ublk ISOBATH DIRECTORY RAW IMAGE...` boots a guest with one processor, which executes an instruction in each
//! nanosecond of its own time, and with the files of the directory in the page cache. There fio reads and writes a copy
//! of the raw file through the kernel's loop device, and the images through `isobath serve --ublk`. Prints the time of
//! a request of each load and file in nanoseconds, as JSON: that is how many instructions the whole machine executed
//! for it.
#![allow(clippy::expect_used, reason = "a measurement fails by a panic")]

use isobath_testkit::guest::Guest;
use isobath_testkit::process::run;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Loads that read: how many requests they have, and their options for fio.
const READS: [Load; 2] = [
    ("4 KiB random read, qd 1", 4000, "--rw=randread --bs=4k --iodepth=1"),
    ("4 KiB random read, qd 32", 8000, "--rw=randread --bs=4k --iodepth=32"),
];

/// Loads that write to clusters that the image has.
const WRITES: [Load; 2] = [
    ("4 KiB random write, qd 1", 2000, "--rw=randwrite --bs=4k --iodepth=1"),
    ("4 KiB random write, qd 32", 4000, "--rw=randwrite --bs=4k --iodepth=32"),
];

/// What makes a server map its files, and the image have all clusters.
const BEFORE_READS: Load = ("", 64_000, "--rw=randread --bs=4k --iodepth=32");
const BEFORE_WRITES: Load = ("", 64, "--rw=write --bs=1m --iodepth=1");

type Load = (&'static str, u32, &'static str);

/// Bytes of the guest's disk.
const DISK: u64 = 3 << 30;

fn main() {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let [isobath, directory, raw, images @ ..] = words.as_slice() else {
        panic!("usage: ublk ISOBATH DIRECTORY RAW IMAGE...")
    };
    let disk = tempfile::NamedTempFile::new().expect("a temporary file");
    disk.as_file().set_len(DISK).expect("set the disk's length");
    let mut make = Command::new("mkfs.ext4");
    let _ = run(make.args(["-q", "-d", directory]).arg(disk.path())).ok();
    let done = Guest::with_ublk()
        .memory(2048)
        .patience(Duration::from_mins(30))
        .arguments(["-icount", "shift=0,sleep=off"])
        .drive(&format!("file={},format=raw", disk.path().display()))
        .program("fio")
        .program_at(Path::new(isobath))
        .run(&script(raw, images));
    let mut found = Map::new();
    for line in done.values("figure") {
        let fields: Vec<_> = line.split(';').collect();
        let (file, load) = (fields[0], fields[1]);
        // The requests a second of reads and of writes, by version 3 of fio's terse output.
        let rate = |field: usize| fields[2 + field].parse::<f64>().expect("a number of fio's");
        let rate = rate(7).max(rate(48));
        let of_file = found.entry(file).or_insert_with(|| json!({}));
        of_file[load] = Value::from((1e9 / rate).round());
    }
    println!("{}", Value::from(found));
}

fn script(raw: &str, images: &[String]) -> String {
    let mut script = String::from(
        "
        mount -t ext4 /dev/vda /mnt
        mkdir -p /var/tmp /var/lock /dev/shm
        cd /mnt
        cat $(find . -type f) >/dev/null
        measure() {
            fio --name=load --filename=$2 --direct=1 --ioengine=libaio --thread --norandommap --randrepeat=1 \
                --number_ios=$4 $5 --output-format=terse --terse-version=3 >/tmp/fio
            if [ -n \"$3\" ]; then echo \"figure=$1;$3;$(cat /tmp/fio)\"; fi
        }
        loads() {
",
    );
    let reads = [BEFORE_READS].into_iter().chain(READS);
    for (load, count, options) in reads.chain([BEFORE_WRITES]).chain(WRITES) {
        let _ = writeln!(script, "measure \"$1\" $2 '{load}' {count} '{options}'");
    }
    let _ = write!(
        script,
        "
        }}
        losetup /dev/loop0 {raw}
        loads {raw} /dev/loop0
        losetup -d /dev/loop0
"
    );
    for image in images {
        let _ = write!(
            script,
            "
        rm -f /tmp/out
        isobath serve {image} --ublk 0 --threads 1 --map-reads 8G >/tmp/out &
        while [ ! -s /tmp/out ]; do sleep 0.1; done
        loads {image} /dev/ublkb0
        kill $!
        wait $!
"
        );
    }
    script
}
