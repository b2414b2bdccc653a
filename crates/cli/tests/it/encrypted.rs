//! Encrypted images, by both programs: made, opened, changed, copied, served.

use crate::live::{DEVICE, ISOBATH, Live};
use crate::programs::{isobath, qemu_img};
use isobath_testkit::nbd::Nbd;
use isobath_testkit::process::{Finished, Ready, Server, run};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::json;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const SECRET: &str = "secret,id=s,file=key";
const NEW: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";

fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("key"), "correct horse\n").unwrap();
    fs::write(directory.path().join("other"), "battery staple").unwrap();
    fs::write(directory.path().join("wrong"), "wrong").unwrap();
    directory
}

/// The options that name an image with the secret `s`.
fn named(image: &str) -> String {
    format!("driver=qcow2,encrypt.key-secret=s,file.filename={image}")
}

/// Makes an encrypted image, by one of the programs.
fn make(directory: &Path, ours: bool, image: &str, more: &str, size: &str) {
    let options = format!("{NEW}{more}");
    let made = args!["create", "-q", "--object", SECRET, "-f", "qcow2", "-o", options, image, size];
    if ours {
        let _ = isobath(directory, made).ok();
    } else {
        let _ = qemu_img(directory, made).ok();
    }
}

/// Runs commands of qemu-io on an encrypted image.
fn io(directory: &Path, ours: bool, image: &str, commands: &[String]) -> Finished {
    let mut all: Vec<OsString> = args!["--object", SECRET, "--image-opts"];
    for command in commands {
        all.extend(args!["-c", command]);
    }
    all.push(named(image).into());
    if ours {
        let mut with = args!["io"];
        with.extend(all);
        return isobath(directory, with);
    }
    run(Command::new(qemu::program("qemu-io")).current_dir(directory).args(all))
}

/// The disk in an encrypted image, as each of the programs reads it.
#[track_caller]
fn read(directory: &Path, image: &str) -> Vec<u8> {
    let convert = |to: &str| {
        args!["convert", "-q", "--object", SECRET, "--image-opts", named(image), "-O", "raw", to]
    };
    let _ = isobath(directory, convert("ours.raw")).ok();
    let _ = qemu_img(directory, convert("theirs.raw")).ok();
    let [ours, theirs] =
        ["ours.raw", "theirs.raw"].map(|name| fs::read(directory.join(name)).unwrap());
    assert!(ours == theirs, "{image} is read differently");
    let _ =
        qemu_img(directory, args!["check", "-q", "--object", SECRET, "--image-opts", named(image)])
            .ok();
    // The structure can be checked without the secret.
    let _ = isobath(directory, args!["check", "-q", image]).ok();
    ours
}

fn random_writes(rng: &mut StdRng, size: u64) -> Vec<String> {
    (0..rng.random_range(1..8))
        .map(|_| {
            let at = rng.random_range(0..size);
            let length = rng.random_range(1..=(size - at).min(200 << 10));
            match rng.random_range(0..8) {
                0 => format!("write -z {at} {length}"),
                1 => format!("write -z -u {at} {length}"),
                2 => format!("discard {} 65536", at.min(size - 65536) / 65536 * 65536),
                _ => format!("write -P {} {at} {length}", rng.random_range(1..=255)),
            }
        })
        .collect()
}

#[test]
fn both_programs_use_one_image_in_turn() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for (number, more) in [
        "",
        ",cluster_size=4096,refcount_bits=1",
        ",extended_l2=on",
        ",compat=0.10",
        ",preallocation=metadata",
        ",preallocation=full",
        ",data_file=data",
        ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
    ]
    .into_iter()
    .enumerate()
    {
        let directory = directory();
        let path = directory.path();
        let size = 3 << 20;
        // QEMU takes seconds for one.
        let ours = ![3, 7].contains(&number);
        println!("seed {} {more}, made by us: {ours}", seed.value());
        make(path, ours, "disk", more, "3M");
        let mut model = vec![0; size];
        assert!(read(path, "disk") == model, "a new disk is zeroed: {more}");
        for step in 0..4 {
            let commands = random_writes(&mut rng, size as u64);
            let done = io(path, step % 2 == 0, "disk", &commands).ok();
            assert!(!done.text().contains("failed"), "{}", done.report());
            for command in &commands {
                let words: Vec<&str> = command.split_whitespace().collect();
                let number = |word: &str| word.parse::<usize>().unwrap();
                let byte = if words[1] == "-P" { number(words[2]) as u8 } else { 0 };
                let [at, length] = [words[words.len() - 2], words[words.len() - 1]].map(number);
                // A discard hides nothing in version 2, where nothing is below, either.
                model[at..at + length].fill(byte);
            }
            assert!(read(path, "disk") == model, "{more}, after {commands:?}");
        }
    }
}

