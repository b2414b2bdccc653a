//! What was read of a chain is recorded, and fetched ahead the next time.

use crate::cache::open_within;
use crate::cache_disks::Small;
use crate::chains::{Chain, gc, is_whole, send, verify};
use crate::interrupted::each_death;
use crate::served::{BLOCK, Opened, Place, raw, read, reads};
use crate::stores::{self, Aged, Watched};
use isobath_remote::store::Store;
use isobath_remote::{
    Digest, MAX_TRACE, Manifest, Progress, Replace, Result, Trace, TraceObject, set_trace,
};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

fn set_in(store: &dyn Store, trace: Option<&Trace>, replace: Replace) -> Result<u64> {
    set_trace(store, "vm", trace, replace, &Progress::default())
}

fn set(place: &Place, trace: Option<&Trace>) -> Result<u64> {
    set_in(&*place.store.directory, trace, Replace::Unchanged)
}

/// The chain as a server sees it whose cache is new.
fn anew(place: &Place, name: &str, bytes: u64) -> Opened {
    let cache = open_within(&place.directory.path().join(name), bytes);
    place.open_in(&cache, Some(Duration::from_mins(5))).unwrap()
}

/// Records these reads of the base, of a byte each, with the number of their blocks.
#[track_caller]
fn recorded(place: &Place, blocks: impl IntoIterator<Item = u64>) -> Trace {
    let cache = open_within(&place.directory.path().join("first"), 1 << 30);
    // What is read ahead may be requested later.
    let opened = place.open_unnoted(&cache);
    let recording = opened.chain.record();
    let file = opened.file(0);
    for block in blocks {
        read(&file, block * BLOCK + 5, 1).unwrap();
    }
    recording.trace()
}

fn manifest_in(store: &dyn Store) -> Manifest {
    let (bytes, _) = store.get("manifests/vm.json", 1 << 20).unwrap().unwrap();
    Manifest::decode("vm", &bytes).unwrap()
}

/// What the manifest says of the trace.
fn manifest(place: &Place) -> Option<TraceObject> {
    manifest_in(&*place.store.directory).trace
}

/// The first block and the number of blocks of each of these reads.
fn places(requests: &[String]) -> Vec<(u64, u64)> {
    let place = |request: &&String| {
        let mut words = request.rsplit(' ').map(|word| word.parse::<u64>().unwrap());
        let length = words.next().unwrap();
        (words.next().unwrap() / BLOCK, length.div_ceil(BLOCK))
    };
    reads(requests).iter().map(place).collect()
}

/// The blocks that were read, in their order in the layer.
fn fetched(requests: &[String]) -> Vec<u64> {
    let blocks = |(first, count)| first..first + count;
    let mut blocks: Vec<u64> = places(requests).into_iter().flat_map(blocks).collect();
    blocks.sort_unstable();
    blocks
}

fn object(place: &Place) -> PathBuf {
    let digest = manifest(place).unwrap().digest;
    place.directory.path().join(format!("store/traces/{digest}"))
}

fn follow(opened: &Opened) {
    opened.chain.follow_trace().unwrap().expect("it has a trace").join().unwrap();
}

#[test]
fn what_was_recorded_is_fetched_ahead_and_nothing_else() {
    let place = Place::new(raw(40));
    let trace = recorded(&place, [30, 3, 4, 3, 12, 40]);
    assert_eq!(set(&place, Some(&trace)).unwrap(), 5);
    is_whole(&*place.store.directory, "vm");
    let opened = anew(&place, "second", 1 << 30);
    place.store.taken();
    follow(&opened);
    let mut requests = place.store.taken();
    assert_eq!(requests.remove(0), format!("GET traces/{}", manifest(&place).unwrap().digest));
    let mut places = places(&requests);
    places.sort_unstable();
    assert_eq!(places, [(3, 2), (12, 1), (30, 1), (40, 1)]);
    let file = opened.file(0);
    for block in [3, 4, 12, 30, 40] {
        let at = block * BLOCK + 100;
        assert!(read(&file, at, 400).unwrap() == place.local(0, at, 400), "{block}");
    }
    assert_eq!(place.store.taken(), [""; 0]);
    // A second server has the trace and the blocks from the cache of the host.
    let cached = anew(&place, "second", 1 << 30);
    place.store.taken();
    follow(&cached);
    assert_eq!(place.store.taken(), [""; 0]);
}

