//! `isobath serve --qmp` and `isobath ctl`, as people and programs use them.

use crate::programs::isobath;
use crate::serving::{ISOBATH, QemuIo};
use isobath_testkit::process::{Finished, PATIENCE, Ready, Server, run};
use isobath_testkit::{args, qemu, tools, until, until_some};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

const SIZE: u64 = 32 << 20;

/// A chain of base, mid and vm, served with a control socket.
struct Controlled {
    server: Option<Server>,
    directory: TempDir,
}

impl Controlled {
    fn start(options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [base, mid, vm] = ["base", "mid", "vm"].map(|name| directory.path().join(name));
        qemu::create(&base, "qcow2", SIZE, "");
        qemu::create_overlay(&mid, &base, "qcow2", "");
        qemu::create_overlay(&vm, &mid, "qcow2", "");
        // Data that is shared with the file system's help, as of a layer that is not compressed, counts towards no
        // limit of a job's speed.
        for (image, command) in [
            (&base, "write -c -P 1 0 16M"),
            (&mid, "write -c -P 2 4M 4M"),
            (&vm, "write -P 3 6M 1M"),
        ] {
            let _ = qemu::io(image, "qcow2", &[command]).ok();
        }
        let mut controlled = Self { server: None, directory };
        controlled.serve("vm", options);
        controlled
    }

    fn serve(&mut self, image: &str, options: &[&str]) {
        let mut command = Command::new(ISOBATH);
        command.current_dir(self.directory.path());
        command.args([
            "serve",
            image,
            "--export-name",
            "vm",
            "--nbd",
            "unix:nbd",
            "--qmp",
            "unix:qmp",
        ]);
        command.args(options);
        self.server = Some(Server::start_after_kill(&mut command, Ready::Line("-blockdev")));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `isobath ctl`.
    fn run(&self, words: &[&str]) -> Finished {
        let mut command = Command::new(ISOBATH);
        run(command.current_dir(self.directory.path()).args(["ctl", "qmp"]).args(words))
    }

    /// Runs `isobath ctl` without the right to trace the server.
    fn run_untraced(&self, words: &[&str]) -> Finished {
        let mut command = Command::new(ISOBATH);
        if rustix::process::geteuid().is_root() {
            command = Command::new("setpriv");
            command.args(["--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace", ISOBATH]);
        }
        run(command.current_dir(self.directory.path()).args(["ctl", "qmp"]).args(words))
    }

    /// Runs `isobath ctl`, which must succeed, and gives what it prints.
    #[track_caller]
    fn ctl(&self, words: &[&str]) -> String {
        self.run(words).ok().text()
    }

    /// Waits for the end of every job.
    #[track_caller]
    fn wait_for_jobs(&self) {
        until("the end of every job", || self.ctl(&["jobs"]) == "No jobs.\n");
    }

    /// The files of the chain, the active image first.
    #[track_caller]
    fn chain(&self) -> Vec<String> {
        let text = self.ctl(&["chain"]);
        let file = |line: &str| {
            let path = Path::new(line.split_whitespace().last().unwrap());
            path.file_name().unwrap().to_str().unwrap().to_owned()
        };
        text.lines().skip(1).map(file).collect()
    }

    #[track_caller]
    fn query(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.ctl(&[&["query"], words].concat())).unwrap()
    }

    /// Ends the server by `quit` and fails the test unless the image has what the guest wrote.
    #[track_caller]
    fn quit(&mut self, image: &str) {
        let _ = self.ctl(&["quit"]);
        let done = self.server.take().unwrap().wait().ok();
        assert!(!done.stderr.contains("ERROR"), "{}", done.report());
        let image = self.path(image);
        qemu::assert_clean(&image);
        let reads = ["read -P 1 0 4M", "read -P 2 4M 2M", "read -P 3 6M 1M", "read -P 2 7M 1M"];
        let more = ["read -P 1 8M 8M", "read -P 0 16M 16M"];
        for read in reads.iter().chain(&more) {
            let text = qemu::io(&image, "qcow2", &[read]).ok().text();
            assert!(!text.contains("verification failed"), "{read}: {text}");
        }
    }
}

