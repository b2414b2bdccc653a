//! A guest that changes its memory while its request is under way.

use crate::common::guest_memory;
use futures_executor::block_on;
use futures_util::task::noop_waker_ref;
use isobath_disk::{Disk, OpenOptions};
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use isobath_storage_test::fault::{FaultHost, Plan};
use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::task::{Context, Poll};

#[test]
fn what_is_written_to_a_detected_raw_image_is_what_was_judged() {
    const HEADER: &[u8; 8] = b"QFI\xfb\0\0\0\x03";
    let mut refused = 0;
    for seed in 1..=8_u64 {
        for turn in 0..12 {
            let memory = MemoryHost::new();
            memory.insert("raw", &[0; 4096]);
            let plan = Plan::new();
            let host = FaultHost::new(memory.clone(), plan.clone());
            let options = OpenOptions::new().writable(true);
            let disk = block_on(Disk::open(host.any(), Path::new("raw"), &options)).unwrap();
            // Only the write is delayed, so that it has the same turns each time.
            plan.delay(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let buf = guest_memory(vec![b'a'; 512]);
            let start = buf.as_ptr().cast_mut();
            let mut write = pin!(disk.write(0, buf));
            let mut context = Context::from_waker(noop_waker_ref());
            let mut turns = 0..200;
            let done = loop {
                if turns.next().unwrap() == turn {
                    // SAFETY: the guest's memory, which the buffer keeps, and of which nobody has a reference now.
                    unsafe { start.copy_from_nonoverlapping(HEADER.as_ptr(), HEADER.len()) };
                }
                if let Poll::Ready(done) = write.as_mut().poll(&mut context) {
                    break done;
                }
            };
            refused += usize::from(done.is_err());
            let written = memory.contents("raw").unwrap();
            assert!(!written.starts_with(HEADER), "seed {seed}, changed at turn {turn}");
        }
    }
    // When it was there from the beginning.
    assert_eq!(refused, 8);
}
