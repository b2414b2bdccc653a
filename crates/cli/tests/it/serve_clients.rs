//! What `isobath serve` serves, seen by the programs that people use with NBD.

use crate::live::Control;
use crate::serving::{ISOBATH, QemuIo, Served, assert_same_bytes};
use isobath_testkit::chain::{Chain, Commands, Writer};
use isobath_testkit::ops::{Op, Shape};
use isobath_testkit::process::{run, run_program};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu, tools};
use rand::RngExt;
use rand::seq::SliceRandom;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 24 * MIB;

/// Six layers with different options, by QEMU and Isobath in turn.
fn chain(directory: &Path, seed: &Seed) -> Chain {
    let mut rng = seed.rng();
    let (qemu, own) = (Commands::qemu(), Commands::isobath(Path::new(ISOBATH)));
    let mut chain = Chain::new(directory, SIZE);
    let options = ["", "cluster_size=4k", "extended_l2=on", "compat=0.10", "cluster_size=2M"];
    chain.alternate(&[&qemu, &own], 6, |layer| {
        let shape = Shape { size: SIZE, longest: 300_000, unit: 65536 };
        (options[layer % options.len()].to_owned(), shape.ops(&mut rng, 25))
    });
    chain
}

/// Carries out operations over NBD.
#[track_caller]
fn apply(uri: &str, ops: &[Op]) {
    let commands: Vec<_> = ops.iter().filter_map(Op::io_command).collect();
    let done = qemu::io(Path::new(uri), "raw", &commands).ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
}

#[test]
fn every_client_reads_the_same_chain() {
    let directory = tempfile::tempdir().unwrap();
    let seed = Seed::new();
    let mut chain = chain(directory.path(), &seed);
    chain.verify();
    let raw = directory.path().join("raw");
    qemu::to_raw(chain.active(), "qcow2", &raw);
    let map = qemu::map(chain.active());
    let served = Served::start(&[chain.active()], &["--export-name", "chain"]);
    let uri = served.uri("chain");

    assert_same_bytes(&uri, &raw);
    let copy = directory.path().join("copy");
    let _ = run_program(tools::require("nbdcopy"), args![&uri, &copy]).ok();
    assert!(fs::read(&copy).unwrap() == fs::read(&raw).unwrap(), "nbdcopy: {seed:?}");

    let info = run_program(tools::require("nbdinfo"), args!["--json", &uri]).ok().json();
    let export = &info["exports"][0];
    for (key, value) in [
        ("export-size", serde_json::Value::from(SIZE)),
        ("is_read_only", false.into()),
        ("can_multi_conn", true.into()),
        ("can_flush", true.into()),
        ("can_fua", true.into()),
        ("can_trim", true.into()),
        ("can_zero", true.into()),
        ("can_fast_zero", true.into()),
        ("can_cache", true.into()),
    ] {
        assert_eq!(export[key], value, "{key}: {export:#}");
    }

    // What is told to read as zeroes does so for QEMU, which sees holes in the files too.
    let over_nbd = qemu::img(args!["map", "--output=json", "-f", "raw", &uri]).ok().json();
    let zeroes = |map: &serde_json::Value| {
        let mut zeroes = vec![false; (SIZE / 512) as usize];
        for run in map.as_array().unwrap() {
            let number = |key: &str| (run[key].as_u64().unwrap() / 512) as usize;
            let (start, length) = (number("start"), number("length"));
            zeroes[start..start + length].fill(run["zero"].as_bool().unwrap());
        }
        zeroes
    };
    let (told, known) = (zeroes(&over_nbd), zeroes(&map));
    assert!(told.iter().zip(&known).all(|(told, known)| *known || !told), "{seed:?}");
    assert!(told.contains(&true) && told.contains(&false), "{seed:?}");
    let _ = served.stop();
    chain.verify();
}

#[test]
fn what_clients_write_is_in_the_image() {
    let directory = tempfile::tempdir().unwrap();
    let seed = Seed::new();
    let mut rng = seed.rng();
    let mut chain = chain(directory.path(), &seed);
    let shape = Shape { size: SIZE, longest: 200_000, unit: 4096 };
    for options in [
        &["--cache", "none", "--threads", "1"][..],
        &["--cache", "writeback", "--map-cache", "64k", "--metadata", "ordered"],
    ] {
        let served = Served::start(&[chain.active()], options);
        for _ in 0..3 {
            let ops = shape.ops(&mut rng, 60);
            apply(&served.uri(""), &ops);
            for op in &ops {
                chain.model_mut().apply(op);
            }
        }
        let _ = served.stop();
        chain.verify();
        let ops = shape.ops(&mut rng, 20);
        chain.apply(&Commands::qemu() as &dyn Writer, &ops);
        chain.verify();
    }
}

