//! Disks are served from stores: they are what was pushed, whatever the depth, and nothing else names a store.

use crate::programs::{isobath, qemu_img};
use crate::s3;
use crate::serving::{ISOBATH, Served, assert_same_bytes};
use isobath_qmp::client::{Address, Client};
use isobath_remote::Digest;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::{args, qemu};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A chain in a store, whose files are gone, and what the disk holds.
pub(crate) struct Place {
    directory: TempDir,
}

impl Place {
    /// A chain of this depth, each layer of which has something, in clusters of 64 KiB or as `options` say.
    pub(crate) fn new(depth: usize, options: &str) -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap() };
        let path = place.path();
        for name in ["store", "cache", "images"] {
            fs::create_dir(path.join(name)).unwrap();
        }
        let size = "8M";
        let mut seed = 20_261_128_u64 + depth as u64;
        let mut random = move |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for number in 0..depth {
            let name = format!("images/{number}.qcow2");
            let mut create = args!["create", "-q", "-f", "qcow2"].to_vec();
            let below = format!("{}.qcow2", number.wrapping_sub(1));
            if number > 0 {
                create.extend(args!["-b", &below, "-F", "qcow2"]);
            }
            if !options.is_empty() {
                create.extend(args!["-o", options]);
            }
            create.extend(args![&name, size]);
            // Of deep chains, this program's images are made faster.
            let _ = isobath(path, create).ok();
            let (at, length) = (random(8 << 11) * 512, (random(60) + 1) * 512);
            let what = match random(4) {
                0 => format!("write -q -z {at} {length}"),
                _ => format!("write -q -P {} {at} {length}", number % 255 + 1),
            };
            if depth < 50 || number % 50 == 0 {
                let mut command = Command::new(qemu::program("qemu-io"));
                let _ = qemu::run(command.current_dir(path).args(["-c", &what, &name])).ok();
            }
        }
        let top = format!("images/{}.qcow2", depth - 1);
        let _ = qemu_img(path, args!["convert", "-O", "raw", &top, "expected.raw"]).ok();
        let _ = isobath(path, args!["push", "-q", &top, &place.vm()]).ok();
        fs::remove_dir_all(path.join("images")).unwrap();
        place
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn vm(&self) -> String {
        format!("file://{}/store/vm", self.path().display())
    }

    fn serve(&self, options: &[&str]) -> Served {
        let cache = self.path().join("cache");
        let cache = ["--cache-dir", cache.to_str().unwrap()];
        Served::start(&[self.vm()], &[&cache, options].concat())
    }

    pub(crate) fn expected(&self) -> PathBuf {
        self.path().join("expected.raw")
    }

    /// The files of layers in the store.
    fn layers(&self) -> Vec<PathBuf> {
        let layers = fs::read_dir(self.path().join("store/layers")).unwrap();
        layers.map(|entry| entry.unwrap().path()).collect()
    }
}

#[test]
fn a_chain_that_is_served_from_a_store_is_what_was_pushed() {
    for (depth, options) in [
        (1, ""),
        (2, "cluster_size=4k"),
        (5, "cluster_size=512"),
        (12, "extended_l2=on,cluster_size=64k"),
        (30, "cluster_size=2M"),
    ] {
        let place = Place::new(depth, options);
        // The second time from the cache.
        for _ in 0..2 {
            let served = place.serve(&["--sandbox", "strict"]);
            assert_same_bytes(&served.uri("vm"), &place.expected());
            served.stop();
        }
    }
}

#[test]
fn a_deep_chain_is_served_from_a_store() {
    let place = Place::new(100, "");
    let served = place.serve(&[]);
    assert_same_bytes(&served.uri("vm"), &place.expected());
    served.stop();
}

