//! Whoever is killed at any operation of the store loses nothing, and what is done then works.

use crate::chains::{Chain, fetch, gc, is_whole, send, verify};
use crate::stores::{self, Aged, Death, Watched};
use isobath_remote::store::Store;
use isobath_remote::{Collection, Error, Progress, Replace, push, remove};
use std::fs;
use std::sync::Mutex;
use std::time::Duration;

const DAY: Duration = Duration::from_hours(24);

/// Calls `test` for a death at each operation, until it returns that nobody died.
pub(crate) fn each_death(test: impl Fn(Death) -> bool) {
    for kind in [Death::Before, Death::After] {
        let mut number = 0;
        while test(kind(number)) {
            number += 1;
        }
        assert!(number > 5, "only {number} operations");
    }
}

#[test]
fn a_push_that_is_killed_leaves_the_old_chain_or_the_new_one_and_continues() {
    let mut chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let old = fs::read(kept.path().join("manifests/vm.json")).unwrap();
    chain.grow("next.qcow2");
    each_death(|death| {
        let (copied, store) = stores::copy(kept.path());
        let died = send(&Watched::dying(&store, death), "vm", &chain).is_err();
        is_whole(&store, "vm");
        let now = fs::read(copied.path().join("manifests/vm.json")).unwrap();
        // A collection right afterwards waits for the push that may still be there; a day later it does not.
        let collected = gc(&store, Duration::ZERO, false);
        let noted = fs::read_dir(copied.path().join("pushes")).unwrap().count() > 0;
        assert_eq!(matches!(collected, Err(Error::Conflict(_))), noted, "{death:?}: {collected:?}");
        gc(&Aged(&store), DAY, false).unwrap();
        is_whole(&store, "vm");
        assert_eq!(fs::read_dir(copied.path().join("pushes")).unwrap().count(), 0);
        let layers = fs::read_dir(copied.path().join("layers")).unwrap().count();
        assert_eq!(layers, if now == old { 3 } else { 4 }, "{death:?}");
        send(&store, "vm", &chain).unwrap();
        is_whole(&store, "vm");
        let directory = tempfile::tempdir().unwrap();
        fetch(&store, "vm", directory.path()).unwrap();
        chain.is_part(directory.path(), true);
        died
    });
}

#[test]
fn a_first_push_that_is_killed_leaves_no_chain_or_all_of_it() {
    let chain = Chain::new();
    each_death(|death| {
        let (_kept, store) = stores::new();
        let died = send(&Watched::dying(&store, death), "vm", &chain).is_err();
        if store.head("manifests/vm.json").unwrap().is_some() {
            is_whole(&store, "vm");
        }
        send(&store, "vm", &chain).unwrap();
        is_whole(&store, "vm");
        died
    });
}

