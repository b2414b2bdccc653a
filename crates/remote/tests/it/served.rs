//! Layers are read from their stores: what is read is what was pushed, and costs few requests.

use crate::cache::{files, open_within};
use crate::cache_disks::Failing;
use crate::chains::{Chain, send};
use isobath_remote::cache::Cache;
use isobath_remote::served::{self, Pinned, RemoteHost};
use isobath_remote::store::{Directory, Entry, Found, Outcome, Parts, Store, Version};
use isobath_remote::{Address, Digest, Error, Heads, Result};
use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, OpenMode, Storage, StorageError, StorageExt};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// A change to a manifest.
type Change = fn(&mut Value);

pub(crate) const BLOCK: u64 = 256 << 10;
const LIMIT: u64 = 1 << 30;

/// What a store does with the next reads of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It answers with other bytes.
    Wrong,
    /// It fails.
    Fails,
    /// It does not answer until the test says so, and fails then.
    Hangs,
}

#[derive(Default)]
struct Faulty {
    /// The requests so far.
    requests: Vec<String>,
    /// How many of the next requests for whole objects hang, and fail then.
    faults_of_gets: usize,
    /// What happens to the next reads of data.
    faults: Vec<Fault>,
    /// It fails until it is back.
    away: bool,
    /// Reads of data wait.
    held: bool,
    /// Reads of data that wait.
    waiting: usize,
    /// How many reads that hang may fail now.
    released: usize,
}

/// A store that counts, fails and waits.
#[derive(Clone)]
pub(crate) struct Watched {
    pub(crate) directory: Arc<Directory>,
    state: Arc<(Mutex<Faulty>, Condvar)>,
}

impl Watched {
    fn new(path: &Path) -> Self {
        let directory = Arc::new(Directory::open(path).unwrap());
        Self { directory, state: Arc::default() }
    }

    /// The same store, as somebody else sees it.
    fn anew(&self) -> Self {
        Self { directory: Arc::clone(&self.directory), state: Arc::default() }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Faulty) -> T) -> T {
        let done = work(&mut self.state.0.lock().unwrap());
        self.state.1.notify_all();
        done
    }

    fn until(&self, ready: impl Fn(&Faulty) -> bool) {
        let state = self.state.0.lock().unwrap();
        drop(self.state.1.wait_while(state, |state| !ready(state)).unwrap());
    }

    pub(crate) fn taken(&self) -> Vec<String> {
        self.with(|state| std::mem::take(&mut state.requests))
    }

    /// A request; what happens to it.
    fn request(&self, text: String, data: bool) -> Result<Option<Fault>> {
        let mut state = self.state.0.lock().unwrap();
        state.requests.push(text);
        if data {
            state.waiting += 1;
            self.state.1.notify_all();
            state = self.state.1.wait_while(state, |state| state.held).unwrap();
            state.waiting -= 1;
        }
        if state.away {
            return Err(Error::Store("the store is away".to_owned()));
        }
        let fault = if data {
            (!state.faults.is_empty()).then(|| state.faults.remove(0))
        } else if state.faults_of_gets > 0 {
            state.faults_of_gets -= 1;
            Some(Fault::Hangs)
        } else {
            None
        };
        match fault {
            Some(Fault::Fails) => Err(Error::Store("the store fails".to_owned())),
            Some(Fault::Hangs) => {
                state.waiting += 1;
                self.state.1.notify_all();
                state = self.state.1.wait_while(state, |state| state.released == 0).unwrap();
                (state.waiting, state.released) = (state.waiting - 1, state.released - 1);
                Err(Error::Store("the store has been silent for too long".to_owned()))
            }
            fault => Ok(fault),
        }
    }
}

impl Store for Watched {
    fn head(&self, key: &str) -> Result<Option<Found>> {
        self.request(format!("HEAD {key}"), false)?;
        self.directory.head(key)
    }

    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.request(format!("GET {key}"), false)?;
        self.directory.get(key, most)
    }

    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        let fault = self.request(format!("READ {key} {offset} {length}"), true)?;
        let mut bytes = self.directory.read(key, offset, length)?;
        if fault == Some(Fault::Wrong) {
            bytes[length / 2] ^= 1;
        }
        Ok(bytes)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.directory.put(key, bytes)
    }

    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome> {
        self.directory.put_if(key, bytes, was)
    }

    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>> {
        self.directory.begin(key, length)
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.directory.list(prefix)
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.directory.delete(key)
    }

    fn sweep(&self, before: SystemTime) -> Result<u64> {
        self.directory.sweep(before)
    }
}

/// A chain in a store, and a cache.
pub(crate) struct Place {
    pub(crate) chain: Chain,
    pub(crate) directory: TempDir,
    pub(crate) store: Watched,
    pub(crate) address: Address,
}

