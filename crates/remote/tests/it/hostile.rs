//! Manifests that are damaged or malicious.

use crate::chains::{Chain, fetch, gc, is_whole, send, verify};
use crate::stores::{self, Watched};
use isobath_remote::{Digest, Error, Heads, Manifest, Names, Progress, Target, list, pull};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// A manifest of three layers, changed.
fn changed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let layer = |file: &str, backing: Option<&str>| {
        let mut layer = json!({
            "digest": digest, "length": 1000, "format": "qcow2", "size": 512, "file": file, "table": digest,
        });
        if let Some(backing) = backing {
            layer["backing"] = backing.into();
        }
        layer
    };
    let mut manifest = json!({
        "format": "isobath-chain",
        "version": 2,
        "size": 512,
        "heads": { "digest": digest, "length": 40 },
        "index": { "digest": digest, "length": 100 },
        "layers": [layer("a", None), layer("b", Some("a")), layer("c", Some("b"))],
    });
    change(&mut manifest);
    serde_json::to_vec(&manifest).unwrap()
}

/// Each layer may be as long, but not so many of them.
fn huge(manifest: &mut Value) {
    manifest["layers"][0]["length"] = json!(1_u64 << 56);
    manifest["layers"][1]["length"] = json!(1_u64 << 56);
    let base = manifest["layers"][0].clone();
    let mut layers = vec![manifest["layers"][1].clone(); 300];
    layers[0] = base;
    manifest["layers"] = layers.into();
}

#[test]
fn chains_are_listed_although_one_says_that_it_has_more_bytes_than_can_be() {
    let chain = Chain::small("disk.qcow2", 1);
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    fs::write(kept.path().join("manifests/huge.json"), changed(huge)).unwrap();
    let listed = list(&store).unwrap();
    assert_eq!(listed.len(), 2);
    assert!(listed[0].chain.is_err() && listed[1].chain.is_ok(), "{listed:?}");
    assert!(verify(&store, "huge").is_err());
}

#[test]
fn no_table_is_read_of_a_layer_that_is_shorter_than_the_manifest_says() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let path = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let length = fs::metadata(chain.path(0)).unwrap().len();
    let changed = text.replace(
        &format!("\"length\":{length},\"format\":\"raw\""),
        &format!("\"length\":{},\"format\":\"raw\"", 1_u64 << 36),
    );
    assert_ne!(changed, text);
    fs::write(&path, &changed).unwrap();
    let manifest = Manifest::decode("vm", changed.as_bytes()).unwrap();
    let table = kept.path().join("tables").join(manifest.layers[0].table.to_string());
    fs::File::options().write(true).open(table).unwrap().set_len((1 << 36) / (16 << 10)).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let error = fetch(&store, "vm", directory.path()).unwrap_err().to_string();
    assert!(error.contains("layers/"), "{error}");
}

#[test]
fn no_more_of_a_table_is_read_than_is_needed_for_what_is_read_of_the_layer() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    // A layer and a table that agree in their lengths, and take no room in the store.
    let length = 1_u64 << 42;
    let path = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let old = fs::metadata(chain.path(0)).unwrap().len();
    let changed = text.replace(
        &format!("\"length\":{old},\"format\":\"raw\",\"size\":{old}"),
        &format!("\"length\":{length},\"format\":\"raw\",\"size\":{length}"),
    );
    assert_ne!(changed, text);
    fs::write(&path, &changed).unwrap();
    let layer = &Manifest::decode("vm", changed.as_bytes()).unwrap().layers[0];
    for (kind, digest, length) in
        [("layers", layer.digest, length), ("tables", layer.table, length / (16 << 10))]
    {
        let object = kept.path().join(kind).join(digest.to_string());
        fs::File::options().write(true).open(object).unwrap().set_len(length).unwrap();
    }
    let watched = Watched::recording(&store);
    let directory = tempfile::tempdir().unwrap();
    let error = fetch(&watched, "vm", directory.path()).unwrap_err().to_string();
    assert!(error.contains("remote verify"), "{error}");
    let asked = watched.asked();
    let tables = asked.iter().filter(|(_, key, _)| key.starts_with("tables/"));
    let bytes: usize = tables.map(|(_, _, length)| length).sum();
    assert!(bytes < 64 << 10, "{bytes} bytes of tables");
}

