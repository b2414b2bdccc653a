//! The same commands given to qemu-storage-daemon and here: replies, errors, events.

use crate::introspection::Introspection;
use crate::live::Live;
use isobath_qmp::client::{Address, Client, ClientError};
use isobath_qmp::tables::{PACING, SCHEMA};
use isobath_testkit::process::{PATIENCE, Ready, Server};
use isobath_testkit::{args, qemu};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// qemu-storage-daemon and a live server, each with a chain of base, mid and top in the node `d0`.
struct Both {
    qemu: Client,
    ours: Client,
    /// Where their files are: the same names in each.
    directories: [TempDir; 2],
    _daemon: Server,
    live: Option<Live>,
}

fn chain(directory: &Path) -> PathBuf {
    let [base, mid, top] = ["base", "mid", "top"].map(|name| directory.join(name));
    qemu::create(&base, "qcow2", 8 * MIB, "");
    qemu::create_overlay(&mid, &base, "qcow2", "");
    qemu::create_overlay(&top, &mid, "qcow2", "");
    // Compressed data is never shared with the file system's help, which counts towards no limit of a job's speed.
    for (image, command) in
        [(&base, "write -c -P 1 0 8M"), (&mid, "write -c -P 2 1M 1M"), (&top, "write -P 3 2M 1M")]
    {
        let _ = qemu::io(image, "qcow2", &[command]).ok();
    }
    top
}

impl Both {
    fn start() -> Self {
        let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let tops = directories.each_ref().map(|directory| chain(directory.path()));
        let socket = directories[0].path().join("qmp.sock");
        let mut command = Command::new(qemu::program("qemu-storage-daemon"));
        command
            .arg("--chardev")
            .arg(format!("socket,path={},server=on,wait=off,id=c", socket.display()))
            .args(["--monitor", "chardev=c", "--blockdev"])
            .arg(format!("driver=file,filename={},node-name=f0", tops[0].display()))
            .args(["--blockdev", "driver=qcow2,file=f0,node-name=d0"])
            .arg("--nbd-server")
            .arg(format!("addr.type=unix,addr.path={}", directories[0].path().join("n").display()));
        // A client that connects while the daemon starts its monitor may see no greeting, or two.
        let pid = directories[0].path().join("pid");
        command.arg("--pidfile").arg(&pid);
        let daemon = Server::start(&mut command, Ready::File(&pid));
        let qemu = Client::connect(&Address::Unix(socket)).unwrap();
        let live = Live::start(directories[1].path(), &[]);
        let mut ours = live.client();
        let image = json!({"driver": "file", "filename": tops[1]});
        let node = json!({"driver": "qcow2", "node-name": "d0", "file": image});
        ours.execute("blockdev-add", node).unwrap();
        Self { qemu, ours, directories, _daemon: daemon, live: Some(live) }
    }

    /// Gives a command to both; `DIR` in it stands for the directory of each. Errors become values.
    fn ask(&mut self, command: &str, arguments: &Value) -> [Value; 2] {
        let mut ask = |index: usize| {
            let directory = self.directories[index].path().to_str().unwrap().to_owned();
            let text = arguments.to_string().replace("DIR", &directory);
            let arguments = serde_json::from_str(&text).unwrap();
            let client = if index == 0 { &mut self.qemu } else { &mut self.ours };
            match client.execute(command, arguments) {
                Ok(value) => value,
                Err(ClientError::Refused { class, description }) => {
                    json!({"class": class, "desc": description.replace(&directory, "DIR")})
                }
                Err(error) => panic!("{command}: {error}"),
            }
        };
        [ask(0), ask(1)]
    }

    /// A command that succeeds on both.
    #[track_caller]
    fn ok(&mut self, command: &str, arguments: &Value) {
        assert_eq!(self.ask(command, arguments), [json!({}), json!({})], "{command} {arguments}");
    }

    /// The events of both up to one of a name and with some data.
    fn events_to(&mut self, name: &str, part: &Value) -> [Vec<Value>; 2] {
        let mut all = [Vec::new(), Vec::new()];
        for (client, events) in [&mut self.qemu, &mut self.ours].into_iter().zip(&mut all) {
            loop {
                let event = client.event(PATIENCE).unwrap();
                let Some(event) = event else { panic!("no {name} after {events:?}") };
                let wanted = part.as_object().unwrap();
                let found = event.name == name
                    && wanted.iter().all(|(key, value)| event.data[key] == *value);
                events.push(json!({"event": event.name, "data": event.data}));
                if found {
                    break;
                }
            }
        }
        all
    }
}