#[test]
fn fio_verifies_what_it_writes() {
    let directory = tempfile::tempdir().unwrap();
    let seed = Seed::new();
    let chain = chain(directory.path(), &seed);
    let served = Served::start(&[chain.active()], &[]);
    for job in [
        &["--rw=randwrite", "--bsrange=512-128k", "--bs_unaligned", "--iodepth=32"][..],
        &["--rw=randrw", "--bs=4k", "--iodepth=16"],
    ] {
        let uri = format!("--uri={}", served.uri(""));
        let mut command = Command::new(tools::require("fio"));
        command.args(["--name=verify", "--ioengine=nbd", &uri, "--size=16m", "--fsync=50"]);
        command
            .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0"])
            .args(job);
        let done = run(&mut command).ok();
        assert!(done.text().contains("err= 0"), "{}", done.report());
    }
    let _ = served.stop();
    chain.assert_clean();
}

#[test]
fn a_reply_to_one_client_is_seen_by_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    qemu::create(&image, "qcow2", 8 * MIB, "cluster_size=4k");
    let served = Served::start(&[&image], &["--threads", "2"]);
    let mut clients: Vec<_> = (0..3).map(|_| QemuIo::open("raw", served.uri(""))).collect();
    let count = clients.len();
    for turn in 0..60_usize {
        let offset = turn * 7 % 13 * 70_000;
        let (length, pattern) = (90_001 - turn * 700, turn % 250 + 1);
        let writer = &mut clients[turn % count];
        if turn % 5 == 4 {
            writer.ok(&format!("write -z {offset} {length}"));
        } else {
            writer.ok(&format!("write -P {pattern} {offset} {length}"));
        }
        let expected = if turn % 5 == 4 { 0 } else { pattern };
        for other in 1..count {
            clients[(turn + other) % count].ok(&format!("read -P {expected} {offset} {length}"));
        }
    }
    drop(clients);
    let _ = served.stop();
    qemu::assert_clean(&image);
}

#[test]
fn clients_that_share_clusters_do_not_harm_each_other() {
    const CLIENTS: u64 = 4;
    let directory = tempfile::tempdir().unwrap();
    let seed = Seed::new();
    let mut rng = seed.rng();
    let mut chain = chain(directory.path(), &seed);
    for options in ["cluster_size=4k", "extended_l2=on", "cluster_size=2M,lazy_refcounts=on"] {
        chain.add(&Commands::qemu(), options, &[]);
        let served = Served::start(&[chain.active()], &["--threads", "3"]);
        // Every fourth piece of some 1000 bytes is one client's.
        let mut commands: Vec<Vec<String>> = Vec::new();
        for client in 0..CLIENTS {
            let mut pieces: Vec<u64> = (0..600).collect();
            pieces.shuffle(&mut rng);
            let mut all = Vec::new();
            for (number, piece) in pieces.iter().enumerate() {
                let offset = 5_000_003 + (piece * CLIENTS + client) * 1001;
                let length = rng.random_range(1..=1001);
                let op = match number % 6 {
                    5 => Op::Zero { offset, length, unmap: number % 4 == 1 },
                    _ => Op::Write { offset, length, pattern: rng.random() },
                };
                chain.model_mut().apply(&op);
                all.push(format!("aio_{op}"));
                if number % 50 == 49 {
                    all.push("flush".to_owned());
                }
            }
            all.push("aio_flush".to_owned());
            commands.push(all);
        }
        let uri = served.uri("");
        std::thread::scope(|scope| {
            for commands in &commands {
                scope.spawn(|| {
                    let done = qemu::io(Path::new(&uri), "raw", commands).ok();
                    assert!(!done.text().contains("failed"), "{}", done.report());
                });
            }
        });
        let _ = served.stop();
        chain.verify();
    }
}

