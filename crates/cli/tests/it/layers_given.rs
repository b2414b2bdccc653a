//! Layers whose order the command line or an index of checkpoints gives, whatever their headers name.

use crate::programs::{isobath, qemu_img};
use crate::serving::{Served, assert_same_bytes};
use isobath_testkit::args;
use isobath_testkit::qemu;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A full backup of a disk and increments, which name no backing files, beside an index; and the disk at each time.
struct Backups {
    directory: TempDir,
}

const IDS: [&str; 4] = ["full", "monday", "tuesday", "wednesday"];

fn file(number: usize) -> String {
    format!("{}/vmb-root.qcow2", IDS[number])
}

impl Backups {
    fn new() -> Self {
        let backups = Self { directory: tempfile::tempdir().unwrap() };
        let path = backups.path();
        let mut checkpoints = Vec::new();
        for (number, id) in IDS.into_iter().enumerate() {
            fs::create_dir(path.join(id)).unwrap();
            let (name, size) = (file(number), format!("{}M", 4 + number / 2));
            let mut create = args!["create", "-q", "-f", "qcow2"];
            if let Some(below) = number.checked_sub(1) {
                create.extend(args!["-b", path.join(file(below)), "-F", "qcow2"]);
            }
            create.extend(args![&name, &size]);
            let _ = qemu_img(path, create).ok();
            let mut write = Command::new(qemu::program("qemu-io"));
            write.current_dir(path);
            for piece in 0..6 {
                let at = (number * 5 + piece * 11) % 60 * 65536;
                write.args(["-c", &format!("write -q -P {} {at} 60k", number * 16 + piece + 1)]);
            }
            let at = number * 3 * 65536;
            let _ = qemu::run(write.args(["-c", &format!("write -q -z {at} 64k"), &name])).ok();
            let _ =
                qemu_img(path, args!["convert", "-O", "raw", &name, format!("{number}.raw")]).ok();
        }
        for number in (0..IDS.len()).rev() {
            let name = path.join(file(number));
            if number > 0 {
                let _ = qemu_img(path, args!["rebase", "-u", "-b", "", &name]).ok();
            }
            let (kind, parent) = match number.checked_sub(1) {
                None => ("full", ""),
                Some(below) => ("incremental", IDS[below]),
            };
            checkpoints.insert(
                0,
                json!({
                    "id": IDS[number], "type": kind, "parent": parent,
                    "timestamp": "2026-11-28T00:00:00Z", "vmBackup": "vmb", "pvcs": ["root"],
                    "files": [{
                        "filename": "vmb-root.qcow2", "diskName": "root",
                        "size": fs::metadata(&name).unwrap().len(),
                        "objectPath": format!("checkpoints/ns/vm/{}/vmb-root.qcow2", IDS[number])
                    }],
                    "referencedBy": ["backup"]
                }),
            );
        }
        let index = json!({"vmName": "vm", "namespace": "ns", "checkpoints": checkpoints});
        fs::write(path.join("index.json"), index.to_string()).unwrap();
        backups
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn raw(&self, number: usize) -> PathBuf {
        self.path().join(format!("{number}.raw"))
    }

    /// `--layers` and the image for the disk at a time.
    fn layers(number: usize) -> [String; 3] {
        let below: Vec<_> = (0..number).map(file).collect();
        ["--layers".to_owned(), below.join(","), file(number)]
    }
}

#[test]
fn layers_are_read_in_the_order_that_is_given() {
    let backups = Backups::new();
    for (number, id) in IDS.into_iter().enumerate().skip(1) {
        let raw = backups.raw(number).display().to_string();
        let layers = Backups::layers(number);
        let layers = layers.each_ref().map(String::as_str);
        let checkpoint = format!("root@{id}");
        for named in [&layers[..], &["--checkpoint", &checkpoint, "index.json"]] {
            let line = |before: &[&str], after: &[&str]| {
                let words = [before, named, after].concat();
                isobath(backups.path(), words).ok().text()
            };
            line(&["convert", "-O", "raw"], &["copy.raw"]);
            assert_eq!(
                fs::read(backups.path().join("copy.raw")).unwrap(),
                fs::read(&raw).unwrap(),
                "{named:?}"
            );
            let map = line(&["map", "--output", "json"], &[]);
            assert!(
                map.contains(&format!("\"depth\": {number}")) || map.contains("\"depth\": 0"),
                "{map}"
            );
            line(&["io", "-r", "-c", "read 0 64k"], &[]);
            line(&["measure", "-O", "raw"], &[]);
            let chain = line(&["info", "--backing-chain", "--output", "json"], &[]);
            let chain: Vec<serde_json::Value> = serde_json::from_str(&chain).unwrap();
            assert_eq!(chain.len(), number + 1, "{named:?}");
        }
    }
    let last = isobath(
        backups.path(),
        ["convert", "-O", "raw", "--checkpoint", "root", "index.json", "c"],
    );
    let _ = last.ok();
    assert!(fs::read(backups.path().join("c")).unwrap() == fs::read(backups.raw(3)).unwrap());
}

#[test]
fn layers_that_are_given_are_served_and_not_changed() {
    let backups = Backups::new();
    let path = |name: &str| backups.path().join(name).display().to_string();
    let before: Vec<_> =
        (0..IDS.len()).map(|number| fs::read(path(&file(number))).unwrap()).collect();
    for sandbox in ["strict", "off"] {
        let served = Served::start(
            &[path("index.json")],
            &["--checkpoint", "root@tuesday", "--read-only", "--sandbox", sandbox],
        );
        assert_same_bytes(&served.uri("vmb-root"), &backups.raw(2));
        served.stop();
        let below = [path(&file(0)), path(&file(1))].join(",");
        let options = ["--layers", &below, "--read-only", "--untrusted", "--sandbox", sandbox];
        let served = Served::start(&[path(&file(2))], &options);
        assert_same_bytes(&served.uri("vmb-root"), &backups.raw(2));
        served.stop();
    }
    for (number, before) in before.iter().enumerate() {
        assert!(fs::read(path(&file(number))).unwrap() == *before);
    }
}

#[test]
fn layers_that_cannot_be_one_disk_are_refused() {
    let backups = Backups::new();
    let (full, middle, last) = (file(0), file(1), file(3));
    let refused = |line: &[&str], why: &str| {
        let done = isobath(backups.path(), line);
        assert!(!done.status.success() && done.stderr.contains(why), "{}", done.report());
    };
    refused(&["map", "--layers", &last, &full], "they are in another order");
    refused(&["info", "--backing-chain", "--layers", &last, &full], "they are in another order");
    refused(&["compare", "--layers", &full, &middle, "1.raw"], "are for one image");
    for line in [&["info"][..], &["check"], &["snapshot", "-l"]] {
        let line = [line, &["--layers", &full, &middle]].concat();
        refused(&line, "opens no backing file: leave out --layers");
    }
    let smaller = format!("{full},{last}");
    refused(
        &["convert", "-O", "raw", "--layers", &smaller, &middle, "x"],
        "they are in another order",
    );
    let _ =
        qemu_img(backups.path(), args!["rebase", "-u", "-b", "none.qcow2", "-F", "qcow2", &full])
            .ok();
    refused(&["map", "--layers", &full, &middle], "its header names a backing file, 'none.qcow2'");
    refused(
        &["info", "--backing-chain", "--layers", &full, &middle],
        "its header names a backing file, 'none.qcow2'",
    );
    refused(&["map", "--layers", "0.raw", &middle], "this is not a qcow2 image");
    refused(
        &["map", "-f", "raw", "--layers", &full, &middle],
        "are for layers in the format qcow2",
    );
    refused(&["map", "--layers", &full, "--no-backing", &middle], "--no-backing");
    refused(&["map", "--layers", &middle, &middle], "it is its own backing file");
    refused(&["resize", "--layers", &full, &middle, "8M"], "read-only");
    refused(&["io", "--layers", &full, "-c", "write 0 512", &middle], "read-only");
    refused(
        &["map", "--checkpoint", "root@sunday", "index.json"],
        "there is no checkpoint 'sunday'",
    );
    refused(&["map", "--checkpoint", "root", "0.raw"], "cannot read the index of checkpoints");
    let socket = format!("unix:{}", backups.path().join("s").display());
    refused(&["serve", "--layers", &full, &middle, "--nbd", &socket], "require --read-only");
    refused(
        &["serve", "-r", "--layers", &full, &middle, &last, "--nbd", &socket],
        "are for one image",
    );
}