#[test]
fn the_secret_is_needed_and_checked() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "1M");
    let refused = |arguments: Vec<OsString>, reason: &str| {
        let ours = isobath(path, arguments.clone()).exits(1);
        assert!(ours.stderr.contains(reason), "{}", ours.report());
        let theirs = qemu_img(path, arguments);
        assert!(theirs.stderr.contains(reason), "{}", theirs.report());
    };
    let required = "Parameter 'encrypt.key-secret' is required for cipher";
    refused(args!["convert", "-O", "raw", "disk", "out"], required);
    refused(
        args![
            "convert",
            "-O",
            "raw",
            "--object",
            "secret,id=s,file=wrong",
            "--image-opts",
            named("disk"),
            "out"
        ],
        "Invalid password, cannot unlock any keyslot",
    );
    refused(
        args!["convert", "-O", "raw", "--image-opts", named("disk"), "out"],
        "No secret with id 's'",
    );
    refused(args!["create", "-f", "qcow2", "-o", "encrypt.format=luks", "x", "1M"], required);
    refused(
        args!["create", "-f", "qcow2", "-o", "encrypt.key-secret=s", "x", "1M"],
        "Parameter 'encrypt.format' is missing",
    );
    refused(
        args!["convert", "-c", "-O", "qcow2", "--object", SECRET, "-o", NEW, "key", "x"],
        "Compression and encryption not supported at the same time",
    );
    // Where every user of the machine could read it.
    let shown = isobath(
        path,
        args!["create", "-f", "qcow2", "--object", "secret,id=s,data=abc", "-o", NEW, "x", "1M"],
    )
    .exits(1);
    assert!(shown.stderr.contains("on the command line"), "{}", shown.report());
    assert!(!path.join("x").exists());
    // Ours is simpler.
    let _ =
        isobath(path, args!["convert", "-O", "raw", "--secret-file", "key", "disk", "out"]).ok();
}

#[test]
fn information_is_qemus() {
    let directory = directory();
    let path = directory.path();
    for ours in [true, false] {
        let more = if ours {
            ""
        } else {
            ",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256"
        };
        make(path, ours, "disk", more, "1M");
        for format in ["human", "json"] {
            let info = args!["info", "--output", format, "disk"];
            let text =
                |run: fn(&Path, Vec<OsString>) -> Finished| run(path, info.clone()).ok().text();
            assert_eq!(
                text(|path, info| isobath(path, info)),
                text(|path, info| qemu_img(path, info))
            );
        }
        let _ = fs::remove_file(path.join("disk"));
    }
    let size = ["--size", "1G"];
    let measure = args!["measure", "--output=json", "--object", SECRET, "-O", "qcow2", "-o", NEW];
    let measure = [measure, size.map(OsString::from).to_vec()].concat();
    let ours = isobath(path, measure.clone()).ok().json();
    assert_eq!(ours, qemu_img(path, measure).ok().json());
    // The line that scripts may read.
    let create = |run: fn(&Path, Vec<OsString>) -> Finished, name: &str| {
        let options = format!("{NEW},lazy_refcounts=on");
        run(path, args!["create", "--object", SECRET, "-f", "qcow2", "-o", options, name, "1M"])
            .ok()
    };
    let ours = create(|path, all| isobath(path, all), "a").text();
    let theirs = create(|path, all| qemu_img(path, all), "b").text();
    assert_eq!(ours.replace("'a'", "'b'"), theirs);
}