#[test]
fn a_disk_in_a_store_is_read_only() {
    let place = Place::new(2, "");
    let served = place.serve(&[]);
    let shown = served.server.output();
    assert!(shown.contains("vm: 8 MiB, 2 layers, read-only"), "{shown}");
    let uri = served.uri("vm");
    let write =
        run(Command::new(qemu::program("qemu-io")).args(["-f", "raw", "-c", "write 0 512", &uri]));
    assert!(!write.status.success());
    assert_same_bytes(&uri, &place.expected());
    served.stop();
}

#[test]
fn a_damaged_layer_is_an_error_and_never_other_data() {
    let place = Place::new(3, "");
    for layer in place.layers() {
        let mut bytes = fs::read(&layer).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&layer, bytes).unwrap();
    }
    let served = place.serve(&[]);
    let uri = served.uri("vm");
    let copy = place.path().join("copy.raw");
    let converted =
        run(Command::new(qemu::program("qemu-img"))
            .args(args!["convert", "-O", "raw", &uri, &copy]));
    if converted.status.success() {
        assert!(fs::read(&copy).unwrap() == fs::read(place.expected()).unwrap());
    }
    let done = served.server.stop();
    assert!(!done.stderr.contains("panicked"), "{}", done.report());
}

#[test]
fn what_is_cached_is_served_while_the_store_is_away() {
    let place = Place::new(4, "");
    let served = place.serve(&[]);
    assert_same_bytes(&served.uri("vm"), &place.expected());
    served.stop();
    fs::rename(place.path().join("store"), place.path().join("away")).unwrap();
    let served = place.serve(&[]);
    assert_same_bytes(&served.uri("vm"), &place.expected());
    let done = served.server.stop().ok();
    assert!(done.stderr.contains("as it was when it was last read"), "{}", done.report());
}

#[test]
fn an_image_that_names_a_store_is_refused() {
    let place = Place::new(2, "");
    let path = place.path();
    for name in [place.vm(), "s3://bucket/vm".to_owned(), format!("{}#0", place.vm())] {
        let _ = qemu_img(
            path,
            args!["create", "-q", "-u", "-f", "qcow2", "-b", &name, "-F", "qcow2", "x.qcow2", "8M"],
        )
        .ok();
        for command in [&["info", "--backing-chain", "x.qcow2"][..], &["map", "x.qcow2"]] {
            let refused = isobath(path, command).exits(1);
            assert!(!refused.stderr.contains("panicked"), "{}", refused.report());
        }
        let mut command = Command::new(ISOBATH);
        command.current_dir(path).args(["serve", "x.qcow2", "--nbd", "unix:n"]);
        let refused = run(&mut command);
        assert!(!refused.status.success(), "{name}");
        let also = place.vm();
        command.args([&also, "--cache-dir", "cache"]);
        assert!(!run(&mut command).status.success(), "{name}, beside the chain itself");
    }
    assert!(fs::read_dir(path.join("cache")).unwrap().count() < 10);
}

#[test]
fn what_is_not_in_a_store_is_said_with_the_way_out() {
    let place = Place::new(1, "");
    let path = place.path();
    let serve = |name: &str, more: &[&str]| {
        let mut command = Command::new(ISOBATH);
        command.current_dir(path).args(["serve", name, "--nbd", "unix:n", "--cache-dir", "cache"]);
        run(command.args(more)).exits(1).stderr
    };
    let other = format!("{}2", place.vm());
    let said = serve(&other, &[]);
    assert!(said.contains("has no chain 'vm2'"), "{said}");
    for more in [["--format", "raw"], ["--cache", "none"], ["--data-file", "x"]] {
        let said = serve(&place.vm(), &more);
        assert!(said.contains("leave out"), "{said}");
    }
}

