//! Chains go to a store and come back, and the commands say what they did.

use crate::programs::{isobath, qemu_img};
use crate::serving::{ISOBATH, Served};
use isobath_testkit::locks::until_unlocked;
use isobath_testkit::{args, qemu};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// A directory with a chain of two images, and one for a store.
struct Place {
    directory: TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap() };
        let path = place.path();
        fs::create_dir(path.join("store")).unwrap();
        fs::create_dir(path.join("out")).unwrap();
        let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "base.qcow2", "16M"]).ok();
        let overlay =
            args!["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "vm.qcow2"];
        let _ = qemu_img(path, overlay).ok();
        place.write("base.qcow2", "write -q -P 1 0 8M");
        place.write("vm.qcow2", "write -q -P 2 1M 1M");
        place
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn write(&self, image: &str, what: &str) {
        let mut command = Command::new(qemu::program("qemu-io"));
        let _ = qemu::run(command.current_dir(self.path()).args(["-c", what, image])).ok();
    }

    fn store(&self) -> String {
        format!("file://{}", self.path().join("store").display())
    }

    fn vm(&self) -> String {
        format!("{}/vm", self.store())
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        isobath(self.path(), [arguments, &["--output", "json"]].concat()).ok().json()
    }

    /// The only layer of the store with so many bytes at least.
    fn layer(&self, least: u64) -> PathBuf {
        let layers = fs::read_dir(self.path().join("store/layers")).unwrap();
        let mut layers = layers.map(|entry| entry.unwrap().path());
        layers.find(|path| fs::metadata(path).unwrap().len() >= least).unwrap()
    }
}

#[test]
fn a_chain_goes_to_a_store_and_comes_back() {
    let place = Place::new();
    let (store, vm) = (place.store(), place.vm());
    let pushed = isobath(place.path(), args!["push", "vm.qcow2", &vm]).ok().text();
    assert!(pushed.starts_with(&format!("Pushed to {vm}: 2 layers, 2 of them sent")), "{pushed}");
    let again = place.json(&["push", "vm.qcow2", &vm]);
    assert_eq!(
        (&again["layers"], &again["layers-sent"], &again["bytes-sent"]),
        (&2.into(), &0.into(), &0.into())
    );
    let pulled = place.json(&["pull", &vm, "out"]);
    assert_eq!((&pulled["image"], &pulled["layers-fetched"]), (&"out/vm.qcow2".into(), &2.into()));
    for name in ["base.qcow2", "vm.qcow2"] {
        assert!(
            fs::read(place.path().join("out").join(name)).unwrap()
                == fs::read(place.path().join(name)).unwrap()
        );
    }
    let _ = qemu_img(place.path(), args!["check", "-q", "out/vm.qcow2"]).ok();
    let _ = qemu_img(place.path(), args!["compare", "-q", "vm.qcow2", "out/vm.qcow2"]).ok();
    // Beside another name, the layer below is there already.
    let named = place.json(&["pull", &vm, "out/named.qcow2"]);
    assert_eq!((&named["image"], &named["layers-fetched"]), (&"out/named.qcow2".into(), &1.into()));
    let listed = place.json(&["remote", "ls", &store]);
    let size = |name| fs::metadata(place.path().join(name)).unwrap().len();
    let expected = serde_json::json!([{
        "name": "vm",
        "layers": 2,
        "virtual-size": 16 << 20,
        "stored-bytes": size("base.qcow2") + size("vm.qcow2"),
        "shared-bytes": 0,
    }]);
    assert_eq!(listed, expected);
    let text = isobath(place.path(), args!["remote", "ls", &store]).ok().text();
    assert!(text.lines().count() == 2 && text.contains("16 MiB"), "{text}");
    let _ = isobath(place.path(), args!["remote", "rm", &vm]).ok();
    assert_eq!(place.json(&["remote", "gc", &store])["objects-too-young"], 6);
    assert_eq!(place.json(&["remote", "gc", "-n", "--grace", "0s", &store])["objects-removed"], 6);
    assert_eq!(place.json(&["remote", "gc", "--grace", "0s", &store])["objects-removed"], 6);
    let gone = isobath(place.path(), args!["pull", &vm, "out"]).exits(1);
    assert!(gone.stderr.contains("has no chain 'vm'"), "{}", gone.report());
}