#[test]
fn information_needs_no_secret_and_names_it() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "1M");
    let whole = args!["create", "-q", "-f", "luks", "--object", SECRET];
    let options = args!["-o", "key-secret=s,iter-time=10", "whole", "1M"];
    let _ = isobath(path, [whole, options].concat()).ok();
    for image in [
        "driver=qcow2,encrypt.key-secret=s,file.filename=disk",
        "encrypt.format=luks,encrypt.key-secret=none,file.driver=file,file.filename=disk",
        "driver=luks,key-secret=s,file.filename=whole",
    ] {
        for format in ["human", "json"] {
            let info = args!["info", "--image-opts", "--output", format, image];
            let theirs = qemu_img(path, info.clone()).ok().text();
            assert!(theirs.contains("key-secret"), "{theirs}");
            assert_eq!(isobath(path, info).ok().text(), theirs, "{image}");
        }
    }
    // Who reads the disk needs it.
    let map = args!["map", "--image-opts", "driver=qcow2,encrypt.key-secret=s,file.filename=disk"];
    assert!(isobath(path, map).exits(1).stderr.contains("No secret with id 's'"));
}

#[test]
fn chains_are_committed_rebased_and_copied() {
    let directory = directory();
    let path = directory.path();
    let seed = Seed::new();
    let mut rng = seed.rng();
    println!("seed {}", seed.value());
    let size = 2 << 20;
    make(path, true, "base", "", "2M");
    let _ = io(path, true, "base", &random_writes(&mut rng, size)).ok();
    make(path, true, "mid", ",backing_file=base,backing_fmt=qcow2", "2M");
    let all = |image: &str| format!("{},backing.encrypt.key-secret=s", named(image));
    let mid = |commands: &[String]| {
        let mut arguments = args!["io", "--object", SECRET, "--image-opts"];
        for command in commands {
            arguments.extend(args!["-c", command]);
        }
        arguments.push(all("mid").into());
        isobath(path, arguments).ok()
    };
    let _ = mid(&random_writes(&mut rng, size));
    let raw = |name: &str, image: String| {
        let convert =
            args!["convert", "--object", SECRET, "--image-opts", image, "-O", "raw", name];
        let _ = qemu_img(path, convert).ok();
        fs::read(path.join(name)).unwrap()
    };
    let before = raw("before", all("mid"));
    // An overlay of both: its secret stands for those below.
    let _ =
        isobath(path, args!["create", "-q", "-f", "qcow2", "-b", "mid", "-F", "qcow2", "plain"])
            .ok();
    let with_file = |command: &[&str]| {
        let mut arguments: Vec<OsString> = command.iter().map(OsString::from).collect();
        arguments.extend(args!["--secret-file", "key"]);
        isobath(path, arguments).ok()
    };
    let _ = with_file(&["convert", "-q", "-O", "raw", "plain", "after"]);
    assert!(fs::read(path.join("after")).unwrap() == before);
    let _ = with_file(&["rebase", "-q", "-b", "", "plain"]);
    let _ =
        isobath(path, args!["compare", "-q", "-f", "qcow2", "-F", "raw", "plain", "before"]).ok();
    let _ = with_file(&["commit", "-q", "mid"]);
    assert!(read(path, "base") == before);
    // Copied to an encrypted image again, and that flattened.
    let copy =
        args!["convert", "-q", "--object", SECRET, "-O", "qcow2", "-o", NEW, "plain", "copy"];
    let _ = isobath(path, copy).ok();
    assert!(read(path, "copy") == before);
    make(path, false, "top", ",backing_file=copy,backing_fmt=qcow2", "2M");
    let _ = with_file(&["chain", "flatten", "-q", "top"]);
    assert!(read(path, "top") == before);
    let resized = args!["resize", "-q", "--object", SECRET, "--image-opts", named("top"), "3000k"];
    let _ = isobath(path, resized).ok();
    let _ = isobath(
        path,
        args!["snapshot", "--object", SECRET, "--image-opts", "-c", "one", named("top")],
    )
    .ok();
    let _ = io(path, true, "top", &random_writes(&mut rng, size)).ok();
    let snapshot = args![
        "convert",
        "-q",
        "--object",
        SECRET,
        "--image-opts",
        "-l",
        "one",
        named("top"),
        "-O",
        "raw",
        "snapshot"
    ];
    let _ = isobath(path, snapshot).ok();
    let then = fs::read(path.join("snapshot")).unwrap();
    assert!(then[..before.len()] == before && then[before.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn keys_are_amended() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "1M");
    let amend = |ours: bool, options: &str, more: &[&str]| {
        let mut all = args!["amend", "--object", SECRET, "--object", "secret,id=o,file=other"];
        all.extend(more.iter().map(OsString::from));
        all.extend(args!["--image-opts", named("disk"), "-o", options]);
        if ours { isobath(path, all) } else { qemu_img(path, all) }
    };
    let opens = |file: &str| {
        let object = format!("secret,id=s,file={file}");
        let map = args!["map", "--object", object, "--image-opts", named("disk")];
        let codes = [isobath(path, map.clone()).code(), qemu_img(path, map).code()];
        assert_eq!(codes[0], codes[1], "{file}");
        codes[0] == 0
    };
    assert!(opens("key") && !opens("other"));
    for (options, reason) in [
        ("encrypt.state=active", "'new-secret' is required to activate a keyslot"),
        ("encrypt.state=inactive", "To erase keyslot(s), either explicit keyslot index"),
        ("encrypt.keyslot=1", "Parameter 'state' is missing"),
        ("encrypt.state=inactive,encrypt.keyslot=0", "Attempt to erase the only active keyslot 0"),
        ("encrypt.state=inactive,encrypt.old-secret=s", "All the active keyslots match"),
        ("encrypt.state=inactive,encrypt.keyslot=3", "Given keyslot 3 is already erased"),
        (
            "encrypt.state=inactive,encrypt.keyslot=0,encrypt.new-secret=o",
            "must not be given when erasing",
        ),
        (
            "encrypt.state=active,encrypt.new-secret=o,encrypt.keyslot=0",
            "Refusing to overwrite active keyslot 0",
        ),
        (
            "encrypt.state=active,encrypt.new-secret=o,encrypt.keyslot=9",
            "Invalid keyslot 9 specified",
        ),
    ] {
        for ours in [true, false] {
            let refused = amend(ours, options, &[]).exits(1);
            assert!(refused.stderr.contains(reason), "{}", refused.report());
        }
    }
    let _ = amend(true, "encrypt.state=active,encrypt.new-secret=o,encrypt.iter-time=10", &[]).ok();
    assert!(opens("key") && opens("other"));
    let _ = amend(false, "encrypt.state=inactive,encrypt.old-secret=o", &[]).ok();
    assert!(opens("key") && !opens("other"));
    let _ = amend(
        true,
        "encrypt.state=active,encrypt.new-secret=o,encrypt.keyslot=5,encrypt.iter-time=10",
        &[],
    )
    .ok();
    let _ = amend(true, "encrypt.state=inactive,encrypt.old-secret=s", &[]).ok();
    assert!(!opens("key") && opens("other"));
}

#[test]
fn a_served_disk_stays_encrypted_through_snapshots_and_jobs() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "base.qcow2", "", "4M");
    let _ = io(path, true, "base.qcow2", &["write -P 1 0 2M".into()]).ok();
    let live = Live::start(path, "base.qcow2", &["--secret-file", "key"]);
    let mut client = Nbd::connect(&live.nbd(), DEVICE).unwrap();
    let mut control = live.control();
    let nodes = control.execute("query-named-block-nodes", &json!({})).unwrap();
    let described = &nodes[0]["image"];
    assert_eq!(nodes[0]["encrypted"], true);
    assert_eq!(described["format-specific"]["data"]["encrypt"]["cipher-alg"], "aes-256");
    // Parts of sectors, too.
    client.write(1000, &vec![2; 70_000]).unwrap();
    client.write(3 << 20, &[3; 513]).unwrap();
    control.snapshot("mid.qcow2").unwrap();
    client.write(5, &[4; 3]).unwrap();
    client.flush().unwrap();
    control.snapshot("top.qcow2").unwrap();
    client.write(2 << 20, &[5; 4096]).unwrap();
    client.flush().unwrap();
    let disk = client.read_all().unwrap();
    assert_eq!((disk[4], disk[5], disk[7], disk[8]), (1, 4, 4, 1));
    let encrypted = |name: &str| {
        let info = qemu_img(path, args!["info", "-U", "--output=json", name]).ok().json();
        info["encrypted"] == true
    };
    assert!(encrypted("mid.qcow2") && encrypted("top.qcow2"));
    // Everything that was written is encrypted: no file shows it.
    for name in ["base.qcow2", "mid.qcow2", "top.qcow2"] {
        let bytes = fs::read(path.join(name)).unwrap();
        // Of 64 such bytes, these are half.
        let plain = bytes.chunks_exact(32).any(|part| part[0] != 0 && *part == [part[0]; 32]);
        assert!(!plain, "{name} shows what was written");
    }
    control
        .start("block-commit", &json!({"job-id": "j", "top": "mid.qcow2", "base": "base.qcow2"}))
        .unwrap();
    control.completed().unwrap();
    assert!(client.read_all().unwrap() == disk);
    control.start("block-stream", &json!({"job-id": "k"})).unwrap();
    control.completed().unwrap();
    assert!(client.read_all().unwrap() == disk);
    drop(client);
    let _ = live.stop();
    assert!(read(path, "top.qcow2") == disk);
}

