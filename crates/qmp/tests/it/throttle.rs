//! Limits on the requests of disks, set by QMP.

use crate::live::Live;
use isobath_qmp::client::{Client, ClientError};
use isobath_testkit::process::PATIENCE;
use isobath_testkit::{args, qemu, until};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A server of the devices `a` and `b`.
fn start() -> (TempDir, Live, Client) {
    let directory = tempfile::tempdir().unwrap();
    let images = ["a", "b"].map(|name| directory.path().join(name));
    for image in &images {
        qemu::create(image, "qcow2", MIB, "");
    }
    let devices = [("a", &*images[0]), ("b", &*images[1])];
    let live = Live::start(directory.path(), &devices);
    let client = live.client();
    (directory, live, client)
}

/// The arguments of `block_set_io_throttle`: those that it requires are 0 unless given.
fn limits(given: &Value) -> Value {
    let mut all =
        json!({"bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    let map = all.as_object_mut().unwrap();
    map.extend(given.as_object().unwrap().clone());
    all
}

/// What `query-block` says of a device's limits.
fn shown(client: &mut Client, device: &str) -> Value {
    let blocks = client.execute("query-block", json!({})).unwrap();
    let found = blocks.as_array().unwrap().iter().find(|block| block["device"] == device);
    let inserted = found.unwrap()["inserted"].as_object().unwrap();
    let is_limit =
        |name: &str| name == "group" || name.starts_with("bps") || name.starts_with("iops");
    inserted.iter().filter(|(name, value)| is_limit(name) && **value != 0).map(pair).collect()
}

fn pair((name, value): (&String, &Value)) -> (String, Value) {
    (name.clone(), value.clone())
}

#[track_caller]
fn refused(result: Result<Value, ClientError>, class: &str, text: &str) {
    match result {
        Err(ClientError::Refused { class: found, description }) => {
            assert_eq!(found, class, "{description}");
            assert!(description.contains(text), "{description}");
        }
        other => panic!("{other:?} although {text}"),
    }
}

/// A client of an NBD export that has chosen it, and reads nothing yet.
fn nbd(directory: &Path, export: &str) -> UnixStream {
    let mut stream = UnixStream::connect(directory.join("nbd.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    // Fixed newstyle without zeroes; then NBD_OPT_EXPORT_NAME.
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend(1_u32.to_be_bytes());
    hello.extend((export.len() as u32).to_be_bytes());
    hello.extend(export.bytes());
    stream.write_all(&hello).unwrap();
    let mut chosen = [0; 10];
    stream.read_exact(&mut chosen).unwrap();
    stream
}

/// Sends reads of 512 bytes.
fn send_reads(stream: &mut UnixStream, count: u64) {
    for cookie in 0..count {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0; 4]);
        request.extend(cookie.to_be_bytes());
        request.extend((cookie * 512).to_be_bytes());
        request.extend(512_u32.to_be_bytes());
        stream.write_all(&request).unwrap();
    }
}

/// Receives the replies to this many reads, none of them an error.
fn receive_reads(stream: &mut UnixStream, count: u64) {
    for _ in 0..count {
        let mut reply = [0; 16 + 512];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    }
}

/// Waits until so many requests of a device wait, and no other is in flight.
fn until_waiting(client: &mut Client, device: &str, count: u64) {
    until(&format!("{count} requests to '{device}' to wait"), || {
        let disks = client.execute("x-isobath-query-disks", json!({})).unwrap();
        let disks = disks["disks"].as_array().unwrap();
        let disk = disks.iter().find(|disk| disk["device"] == device).unwrap();
        disk["waiting"] == count && disk["in-flight"] == 0
    });
}

/// Has so many reads of the device `a` wait for hours.
fn with_waiting_reads(directory: &Path, client: &mut Client, count: u64) -> UnixStream {
    let slow = limits(&json!({"device": "a", "bps": 1}));
    client.execute("block_set_io_throttle", slow).unwrap();
    let mut stream = nbd(directory, "a");
    send_reads(&mut stream, count + 1);
    receive_reads(&mut stream, 1);
    until_waiting(client, "a", count);
    stream
}

#[test]
fn limits_are_set_shown_and_lifted() {
    let (_directory, live, mut client) = start();
    assert_eq!(shown(&mut client, "a"), json!({}));
    let set = json!({"iops": 100, "iops_max": 2000, "iops_max_length": 60, "iops_size": 4096,
                     "bps_rd": 1_000_000});
    let mut arguments = limits(&set);
    arguments["device"] = "a".into();
    client.execute("block_set_io_throttle", arguments).unwrap();
    let mut expected = set;
    expected["group"] = "a".into();
    assert_eq!(shown(&mut client, "a"), expected);
    assert_eq!(shown(&mut client, "b"), json!({}));
    client.execute("block_set_io_throttle", limits(&json!({"id": "a"}))).unwrap();
    assert_eq!(shown(&mut client, "a"), json!({}));
    live.quit();
}

#[test]
fn a_groups_last_limits_are_all_its_disks() {
    let (_directory, live, mut client) = start();
    let mut set = |arguments: Value| {
        client.execute("block_set_io_throttle", limits(&arguments)).unwrap();
        ["a", "b"].map(|device| shown(&mut client, device))
    };
    set(json!({"device": "a", "iops": 5, "group": "g"}));
    let both = set(json!({"device": "b", "iops": 7, "group": "g"}));
    assert_eq!(both, [json!({"iops": 7, "group": "g"}), json!({"iops": 7, "group": "g"})]);
    // Without a name it is the group that the disk is in.
    let both = set(json!({"device": "a", "bps": 9}));
    assert_eq!(both[1], json!({"bps": 9, "group": "g"}));
    let both = set(json!({"device": "a", "bps": 8, "group": "h"}));
    assert_eq!(both, [json!({"bps": 8, "group": "h"}), json!({"bps": 9, "group": "g"})]);
    // Its name is free once its last disk has left.
    set(json!({"device": "a"}));
    let object = json!({"qom-type": "throttle-group", "id": "h", "x-iops-total": 3});
    client.execute("object-add", object).unwrap();
    live.quit();
}

#[test]
fn limits_that_cannot_be_set_change_nothing() {
    let (_directory, live, mut client) = start();
    let good = limits(&json!({"device": "a", "iops": 5}));
    client.execute("block_set_io_throttle", good).unwrap();
    for (arguments, class, text) in [
        (json!({"iops": 1}), "GenericError", "exactly one of"),
        (json!({"device": "a", "id": "a", "iops": 1}), "GenericError", "exactly one of"),
        (json!({"device": "z", "iops": 1}), "DeviceNotFound", "'z'"),
        (json!({"device": "a", "iops": -1}), "GenericError", "'iops'"),
        (json!({"device": "a", "iops": 1, "iops_rd": 1}), "GenericError", "'iops-read'"),
        (json!({"device": "a", "iops": 1, "group": 5}), "GenericError", "group"),
    ] {
        let refusal = client.execute("block_set_io_throttle", limits(&arguments));
        refused(refusal, class, text);
    }
    assert_eq!(shown(&mut client, "a"), json!({"iops": 5, "group": "a"}));
    live.quit();
}

#[test]
fn a_throttle_group_limits_the_nodes_above_which_it_stands() {
    let (directory, live, mut client) = start();
    let limits = json!({"iops-total": 50, "iops-total-max": 100});
    let group = json!({"qom-type": "throttle-group", "id": "tg", "limits": limits});
    client.execute("object-add", group.clone()).unwrap();
    refused(client.execute("object-add", group), "GenericError", "duplicate");
    for name in ["c", "d"] {
        qemu::create(&directory.path().join(name), "qcow2", MIB, "");
    }
    let image = |name: &str| {
        let file = json!({"driver": "file", "filename": directory.path().join(name)});
        json!({"driver": "qcow2", "file": file})
    };
    let filter = |name: &str, file: Value| {
        let mut node = json!({"driver": "throttle", "throttle-group": "tg", "file": file});
        node["node-name"] = name.into();
        node
    };
    let mut below = image("c");
    below["node-name"] = "c0".into();
    client.execute("blockdev-add", below).unwrap();
    client.execute("blockdev-add", filter("c1", json!("c0"))).unwrap();
    client.execute("blockdev-add", filter("d1", image("d"))).unwrap();
    let nodes = client.execute("query-named-block-nodes", json!({"flat": true})).unwrap();
    let limited = |name: &str| {
        let nodes = nodes.as_array().unwrap();
        nodes.iter().find(|node| node["node-name"] == name).unwrap()["group"] == "tg"
    };
    assert!(limited("c0") && limited("d1"));

    let delete = |name: &str| json!({"node-name": name});
    refused(client.execute("object-del", json!({"id": "tg"})), "GenericError", "in use");
    refused(client.execute("blockdev-add", filter("c2", json!("c0"))), "GenericError", "'c1'");
    refused(client.execute("blockdev-add", filter("c1", json!("d1"))), "GenericError", "Duplicate");
    refused(client.execute("blockdev-del", delete("c0")), "GenericError", "'c1'");
    let mut nowhere = filter("e", image("d"));
    nowhere["throttle-group"] = "zz".into();
    refused(client.execute("blockdev-add", nowhere), "GenericError", "'zz' does not exist");

    // A node above is exported like the one below.
    let export = json!({"type": "nbd", "id": "x", "node-name": "c1", "name": "x"});
    client.execute("block-export-add", export).unwrap();
    let shown = client.execute("query-block-exports", json!({})).unwrap();
    let shown = shown.as_array().unwrap().iter().find(|export| export["id"] == "x").unwrap();
    assert_eq!(shown["node-name"], "c1", "the name that was given");
    refused(client.execute("blockdev-del", delete("c1")), "GenericError", "exported as 'x'");
    client.execute("block-export-del", json!({"id": "x"})).unwrap();
    let event = client.event(PATIENCE).unwrap().unwrap();
    assert_eq!(event.name, "BLOCK_EXPORT_DELETED");
    for name in ["c1", "c0", "d1"] {
        client.execute("blockdev-del", delete(name)).unwrap();
    }
    client.execute("object-del", json!({"id": "tg"})).unwrap();
    live.quit();
}

/// Adds a group, and nodes of the driver `throttle` above images that they describe: `d` has no other name, and that
/// below `e` is `e0`.
fn with_inline_filters(directory: &Path, client: &mut Client) {
    let limits = json!({"iops-total": 50});
    let group = json!({"qom-type": "throttle-group", "id": "tg", "limits": limits});
    client.execute("object-add", group).unwrap();
    for (name, own) in [("d", None), ("e", Some("e0"))] {
        let image = directory.join(name);
        qemu::create(&image, "qcow2", MIB, "");
        let mut below = json!({"driver": "qcow2", "file": {"driver": "file", "filename": image}});
        if let Some(own) = own {
            below["node-name"] = own.into();
        }
        let mut node = json!({"driver": "throttle", "throttle-group": "tg", "file": below});
        node["node-name"] = name.into();
        client.execute("blockdev-add", node).unwrap();
    }
}

#[test]
fn what_a_throttle_node_limits_has_no_other_limits() {
    let (directory, live, mut client) = start();
    with_inline_filters(directory.path(), &mut client);
    for (id, filter) in [("d", "'d'"), ("e", "'e'"), ("e0", "'e'")] {
        for iops in [0, 7] {
            let arguments = limits(&json!({"id": id, "iops": iops}));
            let result = client.execute("block_set_io_throttle", arguments);
            refused(result, "DeviceNotFound", filter);
        }
    }
    // Nor are limits replaced that it has already.
    let set = limits(&json!({"device": "a", "iops": 5}));
    client.execute("block_set_io_throttle", set).unwrap();
    let nodes = client.execute("query-named-block-nodes", json!({"flat": true})).unwrap();
    let nodes = nodes.as_array().unwrap();
    let node = nodes.iter().find(|node| node["group"] == "a").unwrap()["node-name"].clone();
    let filter =
        json!({"driver": "throttle", "node-name": "f", "throttle-group": "tg", "file": node});
    let result = client.execute("blockdev-add", filter.clone());
    refused(result, "GenericError", "in the group 'a'");
    client.execute("block_set_io_throttle", limits(&json!({"device": "a"}))).unwrap();
    client.execute("blockdev-add", filter).unwrap();
    let set = limits(&json!({"device": "a", "iops": 5}));
    refused(client.execute("block_set_io_throttle", set), "GenericError", "node 'f'");
    assert_eq!(shown(&mut client, "a"), json!({"iops": 50, "group": "tg"}));
    live.quit();
}

#[test]
fn a_throttle_node_takes_along_the_image_that_it_describes() {
    let (directory, live, mut client) = start();
    with_inline_filters(directory.path(), &mut client);
    let delete = |name: &str| json!({"node-name": name});
    let names = |client: &mut Client| {
        let nodes = client.execute("query-named-block-nodes", json!({"flat": true})).unwrap();
        let nodes = nodes.as_array().unwrap().iter();
        nodes.map(|node| node["node-name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    refused(client.execute("blockdev-del", delete("e0")), "GenericError", "node 'e'");
    client.execute("blockdev-del", delete("e")).unwrap();
    assert!(!names(&mut client).contains(&"e0".to_owned()));
    // When another image is above it, they go together.
    let overlay = directory.path().join("overlay");
    let snapshot = json!({"node-name": "d", "snapshot-file": overlay, "snapshot-node-name": "o"});
    client.execute("blockdev-snapshot-sync", snapshot).unwrap();
    refused(client.execute("blockdev-del", delete("d")), "GenericError", "node 'o'");
    client.execute("blockdev-del", delete("o")).unwrap();
    let left = names(&mut client);
    assert!(!left.contains(&"o".to_owned()) && !left.contains(&"d".to_owned()), "{left:?}");
    client.execute("object-del", json!({"id": "tg"})).unwrap();
    live.quit();
}

#[test]
fn a_server_that_ends_answers_the_requests_that_wait() {
    let (directory, live, mut client) = start();
    let mut stream = with_waiting_reads(directory.path(), &mut client, 10);
    live.quit();
    receive_reads(&mut stream, 10);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_export_that_is_removed_answers_the_requests_that_wait() {
    let (directory, live, mut client) = start();
    let mut stream = with_waiting_reads(directory.path(), &mut client, 10);
    client.execute("block-export-del", json!({"id": "a", "mode": "hard"})).unwrap();
    receive_reads(&mut stream, 10);
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    live.quit();
}

#[test]
fn a_snapshot_and_a_job_do_not_wait_for_requests_that_wait() {
    let (directory, live, mut client) = start();
    let mut stream = with_waiting_reads(directory.path(), &mut client, 10);
    let overlay = directory.path().join("overlay");
    let snapshot = json!({"device": "a", "snapshot-file": overlay});
    client.execute("blockdev-snapshot-sync", snapshot).unwrap();
    client.execute("block-stream", json!({"device": "a", "job-id": "j"})).unwrap();
    loop {
        let event = client.event(PATIENCE).unwrap().unwrap();
        if event.name == "BLOCK_JOB_COMPLETED" {
            assert!(event.data.get("error").is_none());
            break;
        }
    }
    until_waiting(&mut client, "a", 10);
    // Lifted limits let them pass, to the chain as it is now.
    client.execute("block_set_io_throttle", limits(&json!({"device": "a"}))).unwrap();
    receive_reads(&mut stream, 10);
    live.quit();
}

#[test]
fn a_throttle_node_that_went_with_its_image_leaves_its_name() {
    let (directory, live, mut client) = start();
    with_inline_filters(directory.path(), &mut client);
    let delete = |name: &str| json!({"node-name": name});
    // A job that has concluded lets go of the disk.
    let snapshot = json!({
        "node-name": "d", "snapshot-file": directory.path().join("overlay"), "snapshot-node-name": "o",
    });
    client.execute("blockdev-snapshot-sync", snapshot).unwrap();
    let job = json!({"job-id": "j", "device": "o", "auto-dismiss": false});
    client.execute("block-stream", job).unwrap();
    until("the job to conclude", || {
        let jobs = client.execute("query-jobs", json!({})).unwrap();
        jobs[0]["status"] == "concluded"
    });
    client.execute("blockdev-del", delete("o")).unwrap();
    // So another program may write to its image, although nobody has dismissed the job.
    let overlay = directory.path().join("overlay");
    let _ = qemu::img(args!["snapshot", "-c", "s", overlay]).ok();
    let other = directory.path().join("other");
    qemu::create(&other, "qcow2", MIB, "");
    let file = json!({"driver": "qcow2", "file": {"driver": "file", "filename": other}});
    let node =
        json!({"driver": "throttle", "node-name": "d", "throttle-group": "tg", "file": file});
    client.execute("blockdev-add", node).unwrap();
    client.execute("blockdev-del", delete("d")).unwrap();
    client.execute("job-dismiss", json!({"id": "j"})).unwrap();
    live.quit();
}

#[test]
fn a_client_that_leaves_takes_its_requests_along() {
    let (directory, live, mut client) = start();
    let stream = with_waiting_reads(directory.path(), &mut client, 10);
    drop(stream);
    until_waiting(&mut client, "a", 0);
    live.quit();
}
