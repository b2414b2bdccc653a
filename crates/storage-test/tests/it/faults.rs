//! Planned faults and recorded changes.

use isobath_ring::block_on;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Operation, Storage, StorageExt, ZeroMode};
use isobath_storage_test::conformance;
use isobath_storage_test::conformance::WRITABLE;
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_storage_test::recorder::{Change, Entry, Fate, RecorderHost};
use std::path::Path;

const NAME: &str = "/disk";

#[test]
fn wrappers_without_a_plan_change_nothing() {
    let plan = Plan::new();
    plan.delay(7);
    let host = RecorderHost::new(FaultHost::new(MemoryHost::new(), plan.clone()));
    block_on(conformance::check(&host, Path::new("/images"), false));
    assert_eq!(plan.injected(), 0);
    assert!(!host.record().is_empty());
}

#[test]
fn operations_fail_where_planned() {
    let plan = Plan::new();
    let memory = MemoryHost::new();
    let host = FaultHost::new(memory.clone(), plan.clone());
    block_on(async {
        let file = host.create(Path::new(NAME), WRITABLE).await.unwrap();
        let other = host.create(Path::new("/other"), WRITABLE).await.unwrap();
        plan.add(Fault { torn: 2, ..Fault::new(Operation::Write, 1).of(NAME) }.errno(libc::ENOSPC));
        plan.add(Fault::new(Operation::Flush, 0).forever());
        let write = |bytes: &'static [u8]| file.write_at(0, IoBuf::copy_of(bytes));
        write(b"aaaa").await.unwrap();
        other.write_at(0, IoBuf::copy_of(b"other")).await.unwrap();
        let error = write(b"bbbb").await.unwrap_err();
        assert_eq!((error.errno(), error.range), (libc::ENOSPC, Some((0, 4))));
        assert_eq!(memory.contents(NAME).unwrap(), b"bbaa");
        write(b"cccc").await.unwrap();
        for _ in 0..3 {
            assert_eq!(file.flush().await.unwrap_err().errno(), libc::EIO);
        }
        assert_eq!(plan.injected(), 4);
        plan.add(Fault::new(Operation::Read, 0).of(NAME).at(1..2));
        for (offset, length, fails) in [(0, 1, false), (2, 2, false), (0, 4, true), (1, 1, false)] {
            let read = file.read_at(offset, IoBuf::zeroed(length)).await;
            assert_eq!(read.is_err(), fails, "{length} bytes at {offset}");
        }
        plan.clear();
        file.flush().await.unwrap();
        plan.add(Fault::new(Operation::Open, 0));
        drop(file);
        assert!(host.open(Path::new(NAME), WRITABLE).await.is_err());
        host.open(Path::new(NAME), WRITABLE).await.unwrap();
    });
}

#[test]
fn a_crash_keeps_what_was_flushed_and_what_fate_chooses() {
    let base = MemoryHost::new();
    base.insert(NAME, b"........");
    let host = RecorderHost::new(base.deep_copy());
    let record = host.record();
    block_on(async {
        let file = host.open(Path::new(NAME), WRITABLE).await.unwrap();
        file.write_at(0, IoBuf::copy_of(b"AA")).await.unwrap();
        file.flush().await.unwrap();
        file.write_at(2, IoBuf::copy_of(b"BBBB")).await.unwrap();
        file.write_zeroes(0, 1, ZeroMode::default()).await.unwrap();
        file.set_len(7).await.unwrap();

        assert_eq!(record.durable(record.len()), [true, false, false, false, false]);
        assert_eq!(record.durable(1), [false], "the flush came after the crash");
        let crash = async |end, fate: &dyn Fn(usize, &Entry) -> Fate| {
            record.replay(&base, end, fate).await.unwrap().contents(NAME).unwrap()
        };
        assert_eq!(crash(record.len(), &|_, _| Fate::Lost).await, b"AA......");
        assert_eq!(crash(record.len(), &|_, _| Fate::Kept).await, b"\0ABBBB.");
        assert_eq!(crash(record.len(), &|_, _| Fate::Torn(1)).await, b"\0AB....");
        assert_eq!(crash(0, &|_, _| Fate::Kept).await, b"........");
        assert_eq!(crash(1, &|_, _| Fate::Lost).await, b"........");
        let only_zero = |_: usize, entry: &Entry| {
            if matches!(entry.change, Change::Zero(_)) { Fate::Kept } else { Fate::Lost }
        };
        assert_eq!(crash(record.len(), &only_zero).await, b"\0A......");
    });
}

#[test]
fn what_a_host_tells_of_itself_is_passed_on() {
    let memory = MemoryHost::new();
    let host = FaultHost::new(RecorderHost::new(memory.clone()), Plan::new());
    block_on(async {
        let file = host.create(Path::new("image"), WRITABLE).await.unwrap();
        assert_eq!((file.gains_from_written_space(), file.atomic_write()), (false, 512));
        memory.set_gains_from_written_space(true);
        memory.set_atomic_write(4096);
        assert_eq!((file.gains_from_written_space(), file.atomic_write()), (true, 4096));
        let copy = memory.deep_copy();
        let file = copy.open(Path::new("image"), WRITABLE).await.unwrap();
        assert_eq!((file.gains_from_written_space(), file.atomic_write()), (true, 4096));
    });
}
