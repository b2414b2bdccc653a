//! Copies made by `isobath convert` are what QEMU reads, and those of `qemu-img convert` what
//! isobath reads.

use super::chains::{assert_same_content, isobath, qemu_img, random_chain, random_options};
use isobath_testkit::process::Finished;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu, until};
use rand::RngExt;
use rand::rngs::StdRng;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Options of a conversion to `format`.
fn conversion(rng: &mut StdRng, format: &str) -> Vec<OsString> {
    let mut arguments = args!["convert", "-O", format, "-m", rng.random_range(1..=16).to_string()];
    if format == "qcow2" {
        let mut options = random_options(rng);
        if rng.random_bool(0.4) {
            arguments.push("-c".into());
        } else if rng.random_bool(0.2) {
            options.push_str(",preallocation=metadata");
        }
        arguments.extend(args!["-o", options]);
    }
    if !arguments.contains(&"-c".into()) && rng.random() {
        arguments.push("-W".into());
    }
    if rng.random() {
        let sparse = ["0", "512", "4k", "64k", "1M"][rng.random_range(0..5)];
        arguments.extend(args!["-S", sparse]);
    }
    arguments
}

#[track_caller]
fn assert_copied(directory: &Path, source: (&Path, &str), copy: &str, format: &str) {
    if format == "qcow2" {
        qemu::assert_clean(&directory.join(copy));
    }
    assert_same_content(source.0, source.1, &directory.join(copy), format);
    let arguments = args!["compare", "-f", source.1, "-F", format, source.0, copy];
    let _ = isobath(directory, arguments).ok();
}

#[test]
fn random_chains_both_ways() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..14 {
        let chain = random_chain(&mut rng);
        for copy in ["ours", "theirs"] {
            let format = if rng.random_bool(0.7) { "qcow2" } else { "raw" };
            let mut arguments = conversion(&mut rng, format);
            arguments.extend(args!["-f", chain.format, chain.name(), copy]);
            println!("{arguments:?}");
            let finished = if copy == "ours" {
                isobath(chain.path(), &arguments)
            } else {
                qemu_img(chain.path(), &arguments)
            };
            let _ = finished.ok();
            assert_copied(chain.path(), (&chain.top, chain.format), copy, format);
        }
    }
}

#[test]
fn into_a_disk_that_exists_and_holds_something() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..8 {
        let chain = random_chain(&mut rng);
        let size = (chain.size + 65_536).to_string();
        let format = if rng.random() { "qcow2" } else { "raw" };
        let mut create = args!["create", "-q", "-f", format, "copy", size];
        if format == "qcow2" {
            create.extend(args!["-o", random_options(&mut rng)]);
        }
        let _ = qemu_img(chain.path(), create).ok();
        let copy = chain.path().join("copy");
        let _ = qemu::io(&copy, format, &[format!("write -P 9 0 {}", chain.size + 65_536)]).ok();
        let mut arguments = args!["convert", "-n", "-O", format, "-f", chain.format];
        arguments.extend(args![chain.name(), "copy"]);
        let _ = isobath(chain.path(), arguments).ok();
        if format == "qcow2" {
            qemu::assert_clean(&copy);
        }
        let bytes = qemu::read_disk(&copy, format);
        let (copied, rest) = bytes.split_at(chain.size as usize);
        assert!(copied == qemu::read_disk(&chain.top, chain.format));
        assert!(rest.iter().all(|byte| *byte == 9), "what lies past the copy is left alone");
    }
}

#[test]
fn only_the_active_layer_over_a_backing_file() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let mut done = 0;
    while done < 8 {
        let chain = random_chain(&mut rng);
        let info = qemu::info(&chain.top);
        let Some(backing) = info["full-backing-filename"].as_str() else { continue };
        let format = info["backing-filename-format"].as_str().unwrap();
        done += 1;
        let mut arguments = conversion(&mut rng, "qcow2");
        let preallocated = arguments.iter().any(|a| a.to_string_lossy().contains("preallocation"));
        if preallocated {
            continue;
        }
        arguments.extend(args!["-B", backing, "-F", format, chain.name(), "copy"]);
        println!("{arguments:?}");
        let _ = isobath(chain.path(), arguments).ok();
        assert_copied(chain.path(), (&chain.top, "qcow2"), "copy", "qcow2");
        assert_eq!(qemu::info(&chain.path().join("copy"))["full-backing-filename"], backing);
    }
}

