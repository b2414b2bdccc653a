//! Writable overlays above chains in stores: what is written is there, and nothing that they lead to is anything else
//! than the layers that they were made above.

use crate::programs::{isobath, qemu_img};
use crate::s3;
use crate::served_from_stores::{Place, in_bucket};
use crate::serving::{ISOBATH, QemuIo, assert_same_bytes};
use isobath_qmp::client::{Address, Client};
use isobath_remote::{Digest, Heads};
use isobath_testkit::process::{PATIENCE, Ready, Server, run};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// `isobath serve` in the directory of a place, with its sockets there.
fn command(place: &Place, images: &[&str], options: &[&str]) -> Command {
    let mut command = Command::new(ISOBATH);
    command.current_dir(place.path()).arg("serve").args(images).args(options);
    command.args(["--cache-dir", "cache", "--nbd", "unix:n", "--qmp", "unix:q"]);
    command
}

/// Serves the chain of a place with an overlay.
#[track_caller]
fn serve(place: &Place, overlay: &str, options: &[&str]) -> Server {
    let options = [&["--overlay", overlay], options].concat();
    Server::start_after_kill(
        &mut command(place, &[&place.vm()], &options),
        Ready::Line("-blockdev"),
    )
}

/// Why a server refuses to start.
#[track_caller]
fn refused(place: &Place, images: &[&str], options: &[&str]) -> String {
    run(&mut command(place, images, options)).exits(1).stderr
}

fn uri(place: &Place, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", place.path().join("n").display())
}

/// What an image's header has as the name of its backing file.
#[track_caller]
fn backing(place: &Place, image: &str) -> Option<String> {
    let info = isobath(place.path(), args!["info", "-U", "--output=json", image]).ok().json();
    info["backing-filename"].as_str().map(str::to_owned)
}

/// Carries out commands of qemu-io on the export and on a raw copy of the disk.
#[track_caller]
fn write_both(place: &Place, export: &str, copy: &Path, commands: &[&str]) {
    for target in [uri(place, export).as_str(), copy.to_str().unwrap()] {
        let mut io = QemuIo::open("raw", target);
        for command in commands {
            io.ok(command);
        }
        io.ok("flush");
    }
}

/// A raw copy of what the chain of a place holds.
fn copy_of(place: &Place) -> PathBuf {
    let copy = place.path().join("copy.raw");
    fs::copy(place.expected(), &copy).unwrap();
    copy
}

/// Whether an image has a direct-access index.
#[track_caller]
fn has_index(place: &Place, image: &str) -> bool {
    let info = isobath(place.path(), args!["info", "-U", "--output=json", image]).ok().json();
    let data = &info["format-specific"]["data"];
    assert!(data.is_object(), "{info}");
    info.to_string().contains("\"direct-access-index\"")
}

fn pinned_name(place: &Place, name: &str) -> bool {
    let digests = name.strip_prefix(&format!("{}@sha256:", place.vm()));
    digests.is_some_and(|digests| digests.split('+').all(|digest| digest.len() == 64))
}

/// A client of a place's server.
struct Qmp(Client);

