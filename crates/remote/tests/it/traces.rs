//! What was read of a chain is recorded, and fetched ahead the next time.

use crate::chains::Chain;
use crate::round_trips::{gc, is_whole, send, verify};
use crate::served::{BLOCK, Opened, Place, raw, read, reads};
use isobath_remote::cache::Cache;
use isobath_remote::store::Store;
use isobath_remote::{Digest, Manifest, Progress, Replace, Result, Trace, TraceObject, set_trace};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

fn set(place: &Place, trace: Option<&Trace>) -> Result<u64> {
    set_trace(&*place.store.directory, "vm", trace, Replace::Unchanged, &Progress::default())
}

/// The chain as a server sees it whose cache is new.
fn anew(place: &Place, name: &str, bytes: u64) -> Opened {
    let cache = Cache::open(&place.directory.path().join(name), bytes).unwrap();
    place.open_in(&cache, Some(Duration::from_mins(5))).unwrap()
}

/// Records these reads of the base, of a byte each, with the number of their blocks.
#[track_caller]
fn recorded(place: &Place, blocks: impl IntoIterator<Item = u64>) -> Trace {
    let opened = anew(place, "first", 1 << 30);
    let recording = opened.chain.record();
    let file = opened.file(0);
    for block in blocks {
        read(&file, block * BLOCK + 5, 1).unwrap();
    }
    recording.trace()
}

/// What the manifest says of the trace.
fn manifest(place: &Place) -> Option<TraceObject> {
    let (bytes, _) = place.store.directory.get("manifests/vm.json", 1 << 20).unwrap().unwrap();
    Manifest::decode("vm", &bytes).unwrap().trace
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
    let mut places: Vec<(u64, u64)> = reads(&requests)
        .iter()
        .map(|request| {
            let mut words = request.rsplit(' ').map(|word| word.parse().unwrap());
            let length: u64 = words.next().unwrap();
            (words.next().unwrap() / BLOCK, length.div_ceil(BLOCK))
        })
        .collect();
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
    let opened = anew(&place, "small", limit);
    place.store.taken();
    follow(&opened);
    let requests = place.store.taken();
    let length = |request: &&String| request.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    let bytes: u64 = reads(&requests).iter().map(length).sum();
    // Each of four threads may have begun one request more.
    assert!((limit / 2..=limit / 2 + 4 * 8 * BLOCK).contains(&bytes), "{bytes}");
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
