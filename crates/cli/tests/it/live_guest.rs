//! A Linux guest works on a disk whose chain grows by a hundred snapshots and is shortened by jobs
//! meanwhile.

use crate::live::{DEVICE, Live};
use isobath_testkit::guest::Guest;
use isobath_testkit::process::run_program;
use isobath_testkit::{args, fs, qemu, tools};
use serde_json::{Value, json};
use std::path::Path;
use std::thread;
use std::time::Duration;

const SIZE: u64 = 128 << 20;
const SNAPSHOTS: usize = 100;

/// Writes files, whose checksums it keeps in memory, and parts of them anew, flushes, and reads
/// everything back from the disk, until a line is typed.
const WORKLOAD: &str = r"
mount -t ext4 -o errors=panic /dev/vda /mnt
exec 3<&0
(read line <&3; touch /tmp/stop) &
cd /mnt
pass=0
while [ ! -e /tmp/stop ]; do
    pass=$((pass + 1))
    file=file$((pass % 12))
    dd if=/dev/urandom of=$file bs=64k count=$((1 + pass % 5)) conv=fsync 2>/dev/null
    for number in 1 2 3; do
        dd if=/dev/urandom of=$file bs=4k count=1 seek=$(((pass * 7 + number * 5) % 16)) \
            conv=notrunc,fsync 2>/dev/null
    done
    [ $((pass % 5)) -gt 0 ] || { mkdir -p many; for n in 1 2 3 4 5 6 7 8 9; do
        echo $pass >many/$n; done; sync; rm -r many; fstrim /mnt; }
    md5sum file* >/tmp/sums
    echo 3 >/proc/sys/vm/drop_caches
    md5sum -c /tmp/sums >/tmp/verified || { cat /tmp/verified; exit 9; }
    echo pass=$pass
done
cat /tmp/sums
cd /
umount /mnt
";

/// What the kernel says of a disk that fails.
const COMPLAINTS: [&str; 4] = ["I/O error", "EXT4-fs", "JBD2", "timed out"];

/// Where a disk has data of its own, or what reads as zeroes, by QEMU: runs of start, end, zero.
fn zeroes(map: &Value) -> Vec<(u64, u64, bool)> {
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    for run in map.as_array().unwrap() {
        let start = run["start"].as_u64().unwrap();
        let end = start + run["length"].as_u64().unwrap();
        let zero = run["zero"].as_bool().unwrap();
        match runs.last_mut() {
            Some(last) if last.1 == start && last.2 == zero => last.1 = end,
            _ => runs.push((start, end, zero)),
        }
    }
    runs
}

/// Replays the journal of the file system in an image, as after a loss of power, and fails the test
/// if more has to be repaired than that.
fn assert_ext4_recovers(image: &Path) {
    let raw = image.with_extension("raw");
    qemu::to_raw(image, "qcow2", &raw);
    let done = run_program(tools::require("e2fsck"), args!["-p", &raw]);
    assert!([0, 1].contains(&done.code()), "{}", done.report());
    let _ = run_program(tools::require("e2fsck"), args!["-f", "-n", &raw]).ok();
}

#[test]
fn a_guest_does_not_notice_snapshots_a_stream_and_a_commit() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::make_ext4(&path("raw"), SIZE);
    let convert = args!["convert", "-f", "raw", "-O", "qcow2", path("raw"), path("base")];
    let _ = qemu::img(convert).ok();

    let live = Live::start(directory.path(), "base", &["--metadata", "auto"]);
    let mut control = live.control();
    let mut guest = Guest::new().nbd(&live.nbd(), DEVICE).spawn(WORKLOAD);
    guest.wait_for("pass=2");
    for number in 0..SNAPSHOTS {
        control.snapshot(&format!("s{number}")).unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(control.nodes().unwrap().len(), SNAPSHOTS + 1);
    control.start("block-stream", &json!({"base": "s49"})).unwrap();
    control.completed().unwrap();
    control.start("block-commit", &json!({"base": "s29"})).unwrap();
    let _ = control.wait_for(&["BLOCK_JOB_READY"]).unwrap();
    control.execute("block-job-complete", &json!({"device": DEVICE})).unwrap();
    control.completed().unwrap();
    let mut chain: Vec<_> = (0..30).rev().map(|number| format!("s{number}")).collect();
    chain.push("base".into());
    let files: Vec<_> = control.nodes().unwrap().into_iter().map(|(_, file)| file).collect();
    assert_eq!(files, chain);
    let passes = guest.console().matches("\npass=").count();
    guest.wait_for(&format!("pass={}", passes + 2));
    guest.type_line("stop");
    let done = guest.wait();
    assert_eq!(done.status, 0, "{}", done.console);
    for complaint in COMPLAINTS {
        assert!(!done.console.contains(complaint), "{}", done.console);
    }

    // What is served is what is left.
    let copy = path("copy");
    let _ = run_program(tools::require("nbdcopy"), args![live.uri(), &copy]).ok();
    let served = qemu::img(args!["map", "--output=json", "-f", "raw", live.uri()]).ok().json();
    let _ = live.stop();
    let compare = args!["compare", "-f", "qcow2", "-F", "raw", path("s29"), &copy];
    let _ = qemu::img(compare).ok();
    let (told, known) = (zeroes(&served), zeroes(&qemu::map(&path("s29"))));
    let is_zero =
        |runs: &[(u64, u64, bool)], at| runs.iter().find(|run| run.1 > at).is_some_and(|run| run.2);
    let bounds = told.iter().chain(&known).map(|run| run.0);
    for at in bounds {
        assert!(!is_zero(&told, at) || is_zero(&known, at), "{at}: {told:?} {known:?}");
    }
    for number in 0..SNAPSHOTS {
        qemu::assert_clean(&path(&format!("s{number}")));
    }
    qemu::assert_clean(&path("base"));

    // The guest's files are as it knew them, and so is its file system at earlier moments.
    fs::assert_ext4_clean(&copy, "raw");
    let sums: Vec<_> = done.output.lines().filter_map(|line| line.split_once("  ")).collect();
    assert!(sums.len() >= 2, "{}", done.output);
    for (sum, name) in sums {
        let file = path("file");
        fs::read_ext4_file(&copy, "raw", &format!("/{name}"), &file);
        let found = run_program("md5sum", args![&file]).ok().text();
        assert!(found.starts_with(sum), "{name}: {found} is not {sum}");
        std::fs::remove_file(file).unwrap();
    }
    for number in [0, 14, 28] {
        assert_ext4_recovers(&path(&format!("s{number}")));
    }
}