#[test]
fn snapshots_and_jobs_change_the_chain_under_a_client() {
    let mut served = Controlled::start(&[]);
    let uri = format!("nbd+unix:///vm?socket={}", served.path("nbd").display());
    let mut guest = QemuIo::open("raw", &uri);
    guest.ok("write -P 1 20M 1M");
    let _ = served.ctl(&["snapshot", "s1"]);
    guest.ok("write -P 0 20M 1M");
    let _ = served.ctl(&["snapshot", "vm", "s2", "--node-name", "top"]);
    assert_eq!(served.chain(), ["s2", "s1", "vm", "mid", "base"]);
    let done = served.ctl(&["commit", "vm", "--top", "s1", "--base", "vm"]);
    assert!(done.starts_with("vm: done"), "{done}");
    assert_eq!(served.chain(), ["s2", "vm", "mid", "base"]);
    let done = served.ctl(&["stream", "--base", "base", "--id", "pull"]);
    assert!(done.starts_with("pull: done"), "{done}");
    assert_eq!(served.chain(), ["s2", "base"]);
    qemu::create(&served.path("copy"), "qcow2", SIZE, "");
    let done = served.ctl(&["mirror", "vm", "copy"]);
    assert!(done.starts_with("vm: done"), "{done}");
    assert_eq!(served.chain(), ["copy"]);
    guest.ok("read -P 3 6M 1M");
    let _ = served.ctl(&["snapshot", "s3"]);
    let done = served.ctl(&["commit"]);
    assert!(done.starts_with("vm: done"), "{done}");
    assert_eq!(served.chain(), ["copy"]);
    let _ = served.ctl(&["resize", "vm", "64M"]);
    let _ = served.run(&["resize", "32M"]).exits(1);
    let _ = served.ctl(&["resize", "32M", "--shrink"]);
    // What is relative is relative to the size now; and the file must not be forgotten.
    let size = |served: &Controlled| {
        let blocks = served.query(&["query-block"]);
        blocks[0]["inserted"]["image"]["virtual-size"].as_u64().unwrap()
    };
    let _ = served.ctl(&["resize", "+4M"]);
    assert_eq!(size(&served), 36 << 20);
    let _ = served.run(&["resize", "--", "-4M"]).exits(1);
    let _ = served.ctl(&["resize", "--shrink", "vm", "--", "-4M"]);
    assert_eq!(size(&served), 32 << 20);
    let _ = served.run(&["resize", "--shrink", "--", "-32M"]).exits(1);
    // None of several changes at once is lost.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let _ = scope.spawn(|| served.ctl(&["resize", "+1M"]));
        }
    });
    assert_eq!(size(&served), 40 << 20);
    let change = |size: &str| served.query(&["block_resize", "device=vm", size, "relative=true"]);
    let _ = change("size=1048576");
    assert_eq!(size(&served), 41 << 20);
    let _ = served.ctl(&["resize", "--shrink", "32M"]);
    let forgotten = served.run(&["snapshot", "vm"]).exits(1);
    assert!(forgotten.stderr.contains("'vm' is a disk"), "{}", forgotten.report());
    assert_eq!(served.chain(), ["copy"]);
    drop(guest);

    let svg = served.path("plot.svg");
    let _ = served.ctl(&["jobs", "--plot", svg.to_str().unwrap(), "--job", "pull"]);
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    let stats = served.ctl(&["stats"]);
    assert!(stats.lines().any(|line| line.starts_with("vm")), "{stats}");
    served.quit("copy");
}