impl Place {
    /// In a directory whose name has what separates the names of layers.
    pub(crate) fn new(chain: Chain) -> Self {
        let directory = tempfile::Builder::new().prefix("a#0").tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("store")).unwrap();
        let store = Watched::new(&at("store"));
        send(&*store.directory, "vm", &chain).unwrap();
        let address = format!("file://{}/vm", at("store").display());
        let address = Address::parse(&address).unwrap();
        Self { chain, directory, store, address }
    }

    fn open(&self, limit: Option<Duration>) -> Result<Opened> {
        self.open_with(&self.directory.path().join("cache"), limit)
    }

    fn open_with(&self, cache: &Path, limit: Option<Duration>) -> Result<Opened> {
        self.open_in(&open_within(cache, LIMIT), limit)
    }

    pub(crate) fn open_in(&self, cache: &Arc<Cache>, limit: Option<Duration>) -> Result<Opened> {
        self.open_from(&self.store, cache, limit)
    }

    /// As somebody sees it whose requests are not noted.
    pub(crate) fn open_unnoted(&self, cache: &Arc<Cache>) -> Opened {
        self.open_from(&self.store.anew(), cache, Some(Duration::from_mins(5))).unwrap()
    }

    fn open_from(
        &self,
        store: &Watched,
        cache: &Arc<Cache>,
        limit: Option<Duration>,
    ) -> Result<Opened> {
        let chain = served::Chain::open_in(Box::new(store.clone()), &self.address, cache, limit)?;
        let host = RemoteHost::default();
        host.add(&chain);
        Ok(Opened { host, chain })
    }

    pub(crate) fn opened(&self) -> Opened {
        self.open(Some(Duration::from_mins(5))).unwrap()
    }

    /// Bytes of a layer, from the base on.
    pub(crate) fn local(&self, number: usize, offset: u64, length: usize) -> Vec<u8> {
        let file = fs::File::open(self.chain.path(number)).unwrap();
        let mut bytes = vec![0; length];
        let mut done = 0;
        while let Ok(count @ 1..) = file.read_at(&mut bytes[done..], offset + done as u64) {
            done += count;
        }
        bytes
    }
}

pub(crate) struct Opened {
    host: RemoteHost,
    pub(crate) chain: Arc<served::Chain>,
}

impl Opened {
    fn names(&self) -> Vec<PathBuf> {
        let mut names: Vec<_> = self.chain.layers().map(|(name, _)| name).collect();
        names.reverse();
        names
    }

    pub(crate) fn file(&self, number: usize) -> served::RemoteFile {
        block_on(self.host.open(&self.names()[number], OpenMode::default())).unwrap()
    }
}

pub(crate) fn read(
    file: &served::RemoteFile,
    offset: u64,
    length: usize,
) -> std::result::Result<Vec<u8>, StorageError> {
    block_on(file.read_at(offset, IoBuf::zeroed(length))).map(|buf| buf.to_vec())
}

/// A raw image of so many blocks, and a bit.
pub(crate) fn raw(blocks: u64) -> Chain {
    let directory = tempfile::tempdir().unwrap();
    let length = blocks * BLOCK + 512;
    let bytes: Vec<u8> = (0..length).map(|at| (at / 512 + at / 7) as u8).collect();
    fs::write(directory.path().join("base.raw"), bytes).unwrap();
    Chain { directory, names: vec!["base.raw".to_owned()] }
}

pub(crate) fn reads(requests: &[String]) -> Vec<&String> {
    requests.iter().filter(|request| request.starts_with("READ")).collect()
}

#[test]
fn every_range_of_every_layer_is_what_was_pushed() {
    let place = Place::new(Chain::new());
    for _ in 0..2 {
        let opened = place.opened();
        for number in 0..place.chain.names.len() {
            let file = opened.file(number);
            let length = fs::metadata(place.chain.path(number)).unwrap().len();
            assert_eq!(block_on(file.len()).unwrap(), length);
            let mut seed = 7_u64;
            let mut random = |below: u64| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 33) % below
            };
            let mut ranges = vec![(0, length as usize + 5000), (length, 100), (length + 9, 1)];
            for _ in 0..300 {
                let most = if random(8) == 0 { 3 * BLOCK } else { 9000 };
                ranges.push((random(length + 4096), random(most) as usize + 1));
            }
            for (offset, size) in ranges {
                let expected = place.local(number, offset, size);
                assert!(
                    read(&file, offset, size).unwrap() == expected,
                    "layer {number}, {size} bytes at {offset}"
                );
            }
        }
    }
}

#[test]
fn opening_costs_two_requests_and_reading_the_beginning_none() {
    let mut chain = Chain::new();
    (0..30).for_each(|number| chain.grow(&format!("more{number}.qcow2")));
    let place = Place::new(chain);
    let opened = place.opened();
    for number in 1..place.chain.names.len() {
        let file = opened.file(number);
        assert!(read(&file, 0, 4096).unwrap() == place.local(number, 0, 4096));
    }
    let requests = place.store.taken();
    assert_eq!(requests.len(), 2, "{requests:?}");
    assert!(requests[0] == "GET manifests/vm.json" && requests[1].starts_with("GET heads/"));
}

#[test]
fn a_cold_read_of_4_kib_fetches_one_block_and_the_next_reads_of_it_none() {
    let place = Place::new(raw(20));
    let opened = place.opened();
    let file = opened.file(0);
    let at = 5 * BLOCK + 8192;
    place.store.taken();
    assert!(read(&file, at, 4096).unwrap() == place.local(0, at, 4096));
    let requests = place.store.taken();
    assert_eq!(reads(&requests).len(), 1, "{requests:?}");
    assert!(reads(&requests)[0].ends_with(&format!(" {} {BLOCK}", 5 * BLOCK)), "{requests:?}");
    assert_eq!(requests.len(), 1, "the heads have the table: {requests:?}");
    assert!(read(&file, at + 4096, 4096).unwrap() == place.local(0, at + 4096, 4096));
    assert_eq!(place.store.taken(), [""; 0]);
}