impl Qmp {
    fn of(place: &Place) -> Self {
        Self(Client::connect(&Address::Unix(place.path().join("q"))).unwrap())
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        self.0.execute(command, arguments).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn refuses(&mut self, command: &str, arguments: Value, why: &str) {
        let said = self.ask(command, arguments).unwrap_err();
        assert!(said.contains(why), "{command}: {said}");
    }

    /// Runs a job, which is told to complete if it asks.
    #[track_caller]
    fn job(&mut self, command: &str, arguments: Value) {
        let mut arguments = arguments;
        arguments["job-id"] = "j".into();
        self.ask(command, arguments).unwrap();
        loop {
            let event = self.0.event(PATIENCE).unwrap().expect("the job goes on");
            match event.name.as_str() {
                "BLOCK_JOB_READY" => drop(self.ask("job-complete", json!({"id": "j"})).unwrap()),
                "BLOCK_JOB_COMPLETED" => assert!(event.data["error"].is_null(), "{:?}", event.data),
                "JOB_STATUS_CHANGE" if event.data["status"] == "null" => return,
                _ => {}
            }
        }
    }

    /// The files of the disk's layers, the active one first.
    fn layers(&mut self, disk: &str) -> Vec<String> {
        let blocks = self.ask("query-block", json!({})).unwrap();
        let block =
            blocks.as_array().unwrap().iter().find(|block| block["device"] == disk).unwrap();
        let mut image = &block["inserted"]["image"];
        let mut names = Vec::new();
        while let Some(name) = image["filename"].as_str() {
            names.push(name.to_owned());
            image = &image["backing-image"];
        }
        names
    }
}

const WRITES: [&str; 6] = [
    "write -P 1 0 64k",
    "write -P 2 100k 700",
    "write -P 3 2500k 1m",
    "write -z 4m 200k",
    "discard 5m 1m",
    "write -P 4 8388096 512",
];

#[test]
fn what_is_written_above_a_chain_in_a_store_is_as_in_a_raw_copy() {
    for (depth, options) in [(1, "cluster_size=4k"), (5, ""), (3, "extended_l2=on,cluster_size=2M")]
    {
        for sandbox in ["strict", "off"] {
            let place = Place::new(depth, options);
            let copy = copy_of(&place);
            let server = serve(&place, "top.qcow2", &["--sandbox", sandbox]);
            let layers = format!("vm: 8 MiB, {} layers, read-write", depth + 1);
            assert!(server.output().contains(&layers), "{}", server.output());
            write_both(&place, "vm", &copy, &WRITES);
            assert_same_bytes(&uri(&place, "vm"), &copy);
            let done = server.stop().ok();
            assert!(done.stderr.is_empty(), "{}", done.report());
            assert!(pinned_name(&place, &backing(&place, "top.qcow2").unwrap()));
            let _ = isobath(place.path(), ["check", "top.qcow2"]).ok();
            let server = serve(&place, "top.qcow2", &["--sandbox", sandbox]);
            assert_same_bytes(&uri(&place, "vm"), &copy);
            write_both(&place, "vm", &copy, &["write -P 9 3m 300k"]);
            assert_same_bytes(&uri(&place, "vm"), &copy);
            let done = server.stop().ok();
            assert!(done.stderr.is_empty(), "{}", done.report());
        }
    }
}

#[test]
fn a_raw_image_in_a_store_has_an_overlay() {
    let place = Place::new(1, "");
    let (path, copy) = (place.path(), copy_of(&place));
    // It looks like another image.
    let mut io = QemuIo::open("raw", copy.to_str().unwrap());
    io.ok("write -P 0x51 0 1");
    drop(io);
    fs::write(path.join("expected.raw"), fs::read(&copy).unwrap()).unwrap();
    let push = args!["push", "-q", "-f", "raw", "--overwrite", "expected.raw", &place.vm()];
    let _ = isobath(path, push).ok();
    for write in &WRITES[..2] {
        let server = serve(&place, "top.qcow2", &["--sandbox", "strict"]);
        assert!(server.output().contains("2 layers"), "{}", server.output());
        write_both(&place, "vm", &copy, &[write]);
        assert_same_bytes(&uri(&place, "vm"), &copy);
        let _ = server.stop().ok();
    }
    assert!(!qemu_img(path, args!["map", "top.qcow2"]).status.success());
}

#[test]
fn what_is_read_through_an_overlay_is_found_without_the_tables_of_the_layers() {
    let place = Place::new(12, "");
    let expected = fs::read(place.expected()).unwrap();
    let cached = || {
        let files = fs::read_dir(place.path().join("cache/layers")).unwrap();
        files.filter(|file| file.as_ref().unwrap().path().extension().unwrap() == "map").count()
    };
    // Two clusters that no layer has data of.
    let zeroes =
        |number: &usize| expected[number << 16..(number + 1) << 16].iter().all(|b| *b == 0);
    let clusters: Vec<_> = (0..128).filter(zeroes).map(|number| number << 6).collect();
    let read = |cluster| {
        let server = serve(&place, "top.qcow2", &[]);
        QemuIo::open("raw", uri(&place, "vm")).ok(&format!("read -P 0 {cluster}k 4k"));
        let _ = server.stop().ok();
        cached()
    };
    assert_eq!(read(clusters[0]), 1, "the index alone");
    fs::create_dir(place.path().join("images")).unwrap();
    push_over(&place, "12", "write -P 3 0 64k");
    assert_eq!(read(clusters[1]), 1 + 12, "there is another index now, of more layers");
}

#[test]
fn what_was_flushed_is_there_after_a_kill() {
    let place = Place::new(2, "");
    let copy = copy_of(&place);
    for (round, metadata) in ["auto", "journal", "embedded", "ordered"].iter().enumerate() {
        let server = serve(&place, "top.qcow2", &["--metadata", metadata]);
        assert_same_bytes(&uri(&place, "vm"), &copy);
        let write = format!("write -P {} {}k 150k", round + 100, 1000 * round + 7);
        write_both(&place, "vm", &copy, &[&write]);
        let _ = server.kill();
    }
    let server = serve(&place, "top.qcow2", &[]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

#[test]
fn qemu_opens_no_image_above_a_chain_in_a_store_and_no_command_reads_one() {
    let place = Place::new(2, "");
    let path = place.path();
    let _ = serve(&place, "top.qcow2", &[]).stop().ok();
    let named = backing(&place, "top.qcow2").unwrap();
    let hex = named.rsplit_once(':').unwrap().1;
    let bucket = format!("s3://bucket/vm@sha256:{hex}");
    let create = args!["create", "-q", "-u", "-f", "qcow2", "-b", &bucket, "-F", "qcow2"];
    let _ = isobath(path, [create, args!["bucket.qcow2", "8M"].to_vec()].concat()).ok();
    for (image, chain) in [("top.qcow2", place.vm()), ("bucket.qcow2", "s3://bucket/vm".into())] {
        assert!(!qemu_img(path, args!["info", "--backing-chain", image]).status.success());
        assert!(!qemu_img(path, args!["convert", "-O", "raw", image, "x.raw"]).status.success());
        assert!(!qemu_img(path, args!["map", image]).status.success());
        let mut io = Command::new(qemu::program("qemu-io"));
        let read = qemu::run(io.current_dir(path).args(["-r", "-c", "read 0 512", image]));
        assert!(!read.status.success() && !read.text().contains("read 512/512"));
        let _ = qemu_img(path, args!["info", image]).ok();
        let _ = isobath(path, ["info", image]).ok();
        let _ = isobath(path, ["check", image]).ok();
        let way_out = format!("isobath serve {chain} --overlay");
        for command in [
            &["info", "--backing-chain", image][..],
            &["map", image],
            &["convert", "-O", "raw", image, "x.raw"],
            &["push", image, "file:///tmp/never"],
            &["index", image],
            &["rebase", "-b", "", image],
            &["commit", image],
            &["create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", "above.qcow2"],
            &["fork", image, "above.qcow2"],
            &["serve", image, "--nbd", "unix:m"],
        ] {
            let said = isobath(path, command).exits(1).stderr;
            assert!(said.contains(&way_out), "{command:?}: {said}");
        }
        let untrusted = isobath(path, ["map", "--untrusted", image]).exits(1).stderr;
        assert!(untrusted.contains("an untrusted image may name only files"), "{untrusted}");
    }
    assert!(!path.join("x.raw").exists() && !path.join("above.qcow2").exists());
}

/// The header of an image names another.
#[track_caller]
fn naming(place: &Place, image: &str, below: &str, format: &str) {
    let create = args!["create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", format, image, "8M"];
    let _ = qemu_img(place.path(), create).ok();
}

#[test]
fn what_is_no_overlay_of_the_chain_is_refused_and_stays() {
    let place = Place::new(2, "");
    let (path, vm) = (place.path(), place.vm());
    let other_pin = format!("{vm}@sha256:{}", "0".repeat(64));
    let other_chain = format!("{vm}2@sha256:{}", "0".repeat(64));
    fs::write(path.join("begun"), "").unwrap();
    fs::write(path.join("text"), "no image").unwrap();
    fs::write(path.join("base.raw"), vec![7; 8 << 20]).unwrap();
    fs::create_dir(path.join("directory")).unwrap();
    let _ = run(Command::new("mkfifo").arg(path.join("fifo"))).ok();
    let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "alone", "8M"]).ok();
    naming(&place, "over-raw", "base.raw", "raw");
    naming(&place, "over-alone", "alone", "qcow2");
    naming(&place, "other-pin", &other_pin, "qcow2");
    naming(&place, "other-chain", &other_chain, "qcow2");
    naming(&place, "over-other-chain", "other-chain", "qcow2");
    naming(&place, "unpinned", &vm, "qcow2");
    naming(&place, "numbered", &format!("{vm}#0"), "qcow2");
    naming(&place, "circle", "round", "qcow2");
    naming(&place, "round", "circle", "qcow2");
    naming(&place, "export", "nbd://localhost:1/x", "raw");
    naming(&place, "missing", "nothing", "qcow2");
    for (overlay, said) in [
        ("begun", "another program is about to write it, or was interrupted"),
        ("/dev/zero", "is not a regular file"),
        ("directory", "is not a regular file"),
        ("fifo", "is not a regular file"),
        ("text", "this is not a qcow2 image"),
        ("base.raw", "this is not a qcow2 image"),
        ("alone", "the header of 'alone' names no backing file. If the disk is whole"),
        ("over-raw", "'base.raw' below it is a raw image. If the disk is whole"),
        ("over-alone", "the header of 'alone' names no backing file. If the disk is whole"),
        ("other-pin", &other_pin),
        ("other-chain", &other_chain),
        ("over-other-chain", &other_chain),
        ("unpinned", "which does not say which layers"),
        ("numbered", "which does not say which layers"),
        ("circle", "lead in a circle"),
        ("export", "which is no file"),
        ("missing", "No such file"),
        ("nbd://localhost:1/x", "must be a file"),
        (&vm, "must be a file"),
        ("/dev/fdset/1", "must be a file"),
    ] {
        let file = Some(path.join(overlay)).filter(|file| file.is_file());
        let contents = || file.as_ref().map(|file| fs::read(file).unwrap());
        let before = contents();
        for sandbox in ["strict", "off"] {
            for more in [&[][..], &["--read-only"]] {
                let options = [&["--overlay", overlay, "--sandbox", sandbox], more].concat();
                let refused = refused(&place, &[&vm], &options);
                assert!(refused.contains(said), "{overlay}, {sandbox}: {refused}");
                // Who only reads is not told to write.
                let (changes, names_layers) = (
                    refused.contains("rebase"),
                    overlay.starts_with("other") || overlay == "over-other-chain",
                );
                assert_eq!(changes, names_layers && more.is_empty(), "{overlay}: {refused}");
                let read_only = refused.contains("isobath serve --read-only");
                assert!(!read_only || !more.is_empty(), "{refused}");
            }
        }

        assert_eq!(before, contents(), "{overlay}");
    }
    let _ = serve(&place, "top", &[]).stop().ok();
    for (images, options, said) in [
        (&[&*vm][..], &["--overlay", "new", "--read-only"][..], "there is no overlay 'new'"),
        (&[&vm], &["--overlay", "top", "--untrusted"], "leave out --untrusted or --overlay"),
        (&[&vm], &["--overlay", "top", "--overlay", "x"], "--overlay is given 2 times"),
        (&["alone"], &["--overlay", "top"], "'alone', which is no chain in a store"),
        (&[&vm, "top"], &["--sandbox", "off"], "--overlay top"),
        (&[&vm, "top"], &["--sandbox", "strict"], "--overlay IMAGE"),
        (&[&vm, "top"], &["--sandbox", "off", "--overlay", "new"], "--overlay top"),
    ] {
        let refused = refused(&place, images, options);
        assert!(refused.contains(said), "{options:?}: {refused}");
    }
}

/// Pushes an image, whose layers below are in the store already.
#[track_caller]
fn push_over(place: &Place, name: &str, write: &str) {
    let path = place.path();
    let _ = isobath(path, args!["pull", "-q", &place.vm(), "images"]).ok();
    let top = fs::read_dir(path.join("images")).unwrap().count();
    let below = format!("{}.qcow2", top - 1);
    let image = format!("images/{name}.qcow2");
    let create = args!["create", "-q", "-f", "qcow2", "-b", &below, "-F", "qcow2", &image];
    let _ = qemu_img(path, create).ok();
    let mut io = Command::new(qemu::program("qemu-io"));
    let _ = qemu::run(io.current_dir(path).args(["-c", write, &image])).ok();
    let _ = isobath(path, args!["push", "-q", &image, &place.vm()]).ok();
    fs::remove_dir_all(path.join("images")).unwrap();
}

#[test]
fn a_chain_that_has_grown_is_served_without_its_later_layers() {
    let place = Place::new(3, "");
    fs::create_dir(place.path().join("images")).unwrap();
    let copy = copy_of(&place);
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    let _ = server.stop().ok();
    push_over(&place, "3", "write -P 77 0 8M");
    let server = serve(&place, "top.qcow2", &["--sandbox", "strict"]);
    assert!(server.output().contains("4 layers"), "{}", server.output());
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
    let server = serve(&place, "other.qcow2", &[]);
    assert!(server.output().contains("5 layers"), "{}", server.output());
    let _ = server.stop().ok();
    assert_ne!(backing(&place, "top.qcow2"), backing(&place, "other.qcow2"));
}

#[test]
fn a_chain_that_was_replaced_is_not_shown_through_an_overlay() {
    let place = Place::new(2, "");
    let _ = serve(&place, "top.qcow2", &[]).stop().ok();
    let before = fs::read(place.path().join("top.qcow2")).unwrap();
    let path = place.path();
    let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "new.qcow2", "8M"]).ok();
    let _ = isobath(path, args!["push", "-q", "new.qcow2", &place.vm()]).ok();
    for sandbox in ["strict", "off"] {
        let options = ["--overlay", "top.qcow2", "--sandbox", sandbox];
        let said = refused(&place, &[&place.vm()], &options);
        assert!(said.contains("the chain was replaced by another"), "{said}");
    }
    assert!(before == fs::read(path.join("top.qcow2")).unwrap());
}

