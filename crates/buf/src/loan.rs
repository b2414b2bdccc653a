//! Buffers over memory that a caller lends for the time of a call.

use crate::IoBuf;
use std::io::{IoSlice, IoSliceMut};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Whether lent memory has been returned.
#[derive(Clone, Default)]
struct Returned(Arc<(Mutex<bool>, Condvar)>);

/// What each buffer over lent memory holds: it ends with the last of them.
struct Loan(Returned);

impl Drop for Loan {
    fn drop(&mut self) {
        let (returned, changed) = &*self.0.0;
        *returned.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
    }
}

/// Waits for the end of a loan when it is dropped.
struct WaitFor(Returned);

impl Drop for WaitFor {
    fn drop(&mut self) {
        let (returned, changed) = &*self.0.0;
        let mut returned = returned.lock().unwrap_or_else(PoisonError::into_inner);
        while !*returned {
            returned = changed.wait(returned).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Calls `run` with [shared](IoBuf::shared) buffers over `parts`. Returns, or unwinds, only once no part of any of the
/// buffers is left, wherever `run` has sent them: to other threads, or to the kernel.
pub fn to_fill<T>(parts: &mut [IoSliceMut<'_>], run: impl FnOnce(Vec<IoBuf>) -> T) -> T {
    let (_wait, loan) = begin();
    let parts = parts.iter_mut().map(|part| (NonNull::from(&mut **part).cast(), part.len()));
    let bufs = parts.map(|(start, length)| {
        // SAFETY: exclusively borrowed until `_wait` is dropped, and so until the last of these buffers is gone.
        unsafe { IoBuf::shared(start, length, Arc::clone(&loan) as _) }
    });
    let bufs = bufs.collect();
    drop(loan);
    run(bufs)
}

/// As [`to_fill`], with buffers that are [only read](IoBuf::shared_read_only).
pub fn to_read<T>(parts: &[IoSlice<'_>], run: impl FnOnce(Vec<IoBuf>) -> T) -> T {
    let (_wait, loan) = begin();
    let parts = parts.iter().map(|part| (NonNull::from(&**part).cast(), part.len()));
    let bufs = parts.map(|(start, length)| {
        // SAFETY: borrowed until `_wait` is dropped, and so until the last of these buffers is gone.
        unsafe { IoBuf::shared_read_only(start, length, Arc::clone(&loan) as _) }
    });
    let bufs = bufs.collect();
    drop(loan);
    run(bufs)
}

fn begin() -> (WaitFor, Arc<Loan>) {
    let returned = Returned::default();
    (WaitFor(returned.clone()), Arc::new(Loan(returned)))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;
    use std::thread;

    /// Sends the buffers to a thread that fills them once the call is as good as over.
    fn fill_late(bufs: Vec<IoBuf>) -> mpsc::Sender<()> {
        let (over, is_over) = mpsc::channel::<()>();
        thread::spawn(move || {
            let mut bufs = bufs;
            // The sender is dropped.
            let _ = is_over.recv();
            for buf in &mut bufs {
                buf.fill(1);
            }
        });
        over
    }

    #[test]
    fn a_call_returns_once_the_memory_is_back_however_it_ends() {
        let (mut one, mut other) = ([0; 3], [0; 4]);
        let parts = &mut [IoSliceMut::new(&mut one), IoSliceMut::new(&mut other)];
        to_fill(parts, |bufs| drop(fill_late(bufs)));
        assert_eq!((one, other), ([1; 3], [1; 4]));

        let mut memory = [0; 3];
        let parts = &mut [IoSliceMut::new(&mut memory)];
        let ended = catch_unwind(AssertUnwindSafe(|| {
            to_fill(parts, |bufs| {
                let _over = fill_late(bufs);
                panic!("as a request might");
            })
        }));
        assert!(ended.is_err());
        assert_eq!(memory, [1; 3]);
    }

    #[test]
    fn parts_of_a_loan_are_part_of_it() {
        let mut memory = [0; 4];
        to_fill(&mut [IoSliceMut::new(&mut memory)], |mut bufs| {
            let first = bufs[0].split_to(2);
            drop(fill_late(vec![first]));
        });
        assert_eq!(memory, [1, 1, 0, 0]);
    }

    #[test]
    fn nothing_and_no_bytes_can_be_lent() {
        assert_eq!(to_fill(&mut [], |bufs| bufs.len()), 0);
        assert_eq!(to_read(&[IoSlice::new(&[]), IoSlice::new(b"a")], |bufs| bufs[1][0]), b'a');
    }

    #[test]
    fn what_is_lent_to_read_is_lent_for_the_call() {
        let (sender, receiver) = mpsc::channel();
        let reader = to_read(&[IoSlice::new(b"lent")], |bufs| {
            thread::spawn(move || sender.send(bufs[0].to_vec()))
        });
        reader.join().unwrap().unwrap();
        assert_eq!(receiver.recv().unwrap(), b"lent");
    }
}