#[test]
fn a_second_server_asks_only_for_the_manifest() {
    let place = Place::new(raw(20));
    let length = 20 * BLOCK as usize + 512;
    assert!(read(&place.opened().file(0), 0, length).unwrap() == place.local(0, 0, length));
    place.store.taken();
    let second = place.opened();
    assert!(read(&second.file(0), 0, length).unwrap() == place.local(0, 0, length));
    assert_eq!(place.store.taken(), ["GET manifests/vm.json"]);
}

#[test]
fn neighbours_that_are_wanted_at_once_are_fetched_together() {
    let place = Place::new(raw(32));
    let opened = place.opened();
    let length = 16 * BLOCK as usize;
    assert!(read(&opened.file(0), 0, length).unwrap() == place.local(0, 0, length));
    let requests = place.store.taken();
    assert_eq!(reads(&requests).len(), 2, "{requests:?}");
    assert!(reads(&requests).iter().all(|request| request.ends_with(" 2097152")), "{requests:?}");
}

#[test]
fn a_stream_is_read_ahead_and_each_block_fetched_once() {
    let place = Place::new(raw(200));
    let opened = place.opened();
    let file = opened.file(0);
    let length = 200 * BLOCK + 512;
    let reads_from = |state: &Faulty| -> Vec<u64> {
        let from = |read: &String| read.rsplit(' ').nth(1).unwrap().parse().unwrap();
        reads(&state.requests).into_iter().map(from).collect()
    };
    let mut at = 0;
    while at < length {
        assert!(read(&file, at, 65536).unwrap() == place.local(0, at, 65536), "{at}");
        at += 65536;
        if at == 2 * BLOCK {
            place.store.until(|state| reads_from(state).iter().any(|from| *from >= at));
        }
    }
    let requests = place.store.taken();
    let reads = reads(&requests);
    let bytes: u64 =
        reads.iter().map(|read| read.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!(bytes, length, "each byte is fetched once");
}

#[test]
fn all_who_want_a_block_share_its_flight_and_who_leaves_takes_nothing_along() {
    let place = Place::new(raw(8));
    let opened = place.opened();
    // So that the table is there.
    read(&opened.file(0), 7 * BLOCK, 1).unwrap();
    place.store.taken();
    place.store.with(|state| state.held = true);
    let names = opened.names();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4_u64)
            .map(|number| {
                let (host, name, place) = (&opened.host, &names[0], &place);
                scope.spawn(move || {
                    let file = block_on(host.open(name, OpenMode::default())).unwrap();
                    let at = 3 * BLOCK + number * 100;
                    if number == 0 {
                        // Begins to wait, and leaves.
                        block_on(async {
                            let mut read = Box::pin(file.read_at(at, IoBuf::zeroed(100)));
                            let waker = std::task::Waker::noop();
                            let mut context = std::task::Context::from_waker(waker);
                            let _ = read.as_mut().poll(&mut context);
                        });
                        return;
                    }
                    assert!(read(&file, at, 100).unwrap() == place.local(0, at, 100));
                })
            })
            .collect();
        place.store.until(|state| state.waiting > 0);
        place.store.with(|state| state.held = false);
        for reader in readers {
            reader.join().unwrap();
        }
    });
    let requests = place.store.taken();
    assert_eq!(requests.len(), 1, "{requests:?}");
}

#[test]
fn wrong_bytes_are_fetched_once_more_and_never_shown() {
    let place = Place::new(raw(8));
    let opened = place.opened();
    let file = opened.file(0);
    place.store.with(|state| state.faults = vec![Fault::Wrong]);
    assert!(read(&file, 0, 4096).unwrap() == place.local(0, 0, 4096));
    place.store.with(|state| state.faults = vec![Fault::Wrong, Fault::Wrong]);
    // Not where the other read ended: what is read ahead would get a fault of these.
    let at = 5 * BLOCK;
    let error = read(&file, at, 4096).unwrap_err();
    assert_eq!(error.errno(), libc::EIO);
    let text = error.to_string();
    assert!(text.contains("layers/") && text.contains(&format!("at byte {at}")), "{text}");
    assert!(read(&file, at, 4096).unwrap() == place.local(0, at, 4096));
}

#[test]
fn one_wrong_block_of_several_spoils_no_other() {
    let place = Place::new(raw(8));
    let opened = place.opened();
    place.store.with(|state| state.faults = vec![Fault::Wrong]);
    let length = 8 * BLOCK as usize;
    assert!(read(&opened.file(0), 0, length).unwrap() == place.local(0, 0, length));
    let requests = place.store.taken();
    assert_eq!(reads(&requests).len(), 2, "{requests:?}");
    assert!(reads(&requests)[1].ends_with(" 262144"), "{requests:?}");
}