#[test]
fn each_image_is_an_export() {
    let directory = tempfile::tempdir().unwrap();
    let images: Vec<_> = ["a.qcow2", "b.qcow2", "c.img"]
        .iter()
        .zip(1_u64..)
        .map(|(name, number)| {
            let image = directory.path().join(name);
            qemu::create(&image, "qcow2", number * MIB, "");
            let _ = qemu::io(&image, "qcow2", &[format!("write -P {number} 0 64k")]).ok();
            image
        })
        .collect();
    let served = Served::start(&images, &["--read-only"]);
    let list = run_program(tools::require("nbdinfo"), args!["--list", "--json", served.uri("")]);
    let list = list.ok().json();
    let exports = list["exports"].as_array().unwrap();
    let names: Vec<_> =
        exports.iter().map(|export| export["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    for (name, number) in [("a", 1), ("b", 2), ("c", 3), ("", 1)] {
        let mut client = Command::new(qemu::program("qemu-io"));
        client.args(["-r", "-f", "raw", "-c", "length", "-c"]);
        client.arg(format!("read -P {number} 0 64k")).arg(served.uri(name));
        let done = run(&mut client).ok();
        assert!(done.text().starts_with(&format!("{number} MiB\n")), "{}", done.report());
    }
    // Unknown names are refused.
    let unknown = run_program(tools::require("nbdinfo"), args![served.uri("d")]);
    assert_ne!(unknown.code(), 0, "{}", unknown.report());
    // A read-only server leaves the images to other readers.
    let _ = run_program(qemu::program("qemu-io"), args!["-r", "-c", "length", &images[0]]).ok();
    let _ = served.stop();
}

#[test]
fn an_address_offers_the_exports_that_it_names() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let images = ["a.qcow2", "b.qcow2"].map(at);
    for image in &images {
        qemu::create(image, "qcow2", MIB, "");
    }
    let address = |name: &str, rest: &str| format!("unix:{},{rest}", at(name).display());
    let (own, qmp) = (address("own", "export=b,export=late"), at("qmp"));
    // What may be added is no mistake, unless nobody can add it.
    let mut mistaken = Command::new(ISOBATH);
    mistaken.args(["serve", "--nbd", &own]).args(&images);
    let refused = run(&mut mistaken).exits(1);
    assert!(refused.stderr.contains("there is no export 'late'; there are 'a', 'b'"));

    let control = format!("unix:{}", qmp.display());
    let served = Served::start(&images, &["--nbd", &own, "--qmp", &control]);
    let uri =
        |socket: &str, name: &str| format!("nbd+unix:///{name}?socket={}", at(socket).display());
    let names = |uri: &str| -> Vec<String> {
        let list = run_program(tools::require("nbdinfo"), ["--list", "--json", uri]).ok().json();
        let exports = list["exports"].as_array().unwrap().iter();
        exports.map(|export| export["export-name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&uri("own", "")), ["b"]);
    assert_eq!(names(&served.uri("")), ["a", "b"]);
    let size = |uri: &str| run_program(tools::require("nbdinfo"), ["--size", uri]);
    let _ = size(&uri("own", "b")).ok();
    assert_ne!(size(&uri("own", "a")).code(), 0);
    // What is announced is what can be used.
    let output = served.server.output();
    assert!(output.contains(&uri("own", "b")) && !output.contains(&uri("own", "a")), "{output}");

    let mut control = Control::connect(&qmp);
    let (node, _) = control.nodes().unwrap().swap_remove(0);
    for id in ["late", "other"] {
        let export = json!({"type": "nbd", "id": id, "name": id, "node-name": node});
        control.execute("block-export-add", &export).unwrap();
    }
    assert_eq!(names(&uri("own", "")), ["b", "late"]);
    assert_eq!(names(&served.uri("")), ["a", "b", "late", "other"]);
    let _ = served.stop();
}

#[test]
fn qemu_takes_the_printed_options() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("it's, a disk.qcow2");
    qemu::create(&image, "qcow2", MIB, "");
    let served = Served::start(&[&image], &["--nbd", "127.0.0.1:0"]);
    let output = served.server.output();
    let options: Vec<_> = output.lines().filter(|line| line.starts_with("    -")).collect();
    assert_eq!(options.len(), 4, "{output}");
    for line in options {
        let machine = qemu::program("qemu-system-x86_64");
        let script = format!(
            "printf 'info block\\nquit\\n' | {} -nodefaults -display none -S -monitor stdio {line}",
            machine.display()
        );
        let done = run_program("sh", ["-c", &script]).ok();
        let text = done.text();
        assert!(
            text.contains("it's, a disk") || text.contains("it%27s%2C%20a%20disk"),
            "{line}\n{text}"
        );
    }
    for line in output.lines().filter(|line| line.starts_with("  nbd")) {
        let info = run_program(tools::require("nbdinfo"), ["--size", line.trim()]).ok();
        assert_eq!(info.text().trim(), MIB.to_string(), "{line}");
    }
    let _ = served.stop();
}