#[test]
fn what_is_fetched_ahead_takes_at_most_half_of_the_cache() {
    let place = Place::new(raw(400));
    set(&place, Some(&recorded(&place, 0..400))).unwrap();
    let limit = 64 << 20;
    let cache = open_within(&place.directory.path().join("small"), limit);
    let opened = place.open_in(&cache, Some(Duration::from_mins(5))).unwrap();
    place.store.taken();
    follow(&opened);
    let mut blocks = fetched(&place.store.taken());
    let count = blocks.len() as u64;
    // There was no room for a request of eight blocks any more.
    let most = limit / 2 / BLOCK;
    assert!((most - 7..=most).contains(&count), "{count} of {most}");
    blocks.dedup();
    assert_eq!(blocks.len() as u64, count, "each at most once");
    // It is followed once, and the half is that of all chains.
    assert!(opened.chain.follow_trace().unwrap().is_none());
    let other = Place::new(raw(100));
    set(&other, Some(&recorded(&other, 0..100))).unwrap();
    other.store.taken();
    let beside = other.open_in(&cache, Some(Duration::from_mins(5))).unwrap();
    follow(&beside);
    assert_eq!(fetched(&other.store.taken()), [0; 0]);
}

#[test]
fn what_the_cache_does_not_keep_is_fetched_once_and_not_all_of_it() {
    let place = Place::new(raw(400));
    set(&place, Some(&recorded(&place, 0..400))).unwrap();
    for is_full in [false, true] {
        let small = Small::new("12m");
        let cache = open_within(&small.path().join("cache"), 1 << 30);
        if is_full {
            small.fill();
        }
        let opened = place.open_in(&cache, Some(Duration::from_mins(5))).unwrap();
        place.store.taken();
        follow(&opened);
        let blocks = fetched(&place.store.taken());
        if is_full {
            assert_eq!(blocks, [0; 0], "the layer can have no file");
            continue;
        }
        let mut once = blocks.clone();
        once.dedup();
        assert_eq!(once, blocks);
        assert!((40..400).contains(&blocks.len()), "{}", blocks.len());
    }
}

#[test]
fn what_is_pushed_while_a_trace_is_set_stays() {
    let mut place = Place::new(Chain::new());
    let trace = recorded(&place, [0]);
    place.chain.grow("more.qcow2");
    for replace in [Replace::Unchanged, Replace::Any] {
        let mut number = 0;
        loop {
            let (_directory, store) = stores::copy(&place.directory.path().join("store"));
            let push = || send(&store, "vm", &place.chain).map(drop).unwrap();
            let watched = Watched::meanwhile(&store, number, &push);
            set_in(&watched, Some(&trace), replace).unwrap();
            if watched.count() <= number {
                break;
            }
            let manifest = manifest_in(&store);
            assert_eq!((manifest.layers.len(), manifest.trace.is_some()), (4, true), "{number}");
            is_whole(&store, "vm");
            number += 1;
        }
        assert!(number > 5, "only {number} operations");
    }
}

#[test]
fn setting_a_trace_can_be_repeated_wherever_it_was_killed() {
    let place = Place::new(Chain::new());
    let trace = recorded(&place, [0]);
    each_death(|death| {
        let (_directory, store) = stores::copy(&place.directory.path().join("store"));
        let dying = Watched::dying(&store, death);
        let died = set_in(&dying, Some(&trace), Replace::Unchanged).is_err();
        is_whole(&store, "vm");
        gc(&Aged(&store), Duration::from_hours(24), false).unwrap();
        is_whole(&store, "vm");
        set_in(&store, Some(&trace), Replace::Unchanged).unwrap();
        assert!(manifest_in(&store).trace.is_some());
        is_whole(&store, "vm");
        died
    });
}

#[test]
fn a_trace_of_an_impossible_length_is_none() {
    let place = Place::new(raw(9));
    set(&place, Some(&recorded(&place, [2]))).unwrap();
    for length in [0, 15, MAX_TRACE + 1, u64::MAX] {
        place.change_manifest(|manifest| manifest["trace"]["length"] = length.into());
        assert!(place.opened().chain.follow_trace().unwrap().is_none());
        is_whole(&*place.store.directory, "vm");
    }
}

