//! The program's clock, which a test can make jump. It stands in for the C library's, so whoever reads the time in this
//! program reads it here.

use std::cell::Cell;
use std::time::{Duration, Instant};

thread_local! {
    /// How much the clock advances at each reading by this thread.
    static JUMP: Cell<u64> = const { Cell::new(0) };
    static AHEAD: Cell<u64> = const { Cell::new(0) };
    static READINGS: Cell<u64> = const { Cell::new(0) };
}

/// The C library's function, by its name and signature.
///
/// # Safety
/// `time` is valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(
    clock: libc::clockid_t,
    time: *mut libc::timespec,
) -> libc::c_int {
    // SAFETY: the caller's promise; the kernel checks the rest.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } as libc::c_int;
    READINGS.set(READINGS.get() + 1);
    let ahead = AHEAD.get() + JUMP.get();
    AHEAD.set(ahead);
    if result == 0 {
        // SAFETY: as above.
        let time = unsafe { &mut *time };
        let nanoseconds = time.tv_nsec as u64 + ahead;
        time.tv_sec += (nanoseconds / 1_000_000_000) as libc::time_t;
        time.tv_nsec = (nanoseconds % 1_000_000_000) as libc::c_long;
    }
    result
}

/// Makes this thread's clock advance by `length` at each reading, and counts readings from 0.
pub(crate) fn jump(length: Duration) {
    JUMP.set(length.as_nanos() as u64);
    READINGS.set(0);
}

/// How often this thread has read the clock since [`jump`].
pub(crate) fn readings() -> u64 {
    READINGS.get()
}

#[test]
fn the_clock_jumps_and_counts() {
    jump(Duration::from_secs(1000));
    let before = Instant::now();
    assert!(before.elapsed() >= Duration::from_secs(1000));
    assert_eq!(readings(), 2);
    jump(Duration::ZERO);
    assert!(before.elapsed() >= Duration::from_secs(1000), "the clock never goes back");
}