#[test]
fn reads_fail_while_the_store_is_away_and_work_when_it_is_back() {
    let place = Place::new(raw(8));
    let opened = place.opened();
    let file = opened.file(0);
    place.store.with(|state| state.away = true);
    let error = read(&file, 0, 4096).unwrap_err();
    assert_eq!(error.errno(), libc::EIO, "{error}");
    place.store.with(|state| state.away = false);
    assert!(read(&file, 0, 4096).unwrap() == place.local(0, 0, 4096));
    place.store.with(|state| state.away = true);
    place.store.taken();
    assert!(read(&file, 8192, 4096).unwrap() == place.local(0, 8192, 4096), "cached");
    assert_eq!(place.store.taken(), [""; 0], "no request for what is cached");
    assert!(read(&file, BLOCK, 4096).is_err());
    place.store.with(|state| state.away = false);
    assert!(read(&file, BLOCK, 4096).unwrap() == place.local(0, BLOCK, 4096));
}

#[test]
fn who_waits_for_a_silent_store_gets_an_error_when_the_time_is_over() {
    let place = Place::new(raw(8));
    let opened = place.open(Some(Duration::from_millis(300))).unwrap();
    let file = opened.file(0);
    // The limit is far shorter than the machine may be busy for.
    while read(&file, 7 * BLOCK, 4096).is_err() {}
    place.store.with(|state| state.held = true);
    let error = read(&file, 0, 4096).unwrap_err().to_string();
    assert!(error.contains("no answer within 300ms"), "{error}");
    place.store.with(|state| state.held = false);
    while read(&file, 0, 4096).is_err() {}
    assert!(read(&file, 0, 4096).unwrap() == place.local(0, 0, 4096));
}

/// Polls a read once, which begins to wait.
fn begin(
    file: &served::RemoteFile,
    at: u64,
) -> impl Future<Output = isobath_storage::Result<IoBuf>> + Unpin + '_ {
    let mut read = Box::pin(file.read_at(at, IoBuf::zeroed(100)));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(read.as_mut().poll(&mut context).is_pending());
    read
}

#[test]
fn who_joins_a_request_that_fails_later_is_not_told_of_others_waits() {
    for what in ["a block", "the table"] {
        let place = Place::new(raw(8));
        if what == "the table" {
            place.change_heads(without_tables);
        }
        let opened = place.opened();
        let file = opened.file(0);
        let at = 3 * BLOCK;
        if what == "a block" {
            read(&file, 7 * BLOCK, 1).unwrap();
        }
        place.store.with(|state| {
            state.faults_of_gets = usize::from(what != "a block");
            state.faults = if what == "a block" { vec![Fault::Hangs] } else { Vec::new() };
        });
        block_on(async {
            let first = begin(&file, at);
            // The request is on its way.
            place.store.until(|state| state.waiting > 0);
            let second = begin(&file, at + 100);
            place.store.with(|state| state.released = 1);
            let error = first.await.unwrap_err().to_string();
            assert!(error.contains("has been silent for too long"), "{what}: {error}");
            let found = second.await.unwrap();
            assert!(found.to_vec() == place.local(0, at + 100, 100), "{what}: it tries anew");
        });
    }
}

#[test]
fn who_wants_what_others_have_waited_for_in_vain_gets_it_from_the_same_request() {
    let place = Place::new(raw(8));
    let opened = place.open(Some(Duration::from_millis(300))).unwrap();
    let file = opened.file(0);
    // The limit is far shorter than the machine may be busy for.
    while read(&file, 7 * BLOCK, 4096).is_err() {}
    place.store.taken();
    place.store.with(|state| state.held = true);
    for _ in 0..3 {
        let error = read(&file, 0, 4096).unwrap_err().to_string();
        assert!(error.contains("no answer within 300ms"), "{error}");
    }
    place.store.with(|state| state.held = false);
    while read(&file, 0, 4096).is_err() {}
    let requests = place.store.taken();
    assert_eq!(requests.len(), 1, "{requests:?}");
}

#[test]
fn without_a_limit_reads_wait_until_the_store_answers() {
    let place = Place::new(raw(8));
    let opened = place.open(None).unwrap();
    let file = opened.file(0);
    place.store.with(|state| state.faults = vec![Fault::Fails; 3]);
    assert!(read(&file, 0, 4096).unwrap() == place.local(0, 0, 4096));
    let requests = place.store.taken();
    assert_eq!(reads(&requests).len(), 4, "{requests:?}");
}

