//! Isobath opposite QEMU, at random: both write into one chain by turns, or each into a chain of its
//! own, and agree on every byte with each other and with a model.
//!
//! `ISOBATH_DIFF_HISTORIES` says how many histories, `ISOBATH_DIFF_SECONDS` for how long, `ISOBATH_DIFF_OPERATIONS` for
//! how many operations at most; without any of them there are as many histories as `make test` has, so that it tests
//! the same on every machine. `make soak` sets the last two, and names in `ISOBATH_DIFF_STATE` a file of seeds and
//! totals with which the next run goes on. `ISOBATH_DIFF_DIR` is where the images lie; with `ISOBATH_DIFF_KEEP` those
//! of a failure are kept, and its history is not shrunk. A failure prints its seed, and the history that led to it,
//! shrunk; `ISOBATH_SEED` begins with that one.

mod campaign;
mod chain;
mod daemon_side;
mod generate;
mod history;
mod isobath_side;
mod judge;
mod layer;
mod op;
mod qemu_side;
mod replay;
mod shrink;
mod world;

use campaign::Campaign;
use history::{Base, History, ImageOptions, Job, JobKind, Session, Side, Step};
use isobath_disk::MetadataMode;
use isobath_testkit::daemon::Daemon;
use isobath_testkit::seed::Seed;
use op::{Fill, Op};
use replay::Totals;
use std::cell::RefCell;
use std::env;
use std::panic::{self, AssertUnwindSafe};
use std::thread;
use std::time::{Duration, Instant};

/// Histories that are tried to make a failing one smaller.
const SHRINK_BUDGET: usize = 200;
/// One of these that takes longer hangs; others would too, and none is tried after it.
const LONG: Duration = Duration::from_mins(1);

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

/// Carries a history out in a directory of its own, on a thread that holds nothing of others. The
/// daemon is started where there is none, and not used again after a failure.
fn attempt(history: &History, daemon: &mut Option<Daemon>) -> Result<Totals, String> {
    let place = env::var_os("ISOBATH_DIFF_DIR").unwrap_or(env!("CARGO_TARGET_TMPDIR").into());
    let directory = tempfile::tempdir_in(place).unwrap();
    let used = RefCell::new(daemon.take().unwrap_or_default());
    let work = || {
        MESSAGE.set(Some(String::new()));
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            replay::replay(history, directory.path(), &used)
        }));
        (result.map_err(|_| MESSAGE.take().unwrap_or_default()), used)
    };
    let (done, used) = thread::scope(|scope| scope.spawn(work).join().unwrap());
    if done.is_ok() {
        *daemon = Some(used.into_inner());
    } else if env::var_os("ISOBATH_DIFF_KEEP").is_some() {
        let kept = directory.path().with_extension("kept");
        std::fs::rename(directory.path(), &kept).unwrap();
        eprintln!("kept as {}", kept.display());
    }
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
    let mut daemon = None;
    let mut hung = false;
    let budget = if env::var_os("ISOBATH_DIFF_KEEP").is_some() { 0 } else { SHRINK_BUDGET };
    let small = shrink::shrink(history, budget, |candidate| {
        if hung {
            return false;
        }
        let begin = Instant::now();
        let failure =
            attempt(candidate, &mut daemon).err().filter(|message| kind(message) == kind_of);
        hung = begin.elapsed() > LONG;
        if let Some(message) = &failure {
            last.clone_from(message);
        }
        failure.is_some()
    });
    format!(
        "{last}\nafter this history:\n{small}to repeat: ISOBATH_SEED={seed:#x} \
         ISOBATH_DIFF_HISTORIES=1 cargo test -p isobath --test it opposite_qemu::"
    )
}

#[test]
fn isobath_and_qemu_agree_on_every_byte() {
    let campaign = Campaign::start();
    quiet_attempts();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                let mut daemon = None;
                while let Some(seed) = campaign.next_seed() {
                    let history = generate::history(&mut Seed::from(seed).rng());
                    match attempt(&history, &mut daemon) {
                        Ok(done) => campaign.passed(seed, done),
                        Err(message) => {
                            campaign.failed(|| explain(seed, &history, &message));
                        }
                    }
                }
            });
        }
    });
    campaign.end();
}

/// A base without data, and two layers above it that each hold one compressed cluster, at the same place
/// of their files.
fn two_compressed_clusters(kind: JobKind, top: u8) -> History {
    let layer =
        Step::Layer { by: Side::Isobath, options: ImageOptions::default(), size: Some(1 << 20) };
    let open = |job| {
        Step::Open(Session {
            by: Side::Isobath,
            job,
            metadata: MetadataMode::Ordered,
            program: false,
            width: 1,
            map_cache: 4 << 20,
            direct: false,
            two_threads: false,
            dropped: false,
        })
    };
    let write =
        |cluster, byte| Step::Op(Op::Compressed { cluster, count: 1, fill: Fill::Byte(byte) });
    let job = Job { kind, top, base: 0, warm: true };
    let steps = vec![
        layer.clone(),
        layer.clone(),
        open(None),
        write(0, 0xaa),
        layer,
        open(None),
        write(1, 0xbb),
        open(Some(job)),
    ];
    History { twin: false, base: Base::None, steps }
}

#[test]
fn jobs_over_compressed_clusters_at_equal_places_change_nothing() {
    for (kind, top) in [(JobKind::Stream, 0), (JobKind::Commit, 1)] {
        let history = two_compressed_clusters(kind, top);
        if let Err(message) = attempt(&history, &mut None) {
            panic!("{message}\nafter this history:\n{history}");
        }
    }
}