#[test]
fn what_is_listed_is_there_as_json_too() {
    let mut served = Controlled::start(&[]);
    let json = |served: &Controlled, words: &[&str]| -> Value {
        serde_json::from_str(&served.ctl(&[words, &["--output=json"]].concat())).unwrap()
    };
    let chain = json(&served, &["chain"]);
    let of = |name: &str| -> Vec<Value> {
        chain.as_array().unwrap().iter().map(|layer| layer[name].clone()).collect()
    };
    let files: Vec<_> = of("file");
    assert_eq!(files.len(), 3, "{chain}");
    assert!(files[0].as_str().unwrap().ends_with("vm"), "{chain}");
    assert!(of("actual-size").iter().all(Value::is_u64), "{chain}");
    assert!(of("node").iter().all(Value::is_string), "{chain}");
    assert!(of("format").iter().all(|format| format == "qcow2"), "{chain}");

    assert_eq!(json(&served, &["jobs"]), serde_json::json!([]));
    let _ = served.ctl(&["stream", "--speed", "64k", "--id", "j", "--detach"]);
    let jobs = json(&served, &["jobs"]);
    let job = &jobs[0];
    assert_eq!((&job["job"], &job["kind"]), (&Value::from("j"), &Value::from("stream")));
    assert_eq!((&job["speed"], &job["interrupted"]), (&Value::from(65536), &Value::from(false)));
    assert_eq!(job["error"], Value::Null);
    for key in ["done", "length", "copied"] {
        assert!(job[key].is_u64(), "{jobs}");
    }
    assert!(job["status"].is_string(), "{jobs}");
    for verb in ["cancel", "pause", "dismiss"] {
        let nameless = served.run(&[verb]).exits(1);
        assert!(nameless.stderr.contains("name one of: j"), "{}", nameless.report());
    }
    let _ = served.ctl(&["cancel", "j"]);
    served.wait_for_jobs();
    let nameless = served.run(&["cancel"]).exits(1);
    assert!(nameless.stderr.contains("there are none"), "{}", nameless.report());

    let uri = format!("nbd+unix:///vm?socket={}", served.path("nbd").display());
    let _ = qemu::io(Path::new(&uri), "raw", &["read 0 64k", "read 4M 64k"]).ok();
    let stats = json(&served, &["stats"]);
    let disk = &stats[0];
    assert_eq!((&disk["disk"], &disk["layers"]), (&Value::from("vm"), &Value::from(3)));
    assert!(disk["read"]["requests"].as_u64() >= Some(2), "{stats}");
    assert!(disk["read"]["bytes"].as_u64() >= Some(128 << 10), "{stats}");
    for kind in ["read", "write", "flush"] {
        assert!(disk[kind]["time-ns"].is_u64() && disk[kind]["requests"].is_u64(), "{stats}");
    }
    assert!(disk["map"]["hits"].as_u64() <= disk["map"]["lookups"].as_u64(), "{stats}");
    for command in ["jobs", "stats"] {
        let both = served.run(&[command, "--watch", "--output=json"]).exits(1);
        assert!(both.stderr.contains("--watch shows text"), "{}", both.report());
    }
    served.quit("vm");
}