#[test]
fn verify_says_by_its_exit_code_whether_a_chain_is_whole() {
    let place = Place::new();
    let vm = place.vm();
    let _ = isobath(place.path(), args!["push", "-q", "vm.qcow2", &vm]).ok();
    let whole = isobath(place.path(), args!["remote", "verify", &vm]).ok().text();
    assert_eq!(whole, "2 layers, 6 objects: all match their digests.\n");
    let layer = place.layer(4 << 20);
    let mut bytes = fs::read(&layer).unwrap();
    bytes[5 << 20] ^= 1;
    fs::write(&layer, &bytes).unwrap();
    let _ = isobath(place.path(), args!["remote", "verify", "--quick", &vm]).ok();
    let damaged = isobath(place.path(), args!["remote", "verify", &vm]).exits(2);
    let name = layer.file_name().unwrap().to_str().unwrap();
    assert!(
        damaged.stderr.contains(name) && damaged.stderr.contains("differs at byte 5242880"),
        "{}",
        damaged.stderr
    );
    fs::remove_file(layer).unwrap();
    let missing = isobath(place.path(), args!["remote", "verify", "--quick", &vm]).exits(2);
    assert!(missing.stderr.contains("is missing"), "{}", missing.stderr);
    fs::write(place.path().join("store/manifests/vm.json"), "{}").unwrap();
    let _ = isobath(place.path(), args!["remote", "verify", &vm]).exits(2);
    let _ = isobath(place.path(), args!["remote", "verify", format!("{vm}2")]).exits(1);
}

#[test]
fn an_image_that_is_written_to_is_not_pushed_and_the_one_below_its_snapshot_is() {
    let place = Place::new();
    let image = place.path().join("vm.qcow2");
    let served = Served::start(&[&image], &[]);
    let refused = isobath(place.path(), args!["push", "vm.qcow2", place.vm()]).exits(1);
    assert!(
        refused.stderr.contains("vm.qcow2") && refused.stderr.contains("lock"),
        "{}",
        refused.stderr
    );
    assert_eq!(fs::read_dir(place.path().join("store")).unwrap().count(), 0);
    let _ = isobath(place.path(), args!["push", "base.qcow2", place.vm()]).ok();
    let _ = served.stop();
    let _ = isobath(place.path(), args!["push", "vm.qcow2", place.vm()]).ok();
}

#[test]
fn an_image_whose_server_was_killed_is_pushed_only_when_it_is_recovered() {
    let place = Place::new();
    let image = place.path().join("vm.qcow2");
    let served = Served::start(&[&image], &[]);
    let mut command = Command::new(qemu::program("qemu-io"));
    command.args(["-f", "raw"]);
    for number in 0..8 {
        command.args(["-c", &format!("write -q -P {number} {}M 64k", number + 3), "-c", "flush"]);
    }
    let _ = qemu::run(command.arg(served.uri(""))).ok();
    let _ = served.server.kill();
    until_unlocked(&image);
    let refused = isobath(place.path(), args!["push", "vm.qcow2", place.vm()]).exits(1);
    assert!(refused.stderr.contains("isobath seal"), "{}", refused.stderr);
    let _ = isobath(place.path(), args!["seal", "vm.qcow2"]).ok();
    let _ = isobath(place.path(), args!["push", "vm.qcow2", place.vm()]).ok();
    let _ = isobath(place.path(), args!["pull", place.vm(), "out"]).ok();
    let _ = qemu_img(place.path(), args!["compare", "-q", "vm.qcow2", "out/vm.qcow2"]).ok();
}

#[test]
fn images_of_other_kinds_are_refused_with_the_way_out() {
    let place = Place::new();
    let _ = qemu_img(place.path(), args!["create", "-q", "-f", "vmdk", "other.vmdk", "1M"]).ok();
    let _ = qemu_img(
        place.path(),
        args!["create", "-q", "-f", "qcow2", "-o", "data_file=d", "with.qcow2", "1M"],
    )
    .ok();
    for image in ["other.vmdk", "with.qcow2"] {
        let refused = isobath(place.path(), args!["push", image, place.vm()]).exits(1);
        assert!(
            refused.stderr.contains(image) && refused.stderr.contains("convert"),
            "{}",
            refused.stderr
        );
    }
    let _ = isobath(place.path(), args!["push", "none.qcow2", place.vm()]).exits(1);
    let password =
        isobath(place.path(), args!["push", "vm.qcow2", "s3://key:hunter2@bucket/vm"]).exits(1);
    assert!(
        !password.stderr.contains("hunter2") && password.stderr.contains("AWS_"),
        "{}",
        password.stderr
    );
}

#[test]
fn a_push_to_a_server_that_does_not_answer_ends_by_a_signal() {
    let place = Place::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let mut command = Command::new(ISOBATH);
    command.current_dir(place.path()).args(["push", "vm.qcow2", "s3://bucket/vm"]);
    let settings = [
        ("AWS_ENDPOINT_URL", &*endpoint),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "nowhere"),
    ];
    // The store is on this machine.
    for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
        command.env_remove(proxy).env_remove(proxy.to_lowercase());
    }
    let mut child = command.envs(settings).stderr(Stdio::piped()).spawn().unwrap();
    // Its first request is on the way.
    listener.set_nonblocking(true).unwrap();
    let _connection = loop {
        match listener.accept() {
            Ok(connection) => break connection,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => panic!("{error}"),
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended without a request");
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    // SAFETY: the process is a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let done = child.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(130));
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(said.contains("interrupted") && said.contains("unchanged"), "{said}");
}