#[test]
fn several_disks_one_after_another() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..5 {
        let one = random_chain(&mut rng);
        let other = random_chain(&mut rng);
        if one.format != other.format {
            continue;
        }
        for format in ["raw", "qcow2"] {
            let mut arguments = conversion(&mut rng, format);
            arguments.extend(args!["-f", one.format, &one.top, &other.top, "copy"]);
            println!("{arguments:?}");
            let _ = isobath(one.path(), arguments).ok();
            let mut expected = qemu::read_disk(&one.top, one.format);
            expected.extend(qemu::read_disk(&other.top, other.format));
            assert!(expected == qemu::read_disk(&one.path().join("copy"), format));
        }
    }
}

/// What `isobath` says when it refuses.
#[track_caller]
fn refused(directory: &Path, arguments: &[&str], why: &str) -> Finished {
    let finished = isobath(directory, arguments).exits(1);
    assert!(finished.stderr.contains(why), "{}", finished.report());
    finished
}

#[test]
fn what_cannot_be_done_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for name in ["a", "b"] {
        let _ = qemu_img(path, ["create", "-q", "-f", "qcow2", name, "2M"]).ok();
        let _ = qemu::io(&path.join(name), "qcow2", &["write -P 1 0 2M"]).ok();
    }
    let _ = qemu_img(path, ["create", "-q", "-f", "qcow2", "small", "1M"]).ok();
    let before = fs::read(path.join("a")).unwrap();
    refused(path, &["convert", "a", "a"], "one of the images");
    refused(path, &["convert", "-U", "-O", "qcow2", "b", "a", "./a"], "one of the images");
    refused(path, &["convert", "-c", "a", "out"], "Compression not supported");
    refused(path, &["convert", "-m", "17", "a", "out"], "Invalid number of coroutines");
    refused(path, &["convert", "-S", "100", "a", "out"], "Invalid buffer size");
    refused(path, &["convert", "-l", "one", "a", "out"], "Failed to load snapshot");
    refused(path, &["convert", "-n", "-O", "qcow2", "a", "small"], "smaller than input");
    refused(path, &["convert", "-n", "-O", "qcow2", "a", "missing"], "missing");
    refused(path, &["convert", "-O", "qcow2", "-o", "nonsense=1", "a", "out"], "nonsense");
    refused(path, &["convert", "a"], "Must specify image file name");
    let both = ["convert", "-O", "qcow2", "-B", "small", "-F", "qcow2", "a", "b", "out"];
    refused(path, &both, "concatenating");
    assert!(before == fs::read(path.join("a")).unwrap());
    assert!(!path.join("out").exists());
    // A source that cannot be read to its end.
    let bytes = fs::read(path.join("b")).unwrap();
    fs::write(path.join("b"), &bytes[..bytes.len() - (1 << 20)]).unwrap();
    let _ = isobath(path, ["convert", "-O", "qcow2", "b", "out"]).exits(1);
    assert!(!path.join("out").exists());
}

#[test]
fn an_interrupted_copy_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let _ = qemu_img(path, ["create", "-q", "-f", "raw", "source", "1G"]).ok();
    let _ = qemu::io(&path.join("source"), "raw", &["write -P 1 0 256M"]).ok();
    let mut child = Command::new(env!("CARGO_BIN_EXE_isobath"))
        .current_dir(path)
        // It would take half a minute.
        .args(["convert", "-c", "-m", "1", "-r", "8M", "-O", "qcow2", "source", "copy"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("a part of the copy", || {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it could be interrupted");
        fs::metadata(path.join("copy")).is_ok_and(|file| file.len() >= 300 << 10)
    });
    let _ = isobath_testkit::process::run_program("kill", ["-INT", &child.id().to_string()]).ok();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", String::from_utf8_lossy(&ended.stderr));
    assert!(!path.join("copy").exists());
}

#[test]
fn progress_is_shown() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let _ = qemu_img(path, ["create", "-q", "-f", "qcow2", "a", "8M"]).ok();
    let text = isobath(path, ["convert", "-p", "a", "out"]).ok().text();
    assert!(text.ends_with("    (100.00/100%)\r\n"), "{text:?}");
    assert_eq!(isobath(path, ["convert", "a", "out"]).ok().text(), "");
}
