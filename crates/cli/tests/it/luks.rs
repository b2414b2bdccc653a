//! Files that are encrypted as a whole (QEMU's format `luks`), by both programs: made, opened, changed, copied, served.

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

const NEW: &str = "key-secret=s,iter-time=10";

fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("key"), "correct horse\n").unwrap();
    fs::write(directory.path().join("other"), "battery staple").unwrap();
    directory
}

/// The arguments, with the secrets `s` and `o`, as one of the programs takes them.
fn with_secrets(arguments: &[&str]) -> Vec<OsString> {
    let (command, rest) = arguments.split_first().unwrap();
    let mut all =
        args![*command, "--object", "secret,id=s,file=key", "--object", "secret,id=o,file=other"];
    all.extend(rest.iter().map(OsString::from));
    all
}

fn img(directory: &Path, ours: bool, arguments: &[&str]) -> Finished {
    let all = with_secrets(arguments);
    if ours { isobath(directory, all) } else { qemu_img(directory, all) }
}

/// The options that name an image with a secret.
fn named(image: &str) -> String {
    format!("driver=luks,key-secret=s,file.filename={image}")
}

fn make(directory: &Path, ours: bool, image: &str, more: &str, size: &str) {
    let options = format!("{NEW}{more}");
    let _ = img(directory, ours, &["create", "-q", "-f", "luks", "-o", &options, image, size]).ok();
}

/// Runs commands of qemu-io on an image.
fn io(directory: &Path, ours: bool, image: &str, commands: &[String]) {
    let mut all: Vec<OsString> = args!["--object", "secret,id=s,file=key", "--image-opts"];
    for command in commands {
        all.extend(args!["-c", command]);
    }
    all.push(image.into());
    let done = if ours {
        isobath(directory, [args!["io"], all].concat())
    } else {
        run(Command::new(qemu::program("qemu-io")).current_dir(directory).args(all))
    };
    let done = done.ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
}

/// The disk that an image's options describe, as each of the programs reads it.
#[track_caller]
fn read(directory: &Path, image: &str) -> Vec<u8> {
    let [ours, theirs] = [true, false].map(|ours| {
        let to = if ours { "ours.raw" } else { "theirs.raw" };
        let _ =
            img(directory, ours, &["convert", "-q", "--image-opts", image, "-O", "raw", to]).ok();
        fs::read(directory.join(to)).unwrap()
    });
    assert!(ours == theirs, "{image} is read differently");
    ours
}

