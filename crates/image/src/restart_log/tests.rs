//! The log by itself: its contents at any moment, and its behaviour when it is full.

use super::*;
use crate::broken::{assert_violated, must_panic};
use isobath_qcow2::journal::JournalExtension;
use isobath_qcow2::{Header, HostOffset, IncompatibleFeatures, NewImage};
use isobath_storage::memory::{MemoryFile, MemoryHost};
use isobath_storage::{Host, MemoryUse, OpenMode, StorageExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

const ID: u64 = 0x1234_5678_9abc_def0;
const LAST: Lsn = Lsn::new(40);

struct World {
    host: MemoryHost,
    file: MemoryFile,
    header: Header,
    log: Arc<RestartLog>,
}

/// A file that may have memory.
struct MemoryWorld {
    host: MemoryHost,
    file: MemoryFile,
}

fn memory_world() -> MemoryWorld {
    let host = MemoryHost::new();
    host.insert("image", &[0; 512]);
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    let file = futures_executor::block_on(host.open(Path::new("image"), mode)).unwrap();
    MemoryWorld { host, file }
}

fn begin(log: &RestartLog, file: &MemoryFile) {
    let prepared = futures_executor::block_on(log.prepare(file, ID, LAST));
    log.begin(prepared.unwrap());
}

/// A log in use, and the header of the image to which it belongs.
fn world() -> World {
    let MemoryWorld { host, file } = memory_world();
    let log = Arc::new(RestartLog::default());
    log.wake();
    begin(&log, &file);
    World { host, file, header: header(ID), log }
}

/// The log of a killed process that mapped the first cluster.
pub(crate) fn found_log() -> FoundLog {
    let world = world();
    world.log.entry(0, entry(100));
    world.found().unwrap()
}

fn header(id: u64) -> Header {
    let plan = NewImage::new(1 << 30).plan().unwrap();
    let mut bytes = vec![0; 65536];
    for (offset, part) in plan.writes() {
        if offset.get() == 0 {
            bytes[..part.len()].copy_from_slice(&part);
        }
    }
    let extension = JournalExtension {
        area_offset: HostOffset::new(1 << 20),
        area_length: 1 << 20,
        id,
        first_lsn: Lsn::new(1),
    };
    for (at, part) in Header::edit_journal(&bytes, Some(&extension)).unwrap() {
        bytes[at..at + part.len()].copy_from_slice(&part);
    }
    let mut header = Header::parse(&bytes).unwrap();
    header.incompatible = header.incompatible.with(IncompatibleFeatures::JOURNAL);
    header
}

fn entry(cluster: u64) -> [u8; 16] {
    let mut raw = [0; 16];
    raw[..8].copy_from_slice(&(1 << 63 | cluster << 16).to_be_bytes());
    raw
}

impl World {
    fn found(&self) -> Option<FoundLog> {
        let found = FoundLog::find(&self.file, Path::new("image"), &self.header, LogUse::Take);
        // A damaged log is refused.
        futures_executor::block_on(found).ok().flatten()
    }

    /// The guest clusters that are mapped, and the journaled pieces' places and lengths.
    fn holds(&self) -> (Vec<u64>, Vec<(u64, usize)>) {
        let found = self.found().unwrap();
        let writes = found.writes.iter().map(|write| (write.at, write.bytes.len())).collect();
        (found.entries.keys().copied().collect(), writes)
    }
}

fn commit(log: &RestartLog) {
    let _ = log.durable(log.close_writes(log.close_entries()));
}

#[test]
fn a_commit_drops_what_it_closed_and_nothing_else() {
    let world = world();
    let log = &world.log;
    log.entry(1, entry(1));
    log.journaled(4096, &[1; 513]);
    let closed = log.close_entries();
    log.entry(2, entry(2));
    log.journaled(8192, &[2; 512]);
    let closed = log.close_writes(closed);
    log.journaled(12288, &[3; 1]);
    assert_eq!(world.holds(), (vec![1, 2], vec![(4096, 513), (8192, 512), (12288, 1)]));
    let _ = log.durable(closed);
    assert_eq!(world.holds(), (vec![2], vec![(12288, 1)]));
    assert_eq!(world.found().unwrap().writes[0].bytes, [3]);
    assert!(!log.must_sync());
}

#[test]
fn a_full_log_owes_a_commit_and_then_goes_on() {
    let world = world();
    let log = &world.log;
    // Several rounds, so that items wrap around the end of the memory.
    for round in 0..20_u64 {
        let mut count = 0;
        while !log.has_much() {
            log.entry(count, entry(round + count));
            log.journaled(count * 512, &[round as u8; 500]);
            count += 1;
        }
        let (entries, writes) = world.holds();
        assert_eq!((entries.len() as u64, writes.len() as u64), (count, count), "round {round}");
        assert!(!log.must_sync());
        commit(log);
        assert_eq!(world.holds(), (vec![], vec![]));
        assert!(!log.has_much());
    }
    let mut count = 0;
    while !log.must_sync() {
        log.entry(count, entry(count));
        count += 1;
    }
    // An item small enough for the space left would leave a gap.
    log.journaled(0, &[1]);
    log.entry(0, entry(7));
    assert_eq!(world.holds().0.len() as u64, count - 1);
    assert!(world.holds().1.is_empty());
    let closed = log.close_entries();
    log.entry(1, entry(1));
    let closed = log.close_writes(closed);
    assert!(log.must_sync(), "not durable yet");
    let _ = log.durable(closed);
    // There was no room for the one in between.
    assert!(log.must_sync());
    let closed = log.close_entries();
    log.entry(2, entry(2));
    let closed = log.close_writes(closed);
    let _ = log.durable(closed);
    assert!(!log.must_sync());
    assert_eq!(world.holds(), (vec![2], vec![]));
}

#[test]
fn what_is_not_logged_is_owed_only_where_something_was_promised() {
    let world = world();
    let log = &world.log;
    let suspended = log.suspend();
    log.entry(1, entry(1));
    assert!(log.must_sync() && world.holds().0.is_empty());
    log.promise_nothing();
    assert!(!log.must_sync());
    log.promise();
    assert!(log.must_sync());
    drop(suspended);
    log.entry(2, entry(2));
    assert!(world.holds().0.is_empty(), "one is missing");
    commit(log);
    assert!(!log.must_sync());
    log.entry(3, entry(3));
    assert_eq!(world.holds().0, [3]);
    log.end();
    assert!(world.found().is_none());
    log.entry(4, entry(4));
    assert!(log.must_sync());
}

#[test]
fn a_log_goes_on_where_the_journal_ends_and_nowhere_else() {
    let world = world();
    for last in [LAST, Lsn::new(47)] {
        if last != LAST {
            world.log.recorded(last);
        }
        let found = world.found().unwrap();
        let (before, next) = (last.before(), Lsn::new(last.get() + 3));
        assert!(found.follows(last, None) && found.follows(last, Some(before)));
        // A kill may come before the log is updated for a record.
        assert!(found.follows(next, Some(last)));
        assert!(!found.follows(before, None) && !found.follows(before, Some(before.before())));
        assert!(!found.follows(last.next(), None) && !found.follows(next.next(), Some(next)));
    }
}

#[test]
fn a_log_whose_memory_is_removed_goes_on_in_other_memory_or_owes_a_commit() {
    let world = world();
    let log = &world.log;
    log.entry(1, entry(1));
    log.journaled(4096, &[1; 513]);
    let (host, file) = (&world.host, &world.file);
    host.forget_restart_memories();
    assert!(world.found().is_none());
    assert!(futures_executor::block_on(log.check_memory(file)));
    assert_eq!(world.holds(), (vec![1], vec![(4096, 513)]));
    log.entry(2, entry(2));
    assert_eq!(world.holds(), (vec![1, 2], vec![(4096, 513)]));
    assert!(!log.must_sync());
    host.forget_restart_memories();
    host.set_restart_memories(false);
    assert!(futures_executor::block_on(log.check_memory(file)), "it is not required");
    assert!(log.must_sync());
}

#[test]
fn a_log_is_there_before_its_journal_is_in_use_and_takes_nothing_until_then() {
    let MemoryWorld { host, file } = memory_world();
    let log = Arc::new(RestartLog::default());
    log.wake();
    assert!(futures_executor::block_on(log.require(&file)).unwrap());
    let prepared = futures_executor::block_on(log.prepare(&file, ID, LAST)).unwrap();
    let world = World { host, file, header: header(ID), log };
    let log = &world.log;
    log.entry(1, entry(1));
    assert_eq!(world.holds(), (vec![], vec![]));
    assert!(log.must_sync(), "nobody would look for it");
    log.begin(prepared);
    commit(log);
    log.entry(2, entry(2));
    assert_eq!(world.holds().0, [2]);
    assert!(!log.must_sync());
    // The journal ends with the memory of a log that is required.
    world.host.forget_restart_memories();
    world.host.set_restart_memories(false);
    let check = || futures_executor::block_on(log.check_memory(&world.file));
    assert!(!check() && !check() && log.must_sync());
    log.end();
    assert!(check());
}

#[test]
fn a_damaged_or_foreign_log_is_not_used() {
    let world = world();
    for n in 0..40 {
        world.log.entry(n, entry(n));
        world.log.journaled(n * 4096, &[n as u8; 100]);
    }
    let all = world.found().unwrap();
    let other = World { header: header(ID + 1), ..self::world() };
    assert!(other.found().is_none());
    let memory =
        futures_executor::block_on(world.file.restart_memory(MemoryUse::Stale)).unwrap().unwrap();
    let used = at::ITEMS + world.log.state.lock().end as usize;
    for place in 0..used {
        // Numbers that do not describe the contents.
        if matches!(place, at::UNCLEAN | at::LAST) {
            continue;
        }
        let word = &memory.words()[place];
        let value = word.load(Ordering::Relaxed);
        for changed in [value ^ 1, value ^ 1 << 33, u64::MAX, 0] {
            word.store(changed, Ordering::Relaxed);
            // A start or end at another item omits some; nothing is ever added or changed.
            if let Some(found) = world.found() {
                assert!(found.entries.iter().all(|(at, entry)| all.entries.get(at) == Some(entry)));
                assert!(
                    found.writes.iter().all(|write| all.writes.contains(write)),
                    "word {place}"
                );
            }
        }
        word.store(value, Ordering::Relaxed);
    }
    assert!(world.found().is_some());
}

#[test]
fn a_broken_log_is_noticed() {
    let state = || LogState { end: 10, ..LogState::default() };
    assert_violated("dropped from the log was in it", state(), |state| state.entries.from = 11);
    assert_violated("dropped from the log was in it", state(), |state| state.bytes.from = 11);
    assert_violated("only a log in use", state(), |state| state.entries.logged = true);
    assert_violated("over one that counts", state(), |state| state.end = CAPACITY + 1);
    assert_violated("paid was owed", state(), |state| state.paid = 1);
}

/// The message of the violation by which `change` stops.
fn violation(change: impl FnOnce(&RestartLog)) -> String {
    let world = world();
    world.log.entry(1, entry(1));
    let stopped = catch_unwind(AssertUnwindSafe(|| change(&world.log))).unwrap_err();
    stopped.downcast_ref::<String>().expect("a violation has a message").clone()
}

#[test]
fn steps_of_commits_that_do_not_follow_each_other_are_noticed() {
    let out_of_order = violation(|log| {
        let first = log.close_writes(log.close_entries());
        log.entry(2, entry(2));
        commit(log);
        let _ = log.durable(first);
    });
    assert!(out_of_order.contains("closes what follows the one before"), "{out_of_order}");
    let twice = violation(|log| log.recorded(LAST));
    assert!(twice.contains("follows the log's last one"), "{twice}");
    let nested = violation(|log| {
        let _ = (log.begin_unclean(), log.begin_unclean());
    });
    assert!(nested.contains("leaves refcounts too high ends before the next begins"), "{nested}");
    let half = violation(|log| {
        let _ = close_all(Some(log), None);
    });
    assert!(half.contains("closes its mappings in the log before its data"), "{half}");
    let kept = violation(|log| {
        let _ = drop_closed(Some(log), None);
    });
    assert!(kept.contains("drops from the log what it closed in it"), "{kept}");
}

#[test]
fn a_log_on_which_clients_rely_is_not_set_aside() {
    let world = world();
    let name = Path::new("image");
    let find = |how| {
        let found = FoundLog::find(&world.file, name, &world.header, how);
        futures_executor::block_on(found).unwrap().unwrap()
    };
    let relied_on = find(LogUse::Rely);
    let stopped = catch_unwind(AssertUnwindSafe(|| relied_on.set_aside(name, "")));
    let stopped = stopped.unwrap_err().downcast_ref::<String>().cloned().unwrap();
    assert!(stopped.contains("on which clients rely stays in its place"), "{stopped}");
    drop(relied_on);
    find(LogUse::Take).set_aside(name, "").unwrap();
    let found = FoundLog::find(&world.file, name, &world.header, LogUse::Rely);
    assert!(futures_executor::block_on(found).unwrap().is_none());
}

#[test]
fn a_log_that_is_required_owes_what_it_has_no_memory_for() {
    let MemoryWorld { host, file } = memory_world();
    for required in [true, false] {
        host.set_restart_memories(true);
        let log = RestartLog::default();
        log.wake();
        if required {
            assert!(futures_executor::block_on(log.require(&file)).unwrap());
        }
        host.forget_restart_memories();
        host.set_restart_memories(false);
        assert!(!futures_executor::block_on(RestartLog::default().require(&file)).unwrap());
        let prepared = futures_executor::block_on(log.prepare(&file, ID, LAST));
        assert_eq!(prepared.is_none(), required, "there is no journal without the log");
        if let Some(prepared) = prepared {
            log.begin(prepared);
        }
        log.entry(1, entry(1));
        assert_eq!(log.must_sync(), required);
        commit(&log);
        assert!(!log.must_sync());
    }
}

#[test]
fn only_what_is_not_promised_is_promised_again() {
    let log = RestartLog::default();
    log.promise_nothing();
    log.promise();
    must_panic(|| log.promise(), "what is promised was not promised before");
}
