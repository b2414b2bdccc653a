//! What `qemu-img` and `qemu-io` do to an image.

use super::chains::{Chain, Flavour, KINDS, LAYERS, TOP, TOP_NAME, isobath, name, own};
use super::judge::Effect::{Changes, Damages, Keeps};
use super::judge::on_each_layer;
use isobath_qcow2::Header;
use isobath_testkit::args;
use isobath_testkit::bytes::first_difference;
use std::fs;

#[test]
fn internal_snapshots() {
    let snapshot = |chain: &Chain, layer, how| {
        chain.is_qcow2(layer) && chain.qemu_img(["snapshot", how, "one", &name(layer)])
    };
    let write = |chain: &Chain, layer| chain.qemu_io(layer, &["write -P 200 100k 90k"]);
    on_each_layer("snapshot -c", Changes, 0..LAYERS, |c, n| snapshot(c, n, "-c"));
    on_each_layer("snapshot -c -a", Changes, 0..LAYERS, |c, n| {
        snapshot(c, n, "-c") && write(c, n) && snapshot(c, n, "-a")
    });
    on_each_layer("snapshot -c -d", Changes, 0..LAYERS, |c, n| {
        snapshot(c, n, "-c") && write(c, n) && snapshot(c, n, "-d")
    });
}

#[test]
fn rebases() {
    let other = |chain: &Chain| {
        chain.qemu_img(["create", "-q", "-f", "qcow2", "other", "1M"])
            && chain.qemu_img([
                "bench",
                "-q",
                "-w",
                "-c",
                "9",
                "-s",
                "20k",
                "--pattern=77",
                "other",
            ])
    };
    let rebase = |chain: &Chain, layer: usize, how: &[&str]| {
        chain.is_qcow2(layer)
            && chain.qemu_img([&["rebase", "-f", "qcow2"], how, &[&name(layer)]].concat())
    };
    on_each_layer("rebase -b other", Changes, 1..LAYERS, |c, n| {
        let _ = other(c);
        rebase(c, n, &["-F", "qcow2", "-b", "other"])
    });
    on_each_layer("rebase -b l0", Changes, 2..LAYERS, |c, n| {
        rebase(c, n, &["-F", c.format(0), "-b", "l0"])
    });
    on_each_layer("rebase -b ''", Changes, 1..LAYERS, |c, n| rebase(c, n, &["-b", ""]));
    on_each_layer("rebase -u -b l0", Changes, 2..LAYERS, |c, n| {
        rebase(c, n, &["-u", "-F", c.format(0), "-b", "l0"])
    });
    on_each_layer("rebase -u -b ''", Changes, 1..LAYERS, |c, n| rebase(c, n, &["-u", "-b", ""]));
    on_each_layer("rebase -u to the same", Keeps, 1..LAYERS, |c, n| {
        rebase(c, n, &["-u", "-F", c.format(n - 1), "-b", &name(n - 1)])
    });
}

#[test]
fn commits() {
    on_each_layer("commit", Changes, 1..LAYERS, |c, n| c.qemu_img(["commit", "-q", &name(n)]));
    on_each_layer("commit -d", Changes, 1..LAYERS, |c, n| {
        c.qemu_img(["commit", "-q", "-d", &name(n)])
    });
    on_each_layer("commit -b l0", Changes, 2..LAYERS, |c, n| {
        c.qemu_img(["commit", "-q", "-b", "l0", &name(n)])
    });
    on_each_layer("commit -b l1", Changes, 3..LAYERS, |c, n| {
        c.qemu_img(["commit", "-q", "-b", "l1", &name(n)])
    });
}

/// Grows or shrinks a layer; whether that was done.
fn resize(chain: &Chain, layer: usize, mode: &str, by: &str) -> bool {
    let arguments = args!["resize", "-q", "--shrink", "-f", chain.format(layer)];
    let preallocation = args![format!("--preallocation={mode}")];
    chain.qemu_img([arguments, preallocation, args![name(layer), by]].concat())
}

#[test]
fn resizes() {
    for (mode, by) in [
        ("off", "+300k"),
        ("metadata", "+100k"),
        ("metadata", "+300k"),
        ("falloc", "+300k"),
        ("full", "+300k"),
        ("off", "-300k"),
    ] {
        on_each_layer(&format!("resize {mode} {by}"), Changes, 0..LAYERS, |chain, layer| {
            resize(chain, layer, mode, by)
        });
    }
}

/// With `metadata`, QEMU shows what is in the free clusters that it takes for it (7.2 and 10, also on
/// images that nobody but QEMU wrote): nothing is asked of that one.
#[test]
fn a_grown_disk_ends_with_zeroes() {
    for mode in ["off", "falloc", "full"] {
        for flavour in super::chains::FLAVOURS {
            for (kind, layers) in KINDS.iter().enumerate() {
                println!("{mode}, kind {kind}, {flavour:?}");
                let chain = Chain::new(kind, flavour);
                let size = layers[TOP].2 as usize;
                if !resize(&chain, TOP, mode, "+64k") {
                    continue;
                }
                let (bytes, _) = super::judge::read_both(chain.directory()).unwrap();
                assert_eq!(first_difference(&bytes[size..], &vec![0; 64 << 10]), None);
            }
        }
    }
}