fn random_writes(rng: &mut StdRng, size: u64) -> Vec<String> {
    (0..rng.random_range(1..8))
        .map(|_| {
            let at = rng.random_range(0..size);
            let most = if rng.random() { 1500 } else { 200 << 10 };
            let length = rng.random_range(1..=(size - at).min(most));
            match rng.random_range(0..6) {
                0 => format!("write -z {at} {length}"),
                1 => format!("write -z -u {at} {length}"),
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
        ",cipher-alg=aes-128,hash-alg=sha1",
        ",cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=ripemd160",
        ",cipher-mode=cbc,ivgen-alg=plain,cipher-alg=aes-128,hash-alg=sha512",
        ",ivgen-alg=plain,hash-alg=sha224,preallocation=full",
        ",hash-alg=sha384,preallocation=falloc",
    ]
    .into_iter()
    .enumerate()
    {
        for first in [true, false] {
            let directory = directory();
            let path = directory.path();
            let size = 1 << 20;
            println!("seed {} {more}, made by us: {first}", seed.value());
            make(path, first, "disk", more, "1M");
            let mut model = read(path, &named("disk"));
            assert_eq!(model.len(), size);
            for step in 0..2 {
                let commands = random_writes(&mut rng, size as u64);
                io(path, (step + number) % 2 == 0, &named("disk"), &commands);
                for command in &commands {
                    let words: Vec<&str> = command.split_whitespace().collect();
                    let number = |word: &str| word.parse::<usize>().unwrap();
                    let byte = if words[1] == "-P" { number(words[2]) as u8 } else { 0 };
                    let [at, length] = [words[words.len() - 2], words[words.len() - 1]].map(number);
                    model[at..at + length].fill(byte);
                }
                assert!(read(path, &named("disk")) == model, "{more}, after {commands:?}");
            }
        }
    }
}

#[test]
fn reads_and_writes_of_parts_of_sectors_are_exact() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "64k");
    let command = |text: &str| text.to_owned();
    io(
        path,
        true,
        &named("disk"),
        &[
            command("write -P 1 0 64k"),
            command("write -P 2 1 1"),
            command("write -P 3 511 2"),
            command("write -P 4 1023 1026"),
            command("write -z 3000 5000"),
            command("read -P 1 0 1"),
            command("read -P 2 1 1"),
            command("read -P 1 2 509"),
            command("read -P 3 511 2"),
            command("read -P 4 1023 1026"),
            command("read -P 1 2049 951"),
            command("read -P 0 3000 5000"),
            command("read -P 1 8000 57536"),
            command("discard 0 64k"),
            command("read -P 1 8000 57536"),
            // In flight at once, in the same sectors.
            command("aio_write -P 5 10000 100"),
            command("aio_write -P 6 10100 100"),
            command("aio_write -P 7 10200 1000"),
            command("aio_write -P 8 11264 512"),
            command("aio_write -P 9 11200 64"),
            command("aio_flush"),
            command("read -P 5 10000 100"),
            command("read -P 6 10100 100"),
            command("read -P 7 10200 1000"),
            command("read -P 8 11264 512"),
            command("read -P 9 11200 64"),
            command("read -P 1 11776 1000"),
        ],
    );
    let disk = read(path, &named("disk"));
    assert_eq!((disk[1], disk[511], disk[2048], disk[2049], disk[3000]), (2, 3, 4, 1, 0));
}

#[test]
fn the_secret_is_needed_and_checked() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "1M");
    fs::write(path.join("plain"), [0; 4096]).unwrap();
    let wrong = "driver=luks,key-secret=o,file.filename=disk";
    let missing = "driver=luks,key-secret=x,file.filename=disk";
    let required = "Parameter 'key-secret' is required for cipher";
    let invalid = "Invalid password, cannot unlock any keyslot";
    for (arguments, code, reason) in [
        (&["convert", "-O", "raw", "disk", "out"][..], 1, required),
        (&["convert", "-O", "raw", "-f", "luks", "disk", "out"], 1, required),
        (&["convert", "-O", "raw", "--image-opts", wrong, "out"], 1, invalid),
        (&["convert", "-O", "raw", "--image-opts", missing, "out"], 1, "No secret with id 'x'"),
        (&["map", "disk"], 1, required),
        (&["check", "disk"], 1, required),
        (&["check", "--image-opts", wrong], 1, invalid),
        (&["check", "--image-opts", &named("disk")], 63, "does not support checks"),
        (&["resize", "-f", "luks", "disk", "2M"], 1, required),
        (&["compare", "disk", "disk"], 2, required),
        (&["create", "-f", "luks", "x", "1M"], 1, required),
        (&["create", "-f", "luks", "-o", "key-secret=x", "x", "1M"], 1, "No secret with id 'x'"),
        (&["create", "-f", "luks", "-o", NEW, "x"], 1, "Image creation needs a size parameter"),
        (
            &["create", "-f", "luks", "-o", NEW, "-b", "disk", "-F", "luks", "x", "1M"],
            1,
            "Backing file not supported for file format 'luks'",
        ),
        (
            &["create", "-f", "luks", "-o", NEW, "-F", "raw", "x", "1M"],
            1,
            "Backing file format not supported for file format 'luks'",
        ),
        (
            &["create", "-f", "luks", "-o", "encrypt.format=luks", "x", "1M"],
            1,
            "Invalid parameter 'encrypt.format'",
        ),
        (&["convert", "-f", "raw", "-O", "luks", "plain", "x"], 1, required),
        (
            &["convert", "-f", "raw", "-c", "-O", "luks", "-o", NEW, "plain", "x"],
            1,
            "Compression not supported for this file format",
        ),
        (&["measure", "-O", "luks", "--size", "1M"], 1, required),
        (&["dd", "-O", "luks", "if=plain", "of=x"], 1, required),
        (&["map", "--image-opts", &named("disk")], 1, "encrypted or compressed clusters"),
        (
            &["info", "--image-opts", "driver=luks,encrypt.key-secret=s,file.filename=disk"],
            1,
            "Block format 'luks' does not support the option 'encrypt.key-secret'",
        ),
        // Headers in files of their own came with QEMU 9.
        (
            &["info", "--image-opts", "driver=luks,key-secret=s,file.filename=disk,header=h"],
            1,
            "Block format 'luks' does not support the option 'header'",
        ),
    ] {
        for ours in [true, false] {
            let refused = img(path, ours, arguments).exits(code);
            assert!(refused.stderr.contains(reason), "{arguments:?}: {}", refused.report());
        }
        assert!(!path.join("x").exists() && !path.join("out").exists(), "{arguments:?}");
    }
    let header = isobath(path, args!["create", "-f", "luks", "-o", "detached-header", "x", "1M"]);
    let header = header.exits(1);
    assert!(header.stderr.contains("in a file of its own"), "{}", header.report());
    // Ours is simpler.
    let _ =
        isobath(path, args!["convert", "-O", "raw", "--secret-file", "key", "disk", "out"]).ok();
    assert!(fs::read(path.join("out")).unwrap() == read(path, &named("disk")));
}