#[test]
fn a_table_that_is_read_in_several_parts_finds_damage_in_each_and_matches_its_digest() {
    // The second part of the table begins at 256 MiB.
    let (size, places) = ((256 << 20) + (9 << 20) + 512, [5 << 20, (256 << 20) + 7, (265 << 20)]);
    let directory = tempfile::tempdir().unwrap();
    let image = fs::File::create(directory.path().join("base.raw")).unwrap();
    image.set_len(size).unwrap();
    for place in places {
        image.write_all_at(b"text", place).unwrap();
    }
    let chain = Chain { directory, names: vec!["base.raw".to_owned()] };
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    is_whole(&store, "vm");
    let target = tempfile::tempdir().unwrap();
    fetch(&store, "vm", target.path()).unwrap();
    chain.is_part(target.path(), true);
    let text = fs::read_to_string(kept.path().join("manifests/vm.json")).unwrap();
    let layer = &Manifest::decode("vm", text.as_bytes()).unwrap().layers[0];
    let [layer, table] = [("layers", layer.digest), ("tables", layer.table)]
        .map(|(kind, digest)| format!("{kind}/{digest}"));
    let parts =
        places.map(|place| (&layer, place)).into_iter().chain([(&table, 3), (&table, 16_385)]);
    for (object, place) in parts {
        let file = fs::File::options().read(true).write(true).open(kept.path().join(object));
        let (file, mut byte) = (file.unwrap(), [0]);
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 1], place).unwrap();
        let found = verify(&store, "vm").unwrap().problems;
        assert!(found.len() == 1 && found[0].starts_with(&format!("'{object}'")), "{found:?}");
        let target = tempfile::tempdir().unwrap();
        let error = fetch(&store, "vm", target.path()).unwrap_err();
        assert!(matches!(&error, Error::Damaged(text) if text.contains(object)), "{error}");
        assert!(fs::read_dir(target.path()).unwrap().next().is_none());
        file.write_all_at(&byte, place).unwrap();
    }
    is_whole(&store, "vm");
}

#[test]
fn an_object_is_asked_for_once_where_its_length_is_known() {
    let chain = Chain::new();
    let (_kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let watched = Watched::recording(&store);
    let (directory, progress) = (tempfile::tempdir().unwrap(), Progress::default());
    let target = Target { directory: directory.path().to_owned(), name: None };
    pull(&watched, "vm", &target, Names::Rebased, &progress).unwrap();
    for (what, key, _) in watched.asked() {
        assert!(what != "head" || key.starts_with("layers/"), "{what} {key}");
    }
}

#[test]
fn heads_that_have_another_header_or_l1_table_than_a_layer_are_found() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let path = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let manifest = Manifest::decode("vm", text.as_bytes()).unwrap();
    let heads = fs::read(kept.path().join(format!("heads/{}", manifest.heads.digest))).unwrap();
    let header = heads.windows(4).position(|bytes| bytes == b"QFI\xfb").unwrap();
    // The top's L1 table and its checksums are the last.
    let table = Heads::decode(&heads, 3).unwrap().layers()[2].table.len();
    for at in [header + 8, heads.len() - table - 1] {
        let mut changed = heads.clone();
        changed[at] ^= 1;
        let digest = Digest::of(&changed);
        fs::write(kept.path().join(format!("heads/{digest}")), changed).unwrap();
        let named = text.replace(&manifest.heads.digest.to_string(), &digest.to_string());
        fs::write(&path, named).unwrap();
        let found = verify(&store, "vm").unwrap().problems;
        assert!(found.len() == 1 && found[0].contains("L1 table"), "{at}: {found:?}");
        let (directory, progress) = (tempfile::tempdir().unwrap(), Progress::default());
        let target = Target { directory: directory.path().to_owned(), name: None };
        // Nothing of the heads goes into files that are as they were pushed.
        pull(&store, "vm", &target, Names::Kept, &progress).unwrap();
        chain.is_part(directory.path(), true);
        for name in &chain.names {
            fs::remove_file(directory.path().join(name)).unwrap();
        }
        let error = pull(&store, "vm", &target, Names::Rebased, &progress).unwrap_err();
        assert!(error.to_string().contains("L1 table"), "{error}");
        assert!(!directory.path().join("top.qcow2").exists());
    }
    // A push makes them right.
    send(&store, "vm", &chain).unwrap();
    is_whole(&store, "vm");
}

