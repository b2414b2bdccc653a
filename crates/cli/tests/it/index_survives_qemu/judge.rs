//! What must hold of a chain after whatever was done to it.

use super::chains::{Chain, FLAVOURS, Flavour, KINDS, LAYERS, TOP, TOP_NAME};
use super::chains::{isobath, logged, mapping, name, qemu_img};
use isobath_qcow2::Header;
use isobath_testkit::args;
use isobath_testkit::bytes::first_difference;
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::ops::Range;
use std::path::Path;

/// What an operation does to the layer that it is applied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Its mapping stays, and so does what is in free clusters: an index above must still hold.
    Keeps,
    /// Its mapping may change, and then the index must not hold.
    Changes,
    /// As with `Changes`, and QEMU need not find the image sound.
    Damages,
}

/// Whether every case is tried: `make index-cases` asks for that, which takes minutes.
pub(crate) fn every_case() -> bool {
    std::env::var_os("ISOBATH_EVERY_CASE").is_some()
}

/// Does an operation to each of the layers in turn, of chains of every flavour, and judges each
/// result. The operation tells whether it could be done. Unless [every case](every_case) is tried, it is a quarter of
/// them: every other layer, whose flavours take turns; the seed and the operation say which.
#[track_caller]
pub(crate) fn on_each_layer(
    what: &str,
    effect: Effect,
    layers: Range<usize>,
    operation: impl Fn(&Chain, usize) -> bool,
) {
    let mut done = 0;
    let first: usize = what.bytes().map(usize::from).sum();
    let seed = Seed::new();
    // Not what the kind follows from, so that all kinds are tried.
    let quarter = (!every_case()).then(|| first / KINDS.len() + (seed.value() % 4) as usize);
    for flavour in FLAVOURS {
        for layer in layers.clone() {
            let number = layer + 2 * flavour as usize;
            if quarter.is_some_and(|quarter| !(quarter + number).is_multiple_of(4)) {
                continue;
            }
            let kind = (first + layer + flavour as usize) % KINDS.len();
            println!("{what} on layer {layer}, kind {kind}, {flavour:?}");
            let chain = Chain::new(kind, flavour);
            if operation(&chain, layer) {
                done += 1;
                judge(&chain, effect, layer, flavour);
            } else {
                println!("not done");
            }
        }
    }
    assert!(done > 0 || quarter.is_some(), "{what} was never done");
}

/// The files of the chain of an image, the base first; `None` where QEMU cannot open it.
fn files(directory: &Path) -> Option<Vec<Value>> {
    let arguments = ["info", "-U", "--backing-chain", "--output=json", "-f", "qcow2", TOP_NAME];
    let info = qemu_img(directory, arguments);
    let mut files = (info.code() == 0).then(|| info.json().as_array().unwrap().clone())?;
    files.reverse();
    Some(files)
}

/// Whether a file of the chain is what was made for this layer, to the byte: then QEMU need not be asked about it.
fn is_as_made(chain: &Chain, layer: usize, file: &Value) -> bool {
    layer < LAYERS
        && file["filename"] == name(layer)
        && file["format"] == chain.format(layer)
        && chain.is_as_made(layer)
}

/// Whether the layers below the active one are not those of the new chain any more.
fn has_changed(chain: &Chain, files: &[Value]) -> bool {
    let differs = |(layer, file): (usize, &Value)| {
        let path = chain.directory().join(file["filename"].as_str().unwrap());
        !is_as_made(chain, layer, file)
            && mapping(&path, file["format"].as_str().unwrap()) != chain.mapping(layer)
    };
    files.len() != LAYERS || files[..TOP].iter().enumerate().any(differs)
}

/// What was logged about indexes; fails the test where it was logged twice.
#[track_caller]
pub(crate) fn logged_of_indexes(stderr: &str) -> Vec<String> {
    let message = |line: &str| {
        let (_, message) = line.split_once(" INFO ").or_else(|| line.split_once(" WARN "))?;
        Some(message.to_owned())
    };
    let lines = stderr.lines().filter_map(message);
    let found: Vec<String> = lines.filter(|line| line.contains("the index of")).collect();
    let different: HashSet<&String> = found.iter().collect();
    assert_eq!(different.len(), found.len(), "{found:#?}");
    found
}

/// The bytes of the disk as the programs give them, and what isobath said of indexes; `None` where QEMU
/// refuses, and isobath too.
#[track_caller]
pub(crate) fn read_both(directory: &Path) -> Option<(Vec<u8>, Vec<String>)> {
    let arguments = |to| args!["convert", "-f", "qcow2", "-O", "raw", TOP_NAME, to];
    let theirs = qemu_img(directory, arguments("theirs.raw"));
    let ours = logged(directory, arguments("ours.raw"), "info");
    let reports = format!("{}\n{}", theirs.report(), ours.report());
    // What was cut off the end of a file is zeroes to QEMU, and an error here.
    let refused = theirs.code() != 0 || ours.stderr.contains("past the end of the file");
    assert_eq!(ours.code(), i32::from(refused), "{reports}");
    if refused {
        return None;
    }
    let theirs = fs::read(directory.join("theirs.raw")).unwrap();
    let bytes = fs::read(directory.join("ours.raw")).unwrap();
    assert_eq!(first_difference(&theirs, &bytes), None, "{reports}");
    Some((bytes, logged_of_indexes(&ours.stderr)))
}

