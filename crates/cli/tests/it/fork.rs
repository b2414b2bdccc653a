//! `fork`: many overlays of one base, all of them or none, each as `create -b` would make it.

use crate::programs::{isobath, qemu_img};
use crate::serving::{ISOBATH, Served};
use isobath_testkit::process::run;
use isobath_testkit::{args, qemu};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// A chain of three images in a directory of its own, `base/`, of which `top` is the upmost.
fn chain(directory: &Path) {
    let base = directory.join("base");
    fs::create_dir(&base).unwrap();
    let _ = qemu_img(&base, args!["create", "-q", "-f", "qcow2", "low", "8M"]).ok();
    for (below, name, pattern) in [("low", "mid", 11), ("mid", "top", 12)] {
        let _ =
            qemu_img(&base, args!["create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", name])
                .ok();
        let write = format!("write -P {pattern} {pattern}00k 300k");
        let _ = qemu::io(&base.join(name), "qcow2", &[&write]).ok();
    }
}

/// What each file of a directory holds.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    files
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect()
}

#[test]
fn each_fork_is_what_create_makes_and_shows_its_base() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    let made = isobath(&base, args!["fork", "-n", "70", "--first", "31", "top", "fork-{}"]).ok();
    assert_eq!(made.text(), "Created 70 overlays of 'top'.\n");
    let _ =
        isobath(&base, args!["create", "-q", "-f", "qcow2", "-b", "top", "-F", "qcow2", "made"])
            .ok();
    let files = files(&base);
    for number in 31..=100 {
        assert!(files[&format!("fork-{number}")] == files["made"], "fork-{number}");
    }
    assert_eq!(files.len(), 70 + 4);
    for name in ["fork-31", "fork-100"] {
        let image = base.join(name);
        qemu::assert_clean(&image);
        qemu::assert_identical(&image, "qcow2", &base.join("top"), "qcow2");
        let info = isobath(&base, args!["info", "--output=json", name]).ok();
        let index = &info.json()["format-specific"]["data"]["direct-access-index"];
        assert_eq!(index["valid"], true, "{}", info.text());
    }
}

#[test]
fn forks_elsewhere_name_their_base_by_its_path() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("one")).unwrap();
    fs::create_dir(at("two")).unwrap();
    let made =
        args!["fork", "-q", "-o", "cluster_size=128k", "base/top", "one/a", "two/b", "base/c"];
    assert_eq!(isobath(directory.path(), made).ok().text(), "");
    let path = at("base/top").canonicalize().unwrap();
    for name in ["one/a", "two/b", "base/c"] {
        let info = qemu::info(&at(name));
        assert_eq!(info["backing-filename"], path.to_str().unwrap());
        assert_eq!(info["cluster-size"], 131_072);
        qemu::assert_identical(&at(name), "qcow2", &at("base/top"), "qcow2");
    }
}

#[test]
fn a_raw_base_is_raw_only_if_the_command_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("raw");
    fs::write(&raw, vec![5; 1 << 20]).unwrap();
    let refused = isobath(directory.path(), args!["fork", "raw", "a"]).exits(1);
    assert!(refused.stderr.contains("raw"), "{}", refused.report());
    assert!(!directory.path().join("a").exists());
    let _ = isobath(directory.path(), args!["fork", "-F", "raw", "raw", "a"]).ok();
    qemu::assert_identical(&directory.path().join("a"), "qcow2", &raw, "raw");
}

/// If one overlay cannot be made, none is, and what was there stays as it was.
#[test]
fn all_forks_are_made_or_none() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    fs::write(base.join("fork-90"), "somebody's").unwrap();
    let before = files(&base);
    let none = |arguments, why: &str| {
        let refused = isobath(&base, arguments).exits(1);
        assert!(refused.stderr.contains(why), "{}", refused.report());
        assert!(files(&base) == before, "{}", refused.report());
    };
    let taken = "'fork-90': there is a file of that name already";
    none(args!["fork", "-n", "100", "top", "fork-{}"], taken);
    none(args!["fork", "top", "a", "b", "top"], "'top': there is a file of that name already");
    none(args!["fork", "top", "a", "a"], "'a': there is a file of that name already");
    none(args!["fork", "top", "a", "missing/b"], "the directory 'missing'");
    none(args!["fork", "missing", "a", "b"], "missing");
    none(args!["fork", "-o", "data_file=data", "top", "a"], "cannot have data files");
    none(args!["fork", "-o", "preallocation=metadata", "top", "a"], "cannot be preallocated");
    none(args!["fork", "-o", "backing_file=low", "top", "a"], "--backing-format");
    for options in ["encrypt.format=luks,encrypt.key-secret=s", "encrypt.bogus=1"] {
        none(args!["fork", "-o", options, "top", "a"], "cannot be encrypted");
    }
    none(args!["fork", "-o", "compat=0.10,extended_l2=on", "top", "a"], "compatibility level 1.1");
    none(args!["fork", "-F", "host_device", "top", "a"], "'host_device' driver requires");
    none(args!["fork", "top", "a:b"], "Unknown protocol 'a'");
    none(args!["fork", "top", "host_device:/dev/null"], "an overlay is a new file");
}