impl Drop for Both {
    fn drop(&mut self) {
        if let Some(live) = self.live.take()
            && !std::thread::panicking()
        {
            live.quit();
        }
    }
}

#[test]
fn commands_take_what_qemus_take() {
    let mut both = Both::start();
    let [theirs, ours] =
        both.ask("query-qmp-schema", &json!({})).each_ref().map(Introspection::new);
    let mut found = Vec::new();
    for command in SCHEMA.commands().map(|command| command.name) {
        // qemu-storage-daemon has no devices and no machine, and takes no descriptors; qemu-system has these commands.
        let of_system = [
            "block_set_io_throttle",
            "query-status",
            "stop",
            "cont",
            "getfd",
            "closefd",
            "add-fd",
            "remove-fd",
            "query-fdsets",
        ];
        if command.starts_with("x-isobath-") || of_system.contains(&command) {
            continue;
        }
        assert!(theirs.has(command), "QEMU has no {command}");
        found.extend(ours.differences(command, &theirs));
    }
    let own = |difference: &String| {
        let argument = difference.rsplit('.').next().unwrap();
        PACING.contains(&argument)
            || difference == "block_resize.shrink"
            || difference == "block_resize.relative"
            || difference == "block-stream.change-snapshots"
    };
    found.retain(|difference| !own(difference));
    assert!(found.is_empty(), "{found:#?}");
    for event in SCHEMA.events {
        // qemu-storage-daemon does not tell of its end, and has no machine that stops; qemu-system does.
        let of_machines = ["SHUTDOWN", "STOP", "RESUME"];
        assert!(theirs.has(event.name) || of_machines.contains(&event.name), "{}", event.name);
    }
}

#[test]
fn replies_have_the_shape_of_qemus() {
    let mut both = Both::start();
    let [theirs, ours] =
        both.ask("query-qmp-schema", &json!({})).each_ref().map(Introspection::new);
    let job = json!({"device": "d0", "job-id": "j", "speed": 65536});
    both.ok("block-stream", &job);
    both.ok("block-export-add", &json!({"type": "nbd", "id": "e", "node-name": "d0", "name": "x"}));
    for (command, arguments) in [
        ("query-version", json!({})),
        ("query-commands", json!({})),
        ("query-qmp-schema", json!({})),
        ("query-block", json!({})),
        ("query-named-block-nodes", json!({})),
        ("query-named-block-nodes", json!({"flat": true})),
        ("query-blockstats", json!({})),
        ("query-blockstats", json!({"query-nodes": true})),
        ("query-jobs", json!({})),
        ("query-block-jobs", json!({})),
        ("query-block-exports", json!({})),
        ("query-status", json!({})),
        ("x-isobath-query-disks", json!({})),
        ("x-isobath-query-jobs", json!({})),
    ] {
        let reply = both.ours.execute(command, arguments.clone()).unwrap();
        let wrong = ours.judge_return(command, &reply);
        assert!(wrong.is_empty(), "{command} {arguments}: {wrong:#?}");
        if theirs.has(command) {
            let mut wrong = theirs.judge_return(command, &reply);
            // Members that QEMU has since versions 8.1 and 10.
            let newer = |what: &String| what.contains("zone_append") || what.contains(".active ");
            wrong.retain(|what| !(newer(what) && what.ends_with(" is unknown")));
            assert!(wrong.is_empty(), "{command} {arguments}: {wrong:#?}");
        }
    }
    let nodes = both.ask("query-named-block-nodes", &json!({}));
    let image = |nodes: &Value| {
        let mut node = nodes.as_array().unwrap().iter();
        let mut image = node.find(|node| node["node-name"] == "d0").unwrap()["image"].clone();
        let mut below = &mut image;
        while let Some(map) = below.as_object_mut() {
            for changing in ["actual-size", "filename", "full-backing-filename", "backing-filename"]
            {
                map.shift_remove(changing);
            }
            below = &mut below["backing-image"];
        }
        image
    };
    assert_eq!(image(&nodes[0]), image(&nodes[1]));
    both.ok("block-job-cancel", &json!({"device": "j"}));
}

