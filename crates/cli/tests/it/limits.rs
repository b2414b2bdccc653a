//! `serve --throttle`.

use crate::serving::{ISOBATH, QemuIo, Served};
use isobath_qmp::client::{Address, Client};
use isobath_testkit::process::run;
use isobath_testkit::{args, qemu, until};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

fn images(names: &[&str]) -> (TempDir, Vec<PathBuf>) {
    let directory = tempfile::tempdir().unwrap();
    let images: Vec<_> = names.iter().map(|name| directory.path().join(name)).collect();
    for image in &images {
        qemu::create(image, "qcow2", 1 << 20, "");
    }
    (directory, images)
}

#[test]
fn images_have_their_limits_in_order_and_a_server_that_ends_waits_for_none() {
    let (directory, images) = images(&["a", "b", "c", "d"]);
    let qmp = directory.path().join("qmp.sock");
    let listen = format!("unix:{}", qmp.display());
    let options = [
        "--qmp",
        &listen,
        "--throttle",
        "group=g",
        "--throttle",
        "",
        "--throttle",
        "bps-total=1,iops-total=1k,iops-total-max=2k",
    ];
    let refused = run(Command::new(ISOBATH).arg("serve").args(options).args(&images));
    assert!(refused.stderr.contains("iops-total=1k: expected a whole number"), "{refused:?}");
    let mut options = options;
    options[7] = "bps-total=1,iops-total=1000,iops-total-max=2000,group=g";
    let served = Served::start(&images, &options);
    let mut client = Client::connect(&Address::Unix(qmp)).unwrap();
    let blocks = client.execute("query-block", json!({})).unwrap();
    let shown = blocks.as_array().unwrap().iter().map(|block| {
        let inserted = &block["inserted"];
        ["bps", "iops", "iops_max", "group"].map(|name| inserted[name].clone())
    });
    let limited = [json!(1), json!(1000), json!(2000), json!("g")];
    let free = [json!(0), json!(0), Value::Null, Value::Null];
    let expected = [limited.clone(), free.clone(), limited, free];
    assert!(shown.eq(expected), "{blocks}");

    // The first read passes, the others would wait for hours, whichever of the two disks they are for.
    let mut clients = ["a", "c"].map(|name| QemuIo::open("raw", served.uri(name)));
    for client in &mut clients {
        client.ok("aio_read 0 64k");
        client.ok("aio_read 64k 64k");
    }
    let waiting = |client: &mut Client| {
        let disks = client.execute("x-isobath-query-disks", json!({})).unwrap();
        let disks = disks["disks"].as_array().unwrap().clone();
        disks.iter().map(|disk| disk["waiting"].as_u64().unwrap()).sum::<u64>()
    };
    until("three requests to wait", || waiting(&mut client) == 3);
    drop(client);
    let _ = served.stop();
    for client in &mut clients {
        client.ok("aio_flush");
    }
}

#[test]
fn limits_that_cannot_hold_are_refused_at_the_start() {
    let (_directory, images) = images(&["a", "b"]);
    for (values, told) in [
        (vec!["iops=5"], "there is no limit 'iops'"),
        (vec!["bps-total=5,bps-read=5"], "'bps-total' and 'bps-read'"),
        (vec!["group=g"], "the group 'g' has no limits"),
        (vec!["iops-total=5,group=g", "iops-total=6,group=g"], "two different limits"),
        (vec!["", "", ""], "3 times for 2 images"),
        (vec!["iops-total=5", "iops-total=6,group=a"], "'a' limits of its own"),
    ] {
        let options = values.iter().flat_map(|value| ["--throttle", value]);
        let done = run(Command::new(ISOBATH).arg("serve").args(options).args(&images));
        assert_ne!(done.code(), 0, "{values:?}");
        assert!(done.stderr.contains(told), "{values:?}: {}", done.stderr);
    }
    let _ = qemu::img(args!["check", &images[0]]).ok();
}