#[test]
fn a_confined_server_reads_the_store_and_writes_to_the_cache_alone() {
    let place = Place::new(2, "");
    let mut command = Command::new(ISOBATH);
    command.current_dir(place.path()).args(["serve", &place.vm(), "--nbd", "unix:n"]);
    command.args(["--cache-dir", "cache", "--sandbox", "strict", "--qmp", "unix:q"]);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    let uri = format!("nbd+unix:///vm?socket={}", place.path().join("n").display());
    assert_same_bytes(&uri, &place.expected());
    let done = server.stop().ok();
    assert!(done.stderr.is_empty(), "{}", done.report());
}

#[test]
fn no_request_over_qmp_writes_the_name_of_a_layer_in_a_store_into_an_image() {
    let place = Place::new(3, "");
    let path = place.path();
    let socket = path.join("q");
    let qmp = format!("unix:{}", socket.display());
    let base = format!("{}#0", place.vm());
    for (file, below) in [("over-chain.qcow2", &place.vm()), ("over-layer.qcow2", &base)] {
        let create =
            args!["create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", "qcow2", file, "8M"];
        let _ = qemu_img(path, create).ok();
    }
    let served = place.serve(&["--qmp", &qmp, "--sandbox", "off"]);
    let ask = |command: &str, arguments: &Value| {
        let mut client = Client::connect(&Address::Unix(socket.clone())).unwrap();
        client.execute(command, arguments.clone()).map_err(|error| error.to_string())
    };
    let new = path.join("new.qcow2");
    let job = |more: Value| {
        let mut arguments = json!({"device": "vm", "job-id": "j"});
        let more = more.as_object().unwrap().clone();
        arguments.as_object_mut().unwrap().extend(more);
        arguments
    };
    for (command, arguments) in [
        ("blockdev-snapshot-sync", json!({"device": "vm", "snapshot-file": new})),
        ("block-stream", job(json!({}))),
        ("block-stream", job(json!({"base": base}))),
        ("block-commit", job(json!({}))),
        ("block-commit", job(json!({"base": base}))),
    ] {
        let said = ask(command, &arguments).unwrap_err();
        assert!(said.contains("read-only"), "{command} {arguments}: {said}");
    }
    assert!(!new.exists());
    let open = |file: &str, node: &str, read_only: bool| {
        let file = json!({"driver": "file", "filename": file});
        json!({"driver": "qcow2", "node-name": node, "read-only": read_only, "file": file})
    };
    for name in ["over-chain.qcow2", "over-layer.qcow2"] {
        let file = path.join(name);
        for read_only in [false, true] {
            ask("blockdev-add", &open(file.to_str().unwrap(), "over", read_only)).unwrap_err();
        }
    }
    // The driver is that of files.
    for name in [place.vm(), base] {
        let said = ask("blockdev-add", &open(&name, "chain", true)).unwrap_err();
        assert!(said.contains(&format!("'./{name}': No such file")), "{said}");
    }
    assert_same_bytes(&served.uri("vm"), &place.expected());
    served.stop();
}

#[test]
fn no_layer_of_a_chain_in_a_store_is_given_as_a_file() {
    let place = Place::new(2, "");
    let path = place.path();
    let create =
        args!["create", "-q", "-u", "-f", "qcow2", "-b", "x", "-F", "qcow2", "top.qcow2", "8M"];
    let _ = qemu_img(path, create).ok();
    for option in ["--backing-file", "--data-file"] {
        for given in [place.vm(), format!("{}#0", place.vm()), "s3://bucket/vm".to_owned()] {
            let mut command = Command::new(ISOBATH);
            command.current_dir(path).args(["serve", &place.vm(), "top.qcow2", "--nbd", "unix:n"]);
            command.args(["--cache-dir", "cache", option, "", option, &given]);
            let refused = run(&mut command).exits(1);
            assert!(refused.stderr.contains("which is in a store"), "{}", refused.report());
        }
    }
}