#[test]
fn a_node_is_above_the_images_that_its_options_describe_as_in_qemu() {
    let mut both = Both::start();
    for directory in &both.directories {
        let base = directory.path().join("base");
        qemu::create_overlay(&directory.path().join("over"), &base, "qcow2", "");
    }
    let file = |name: &str| json!({"driver": "file", "filename": format!("DIR/{name}")});
    let over = |backing: Value| json!({"driver": "qcow2", "node-name": "d1", "file": file("over"), "backing": backing});
    let base = json!({"driver": "qcow2", "node-name": "b2", "file": file("base"), "backing": null});
    let mid = |name: &str, below: Value| {
        let file = file("mid");
        json!({"driver": "qcow2", "node-name": name, "file": file, "backing": below})
    };
    for refused in [
        json!("zz"),
        mid("d1", base.clone()),
        mid("b2", base.clone()),
        mid("d0", base.clone()),
        mid("1b", base.clone()),
        json!({"driver": "qcow2", "file": "zz"}),
        json!({"driver": "qcow2", "file": file("missing")}),
        json!({"driver": "qcow2"}),
    ] {
        let [qemu, ours] = both.ask("blockdev-add", &over(refused.clone()));
        assert_eq!(ours["class"], qemu["class"], "{refused}: {ours} {qemu}");
        // QEMU says before that it is about a backing file, and of a wrong `file` something else.
        if refused["file"] != "zz" && refused["file"] != file("missing") {
            let (ours, qemu) = (ours["desc"].as_str().unwrap(), qemu["desc"].as_str().unwrap());
            assert!(qemu.ends_with(ours), "{refused}: {ours}: {qemu}");
        }
    }
    // Those of the other disk, which has the same files, keep their names.
    let names = |nodes: &Value| -> BTreeSet<String> {
        let names = nodes.as_array().unwrap().iter().map(|node| node["node-name"].as_str());
        names.map(|name| name.unwrap().to_owned()).collect()
    };
    let before = both.ask("query-named-block-nodes", &json!({})).each_ref().map(names);
    both.ok("blockdev-add", &over(mid("b1", base)));
    let after = both.ask("query-named-block-nodes", &json!({})).each_ref().map(names);
    for (before, after) in before.iter().zip(&after) {
        assert!(before.is_subset(after), "{before:?} {after:?}");
    }
    let described = |nodes: &Value| -> Vec<Value> {
        ["d1", "b1", "b2"]
            .map(|name| {
                let mut nodes = nodes.as_array().unwrap().iter();
                let node = nodes.find(|node| node["node-name"] == name).unwrap();
                json!([name, node["drv"], node["ro"], node["backing_file_depth"]])
            })
            .into()
    };
    let [qemu, ours] = both.ask("query-named-block-nodes", &json!({}));
    assert_eq!(described(&ours), described(&qemu));
    both.ok("blockdev-del", &json!({"node-name": "d1"}));
    // What was described is what is read, and is found by its names: the range of `mid` is copied up.
    let base = json!({"driver": "qcow2", "node-name": "b2", "file": file("base")});
    both.ok("blockdev-add", &over(mid("b1", base)));
    both.ok("block-stream", &json!({"device": "d1", "base-node": "b2", "job-id": "s"}));
    let _ = both.events_to("JOB_STATUS_CHANGE", &json!({"id": "s", "status": "null"}));
    both.ok("blockdev-del", &json!({"node-name": "d1"}));
    for directory in &both.directories {
        let over = directory.path().join("over");
        let _ = qemu::io(&over, "qcow2", &["read -P 1 0 1M", "read -P 2 1M 1M"]).ok();
    }
}

