//! The programs that people use with NBD servers, against this one.

use crate::memory_disk::MemoryDisk;
use crate::served::{Served, export, run};
use isobath_export::nbd::Limits;
use isobath_testkit::args;
use std::fs;
use std::sync::atomic::Ordering;

const MIB: usize = 1 << 20;

/// Data of the active layer at 1 MiB, of a backing file at 3 MiB; the rest is unallocated.
fn layered() -> MemoryDisk {
    MemoryDisk::new(8 * MIB).with(MIB, MIB, 0x11, 0).with(3 * MIB, 65536, 0x33, 2)
}

#[test]
fn qemu_io_reads_what_it_wrote() {
    let served = Served::new(vec![export("disk", MemoryDisk::new(16 * MIB))]);
    let io = |commands: &[&str]| {
        let mut arguments = vec!["-f".to_owned(), "raw".into()];
        arguments.extend(commands.iter().flat_map(|command| ["-c".into(), (*command).into()]));
        arguments.push(served.uri("disk"));
        let finished = run("qemu-io", &arguments).ok();
        let text = finished.text();
        assert!(!text.contains("failed") && !text.contains("error"), "{text}");
        text
    };
    io(&["write -P 1 0 64k", "write -f -P 2 1000 3000", "aio_write -P 3 1M 2M", "aio_flush"]);
    io(&["read -P 1 0 1000", "read -P 2 1000 3000", "read -P 1 4000 60k", "read -P 3 1M 2M"]);
    io(&["write -z -u 1M 1M", "discard 2M 512k", "write -z 5M 4k", "flush"]);
    io(&["read -P 0 1M 1536k", "read -P 3 2560k 512k"]);
    assert_eq!(served.disk(0).bytes(1000, 3000), [2; 3000]);
    assert!(served.disk(0).flushes.load(Ordering::Relaxed) >= 2);
    let length = io(&["length"]);
    assert_eq!(length.trim(), "16 MiB");
}

#[test]
fn qemu_img_maps_compares_and_converts() {
    let served = Served::with(vec![export("disk", layered())], Limits::default(), 2);
    let uri = served.uri("");
    let json = ["map", "--output=json", "-f", "raw", &uri];
    let map = run("qemu-img", json).ok().json();
    let runs = |keys: &[&str]| -> Vec<Vec<serde_json::Value>> {
        let runs = map.as_array().unwrap().iter();
        runs.map(|run| keys.iter().map(|key| run[*key].clone()).collect()).collect()
    };
    let expected = serde_json::json!([
        [0, MIB, true, false],
        [MIB, MIB, false, true],
        [2 * MIB, MIB, true, false],
        [3 * MIB, 65536, false, true],
        [3 * MIB + 65536, 5 * MIB - 65536, true, false],
    ]);
    assert_eq!(serde_json::json!(runs(&["start", "length", "zero", "data"])), expected);

    let copy = served.directory.path().join("copy.qcow2");
    let _ = run("qemu-img", args!["convert", "-f", "raw", "-O", "qcow2", &uri, &copy]).ok();
    let _ = run("qemu-img", args!["compare", "-f", "raw", "-F", "qcow2", &uri, &copy]).ok();
    let target = Served::new(vec![export("target", MemoryDisk::new(8 * MIB).with(0, MIB, 9, 0))]);
    let to = target.uri("target");
    let convert = args!["convert", "-n", "-W", "-m", "8", "-f", "qcow2", "-O", "raw", &copy, &to];
    let _ = run("qemu-img", convert).ok();
    assert!(target.disk(0).bytes(0, 8 * MIB) == served.disk(0).bytes(0, 8 * MIB));
    let compare = run("qemu-img", args!["compare", "-f", "raw", "-F", "raw", &to, &uri]);
    assert!(compare.ok().text().contains("identical"));
}

