//! What the documentation tells the reader to type succeeds: commands are run on images made for them, and servers are
//! started and stopped. That the program's parser accepts every command line is a test in `src/main.rs`.

mod documented;

use crate::programs::isobath;
use crate::serving::ISOBATH;
use documented::{CommandLine, command_lines, in_page};
use isobath_testkit::process::{Ready, Server};
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The images that commands need: the page, the beginning of the first of them, and the commands that make the images.
/// It and those that follow it on the page are run in one directory.
const IMAGES: &[(&str, &str, &[&str])] = &[
    ("README.md", "isobath chain survey", &["create -f qcow2 /var/lib/libvirt/images/a.qcow2 1M"]),
    ("docs/commands/amend.md", "", &["create -f qcow2 -o compat=0.10 disk.qcow2 20G"]),
    ("docs/commands/bench.md", "", &[DISK, "create -f qcow2 scratch.qcow2 64M"]),
    ("docs/commands/bitmap.md", "", &[DISK, "bitmap --add disk.qcow2 since-sunday"]),
    ("docs/commands/chain-merge.md", "isobath chain merge", LAYERS),
    ("docs/commands/chain-merge.md", "isobath chain delete", LAYERS),
    ("docs/commands/chain-retain.md", "", &["create -f qcow2 a.qcow2 1G", ON_A]),
    (
        "docs/commands/chain-survey.md",
        "",
        &["create -f qcow2 /var/lib/images/a.qcow2 1M", "create -f qcow2 /srv/vms/a.qcow2 1M"],
    ),
    (
        "docs/commands/commit.md",
        "",
        &[
            "create -f qcow2 base.qcow2 1M",
            "create -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
            "create -f qcow2 -b top.qcow2 -F qcow2 overlay.qcow2",
        ],
    ),
    (
        "docs/commands/convert.md",
        "",
        &[
            DISK,
            "io -c 'write -P 7 0 64k' disk.qcow2",
            "snapshot -c before disk.qcow2",
            "create -f qcow2 base.qcow2 1G",
            "create -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
            "create -f qcow2 -b top.qcow2 -F qcow2 chain.qcow2",
            "convert -O vmdk -o subformat=streamOptimized disk.qcow2 machine.vmdk",
        ],
    ),
    ("docs/commands/dd.md", "", &[DISK, "create -f raw disk.raw 200M"]),
    (
        "docs/commands/image-names.md",
        "",
        &[
            DISK,
            "create -f raw disk.raw 16M",
            "create -f raw moved.raw 1M",
            "create -f qcow2 -u -b base.raw -F raw top.qcow2 1M",
            "create -f qcow2 full.qcow2 1M",
            "create -f qcow2 monday.qcow2 1M",
            "create -f qcow2 tuesday.qcow2 2M",
        ],
    ),
    (
        "docs/commands/fork.md",
        "",
        // The second for its directory.
        &["create -f qcow2 base.qcow2 1M", "create -f raw /var/lib/vm/other 1M"],
    ),
    (
        "docs/commands/index.md",
        "",
        &["create -f qcow2 a.qcow2 1M", "create -f qcow2 -b a.qcow2 -F qcow2 vm.qcow2"],
    ),
    // For its directory.
    ("docs/commands/install-links.md", "", &["create -f raw /opt/isobath/bin/other 1M"]),
    ("docs/commands/io.md", "", &[DISK]),
    ("docs/commands/measure.md", "", &["create -f raw disk.raw 1M"]),
    (
        "docs/commands/rebase.md",
        "",
        &[
            "create -f qcow2 base.qcow2 1M",
            "create -f qcow2 new-base.qcow2 1M",
            "create -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2",
        ],
    ),
    (
        "docs/commands/seal.md",
        "",
        &["create -f qcow2 vm.qcow2 1M", "create -f qcow2 data.qcow2 1M"],
    ),
    ("docs/commands/snapshot.md", "", &[DISK]),
    ("docs/untrusted.md", "", &["create -f qcow2 upload.qcow2 1M"]),
];
const DISK: &str = "create -f qcow2 disk.qcow2 2G";
const ON_A: &str = "create -f qcow2 -b a.qcow2 -F qcow2 disk.qcow2";
const LAYERS: &[&str] = &[
    "create -f qcow2 base.qcow2 1M",
    "create -f qcow2 -b base.qcow2 -F qcow2 layer3.qcow2",
    "create -f qcow2 -b layer3.qcow2 -F qcow2 layer5.qcow2",
    "create -f qcow2 -b layer5.qcow2 -F qcow2 layer7.qcow2",
    "create -f qcow2 -b layer7.qcow2 -F qcow2 active.qcow2",
];

