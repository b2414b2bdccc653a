//! What the program says beyond QEMU's words, under its own name.

use crate::programs::{isobath, qemu_img};
use crate::serving::ISOBATH;
use isobath_testkit::args;
use isobath_testkit::process::run;
use isobath_testkit::qemu;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

#[test]
fn an_index_that_is_left_to_later_overlays_is_noted() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    // 100 GiB of data in clusters of 64 KiB have 12.5 MiB of tables.
    let base = args!["create", "-f", "qcow2", "-o", "preallocation=metadata", "base", "100G"];
    let _ = isobath(directory, base).ok();
    let note = "isobath: note: 'overlay' has no whole index of the chain below";
    let create = |more: Vec<OsString>| {
        let mut arguments = args!["create", "-f", "qcow2", "-b", "base", "-F", "qcow2"];
        arguments.extend(more);
        isobath(directory, arguments).ok().stderr
    };
    assert!(create(args!["overlay"]).starts_with(note));
    assert_eq!(create(args!["-q", "overlay"]), "");
    assert_eq!(create(args!["--no-index", "overlay"]), "");
    // QEMU's program says nothing.
    let link = directory.join("qemu-img");
    symlink(ISOBATH, &link).unwrap();
    let arguments = ["create", "-f", "qcow2", "-b", "base", "-F", "qcow2", "overlay"];
    let as_qemu = run(Command::new(&link).current_dir(directory).args(arguments));
    assert_eq!(as_qemu.ok().stderr, "");
    let without = |image: &str| {
        let info = isobath(directory, args!["info", image]).ok().text();
        info.lines().find(|line| line.contains("layers without digest")).map(str::to_owned)
    };
    assert_eq!(without("overlay").unwrap(), "        layers without digest: 1");
    let info = isobath(directory, args!["info", "--output=json", "overlay"]).ok().text();
    assert!(info.contains("\"layers-without-digest\": 1"), "{info}");
    let _ = isobath(directory, args!["index", "overlay"]).ok();
    assert_eq!(without("overlay"), None);
    let next = args!["create", "-f", "qcow2", "-b", "overlay", "-F", "qcow2", "next"];
    assert_eq!(isobath(directory, next).ok().stderr, "");
}

#[test]
fn a_raw_image_with_the_name_of_a_qcow2_image_is_noted_if_no_format_was_given() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let note = "becomes a raw image";
    let create = |more: Vec<OsString>| {
        let mut arguments = args!["create"];
        arguments.extend(more);
        isobath(directory, arguments).ok().stderr
    };
    assert!(create(args!["disk.qcow2", "1M"]).contains("'disk.qcow2' becomes a raw image"));
    assert!(create(args!["disk.QCOW2", "1M"]).contains("'-f qcow2'"));
    for quiet in [
        args!["-q", "disk.qcow2", "1M"],
        args!["-f", "raw", "disk.qcow2", "1M"],
        args!["-f", "qcow2", "disk.qcow2", "1M"],
        args!["disk.raw", "1M"],
        args!["qcow2", "1M"],
    ] {
        assert_eq!(create(quiet), "");
    }
    let convert = |arguments| isobath(directory, arguments).ok().stderr;
    assert!(convert(args!["convert", "disk.raw", "copy.qcow2"]).contains("'-O qcow2'"));
    for quiet in [
        args!["convert", "-O", "raw", "disk.raw", "copy.qcow2"],
        args!["convert", "-n", "disk.raw", "copy.qcow2"],
        args!["convert", "-q", "disk.raw", "copy.qcow2"],
    ] {
        assert!(!convert(quiet).contains(note));
    }
    // QEMU's program says nothing.
    let link = directory.join("qemu-img");
    symlink(ISOBATH, &link).unwrap();
    let as_qemu = run(Command::new(&link).current_dir(directory).args(["create", "b.qcow2", "1M"]));
    assert_eq!(as_qemu.ok().stderr, "");
}