#[test]
fn forks_that_need_too_many_files_are_refused_before_one_is_made() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    let before = files(&base);
    let limited = |count: u32| {
        let mut shell = Command::new("sh");
        let script = format!("ulimit -n 400; exec \"$0\" fork -n {count} top many-{{}}");
        run(shell.current_dir(&base).args(["-c", &script, ISOBATH]))
    };
    let refused = limited(145).exits(1);
    assert!(refused.stderr.contains("at most 144 can be made at once"), "{}", refused.report());
    assert!(files(&base) == before);
    let _ = limited(144).ok();
    assert_eq!(files(&base).len(), before.len() + 144);
}

/// Whatever cannot be opened because there are no more descriptors, no file without an image stays.
#[test]
fn an_image_that_cannot_be_made_for_lack_of_descriptors_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let mut made = 0;
    for limit in 4..40 {
        let mut shell = Command::new("sh");
        let script = format!("ulimit -n {limit}; exec \"$0\" create -q -f qcow2 image 1M");
        let done = run(shell.current_dir(directory.path()).args(["-c", &script, ISOBATH]));
        let is_there = directory.path().join("image").exists();
        assert_eq!(is_there, done.code() == 0, "with {limit}: {}", done.report());
        if is_there {
            made += 1;
            fs::remove_file(directory.path().join("image")).unwrap();
        }
    }
    assert!((1..36).contains(&made), "{made}");
}

#[test]
fn names_of_one_directory_are_in_it_however_they_are_written() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    symlink("base", directory.path().join("link")).unwrap();
    let absolute = base.join("c");
    let names = args!["fork", "-q", "file:top", "a", "./b", &absolute, "../link/d", "file:e"];
    let _ = isobath(&base, names).ok();
    for name in ["a", "b", "c", "d", "e"] {
        assert_eq!(qemu::info(&base.join(name))["backing-filename"], "top", "{name}");
        qemu::assert_identical(&base.join(name), "qcow2", &base.join("top"), "qcow2");
    }
    fs::rename(base.join("top"), base.join("to:p")).unwrap();
    let _ = isobath(&base, args!["fork", "-q", "./to:p", "f"]).ok();
    qemu::assert_identical(&base.join("f"), "qcow2", &base.join("to:p"), "qcow2");
}

#[test]
fn names_of_forks_have_one_place_for_their_number() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    let before = files(&base);
    for (arguments, why) in [
        (args!["fork", "-n", "2", "top", "fork"], "must have '{}' once"),
        (args!["fork", "-n", "2", "top", "{}-{}"], "must have '{}' once"),
        (args!["fork", "-n", "2", "top", "a-{}", "b-{}"], "there is one name"),
        (args!["fork", "-n", "0", "top", "a-{}"], "0 is not in 1..=65536"),
        (
            args!["fork", "-n", "2", "--first", "18446744073709551615", "top", "a-{}"],
            "is too large",
        ),
    ] {
        let refused = isobath(&base, arguments).exits(1);
        assert!(refused.stderr.contains(why), "{}", refused.report());
        assert!(files(&base) == before);
    }
}

#[test]
fn forks_that_cannot_be_told_of_are_all_there() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    let mut shell = Command::new("sh");
    let script = "exec \"$0\" fork top a b >/dev/full";
    let done = run(shell.current_dir(&base).args(["-c", script, ISOBATH])).exits(1);
    assert!(done.stderr.contains("all overlays were made, and stay: "), "{}", done.report());
    assert!(done.stderr.contains("No space left on device"), "{}", done.report());
    for name in ["a", "b"] {
        let _ = qemu_img(&base, args!["check", name]).ok();
    }
}

#[test]
fn a_disk_that_is_written_is_no_base() {
    let directory = tempfile::tempdir().unwrap();
    chain(directory.path());
    let base = directory.path().join("base");
    for written in ["top", "low"] {
        let served = Served::start(&[base.join(written)], &[]);
        for more in [&[][..], &["--no-index"]] {
            let mut arguments = args!["fork"];
            arguments.extend(more.iter().map(Into::into));
            arguments.extend(args!["top", "a", "b"]);
            let refused = isobath(&base, arguments).exits(1);
            assert!(refused.stderr.contains("lock"), "{}", refused.report());
            assert!(!base.join("a").exists() && !base.join("b").exists());
        }
        let _ = served.stop();
    }
    let _ = isobath(&base, args!["fork", "top", "a", "b"]).ok();
}