#[test]
fn information_is_qemus() {
    let directory = directory();
    let path = directory.path();
    for ours in [true, false] {
        for more in ["", ",cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256"] {
            make(path, ours, "disk", more, "3M");
            for command in [
                &["info", "disk"][..],
                &["info", "-f", "luks", "disk"],
                &["info", "--output=json", "disk"],
                &["info", "-f", "raw", "--output=json", "disk"],
                &["map", "--output=json", "--image-opts", &named("disk")],
            ] {
                let [one, other] = [true, false].map(|ours| img(path, ours, command).ok().text());
                assert_eq!(one, other, "{command:?}");
            }
            fs::remove_file(path.join("disk")).unwrap();
        }
    }
    for command in [
        &["create", "-f", "luks", "-o", "help"][..],
        &["create", "-f", "luks", "-o", "help", "disk"],
        &["amend", "-f", "luks", "-o", "help"],
        &["measure", "-O", "luks", "-o", NEW, "--size", "1G"],
        &["measure", "-O", "luks", "-o", "key-secret=s,cipher-alg=aes-128", "--size", "1G"],
        &["create", "-f", "luks", "-o", "hash-alg=sha1,key-secret=s,iter-time=10", "disk", "1M"],
        &["measure", "-O", "qcow2", "--image-opts", &named("disk")],
    ] {
        let [one, other] = [true, false].map(|ours| img(path, ours, command).ok().text());
        assert_eq!(one, other, "{command:?}");
    }
}