#[test]
fn heads_and_indexes_that_do_not_belong_to_each_other_are_found() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let path = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let manifest = Manifest::decode("vm", text.as_bytes()).unwrap();
    let index = manifest.index.clone().unwrap();
    let heads = fs::read(kept.path().join(format!("heads/{}", manifest.heads.digest))).unwrap();
    let known = Heads::decode(&heads, 3).unwrap();
    let root = known.index().unwrap().root.len();
    let from = heads.windows(4).position(|bytes| bytes == b"IALL").unwrap();
    // The number of layers and the size in the root; the checksums of the index; those of the top.
    let changes = [
        (from + 11, "no root"),
        (from + 22, "no root"),
        (from + root, "other checksums"),
        (heads.len() - 1, "tables/"),
    ];
    for (at, what) in changes {
        let mut changed = heads.clone();
        changed[at] ^= 1;
        let digest = Digest::of(&changed);
        fs::write(kept.path().join(format!("heads/{digest}")), changed).unwrap();
        fs::write(&path, text.replace(&manifest.heads.digest.to_string(), &digest.to_string()))
            .unwrap();
        let found = verify(&store, "vm").unwrap().problems;
        assert!(found.len() == 1 && found[0].contains(what), "{what}: {found:?}");
        let directory = tempfile::tempdir().unwrap();
        fetch(&store, "vm", directory.path()).unwrap();
        chain.is_part(directory.path(), true);
    }
    let own = format!(",\"index\":{{\"digest\":\"{}\",\"length\":{}}}", index.digest, index.length);
    assert!(text.contains(&own), "{text}");
    fs::write(&path, text.replace(&own, "")).unwrap();
    let found = verify(&store, "vm").unwrap().problems;
    assert!(found.len() == 1 && found[0].contains("another index than the manifest"), "{found:?}");
    fs::write(&path, &text).unwrap();
    is_whole(&store, "vm");
    // What is damaged, short or missing is found, and a push makes it right.
    let object = kept.path().join(format!("indexes/{}", index.digest));
    let right = fs::read(&object).unwrap();
    let mut wrong = right.clone();
    *wrong.last_mut().unwrap() ^= 1;
    for bytes in [Some(&wrong[..]), Some(&right[1..]), None] {
        fs::remove_file(&object).unwrap();
        if let Some(bytes) = bytes {
            fs::write(&object, bytes).unwrap();
        }
        let found = verify(&store, "vm").unwrap().problems;
        assert!(found.len() == 1 && found[0].contains("indexes/"), "{found:?}");
        // One of the right length counts as there.
        if bytes.is_some_and(|bytes| bytes.len() == right.len()) {
            fs::remove_file(&object).unwrap();
        }
        send(&store, "vm", &chain).unwrap();
        is_whole(&store, "vm");
    }
}

#[test]
fn a_store_names_no_hidden_file_and_writes_no_line_of_a_message() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let path = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let hidden = text.replace("\"file\":\"base.raw\"", "\"file\":\".bash_profile\"");
    assert_ne!(hidden, text);
    fs::write(&path, hidden).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let target = Target { directory: directory.path().to_owned(), name: None };
    let progress = Progress::default();
    let pulled = pull(&store, "vm", &target, Names::Rebased, &progress).unwrap();
    assert!(!directory.path().join(".bash_profile").exists());
    chain.reads_as(&pulled.image);
    for (name, given) in [(".profile", None), (".profile", Some("top.qcow2"))] {
        let changed = text.replace("\"file\":\"top.qcow2\"", &format!("\"file\":\"{name}\""));
        assert_ne!(changed, text);
        fs::write(&path, changed).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let (path, name) = (directory.path().to_owned(), given.map(str::to_owned));
        let target = Target { directory: path, name };
        let pulled = pull(&store, "vm", &target, Names::Kept, &progress);
        assert_eq!(pulled.is_ok(), given.is_some(), "{pulled:?}");
    }
    fs::write(&path, text.replace("\"file\":\"top.qcow2\"", "\"file\":\"a\\nb\"")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a\nb"), "mine").unwrap();
    let error = fetch(&store, "vm", directory.path()).unwrap_err().to_string();
    assert!(error.contains("exists") && !error.contains('\n'), "{error:?}");
}