#[test]
fn a_pull_that_is_killed_leaves_only_whole_files_and_continues() {
    let chain = Chain::new();
    let (_kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    each_death(|death| {
        let directory = tempfile::tempdir().unwrap();
        let died = fetch(&Watched::dying(&store, death), "vm", directory.path()).is_err();
        chain.is_part(directory.path(), false);
        let below = || chain.names[..2].iter().all(|name| directory.path().join(name).exists());
        assert!(!directory.path().join("top.qcow2").exists() || below(), "{death:?}");
        // As a killed process would leave it.
        fs::write(directory.path().join(".isobath-pull-0123"), "begun").unwrap();
        fetch(&store, "vm", directory.path()).unwrap();
        chain.is_part(directory.path(), true);
        died
    });
}

#[test]
fn a_collection_that_is_killed_loses_nothing_and_is_done_again() {
    let mut chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    chain.grow("next.qcow2");
    send(&store, "gone", &chain).unwrap();
    remove(&store, "gone").unwrap();
    each_death(|death| {
        let (copied, store) = stores::copy(kept.path());
        let died = gc(&Watched::dying(&store, death), Duration::ZERO, false).is_err();
        is_whole(&store, "vm");
        if copied.path().join("gc.lock").exists() {
            let error = gc(&store, Duration::ZERO, false).unwrap_err().to_string();
            assert!(error.contains("--break-lock"), "{error}");
            let error = send(&store, "vm", &chain).unwrap_err().to_string();
            assert!(error.contains("--break-lock"), "{error}");
            gc(&store, Duration::ZERO, true).unwrap();
        }
        gc(&store, Duration::ZERO, false).unwrap();
        is_whole(&store, "vm");
        assert_eq!(fs::read_dir(copied.path().join("layers")).unwrap().count(), 3);
        send(&store, "vm", &chain).unwrap();
        is_whole(&store, "vm");
        died
    });
}

/// Layers are in the store that no chain needs, and that a push finds.
fn forgotten() -> (Chain, tempfile::TempDir) {
    let chain = Chain::new();
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    remove(&store, "vm").unwrap();
    (chain, kept)
}

#[test]
fn a_collection_at_any_operation_of_a_push_takes_nothing_from_it() {
    let (chain, kept) = forgotten();
    let (mut collections, mut pushes) = (0, 0);
    for number in 0.. {
        let (_copied, store) = stores::copy(kept.path());
        let collect = || collections_of(&gc(&store, Duration::ZERO, false), &Mutex::new(0));
        let watched = Watched::meanwhile(&store, number, &collect);
        let pushed = send(&watched, "vm", &chain);
        if watched.count() <= number {
            break;
        }
        match pushed {
            Ok(_) => {
                is_whole(&store, "vm");
                pushes += 1;
            }
            Err(error) => panic!("{error}"),
        }
        collections += 1;
    }
    assert!(collections > 10 && pushes > 10, "{collections} {pushes}");
}

/// A collection either was done, or found the push.
fn collections_of(
    collected: &isobath_remote::Result<isobath_remote::Collected>,
    done: &Mutex<usize>,
) {
    match collected {
        Ok(_) => *done.lock().unwrap() += 1,
        Err(Error::Conflict(_)) => {}
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_collection_that_takes_a_push_for_a_killed_one_takes_nothing_from_it_either() {
    let (chain, kept) = forgotten();
    let mut resent = 0;
    for number in 0.. {
        let (_copied, store) = stores::copy(kept.path());
        let done = Mutex::new(0);
        let collect = || collections_of(&gc(&Aged(&store), DAY, false), &done);
        let watched = Watched::meanwhile(&store, number, &collect);
        let pushed = send(&watched, "vm", &chain).unwrap();
        if watched.count() <= number {
            break;
        }
        assert_eq!(*done.lock().unwrap(), 1);
        is_whole(&store, "vm");
        resent += usize::from(pushed.sent > 0);
    }
    assert!(resent > 10, "{resent}");
}

#[test]
fn a_push_at_any_operation_of_a_collection_loses_nothing() {
    let (chain, kept) = forgotten();
    let mut refused = 0;
    for number in 0.. {
        let (_copied, store) = stores::copy(kept.path());
        let pushed = Mutex::new(None);
        let push = || *pushed.lock().unwrap() = Some(send(&store, "vm", &chain));
        let watched = Watched::meanwhile(&store, number, &push);
        let collected = gc(&watched, Duration::ZERO, false);
        let stays = watched.count() <= number;
        collections_of(&collected, &Mutex::new(0));
        match pushed.lock().unwrap().take() {
            Some(Ok(_)) => is_whole(&store, "vm"),
            Some(Err(Error::Conflict(_))) => {
                refused += 1;
                assert!(verify(&store, "vm").is_err(), "there is no chain");
                send(&store, "vm", &chain).unwrap();
                is_whole(&store, "vm");
            }
            Some(Err(error)) => panic!("{error}"),
            None => {}
        }
        if stays {
            break;
        }
    }
    assert!(refused > 5, "{refused}");
}

#[test]
fn an_interrupted_push_says_that_the_chain_is_unchanged_only_if_its_manifest_was_not_sent() {
    let chain = Chain::small("disk.qcow2", 1);
    for replace in [Replace::Unchanged, Replace::Any] {
        let (mut before, mut after) = (0, 0);
        for number in 0.. {
            let (_kept, store) = stores::new();
            let watched = Watched::dying(&store, Death::Interrupted(number));
            let pushed = push(
                &watched,
                "vm",
                &chain.layers(),
                Some(&chain.index()),
                replace,
                &Progress::default(),
            );
            let is_there = store.head("manifests/vm.json").unwrap().is_some();
            match pushed {
                Err(Error::Interrupted) => {
                    assert!(!is_there, "operation {number}");
                    before += 1;
                }
                Err(Error::Unsettled(how)) => {
                    assert!(how.contains("'vm'") && !how.contains("unchanged"), "{how}");
                    after += usize::from(is_there);
                }
                Ok(_) => {
                    assert!(is_there);
                    break;
                }
                Err(error) => panic!("{number}: {error}"),
            }
        }
        assert!(before > 5 && after == 1, "{before} {after}");
    }
}

#[test]
fn an_interrupted_collection_that_leaves_its_lock_says_so() {
    let chain = Chain::small("disk.qcow2", 1);
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    for broken in [false, true] {
        let mut left = 0;
        for number in 0.. {
            let (copied, store) = stores::copy(kept.path());
            let lock = copied.path().join("gc.lock");
            if broken {
                fs::write(&lock, "another").unwrap();
            }
            let watched = Watched::dying(&store, Death::Interrupted(number));
            let collected = gc(&watched, Duration::ZERO, broken);
            let Err(error) = collected else { break };
            let message = error.to_string();
            let told = message.starts_with("interrupted; ") && message.contains("--break-lock");
            // Nothing was asked of the store that could have changed it.
            let begun = number > 0;
            assert_eq!(told, lock.exists() && begun, "{broken} {number}: {message}");
            left += usize::from(told);
        }
        assert!(left > 5, "{left}");
    }
}

#[test]
fn nothing_that_is_perhaps_not_durable_counts_as_done() {
    let chain = Chain::small("disk.qcow2", 1);
    let (mut refused, mut told) = (0, 0);
    for number in 0.. {
        let (kept, store) = stores::new();
        let watched = Watched::dying(&store, Death::NotDurable(number));
        let pushed = send(&watched, "vm", &chain);
        let Err(error) = pushed else {
            // The removal of the note, which is the last operation, matters to nobody.
            assert_eq!(watched.count(), number + 1);
            break;
        };
        let message = error.to_string();
        let is_there = kept.path().join("manifests/vm.json").exists();
        assert_eq!(message.contains("the old one or the new one"), is_there, "{message}");
        refused += 1;
        told += usize::from(is_there);
    }
    assert!(refused > 5 && told > 0, "{refused} {told}");
    let (kept, store) = stores::new();
    send(&store, "vm", &chain).unwrap();
    let mut left = 0;
    for number in 0.. {
        let (copied, store) = stores::copy(kept.path());
        let watched = Watched::dying(&store, Death::NotDurable(number));
        let collected = gc(&watched, Duration::ZERO, false);
        if watched.count() <= number {
            collected.unwrap();
            break;
        }
        let message = collected.unwrap_err().to_string();
        let stays = copied.path().join("gc.lock").exists();
        assert!(!stays || message.contains("--break-lock"), "{message}");
        left += usize::from(stays);
    }
    assert!(left > 0);
}

#[test]
fn a_lock_that_was_broken_stays_until_what_its_collection_removed_is_removed_again() {
    let (_chain, kept) = forgotten();
    let hour = Duration::from_hours(1);
    let collect = |store: &dyn Store, grace, dry_run| {
        let how = Collection { grace, dry_run, break_lock: true };
        isobath_remote::collect(store, &how, &Progress::default())
    };
    let (long, own) = ("x".repeat(1000), "isobath remote gc 0123 grace 3600\n".to_owned());
    for (line, known) in
        [(own, true), ("isobath remote gc 0123\n".to_owned(), false), (long, false)]
    {
        let (copied, store) = stores::copy(kept.path());
        let lock = copied.path().join("gc.lock");
        fs::write(&lock, line).unwrap();
        assert!(collect(&store, Duration::ZERO, true).unwrap().objects > 0);
        assert!(lock.exists());
        for _ in 0..2 {
            let message = collect(&store, DAY, false).unwrap_err().to_string();
            assert!(message.contains("--grace") && message.contains("--break-lock"), "{message}");
            assert_eq!(message.contains("3600"), known, "{message}");
            assert!(lock.exists());
        }
        if known {
            assert!(collect(&store, hour, false).unwrap().young > 0);
            assert!(!lock.exists());
        }
        // Without a lock there is nothing to repeat.
        fs::remove_file(&lock).or_else(|error| if known { Ok(()) } else { Err(error) }).unwrap();
        assert!(collect(&store, DAY, false).unwrap().young > 0);
        fs::write(&lock, "another").unwrap();
        assert!(collect(&store, Duration::ZERO, false).unwrap().objects > 0);
        assert!(!lock.exists());
    }
}