#[test]
fn a_file_with_the_name_of_a_chain_is_in_nobodys_way() {
    let place = Place::new(2, "");
    fs::write(place.path().join("store/vm"), "no chain").unwrap();
    fs::write(place.path().join("store/image"), "no chain").unwrap();
    let served = place.serve(&[]);
    assert_same_bytes(&served.uri("vm"), &place.expected());
    served.stop();
    let mut command = Command::new(ISOBATH);
    let image = format!("file://{}/store/image", place.path().display());
    command.current_dir(place.path()).args(["serve", &image, "--nbd", "unix:n"]);
    let refused = run(command.args(["--cache-dir", "cache"])).exits(1).stderr;
    assert!(refused.contains("has no chain 'image'"), "{refused}");
    assert!(refused.contains("a file is named by its path"), "{refused}");
}

/// A manifest of a chain of one layer whose heads have not its checksums; the heads are put into the store.
fn without_tables(place: &Path, manifest: &[u8]) -> Vec<u8> {
    let mut manifest: Value = serde_json::from_slice(manifest).unwrap();
    let heads = place.join("store/heads");
    let mut bytes = fs::read(heads.join(manifest["heads"]["digest"].as_str().unwrap())).unwrap();
    // The length of the layer's table is the third word of its record, and the table is at the end.
    let table = u32::from_be_bytes(bytes[32..36].try_into().unwrap());
    bytes[32..36].fill(0);
    bytes.truncate(bytes.len() - table as usize);
    let changed = place.join("changed");
    fs::write(&changed, &bytes).unwrap();
    let sum = run(Command::new("sha256sum").arg(&changed)).ok().text();
    let digest = sum.split(' ').next().unwrap();
    fs::rename(&changed, heads.join(digest)).unwrap();
    manifest["heads"] = json!({ "digest": digest, "length": bytes.len() });
    serde_json::to_vec(&manifest).unwrap()
}

#[test]
fn what_the_tables_of_a_chain_may_take_is_reserved() {
    let place = Place::new(1, "");
    let manifest = place.path().join("store/manifests/vm.json");
    let written = without_tables(place.path(), &fs::read(&manifest).unwrap());
    for (length, said) in [(4_u64 << 40, "the checksums of its layers"), (17 << 40, "at most")] {
        let mut changed: Value = serde_json::from_slice(&written).unwrap();
        changed["layers"][0]["length"] = length.into();
        fs::write(&manifest, serde_json::to_vec(&changed).unwrap()).unwrap();
        let mut command = Command::new(ISOBATH);
        command.current_dir(place.path()).args(["serve", &place.vm(), "--nbd", "unix:n"]);
        command.args(["--cache-dir", "cache", "--memory-limit", "300M"]);
        let refused = run(&mut command).exits(1).stderr;
        assert!(refused.contains(said), "{refused}");
    }
}

/// The environment in which a bucket of this server is used.
pub(crate) fn in_bucket<'c>(command: &'c mut Command, server: &s3::Server) -> &'c mut Command {
    command
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "secret")
        .env("AWS_REGION", "nowhere")
        .env("AWS_ENDPOINT_URL", &server.endpoint)
        .env("AWS_ALLOW_HTTP", "true")
}

#[test]
fn the_first_read_of_a_deep_chain_asks_for_what_it_needs_and_no_more() {
    let (place, store) = (Place::new(40, ""), s3::Server::start());
    let _ = isobath(place.path(), args!["pull", "-q", &place.vm(), "."]).ok();
    let mut push = Command::new(ISOBATH);
    push.current_dir(place.path()).args(["push", "-q", "39.qcow2", "s3://bucket/some/vm"]);
    let _ = run(in_bucket(&mut push, &store)).ok();
    let expected = fs::read(place.expected()).unwrap();
    for at in (0..expected.len()).step_by(1 << 20) {
        store.fail(Vec::new());
        let cache = place.path().join(format!("cache-{at}"));
        let mut dd = Command::new(ISOBATH);
        dd.current_dir(place.path()).args(["dd", "-O", "raw", "bs=4096", "count=1"]);
        dd.args([&format!("skip={}", at / 4096), "if=s3://bucket/some/vm", "of=part"]);
        let _ = run(in_bucket(dd.args(["--cache-dir".as_ref(), cache.as_os_str()]), &store)).ok();
        assert!(fs::read(place.path().join("part")).unwrap() == expected[at..at + 4096], "{at}");
        // The manifest, the heads, the index, and the layer that has it, if any has.
        let requests = store.requests();
        let kinds = ["manifests/", "heads/", "indexes/", "layers/"];
        let of = |kind: &str| requests.iter().filter(|one| one.contains(kind)).count();
        assert_eq!(
            kinds[..3].iter().map(|kind| of(kind)).collect::<Vec<_>>(),
            [1, 1, 1],
            "{requests:?}"
        );
        assert!(of("layers/") < 2 && requests.len() == 3 + of("layers/"), "{requests:?}");
        fs::remove_file(place.path().join("part")).unwrap();
    }
}