#[test]
fn jobs_can_be_steered_and_left_alone() {
    let mut served = Controlled::start(&[]);
    let slow = ["stream", "--speed", "64k", "--id", "j", "--detach"];
    assert_eq!(served.ctl(&slow), "");
    let listed = served.ctl(&["jobs"]);
    assert!(listed.contains("64 KiB/s"), "{listed}");
    let heads = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let first = listed.lines().next().unwrap();
    assert_eq!(heads(first), ["JOB", "KIND", "DONE", "OF", "COPIED", "LIMIT", "STATE"]);
    // What is watched also has a rate, and a time left.
    let mut watch = Command::new(ISOBATH);
    watch.current_dir(served.directory.path()).args(["ctl", "qmp", "jobs", "--watch"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut watched = BufReader::new(watch.stdout.take().unwrap()).lines();
    let first = watched.next().unwrap().unwrap();
    let all = ["JOB", "KIND", "DONE", "OF", "COPIED", "RATE", "LEFT", "LIMIT", "STATE"];
    assert_eq!(heads(&first), all);
    assert!(watched.next().unwrap().unwrap().contains("░"));
    watch.kill().unwrap();
    let _ = watch.wait().unwrap();
    let busy = served.run(&["commit"]).exits(1);
    assert!(busy.stderr.contains("is busy"), "{}", busy.report());
    let _ = served.ctl(&["pause", "j"]);
    assert_eq!(served.query(&["query-block-jobs"])[0]["paused"], true);
    let _ = served.ctl(&["resume", "j"]);
    let _ = served.ctl(&["pause", "j"]);
    let _ = served.ctl(&["cancel", "j"]);
    served.wait_for_jobs();
    assert_eq!(served.chain(), ["vm", "mid", "base"]);

    let _ = served.ctl(&slow);
    let _ = served.ctl(&["speed", "j", "0"]);
    let done = served.run(&["follow", "j"]);
    // It may have ended before it was queried.
    assert!(done.status.success() || done.stderr.contains("no such job"), "{}", done.report());

    let pending = served.ctl(&["stream", "--no-finalize", "--id", "j"]);
    assert!(pending.contains("finalize j"), "{pending}");
    let _ = served.ctl(&["finalize", "j"]);
    for wrong in [&["pause", "j2"][..], &["stream", "--id", "1"], &["query", "nope"]] {
        let _ = served.run(wrong).exits(1);
    }
    served.wait_for_jobs();
    assert_eq!(served.chain(), ["vm"]);
    served.quit("vm");
}

#[test]
fn watching_ends_with_the_reader_though_nothing_changes() {
    let mut served = Controlled::start(&[]);
    let mut watch = Command::new(ISOBATH);
    watch.current_dir(served.directory.path()).args(["ctl", "qmp", "jobs", "--watch"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    let mut shown = BufReader::new(watch.stdout.take().unwrap());
    let mut line = String::new();
    let _ = shown.read_line(&mut line).unwrap();
    assert_eq!(line, "No jobs.\n");
    drop(shown);
    assert_eq!(watch.wait().unwrap().code(), Some(1));
    served.quit("vm");
}

#[test]
fn another_programs_lock_is_not_said_to_be_the_servers() {
    let mut served = Controlled::start(&[]);
    // Under another name, by which it is not found.
    fs::hard_link(served.path("base"), served.path("linked")).unwrap();
    let options = ["--read-only"];
    let other = qemu::nbd(&served.path("linked"), "qcow2", &served.path("other"), &options);
    let refused = served.run(&["commit"]).exits(1);
    assert!(refused.stderr.contains("Failed to get \"write\" lock"), "{}", refused.report());
    assert!(!refused.stderr.contains("this program"), "{}", refused.report());
    drop(other);
    served.quit("vm");
}

#[test]
fn a_job_of_a_killed_server_is_known_to_the_next_one() {
    let mut served = Controlled::start(&[]);
    let _ = served.ctl(&["stream", "--speed", "64k", "--base", "base", "--detach"]);
    assert!(served.path("vm.isobath-job.json").exists());
    served.server.take().unwrap().kill();
    served.serve("vm", &[]);
    let listed = served.ctl(&["jobs"]);
    assert!(listed.contains("interrupted") && listed.contains("resume vm"), "{listed}");
    let _ = served.ctl(&["resume", "vm"]);
    assert!(!served.ctl(&["jobs"]).contains("interrupted"));
    let _ = served.ctl(&["speed", "vm", "0"]);
    served.wait_for_jobs();
    assert_eq!(served.chain(), ["vm", "base"]);
    assert!(!served.path("vm.isobath-job.json").exists());

    // A server that is told to end leaves it as well; it can be forgotten.
    let _ = served.ctl(&["stream", "--speed", "64k", "--detach"]);
    let _ = served.server.take().unwrap().stop().ok();
    served.serve("vm", &[]);
    assert!(served.ctl(&["jobs"]).contains("interrupted"));
    let _ = served.ctl(&["dismiss", "vm"]);
    assert_eq!(served.ctl(&["jobs"]), "No jobs.\n");
    assert!(!served.path("vm.isobath-job.json").exists());
    served.quit("vm");
}

#[test]
fn nodes_and_exports_come_and_go() {
    let mut served = Controlled::start(&[]);
    qemu::create(&served.path("other"), "qcow2", SIZE, "");
    let node =
        r#"{"driver": "qcow2", "node-name": "n", "file": {"driver": "file", "filename": "other"}}"#;
    assert_eq!(served.query(&["blockdev-add", node]), serde_json::json!({}));
    let _ = served.query(&[
        "block-export-add",
        "type=nbd",
        "id=e",
        "node-name=n",
        "name=o",
        "writable=true",
    ]);
    let uri = format!("nbd+unix:///o?socket={}", served.path("nbd").display());
    let mut guest = QemuIo::open("raw", &uri);
    guest.ok("write -P 7 0 1M");
    let refused = served.run(&["query", "block-export-del", "id=e"]).exits(1);
    assert!(refused.stderr.contains("still in use"), "{}", refused.report());
    let _ = served.run(&["query", "blockdev-del", "node-name=n"]).exits(1);
    drop(guest);
    let _ = served.query(&["block-export-del", "id=e", "mode=hard"]);
    until("the export's end", || {
        served.query(&["query-block-exports"]).as_array().unwrap().len() == 1
    });
    let _ = served.query(&["blockdev-del", "node-name=n"]);
    let _ = qemu::io(&served.path("other"), "qcow2", &["read -P 7 0 1M"]).ok();

    // An overlay made by somebody else, and put on top as libvirt does it.
    qemu::create_overlay(&served.path("over"), &served.path("vm"), "qcow2", "");
    let node = r#"{"driver": "qcow2", "node-name": "over", "backing": null,
                   "file": {"driver": "file", "filename": "over"}}"#;
    let _ = served.query(&["blockdev-add", node]);
    let nodes = served.query(&["query-block"]);
    let root = nodes[0]["inserted"]["node-name"].as_str().unwrap();
    let node_argument = format!("node={root}");
    let put_on = |overlay: &str| {
        served.run(&["query", "blockdev-snapshot", &node_argument, &format!("overlay={overlay}")])
    };
    // One whose file has gone is closed for it, and cannot be there again.
    qemu::create_overlay(&served.path("gone"), &served.path("vm"), "qcow2", "");
    let _ = served.query(&["blockdev-add", &node.replace("over", "gone")]);
    fs::remove_file(served.path("gone")).unwrap();
    let lost = put_on("gone").exits(1);
    assert!(lost.stderr.contains("could not be opened again"), "{}", lost.report());
    // One that a job has moved into another image is opened again as that.
    let raw = r#"{"driver": "raw", "node-name": "moved", "file": {"driver": "file", "filename": "moved"}}"#;
    fs::write(served.path("moved"), vec![0; SIZE as usize]).unwrap();
    qemu::create(&served.path("to"), "qcow2", SIZE, "");
    let _ = served.query(&["blockdev-add", raw]);
    let _ = served.run(&["mirror", "moved", "to"]).ok();
    let file = served.path("to").display().to_string();
    let node_of = |served: &Controlled, file: &String| {
        let nodes = served.query(&["query-named-block-nodes"]);
        let node = nodes.as_array().unwrap().iter().find(|node| node["file"] == *file).cloned();
        node.unwrap_or_else(|| panic!("{file}: {nodes}"))
    };
    let moved = node_of(&served, &file)["node-name"].as_str().unwrap().to_owned();
    let refused = put_on(&moved).exits(1);
    assert!(refused.stderr.contains("it names no backing file"), "{}", refused.report());
    assert_eq!(node_of(&served, &file)["drv"], "qcow2");
    // And one from below which a job has taken what was given, alone.
    qemu::create_overlay(&served.path("flat"), &served.path("moved"), "raw", "");
    let flat = r#"{"driver": "qcow2", "node-name": "flat", "file": {"driver": "file", "filename": "flat"},
                   "backing": {"driver": "raw", "file": {"driver": "file", "filename": "moved"}}}"#;
    let _ = served.query(&["blockdev-add", flat]);
    let _ = served.run(&["stream", "flat"]).ok();
    let refused = put_on("flat").exits(1);
    assert!(refused.stderr.contains("it names no backing file"), "{}", refused.report());
    assert_eq!(node_of(&served, &"flat".to_owned())["node-name"], "flat");
    let _ = put_on("over").ok();
    assert_eq!(served.chain(), ["over", "vm", "mid", "base"]);
    served.quit("over");
}

#[test]
fn a_disk_in_use_is_pushed() {
    let mut served = Controlled::start(&[]);
    let directory = served.directory.path().to_owned();
    let uri = format!("nbd+unix:///vm?socket={}", served.path("nbd").display());
    let remote = |store: &str| format!("file://{}/vm", directory.join(store).display());
    let chain = ["top", "vm", "mid", "base"];
    fs::create_dir(served.path("store")).unwrap();
    let said = served.ctl(&["push", "--disk", "vm", "--speed", "10G", "top", &remote("store")]);
    let expected = format!("Pushed to {}: 3 layers, 3 of them sent", remote("store"));
    assert!(said.starts_with(&expected), "{said}");
    assert_eq!(served.chain(), chain);
    let mut guest = QemuIo::open("raw", &uri);
    guest.ok("write -P 9 9M 64k");
    // From a directory where the server's names mean other files.
    let elsewhere = served.path("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    for decoy in chain {
        qemu::create(&elsewhere.join(decoy), "qcow2", SIZE, "");
    }
    let mut push = Command::new(ISOBATH);
    push.current_dir(&elsewhere).args(["ctl", "../qmp", "push", "--output", "json", "next"]);
    let again = run(push.arg(remote("store"))).ok().json();
    assert_eq!((&again["layers"], &again["layers-sent"]), (&4.into(), &1.into()));
    guest.ok("write -P 1 9M 64k");
    drop(guest);
    fs::create_dir(served.path("out")).unwrap();
    let pull = args!["pull", "-q", "--rebase-names", remote("store"), "out"];
    let _ = isobath(&directory, pull).ok();
    let _ = served.ctl(&["quit"]);
    let _ = served.server.take().unwrap().wait().ok();
    let pulled = served.path("out/top");
    let _ = qemu::img(args!["compare", "-q", served.path("top"), &pulled]).ok();
    let _ = qemu::io(&pulled, "qcow2", &["read -P 9 9M 64k", "read -P 1 0 4M"]).ok();
}

#[test]
fn no_snapshot_is_taken_for_a_push_that_cannot_succeed() {
    let mut served = Controlled::start(&[]);
    let directory = served.directory.path().to_owned();
    let remote = |store: &str| format!("file://{}/vm", directory.join(store).display());
    let before = served.chain();
    for store in ["damaged", "collected", "store", "read-only"] {
        fs::create_dir_all(served.path(store).join("manifests")).unwrap();
    }
    fs::write(served.path("damaged/manifests/vm.json"), "{}").unwrap();
    fs::write(served.path("collected/gc.lock"), "").unwrap();
    // Nothing can be created there.
    fs::write(served.path("read-only/pushes"), "").unwrap();
    for (arguments, said) in [
        (["top", &*remote("nowhere")], "cannot open the directory"),
        (["top", "s3://key:secret@bucket/vm"], "a store's name has no user and no password"),
        (["top", "vm"], "this is not the name of a store"),
        (["top", &*remote("read-only")], "pushes"),
        (["top", &*remote("damaged")], "--overwrite replaces it"),
        (["top", &*remote("collected")], "'isobath remote gc' is at work"),
        (["vm", &*remote("store")], "is a disk"),
    ] {
        let refused = served.run(&[&["push"][..], &arguments].concat()).exits(1);
        assert!(refused.stderr.contains(said), "{}", refused.report());
        assert_eq!(served.chain(), before);
    }
    let left = fs::read_dir(served.path("store/pushes")).unwrap();
    assert_eq!(left.count(), 0, "nothing is left of what was tried");
    served.quit("vm");
    // A layer that would not be pushed as it is.
    let data = format!("data_file={},data_file_raw=on", served.path("data").display());
    qemu::create(&served.path("outside"), "qcow2", SIZE, &data);
    qemu::create_overlay(&served.path("above"), &served.path("outside"), "qcow2", "");
    served.serve("above", &[]);
    let refused = served.run(&["push", "top", &remote("store")]).exits(1);
    assert!(refused.stderr.contains("has an external data file"), "{}", refused.report());
    assert_eq!(served.chain(), ["above", "outside"]);
    // One below which other images are by now than the server has: a shorter chain, or another file.
    let _ = served.ctl(&["quit"]);
    let _ = served.server.take().unwrap().wait().ok();
    served.serve("vm", &[]);
    fs::rename(served.path("mid"), served.path("moved")).unwrap();
    qemu::create(&served.path("mid"), "qcow2", SIZE, "");
    for said in ["lead to other files", "'mid' is not open for reading in the server"] {
        let refused = served.run(&["push", "top", &remote("store")]).exits(1);
        let told = refused.stderr.replace(&format!("{}/", directory.display()), "");
        assert!(told.contains(said), "{}", refused.report());
        assert!(!served.path("top").exists());
        fs::remove_file(served.path("mid")).unwrap();
        qemu::create_overlay(&served.path("mid"), &served.path("base"), "qcow2", "");
    }
}

#[test]
fn who_may_not_trace_a_server_pushes_only_images_that_are_in_use() {
    let mut served = Controlled::start(&[]);
    let directory = served.directory.path().to_owned();
    fs::create_dir(served.path("store")).unwrap();
    let push = ["push", "top", &*format!("file://{}/vm", served.path("store").display())];
    let refused = served.run_untraced(&push).exits(1);
    assert!(
        refused.stderr.contains("start the server with absolute names"),
        "{}",
        refused.report()
    );
    served.quit("vm");
    let image = served.path("vm");
    served.serve(image.to_str().unwrap(), &[]);
    // A file that the server does not have, and that nobody else has, under a name that it says.
    fs::rename(served.path("mid"), served.path("moved")).unwrap();
    qemu::create_overlay(&served.path("mid"), &served.path("base"), "qcow2", "");
    let refused = served.run_untraced(&push).exits(1);
    let told = refused.stderr.replace(&format!("{}/", directory.display()), "");
    assert!(told.contains("'mid' is locked by no program"), "{}", refused.report());
    assert!(!served.path("top").exists());
    fs::rename(served.path("moved"), served.path("mid")).unwrap();
    let said = served.run_untraced(&push).ok().text();
    assert!(said.contains(": 3 layers, 3 of them sent"), "{said}");
    served.quit("top");
}

#[test]
fn a_push_that_fails_says_how_to_continue() {
    let mut served = Controlled::start(&[]);
    let remote = format!("file://{}/vm", served.path("store").display());
    fs::create_dir(served.path("store")).unwrap();
    fs::write(served.path("store/layers"), "").unwrap();
    let failed = served.run(&["push", "--overwrite", "last", &remote]).exits(1);
    let image = served.path("vm").display().to_string();
    let way_out = format!("'isobath push -f qcow2 --overwrite {image} {remote}' continues");
    assert!(failed.stderr.contains(&way_out), "{}", failed.report());
    assert_eq!(served.chain(), ["last", "vm", "mid", "base"]);
    fs::remove_file(served.path("store/layers")).unwrap();
    let again = args!["push", "-q", "-f", "qcow2", "--overwrite", image, remote];
    let _ = isobath(served.directory.path(), again).ok();
    served.quit("last");
}

#[test]
fn figures_are_there_for_prometheus() {
    let mut served = Controlled::start(&["--metrics", "unix:metrics"]);
    drop(QemuIo::open("raw", format!("nbd+unix:///vm?socket={}", served.path("nbd").display())));
    let ask = |request: &str| {
        let mut stream = UnixStream::connect(served.path("metrics")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    };
    // The client that was killed leaves when the server has noticed.
    let left = |reply: &String| reply.contains("isobath_export_clients{export=\"vm\"} 0");
    let reply = until_some("the client's leave", || {
        Some(ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).filter(left)
    });
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    for sample in [
        "isobath_chain_layers{disk=\"vm\"} 3",
        "isobath_disk_size_bytes{disk=\"vm\"} 33554432",
        "isobath_request_seconds_bucket{disk=\"vm\",operation=\"read\",le=\"+Inf\"}",
    ] {
        assert!(body.lines().any(|line| line.starts_with(sample)), "{sample} is not in {body}");
    }
    let is_sample = |line: &str| {
        line.starts_with("# ")
            || line.rsplit_once(' ').is_some_and(|(_, n)| n.parse::<f64>().is_ok())
    };
    assert!(body.lines().all(is_sample), "{body}");
    assert!(ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    assert!(ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    served.quit("vm");
}

#[test]
fn qemus_own_client_is_at_home() {
    let mut served = Controlled::start(&[]);
    let script = r#"
import asyncio, sys
from qemu.qmp import QMPClient
async def main():
    client = QMPClient("test")
    await client.connect(sys.argv[1])
    with client.listener("BLOCK_JOB_COMPLETED") as listener:
        await client.execute("block-stream", {"device": "vm", "job-id": "j"})
        event = await asyncio.wait_for(listener.get(), 300)
        assert event["data"]["device"] == "j" and "error" not in event["data"], event
    try:
        await client.execute("job-cancel", {"id": "j"})
    except Exception as error:
        assert "Job not found" in str(error), error
    else:
        raise AssertionError("the job is still there")
    print(client.greeting.QMP.capabilities, len(await client.execute("query-qmp-schema")) > 100)
    await client.disconnect()
asyncio.run(main())
"#;
    let packages = tools::workspace().join("target/python");
    let mut python = Command::new(tools::require("python3"));
    python.env("PYTHONPATH", packages).args(args!["-c", script, served.path("qmp")]);
    let done = run(&mut python);
    assert!(
        !done.stderr.contains("No module named 'qemu"),
        "the Python package qemu.qmp is not installed: run scripts/setup"
    );
    assert_eq!(done.ok().text(), "[] True\n");
    assert_eq!(served.chain(), ["vm"]);
    served.quit("vm");
}

#[test]
fn a_stream_does_not_change_internal_snapshots_unasked() {
    let mut served = Controlled::start(&[]);
    let _ = served.ctl(&["quit"]);
    let _ = served.server.take().unwrap().wait().ok();
    let _ = qemu::img(args!["snapshot", "-c", "then", served.path("vm")]).ok();
    served.serve("vm", &[]);
    let refused = served.run(&["stream"]).exits(1);
    assert!(refused.stderr.contains("internal snapshots (1)"), "{}", refused.report());
    assert_eq!(served.chain(), ["vm", "mid", "base"]);
    let done = served.ctl(&["stream", "--change-snapshots"]);
    assert!(done.starts_with("vm: done"), "{done}");
    assert_eq!(served.chain(), ["vm"]);
    served.quit("vm");
}