#[test]
fn what_is_refused_is_refused_as_qemu_does() {
    let mut both = Both::start();
    let node =
        |name: &str, file: Value| json!({"driver": "qcow2", "node-name": name, "file": file});
    let filter = |options: Value| {
        let mut node = json!({"driver": "throttle", "node-name": "f"});
        node.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        node
    };
    let encrypted = |driver: &str, options: Value| {
        let file = json!({"driver": "file", "filename": "DIR/base"});
        let mut node = json!({"driver": driver, "node-name": "a", "file": file});
        node.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
        node
    };
    both.ok("block-export-add", &json!({"type": "nbd", "id": "e", "node-name": "d0", "name": "x"}));
    for (command, arguments) in [
        ("nope", json!({})),
        ("query-version", json!({"a": 1})),
        ("block-stream", json!({})),
        ("block-stream", json!({"device": 1})),
        ("block-stream", json!({"device": "d0", "on-error": "x"})),
        ("block-stream", json!({"device": "zz"})),
        ("block-stream", json!({"device": "d0"})),
        ("block-stream", json!({"device": "d0", "job-id": "1x"})),
        ("block-stream", json!({"device": "d0", "job-id": "j", "base-node": "zz"})),
        ("block-stream", json!({"device": "d0", "job-id": "j", "base": "zz"})),
        ("block-stream", json!({"device": "d0", "job-id": "j", "base": "x", "base-node": "y"})),
        ("block-stream", json!({"device": "d0", "job-id": "j", "backing-file": "x"})),
        ("block-stream", json!({"device": "d0", "job-id": "j", "speed": -1})),
        ("block-commit", json!({"device": "zz", "job-id": "j"})),
        ("block-commit", json!({"device": "d0", "job-id": "j", "base-node": "zz"})),
        ("blockdev-mirror", json!({"device": "zz", "target": "d0", "sync": "full", "job-id": "j"})),
        ("blockdev-mirror", json!({"device": "d0", "target": "zz", "sync": "full", "job-id": "j"})),
        ("blockdev-mirror", json!({"device": "d0", "target": "d0", "job-id": "j"})),
        ("job-pause", json!({"id": "x"})),
        ("job-dismiss", json!({"id": "x"})),
        ("block-job-pause", json!({"device": "x"})),
        ("block-job-cancel", json!({"device": "x"})),
        ("block-job-set-speed", json!({"device": "x", "speed": 1.5})),
        ("block-job-set-speed", json!({"device": "x", "speed": 1})),
        ("block-job-finalize", json!({"id": "x"})),
        ("block_resize", json!({"device": "zz", "size": 1})),
        ("block_resize", json!({"node-name": "d0", "size": -1})),
        ("block_resize", json!({"size": 1})),
        ("blockdev-del", json!({"node-name": "zz"})),
        ("blockdev-add", json!({"node-name": "a"})),
        ("blockdev-add", json!({"driver": "file", "filename": "DIR/base"})),
        ("blockdev-add", json!({"driver": "file", "filename": "DIR/base", "node-name": "1a"})),
        ("blockdev-add", json!({"driver": "file", "filename": "DIR/base", "node-name": "d0"})),
        ("blockdev-add", node("a", json!("zz"))),
        ("blockdev-add", node("a", json!({"driver": "file"}))),
        ("blockdev-add", node("a", json!(1))),
        ("blockdev-snapshot-sync", json!({"device": "zz", "snapshot-file": "DIR/s"})),
        ("blockdev-snapshot-sync", json!({"node-name": "d0", "snapshot-file": "DIR/s"})),
        ("blockdev-snapshot", json!({"node": "zz", "overlay": "d0"})),
        ("blockdev-snapshot", json!({"node": "d0", "overlay": "zz"})),
        ("transaction", json!({})),
        ("transaction", json!({"actions": [{"data": {}}]})),
        ("transaction", json!({"actions": [{"type": "blockdev-snapshot"}]})),
        (
            "transaction",
            json!({"actions": [{"type": "blockdev-snapshot", "data": {"node": 1, "overlay": "x"}}]}),
        ),
        ("block-export-add", json!({"type": "nbd", "id": "1 e", "node-name": "d0"})),
        ("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "d0"})),
        ("block-export-add", json!({"type": "nbd", "id": "f", "node-name": "d0", "name": "x"})),
        ("block-export-add", json!({"type": "nbd", "id": "f", "node-name": "zz"})),
        ("block-export-del", json!({"id": "zz"})),
        ("object-add", json!({"qom-type": "throttle-group"})),
        ("object-add", json!({"qom-type": "throttle-group", "id": "1g"})),
        ("object-add", json!({"qom-type": "throttle-group", "id": "g", "iops": 1})),
        ("object-add", json!({"qom-type": "throttle-group", "id": "g", "limits": {"iops": 1}})),
        ("object-del", json!({"id": "g"})),
        ("object-add", json!({"qom-type": "secret", "data": "x"})),
        ("object-add", json!({"qom-type": "secret", "id": "s"})),
        ("object-add", json!({"qom-type": "secret", "id": "s", "file": "x", "data": "x"})),
        ("object-add", json!({"qom-type": "secret", "id": "s", "data": "x", "format": "hex"})),
        ("object-add", json!({"qom-type": "secret", "id": "s", "data": 1})),
        ("blockdev-add", encrypted("luks", json!({"key-secret": "zz"}))),
        ("blockdev-add", encrypted("luks", json!({"key-secret": 1}))),
        ("blockdev-add", encrypted("luks", json!({"encrypt": {"format": "luks"}}))),
        ("blockdev-add", encrypted("qcow2", json!({"key-secret": "zz"}))),
        ("blockdev-add", encrypted("qcow2", json!({"encrypt": {"key-secret": "zz"}}))),
        ("blockdev-add", json!({"driver": "luks", "node-name": "a"})),
        ("blockdev-add", filter(json!({"throttle-group": "g"}))),
        ("blockdev-add", filter(json!({"file": "d0"}))),
        ("blockdev-add", filter(json!({"throttle-group": "g", "file": "d0"}))),
    ] {
        let [theirs, ours] = both.ask(command, &arguments);
        assert!(
            theirs["class"].is_string(),
            "QEMU does not refuse {command} {arguments}: {theirs}"
        );
        assert_eq!(ours, theirs, "{command} {arguments}");
    }
}

#[test]
fn throttle_groups_and_their_nodes_are_qemus() {
    let mut both = Both::start();
    let limits = json!({"iops-total": 100, "iops-total-max": 2000, "iops-total-max-length": 60});
    let group = |limits: &Value| json!({"qom-type": "throttle-group", "id": "g", "limits": limits});
    // What contradicts itself is refused by both, in other words.
    for wrong in [
        json!({"iops-total": 1, "iops-read": 1}),
        json!({"iops-total": -1}),
        json!({"iops-total": 1_000_000_000_000_001_u64}),
        json!({"iops-total": 2, "iops-total-max": 1}),
        json!({"iops-total-max": 1}),
        json!({"iops-total": 2, "iops-total-max-length": 0}),
        json!({"iops-total": 2, "iops-total-max-length": 2}),
        json!({"bps-total": 2, "iops-size": 2}),
        json!({"bps-read": 1, "bps-read-max": 1_000_000_000_u64,
               "bps-read-max-length": 1_000_001}),
    ] {
        let answers = both.ask("object-add", &group(&wrong));
        assert!(answers.iter().all(|answer| answer["class"] == "GenericError"), "{answers:?}");
    }
    both.ok("object-add", &group(&limits));
    let [theirs, ours] = both.ask("object-add", &group(&limits));
    assert_eq!(ours, theirs);
    let filter =
        json!({"driver": "throttle", "node-name": "f", "throttle-group": "g", "file": "d0"});
    both.ok("blockdev-add", &filter);
    let [theirs, ours] = both.ask("blockdev-add", &filter);
    assert_eq!(ours, theirs);
    let export = json!({"type": "nbd", "id": "x", "node-name": "f", "name": "f", "writable": true});
    both.ok("block-export-add", &export);
    // In use.
    for (command, arguments) in
        [("object-del", json!({"id": "g"})), ("blockdev-del", json!({"node-name": "f"}))]
    {
        let answers = both.ask(command, &arguments);
        assert!(answers.iter().all(|answer| answer["class"] == "GenericError"), "{answers:?}");
    }
    both.ok("block-export-del", &json!({"id": "x"}));
    both.events_to("BLOCK_EXPORT_DELETED", &json!({"id": "x"}));
    both.ok("blockdev-del", &json!({"node-name": "f"}));
    both.ok("object-del", &json!({"id": "g"}));
}

/// What QEMU says of a disk in a file that is encrypted as a whole.
fn of_luks(nodes: &Value) -> Value {
    let nodes = nodes.as_array().unwrap();
    let node = nodes.iter().find(|node| node["drv"] == "luks").unwrap();
    let image = &node["image"];
    json!({
        "encrypted": [&node["encrypted"], &image["encrypted"]],
        "format": image["format"],
        "size": image["virtual-size"],
        "specific": image["format-specific"],
    })
}

#[test]
fn files_that_are_encrypted_as_a_whole_are_added_as_in_qemu() {
    let mut both = Both::start();
    let [from, to] = both.directories.each_ref().map(|directory| directory.path().to_owned());
    fs::write(from.join("key"), "correct horse\n").unwrap();
    fs::write(to.join("key"), "correct horse\n").unwrap();
    let object = format!("secret,id=s,file={}", from.join("key").display());
    let options = "key-secret=s,iter-time=10";
    let create = args!["create", "-q", "-f", "luks", "--object", object, "-o", options];
    let _ = qemu::img([create, args![from.join("disk"), "1M"]].concat()).ok();
    let _ = fs::copy(from.join("disk"), to.join("disk")).unwrap();
    let secret = |id: &str, more: Value| {
        let mut secret = json!({"qom-type": "secret", "id": id});
        secret.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        secret
    };
    both.ok("object-add", &secret("s", json!({"file": "DIR/key"})));
    both.ok("object-add", &secret("w", json!({"data": "d3Jvbmc=", "format": "base64"})));
    let [theirs, ours] = both.ask("object-add", &secret("s", json!({"data": "x"})));
    assert_eq!(ours, theirs);
    let file = json!({"driver": "file", "node-name": "f", "filename": "DIR/disk"});
    both.ok("blockdev-add", &file);
    let mut node = json!({"driver": "luks", "node-name": "n", "file": "f"});
    // Here the image is named before QEMU's words.
    for (id, words) in [
        (None, "Parameter 'key-secret' is required for cipher"),
        (Some("w"), "Invalid password, cannot unlock any keyslot"),
    ] {
        if let Some(id) = id {
            node["key-secret"] = id.into();
        }
        let [theirs, ours] = both.ask("blockdev-add", &node);
        assert_eq!(theirs["desc"], words);
        assert_eq!(ours["desc"], format!("'DIR/disk': {words}"));
    }
    node["key-secret"] = "s".into();
    both.ok("blockdev-add", &node);
    let [theirs, ours] = both.ask("query-named-block-nodes", &json!({}));
    assert_eq!(of_luks(&ours), of_luks(&theirs));
    // The node has its key: the secret is not needed any more.
    both.ok("object-del", &json!({"id": "s"}));
    both.ok("blockdev-del", &json!({"node-name": "n"}));
    node["file"] = json!({"driver": "file", "filename": "DIR/disk"});
    let [theirs, ours] = both.ask("blockdev-add", &node);
    assert_eq!(theirs["desc"], "No secret with id 's'");
    assert_eq!(ours, theirs);
}

#[test]
fn a_jobs_verbs_and_events_are_qemus() {
    let mut both = Both::start();
    let job = json!({"device": "d0", "job-id": "j", "speed": 65536, "auto-dismiss": false});
    both.ok("block-stream", &job);
    for (command, arguments) in [
        ("block-stream", json!({"device": "d0", "job-id": "k"})),
        ("blockdev-del", json!({"node-name": "base"})),
        ("job-dismiss", json!({"id": "j"})),
        ("job-finalize", json!({"id": "j"})),
        ("job-complete", json!({"id": "j"})),
        ("block-job-complete", json!({"device": "j"})),
        ("job-resume", json!({"id": "j"})),
        ("block-job-resume", json!({"device": "j"})),
        ("block-job-set-speed", json!({"device": "j", "speed": -1})),
    ] {
        let [theirs, ours] = both.ask(command, &arguments);
        assert!(theirs["class"].is_string(), "QEMU does not refuse {command} {arguments}");
        assert_eq!(ours, theirs, "{command} {arguments}");
    }
    both.ok("job-pause", &json!({"id": "j"}));
    let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "paused"}));
    assert_eq!(events[0], events[1]);
    for (command, arguments) in
        [("job-pause", json!({"id": "j"})), ("block-job-cancel", json!({"device": "j"}))]
    {
        let [theirs, ours] = both.ask(command, &arguments);
        assert_eq!(ours, theirs, "{command} {arguments}");
    }
    both.ok("block-job-resume", &json!({"device": "j"}));
    both.ok("block-job-set-speed", &json!({"device": "j", "speed": 0}));
    let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "concluded"}));
    assert_eq!(events[0], events[1]);
    let [theirs, _] = both.ask("query-qmp-schema", &json!({})).each_ref().map(Introspection::new);
    for event in &events[1] {
        let wrong = theirs.judge_event(event["event"].as_str().unwrap(), &event["data"]);
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
    for command in ["job-pause", "job-cancel", "job-finalize", "job-complete"] {
        let [theirs, ours] = both.ask(command, &json!({"id": "j"}));
        assert_eq!(ours, theirs, "{command}");
    }
    let [theirs, ours] = both.ask("query-jobs", &json!({}));
    assert_eq!(ours, theirs);
    let [theirs, ours] = both.ask("query-block-jobs", &json!({}));
    assert_eq!(ours, theirs);
    both.ok("job-dismiss", &json!({"id": "j"}));
    let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "null"}));
    assert_eq!(events[0], events[1]);
}