/// What is between quotation marks in a message and begins like this command.
#[track_caller]
fn command_in(said: &str, command: &str) -> Vec<String> {
    let begin = format!("'isobath {command} ");
    let (_, rest) = said.split_once(&begin).unwrap_or_else(|| panic!("{said}"));
    let arguments = rest.split_once('\'').unwrap().0.split(' ').map(str::to_owned);
    [command.to_owned()].into_iter().chain(arguments).collect()
}

#[test]
fn the_command_in_an_error_leads_an_overlay_to_where_its_layers_are() {
    let place = Place::new(2, "");
    let (path, copy) = (place.path(), copy_of(&place));
    let _ = serve(&place, "below.qcow2", &[]).stop().ok();
    naming(&place, "top.qcow2", "below.qcow2", "qcow2");
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    let _ = server.stop().ok();
    fs::create_dir(path.join("images")).unwrap();
    let _ = isobath(path, args!["pull", "-q", &place.vm(), "images"]).ok();
    let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "new.qcow2", "8M"]).ok();
    let _ = isobath(path, args!["push", "-q", "new.qcow2", &place.vm()]).ok();
    let said = refused(&place, &[&place.vm()], &["--overlay", "top.qcow2"]);
    let by_loss = command_in(&said, "rebase");
    let mut elsewhere = Vec::new();
    for (number, name) in ["second", "third"].into_iter().enumerate() {
        let chain = format!("{}-{name}", place.vm());
        let _ = isobath(path, args!["push", "-q", "images/1.qcow2", &chain]).ok();
        elsewhere.push(chain.clone());
        let options = ["--overlay", "top.qcow2"];
        let said = refused(&place, &[&chain], &options);
        let rebase = match number {
            0 => by_loss.iter().map(|word| word.replace("CHAIN", &chain)).collect(),
            _ => command_in(&said, "rebase"),
        };
        let serves = command_in(&said, "serve");
        let _ = isobath(path, &rebase).ok();
        let mut command = command(&place, &[&chain], &options);
        let server = Server::start(&mut command, Ready::Line("-blockdev"));
        assert_same_bytes(&uri(&place, &format!("vm-{name}")), &copy);
        let _ = server.stop().ok();
        let before = if number == 0 { &place.vm() } else { &elsewhere[0] };
        assert_eq!(serves, ["serve", before, "--overlay", "top.qcow2"]);
    }
}

/// Changes the manifest of a place's chain.
fn change_manifest(place: &Place, change: impl FnOnce(&mut Value)) {
    let file = place.path().join("store/manifests/vm.json");
    let mut manifest = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(&file, serde_json::to_vec(&manifest).unwrap()).unwrap();
}

/// An earlier version's name for the layers had their digests alone.
#[test]
fn an_overlay_is_refused_where_other_tables_or_heads_describe_the_same_layers() {
    let place = Place::new(2, "");
    let _ = serve(&place, "top.qcow2", &[]).stop().ok();
    let manifest = place.path().join("store/manifests/vm.json");
    let before = fs::read(&manifest).unwrap();
    let refuses = |what: &str| {
        let said = refused(&place, &[&place.vm()], &["--overlay", "top.qcow2"]);
        assert!(said.contains("or its heads or tables in the store are damaged"), "{what}: {said}");
        // Whoever asks for the chain as it is gets it.
        let _ = Server::start(&mut command(&place, &[&place.vm()], &[]), Ready::Line("-blockdev"));
        fs::write(&manifest, &before).unwrap();
    };
    change_manifest(&place, |manifest| {
        let heads = place.path().join("store/heads");
        let digest = manifest["heads"]["digest"].as_str().unwrap();
        let mut bytes = fs::read(heads.join(digest)).unwrap();
        // The L1 table of the top layer, which comes before its checksums, says that nothing is allocated.
        let heads_of = |bytes: &[u8]| Heads::decode(bytes, 2).unwrap().layers().to_vec();
        let before = heads_of(&bytes);
        let end = bytes.len() - before[1].table.len();
        assert!(before[1].l1.len() == 8 && before[1].l1 != [0; 8]);
        bytes[end - 8..end].fill(0);
        let after = heads_of(&bytes);
        assert_eq!((&after[0], &after[1].l1), (&before[0], &vec![0; 8]));
        assert_eq!((&after[1].header, &after[1].table), (&before[1].header, &before[1].table));
        let digest = Digest::of(&bytes).to_string();
        fs::write(heads.join(&digest), &bytes).unwrap();
        manifest["heads"]["digest"] = digest.into();
    });
    refuses("heads");
    change_manifest(&place, |manifest| {
        let table = manifest["layers"][0]["table"].clone();
        manifest["layers"][1]["table"] = table;
    });
    refuses("a table");
    let _ = serve(&place, "top.qcow2", &[]).stop().ok();
}

/// The base in the manifest is an image whose header names another, of which the heads tell nothing.
#[test]
fn nothing_is_below_the_base_of_a_chain_whatever_its_header_names() {
    let place = place_with_decoys();
    let path = place.path();
    change_manifest(&place, |manifest| {
        let mut heads = [&b"IHDS"[..], &2_u32.to_be_bytes(), &1_u32.to_be_bytes()].concat();
        heads.resize(24 + 12, 0);
        let digest = Digest::of(&heads).to_string();
        fs::write(path.join("store/heads").join(&digest), &heads).unwrap();
        manifest["heads"] = json!({"digest": digest, "length": heads.len()});
        manifest.as_object_mut().unwrap().remove("index");
        let top = manifest["layers"].as_array_mut().unwrap().pop().unwrap();
        manifest["layers"] = json!([top]);
        let base = manifest["layers"][0].as_object_mut().unwrap();
        base.remove("backing");
        base.remove("backing_format");
    });
    for options in [&[][..], &["--overlay", "top.qcow2"]] {
        let said = refused(&place, &[&place.vm()], options);
        assert!(said.contains("another backing file than the heads or the manifest"), "{said}");
        assert!(!path.join("top.qcow2").exists());
    }
}