#[test]
fn what_the_caches_disk_cannot_read_is_fetched_again() {
    let (place, disk) = (Place::new(raw(8)), Failing::new());
    let opened = place.open_with(&disk.path(), Some(Duration::from_mins(5))).unwrap();
    let file = opened.file(0);
    let at = 5 * BLOCK;
    assert!(read(&file, at, 4096).unwrap() == place.local(0, at, 4096));
    place.store.taken();
    let data = &files(&disk.path().join("layers"), ".data")[0];
    disk.end_before(&place.local(0, at, 4096), data);
    let found = fs::File::open(data).unwrap().read_at(&mut [0; 512], at);
    assert_eq!(found.unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(read(&file, at + 512, 1024).unwrap() == place.local(0, at + 512, 1024));
    let requests = place.store.taken();
    assert_eq!(reads(&requests).len(), 1, "{requests:?}");
    // Across two blocks, one of which was never here.
    let at = 6 * BLOCK - 512;
    assert!(read(&file, at, 1024).unwrap() == place.local(0, at, 1024));
}

#[test]
fn a_store_that_is_away_at_the_start_is_replaced_by_the_last_known_manifest() {
    let place = Place::new(raw(8));
    let seconds = Some(Duration::from_secs(5));
    place.store.with(|state| state.away = true);
    assert!(place.open(seconds).is_err(), "nothing is known");
    place.store.with(|state| state.away = false);
    let length = 8 * BLOCK as usize;
    read(&place.opened().file(0), 0, length).unwrap();
    place.store.with(|state| state.away = true);
    let again = place.open(seconds).unwrap();
    assert!(again.chain.last_known().unwrap().contains("the store is away"));
    assert!(read(&again.file(0), 0, length).unwrap() == place.local(0, 0, length));
}

#[test]
fn a_table_that_cannot_be_read_fails_for_all_who_wait_and_is_tried_anew() {
    let place = Place::new(raw(8));
    place.change_heads(without_tables);
    let opened = place.opened();
    let file = opened.file(0);
    let tables = place.directory.path().join("store/tables");
    let table = fs::read_dir(&tables).unwrap().next().unwrap().unwrap().path();
    let right = fs::read(&table).unwrap();
    for wrong in [&right[1..], &[&right[..], &[0; 16]].concat(), &[7].repeat(right.len())] {
        fs::write(&table, wrong).unwrap();
        let error = read(&file, 0, 4096).unwrap_err();
        assert_eq!(error.errno(), libc::EIO, "{error}");
        assert!(error.to_string().contains("tables/"), "{error}");
    }
    fs::write(&table, right).unwrap();
    assert!(read(&file, 0, 4096).unwrap() == place.local(0, 0, 4096));
}

#[test]
fn a_layer_that_was_changed_in_the_store_is_never_shown() {
    let place = Place::new(raw(8));
    let layers = place.directory.path().join("store/layers");
    let layer = fs::read_dir(&layers).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&layer).unwrap();
    bytes[2 * BLOCK as usize + 9] ^= 1;
    fs::write(&layer, &bytes).unwrap();
    let opened = place.opened();
    let file = opened.file(0);
    assert!(read(&file, BLOCK, 4096).unwrap() == place.local(0, BLOCK, 4096));
    assert!(read(&file, 2 * BLOCK, 4096).is_err());
    fs::write(&layer, &bytes[..3 * BLOCK as usize]).unwrap();
    assert!(read(&file, 5 * BLOCK, 4096).is_err());
    fs::remove_file(&layer).unwrap();
    assert!(read(&file, 6 * BLOCK, 4096).is_err());
    assert!(read(&file, BLOCK, 4096).unwrap() == place.local(0, BLOCK, 4096), "cached");
}

#[test]
fn nothing_is_opened_that_was_not_added_and_nothing_is_written() {
    let place = Place::new(raw(2));
    let opened = place.opened();
    let address = place.address.to_string();
    let open = |name: &str| block_on(opened.host.open(Path::new(name), OpenMode::default()));
    for name in [
        "s3://bucket/vm".to_owned(),
        format!("{address}2"),
        format!("{address}#1"),
        format!("{address}#-1"),
        format!("{address}#"),
        format!("{address}?layers={}", "0".repeat(64)),
    ] {
        assert!(open(&name).is_err(), "{name}");
    }
    for name in ["s3://bucket/vm", &address, &format!("{address}#0")] {
        assert!(!opened.host.protocol_name(name), "no header names it: {name}");
    }
    let file = open(&address).unwrap();
    assert_eq!(file.id(), open(&format!("{address}#0")).unwrap().id());
    let writable = OpenMode { writable: true, ..OpenMode::default() };
    assert!(block_on(opened.host.open(Path::new(&address), writable)).is_err());
    assert!(block_on(file.write_at(0, IoBuf::zeroed(512))).is_err());
    assert!(block_on(file.set_len(0)).is_err());
    assert!(block_on(file.discard(0, 512)).is_err());
    assert!(file.capabilities().read_only);
}

#[test]
fn the_names_in_headers_lead_to_the_layer_below_whatever_they_are() {
    let place = Place::new(Chain::new());
    let opened = place.opened();
    let names = opened.names();
    for (above, below) in names.iter().skip(1).zip(&names) {
        assert_eq!(opened.host.resolve(above, "/anything"), *below);
        assert_eq!(opened.host.resolve(above, "s3://other/chain"), *below);
    }
}

#[test]
fn each_layer_has_a_name_for_headers_that_leads_to_it_and_those_below_alone() {
    let place = Place::new(Chain::new());
    let opened = place.opened();
    let address = place.address.to_string();
    let mut name = Some(PathBuf::from(opened.chain.pinned().unwrap().to_string()));
    for (plain, format) in opened.chain.layers() {
        let (plain, pinned) = (plain.as_path(), name.take().unwrap());
        let text = pinned.to_str().unwrap();
        assert!(opened.host.protocol_name(text) && text.starts_with(&format!("{address}@sha256:")));
        let open = |name: &Path| block_on(opened.host.open(name, OpenMode::default())).unwrap();
        assert_eq!(open(&pinned).id(), open(plain).id());
        assert_eq!(open(&pinned).name(), pinned);
        let kept = opened.host.kept(&pinned).unwrap();
        assert_eq!(kept.format, format.name());
        if let Some(below) = &kept.below {
            for header in ["/anything", "base.raw", "s3://other/chain", text] {
                assert_eq!(opened.host.resolve(&pinned, header), *below);
            }
        }
        assert_eq!(opened.host.resolve(Path::new("/local"), text), pinned);
        assert_eq!(opened.host.kept(plain), None);
        name = kept.below;
        let writable = OpenMode { writable: true, ..OpenMode::default() };
        assert!(block_on(opened.host.open(&pinned, writable)).is_err());
    }
    assert_eq!(name, None, "nothing is below the base");
    let open = |name: String| {
        assert!(opened.host.protocol_name(&name), "{name}");
        assert_eq!(opened.host.kept(Path::new(&name)), None);
        block_on(opened.host.open(Path::new(&name), OpenMode::default())).unwrap_err().to_string()
    };
    let pinned = opened.chain.pinned().unwrap();
    let said = open(format!("{address}@sha256:{}", "0".repeat(64)));
    assert!(said.contains("has no layers"), "{said}");
    let said = open(format!("s3://bucket/vm@sha256:{}", pinned.digest));
    assert!(said.contains("isobath serve s3://bucket/vm --overlay"), "{said}");
}

