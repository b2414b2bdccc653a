//! What is pushed is pulled, byte for byte.

use crate::chains::{Chain, fetch, gc, is_whole, qemu_img, send, sha256, verify};
use crate::stores;
use isobath_remote::store::{Directory, Limits, Outcome, Store, Version};
use isobath_remote::{
    Collection, Depth, Digest, Error, Names, Progress, Replace, Target, check, collect, list, pull,
    push, remove,
};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn what_is_pushed_is_pulled_byte_for_byte_and_qemu_reads_it() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    let progress = Progress::default();
    let pushed =
        push(&store, "vm", &chain.layers(), Some(&chain.index()), Replace::Unchanged, &progress)
            .unwrap();
    assert_eq!((pushed.layers, pushed.sent), (3, 3));
    assert_eq!(progress.bytes(), (pushed.bytes, pushed.bytes));
    is_whole(&store, "vm");
    for number in 0..3 {
        let object = kept.path().join("layers").join(sha256(&chain.path(number)));
        assert!(fs::read(object).unwrap() == fs::read(chain.path(number)).unwrap());
    }
    let target = tempfile::tempdir().unwrap();
    let pulled = fetch(&store, "vm", target.path()).unwrap();
    assert_eq!((pulled.layers, pulled.fetched, pulled.bytes), (3, 3, pushed.bytes));
    chain.is_part(target.path(), true);
    chain.reads_as(&pulled.image);
    let base = fs::metadata(target.path().join("base.raw")).unwrap();
    assert!(base.blocks() * 512 < 5 << 20, "the hole takes {} bytes", base.blocks() * 512);
    // Again: nothing is to be done.
    let again = fetch(&store, "vm", target.path()).unwrap();
    assert_eq!((again.fetched, again.bytes), (0, 0));
    let again = send(&store, "vm", &chain).unwrap();
    assert_eq!((again.sent, again.bytes), (0, 0));
    assert_eq!(fs::read_dir(kept.path().join("pushes")).unwrap().count(), 0);
}