#[test]
fn amendments() {
    for option in
        ["compat=0.10", "compat=1.1", "lazy_refcounts=on", "refcount_bits=8", "refcount_bits=64"]
    {
        on_each_layer(&format!("amend {option}"), Changes, 0..LAYERS, |chain, layer| {
            chain.is_qcow2(layer)
                && chain.qemu_img(["amend", "-f", "qcow2", "-o", option, &name(layer)])
        });
    }
}

#[test]
fn bitmaps_and_checks() {
    let bitmap = |chain: &Chain, layer, how: &[&str]| {
        chain.is_qcow2(layer)
            && chain.qemu_img([&["bitmap", "-f", "qcow2"], how, &[&name(layer), "one"]].concat())
    };
    on_each_layer("bitmap --add", Changes, 0..LAYERS, |c, n| bitmap(c, n, &["--add"]));
    on_each_layer("bitmap --remove", Changes, 0..LAYERS, |c, n| {
        bitmap(c, n, &["--add"]) && bitmap(c, n, &["--remove"])
    });
    on_each_layer("bitmap --merge", Changes, 0..LAYERS, |c, n| {
        let two = ["bitmap", "--add", "-f", "qcow2", &name(n), "two"];
        bitmap(c, n, &["--add"])
            && c.qemu_io(n, &["write -P 99 600k 64k"])
            && c.qemu_img(two)
            && bitmap(c, n, &["--merge", "two"])
    });
    for which in ["leaks", "all"] {
        on_each_layer(&format!("check -r {which}"), Keeps, 0..LAYERS, |chain, layer| {
            chain.is_qcow2(layer) && chain.qemu_img(["check", "-q", "-r", which, &name(layer)])
        });
    }
}

#[test]
fn conversions_into_a_layer() {
    on_each_layer("convert -n", Changes, 0..LAYERS, |chain, layer| {
        let bytes: Vec<u8> = (0..chain.kind[layer].2).map(|at| (at >> 13) as u8).collect();
        fs::write(chain.directory().join("source"), bytes).unwrap();
        let arguments = args!["convert", "-n", "-f", "raw", "-O", chain.format(layer), "source"];
        chain.qemu_img([arguments, args![name(layer)]].concat())
    });
}

#[test]
fn writes() {
    for command in [
        "write -P 201 150k 200k",
        "write -P 202 350001 77",
        "write -z 150k 200k",
        "write -z -u 150k 200k",
        "discard 150k 200k",
        "discard 0 390k",
        "write -c -P 203 192k 64k",
    ] {
        on_each_layer(command, Changes, 0..LAYERS, |c, n| c.qemu_io(n, &[command]));
    }
    on_each_layer("a write in place", Keeps, 0..LAYERS, |chain, layer| {
        chain.qemu_io(layer, &[&format!("write -P 204 {} 4k", own(layer) + 8192)])
    });
}

/// Where an image's file has its first L2 entry of data.
fn an_l2_entry(bytes: &[u8]) -> Option<usize> {
    let header = Header::parse(bytes).ok()?;
    let be64 = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let address = |entry: u64| (entry & ((1 << 56) - 1) & !0x1ff) as usize;
    let l1 = header.l1_table_offset.get() as usize;
    let l2 = address(be64(l1)?);
    let mut entries = (l2..l2 + 4096).step_by(8);
    (l2 != 0).then(|| entries.find(|at| be64(*at).is_some_and(|entry| address(entry) != 0)))?
}

#[test]
fn flipped_bits_of_tables() {
    // In a cluster's address: the next cluster, one far away, one off the clusters; what it is.
    for bit in [16, 15, 14, 12, 24, 33, 9, 0, 62, 63] {
        on_each_layer(&format!("bit {bit}"), Damages, 0..LAYERS, |chain, layer| {
            let mut bytes = fs::read(chain.path(layer)).unwrap();
            let Some(at) = chain.is_qcow2(layer).then(|| an_l2_entry(&bytes)).flatten() else {
                return false;
            };
            bytes[at + 7 - bit / 8] ^= 1 << (bit % 8);
            fs::write(chain.path(layer), bytes).unwrap();
            true
        });
    }
}

#[test]
fn a_chain_is_believed_until_something_happens() {
    for flavour in [Flavour::Grown, Flavour::Indexed] {
        for kind in 0..KINDS.len() {
            println!("kind {kind}, {flavour:?}");
            let chain = Chain::new(kind, flavour);
            for layer in (0..LAYERS).filter(|layer| chain.is_qcow2(*layer)) {
                isobath_testkit::qemu::assert_clean(&chain.path(layer));
            }
            assert!(super::judge::verify(chain.directory()));
            assert_eq!(super::judge::holds(chain.directory()), Some(true));
            let (_, messages) = super::judge::read_both(chain.directory()).unwrap();
            assert_eq!(messages, Vec::<String>::new());
            let drop = isobath(chain.directory(), ["index", "--drop", TOP_NAME]).ok();
            assert_eq!(drop.text(), "Index removed.\n");
            assert_eq!(super::judge::holds(chain.directory()), None);
            let _ = super::judge::read_both(chain.directory()).unwrap();
            isobath_testkit::qemu::assert_clean(&chain.path(TOP));
        }
    }
}
