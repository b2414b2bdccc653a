//! Files that a command must leave alone, although it deletes or overwrites others.

use crate::fewer_layers::{another, three};
use crate::programs::{isobath, qemu_img};
use crate::serving::ISOBATH;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::{args, qemu};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The regular files of a directory, with what they hold.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    let regular = entries.filter(|entry| entry.file_type().unwrap().is_file());
    let named = |entry: &fs::DirEntry| entry.file_name().into_string().unwrap();
    regular.map(|entry| (named(&entry), fs::read(entry.path()).unwrap())).collect()
}

/// A chain of base, mid, top and new.
fn four(directory: &Path) {
    three(directory);
    another(directory, "new", "top");
}

/// Serves the chain of a directory, where it is started, under this name.
fn serve(directory: &Path, image: &Path) -> Server {
    let mut command = Command::new(ISOBATH);
    command.current_dir(directory).arg("serve").arg(image);
    command.args(["--export-name", "disk", "--nbd", "unix:nbd", "--qmp", "unix:qmp"]);
    Server::start(&mut command, Ready::Line("-blockdev"))
}

#[test]
fn a_policy_changes_the_files_of_the_server_that_it_is_given_for() {
    let directory = tempfile::tempdir().unwrap();
    let [theirs, others] = ["theirs", "others"].map(|name| directory.path().join(name));
    four(&theirs);
    four(&others);
    let disk = qemu::read_disk(&theirs.join("new"), "qcow2");
    let before = files(&others);
    // The server names its files relative to its own directory.
    let server = serve(&theirs, Path::new("new"));
    let retain =
        args!["chain", "retain", "--keep-last", "1", "--apply", "--qmp", theirs.join("qmp")];
    let done = isobath(&others, &retain).ok();
    assert!(files(&others) == before, "{}", done.report());
    assert!(!theirs.join("mid").exists(), "{}", done.report());
    let _ = server.stop().ok();
    assert!(qemu::read_disk(&theirs.join("new"), "qcow2") == disk);
}

#[test]
fn a_policy_refuses_files_that_have_the_names_of_the_servers() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path().join("work");
    four(&work);
    let server = serve(directory.path(), &work.join("new"));
    fs::rename(&work, directory.path().join("moved")).unwrap();
    let retain = args!["chain", "retain", "--keep-last", "1", "--apply", "--qmp", "qmp"];
    for (why, prepare) in [
        ("no program writes to it", (|_| {}) as fn(&Path)),
        ("does not name it", |work| {
            let rebase = args!["rebase", "-u", "-b", "mid", "-F", "qcow2", "new"];
            let _ = qemu_img(work, rebase).ok();
        }),
    ] {
        four(&work);
        prepare(&work);
        let before = files(&work);
        let refused = isobath(directory.path(), &retain).exits(1);
        assert!(refused.stderr.contains(why), "{}", refused.report());
        assert!(files(&work) == before, "{}", refused.report());
        fs::remove_dir_all(&work).unwrap();
    }
    drop(server.kill());
}

#[test]
fn a_policy_needs_few_descriptors_for_many_layers() {
    const LAYERS: usize = 80;
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    let name = |layer: usize| format!("layer-{layer:05}.qcow2");
    let chain = work.join("chain");
    let generate = args![
        "chain",
        "generate",
        &chain,
        "--layers",
        LAYERS.to_string(),
        "--size",
        "4M",
        "--data",
        "pattern"
    ];
    let _ = isobath(work, generate).ok();
    let active = chain.join(name(LAYERS - 1));
    let disk = qemu::read_disk(&active, "qcow2");
    let retain = "ulimit -n 128; exec \"$0\" chain retain --keep-last 1 --apply \"$1\"";
    let mut command = Command::new("sh");
    let done = run(command.args(["-c", retain, ISOBATH]).arg(&active)).ok();
    let left: Vec<_> = files(&chain).into_keys().collect();
    assert_eq!(left, [0, LAYERS - 2, LAYERS - 1].map(name), "{}", done.report());
    assert!(qemu::read_disk(&active, "qcow2") == disk, "{}", done.report());
}

#[test]
fn no_copy_overwrites_its_source_under_another_name() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    three(work);
    fs::hard_link(work.join("mid"), work.join("hard")).unwrap();
    symlink("base", work.join("link")).unwrap();
    let data = format!("data_file={}", work.join("data").display());
    let create = args!["create", "-q", "-f", "qcow2", "-o", data, "image", "1M"];
    let _ = qemu_img(work, create).ok();
    let _ = qemu::io(&work.join("image"), "qcow2", &["write -P 7 0 1M"]).ok();
    let before = files(work);
    for (source, target) in [("top", "hard"), ("top", "link"), ("mid", "hard"), ("image", "data")] {
        let operands = [format!("if={source}"), format!("of={target}")];
        for copy in [
            args!["dd", "-U", &operands[0], &operands[1]],
            args!["dd", &operands[0], &operands[1]],
            args!["convert", "-U", "-O", "raw", source, target],
            args!["convert", "-O", "qcow2", source, target],
            args!["convert", "-U", "-O", "vmdk", source, target],
        ] {
            let refused = isobath(work, &copy).exits(1);
            assert!(refused.stderr.contains("images to copy"), "{copy:?}: {}", refused.report());
            assert!(files(work) == before, "{copy:?}: {}", refused.report());
        }
    }
}

#[test]
fn a_link_stays_when_what_it_stands_for_is_not_created() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    symlink("real", work.join("link")).unwrap();
    let options = "data_file=none/data,data_file_raw=on";
    let refused = isobath(work, args!["create", "-f", "qcow2", "-o", options, "link", "1M"]);
    let refused = refused.exits(1);
    assert!(work.join("link").is_symlink(), "{}", refused.report());
    assert!(!work.join("real").exists(), "{}", refused.report());
}

#[test]
fn a_directory_that_a_chain_is_being_generated_in_is_not_filled_by_another_run() {
    let directory = tempfile::tempdir().unwrap();
    let held = File::open(directory.path()).unwrap();
    held.lock().unwrap();
    let generate = args!["chain", "generate", directory.path(), "--layers", "2", "--size", "1M"];
    let generate = || isobath(Path::new("/"), &generate);
    let refused = generate().exits(1);
    assert!(refused.stderr.contains("choose a new or empty directory"), "{}", refused.report());
    assert!(files(directory.path()).is_empty());
    drop(held);
    let _ = generate().ok();
}