#[test]
fn a_longer_chain_sends_only_its_new_layer() {
    let mut chain = Chain::new();
    let (_kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    chain.grow("next.qcow2");
    let pushed = send(&store, "vm", &chain).unwrap();
    assert_eq!((pushed.layers, pushed.sent), (4, 1));
    let other = send(&store, "other", &chain).unwrap();
    assert_eq!(other.sent, 0);
    let listed = list(&store).unwrap();
    let names: Vec<&str> = listed.iter().map(|one| &*one.name).collect();
    assert_eq!(names, ["other", "vm"]);
    let described = listed[1].chain.as_ref().unwrap();
    assert_eq!((described.layers, described.size), (4, (9 << 20) + 512));
    assert_eq!(described.bytes, described.shared);
}

#[test]
fn names_with_a_directory_are_refused_or_rebased_and_a_rebased_pull_continues() {
    let mut chain = Chain::new();
    let absolute = chain.top().to_str().unwrap().to_owned();
    chain.grow_above(&absolute, "next.qcow2");
    chain.grow("last.qcow2");
    let (_kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let error = fetch(&store, "vm", directory.path()).unwrap_err().to_string();
    assert!(error.contains(&absolute) && error.contains("--rebase-names"), "{error}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let target =
        Target { directory: directory.path().to_owned(), name: Some("vm.qcow2".to_owned()) };
    let rebase = || pull(&store, "vm", &target, Names::Rebased, &Progress::default());
    let pulled = rebase().unwrap();
    assert_eq!((pulled.image.clone(), pulled.fetched), (directory.path().join("vm.qcow2"), 5));
    // What it reads is not in the first chain's directory.
    fs::rename(chain.path(1), chain.directory.path().join("away")).unwrap();
    qemu_img(directory.path(), &["info", "--backing-chain", "vm.qcow2"]);
    fs::rename(chain.directory.path().join("away"), chain.path(1)).unwrap();
    chain.reads_as(&pulled.image);
    assert_eq!(rebase().unwrap().fetched, 0);
    fs::remove_file(directory.path().join("next.qcow2")).unwrap();
    assert_eq!(rebase().unwrap().fetched, 1);
    chain.reads_as(&pulled.image);
    // One that was changed is not taken for the layer.
    let next = directory.path().join("next.qcow2");
    let mut bytes = fs::read(&next).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&next, &bytes).unwrap();
    assert!(rebase().unwrap_err().to_string().contains("was left as it is"));
}

#[test]
fn no_file_is_replaced() {
    let chain = Chain::new();
    let (_kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    for name in &chain.names {
        for contents in [
            &b"another"[..],
            &vec![0; fs::metadata(chain.directory.path().join(name)).unwrap().len() as usize],
        ] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join(name);
            fs::write(&file, contents).unwrap();
            let error = fetch(&store, "vm", directory.path()).unwrap_err().to_string();
            assert!(
                error.contains(name.as_str()) && error.contains("was left as it is"),
                "{error}"
            );
            assert!(fs::read(&file).unwrap() == contents);
        }
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("elsewhere", directory.path().join(name)).unwrap();
        assert!(fetch(&store, "vm", directory.path()).is_err(), "a link");
        assert!(!directory.path().join("elsewhere").exists());
    }
}

#[test]
fn a_push_does_not_replace_what_another_has_pushed_meanwhile() {
    let [one, other, before] = [1, 2, 3].map(|byte| Chain::small("disk.qcow2", byte));
    for first in [None, Some(&before)] {
        let (mut conflicts, mut number) = (0, 0);
        loop {
            let (_kept, store) = stores::new();
            if let Some(first) = first {
                send(&store, "vm", first).unwrap();
            }
            let meanwhile = || assert_eq!(send(&store, "vm", &other).unwrap().layers, 1);
            let watched = stores::Watched::meanwhile(&store, number, &meanwhile);
            let pushed = send(&watched, "vm", &one);
            is_whole(&store, "vm");
            let directory = tempfile::tempdir().unwrap();
            fetch(&store, "vm", directory.path()).unwrap();
            if watched.count() <= number {
                one.is_part(directory.path(), true);
                break;
            }
            match pushed {
                // The other was pushed between the look at what was there and the manifest.
                Err(Error::Conflict(_)) => {
                    conflicts += 1;
                    other.is_part(directory.path(), true);
                }
                // It was pushed before the look.
                Ok(_) if number == 0 => one.is_part(directory.path(), true),
                // It was pushed after the manifest, and has replaced that.
                Ok(_) => {
                    assert!(conflicts > 3, "operation {number}");
                    other.is_part(directory.path(), true);
                }
                Err(error) => panic!("{error}"),
            }
            number += 1;
        }
        assert!(conflicts > 3, "{conflicts}");
    }
}

#[test]
fn images_that_are_not_whole_by_themselves_are_not_pushed() {
    let chain = Chain::small("disk.qcow2", 1);
    let (kept, store) = stores::new();
    let bytes = fs::read(chain.top()).unwrap();
    for (byte, bit, what) in [(79, 1, "check -r all"), (79, 2, "check -r all"), (79, 4, "convert")]
    {
        let mut changed = bytes.clone();
        changed[byte] |= bit;
        fs::write(chain.top(), &changed).unwrap();
        let error = send(&store, "vm", &chain).unwrap_err().to_string();
        assert!(error.contains("disk.qcow2") && error.contains(what), "{error}");
    }
    fs::write(chain.top(), &bytes).unwrap();
    let mut without = Chain::new();
    let mut layers = without.layers();
    layers.remove(0);
    let error =
        push(&store, "vm", &layers, None, Replace::Unchanged, &Progress::default()).unwrap_err();
    assert!(error.to_string().contains("not among the layers"), "{error}");
    without.names.reverse();
    assert!(send(&store, "vm", &without).is_err());
    assert!(fs::read_dir(kept.path()).unwrap().next().is_none(), "something was sent");
}

#[test]
fn a_file_that_changes_while_it_is_pushed_is_not_put() {
    let chain = Chain::new();
    let path = chain.path(0);
    let bytes = fs::read(&path).unwrap();
    let mut changed = bytes.clone();
    changed[(8 << 20) + 5] ^= 1;
    // Whole blocks, with which the table agrees; nothing; more.
    let shorter = bytes[..4 << 20].to_vec();
    for changed in [changed, shorter, Vec::new(), [&bytes[..], &[1; 512]].concat()] {
        a_change_is_not_put(&chain, &bytes, &changed);
    }
}

#[track_caller]
fn a_change_is_not_put(chain: &Chain, bytes: &[u8], changed: &[u8]) {
    let path = chain.path(0);
    for number in 0.. {
        let (kept, store) = stores::new();
        let change = || fs::write(&path, changed).unwrap();
        let watched = stores::Watched::meanwhile(&store, number, &change);
        let pushed = send(&watched, "vm", chain);
        let stays = watched.count() <= number;
        fs::write(&path, bytes).unwrap();
        if pushed.is_ok() {
            is_whole(&store, "vm");
            let target = tempfile::tempdir().unwrap();
            fetch(&store, "vm", target.path()).unwrap();
        }
        for layer in fs::read_dir(kept.path().join("layers")).into_iter().flatten() {
            let layer = layer.unwrap().path();
            let digest = Digest::of(&fs::read(&layer).unwrap()).to_string();
            assert_eq!(layer.file_name().unwrap().to_str(), Some(&*digest), "operation {number}");
        }
        if stays {
            break;
        }
    }
}

#[test]
fn damage_in_a_store_is_found_and_never_pulled() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let mut objects = Vec::new();
    for kind in ["layers", "tables", "heads"] {
        objects.extend(
            fs::read_dir(kept.path().join(kind)).unwrap().map(|entry| entry.unwrap().path()),
        );
    }
    assert_eq!(objects.len(), 7);
    for object in objects {
        let bytes = fs::read(&object).unwrap();
        let mut flipped = bytes.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 4;
        let short = bytes[..bytes.len() - 1].to_vec();
        for (damaged, quick) in [(Some(flipped), false), (Some(short), true), (None, true)] {
            match &damaged {
                Some(bytes) => fs::write(&object, bytes).unwrap(),
                None => fs::remove_file(&object).unwrap(),
            }
            let name = object.file_name().unwrap().to_str().unwrap();
            let found = verify(&store, "vm").unwrap().problems.join("\n");
            assert!(found.contains(name), "{name}: {found}");
            let lengths = check(&store, "vm", Depth::Lengths, &Progress::default()).unwrap();
            assert_eq!(!lengths.problems.is_empty(), quick, "{name}");
            if !object.to_str().unwrap().contains("/heads/") {
                let directory = tempfile::tempdir().unwrap();
                let error = fetch(&store, "vm", directory.path()).unwrap_err();
                assert!(matches!(error, Error::Damaged(_)), "{error}");
                chain.is_part(directory.path(), false);
                assert!(!directory.path().join("top.qcow2").exists());
            }
        }
        fs::write(&object, bytes).unwrap();
    }
    is_whole(&store, "vm");
}

#[test]
fn what_is_short_or_missing_is_sent_again() {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let layer = kept.path().join("layers").join(sha256(&chain.path(0)));
    fs::write(&layer, "short").unwrap();
    fs::remove_file(kept.path().join("layers").join(sha256(&chain.path(1)))).unwrap();
    assert_eq!(send(&store, "vm", &chain).unwrap().sent, 2);
    is_whole(&store, "vm");
}

#[test]
fn only_what_nobody_needs_is_collected_and_only_when_it_is_old() {
    let (mut chain, day) = (Chain::new(), Duration::from_hours(24));
    let (kept, store) = stores::new();
    send(&store, "short", &chain).unwrap();
    chain.grow("next.qcow2");
    send(&store, "long", &chain).unwrap();
    assert_eq!(gc(&store, Duration::ZERO, false).unwrap().objects, 0);
    remove(&store, "long").unwrap();
    assert!(remove(&store, "long").is_err());
    let young = gc(&store, day, false).unwrap();
    // A layer, its table, the heads and the index.
    assert_eq!((young.objects, young.young), (0, 4));
    let how = Collection { grace: Duration::ZERO, dry_run: true, break_lock: false };
    assert_eq!(collect(&store, &how, &Progress::default()).unwrap().objects, 4);
    assert_eq!(fs::read_dir(kept.path().join("layers")).unwrap().count(), 4);
    let old = gc(&stores::Aged(&store), day, false).unwrap();
    assert_eq!((old.chains, old.objects, old.young), (1, 4, 0));
    is_whole(&store, "short");
    assert_eq!(fs::read_dir(kept.path().join("layers")).unwrap().count(), 3);
    assert!(!kept.path().join("gc.lock").exists());
}

#[test]
fn nothing_is_collected_if_it_is_unknown_what_is_needed() {
    let chain = Chain::small("disk.qcow2", 1);
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    send(&store, "other", &chain).unwrap();
    let manifest = kept.path().join("manifests/vm.json");
    let text = fs::read_to_string(&manifest).unwrap();
    for changed in [text.replace("\"version\":2", "\"version\":3"), text[..20].to_owned()] {
        fs::write(&manifest, changed).unwrap();
        fs::remove_file(kept.path().join("manifests/other.json")).ok();
        let error = gc(&store, Duration::ZERO, false).unwrap_err().to_string();
        assert!(error.contains("nothing was removed"), "{error}");
        assert_eq!(fs::read_dir(kept.path().join("layers")).unwrap().count(), 1);
        assert!(!kept.path().join("gc.lock").exists());
    }
    fs::write(&manifest, text).unwrap();
    fs::write(kept.path().join("manifests/what"), "?").unwrap();
    assert!(gc(&store, Duration::ZERO, false).is_err());
}

#[test]
fn a_directory_that_is_missing_is_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let error = Directory::open(&directory.path().join("none")).unwrap_err().to_string();
    assert!(error.contains("none"), "{error}");
}