#[test]
fn a_trace_stays_while_its_base_does() {
    let mut place = Place::new(Chain::new());
    let trace = recorded(&place, [0, 30]);
    set(&place, Some(&trace)).unwrap();
    let first = manifest(&place);
    place.chain.grow("more.qcow2");
    send(&*place.store.directory, "vm", &place.chain).unwrap();
    assert_eq!(manifest(&place), first);
    assert_eq!(gc(&*place.store.directory, Duration::ZERO, false).unwrap().objects, 2);
    assert!(object(&place).exists());
    is_whole(&*place.store.directory, "vm");
    follow(&anew(&place, "grown", 1 << 30));
    // A chain with another base has none.
    let object = object(&place);
    send(&*place.store.directory, "vm", &Chain::small("other.qcow2", 3)).unwrap();
    assert_eq!(manifest(&place), None);
    gc(&*place.store.directory, Duration::ZERO, false).unwrap();
    assert!(!object.exists());
    let opened = anew(&place, "other", 1 << 30);
    assert!(opened.chain.follow_trace().unwrap().is_none());
}

#[test]
fn a_trace_is_removed_and_the_chain_stays() {
    let place = Place::new(raw(9));
    let before = fs::read(place.directory.path().join("store/manifests/vm.json")).unwrap();
    set(&place, Some(&recorded(&place, [2]))).unwrap();
    assert!(manifest(&place).is_some());
    assert_eq!(set(&place, None).unwrap(), 0);
    assert!(before == fs::read(place.directory.path().join("store/manifests/vm.json")).unwrap());
    assert_eq!(gc(&*place.store.directory, Duration::ZERO, false).unwrap().objects, 1);
    is_whole(&*place.store.directory, "vm");
}

#[test]
fn a_trace_of_another_chain_is_refused() {
    let place = Place::new(raw(9));
    let trace = recorded(&Place::new(Chain::new()), [0]);
    let refused = set(&place, Some(&trace)).unwrap_err().to_string();
    assert!(refused.contains("it was recorded of another chain"), "{refused}");
    let refused = set(&place, Some(&recorded(&place, []))).unwrap_err().to_string();
    assert!(refused.contains("or nothing was read"), "{refused}");
    assert_eq!(manifest(&place), None);
    let store = &*place.store.directory;
    let trace = recorded(&place, [0]);
    let none = set_trace(store, "none", Some(&trace), Replace::Unchanged, &Progress::default());
    let refused = none.unwrap_err().to_string();
    assert!(refused.contains("the store has no chain 'none'"), "{refused}");
}

#[test]
fn a_trace_that_is_damaged_or_gone_is_told_of_and_is_no_harm() {
    let place = Place::new(raw(9));
    set(&place, Some(&recorded(&place, [2, 7]))).unwrap();
    let object = object(&place);
    let whole = fs::read(&object).unwrap();
    // Blocks that no layer has.
    let mut beyond = whole.clone();
    let end = beyond.len();
    beyond[end - 9] = 200;
    beyond[end - 4..].fill(255);
    for (number, wrong) in [Some(b"x".to_vec()), Some(beyond), None].into_iter().enumerate() {
        match &wrong {
            Some(bytes) => fs::write(&object, bytes).unwrap(),
            None => fs::remove_file(&object).unwrap(),
        }
        let problems = verify(&*place.store.directory, "vm").unwrap().problems;
        assert!(problems.iter().any(|problem| problem.contains("traces/")), "{problems:?}");
        let opened = anew(&place, &format!("cache{number}"), 1 << 30);
        follow(&opened);
        let length = 9 * BLOCK as usize;
        assert!(read(&opened.file(0), 0, length).unwrap() == place.local(0, 0, length));
        fs::write(&object, &whole).unwrap();
    }
    // One whose digest is right is what its writer says, and has blocks that there are not.
    let mut hostile = whole;
    hostile[end - 9] = 200;
    let digest = Digest::of(&hostile);
    fs::write(object.with_file_name(digest.to_string()), &hostile).unwrap();
    let file = place.directory.path().join("store/manifests/vm.json");
    let text = fs::read_to_string(&file).unwrap();
    let named = manifest(&place).unwrap().digest.to_string();
    fs::write(&file, text.replace(&named, &digest.to_string())).unwrap();
    let opened = anew(&place, "hostile", 1 << 30);
    place.store.taken();
    follow(&opened);
    assert_eq!(reads(&place.store.taken()).len(), 1);
}
