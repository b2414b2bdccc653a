//! Isobath opposite QEMU, at random: both write into one chain by turns, or each into a chain of its
//! own, and agree on every byte with each other and with a model.
//!
//! `ISOBATH_DIFF_SECONDS` says for how long (60 unless set; `make soak` sets it). A failure prints its
//! seed, and the history that led to it, shrunk; `ISOBATH_SEED` begins with that one.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod generate;
mod history;
mod isobath_side;
mod qemu_side;
mod replay;
mod shrink;

use history::History;
use isobath_testkit::seed::Seed;
use replay::Totals;
use std::cell::RefCell;
use std::panic;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Histories that are tried to make a failing one smaller, and for how long.
const SHRINK_BUDGET: usize = 1000;
const SHRINK_TIME: Duration = Duration::from_mins(3);

thread_local! {
    /// During an attempt on this thread, what the last panic said, with its place.
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the message of a panic during an attempt to itself.
fn quiet_attempts() {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let kept = MESSAGE.with_borrow_mut(|message| {
            message.as_mut().map(|message| *message = info.to_string()).is_some()
        });
        if !kept {
            hook(info);
        }
    }));
}

/// Carries a history out in a directory of its own, on a thread that holds nothing of others.
fn attempt(history: &History) -> Result<Totals, String> {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let work = || {
        MESSAGE.set(Some(String::new()));
        panic::catch_unwind(|| replay::replay(history, directory.path()))
            .map_err(|_| MESSAGE.take().unwrap_or_default())
    };
    let done = thread::scope(|scope| scope.spawn(work).join().unwrap());
    done.map_err(|message| message.replace(&*directory.path().to_string_lossy(), ""))
}

/// What kind of failure a message tells of: its place, and its words without numbers.
fn kind(message: &str) -> (String, String) {
    let mut lines = message.lines();
    let place = lines.next().unwrap_or_default().to_owned();
    let words = lines.next().unwrap_or_default().chars();
    (place, words.filter(|c| !c.is_ascii_hexdigit() && *c != 'x').take(60).collect())
}

fn explain(seed: u64, history: &History, message: &str) -> String {
    eprintln!("seed {seed:#x} fails: {message}\nshrinking it");
    let kind_of = kind(message);
    let mut last = message.to_owned();
    let begin = Instant::now();
    let small = shrink::shrink(history, SHRINK_BUDGET, |candidate| {
        if begin.elapsed() > SHRINK_TIME {
            return false;
        }
        let failure = attempt(candidate).err().filter(|message| kind(message) == kind_of);
        if let Some(message) = &failure {
            last.clone_from(message);
        }
        failure.is_some()
    });
    format!(
        "{last}\nafter this history:\n{small}to repeat: ISOBATH_SEED={seed:#x} cargo test -p \
         isobath-disk --test opposite_qemu"
    )
}

#[test]
fn isobath_and_qemu_agree_on_every_byte() {
    let seconds = std::env::var("ISOBATH_DIFF_SECONDS").map_or(60, |text| text.parse().unwrap());
    let first = Seed::new().value();
    let next = AtomicU64::new(first);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let totals = Mutex::new(Totals::default());
    let failure = Mutex::new(None);
    let stop = AtomicBool::new(false);
    quiet_attempts();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                // Each does one, however short the time.
                loop {
                    let value = next.fetch_add(1, Ordering::Relaxed);
                    let history = generate::history(&mut Seed::from(value).rng());
                    match attempt(&history) {
                        Ok(done) => *totals.lock().unwrap() += done,
                        Err(message) => {
                            if !stop.swap(true, Ordering::Relaxed) {
                                *failure.lock().unwrap() = Some(explain(value, &history, &message));
                            }
                        }
                    }
                    if stop.load(Ordering::Relaxed) || Instant::now() > deadline {
                        break;
                    }
                }
            });
        }
    });
    let totals = totals.into_inner().unwrap();
    println!(
        "{} operations ({} by isobath, {} by qemu) in {} sessions on {} layers of {} histories; {} \
         MiB compared; from seed {:#x}",
        totals.isobath + totals.qemu,
        totals.isobath,
        totals.qemu,
        totals.sessions,
        totals.layers,
        totals.histories,
        totals.bytes_compared >> 20,
        first
    );
    if let Some(text) = failure.into_inner().unwrap() {
        panic!("{text}");
    }
}