/// Makes a header say nothing of its backing file's format: the extension becomes one that nobody knows.
fn forget_format(image: &Path) {
    let mut bytes = fs::read(image).unwrap();
    let magic = 0xe279_2aca_u32.to_be_bytes();
    let at = bytes[..4096].windows(4).position(|four| four == magic).unwrap();
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(image, bytes).unwrap();
}

#[test]
fn a_format_that_a_header_does_not_say_is_that_of_the_layer_below_or_refused() {
    let mut chain = Chain::new();
    let middle = chain.path(1);
    let above = chain.top();
    chain.grow_above(above.to_str().unwrap(), "next.qcow2");
    forget_format(&chain.top());
    let (_kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let target = Target { directory: directory.path().to_owned(), name: None };
    let pulled = pull(&store, "vm", &target, Names::Rebased, &Progress::default()).unwrap();
    chain.reads_as(&pulled.image);
    let again = pull(&store, "vm", &target, Names::Rebased, &Progress::default()).unwrap();
    assert_eq!(again.fetched, 0);
    forget_format(&middle);
    let (kept, store) = stores::new();
    let error = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains("middle.qcow2") && error.contains("rebase -u -F raw"), "{error}");
    assert!(fs::read_dir(kept.path()).unwrap().next().is_none(), "something was sent");
    qemu_img(
        chain.directory.path(),
        &["rebase", "-u", "-F", "raw", "-b", "base.raw", "middle.qcow2"],
    );
    send(&store, "vm", &chain).unwrap();
    is_whole(&store, "vm");
}