#[test]
fn a_wrong_creation_option_is_answered_with_the_nearest_one() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::create(&directory.join("image"), "qcow2", 1 << 20, "");
    let cases = [
        (args!["create", "-f", "qcow2", "-o", "clustersize=4k", "a", "1M"], Some("cluster_size")),
        (args!["create", "-f", "vmdk", "-o", "subfomat=x", "a", "1M"], Some("subformat")),
        (args!["create", "-f", "luks", "-o", "cypher-alg=x", "a", "1M"], Some("cipher-alg")),
        (args!["create", "-f", "qcow2", "-o", "bogus=x", "a", "1M"], None),
        (args!["create", "-f", "raw", "-o", "cluster_size=4k", "a", "1M"], None),
        (args!["convert", "-O", "qcow2", "-o", "latest=1", "image", "a"], None),
        (
            args!["convert", "-O", "qcow2", "-o", "lazyrefcounts=on", "image", "a"],
            Some("lazy_refcounts"),
        ),
        (
            args!["measure", "-O", "qcow2", "-o", "extended_12=on", "--size", "1M"],
            Some("extended_l2"),
        ),
        (args!["amend", "-o", "lazy_refcount=on", "image"], Some("lazy_refcounts")),
    ];
    for (arguments, expected) in cases {
        let refused = isobath(directory, &arguments).exits(1);
        assert!(refused.stderr.contains("Invalid parameter '"), "{}", refused.report());
        let hint = expected.map(|name| format!("; did you mean '{name}'?"));
        match hint {
            Some(hint) => assert!(refused.stderr.contains(&hint), "{}", refused.report()),
            None => assert!(!refused.stderr.contains("did you mean"), "{}", refused.report()),
        }
    }
    // QEMU's program says no more than QEMU's.
    let link = directory.join("qemu-img");
    symlink(ISOBATH, &link).unwrap();
    let arguments = ["create", "-f", "qcow2", "-o", "clustersize=4k", "a", "1M"];
    let ours = run(Command::new(&link).current_dir(directory).args(arguments));
    let theirs = qemu_img(directory, arguments);
    assert_eq!(ours.exits(1).stderr, theirs.exits(1).stderr);
    assert!(!directory.join("a").exists());
}

#[test]
fn flattening_an_image_without_a_backing_file_says_that_there_is_nothing_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    qemu::create(&directory.join("base"), "qcow2", 1 << 20, "");
    qemu::create_overlay(&directory.join("top"), &directory.join("base"), "qcow2", "");
    let before = fs::read(directory.join("base")).unwrap();
    let read = |image: &str| fs::read(directory.join(image)).unwrap();
    let flatten = |image| isobath(directory, args!["chain", "flatten", image]).ok().text();
    let nothing = "The image has no backing file: there is nothing to do.\n";
    assert_eq!(flatten("base"), nothing);
    assert!(read("base").starts_with(&before), "the image has changed");
    assert_eq!(flatten("top"), "Image flattened.\n");
    assert_eq!(flatten("top"), nothing);
}

#[test]
fn links_are_all_made_or_none_and_a_file_is_there_until_its_link_is() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let names = || {
        let entries = fs::read_dir(directory.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    fs::write(at("qemu-nbd"), "another's").unwrap();
    let refused = isobath(directory.path(), ["install-links", "."]).exits(1);
    assert!(refused.stderr.contains("--force"), "{}", refused.report());
    assert_eq!(names(), ["qemu-nbd"]);
    let _ = isobath(directory.path(), ["install-links", "--force", "."]).ok();
    let all = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];
    assert_eq!(names(), all);
    assert!(all.iter().all(|name| fs::read_link(at(name)).unwrap().ends_with("isobath")));
    // A directory is not replaced, and nothing else is left.
    fs::remove_file(at("qemu-io")).unwrap();
    fs::create_dir(at("qemu-io")).unwrap();
    let refused = isobath(directory.path(), ["install-links", "--force", "."]).exits(1);
    assert!(refused.stderr.contains("qemu-io"), "{}", refused.report());
    assert_eq!(names(), all);
    assert!(at("qemu-io").is_dir());
}

#[test]
fn a_layer_that_is_removed_is_said_to_be_deleted_or_kept() {
    for (options, says, kept) in [
        (vec![], "Layer removed; 'DIR/middle' is deleted.\n", false),
        (vec!["--keep"], "Layer removed; its file is kept.\n", true),
        (vec!["-q"], "", false),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let [base, middle, top] = ["base", "middle", "top"].map(|name| directory.path().join(name));
        qemu::create(&base, "qcow2", 1 << 20, "");
        qemu::create_overlay(&middle, &base, "qcow2", "");
        qemu::create_overlay(&top, &middle, "qcow2", "");
        let delete = [vec!["chain", "delete"], options, vec!["top", "middle"]].concat();
        let done = isobath(directory.path(), delete).ok();
        let shown = done.text().replace(directory.path().to_str().unwrap(), "DIR");
        assert_eq!(shown, says, "{}", done.report());
        assert_eq!(middle.exists(), kept, "{}", done.report());
    }
}