/// A chain whose layers name each other by absolute paths, at which there are other images now.
fn place_with_decoys() -> Place {
    let place = Place::new(1, "");
    let path = place.path();
    fs::create_dir(path.join("images")).unwrap();
    let name = |number: u32| path.join(format!("images/{number}.qcow2")).display().to_string();
    for number in 0..4 {
        let mut create = args!["create", "-q", "-f", "qcow2"].to_vec();
        let (image, below) = (name(number), name(number.wrapping_sub(1)));
        if number > 0 {
            create.extend(args!["-b", &below, "-F", "qcow2"]);
        }
        let _ = qemu_img(path, [create, args![&image, "8M"].to_vec()].concat()).ok();
        let write = format!("write -P {} {}k 1M", number + 1, number * 700);
        let mut io = Command::new(qemu::program("qemu-io"));
        let _ = qemu::run(io.args(["-c", &write, &image])).ok();
    }
    let top = name(3);
    let _ = qemu_img(path, args!["convert", "-O", "raw", &top, "expected.raw"]).ok();
    let _ = isobath(path, args!["push", "-q", &top, &place.vm()]).ok();
    for number in 0..4 {
        let decoy = name(number);
        let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", &decoy, "8M"]).ok();
        let mut io = Command::new(qemu::program("qemu-io"));
        let _ = qemu::run(io.args(["-c", "write -P 99 0 8M", &decoy])).ok();
    }
    place
}