#[test]
fn what_is_pushed_on_top_leaves_the_names_of_the_layers_below() {
    let mut place = Place::new(Chain::new());
    let before = place.opened().chain.pinned().unwrap();
    place.chain.grow("higher.qcow2");
    send(&*place.store.directory, "vm", &place.chain).unwrap();
    let grown = place.opened();
    let above = grown.chain.pinned().unwrap();
    assert_ne!(above, before);
    grown.chain.check(&before).unwrap();
    let host = &grown.host;
    let name = PathBuf::from(before.to_string());
    let found = block_on(host.open(&name, OpenMode::default())).unwrap();
    assert_eq!(found.id(), grown.file(2).id());
    let manifest = place.directory.path().join("store/manifests/vm.json");
    let right = fs::read(&manifest).unwrap();
    let refused = |pinned: &Pinned| {
        let said = place.opened().chain.check(pinned).unwrap_err().to_string();
        assert!(said.contains("or its heads or tables in the store are damaged"), "{said}");
    };
    // The L1 tables of the highest layer, and of the one below.
    place.change_heads(|bytes| flip(bytes, 3, 1));
    place.opened().chain.check(&before).unwrap();
    refused(&above);
    fs::write(&manifest, &right).unwrap();
    place.change_heads(|bytes| flip(bytes, 2, 1));
    refused(&before);
    fs::write(&manifest, &right).unwrap();
    // The checksums decide nothing: they are compared with the table.
    place.change_heads(|bytes| flip(bytes, 2, 2));
    place.opened().chain.check(&above).unwrap();
    place.change_manifest(|manifest| {
        manifest["layers"][0]["table"] = manifest["layers"][1]["table"].clone();
    });
    refused(&before);
}

#[test]
fn layers_keep_their_names_when_their_chain_has_more_l1_tables_than_are_recorded() {
    let mut place = Place::new(Chain::of_long_tables(31));
    let mut names = vec![place.opened().chain.pinned().unwrap()];
    for _ in 0..4 {
        place.chain.grow_by_long_table();
        send(&*place.store.directory, "vm", &place.chain).unwrap();
        let opened = place.opened();
        for name in &names {
            opened.chain.check(name).unwrap();
        }
        names.push(opened.chain.pinned().unwrap());
    }
    let opened = place.opened();
    for number in [0, 31, 32, 34] {
        let length = fs::metadata(place.chain.path(number)).unwrap().len() as usize;
        let file = opened.file(number);
        assert!(read(&file, 0, length).unwrap() == place.local(number, 0, length), "{number}");
    }
    // An earlier version recorded those of the upper layers.
    place.change_heads(|bytes| {
        let (l1, length) = (part_of_head(bytes, 2, 1), 24 + 2 * 12 + 4);
        assert_eq!(l1.len(), 1 << 20);
        bytes[length..length + 4].fill(0);
        bytes.drain(l1);
    });
    let opened = place.opened();
    let said = opened.chain.pinned().unwrap_err().to_string();
    assert!(said.contains("push the chain again"), "{said}");
    let said = opened.chain.check(&names[0]).unwrap_err().to_string();
    assert!(said.contains("push the chain again"), "{said}");
    let file = opened.file(2);
    assert!(read(&file, 0, 2 << 20).unwrap() == place.local(2, 0, 2 << 20));
    send(&*place.store.directory, "vm", &place.chain).unwrap();
    let again = place.opened();
    for name in &names {
        again.chain.check(name).unwrap();
    }
}

#[test]
fn two_servers_that_fill_one_cache_at_once_read_what_was_pushed() {
    let place = Place::new(raw(64));
    let (first, second) = (place.opened(), place.opened());
    std::thread::scope(|scope| {
        for opened in [&first, &second] {
            for step in [3_u64, 5] {
                let place = &place;
                scope.spawn(move || {
                    let file = opened.file(0);
                    for number in 0..256 {
                        let at = number * step % 256 * 65536;
                        assert!(read(&file, at, 65536).unwrap() == place.local(0, at, 65536));
                    }
                });
            }
        }
    });
}