#[test]
fn a_manifest_is_read_as_it_is_written() {
    let bytes = changed(|_| ());
    let manifest = Manifest::decode("vm", &bytes).unwrap();
    assert_eq!(Manifest::decode("vm", &manifest.encode().unwrap()).unwrap(), manifest);
    // What a later program adds without need is not in the way.
    let more = changed(|manifest| manifest["traces"] = json!([{ "digest": 7 }]));
    assert_eq!(Manifest::decode("vm", &more).unwrap(), manifest);
}

#[test]
fn what_a_manifest_must_not_say_is_refused_with_a_reason() {
    type Change = fn(&mut Value);
    let cases: &[(Change, &str)] = &[
        (|m| m["format"] = "other".into(), "format"),
        (|m| m["version"] = 3.into(), "use a newer one"),
        (|m| m["version"] = 0.into(), "use a newer one"),
        (|m| m["version"] = 1.into(), "which version 1 has not"),
        (|m| m["version"] = json!(18_446_744_073_709_551_615_u64), "use a newer one"),
        (|m| m["version"] = (-1).into(), "damaged"),
        (|m| m["version"] = "1".into(), "damaged"),
        (|m| m["size"] = 1024.into(), "top layer"),
        (|m| m["size"] = 0.5.into(), "damaged"),
        (|m| m["layers"] = json!([]), "0 layers"),
        (|m| m["layers"] = json!({}), "damaged"),
        (|m| m["layers"] = Value::Null, "damaged"),
        (|m| m["layers"] = vec![m["layers"][1].clone(); 65_537].into(), "65537 layers"),
        (|m| m["heads"]["length"] = json!(1_u64 << 40), "heads"),
        (|m| m["heads"]["digest"] = "../../etc/passwd".into(), "64 digits"),
        (|m| m["index"]["length"] = 0.into(), "its index has 0 bytes"),
        (|m| m["index"]["length"] = json!((256_u64 << 20) + 1), "its index has 268435457 bytes"),
        (|m| m["index"]["digest"] = "../../etc/passwd".into(), "64 digits"),
        (|m| m["index"] = json!({ "length": 5 }), "damaged"),
        (|m| m["layers"][0]["digest"] = "../manifests/vm.json".into(), "64 digits"),
        (|m| m["layers"][0]["digest"] = "A".repeat(64).into(), "64 digits"),
        (|m| m["layers"][0]["table"] = "".into(), "64 digits"),
        (|m| m["layers"][0]["length"] = json!(u64::MAX), "layer 0"),
        (|m| m["layers"][1]["size"] = json!(1_u64 << 57), "layer 1"),
        (|m| m["layers"][0]["format"] = "vmdk".into(), "damaged"),
        (|m| m["layers"][0]["file"] = "../a".into(), "without a directory"),
        (|m| m["layers"][0]["file"] = "/etc/passwd".into(), "without a directory"),
        (|m| m["layers"][0]["file"] = "..".into(), "without a directory"),
        (|m| m["layers"][0]["file"] = ".".into(), "without a directory"),
        (|m| m["layers"][0]["file"] = "".into(), "without a directory"),
        (|m| m["layers"][0]["file"] = "a\0b".into(), "without a directory"),
        (|m| m["layers"][0]["file"] = "a".repeat(256).into(), "without a directory"),
        (|m| m["layers"][0]["backing"] = "x".into(), "is the base"),
        (|m| m["layers"][1]["backing"] = Value::Null, "no backing file"),
        (|m| m["layers"][1]["backing"] = "".into(), "backing file of 0"),
        (|m| m["layers"][1]["backing"] = "x".repeat(1024).into(), "backing file of 1024"),
        (|m| m["layers"][1]["backing"] = "a\0".into(), "backing file of 2"),
        (|m| m["layers"][1]["format"] = "raw".into(), "is raw"),
        (|m| m["layers"][1]["backing_format"] = "raw".into(), "but that is qcow2"),
        (|m| m["layers"][2]["backing_format"] = "vmdk".into(), "but that is qcow2"),
        (|m| m["layers"][2]["backing_format"] = "QCOW2".into(), "but that is qcow2"),
        (|m| m["layers"][2]["backing_format"] = "x".repeat(1000).into(), "but that is qcow2"),
        (|m| m["layers"][0]["format"] = "raw".into(), "does not say"),
        (
            |m| {
                m["layers"][0]["format"] = "raw".into();
                m["layers"][1]["backing_format"] = "qcow2".into();
            },
            "but that is raw",
        ),
        (|m| m["layers"][0]["backing_format"] = "qcow2".into(), "has no backing file"),
        (huge, "together"),
    ];
    for (number, (change, reason)) in cases.iter().enumerate() {
        let error = Manifest::decode("vm", &changed(change)).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("'vm'"), "{number}: {error}");
        assert!(error.len() < 600, "{number}: {} bytes", error.len());
    }
    let deep = [vec![b'['; 1 << 20], vec![b']'; 1 << 20]].concat();
    assert!(Manifest::decode("vm", &deep).is_err());
    let twice = br#"{"format":"isobath-chain","version":1,"version":1}"#;
    assert!(Manifest::decode("vm", twice).is_err());
}