/// Words of command lines that start a server.
const SERVERS: [&str; 3] = ["serve", "qemu-nbd", "qemu-storage-daemon"];

/// Commands that are not run, by a word of theirs, and why.
const NOT_RUN: [(&str, &str); 18] = [
    ("ctl", "needs a server"),
    ("--tls-creds", "needs certificates; `tls` tests it"),
    ("driver=nbd,host=disks.example.org,port=10809,export=vm,tls-creds=tls0", "needs a server"),
    ("-L", "needs a server"),
    ("nbd+unix:///?socket=/run/vm.sock", "needs a server; `nbd_names` tests it"),
    ("nbd:backup:10809:exportname=vm", "needs a server"),
    ("--fuse", "mounts the disk; `frontends` tests it"),
    ("--ublk", "adds a device of the kernel; `ublk` tests it"),
    ("/dev/nbd0", "needs a kernel's device; `kernel_device` tests it"),
    ("/run/isobath/qmp", "needs a server"),
    ("generate", "writes gigabytes"),
    ("chain/layer-00999.qcow2", "needs the gigabytes"),
    ("--checkpoint", "needs backups; `layers_given` tests it"),
    ("push", "needs a store; `stores` tests it"),
    ("pull", "needs a store; `stores` tests it"),
    ("remote", "needs a store; `stores` tests it"),
    ("file:///mnt/backup/images/vm", "needs a store; `served_from_stores` tests it"),
    ("s3://images/production/vm", "needs a store; `served_from_stores` tests it"),
];

impl CommandLine {
    fn begins_with(&self, begin: &str) -> bool {
        self.words.join(" ").starts_with(begin)
    }
}

fn has(line: &CommandLine, word: &str) -> bool {
    line.words.iter().any(|one| one == word)
}

/// The command lines that can be run: those that start a server, or the others.
fn lines_to_run(servers: bool) -> Vec<CommandLine> {
    let mut lines = command_lines();
    lines.retain(|line| !NOT_RUN.iter().any(|(word, _)| has(line, word)));
    lines.retain(|line| SERVERS.iter().any(|word| has(line, word)) == servers);
    lines
}

/// Runs a command with paths below `directory`, and returns whether it succeeded and what it said.
fn run(directory: &Path, words: &[String]) -> (bool, String) {
    let below = |word: &String| {
        let Some(path) = word.strip_prefix('/') else { return word.clone() };
        let path = directory.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    // A secret that is made would be hashed for two seconds, and so whenever it is tried.
    let makes_secret = |word: &String| {
        word.contains("encrypt.format=luks") || word.contains("encrypt.state=active")
    };
    let soon = |word: &String| {
        let word = below(word);
        if makes_secret(&word) {
            format!("{word},encrypt.iter-time=10")
        } else if word.starts_with("key-secret=") {
            format!("{word},iter-time=10")
        } else {
            word
        }
    };
    let finished = isobath(directory, words.iter().skip(1).map(soon));
    (finished.status.success(), finished.report())
}

/// A directory with files of secrets, and the images that these commands make.
fn directory_with<'a>(commands: impl IntoIterator<Item = &'a &'a str>) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("key"), "a secret").unwrap();
    fs::write(directory.path().join("new"), "another secret").unwrap();
    for command in commands {
        let words = in_page("", &format!("    isobath {command}")).remove(0).words;
        let (succeeded, report) = run(directory.path(), &words);
        assert!(succeeded, "{report}");
    }
    directory
}