/// Whether the active image's index holds, as `isobath info` says it; `None` if it has none.
#[track_caller]
pub(crate) fn holds(directory: &Path) -> Option<bool> {
    let info = isobath(directory, ["info", "--output=json", "-f", "qcow2", TOP_NAME]).ok();
    info.json()["format-specific"]["data"]["direct-access-index"]["valid"].as_bool()
}

/// Whether the index holds, as `isobath index --verify` says it: anything but an index that is
/// believed and wrong.
#[track_caller]
pub(crate) fn verify(directory: &Path) -> bool {
    let verified = isobath(directory, ["index", "--verify", TOP_NAME]);
    let report = verified.report();
    assert!(!verified.text().contains("differs"), "{report}");
    match verified.code() {
        0 => true,
        2 => {
            let damaged = verified.text().contains("overwritten at");
            assert!(verified.stderr.contains("out of date") != damaged, "{report}");
            false
        }
        _ => panic!("{report}"),
    }
}

/// Fails the test unless the chain is read right whatever its index is, the index is believed only
/// where it may be, and a new one can be made.
#[track_caller]
pub(crate) fn judge(chain: &Chain, effect: Effect, layer: usize, flavour: Flavour) {
    let directory = chain.directory();
    let both = read_both(directory);
    let Some(files) = files(directory) else {
        assert!(both.is_none(), "QEMU reads a chain that it cannot describe");
        return;
    };
    let changed = has_changed(chain, &files);
    let top = fs::read(chain.path(TOP)).unwrap();
    let has_index = Header::parse(&top).is_ok_and(|header| header.index().is_some());
    assert!(has_index || effect == Effect::Damages || layer == TOP, "the index is gone");
    let mut clean = true;
    if effect != Effect::Damages {
        let asked = files
            .iter()
            .enumerate()
            .filter(|(layer, file)| file["format"] == "qcow2" && !is_as_made(chain, *layer, file));
        for (_, file) in asked {
            let check = qemu::check(&directory.join(file["filename"].as_str().unwrap()));
            assert!(check.code() == 0, "{}", check.report());
        }
    } else if let Some(file) = files.last() {
        clean = qemu::check(&directory.join(file["filename"].as_str().unwrap())).code() == 0;
    }
    if has_index {
        let valid = holds(directory).unwrap();
        let verified = verify(directory);
        assert!(valid || !verified, "valid {valid}, verified {verified}");
        assert!(!(changed && valid), "a changed chain's index is believed");
        if effect == Effect::Keeps && layer != TOP {
            assert!(!changed, "the operation changes mappings");
            assert!(valid && verified, "an index is given up although nothing changed");
        }
        if let Some((_, messages)) = &both {
            // The first is of this index, another of one below that was then tried.
            let said = messages.first().is_some_and(|line| line.contains("'l4'"));
            let expected = !verified && files.len() > 1;
            assert!(said == expected && messages.is_empty() != expected, "{messages:#?}");
        }
    }
    if files.len() == 1 {
        let anew = isobath(directory, ["index", "-q", TOP_NAME]).exits(1);
        assert!(anew.stderr.contains("no backing file"), "{}", anew.report());
        return;
    }
    if effect == Effect::Damages && (both.is_none() || !clean) {
        // It may refuse what is broken; what it does must be right.
        let _ = isobath(directory, ["index", "-q", TOP_NAME]);
        let again = read_both(directory).map(|(bytes, _)| bytes);
        assert!(again == both.map(|(bytes, _)| bytes), "an index changed the disk");
        return;
    }
    let mut expected = both.unwrap().0;
    write(directory, &mut expected);
    let _ = isobath(directory, ["index", "-q", TOP_NAME]).ok();
    assert!(verify(directory), "a new index does not hold");
    let (bytes, messages) = read_both(directory).unwrap();
    assert_eq!(messages, Vec::<String>::new());
    assert_eq!(first_difference(&expected, &bytes), None, "{flavour:?}");
    qemu::assert_clean(&chain.path(TOP));
}

/// Writes parts of clusters to the active image, the rest of which comes from the layers below.
#[track_caller]
fn write(directory: &Path, disk: &mut [u8]) {
    let mut arguments = args!["io", "-f", "qcow2"];
    for (start, length) in [(133_000, 700), (200_001, 5000), (391_000, 333)] {
        arguments.extend(args!["-c", format!("write -P 251 {start} {length}")]);
        disk[start..start + length].fill(251);
    }
    arguments.push(TOP_NAME.into());
    let _ = isobath(directory, arguments).ok();
}