impl Place {
    /// Changes the manifest.
    pub(crate) fn change_manifest(&self, change: impl FnOnce(&mut Value)) {
        let path = self.directory.path().join("store/manifests/vm.json");
        let mut manifest = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut manifest);
        fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    }

    /// Changes the heads, and the manifest so that it names them. Heads of the first version have no index.
    fn change_heads(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let heads = self.directory.path().join("store/heads");
        self.change_manifest(|manifest| {
            let digest = manifest["heads"]["digest"].as_str().unwrap();
            let mut bytes = fs::read(heads.join(digest)).unwrap();
            change(&mut bytes);
            let digest = Digest::of(&bytes).to_string();
            fs::write(heads.join(&digest), &bytes).unwrap();
            manifest["heads"]["digest"] = digest.into();
            manifest["heads"]["length"] = bytes.len().into();
            if bytes[7] == 1 {
                manifest["version"] = 1.into();
                manifest.as_object_mut().unwrap().remove("index");
            }
        });
    }

    fn refused(&self) -> String {
        self.open(Some(Duration::from_mins(5))).err().unwrap().to_string()
    }
}

/// Where the heads have a part of what they have of a layer: its header, its L1 table or its checksums.
fn part_of_head(bytes: &[u8], layer: usize, part: usize) -> Range<usize> {
    let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let parts = word(8) * 3;
    let start = 24 + parts * 4 + word(12) + word(16);
    let lengths: Vec<_> = (0..parts).map(|number| word(24 + number * 4)).collect();
    let before: usize = lengths[..layer * 3 + part].iter().sum();
    start + before..start + before + lengths[layer * 3 + part]
}

/// Damages the end of such a part.
fn flip(bytes: &mut [u8], layer: usize, part: usize) {
    let last = part_of_head(bytes, layer, part).last().unwrap();
    bytes[last] ^= 1;
}

/// Heads of the first version, which have no tables of checksums and no index.
fn without_tables(bytes: &mut Vec<u8>) {
    let layers = u32::from_be_bytes(bytes[8..12].try_into().unwrap());
    let heads = Heads::decode(bytes, layers as usize).unwrap();
    *bytes = [&b"IHDS"[..], &1_u32.to_be_bytes(), &layers.to_be_bytes(), &[0; 4]].concat();
    for head in heads.layers() {
        bytes.extend((head.header.len() as u32).to_be_bytes());
        bytes.extend((head.l1.len() as u32).to_be_bytes());
    }
    for head in heads.layers() {
        bytes.extend([&head.header[..], &head.l1].concat());
    }
}

#[test]
fn a_chain_of_the_first_version_is_read() {
    for chain in [Chain::new(), raw(8)] {
        let place = Place::new(chain);
        let pinned = place.opened().chain.pinned().unwrap();
        place.change_heads(without_tables);
        let opened = place.opened();
        for said in [opened.chain.pinned().unwrap_err(), opened.chain.check(&pinned).unwrap_err()] {
            assert!(said.to_string().contains("was pushed by an earlier version"), "{said}");
        }
        for number in 0..place.chain.names.len() {
            let length = fs::metadata(place.chain.path(number)).unwrap().len() as usize;
            assert!(
                read(&opened.file(number), 0, length).unwrap() == place.local(number, 0, length)
            );
        }
        assert_eq!(opened.host.index_of(Path::new(&place.address.to_string())), None);
    }
}

#[test]
fn checksums_in_the_heads_must_be_those_of_the_table() {
    let place = Place::new(raw(8));
    // The object ends with them.
    place.change_heads(|bytes| *bytes.last_mut().unwrap() ^= 1);
    let opened = place.opened();
    for _ in 0..2 {
        let error = read(&opened.file(0), 0, 4096).unwrap_err().to_string();
        assert!(error.contains("other checksums than its table"), "{error}");
    }
    place.change_heads(|bytes| {
        bytes.truncate(bytes.len() - 16);
        // The length of the only layer's table.
        let length = u32::from_be_bytes(bytes[32..36].try_into().unwrap()) - 16;
        bytes[32..36].copy_from_slice(&length.to_be_bytes());
    });
    assert!(place.refused().contains("the checksums of another number of blocks"));
}

#[test]
fn an_index_is_read_as_it_was_pushed_and_by_its_name_alone() {
    let place = Place::new(Chain::new());
    let index = place.chain.index();
    let opened = place.opened();
    let top = place.address.to_string();
    let found = opened.host.index_of(Path::new(&top)).unwrap();
    assert_eq!(found.root[..], index.root[..]);
    for other in [format!("{top}#0"), format!("{top}#index"), format!("{top}2")] {
        assert_eq!(opened.host.index_of(Path::new(&other)), None, "{other}");
    }
    let files: Vec<_> = (0..opened.chain.depth()).map(|layer| opened.file(layer).id()).collect();
    assert_eq!(found.layers, files);
    let writable = OpenMode { writable: true, ..OpenMode::default() };
    assert!(block_on(opened.host.open(&found.name, writable)).is_err());
    let file = block_on(opened.host.open(&found.name, OpenMode::default())).unwrap();
    place.store.taken();
    assert!(read(&file, 0, index.bytes.len()).unwrap() == index.bytes);
    let (length, requests) = (index.bytes.len(), place.store.taken());
    assert_eq!(requests.len(), 1, "{requests:?}");
    assert!(
        requests[0].starts_with("READ indexes/") && requests[0].ends_with(&format!(" 0 {length}"))
    );
    // Another server on this machine has it.
    let again = place.opened();
    let file = block_on(again.host.open(&found.name, OpenMode::default())).unwrap();
    place.store.taken();
    assert!(read(&file, 0, index.bytes.len()).unwrap() == index.bytes);
    assert_eq!(place.store.taken(), Vec::<String>::new());
}

