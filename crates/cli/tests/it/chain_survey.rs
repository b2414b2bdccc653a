//! `isobath chain survey`: where it prints what, how it ends, and what it leaves alone.

use isobath_testkit::process::{Finished, run, run_program};
use isobath_testkit::{args, qemu};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

fn survey(directory: &Path, arguments: &[&str]) -> Finished {
    let mut command = Command::new(ISOBATH);
    run(command.args(["chain", "survey"]).args(arguments).current_dir(directory))
}

fn fleet() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("fleet")).unwrap();
    qemu::create(&at("fleet/base"), "qcow2", 10 << 20, "");
    let _ = qemu::io(&at("fleet/base"), "qcow2", &["write 0 1M"]).ok();
    qemu::create_overlay(&at("fleet/top"), Path::new("base"), "qcow2", "");
    let _ = qemu::io(&at("fleet/top"), "qcow2", &["write 0 256k"]).ok();
    directory
}

#[test]
fn every_form_goes_where_it_should() {
    let directory = fleet();
    let at = |name: &str| directory.path().join(name);
    let text = survey(directory.path(), &["fleet"]).ok();
    assert!(
        text.text().contains("2 qcow2 images form 1 chain, 2 files in all"),
        "{}",
        text.report()
    );
    assert!(text.text().contains("fleet/top\n") && text.stderr.is_empty(), "{}", text.report());
    let json = survey(directory.path(), &["fleet", "--output=json", "--bytes"]).ok().json();
    assert_eq!((&json["chains"][0]["length"], &json["interrupted"]), (&2.into(), &false.into()));
    assert_eq!(json["clusters"]["hidden_bytes"], 256 << 10);
    assert_eq!(json["clusters"]["data_bytes"], (1 << 20) + (256 << 10));
    let csv = survey(directory.path(), &["fleet", "--output=csv"]).ok().text();
    assert_eq!(csv.lines().count(), 2, "{csv}");
    assert!(csv.lines().nth(1).unwrap().starts_with("fleet/top,2,true,10485760,"), "{csv}");
    let parquet = survey(directory.path(), &["fleet", "--output=parquet"]).ok().stdout;
    assert!(parquet.starts_with(b"PAR1") && parquet.ends_with(b"PAR1"));
    let both = ["fleet", "--output=parquet", "--file=out.parquet", "--html=out.html"];
    assert_eq!(survey(directory.path(), &both).ok().text(), "");
    assert!(fs::read(at("out.parquet")).unwrap() == parquet);
    let page = fs::read_to_string(at("out.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("fleet/top"));
}

#[test]
fn what_it_cannot_do_it_says() {
    let directory = fleet();
    let fails = |arguments: &[&str]| survey(directory.path(), arguments).exits(1).stderr;
    assert!(fails(&["gone"]).contains("'gone': cannot access it"));
    assert!(fails(&["fleet", "/dev/null"]).contains("neither a directory nor a regular file"));
    assert!(fails(&["fleet", "--sort=hidden"]).contains("--bytes"));
    assert!(fails(&["fleet", "--file=gone/out"]).contains("cannot write 'gone/out'"));
    assert!(fails(&[]).contains("PATH"));
    // A name in the wrong place does not cost an image.
    let before = fs::read(directory.path().join("fleet/top")).unwrap();
    for option in ["--file", "--html"] {
        let message = fails(&["fleet", option, "fleet/top"]);
        assert!(message.contains("'fleet/top': refusing to overwrite a qcow2 image"), "{message}");
    }
    assert!(fs::read(directory.path().join("fleet/top")).unwrap() == before);
}

#[test]
fn only_an_earlier_survey_is_overwritten_and_links_are_not_followed() {
    let directory = fleet();
    let at = |name: &str| directory.path().join(name);
    let written = |arguments: &[&str]| survey(directory.path(), arguments);
    for arguments in [
        ["fleet", "--html", "out"].as_slice(),
        &["fleet", "--file", "out"],
        &["fleet", "--output=json", "--file", "out"],
        &["fleet", "--output=csv", "--file", "out"],
    ] {
        fs::write(at("precious"), "precious").unwrap();
        std::os::unix::fs::symlink("precious", at("out")).unwrap();
        let refused = written(arguments).exits(1).stderr;
        assert!(refused.contains("'out': it is a symbolic link"), "{refused}");
        assert_eq!(fs::read(at("precious")).unwrap(), b"precious");
        fs::remove_file(at("out")).unwrap();
        fs::rename(at("precious"), at("out")).unwrap();
        let refused = written(arguments).exits(1).stderr;
        assert!(refused.contains("no survey of this kind"), "{refused}");
        assert_eq!(fs::read(at("out")).unwrap(), b"precious");
        fs::write(at("out"), "").unwrap();
        let _ = written(arguments).ok();
        let first = fs::read(at("out")).unwrap();
        let _ = written(arguments).ok();
        assert!(!first.is_empty() && fs::read(at("out")).unwrap().len() > first.len() / 2);
        fs::remove_file(at("out")).unwrap();
    }
}

#[test]
fn images_in_use_are_surveyed_and_left_as_they_are() {
    let directory = fleet();
    let top = directory.path().join("fleet/top");
    let stat = || {
        let data = top.metadata().unwrap();
        (data.atime(), data.atime_nsec(), data.mtime(), data.mtime_nsec(), data.ctime_nsec())
    };
    let before = stat();
    let one = |arguments: &[&str]| {
        let text = survey(directory.path(), arguments).ok().text();
        assert!(text.contains("1 chain, 2 files in all"), "{text}");
    };
    one(&["fleet", "--bytes"]);
    assert_eq!(stat(), before, "not even the time of the last access");
    // QEMU's lock on the image, held by another process.
    let server = qemu::nbd(&top, "qcow2", &directory.path().join("nbd"), &[]);
    one(&["fleet", "--bytes"]);
    let _ = server.stop_qemu();
}

#[test]
fn what_may_not_be_read_is_told() {
    let directory = fleet();
    let at = |name: &str| directory.path().join(name);
    qemu::create(&at("fleet/secret"), "qcow2", 1 << 20, "");
    qemu::create_overlay(&at("fleet/above"), Path::new("secret"), "qcow2", "");
    fs::create_dir(at("fleet/closed")).unwrap();
    qemu::create(&at("fleet/closed/hidden"), "qcow2", 1 << 20, "");
    qemu::create_overlay(&at("fleet/over"), Path::new("closed/hidden"), "qcow2", "");
    // Root may read all: the command is run by nobody, from where nobody may run it.
    let program = at("isobath");
    fs::copy(ISOBATH, &program).unwrap();
    let allow = |name: &str, mode| fs::set_permissions(at(name), Permissions::from_mode(mode));
    for name in ["", "fleet", "isobath"] {
        allow(name, 0o755).unwrap();
    }
    for name in ["base", "top", "above", "over"] {
        allow(&format!("fleet/{name}"), 0o644).unwrap();
    }
    allow("fleet/secret", 0).unwrap();
    allow("fleet/closed", 0).unwrap();
    let mut command = Command::new(&program);
    command.args(["chain", "survey", "fleet", "--output=json"]).current_dir(directory.path());
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        command.uid(65534).gid(65534);
    }
    let json = run(&mut command).ok().json();
    allow("fleet/closed", 0o755).unwrap();
    let mut problems: Vec<_> = json["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["image"].as_str().unwrap(), one["problem"].as_str().unwrap()))
        .collect();
    problems.sort_unstable();
    let expected = [
        ("fleet/above", "backing-denied"),
        ("fleet/closed", "denied"),
        ("fleet/over", "backing-denied"),
        ("fleet/secret", "denied"),
    ];
    assert_eq!(problems, expected, "{json:#}");
    assert_eq!((&json["counts"]["chains"], &json["counts"]["incomplete"]), (&3.into(), &2.into()));
}

#[test]
fn a_generated_chain_has_its_length() {
    let directory = tempfile::tempdir().unwrap();
    let chain = directory.path().join("chain");
    let options = ["--layers", "300", "--size", "64M", "--data", "zero"];
    let mut arguments = args!["chain", "generate"];
    arguments.extend(options.map(Into::into));
    arguments.push(chain.into());
    let _ = run_program(ISOBATH, arguments).ok();
    let json = survey(directory.path(), &["chain", "--output=json", "--bytes"]).ok().json();
    let row = &json["chains"][0];
    assert_eq!((&row["length"], &row["advice"]), (&300.into(), &"merge".into()));
    assert_eq!((&row["length_after"], &row["own_files"]), (&1.into(), &300.into()));
    // Every cluster is in one layer alone.
    assert_eq!((&row["hidden_bytes"], &row["whole"]), (&0.into(), &true.into()));
}