/// An earlier version let a stream write the name that a layer in the store has for the one below it.
#[test]
fn a_stream_writes_no_name_that_leads_elsewhere() {
    let place = place_with_decoys();
    let copy = copy_of(&place);
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    let mut qmp = Qmp::of(&place);
    let layers = qmp.layers("vm");
    assert_eq!(layers.len(), 5);
    let decoy = place.path().join("images/1.qcow2").display().to_string();
    let stream = |base: &str, more: Value| {
        let mut arguments = json!({"device": "vm", "base": base});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        arguments
    };
    for named in [&decoy, "x", &layers[2], &place.vm(), &format!("{}#1", place.vm())] {
        let arguments = stream(&layers[3], json!({"backing-file": named, "job-id": "j"}));
        qmp.refuses("block-stream", arguments, "does not lead to");
    }
    // The names in the headers of the layers are known, and are not what is written.
    qmp.job("block-stream", stream(&decoy, json!({})));
    assert_eq!(qmp.layers("vm"), [&*layers[0], &*layers[3], &*layers[4]]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    assert_eq!(backing(&place, "top.qcow2").as_ref(), Some(&layers[3]));
    assert!(pinned_name(&place, &layers[3]));
    drop(qmp);
    let done = server.stop().ok();
    assert!(done.stderr.is_empty(), "{}", done.report());
    assert!(!qemu_img(place.path(), args!["map", "top.qcow2"]).status.success());

    let server = serve(&place, "top.qcow2", &["--sandbox", "strict"]);
    assert!(server.output().contains("3 layers"), "{}", server.output());
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let mut qmp = Qmp::of(&place);
    let given = stream(&layers[4], json!({"backing-file": layers[4]}));
    qmp.job("block-stream", given);
    assert_eq!(backing(&place, "top.qcow2").as_ref(), Some(&layers[4]));
    qmp.job("block-stream", json!({"device": "vm"}));
    assert_eq!(backing(&place, "top.qcow2"), None);
    drop(qmp);
    let _ = server.stop().ok();
    let compare = args!["compare", "-f", "raw", "-F", "qcow2", &copy, "top.qcow2"];
    let _ = qemu_img(place.path(), compare).ok();
    for (more, alone) in [(&[][..], ""), (&["--read-only"], "--read-only ")] {
        let options = [&["--overlay", "top.qcow2"], more].concat();
        let said = refused(&place, &[&place.vm()], &options);
        let served = format!("is served alone, with 'isobath serve {alone}top.qcow2'");
        assert!(said.contains(&served), "{said}");
        let mut alone = command(&place, &["top.qcow2"], more);
        let server = Server::start_after_kill(&mut alone, Ready::Line("-blockdev"));
        assert_same_bytes(&uri(&place, "top"), &copy);
        let _ = server.stop().ok();
    }
}

/// An earlier version believed the header of an overlay, and showed the file of a layer as a disk, or had the guest of
/// a raw disk choose what is opened.
#[test]
fn a_header_that_gives_the_layers_another_format_than_the_manifest_is_refused() {
    let place = Place::new(2, "");
    let path = place.path();
    let mut expected = fs::read(place.expected()).unwrap();
    for format in ["qcow2", "raw"] {
        if format == "raw" {
            // The guest's bytes are an image above a file of the machine.
            fs::write(path.join("secret"), vec![b's'; 8 << 20]).unwrap();
            let secret = path.join("secret").display().to_string();
            naming(&place, "disguised", &secret, "raw");
            let start = fs::read(path.join("disguised")).unwrap();
            expected[..start.len()].copy_from_slice(&start);
            fs::write(path.join("guest.raw"), &expected).unwrap();
            let push = args!["push", "-q", "-f", "raw", "--overwrite", "guest.raw", &place.vm()];
            let _ = isobath(path, push).ok();
        }
        let other = if format == "raw" { "qcow2" } else { "raw" };
        let copy = path.join("copy.raw");
        fs::write(&copy, &expected).unwrap();
        let top = format!("{format}.qcow2");
        let server = serve(&place, &top, &[]);
        write_both(&place, "vm", &copy, &WRITES[2..3]);
        let _ = server.stop().ok();
        let pinned = backing(&place, &top).unwrap();
        let rebase = |format: &str| {
            let _ = isobath(path, args!["rebase", "-u", "-F", format, "-b", &pinned, &top]).ok();
        };
        let corrects =
            format!("'isobath rebase -u -F {format} -b {pinned} {top}' corrects the header");
        rebase(other);
        let above = format!("above-{top}");
        naming(&place, &above, &top, "qcow2");
        for overlay in [&top, &above] {
            for more in [&[][..], &["--read-only"], &["--sandbox", "strict"]] {
                let options = [&["--overlay", overlay], more].concat();
                let said = refused(&place, &[&place.vm()], &options);
                assert!(said.contains(&corrects), "{overlay}: {said}");
                let values =
                    format!("has the format '{other}', but the manifest of the chain says");
                assert!(said.contains(&values) && said.contains(&format!("'{top}'")), "{said}");
            }
        }
        // Nor does a client open it.
        let server = serve(&place, "another.qcow2", &["--sandbox", "off"]);
        let mut qmp = Qmp::of(&place);
        let file = json!({"driver": "file", "filename": path.join(&top)});
        for read_only in [false, true] {
            let node = json!({
                "driver": "qcow2", "node-name": "n", "file": file, "read-only": read_only,
            });
            qmp.refuses("blockdev-add", node, "corrects the header");
        }
        drop(qmp);
        let _ = server.stop().ok();
        fs::remove_file(path.join("another.qcow2")).unwrap();
        rebase(format);
        let server = serve(&place, &above, &[]);
        assert_same_bytes(&uri(&place, "vm"), &copy);
        let _ = server.stop().ok();
        // Where the header gives none, the manifest does.
        let file = path.join(&top);
        let mut bytes = fs::read(&file).unwrap();
        let extension = bytes.windows(4).position(|word| word == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
        bytes[extension..extension + 4].copy_from_slice(b"none");
        fs::write(&file, bytes).unwrap();
        let server = serve(&place, &top, &["--sandbox", "strict"]);
        assert_same_bytes(&uri(&place, "vm"), &copy);
        let _ = server.stop().ok();
    }
}

#[test]
fn above_an_encrypted_chain_only_encrypted_overlays_are_made() {
    let place = Place::new(1, "");
    let (path, vm) = (place.path(), place.vm());
    fs::write(path.join("key"), "secret").unwrap();
    let object = "secret,id=key,file=key";
    let encrypted = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    let create = args!["create", "-q", "-f", "qcow2", "--object", object, "-o", encrypted];
    let _ = isobath(path, [create, args!["e.qcow2", "8M"].to_vec()].concat()).ok();
    let _ = isobath(path, args!["push", "-q", "--overwrite", "e.qcow2", &vm]).ok();
    let fork = args!["fork", "--cache-dir", "cache", &vm, "top.qcow2"];
    let by_fork = isobath(path, fork).exits(1).stderr;
    let options = ["--overlay", "top.qcow2", "--secret-file", "key"];
    for said in [by_fork, refused(&place, &[&vm], &options)] {
        assert!(said.contains("the chain's top layer is encrypted"), "{said}");
        assert!(!path.join("top.qcow2").exists());
        // The command in the message makes one.
        let made = command_in(&said, "create");
        let made = made.iter().map(|word| word.replace("file=FILE", "file=key"));
        let _ = isobath(path, made.collect::<Vec<_>>()).ok();
        let server = serve(&place, "top.qcow2", &["--secret-file", "key"]);
        let mut io = QemuIo::open("raw", uri(&place, "vm"));
        io.ok("write -P 0x5a 0 64k");
        drop(io);
        let _ = server.stop().ok();
        let bytes = fs::read(path.join("top.qcow2")).unwrap();
        assert!(!bytes.windows(64).any(|run| run == [0x5a; 64]));
        fs::remove_file(path.join("top.qcow2")).unwrap();
    }
}

#[test]
fn a_client_names_layers_of_the_store_for_jobs() {
    let place = place_with_decoys();
    let copy = copy_of(&place);
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    let layers = Qmp::of(&place).layers("vm");
    let ctl = |arguments: &[&str]| {
        let mut command = Command::new(ISOBATH);
        run(command.current_dir(place.path()).args(["ctl", "q"]).args(arguments))
    };
    for arguments in [["--base", &layers[4]], ["--base", &layers[1]]] {
        let said = ctl(&["commit", arguments[0], arguments[1]]).exits(1).stderr;
        assert!(said.contains("it is a layer of a chain in a store"), "{said}");
    }
    let said = ctl(&["commit", "--top", &layers[1], "--base", &layers[3]]).exits(1).stderr;
    assert!(said.contains("it is a layer of a chain in a store"), "{said}");
    let _ = ctl(&["stream", "--base", &layers[3]]).ok();
    assert_eq!(Qmp::of(&place).layers("vm"), [&*layers[0], &*layers[3], &*layers[4]]);
    assert_eq!(backing(&place, "top.qcow2").as_ref(), Some(&layers[3]));
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

/// An earlier version took the place of the disk by an image above any other layers.
#[test]
fn a_mirror_of_the_active_image_goes_on_above_the_very_same_layers() {
    let place = place_with_decoys();
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &["--sandbox", "off"]);
    write_both(&place, "vm", &copy, &WRITES);
    let mut qmp = Qmp::of(&place);
    let layers = qmp.layers("vm");
    let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "alone", "8M"]).ok();
    naming(&place, "lower", &layers[2], "qcow2");
    naming(&place, "same", &layers[1], "qcow2");
    naming(&place, "closed", &layers[1], "qcow2");
    naming(&place, "between", "same", "qcow2");
    naming(&place, "decoy", "images/3.qcow2", "qcow2");
    let add = |name: &str, backing: Option<Value>| node(&place, name, backing);
    let mirror = |name: &str| json!({"device": "vm", "target": name, "sync": "top", "job-id": "j"});
    for name in ["alone", "lower", "closed", "between", "decoy"] {
        let null = (name == "closed").then_some(Value::Null);
        let _ = qmp.ask("blockdev-add", add(name, null)).unwrap();
        let must = format!("must have the backing file '{}'", layers[1]);
        qmp.refuses("blockdev-mirror", mirror(name), &must);
        let _ = qmp.ask("blockdev-del", json!({"node-name": name})).unwrap();
    }
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = qmp.ask("blockdev-add", add("same", None)).unwrap();
    qmp.job("blockdev-mirror", mirror("same"));
    assert_same_bytes(&uri(&place, "vm"), &copy);
    write_both(&place, "vm", &copy, &["write -P 71 1m 3k"]);
    assert_eq!(qmp.layers("vm")[1..], layers[1..]);
    // Nor does a disk that is above no chain go on above one.
    let _ = qmp.ask("blockdev-add", add("alone", None)).unwrap();
    naming(&place, "more", &layers[4], "qcow2");
    let _ = qmp.ask("blockdev-add", add("more", None)).unwrap();
    let arguments = json!({"device": "alone", "target": "more", "sync": "top", "job-id": "j"});
    qmp.refuses("blockdev-mirror", arguments, "must have nothing below it");
    drop(qmp);
    let _ = server.stop().ok();
    let server = serve(&place, "same", &["--sandbox", "strict"]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

/// Nodes of images in the directory of a place.
fn node(place: &Place, name: &str, backing: Option<Value>) -> Value {
    let file = json!({"driver": "file", "filename": place.path().join(name)});
    let mut node = json!({"driver": "qcow2", "node-name": name, "file": file});
    if let Some(backing) = backing {
        node["backing"] = backing;
    }
    node
}

/// By the names in their headers they are another disk.
#[test]
fn a_mirror_goes_on_in_no_image_whose_header_leads_elsewhere() {
    let place = place_with_decoys();
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &["--sandbox", "off"]);
    write_both(&place, "vm", &copy, &WRITES);
    let mut qmp = Qmp::of(&place);
    let snapshot = |qmp: &mut Qmp, name: &str| {
        let file = json!({"device": "vm", "snapshot-file": path.join(name)});
        let _ = qmp.ask("blockdev-snapshot-sync", file).unwrap();
    };
    snapshot(&mut qmp, "upper");
    write_both(&place, "vm", &copy, &["write -P 80 3m 5k"]);
    let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "nothing", "8M"]).ok();
    naming(&place, "decoy", "images/3.qcow2", "qcow2");
    naming(&place, "same", "top.qcow2", "qcow2");
    let below = json!({"driver": "file", "filename": path.join("top.qcow2")});
    let below = json!({"driver": "qcow2", "file": below});
    let added = qmp.ask("blockdev-add", node(&place, "nothing", Some(below.clone())));
    assert!(added.unwrap_err().contains("it has no backing file"));
    let before = fs::read(path.join("decoy")).unwrap();
    for (image, backing, sync, said) in [
        ("decoy", &below, "none", "does not name the backing file"),
        ("decoy", &below, "top", "does not name the backing file"),
        ("same", &Value::Null, "none", "without the backing file that its header names"),
        ("same", &Value::Null, "top", "the target must have the backing file 'top.qcow2'"),
    ] {
        let _ = qmp.ask("blockdev-add", node(&place, image, Some(backing.clone()))).unwrap();
        let arguments = json!({"device": "vm", "target": image, "sync": sync, "job-id": "j"});
        qmp.refuses("blockdev-mirror", arguments, said);
        let _ = qmp.ask("blockdev-del", json!({"node-name": image})).unwrap();
    }
    assert!(before == fs::read(path.join("decoy")).unwrap());
    assert_same_bytes(&uri(&place, "vm"), &copy);
    // A copy of everything needs nothing below, but nothing is put above it.
    let add = |name: &str| node(&place, name, Some(below.clone()));
    let _ = qmp.ask("blockdev-add", add("decoy")).unwrap();
    qmp.job("blockdev-mirror", json!({"device": "vm", "target": "decoy", "sync": "full"}));
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let refused = json!({"device": "vm", "snapshot-file": path.join("refused")});
    qmp.refuses("blockdev-snapshot-sync", refused, "does not name the backing file");
    // Where the header leads there, it is no harm that the file was given.
    let _ = qmp.ask("blockdev-add", add("same")).unwrap();
    qmp.job("blockdev-mirror", json!({"device": "vm", "target": "same", "sync": "top"}));
    assert_same_bytes(&uri(&place, "vm"), &copy);
    snapshot(&mut qmp, "new");
    write_both(&place, "vm", &copy, &["write -P 81 2m 5k"]);
    drop(qmp);
    let _ = server.stop().ok();
    let server = serve(&place, "new", &["--sandbox", "strict"]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

/// Everything that a client gives for a file is one: layers of a store are below an overlay alone.
#[test]
fn a_client_opens_no_layer_of_the_store_by_a_name_that_pins_nothing() {
    let place = Place::new(3, "");
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &["--sandbox", "off"]);
    let mut qmp = Qmp::of(&place);
    let vm = place.vm();
    let pinned = qmp.layers("vm")[1].clone();
    naming(&place, "other", "x", "qcow2");
    for name in [&vm, &format!("{vm}#0"), &format!("{vm}#1"), &format!("{vm}#index"), &pinned] {
        let file = json!({"driver": "file", "filename": name});
        let no_file = format!("'./{name}': No such file");
        let layer = |driver: &str| json!({"driver": driver, "file": file});
        for driver in ["qcow2", "raw"] {
            let mut alone = layer(driver);
            alone["node-name"] = "n".into();
            alone["read-only"] = true.into();
            qmp.refuses("blockdev-add", alone, &no_file);
            let below = node(&place, "other", Some(layer(driver)));
            qmp.refuses("blockdev-add", below, &no_file);
        }
        let mut protocol = file.clone();
        protocol["node-name"] = "n".into();
        qmp.refuses("blockdev-add", protocol, &no_file);
        for mode in ["absolute-paths", "existing"] {
            let snapshot = json!({"device": "vm", "snapshot-file": name, "mode": mode});
            let refused = qmp.ask("blockdev-snapshot-sync", snapshot).unwrap_err();
            let why = if *name == pinned { "only read" } else { "No such file" };
            assert!(refused.contains(why), "{name}: {refused}");
        }
    }
    assert_same_bytes(&uri(&place, "vm"), &copy);
    // A file with such a name is one.
    let named = format!("{vm}2");
    let file = path.join(&named);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    naming(&place, file.to_str().unwrap(), &pinned, "qcow2");
    let below = json!({"driver": "file", "filename": named});
    let added = json!({"driver": "qcow2", "node-name": "n", "file": below});
    let _ = qmp.ask("blockdev-add", added).unwrap();
    let snapshot = json!({"device": "vm", "snapshot-file": format!("{vm}3")});
    let _ = qmp.ask("blockdev-snapshot-sync", snapshot).unwrap();
    assert!(path.join(format!("{vm}3")).is_file());
    assert_same_bytes(&uri(&place, "vm"), &copy);
    drop(qmp);
    let _ = server.stop().ok();
}