/// Event names and, where they have them, states; without progress, which differs.
fn outline(events: &[Value]) -> Vec<String> {
    let line = |event: &Value| {
        let name = event["event"].as_str().unwrap();
        format!("{name} {}", event["data"]["status"].as_str().unwrap_or(""))
    };
    events.iter().map(line).collect()
}

#[test]
fn jobs_end_as_qemus_do() {
    let mut both = Both::start();
    // QEMU drops an overlay that nobody uses.
    both.ok("block-export-add", &json!({"type": "nbd", "id": "e", "node-name": "d0", "name": "x"}));
    let snapshot = json!({"node-name": "d0", "snapshot-file": "DIR/s", "snapshot-node-name": "s"});
    both.ok("blockdev-snapshot-sync", &snapshot);

    // The active layer goes down: ready, and completed by its user.
    both.ok("block-commit", &json!({"device": "s", "job-id": "j", "base-node": "d0"}));
    let events = both.events_to("BLOCK_JOB_READY", &json!({"device": "j"}));
    assert_eq!(outline(&events[0]), outline(&events[1]));
    both.ok("block-job-complete", &json!({"device": "j"}));
    let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "null"}));
    assert_eq!(outline(&events[0]), outline(&events[1]));

    // Middle layers go down.
    let commit = json!({"device": "d0", "job-id": "j", "top": "DIR/mid", "base": "DIR/base"});
    both.ok("block-commit", &commit);
    let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "null"}));
    assert_eq!(outline(&events[0]), outline(&events[1]));

    // Pending, and cancelled then.
    let stream =
        json!({"device": "d0", "job-id": "j", "auto-finalize": false, "auto-dismiss": false});
    both.ok("block-stream", &stream);
    let events = both.events_to("BLOCK_JOB_PENDING", &json!({"id": "j"}));
    assert_eq!(outline(&events[0]), outline(&events[1]));
    both.ok("job-cancel", &json!({"id": "j"}));
    let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "concluded"}));
    assert_eq!(outline(&events[0]), outline(&events[1]));
    let [theirs, ours] = both.ask("query-jobs", &json!({}));
    assert_eq!(ours[0]["error"], theirs[0]["error"]);
    both.ok("job-dismiss", &json!({"id": "j"}));

    // A mirror left without pivoting, and one forced to end.
    let target = |index: usize| both.directories[index].path().join("target");
    for index in 0..2 {
        qemu::create(&target(index), "qcow2", 8 * MIB, "");
    }
    let image = json!({"driver": "file", "filename": "DIR/target"});
    both.ok("blockdev-add", &json!({"driver": "qcow2", "node-name": "t", "file": image}));
    let mirror = json!({"device": "d0", "target": "t", "sync": "full", "job-id": "j"});
    for (command, arguments) in
        [("block-job-cancel", json!({"device": "j"})), ("job-cancel", json!({"id": "j"}))]
    {
        both.ok("blockdev-mirror", &mirror);
        let events = both.events_to("BLOCK_JOB_READY", &json!({"device": "j"}));
        let last = outline(&events[1]);
        assert_eq!(outline(&events[0])[outline(&events[0]).len() - last.len()..], last);
        both.ok(command, &arguments);
        let events = both.events_to("JOB_STATUS_CHANGE", &json!({"status": "null"}));
        assert_eq!(outline(&events[0]), outline(&events[1]), "{command}");
    }
}