#[test]
fn disks_are_copied_to_and_from_images() {
    let directory = directory();
    let path = directory.path();
    let seed = Seed::new();
    let mut rng = seed.rng();
    println!("seed {}", seed.value());
    let mut disk = vec![0; 1 << 20];
    for _ in 0..10 {
        let at = rng.random_range(0..disk.len() - 70_000);
        let length = rng.random_range(1..70_000);
        disk[at..at + length].fill(rng.random());
    }
    fs::write(path.join("raw"), &disk).unwrap();
    for ours in [true, false] {
        let ok = |arguments: &[&str]| img(path, ours, arguments).ok();
        let (new, copy) = (named("new"), named("copy"));
        let _ = ok(&["convert", "-q", "-f", "raw", "-O", "luks", "-o", NEW, "raw", "new"]);
        assert!(read(path, &new) == disk);
        // Over noise.
        make(path, !ours, "copy", "", "1M");
        let onto = ["convert", "-q", "-n", "--image-opts", "--target-image-opts", &new, &copy];
        let _ = ok(&onto);
        assert!(read(path, &copy) == disk);
        let _ = ok(&["compare", "-q", "--image-opts", &new, &copy]);
        let _ = ok(&["dd", "--image-opts", "bs=512", "count=100", &format!("if={new}"), "of=part"]);
        assert!(fs::read(path.join("part")).unwrap() == disk[..51200]);
        let json =
            r#"json:{"driver":"luks","key-secret":"s","file":{"driver":"file","filename":"new"}}"#;
        let _ = ok(&["convert", "-q", "-O", "qcow2", json, "new.qcow2"]);
        let _ = ok(&["compare", "-q", "-f", "raw", "raw", "new.qcow2"]);
        // Without a driver it is detected.
        let _ = ok(&["map", "--output=json", "--image-opts", "key-secret=s,file.filename=new"]);
        let _ = ok(&["resize", "-q", "--image-opts", &new, "+64k"]);
        assert!(read(path, &new)[..disk.len()] == disk);
        let _ = ok(&["resize", "-q", "--shrink", "--image-opts", &new, "512k"]);
        assert!(read(path, &new) == disk[..512 << 10]);
        for name in ["new", "copy", "part", "new.qcow2"] {
            fs::remove_file(path.join(name)).unwrap();
        }
    }
}

#[test]
fn a_chain_stands_on_an_image() {
    let directory = directory();
    let path = directory.path();
    let ours = |arguments: &[&str]| img(path, true, arguments).ok();
    make(path, true, "base", "", "256k");
    io(path, true, &named("base"), &["write -P 1 0 256k".into()]);
    // The size is known without the secret.
    for by_us in [true, false] {
        let _ =
            img(path, by_us, &["create", "-q", "-f", "qcow2", "-b", "base", "-F", "luks", "top"])
                .ok();
        let json =
            img(path, !by_us, &["info", "--output=json", "--backing-chain", "top"]).ok().json();
        assert_eq!(
            (&json[0]["virtual-size"], &json[1]["format"]),
            (&262_144.into(), &"luks".into())
        );
    }
    let full = "driver=qcow2,file.filename=top,backing.driver=luks,backing.key-secret=s,\
                backing.file.filename=base";
    let short = "driver=qcow2,file.filename=top,backing.key-secret=s";
    for image in [full, short] {
        assert!(read(path, image).iter().all(|byte| *byte == 1));
    }
    for by_us in [true, false] {
        let refused = img(path, by_us, &["map", "top"]).exits(1);
        let reason = "Parameter 'key-secret' is required for cipher";
        assert!(refused.stderr.contains(reason), "{}", refused.report());
    }
    let survey = isobath(path, args!["chain", "survey", path]).ok();
    assert!(!survey.text().contains("not supported"), "{}", survey.report());
    // What is committed to it where it was shorter is surrounded by zeroes.
    let _ = ours(&["resize", "-q", "--image-opts", short, "512k"]);
    io(path, true, short, &["write -P 2 1000 70000".into(), "write -P 3 400000 10".into()]);
    let before = read(path, full);
    assert!(before[300_000..400_000].iter().all(|byte| *byte == 0));
    let _ = isobath(path, args!["commit", "-q", "--secret-file", "key", "top"]).ok();
    assert!(read(path, &named("base")) == before);
}