#[test]
fn a_storage_daemon_opens_encrypted_nodes() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "1M");
    let _ = io(path, true, "disk", &["write -P 7 0 1M".into()]).ok();
    for ours in [true, false] {
        let socket = path.join("nbd");
        let daemon = "qemu-storage-daemon";
        let program = if ours { path.join(daemon) } else { qemu::program(daemon) };
        if ours {
            std::os::unix::fs::symlink(ISOBATH, &program).unwrap();
        }
        let mut command = Command::new(program);
        command.current_dir(path).args([
            "--object",
            SECRET,
            "--blockdev",
            "file,node-name=f,filename=disk",
            "--blockdev",
            "qcow2,node-name=d,file=f,encrypt.format=luks,encrypt.key-secret=s",
            "--nbd-server",
            &format!("addr.type=unix,addr.path={}", socket.display()),
            "--export",
            "nbd,id=e,node-name=d,name=x,writable=on",
            "--pidfile",
            "pid",
        ]);
        let server = Server::start(&mut command, Ready::File(&path.join("pid")));
        let mut client = Nbd::connect(&socket, "x").unwrap();
        assert!(client.read_all().unwrap().iter().all(|byte| *byte == 7), "ours: {ours}");
        drop(client);
        drop(if ours { server.stop() } else { server.stop_qemu() });
        let _ = fs::remove_file(path.join("pid"));
        let _ = fs::remove_file(&socket);
    }
    // A secret that comes over QMP.
    make(path, true, "other.qcow2", "", "1M");
    qemu::create(&path.join("plain.qcow2"), "qcow2", 1 << 20, "");
    let live = Live::start(path, "plain.qcow2", &[]);
    let mut control = live.control();
    let secret = json!({"qom-type": "secret", "id": "s", "data": "correct horse\n"});
    let _ = control.execute("object-add", &secret).unwrap();
    let node = json!({
        "driver": "qcow2",
        "node-name": "n",
        "file": {"driver": "file", "filename": "other.qcow2"},
        "encrypt": {"format": "luks", "key-secret": "s"},
    });
    let _ = control.execute("blockdev-add", &node).unwrap();
    let _ = control.execute("object-del", &json!({"id": "s"})).unwrap();
    let _ = control.execute("blockdev-del", &json!({"node-name": "n"})).unwrap();
    let _ = live.stop();
}
