//! Commands that read an image read one in a store as they read its files, and no command writes to one.

use crate::programs::{isobath, qemu_img};
use crate::served_from_stores::Place;
use isobath_testkit::args;
use isobath_testkit::process::{Finished, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command on the chain, with the cache of the test; `{}` stands for its name.
#[track_caller]
fn on_chain(place: &Place, line: &str) -> Finished {
    let mut words: Vec<String> =
        line.split(' ').map(|word| word.replace("{}", &place.vm()).replace('_', " ")).collect();
    let cache = place.path().join("cache").display().to_string();
    words.splice(1..1, ["--cache-dir".to_owned(), cache]);
    isobath(place.path(), words)
}

/// What a JSON text has, without the names of files, what only files have, and what QEMU does not know.
fn without_names(text: &str) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Array(values) => values.iter_mut().for_each(strip),
            Value::Object(members) => {
                for name in [
                    "filename",
                    "full-backing-filename",
                    "actual-size",
                    "children",
                    "direct-access-index",
                ] {
                    members.remove(name);
                }
                members.values_mut().for_each(strip);
            }
            _ => {}
        }
    }
    let mut value = serde_json::from_str(text).unwrap();
    strip(&mut value);
    value
}

/// All files in a directory.
fn contents(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

#[test]
fn commands_read_a_chain_in_a_store_as_they_read_its_files() {
    for (depth, options) in [(1, ""), (5, "cluster_size=4k"), (12, "extended_l2=on")] {
        let place = Place::new(depth, options);
        fs::create_dir(place.path().join("files")).unwrap();
        let _ = isobath(place.path(), args!["pull", "-q", &place.vm(), "files"]).ok();
        let top = format!("files/{}.qcow2", depth - 1);
        let local = |line: &str| {
            let line = line.replace("{}", &top);
            qemu_img(place.path(), line.split(' ')).ok().text()
        };
        for line in [
            "info --output json --backing-chain {}",
            "map --output json {}",
            "measure --output json -O qcow2 {}",
            "measure --output json -O raw {}",
        ] {
            let (here, qemus) = (on_chain(&place, line).ok().text(), local(line));
            assert_eq!(without_names(&here), without_names(&qemus), "{line}");
        }
        let checked = on_chain(&place, "check {}").ok().text();
        assert!(checked.contains("No errors were found"), "{checked}");
        let _ = on_chain(&place, &format!("compare {{}} {top}")).ok();
        let _ = on_chain(&place, "compare {} expected.raw").ok();
        let _ = on_chain(&place, "convert -O raw {} copy.raw").ok();
        let expected = fs::read(place.expected()).unwrap();
        assert!(fs::read(place.path().join("copy.raw")).unwrap() == expected);
        let _ = on_chain(&place, "dd if={} of=begin.raw bs=64k count=3").ok();
        assert!(fs::read(place.path().join("begin.raw")).unwrap() == expected[..3 << 16]);
        let read = on_chain(&place, "io -r -c read_-v_0_512 {}").ok().text();
        assert!(read.contains(&format!("00000000:  {:02x}", expected[0])), "{read}");
        let opened = on_chain(&place, "io -c open_-r_{} -c length").ok().text();
        assert_eq!(opened, "8 MiB\n");
        let _ = on_chain(&place, "bench -c 100 -d 8 {}").ok();
        assert_eq!(on_chain(&place, "snapshot -l {}").ok().text(), "");
        let _ = on_chain(&place, "info --untrusted {}").ok();
    }
}

#[test]
fn what_was_read_from_a_store_is_read_again_without_it() {
    let place = Place::new(3, "");
    let _ = on_chain(&place, "compare {} expected.raw").ok();
    fs::rename(place.path().join("store"), place.path().join("away")).unwrap();
    let again = on_chain(&place, "compare {} expected.raw").ok();
    assert!(again.stderr.contains("as it was when it was last read"), "{}", again.stderr);
}

#[test]
fn commands_that_write_refuse_a_chain_in_a_store() {
    let place = Place::new(2, "");
    let before = contents(&place.path().join("store"));
    for line in [
        "resize {} +1M",
        "rebase -u -b x -F qcow2 {}",
        "rebase -b expected.raw -F raw {}",
        "commit {}",
        "amend -o compat=0.10 {}",
        "bitmap --add {} b",
        "check -r all {}",
        "snapshot -c s {}",
        "bench -w -c 1 {}",
        "io -c write_0_512 {}",
    ] {
        let refused = on_chain(&place, line).exits(1).stderr;
        assert!(refused.contains("chains in stores are only read"), "{line}: {refused}");
    }
    for line in [
        "convert -O qcow2 expected.raw {}2",
        "dd if=expected.raw of={}2",
        "create {}2 1M",
        "convert -O qcow2 expected.raw s3://bucket/vm",
    ] {
        let line = match line.split_once(' ') {
            Some(("create", rest)) => isobath(
                place.path(),
                ["create"]
                    .into_iter()
                    .chain(rest.split(' '))
                    .map(|word| word.replace("{}", &place.vm())),
            ),
            _ => on_chain(&place, line),
        };
        let refused = line.exits(1).stderr;
        assert!(refused.contains("the name of a chain in a store"), "{refused}");
    }
    assert!(contents(&place.path().join("store")) == before);
}

#[test]
fn a_chain_in_a_store_is_opened_as_its_manifest_says() {
    let place = Place::new(2, "");
    for (line, why) in [
        ("info -f qcow2 {}", "leave out --format"),
        ("compare -f raw {} expected.raw", "leave out --format"),
        ("map --no-backing {}", "leave out --data-file, --backing-file, --no-backing"),
        (
            "map --backing-file expected.raw {}",
            "leave out --data-file, --backing-file, --no-backing",
        ),
        ("info {}2", "the store has no chain 'vm2'"),
        ("info file:///", "cannot be the name of a chain"),
    ] {
        let refused = on_chain(&place, line);
        assert!(!refused.status.success() && refused.stderr.contains(why), "{}", refused.report());
    }
}

#[test]
fn under_qemus_names_the_name_of_a_chain_is_that_of_a_file() {
    let place = Place::new(1, "");
    let link = place.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_isobath"), &link).unwrap();
    let file = format!("file://{}", place.expected().display());
    let shown = run(Command::new(&link).args(["info", "-f", "raw", &file])).ok().text();
    assert!(shown.contains("virtual size: 8 MiB"), "{shown}");
    let copy = format!("file://{}/copy.raw", place.path().display());
    let _ = run(Command::new(&link).args(["convert", "-O", "raw", &file, &copy])).ok();
    assert!(place.path().join("copy.raw").exists());
    assert!(!run(Command::new(&link).args(["info", &place.vm()])).status.success());
    assert!(!run(Command::new(&link).args(["info", "--cache-dir", "x", &file])).status.success());
}