#[test]
fn keys_are_amended() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "64k");
    io(path, true, &named("disk"), &["write -P 5 0 64k".into()]);
    let both = |options: &str, code, reason: &str| {
        for ours in [true, false] {
            let image = named("disk");
            let done = img(path, ours, &["amend", "--image-opts", &image, "-o", options]);
            let done = done.exits(code);
            assert!(done.stderr.contains(reason), "{options}: {}", done.report());
        }
    };
    for (options, reason) in [
        ("state=active", "'new-secret' is required to activate a keyslot"),
        ("state=inactive", "To erase keyslot(s), either explicit keyslot index"),
        ("keyslot=1", "Parameter 'state' is missing"),
        ("state=inactive,keyslot=0", "Attempt to erase the only active keyslot 0"),
        ("state=inactive,old-secret=s", "All the active keyslots match"),
        ("state=inactive,old-secret=o", "No keyslots match"),
        ("state=active,new-secret=o,keyslot=0", "Refusing to overwrite active keyslot 0"),
        ("state=active,new-secret=o,keyslot=9", "Invalid keyslot 9 specified"),
        ("encrypt.state=active,new-secret=o", "Invalid parameter 'encrypt.state'"),
        ("size=1M", "only supported for image creation"),
        ("compat=v3", "Invalid parameter 'compat'"),
    ] {
        both(options, 1, reason);
    }
    let opens = |secret: &str| {
        let image = format!("driver=luks,key-secret={secret},file.filename=disk");
        let [ours, theirs] = [true, false]
            .map(|ours| img(path, ours, &["convert", "-O", "raw", "--image-opts", &image, "out"]));
        assert_eq!(ours.code(), theirs.code(), "{secret}");
        ours.code() == 0 && fs::read(path.join("out")).unwrap() == vec![5; 64 << 10]
    };
    let amend = |ours: bool, with: &str, options: &str| {
        let image = format!("driver=luks,key-secret={with},file.filename=disk");
        let _ = img(path, ours, &["amend", "-q", "--image-opts", &image, "-o", options]).ok();
    };
    assert!(opens("s") && !opens("o"));
    for (first, second) in [(true, false), (false, true)] {
        amend(first, "s", "state=active,new-secret=o,iter-time=10");
        assert!(opens("s") && opens("o"));
        amend(second, "o", "state=inactive,old-secret=s");
        assert!(!opens("s") && opens("o"));
        amend(first, "o", "state=active,new-secret=s,keyslot=5,iter-time=10");
        assert!(opens("s") && opens("o"));
        amend(second, "s", "state=inactive,old-secret=o");
        assert!(opens("s") && !opens("o"));
    }
}