#[test]
fn what_the_documentation_tells_to_type_succeeds() {
    let lines = lines_to_run(false);
    for (page, begin, _) in IMAGES {
        let uses = |line: &CommandLine| line.page == *page && line.begins_with(begin);
        assert!(lines.iter().any(uses), "{page} has no command that begins with '{begin}'");
    }
    let mut failed = Vec::new();
    let mut current: Option<(String, TempDir)> = None;
    for line in &lines {
        let same_page = current.as_ref().is_some_and(|(page, _)| *page == line.page);
        let starts =
            |begin: &str| if begin.is_empty() { !same_page } else { line.begins_with(begin) };
        let images = IMAGES.iter().find(|(page, begin, _)| *page == line.page && starts(begin));
        if images.is_some() || !same_page {
            let commands = images.iter().flat_map(|(_, _, commands)| *commands);
            current = Some((line.page.clone(), directory_with(commands)));
        }
        let (_, directory) = current.as_ref().unwrap();
        let (succeeded, report) = run(directory.path(), &line.words);
        if !succeeded {
            failed.push(format!("{line}\n{report}"));
        }
    }
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert!(lines.len() > 40, "{} commands were run", lines.len());
}

#[test]
fn every_documented_server_starts_and_ends() {
    let lines = lines_to_run(true);
    for line in &lines {
        let directory = directory_with(&[
            DISK,
            "snapshot -c before disk.qcow2",
            "bitmap --add --disable disk.qcow2 since-monday",
            "create -f qcow2 vm.qcow2 1M",
        ]);
        let run = directory.path().join("run");
        fs::create_dir(&run).unwrap();
        let below = format!("{}/", run.display());
        // In the foreground, so that the test can end it.
        let words = line.words.iter().skip(1);
        let words = words.filter(|word| !["--fork", "--daemonize"].contains(&word.as_str()));
        let here = directory.path().display().to_string();
        // What a service manager would hand in, the server makes itself.
        let own = format!("unix:{below}vm.sock");
        let there =
            [("/run/", &below), ("/srv/golden", &here), ("/disks", &here), ("fd:nbd", &own)];
        let words = words
            .map(|word| there.iter().fold(word.clone(), |word, (from, to)| word.replace(from, to)));
        let words: Vec<String> = words.collect();
        let socket = |word: &String| {
            let name = word.split_once(below.as_str())?.1.split(',').next()?;
            Some(run.join(name)).filter(|path| path.extension().is_some_and(|end| end == "sock"))
        };
        let socket = words.iter().find_map(socket).unwrap_or_else(|| panic!("{line}: no socket"));
        println!("{line}");
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory.path()).args(words);
        let _ = Server::start(&mut command, Ready::Socket(&socket)).stop().ok();
    }
    assert!(lines.len() >= 10, "{} servers were started", lines.len());
}

fn typed(page: &str) -> Vec<String> {
    in_page("", page).iter().map(|line| line.words.join(" ")).collect()
}

#[test]
fn command_lines_are_found_in_blocks_of_both_kinds() {
    let page = "\
isobath is a word here.

    isobath info a.qcow2    # and this a comment
    ls | sudo isobath ctl S jobs > out 2> errors && A=1 qemu-nbd -r -k \"$DIR/s\" IMAGE

- a list
    isobath in a paragraph
```sh
isobath convert -O raw \\
    'a b' <file>
# isobath info b
cargo build
```
```
$ isobath create -f qcow2 new.qcow2 SIZE
isobath says nothing
```
";
    assert_eq!(
        typed(page),
        [
            "isobath info a.qcow2",
            "isobath ctl file.qcow2 jobs",
            "qemu-nbd -r -k directory/s file.qcow2",
            "isobath convert -O raw a b file.qcow2",
            "isobath create -f qcow2 new.qcow2 1M",
        ]
    );
}