/// Paths with different writing are compared as the headers have them.
#[test]
fn an_overlay_is_told_of_another_way_to_write_its_chains_address() {
    let place = Place::new(2, "");
    let (path, copy) = (place.path(), copy_of(&place));
    let _ = serve(&place, "top.qcow2", &[]).stop().ok();
    for between in ["//", "/./"] {
        let other = format!("file://{}{between}store/vm", path.display());
        let options = ["--overlay", "top.qcow2"];
        let before = backing(&place, "top.qcow2").unwrap();
        let named = before.rsplit_once("@sha256:").unwrap().0;
        let said = refused(&place, &[&other], &options);
        assert_eq!(command_in(&said, "serve"), ["serve", named, "--overlay", "top.qcow2"]);
        let _ = isobath(path, command_in(&said, "rebase")).ok();
        let mut command = command(&place, &[&other], &options);
        let server = Server::start(&mut command, Ready::Line("-blockdev"));
        assert_same_bytes(&uri(&place, "vm"), &copy);
        let _ = server.stop().ok();
    }
}

#[test]
fn a_chain_of_an_earlier_version_has_an_overlay_once_it_was_pushed_again() {
    let place = Place::new(2, "");
    let path = place.path();
    let copy = copy_of(&place);
    fs::create_dir(path.join("again")).unwrap();
    let _ = isobath(path, args!["pull", "-q", &place.vm(), "again"]).ok();
    change_manifest(&place, |manifest| {
        let heads = path.join("store/heads");
        let bytes = fs::read(heads.join(manifest["heads"]["digest"].as_str().unwrap())).unwrap();
        let known = Heads::decode(&bytes, 2).unwrap();
        let mut first =
            [&b"IHDS"[..], &1_u32.to_be_bytes(), &2_u32.to_be_bytes(), &[0; 4]].concat();
        for part in known.layers().iter().flat_map(|head| [&head.header, &head.l1]) {
            first.extend((part.len() as u32).to_be_bytes());
        }
        for head in known.layers() {
            first.extend([&*head.header, &head.l1].concat());
        }
        let digest = Digest::of(&first).to_string();
        fs::write(heads.join(&digest), &first).unwrap();
        manifest["heads"] = json!({"digest": digest, "length": first.len()});
        manifest["version"] = 1.into();
        manifest.as_object_mut().unwrap().remove("index");
    });
    let way_out = format!("'isobath push IMAGE {}'", place.vm());
    let fork = args!["fork", "--cache-dir", "cache", &place.vm(), "top.qcow2"];
    let by_fork = isobath(path, fork).exits(1).stderr;
    for said in [by_fork, refused(&place, &[&place.vm()], &["--overlay", "top.qcow2"])] {
        assert!(said.contains("earlier version") && said.contains(&way_out), "{said}");
        assert!(!path.join("top.qcow2").exists());
    }
    let _ = isobath(path, args!["push", "-q", "again/1.qcow2", &place.vm()]).ok();
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

#[test]
fn jobs_change_no_layer_of_the_store_and_merge_those_above() {
    let place = place_with_decoys();
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    let mut qmp = Qmp::of(&place);
    let pinned = qmp.layers("vm")[1].clone();
    let file = |name: &str| path.join(name).display().to_string();
    for (name, write) in [("a.qcow2", "write -P 21 1m 90k"), ("b.qcow2", "write -P 22 6m 1m")] {
        let snapshot = json!({"device": "vm", "snapshot-file": file(name)});
        let _ = qmp.ask("blockdev-snapshot-sync", snapshot).unwrap();
        write_both(&place, "vm", &copy, &[write]);
    }
    for image in ["top.qcow2", "a.qcow2", "b.qcow2"] {
        assert!(!has_index(&place, image), "{image}");
    }
    let layers = qmp.layers("vm");
    assert_eq!((layers.len(), &layers[2..4]), (7, &["top.qcow2".to_owned(), pinned.clone()][..]));
    let nodes = qmp.ask("query-named-block-nodes", json!({})).unwrap();
    let node = |name: &str| {
        let nodes = nodes.as_array().unwrap();
        let node = nodes.iter().find(|node| node["file"] == name).unwrap();
        node["node-name"].as_str().unwrap().to_owned()
    };
    let (store, lowest) = (node(&pinned), node(layers.last().unwrap()));
    let only_read = "it is a layer of a chain in a store, which is only read";
    for (command, mut arguments) in [
        ("block-commit", json!({"device": "vm"})),
        ("block-commit", json!({"device": "vm", "base": pinned})),
        ("block-commit", json!({"device": "vm", "base-node": lowest, "top-node": store})),
        ("block-commit", json!({"device": "vm", "base-node": store, "top": file("a.qcow2")})),
        ("block-stream", json!({"device": store})),
        ("block-stream", json!({"device": store, "base-node": lowest})),
    ] {
        arguments["job-id"] = "j".into();
        qmp.refuses(command, arguments, only_read);
    }
    let sync = json!({"device": "vm", "snapshot-file": pinned});
    qmp.refuses("blockdev-snapshot-sync", sync, "only read");
    let existing = json!({"device": "vm", "snapshot-file": pinned, "mode": "existing"});
    qmp.refuses("blockdev-snapshot-sync", existing, "only read");
    let node_of_store =
        json!({"node-name": store, "snapshot-node-name": "new", "snapshot-file": file("c")});
    qmp.refuses("blockdev-snapshot-sync", node_of_store, "root");
    qmp.refuses("block_resize", json!({"node-name": store, "size": 16 << 20}), "");
    for command in ["change-backing-file", "drive-mirror", "drive-backup"] {
        qmp.refuses(command, json!({}), "not been found");
    }
    let between = json!({"device": "vm", "top": file("a.qcow2"), "base": "top.qcow2"});
    let mut elsewhere = between.clone();
    elsewhere["job-id"] = "j".into();
    for named in [file("images/1.qcow2"), pinned.clone()] {
        elsewhere["backing-file"] = named.into();
        qmp.refuses("block-commit", elsewhere.clone(), "does not lead to");
    }
    assert_same_bytes(&uri(&place, "vm"), &copy);

    // Into the middle, and then the active image into the overlay.
    qmp.job("block-commit", between);
    assert_eq!(qmp.layers("vm").len(), 6);
    qmp.job("block-commit", json!({"device": "vm", "base": "top.qcow2"}));
    assert_eq!(qmp.layers("vm")[..2], ["top.qcow2".to_owned(), pinned.clone()]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    write_both(&place, "vm", &copy, &["write -P 23 3m 5k"]);
    drop(qmp);
    let done = server.stop().ok();
    assert!(done.stderr.is_empty(), "{}", done.report());
    assert_eq!(backing(&place, "top.qcow2"), Some(pinned));
    let server = serve(&place, "top.qcow2", &["--sandbox", "strict"]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

#[test]
fn an_overlay_may_have_local_images_below_and_become_another_disk() {
    let place = place_with_decoys();
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &[]);
    let ctl = |arguments: &[&str]| isobath(path, [&["ctl", "q"], arguments].concat()).ok();
    write_both(&place, "vm", &copy, &WRITES);
    let above = path.join("above.qcow2").display().to_string();
    let _ = ctl(&["snapshot", &above]);
    write_both(&place, "vm", &copy, &["write -P 31 64k 64k"]);
    let _ = server.stop().ok();
    assert!(!qemu_img(path, args!["map", "above.qcow2"]).status.success());

    let server = serve(&place, "above.qcow2", &["--sandbox", "strict"]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
    // The image below is in use for it.
    let server = serve(&place, "above.qcow2", &["--sandbox", "off"]);
    let mut qmp = Qmp::of(&place);
    let pinned = qmp.layers("vm")[2].clone();
    let create = |name: &str, below: &str| {
        let format = args!["create", "-q", "-u", "-f", "qcow2", "-b", below, "-F", "qcow2"];
        let _ = qemu_img(path, [format, args![name, "8M"].to_vec()].concat()).ok();
    };
    let add = |name: &str, backing: Option<Value>| node(&place, name, backing);
    // Names in a header that lead elsewhere make no snapshot.
    create("astray", &pinned);
    let _ = qmp.ask("blockdev-add", add("astray", Some(Value::Null))).unwrap();
    let onto = json!({"node": "vm", "overlay": "astray"});
    qmp.refuses("blockdev-snapshot", onto, "not the active image");
    create("fits", &above);
    let _ = qmp.ask("blockdev-add", add("fits", Some(Value::Null))).unwrap();
    let _ = qmp.ask("blockdev-snapshot", json!({"node": "vm", "overlay": "fits"})).unwrap();
    write_both(&place, "vm", &copy, &["write -P 32 7m 64k"]);
    // A mirror of the upper images has the chain below it by the name that it was given.
    create("twin", &pinned);
    let _ = qmp.ask("blockdev-add", add("twin", None)).unwrap();
    qmp.job("blockdev-mirror", json!({"device": "vm", "target": "twin", "sync": "full"}));
    assert_same_bytes(&uri(&place, "vm"), &copy);
    assert_eq!(backing(&place, "twin"), Some(pinned));
    let _ = qemu_img(path, args!["create", "-q", "-f", "qcow2", "free", "8M"]).ok();
    let _ = qmp.ask("blockdev-add", add("free", None)).unwrap();
    qmp.job("blockdev-mirror", json!({"device": "vm", "target": "free", "sync": "full"}));
    assert_same_bytes(&uri(&place, "vm"), &copy);
    drop(qmp);
    let _ = server.stop().ok();
    let _ = qemu_img(path, args!["compare", "-f", "raw", "-F", "qcow2", &copy, "free"]).ok();
    let server = serve(&place, "twin", &[]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
}

#[test]
fn a_chain_in_a_store_has_a_hundred_forks() {
    let place = Place::new(4, "");
    let path = place.path();
    let fork = |more: &[&str]| {
        isobath(path, [&["fork", "--cache-dir", "cache", &place.vm()], more].concat())
    };
    let said = fork(&["-n", "100", "f{}.qcow2"]).ok().text();
    assert!(said.contains("Created 100 overlays of"), "{said}");
    let names: Vec<_> = (1..=100).map(|number| format!("f{number}.qcow2")).collect();
    let first = backing(&place, &names[0]);
    assert!(pinned_name(&place, first.as_deref().unwrap()));
    for name in &names {
        assert_eq!(fs::metadata(path.join(name)).unwrap().len(), 256 << 10);
    }
    assert_eq!(backing(&place, &names[99]), first);
    assert!(!has_index(&place, "f1.qcow2"));
    let above = args!["create", "-q", "-f", "qcow2", "-b", "other", "-F", "qcow2", "above"];
    let _ = isobath(path, args!["create", "-q", "-f", "qcow2", "other", "8M"]).ok();
    let _ = isobath(path, above).ok();
    assert!(has_index(&place, "above"), "one above a local image has an index");
    let said = fork(&["-F", "raw", "g.qcow2"]).exits(1).stderr;
    assert!(said.contains("leave out --backing-format"), "{said}");
    let said = fork(&["g.qcow2", "f7.qcow2"]).exits(1).stderr;
    assert!(said.contains("f7.qcow2") && !path.join("g.qcow2").exists(), "{said}");
    // Two of one chain, one of which only is written to, and the chain itself.
    fs::create_dir(path.join("beside")).unwrap();
    fs::rename(path.join("f2.qcow2"), path.join("beside/f2.qcow2")).unwrap();
    let (vm, copy) = (place.vm(), copy_of(&place));
    let overlays = ["--overlay", "", "--overlay", "f1.qcow2", "--overlay", "beside/f2.qcow2"];
    let options = [&overlays[..], &["--sandbox", "strict"]].concat();
    let server =
        Server::start(&mut command(&place, &[&vm, &vm, &vm], &options), Ready::Line("-blockdev"));
    write_both(&place, "vm-2", &copy, &WRITES);
    assert_same_bytes(&uri(&place, "vm-2"), &copy);
    for untouched in ["vm", "vm-3"] {
        assert_same_bytes(&uri(&place, untouched), &place.expected());
    }
    let done = server.stop().ok();
    assert!(done.stderr.is_empty(), "{}", done.report());
}

#[test]
fn an_overlay_is_read_without_being_written_to() {
    let place = Place::new(2, "");
    let copy = copy_of(&place);
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &WRITES);
    let _ = server.stop().ok();
    let before = fs::read(place.path().join("top.qcow2")).unwrap();
    let server = serve(&place, "top.qcow2", &["--read-only", "--sandbox", "strict"]);
    assert!(server.output().contains("read-only"), "{}", server.output());
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let mut io = Command::new(qemu::program("qemu-io"));
    let write = run(io.args(["-f", "raw", "-c", "write 0 512", &uri(&place, "vm")]));
    assert!(!write.status.success());
    let _ = server.stop().ok();
    assert!(before == fs::read(place.path().join("top.qcow2")).unwrap());
}

#[test]
fn an_overlay_is_served_while_the_store_is_away() {
    let place = Place::new(3, "");
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &[]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    fs::rename(path.join("store"), path.join("away")).unwrap();
    write_both(&place, "vm", &copy, &WRITES);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let _ = server.stop().ok();
    let server = serve(&place, "top.qcow2", &["--remote-timeout", "1"]);
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let done = server.stop().ok();
    assert!(done.stderr.contains("as it was when it was last read"), "{}", done.report());
    // The chain may have other layers by now.
    let vm = place.vm();
    let timeout = ["--remote-timeout", "1"];
    let by_server = refused(&place, &[&vm], &[&["--overlay", "new"], &timeout[..]].concat());
    let fork = args!["fork", "--cache-dir", "cache", "--remote-timeout", "1", &vm, "new"];
    for said in [by_server, isobath(path, fork).exits(1).stderr] {
        assert!(said.contains("no new image is made above it"), "{said}");
        assert!(!path.join("new").exists());
    }
    fs::rename(path.join("away"), path.join("store")).unwrap();
    let _ = serve(&place, "new", &[]).stop().ok();
}

#[test]
fn what_was_overwritten_needs_no_store() {
    let place = place_with_decoys();
    let (path, copy) = (place.path(), copy_of(&place));
    let server = serve(&place, "top.qcow2", &[]);
    // Of the store it needs the tables.
    write_both(&place, "vm", &copy, &["write -P 61 0 8M"]);
    fs::rename(path.join("store"), path.join("away")).unwrap();
    assert_same_bytes(&uri(&place, "vm"), &copy);
    let done = server.stop().ok();
    assert!(done.stderr.is_empty(), "{}", done.report());
}

#[test]
fn a_layer_that_is_gone_from_the_store_is_an_error_that_names_it() {
    let place = Place::new(2, "");
    let copy = copy_of(&place);
    let server = serve(&place, "top.qcow2", &[]);
    write_both(&place, "vm", &copy, &["write -P 51 0 64k"]);
    let _ = server.stop().ok();
    let layers = fs::read_dir(place.path().join("store/layers")).unwrap();
    let names: Vec<_> = layers.map(|entry| entry.unwrap().file_name()).collect();
    fs::remove_dir_all(place.path().join("store/layers")).unwrap();
    fs::create_dir(place.path().join("store/layers")).unwrap();
    fs::remove_dir_all(place.path().join("cache")).unwrap();
    fs::create_dir(place.path().join("cache")).unwrap();
    let server = serve(&place, "top.qcow2", &["--remote-timeout", "1"]);
    let mut io = QemuIo::open("raw", uri(&place, "vm"));
    let said = io.run("read 0 8M");
    assert!(said.contains("rror"), "{said}");
    drop(io);
    let done = server.stop();
    let named = names.iter().any(|name| done.stderr.contains(name.to_str().unwrap()));
    assert!(named, "{}", done.report());
}

#[test]
fn a_chain_in_a_bucket_has_an_overlay() {
    let place = Place::new(3, "");
    let (path, store) = (place.path(), bucket_of(&place, 3));
    let copy = copy_of(&place);
    for write in &WRITES[..2] {
        let options = ["--overlay", "top.qcow2", "--sandbox", "strict"];
        let mut serve = command(&place, &["s3://bucket/some/vm"], &options);
        let server = Server::start(in_bucket(&mut serve, &store), Ready::Line("-blockdev"));
        write_both(&place, "vm", &copy, &[write]);
        assert_same_bytes(&uri(&place, "vm"), &copy);
        let done = server.stop().ok();
        assert!(done.stderr.is_empty(), "{}", done.report());
    }
    let named = backing(&place, "top.qcow2").unwrap();
    assert!(named.starts_with("s3://bucket/some/vm@sha256:"), "{named}");
    assert!(!qemu_img(path, args!["map", "top.qcow2"]).status.success());
}

/// A request of qemu-io, of a few sectors or of many clusters, aligned or not.
fn random_request(rng: &mut StdRng) -> String {
    const SIZE: u64 = 8 << 20;
    let unit = 1_u64 << [9, 12, 16][rng.random_range(0..3)];
    let at = rng.random_range(0..SIZE / unit) * unit;
    let length = (rng.random_range(1..=20) * unit).min(SIZE - at);
    match rng.random_range(0..10) {
        0 => format!("write -z {at} {length}"),
        1 => format!("write -z -u {at} {length}"),
        // Parts of clusters may stay.
        2 => {
            let (at, length) = (at >> 16 << 16, rng.random_range(0..4) << 16);
            format!("discard {at} {}", length.min(SIZE - at))
        }
        3 => "flush".to_owned(),
        _ => format!("write -P {} {at} {length}", rng.random_range(1..=255)),
    }
}

/// Puts a place's chain into a bucket, from where it is served.
fn bucket_of(place: &Place, depth: usize) -> s3::Server {
    let (path, store) = (place.path(), s3::Server::start());
    fs::create_dir(path.join("pulled")).unwrap();
    let _ = isobath(path, args!["pull", "-q", &place.vm(), "pulled"]).ok();
    let mut push = Command::new(ISOBATH);
    let top = format!("pulled/{}.qcow2", depth - 1);
    push.current_dir(path).args(["push", "-q", &top, "s3://bucket/some/vm"]);
    let _ = run(in_bucket(&mut push, &store)).ok();
    fs::remove_dir_all(path.join("pulled")).unwrap();
    store
}

#[test]
fn random_requests_and_jobs_above_a_failing_store_leave_what_a_raw_copy_holds() {
    let mut rng = Seed::new().rng();
    let layouts = ["", "cluster_size=4k", "cluster_size=512", "extended_l2=on,cluster_size=64k"];
    let faults = [
        s3::Fault::Status(503),
        s3::Fault::Status(429),
        s3::Fault::Reset,
        s3::Fault::AnswerLost,
        s3::Fault::Truncated,
        s3::Fault::WrongByte,
    ];
    for _ in 0..3 {
        let depth = rng.random_range(1..=9);
        let place = Place::new(depth, layouts[rng.random_range(0..layouts.len())]);
        let (path, copy, store) = (place.path(), copy_of(&place), bucket_of(&place, depth));
        let mut top = path.join("top.qcow2").display().to_string();
        for round in 0..5 {
            // One of three requests fails; the next attempt does not.
            let failing = (0..60).map(|number| (number * 3 + 2, faults[rng.random_range(0..6)]));
            store.fail(failing.collect::<Vec<_>>());
            if rng.random_bool(0.3) {
                fs::remove_dir_all(path.join("cache")).unwrap();
            }
            let sandbox = if rng.random() { "strict" } else { "off" };
            let options = ["--overlay", &top, "--sandbox", sandbox];
            let mut serve = command(&place, &["s3://bucket/some/vm"], &options);
            let server =
                Server::start_after_kill(in_bucket(&mut serve, &store), Ready::Line("-blockdev"));
            let requests = |rng: &mut StdRng| {
                let requests: Vec<_> = (0..8).map(|_| random_request(rng)).collect();
                let requests: Vec<_> = requests.iter().map(String::as_str).collect();
                write_both(&place, "vm", &copy, &requests);
            };
            requests(&mut rng);
            // A confined server makes images only where it has some.
            let mut qmp = Qmp::of(&place);
            let layers = qmp.layers("vm");
            let is_local = |layer: &&String| !layer.starts_with("s3://");
            let local = layers.iter().filter(is_local).count();
            match rng.random_range(0..4) {
                0 => {
                    let new = path.join(format!("{round}.qcow2")).display().to_string();
                    let snapshot = json!({"device": "vm", "snapshot-file": new});
                    let _ = qmp.ask("blockdev-snapshot-sync", snapshot).unwrap();
                    top = new;
                }
                1 if local > 1 => {
                    top.clone_from(&layers[local - 1]);
                    qmp.job("block-commit", json!({"device": "vm", "base": top}));
                }
                2 => {
                    let base = &layers[rng.random_range(local..layers.len())];
                    qmp.job("block-stream", json!({"device": "vm", "base": base}));
                }
                _ => {}
            }
            requests(&mut rng);
            assert_same_bytes(&uri(&place, "vm"), &copy);
            drop(qmp);
            if rng.random() {
                let _ = server.kill();
            } else {
                let done = server.stop().ok();
                assert!(done.stderr.is_empty(), "{}", done.report());
            }
        }
    }
}