#[test]
fn a_lock_that_another_program_keeps_is_waited_for_within_the_limit_and_not_after_an_interruption()
{
    let chain = Chain::small("disk.qcow2", 1);
    let kept = tempfile::tempdir().unwrap();
    let lock = fs::File::create(kept.path().join(".lock")).unwrap();
    lock.lock().unwrap();
    let limits = Limits { overall: Duration::from_millis(30), ..Limits::default() };
    let store = Directory::within(kept.path(), limits, &Arc::default()).unwrap();
    let error = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains(".lock") && error.contains("given up"), "{error}");
    let progress = Arc::new(Progress::default());
    let store = Directory::within(kept.path(), Limits::default(), &progress).unwrap();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| store.put_if("gc.lock", b"text", None));
        progress.cancel();
        assert!(matches!(put.join().unwrap(), Err(Error::Interrupted)));
    });
    lock.unlock().unwrap();
    assert_eq!(store.put_if("gc.lock", b"text", None).unwrap(), Outcome::Done);
    store.delete("gc.lock").unwrap();
}

#[test]
fn what_a_push_finds_is_made_durable_before_the_manifest() {
    let chain = Chain::small("disk.qcow2", 1);
    let (_kept, store) = stores::new();
    send(&store, "other", &chain).unwrap();
    let failing = stores::Unsettled(&store);
    let error = send(&failing, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains("settle"), "{error}");
    assert!(store.head("manifests/vm.json").unwrap().is_none());
}

#[test]
fn an_object_that_is_longer_than_any_is_no_more_than_another_one() {
    let (kept, store) = stores::new();
    let file = fs::File::create(kept.path().join("gc.lock")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert_eq!(store.put_if("gc.lock", b"text", None).unwrap(), Outcome::Changed);
    let read = Version { tag: Some("0".to_owned()), number: None };
    assert_eq!(store.put_if("gc.lock", b"text", Some(&read)).unwrap(), Outcome::Changed);
    assert_eq!(file.metadata().unwrap().len(), 1 << 40);
}
