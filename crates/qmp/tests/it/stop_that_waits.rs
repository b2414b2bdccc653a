//! A `stop` that waits for a request.

use crate::live::Live;
use isobath_testkit::{qemu, until};
use serde_json::json;
use std::thread;

#[test]
fn the_operator_can_take_it_back_and_the_server_can_end() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    qemu::create(&image, "qcow2", 1 << 20, "");
    let live = Live::start(directory.path(), &[("disk", &image)]);
    let disk = live.disk();
    let request = disk.pausing().enter().unwrap();
    let (mut first, mut other) = (live.client(), live.client());
    let stopped = thread::spawn(move || {
        let done = first.execute("stop", json!({}));
        (first, done)
    });
    until("the stop to wait", || disk.pausing().is_stopped());
    other.execute("cont", json!({})).unwrap();
    let (mut first, done) = stopped.join().unwrap();
    done.unwrap();
    assert!(!disk.pausing().is_stopped());

    let stopped = thread::spawn(move || first.execute("stop", json!({})));
    until("the stop to wait", || disk.pausing().is_stopped());
    other.execute("quit", json!({})).unwrap();
    // It may have been answered before the server ended.
    drop(stopped.join().unwrap());
    drop(other);
    live.ended();
    drop(request);
}