#[test]
fn hostile_headers_are_refused() {
    let directory = directory();
    let path = directory.path();
    make(path, false, "disk", "", "64k");
    let good = fs::read(path.join("disk")).unwrap();
    let slot = |number: usize, field: usize| 208 + 48 * number + field;
    let far: [u8; 4] = (1_u32 << 31).to_be_bytes();
    for (at, bytes) in [
        // The version, and names that do not end or are not known.
        (6, &[0, 2][..]),
        (8, &[b'a'; 32]),
        (8, b"serpent\0"),
        (40, b"xts-plain65\0"),
        (72, b"md5\0"),
        // The payload: within the key material, and past the end.
        (104, &[0; 4]),
        (104, &[0, 0, 8, 0]),
        (104, &[0xff; 4]),
        (108, &[0xff; 4]),
        // No iterations, and too many.
        (164, &[0; 4]),
        (164, &[0xff; 4]),
        (slot(0, 4), &[0; 4]),
        (slot(0, 4), &[0xff; 4]),
        // The state, the place and the stripes of a key slot.
        (slot(1, 0), &[1; 4]),
        (slot(0, 40), &[0; 4]),
        (slot(0, 40), &[0, 0, 2, 0]),
        (slot(0, 40), &far),
        (slot(7, 40), &[0xff; 4]),
        (slot(0, 44), &[0; 4]),
        (slot(3, 44), &[0xff; 4]),
    ] {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(path.join("bad"), &bad).unwrap();
        let image = named("bad");
        for command in [
            &["info", "-f", "luks", "bad"][..],
            &["convert", "-O", "raw", "--image-opts", &image, "out"],
            &["amend", "--image-opts", &image, "-o", "state=active,new-secret=o,iter-time=10"],
        ] {
            let refused = isobath(path, with_secrets(command)).exits(1);
            assert!(refused.stderr.contains("LUKS"), "{at}, {bytes:?}: {}", refused.report());
        }
        assert!(fs::read(path.join("bad")).unwrap() == bad);
    }
    // A file that was cut off.
    for length in [0, 6, 591, 4096, 300_000, 2_068_479] {
        fs::write(path.join("bad"), &good[..length]).unwrap();
        let image = named("bad");
        let _ = isobath(path, with_secrets(&["info", "-f", "luks", "bad"])).exits(1);
        let _ = isobath(path, with_secrets(&["map", "--image-opts", &image])).exits(1);
    }
    // Key material that is far behind in a file without contents takes no memory.
    let mut sparse = good;
    sparse[104..108].copy_from_slice(&[0xff; 4]);
    sparse[slot(7, 40)..slot(7, 44)].copy_from_slice(&far);
    fs::write(path.join("bad"), &sparse).unwrap();
    fs::File::options().write(true).open(path.join("bad")).unwrap().set_len(4 << 40).unwrap();
    let refused = isobath(path, with_secrets(&["map", "--image-opts", &named("bad")])).exits(1);
    assert!(refused.stderr.contains("key material ends at"), "{}", refused.report());
}

#[test]
fn images_are_served() {
    let directory = directory();
    let path = directory.path();
    make(path, false, "disk", "", "1M");
    io(path, false, &named("disk"), &["write -P 1 0 1M".into()]);
    let socket = path.join("nbd");
    for ours in [true, false] {
        let program = if ours { path.join("qemu-nbd") } else { qemu::program("qemu-nbd") };
        if ours {
            std::os::unix::fs::symlink(ISOBATH, &program).unwrap();
        }
        let mut command = Command::new(program);
        command.current_dir(path).args([
            "--object",
            "secret,id=s,file=key",
            "--image-opts",
            &named("disk"),
            "-t",
            "-k",
            socket.to_str().unwrap(),
            "--pid-file",
            "pid",
        ]);
        let server = Server::start(&mut command, Ready::File(&path.join("pid")));
        let mut client = Nbd::connect(&socket, "").unwrap();
        let byte = if ours { 2 } else { 3 };
        client.write(4096, &vec![byte; 70_000 / 512 * 512]).unwrap();
        client.write(512 * 300, &[byte; 512]).unwrap();
        client.flush().unwrap();
        let disk = client.read_all().unwrap();
        drop(client);
        drop(if ours { server.stop() } else { server.stop_qemu() });
        let _ = (fs::remove_file(path.join("pid")), fs::remove_file(&socket));
        assert!(read(path, &named("disk")) == disk);
        assert_eq!((disk[4095], disk[4096], disk[512 * 300]), (1, byte, byte));
    }
}