#[test]
fn a_name_in_a_header_leads_to_the_index_that_its_layers_had_and_to_no_other() {
    let mut place = Place::new(Chain::new());
    let index_of = |opened: &Opened, pinned: &Pinned| {
        opened.chain.check(pinned).unwrap();
        let name = pinned.to_string();
        assert_eq!(Pinned::parse(&name).as_ref(), Some(pinned));
        opened.host.index_of(Path::new(&name))
    };
    let opened = place.opened();
    let pinned = opened.chain.pinned().unwrap();
    let index = opened.host.index_of(Path::new(&place.address.to_string()));
    assert!(index.is_some() && index_of(&opened, &pinned) == index);
    let without = Pinned { index: None, ..pinned.clone() };
    let other = Pinned { index: Some(Digest::of(b"other")), ..pinned.clone() };
    for named in [&without, &other] {
        assert_eq!(index_of(&opened, named), None);
    }
    let below = opened.host.kept(Path::new(&pinned.to_string())).unwrap().below.unwrap();
    assert_eq!(opened.host.index_of(&below), None, "it describes the top as well");
    // The index that somebody puts in its place is not used.
    let manifest = place.directory.path().join("store/manifests/vm.json");
    let right = fs::read(&manifest).unwrap();
    place.change_heads(|bytes| {
        let first = part_of_head(bytes, 0, 0).start;
        let table = u32::from_be_bytes(bytes[16..20].try_into().unwrap()) as usize;
        bytes[first - table - 1] ^= 1;
    });
    assert_eq!(index_of(&place.opened(), &pinned), None);
    fs::write(&manifest, &right).unwrap();
    assert!(index_of(&place.opened(), &pinned).is_some());
    place.chain.grow("higher.qcow2");
    send(&*place.store.directory, "vm", &place.chain).unwrap();
    let grown = place.opened();
    assert_eq!(index_of(&grown, &pinned), None, "it is that of more layers now");
    assert!(index_of(&grown, &grown.chain.pinned().unwrap()).is_some());
}

#[test]
fn a_chain_whose_heads_and_manifest_differ_about_the_index_is_not_opened() {
    let place = Place::new(Chain::new());
    let changes: [Change; 3] = [
        |manifest| drop(manifest.as_object_mut().unwrap().remove("index")),
        |manifest| manifest["index"]["length"] = (1 << 20).into(),
        |manifest| manifest["index"]["length"] = 100.into(),
    ];
    let right = fs::read(place.directory.path().join("store/manifests/vm.json")).unwrap();
    for change in changes {
        place.change_manifest(change);
        assert!(place.refused().contains("another index than its manifest"));
        fs::write(place.directory.path().join("store/manifests/vm.json"), &right).unwrap();
    }
    place.opened();
}

#[test]
fn a_layer_whose_head_says_another_thing_is_not_read() {
    for cached in [false, true] {
        let place = Place::new(Chain::small("x.qcow2", 7));
        let length = fs::metadata(place.chain.path(0)).unwrap().len();
        if cached {
            read(&place.opened().file(0), 0, length as usize).unwrap();
        }
        // The object ends with the L1 table and the checksums.
        place.change_heads(|bytes| {
            let table = Heads::decode(bytes, 1).unwrap().layers()[0].table.len();
            let last = bytes.len() - table - 1;
            bytes[last] ^= 1;
        });
        let opened = place.opened();
        let file = opened.file(0);
        for _ in 0..2 {
            let error = read(&file, 65536, 4096).unwrap_err().to_string();
            assert!(error.contains("another L1 table"), "{error}");
        }
    }
}

#[test]
fn a_chain_whose_heads_are_not_what_its_manifest_says_is_not_opened() {
    let mut chain = Chain::small("x.qcow2", 7);
    chain.grow("y.qcow2");
    let place = Place::new(chain);
    let changes: [(Change, &str); 4] = [
        (
            |manifest| {
                manifest["layers"][1]["size"] = (2 << 20).into();
                manifest["size"] = (2 << 20).into();
            },
            "size",
        ),
        (|manifest| manifest["layers"][1]["backing"] = "z.qcow2".into(), "backing file"),
        (|manifest| manifest["layers"][0]["length"] = 100.into(), "header"),
        (|manifest| manifest["layers"][0]["format"] = "raw".into(), ""),
    ];
    let right = fs::read(place.directory.path().join("store/manifests/vm.json")).unwrap();
    for (change, what) in changes {
        place.change_manifest(change);
        let error = place.refused();
        assert!(error.contains(what), "{error}");
        fs::write(place.directory.path().join("store/manifests/vm.json"), &right).unwrap();
    }
    place.opened();
    place.change_heads(|bytes| bytes.truncate(40));
    assert!(place.refused().contains("heads/"));
    fs::write(place.directory.path().join("store/manifests/vm.json"), &right).unwrap();
    // The L1 table of the first layer moves: what its header says counts.
    place.change_heads(|bytes| bytes[24 + 7] ^= 8);
    place.refused();
}