#[test]
fn a_chain_whose_index_is_damaged_or_gone_is_read_by_its_layers_tables() {
    let place = Place::new(5, "");
    let indexes = place.path().join("store/indexes");
    let index = fs::read_dir(indexes).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&index).unwrap();
    bytes[20] ^= 1;
    for wrong in [Some(bytes), None] {
        match wrong {
            Some(bytes) => fs::write(&index, bytes).unwrap(),
            None => fs::remove_file(&index).unwrap(),
        }
        let served = place.serve(&[]);
        assert_same_bytes(&served.uri("vm"), &place.expected());
        let done = served.server.stop().ok();
        assert!(
            done.stderr.contains("index") && done.stderr.contains("the layers' own tables"),
            "{}",
            done.report()
        );
        fs::remove_dir_all(place.path().join("cache")).unwrap();
    }
}

#[test]
fn an_index_in_a_store_is_compared_with_the_tables_of_the_layers() {
    const RECORDS: usize = 24 + 5 * 12;
    let place = Place::new(5, "");
    let (path, vm, other) = (place.path(), place.vm(), format!("{}2", place.vm()));
    let index =
        |more: &[&str]| isobath(path, [&["index", "--cache-dir", "cache", &vm], more].concat());
    let verify = || index(&["--verify"]);
    assert_eq!(verify().ok().text(), "The index matches the layers.\n");
    assert!(index(&[]).exits(1).stderr.contains("'isobath push' makes"));
    assert!(index(&["--drop"]).exits(1).stderr.contains("'isobath push' makes"));
    // The index of another disk that has as many layers.
    fs::create_dir(path.join("images")).unwrap();
    let _ = isobath(path, args!["pull", "-q", &vm, "images"]).ok();
    let mut write = Command::new(qemu::program("qemu-io"));
    let write = write.current_dir(path).args(["-c", "write -P 3 0 8M", "images/4.qcow2"]);
    let _ = qemu::run(write).ok();
    let _ = isobath(path, args!["push", "-q", "images/4.qcow2", &other]).ok();
    let manifest = |name: &str| -> Value {
        let bytes = fs::read(path.join(format!("store/manifests/{name}.json"))).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    };
    let heads = |manifest: &Value| {
        let digest = manifest["heads"]["digest"].as_str().unwrap();
        fs::read(path.join("store/heads").join(digest)).unwrap()
    };
    let (right, others) = (manifest("vm"), manifest("vm2"));
    let (own, from) = (heads(&right), heads(&others));
    let end = |heads: &[u8]| {
        let word = |at: usize| u32::from_be_bytes(heads[at..at + 4].try_into().unwrap()) as usize;
        RECORDS + word(12) + word(16)
    };
    let heads = [
        &own[..12],
        &from[12..24],
        &own[24..RECORDS],
        &from[RECORDS..end(&from)],
        &own[end(&own)..],
    ]
    .concat();
    let file = path.join("store/manifests/vm.json");
    let put = |heads: &[u8], index: &Value| {
        let digest = Digest::of(heads).to_string();
        fs::write(path.join("store/heads").join(&digest), heads).unwrap();
        let mut manifest = right.clone();
        manifest["heads"] = json!({"digest": digest, "length": heads.len()});
        manifest["index"] = index.clone();
        fs::write(&file, manifest.to_string()).unwrap();
    };
    put(&heads, &others["index"]);
    let found = verify().exits(2);
    assert_eq!(found.text(), "differs at 0 (67108864 bytes)\n");
    assert!(found.stderr.contains("push the chain again"), "{}", found.stderr);
    let mut no_root = own.clone();
    no_root[RECORDS] ^= 1;
    put(&no_root, &right["index"]);
    let found = verify().exits(2);
    assert!(found.stderr.contains("is damaged; push the chain again"), "{}", found.stderr);
    // One that is damaged in the store.
    fs::write(&file, right.to_string()).unwrap();
    let object = path.join("store/indexes").join(right["index"]["digest"].as_str().unwrap());
    let mut bytes = fs::read(&object).unwrap();
    bytes[20] ^= 1;
    fs::write(&object, bytes).unwrap();
    fs::remove_dir_all(path.join("cache")).unwrap();
    assert_eq!(verify().exits(2).text(), "damaged at 0 (67108864 bytes)\n");
    let mut without = right.clone();
    without.as_object_mut().unwrap().remove("index");
    fs::write(&file, without.to_string()).unwrap();
    assert!(verify().exits(1).stderr.contains("another index than its manifest"));
    // None at all.
    let word = |at: usize| u32::from_be_bytes(own[at..at + 4].try_into().unwrap()) as usize;
    let after = RECORDS + word(12) + word(16);
    let none = [&own[..12], &[0; 8], &own[20..RECORDS], &own[after..]].concat();
    put(&none, &Value::Null);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    manifest.as_object_mut().unwrap().remove("index");
    fs::write(&file, manifest.to_string()).unwrap();
    assert!(verify().exits(1).stderr.contains("has no index"));
}