#[test]
fn a_served_disk_stays_encrypted_through_snapshots_and_jobs() {
    let directory = directory();
    let path = directory.path();
    make(path, true, "disk", "", "1M");
    io(path, true, &named("disk"), &["write -P 1 0 1M".into()]);
    let live = Live::start(path, "disk", &["--secret-file", "key"]);
    let mut client = Nbd::connect(&live.nbd(), DEVICE).unwrap();
    let mut control = live.control();
    // Parts of sectors, too.
    client.write(777, &[9; 1000]).unwrap();
    control.snapshot("mid.qcow2").unwrap();
    client.write(100, &[2; 5000]).unwrap();
    control.snapshot("top.qcow2").unwrap();
    client.write(200_000, &[3; 513]).unwrap();
    client.flush().unwrap();
    let disk = client.read_all().unwrap();
    assert_eq!((disk[99], disk[100], disk[5099], disk[5100]), (1, 2, 2, 1));
    for name in ["disk", "mid.qcow2", "top.qcow2"] {
        let info = qemu_img(path, args!["info", "-U", "--output=json", name]).ok().json();
        assert_eq!(info["encrypted"], true, "{name}");
        let bytes = fs::read(path.join(name)).unwrap();
        let plain = bytes.chunks_exact(32).any(|part| part[0] != 0 && *part == [part[0]; 32]);
        assert!(!plain, "{name} shows what was written");
    }
    let commit = json!({"job-id": "j", "top": "mid.qcow2", "base": "disk"});
    control.start("block-commit", &commit).unwrap();
    control.completed().unwrap();
    assert!(client.read_all().unwrap() == disk);
    drop(client);
    let _ = live.stop();
    let base = read(path, &named("disk"));
    assert_eq!((base[99], base[100], base[5099], base[5100], base[200_000]), (1, 2, 2, 1, 1));
    let top = "driver=qcow2,encrypt.key-secret=s,file.filename=top.qcow2,backing.key-secret=s";
    assert!(read(path, top) == disk);
}

#[test]
fn a_disk_is_mirrored_into_a_file_that_a_client_adds() {
    let directory = directory();
    let path = directory.path();
    // What was never written to it is noise.
    make(path, true, "disk", "", "1M");
    qemu::create(&path.join("plain.qcow2"), "qcow2", 1 << 20, "");
    let writes = ["write -P 5 64k 64k", "write -P 6 900k 512"];
    let _ = qemu::io(&path.join("plain.qcow2"), "qcow2", &writes).ok();
    let live = Live::start(path, "plain.qcow2", &[]);
    let mut control = live.control();
    let secret = json!({"qom-type": "secret", "id": "s", "data": "correct horse\n"});
    let _ = control.execute("object-add", &secret).unwrap();
    let file = json!({"driver": "file", "filename": "disk"});
    let node = json!({"driver": "luks", "node-name": "n", "key-secret": "s", "file": file});
    let _ = control.execute("blockdev-add", &node).unwrap();
    let mirror = json!({"job-id": "j", "target": "n", "sync": "full"});
    control.start("blockdev-mirror", &mirror).unwrap();
    let _ = control.wait_for(&["BLOCK_JOB_READY"]).unwrap();
    let _ = control.execute("job-complete", &json!({"id": "j"})).unwrap();
    control.completed().unwrap();
    let _ = live.stop();
    let disk = qemu::read_disk(&path.join("plain.qcow2"), "qcow2");
    assert!(read(path, &named("disk")) == disk);
}

/// The bytes of an encrypted file are not those of the disk in it.
#[test]
fn a_disk_keeps_its_contents_when_its_base_is_taken_for_another_format() {
    for (from, to) in [("luks", "raw"), ("raw", "luks")] {
        let directory = directory();
        let at = directory.path();
        make(at, true, "base", "", "1M");
        io(at, true, &named("base"), &["write -P 85 0 1M".into()]);
        let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", from, "over"];
        let _ = img(at, true, &create).ok();
        let over = |format: &str| match format {
            "luks" => "driver=qcow2,file.filename=over,backing.driver=luks,backing.key-secret=s",
            _ => "driver=qcow2,file.filename=over",
        };
        let before = read(at, over(from));
        let secret = ["--secret-file", "key"].map(OsString::from);
        let rebase = [args!["rebase"], secret.to_vec(), args!["-b", "base", "-F", to, "over"]];
        let _ = isobath(at, rebase.concat()).ok();
        let after = read(at, over(to));
        assert!(after.starts_with(&before), "from {from} to {to}");
        assert!(after[before.len()..].iter().all(|byte| *byte == 0), "from {from} to {to}");
    }
}