#[test]
fn every_cut_and_every_flipped_bit_of_a_manifest_is_refused_or_harmless() {
    let chain = Chain::small("disk.qcow2", 1);
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let path = kept.path().join("manifests/vm.json");
    let bytes = fs::read(&path).unwrap();
    // An index is not pulled.
    let index = bytes.windows(8).position(|part| part == b"\"index\":").unwrap();
    let index = index..index + bytes[index..].iter().position(|byte| *byte == b'}').unwrap();
    let mut accepted = 0;
    let cuts = (0..bytes.len() - 1).map(|length| bytes[..length].to_vec());
    let flips = (0..bytes.len() * 8).filter(|bit| !index.contains(&(bit / 8))).map(|bit| {
        let mut bytes = bytes.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes
    });
    for changed in cuts.chain(flips) {
        fs::write(&path, &changed).unwrap();
        let target = tempfile::tempdir().unwrap();
        if fetch(&store, "vm", target.path()).is_ok() {
            // Another name for the file is all that can change unnoticed.
            let entry = fs::read_dir(target.path()).unwrap().next().unwrap().unwrap();
            assert!(fs::read(entry.path()).unwrap() == fs::read(chain.top()).unwrap());
            accepted += 1;
        }
        let names = list(&store).unwrap();
        assert_eq!(names.len(), 1);
    }
    assert!(accepted < 300, "{accepted}");
}

#[test]
fn layers_are_not_pulled_over_one_another_or_under_names_that_mean_something_else() {
    let mut chain = Chain::new();
    chain.grow("next.qcow2");
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let path = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&path).unwrap();
    let replaced = [
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\"base.raw\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\"next.qcow2\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\"../middle.qcow2\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\"nbd:unix:/run/x\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\"json:{}\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\".isobath-pull-x\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\".bash_profile\""),
        ("\"backing\":\"middle.qcow2\"", "\"backing\":\"other.qcow2\""),
        ("\"backing_format\":\"raw\"", "\"backing_format\":\"qcow2\""),
        ("\"format\":\"raw\"", "\"format\":\"qcow2\""),
    ];
    for (old, new) in replaced {
        let changed = text.replace(old, new);
        assert_ne!(changed, text, "{old}");
        fs::write(&path, changed).unwrap();
        let directory = tempfile::tempdir().unwrap();
        fetch(&store, "vm", directory.path()).expect_err(new);
        assert!(!directory.path().join("next.qcow2").exists(), "{new}");
        assert!(!directory.path().join("other.qcow2").exists() || new.contains("other"), "{new}");
    }
}

#[test]
fn a_link_in_a_store_is_not_followed() {
    let chain = Chain::small("disk.qcow2", 1);
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let manifest = kept.path().join("manifests/vm.json");
    let elsewhere = kept.path().join("elsewhere");
    fs::rename(&manifest, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &manifest).unwrap();
    let error = verify(&store, "vm").unwrap_err().to_string();
    assert!(error.contains("symbolic link"), "{error}");
    assert!(gc(&store, Duration::ZERO, false).is_err());
    assert_eq!(
        fs::read_dir(kept.path().join("layers")).unwrap().count(),
        1,
        "nothing was collected"
    );
}