#[test]
fn a_confined_server_reads_a_bucket_and_bears_its_failures() {
    let (place, store) = (Place::new(6, ""), s3::Server::start());
    let _ = isobath(place.path(), args!["pull", "-q", &place.vm(), "."]).ok();
    let mut push = Command::new(ISOBATH);
    push.current_dir(place.path()).args(["push", "-q", "5.qcow2", "s3://bucket/some/vm"]);
    let _ = run(in_bucket(&mut push, &store)).ok();
    for number in 0..6 {
        fs::remove_file(place.path().join(format!("{number}.qcow2"))).unwrap();
    }
    let faults = [
        s3::Fault::Status(503),
        s3::Fault::Reset,
        s3::Fault::Truncated,
        s3::Fault::WrongByte,
        s3::Fault::Status(429),
    ];
    for (round, cache) in ["first", "second", "second"].into_iter().enumerate() {
        // Setting them begins to count anew. Requests that fail are followed by ones that do not.
        let failing = (0..40).map(|number| (4 + number * 3, faults[number % faults.len()]));
        store.fail(if round == 2 { Vec::new() } else { failing.collect() });
        let mut serve = Command::new(ISOBATH);
        serve.current_dir(place.path()).args(["serve", "s3://bucket/some/vm", "--nbd", "unix:n"]);
        serve.args(["--cache-dir", cache, "--sandbox", "strict"]);
        let server = Server::start(in_bucket(&mut serve, &store), Ready::Line("-blockdev"));
        let uri = format!("nbd+unix:///vm?socket={}", place.path().join("n").display());
        assert_same_bytes(&uri, &place.expected());
        let done = server.stop().ok();
        assert!(done.stderr.is_empty(), "{}", done.report());
    }
    let requests = store.requests();
    assert_eq!(requests.len(), 1, "only the manifest: {requests:?}");
}