#[test]
fn nbdinfo_describes_every_export() {
    let writable = export("disk", layered());
    let read_only = export("second disk", MemoryDisk { read_only: true, ..layered() });
    let served = Served::new(vec![writable, read_only]);
    let uri = served.uri("");
    let info = run("nbdinfo", ["--json", &uri]).ok().json();
    assert_eq!((&info["protocol"], &info["TLS"]), (&"newstyle-fixed".into(), &false.into()));
    assert_eq!(info["structured"], true);
    let disk = &info["exports"][0];
    let expected = serde_json::json!({
        "description": "the disk disk", "export-size": 8 * MIB, "is_read_only": false,
        "can_cache": true, "can_df": true, "can_fast_zero": true, "can_flush": true,
        "can_fua": true, "can_multi_conn": true, "can_trim": true, "can_zero": true,
        "is_rotational": false, "block_size_minimum": 1, "block_size_preferred": 4096,
        "block_size_maximum": 32 * MIB, "contexts": ["base:allocation", "qemu:allocation-depth"],
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&disk[key], value, "{key}");
    }

    let list = run("nbdinfo", ["--list", "--json", &uri]).ok().json();
    let exports = list["exports"].as_array().unwrap();
    let names: Vec<_> = exports.iter().map(|export| export["export-name"].clone()).collect();
    assert_eq!(names, ["disk", "second disk"]);
    assert_eq!(exports[1]["is_read_only"], true);
    for key in ["can_trim", "can_zero", "can_fast_zero"] {
        assert_eq!(exports[1][key], false, "{key}");
    }

    let map = |context: &str| run("nbdinfo", [context, "--json", &uri]).ok().json();
    let types = |map: serde_json::Value| -> Vec<(u64, u64)> {
        let runs = map.as_array().unwrap().iter();
        let number = |value: &serde_json::Value| value.as_u64().unwrap();
        runs.map(|run| (number(&run["offset"]), number(&run["type"]))).collect()
    };
    let starts = [0, MIB, 2 * MIB, 3 * MIB, 3 * MIB + 65536].map(|start| start as u64);
    let zip = |flags: [u64; 5]| starts.into_iter().zip(flags).collect::<Vec<_>>();
    assert_eq!(types(map("--map")), zip([3, 0, 3, 0, 3]));
    assert_eq!(types(map("--map=qemu:allocation-depth")), zip([0, 1, 0, 3, 0]));
    let totals = run("nbdinfo", ["--map", "--totals", &uri]).ok().text();
    assert!(totals.contains("1114112  13.3%   0 data"), "{totals}");
    let _ = run("nbdinfo", [&served.uri("nobody")]).exits(1);
}

#[test]
fn nbdcopy_copies_over_several_connections() {
    let from = Served::with(vec![export("from", layered())], Limits::default(), 2);
    let to = Served::new(vec![export("to", MemoryDisk::new(8 * MIB))]);
    let tcp = format!("nbd://{}/to", to.tcp);
    let copy = args!["--connections=4", "--requests=64", "--flush", from.uri("from"), tcp];
    let _ = run("nbdcopy", copy).ok();
    assert!(to.disk(0).bytes(0, 8 * MIB) == from.disk(0).bytes(0, 8 * MIB));
    let file = from.directory.path().join("file");
    let _ = run("nbdcopy", args!["--synchronous", from.uri("from"), &file]).ok();
    assert!(fs::read(&file).unwrap() == from.disk(0).bytes(0, 8 * MIB));
}

#[test]
fn fio_verifies_what_it_writes() {
    let served = Served::with(vec![export("", MemoryDisk::new(16 * MIB))], Limits::default(), 2);
    let uri = format!("--uri={}", served.uri(""));
    for job in [
        ["--rw=randwrite", "--bs=4k", "--iodepth=32", "--numjobs=1", "--size=16m"],
        [
            "--rw=randwrite",
            "--bssplit=512/40:3k/30:1m/30",
            "--iodepth=16",
            "--numjobs=1",
            "--size=16m",
        ],
        ["--rw=randrw", "--bs=4k", "--iodepth=8", "--numjobs=1", "--size=16m"],
    ] {
        let common = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--verify=crc32c",
            "--fsync=64",
            "--verify_state_save=0",
        ];
        let arguments = common.iter().chain(job.iter());
        let finished = run("fio", arguments).ok();
        assert!(finished.text().contains("err= 0"), "{}", finished.report());
    }
}

#[test]
fn qemu_nbd_lists_the_exports() {
    let disks = ["one", "two"].map(|name| export(name, MemoryDisk::new(MIB)));
    let served = Served::new(disks.into());
    let list = run("qemu-nbd", args!["--list", "-k", &served.socket]).ok().text();
    assert!(list.contains("exports available: 2"), "{list}");
    for text in ["export: 'one'", "export: 'two'", "description: the disk two", "size:  1048576"] {
        assert!(list.contains(text), "{text} in {list}");
    }
    assert!(list.contains("base:allocation") && list.contains("qemu:allocation-depth"), "{list}");
}

#[test]
fn a_read_only_export_takes_no_writes() {
    let disk = MemoryDisk { read_only: true, ..layered() };
    let served = Served::new(vec![export("disk", disk)]);
    let uri = served.uri("disk");
    let read = ["-r", "-f", "raw", "-c", "read -P 0x11 1M 1M", &uri];
    assert!(!run("qemu-io", read).ok().text().contains("failed"));
    let write = run("qemu-io", ["-f", "raw", "-c", "write 0 4k", &uri]).exits(1);
    assert!(write.report().to_lowercase().contains("permission denied"), "{}", write.report());
    assert_eq!(served.disk(0).bytes(MIB, 1), [0x11]);
}
