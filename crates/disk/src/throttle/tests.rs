//! Limits on simulated time: requests pass at exact instants.

use super::*;
use crate::clock::Clock;
use crate::device::{BlockDevice, ZeroFlags};
use crate::live::LiveDisk;
use crate::testing;
use isobath_chain::create::Preallocation;
use isobath_image::options::OpenOptions;
use isobath_storage::IoBuf;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A clock that stands still until a test moves it.
#[derive(Default)]
struct TestClock(Mutex<Timers>);

#[derive(Default)]
struct Timers {
    now: Duration,
    next: u64,
    waiting: BTreeMap<(Duration, u64), Waker>,
}

impl Clock for Arc<TestClock> {
    fn now(&self) -> Duration {
        self.0.lock().now
    }

    fn sleep_until(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let number = {
            let mut timers = self.0.lock();
            timers.next += 1;
            timers.next
        };
        Box::pin(Timer { clock: Arc::clone(self), key: (time, number) })
    }
}

struct Timer {
    clock: Arc<TestClock>,
    key: (Duration, u64),
}

impl Future for Timer {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut timers = self.clock.0.lock();
        if timers.now >= self.key.0 {
            return Poll::Ready(());
        }
        timers.waiting.insert(self.key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let removed = self.clock.0.lock().waiting.remove(&self.key);
        drop(removed);
    }
}

/// Tasks that are polled only when they were woken, so that no lost wake goes unnoticed.
#[derive(Default)]
struct Tasks {
    clock: Arc<TestClock>,
    all: Vec<Task>,
    /// What each request that passed was called, and when it did.
    passed: Rc<RefCell<Vec<(Duration, &'static str)>>>,
}

struct Task {
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    woken: Arc<Woken>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

impl Tasks {
    fn spawn(&mut self, future: impl Future<Output = ()> + 'static) -> usize {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.all.push(Task { future: Some(Box::pin(future)), woken });
        self.settle();
        self.all.len() - 1
    }

    /// Polls whoever is woken, until nobody is.
    fn settle(&mut self) {
        while self.all.iter().any(|task| task.woken.0.load(SeqCst)) {
            for task in &mut self.all {
                if !task.woken.0.swap(false, SeqCst) {
                    continue;
                }
                let waker = Waker::from(Arc::clone(&task.woken));
                let mut context = Context::from_waker(&waker);
                if let Some(future) = &mut task.future
                    && future.as_mut().poll(&mut context).is_ready()
                {
                    task.future = None;
                }
            }
        }
    }

    /// Moves the clock from timer to timer, up to `end`.
    fn run_until(&mut self, end: Duration) {
        loop {
            self.settle();
            let expired = {
                let mut timers = self.clock.0.lock();
                match timers.waiting.first_entry() {
                    Some(first) if first.key().0 <= end => {
                        let ((time, _), waker) = first.remove_entry();
                        timers.now = timers.now.max(time);
                        Some(waker)
                    }
                    _ => {
                        timers.now = end;
                        None
                    }
                }
            };
            match expired {
                Some(waker) => waker.wake(),
                None => return,
            }
        }
    }

    fn end(&mut self) {
        self.run_until(Duration::from_secs(100_000));
        assert!(self.all.iter().all(|task| task.future.is_none()), "a request waits forever");
    }

    fn group(&self, values: &[(&str, u64)]) -> Arc<Group> {
        let group = Arc::new(Group::new("g", Arc::new(Arc::clone(&self.clock))));
        group.set_limits(&limits(values));
        group
    }

    fn request(
        &mut self,
        disk: &Rc<Throttle>,
        name: &'static str,
        (direction, bytes): (Direction, u64),
    ) -> usize {
        let (clock, passed) = (Arc::clone(&self.clock), Rc::clone(&self.passed));
        let disk = Rc::clone(disk);
        self.spawn(async move {
            disk.admit(direction, bytes).await;
            passed.borrow_mut().push((clock.now(), name));
        })
    }

    fn reads(&mut self, disk: &Rc<Throttle>, name: &'static str, count: usize) {
        for _ in 0..count {
            self.request(disk, name, READ);
        }
    }

    fn names(&self) -> Vec<&'static str> {
        self.passed.borrow().iter().map(|(_, name)| *name).collect()
    }

    /// When requests passed, in milliseconds.
    fn times(&self) -> Vec<u128> {
        let passed = self.passed.borrow();
        passed
            .iter()
            .map(|(time, _)| {
                assert_eq!(time.as_nanos() % 1_000_000, 0);
                time.as_millis()
            })
            .collect()
    }
}

const READ: (Direction, u64) = (Direction::Read, 4096);
const WRITE: (Direction, u64) = (Direction::Write, 4096);

fn limits(values: &[(&str, u64)]) -> Limits {
    let mut limits = Limits::default();
    for (name, value) in values {
        assert!(limits.set_by_name(name, *value), "{name}");
    }
    limits.check().unwrap();
    limits
}

fn disk_in(group: &Arc<Group>) -> Rc<Throttle> {
    let disk = Rc::new(Throttle::default());
    disk.set_group(Some(Arc::clone(group)));
    disk
}

#[test]
fn a_tenth_of_a_second_passes_at_once_and_then_the_average() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("iops-total", 10)]));
    tasks.reads(&disk, "r", 5);
    assert_eq!(disk.waiting(), 3);
    tasks.end();
    // As in QEMU a request passes unless the bucket, of one request here, is overfull.
    assert_eq!(tasks.times(), [0, 0, 100, 200, 300]);
    // An idle disk saves up no more than the bucket.
    tasks.reads(&disk, "r", 3);
    let start = tasks.clock.now().as_millis();
    tasks.run_until(tasks.clock.now() + SECOND);
    assert_eq!(tasks.times()[5..], [start, start, start + 100]);
}

#[test]
fn bytes_are_limited_whatever_the_size_of_requests() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("bps-total", 1_000_000)]));
    for bytes in [500_000, 500_000, 1000, 10_000_000, 1000] {
        tasks.request(&disk, "w", (Direction::Write, bytes));
    }
    tasks.end();
    assert_eq!(tasks.times(), [0, 400, 900, 901, 10_901]);
}

#[test]
fn a_burst_of_one_second_passes_at_once() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("iops-total", 10), ("iops-total-max", 100)]));
    tasks.reads(&disk, "r", 103);
    tasks.end();
    let times = tasks.times();
    assert!(times[..101].iter().all(|time| *time == 0));
    assert_eq!(times[101..], [100, 200]);
}

#[test]
fn a_long_burst_passes_at_its_rate_until_its_length_is_used_up() {
    let mut tasks = Tasks::default();
    let values = [("iops-total", 10), ("iops-total-max", 200), ("iops-total-max-length", 6)];
    let disk = disk_in(&tasks.group(&values));
    tasks.reads(&disk, "r", 1500);
    let count = |tasks: &Tasks| tasks.passed.borrow().len();
    assert_eq!(count(&tasks), 21, "a tenth of a second of the burst's rate, and one");
    tasks.run_until(6 * SECOND);
    assert_eq!(count(&tasks), 21 + 200 * 6);
    // What leaks during the burst prolongs it, as QEMU's documentation says.
    tasks.run_until(20 * SECOND);
    assert_eq!(count(&tasks), 1201 + 10 * 20);
    tasks.end();
}

#[test]
fn large_requests_count_as_several() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("iops-total", 10), ("iops-size", 4096)]));
    for bytes in [512, 4096, 8192, 6144, 1] {
        tasks.request(&disk, "r", (Direction::Read, bytes));
    }
    tasks.end();
    assert_eq!(tasks.times(), [0, 0, 100, 300, 450]);
}

#[test]
fn reads_and_writes_have_limits_of_their_own() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("iops-read", 10), ("bps-write", 40_960)]));
    for _ in 0..3 {
        tasks.request(&disk, "r", READ);
        tasks.request(&disk, "w", WRITE);
    }
    tasks.end();
    assert_eq!(tasks.names(), ["r", "w", "r", "w", "r", "w"]);
    assert_eq!(tasks.times(), [0, 0, 0, 0, 100, 100]);
}

#[test]
fn reads_and_writes_take_turns_under_a_common_limit() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("iops-total", 10)]));
    tasks.reads(&disk, "r", 6);
    for _ in 0..4 {
        tasks.request(&disk, "w", WRITE);
    }
    tasks.end();
    let names = tasks.names();
    assert_eq!(names[..2], ["r", "r"]);
    let reads = names[2..].iter().filter(|name| **name == "r").count();
    assert_eq!(reads, 4);
    assert!(names[2..].windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

#[test]
fn disks_of_a_group_get_equal_shares_within_one_request() {
    let mut tasks = Tasks::default();
    let group = tasks.group(&[("iops-total", 100)]);
    let disks: Vec<_> = (0..4).map(|_| disk_in(&group)).collect();
    // The first keeps many more in flight, and was there before the others.
    for (disk, (name, count)) in disks.iter().zip([("a", 400), ("b", 120), ("c", 120), ("d", 120)])
    {
        tasks.reads(disk, name, count);
    }
    let before = tasks.names().len();
    for step in 1..=10 {
        tasks.run_until(SECOND * step / 3);
        let names = tasks.names().split_off(before);
        let shares = ["a", "b", "c", "d"].map(|name| names.iter().filter(|n| **n == name).count());
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(most - least <= 1, "{shares:?}");
    }
    tasks.end();
}

#[test]
fn a_disk_alone_in_its_group_waits_for_no_other() {
    let mut tasks = Tasks::default();
    let (slow, fast) = (tasks.group(&[("iops-total", 1)]), tasks.group(&[("iops-total", 1000)]));
    let (flooded, other) = (disk_in(&slow), disk_in(&fast));
    tasks.reads(&flooded, "flooded", 100);
    tasks.reads(&other, "other", 101);
    assert_eq!(tasks.names().iter().filter(|name| **name == "other").count(), 101);
    tasks.end();
}

#[test]
fn a_drain_lets_waiting_and_new_requests_pass_and_counts_them() {
    let mut tasks = Tasks::default();
    let group = tasks.group(&[("iops-total", 10)]);
    let (disk, other) = (disk_in(&group), disk_in(&group));
    tasks.reads(&disk, "r", 5);
    tasks.reads(&other, "o", 1);
    assert_eq!(tasks.names().len(), 2);
    let drained = disk.drain();
    tasks.settle();
    assert_eq!(tasks.names().len(), 5);
    let again = disk.drain();
    drop(drained);
    tasks.reads(&disk, "r", 1);
    assert_eq!(tasks.names(), ["r"; 6], "the other disk still waits");
    drop(again);
    tasks.reads(&disk, "late", 1);
    assert_eq!((disk.waiting(), other.waiting()), (1, 1));
    tasks.end();
    // Six passed: the bucket of one is overfull by five.
    assert_eq!(tasks.times()[6..], [500, 600]);
    assert_eq!(tasks.names()[6..], ["o", "late"]);
}

#[test]
fn requests_that_are_given_up_make_nobody_wait() {
    for given_up in [vec![2], vec![3], vec![2, 3], vec![3, 2], vec![4]] {
        let mut tasks = Tasks::default();
        let disk = disk_in(&tasks.group(&[("iops-total", 10)]));
        tasks.reads(&disk, "r", 5);
        tasks.run_until(50 * MS);
        for number in &given_up {
            tasks.all[*number].future = None;
        }
        assert_eq!(disk.waiting(), 3 - given_up.len());
        tasks.end();
        let expected = &[0, 0, 100, 200][..4 - (given_up.len() - 1)];
        assert_eq!(tasks.times(), expected, "{given_up:?}");
    }
}

#[test]
fn requests_given_up_in_any_order_leave_the_others_in_theirs() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let mut tasks = Tasks::default();
    let group = tasks.group(&[("iops-total", 10)]);
    let disks = [disk_in(&group), disk_in(&group)];
    let mut left = Vec::new();
    for number in 0..100 {
        let name: &'static str = format!("{number}").leak();
        let task = tasks.request(&disks[number % 2], name, READ);
        left.push((task, name));
    }
    // The first two have passed.
    left.drain(..2);
    while left.len() > 10 {
        let (task, _) = left.remove(rng.random_range(0..left.len()));
        tasks.all[task].future = None;
        assert_eq!(disks[0].waiting() + disks[1].waiting(), left.len());
    }
    tasks.end();
    let names = tasks.names().split_off(2);
    assert_eq!(names.len(), 10);
    for parity in 0..2 {
        let is_of = |name: &&str| name.parse::<usize>().unwrap() % 2 == parity;
        let expected: Vec<_> = left.iter().map(|(_, name)| *name).filter(is_of).collect();
        let passed: Vec<_> = names.iter().copied().filter(is_of).collect();
        assert_eq!(passed, expected);
    }
}

#[test]
fn a_request_that_may_pass_and_is_given_up_leaves_no_trace() {
    let mut tasks = Tasks::default();
    let disk = disk_in(&tasks.group(&[("iops-total", 10)]));
    tasks.reads(&disk, "r", 4);
    // It may pass, but has not been polled since.
    let drained = disk.drain();
    tasks.all[2].future = None;
    drop(drained);
    tasks.end();
    assert_eq!(tasks.names().len(), 3);
    let group = disk.group().unwrap();
    disk.set_group(None);
    assert_eq!(Arc::strong_count(&group), 1);
}

#[test]
fn changed_limits_apply_to_requests_that_wait() {
    let mut tasks = Tasks::default();
    let group = tasks.group(&[("iops-total", 1)]);
    let disk = disk_in(&group);
    tasks.reads(&disk, "r", 5);
    tasks.run_until(500 * MS);
    assert_eq!(tasks.times(), [0]);
    // Faster: what passed before is forgotten, as in QEMU.
    group.set_limits(&limits(&[("iops-total", 10)]));
    tasks.run_until(600 * MS);
    assert_eq!(tasks.times(), [0, 500, 500, 600]);
    // Slower: the timer that runs is too early.
    group.set_limits(&limits(&[("iops-total", 1)]));
    tasks.reads(&disk, "r", 1);
    tasks.end();
    assert_eq!(tasks.times(), [0, 500, 500, 600, 600, 1500]);
    // None: everything passes.
    tasks.reads(&disk, "r", 20);
    assert!(disk.waiting() > 0);
    group.set_limits(&Limits::default());
    tasks.settle();
    assert_eq!(disk.waiting(), 0);
}

#[test]
fn requests_that_wait_move_with_their_disk() {
    let mut tasks = Tasks::default();
    let (slow, fast) = (tasks.group(&[("iops-total", 1)]), tasks.group(&[("iops-total", 10)]));
    let (moved, stays) = (disk_in(&slow), disk_in(&slow));
    tasks.reads(&moved, "m", 3);
    tasks.reads(&stays, "s", 1);
    tasks.run_until(100 * MS);
    moved.set_group(Some(Arc::clone(&fast)));
    tasks.run_until(200 * MS);
    assert_eq!(tasks.times(), [0, 100, 100]);
    assert_eq!((moved.waiting(), stays.waiting()), (0, 1));
    tasks.end();
    assert_eq!(tasks.times()[3..], [900], "the one that stays takes the turn");
}

#[test]
fn a_disk_without_a_group_has_no_limits() {
    let mut tasks = Tasks::default();
    let group = tasks.group(&[("iops-total", 1)]);
    let disk = disk_in(&group);
    tasks.reads(&disk, "r", 50);
    assert_eq!(disk.waiting(), 49);
    disk.set_group(None);
    tasks.settle();
    tasks.reads(&disk, "r", 1);
    assert_eq!(tasks.names().len(), 51);
    assert!(!disk.is_limited() && disk.group().is_none());
}

#[test]
fn a_removed_disk_takes_its_turn_with_it() {
    let mut tasks = Tasks::default();
    let group = tasks.group(&[("iops-total", 10)]);
    let (removed, other) = (disk_in(&group), disk_in(&group));
    tasks.reads(&removed, "x", 5);
    tasks.reads(&other, "o", 2);
    tasks.all.iter_mut().take(5).for_each(|task| task.future = None);
    drop(removed);
    tasks.end();
    assert_eq!(tasks.names(), ["x", "x", "o", "o"]);
    assert_eq!(tasks.times(), [0, 0, 100, 200]);
}

#[test]
fn a_group_is_found_while_somebody_has_it() {
    let groups = Groups::new(Arc::new(Arc::<TestClock>::default()));
    assert!(groups.find("a").is_none());
    let group = groups.get("a");
    assert!(Arc::ptr_eq(&group, &groups.get("a")) && group.name() == "a");
    drop(group);
    assert!(groups.find("a").is_none());
}

/// What passed: when, in which direction, how many bytes.
type Pass = (Duration, Direction, u64);

/// The units that a request counts for a limit, in billionths.
fn amount(limits: &Limits, kind: LimitKind, (_, direction, bytes): Pass) -> u128 {
    let applies = match kind {
        LimitKind::BpsTotal | LimitKind::IopsTotal => true,
        LimitKind::BpsRead | LimitKind::IopsRead => direction == Direction::Read,
        LimitKind::BpsWrite | LimitKind::IopsWrite => direction == Direction::Write,
    };
    match (applies, kind.counts_bytes()) {
        (false, _) => 0,
        (true, true) => u128::from(bytes) * 1_000_000_000,
        (true, false) if limits.iops_size > 0 && bytes > limits.iops_size => {
            (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(limits.iops_size))
        }
        (true, false) => 1_000_000_000,
    }
}

/// Whether no more passed between any two requests than each limit allows.
fn keeps_limits(limits: &Limits, passed: &[Pass]) -> bool {
    for kind in LimitKind::ALL {
        let Limit { average, burst, burst_length } = limits.get(kind);
        if average == 0 {
            continue;
        }
        let mut rates = vec![match burst {
            0 => (average, u128::from(average) * 100_000_000),
            _ => (average, u128::from(burst * burst_length) * 1_000_000_000),
        }];
        if burst_length > 1 {
            rates.push((burst, u128::from(burst) * 100_000_000));
        }
        for (rate, size) in rates {
            for start in 0..passed.len() {
                let mut sum = 0;
                for pass in &passed[start..] {
                    let allowed =
                        size + u128::from(rate) * pass.0.abs_diff(passed[start].0).as_nanos();
                    // The last one may overfill the bucket.
                    let amount = amount(limits, kind, *pass);
                    if amount > 0 && sum > allowed {
                        return false;
                    }
                    sum += amount;
                }
            }
        }
    }
    true
}

fn random_limits(rng: &mut impl RngExt) -> Limits {
    loop {
        let mut limits = Limits::default();
        for kind in LimitKind::ALL {
            if rng.random_bool(0.6) {
                continue;
            }
            let unit = if kind.counts_bytes() { 4096 } else { 1 };
            let average = rng.random_range(1..50) * unit;
            let burst = if rng.random() { average * rng.random_range(1..8) } else { 0 };
            let burst_length = if burst > 0 { rng.random_range(1..4) } else { 1 };
            limits.set(kind, Limit { average, burst, burst_length });
        }
        limits.iops_size = if rng.random() { rng.random_range(1..20_000) } else { 0 };
        if limits.check().is_ok() && limits.is_enabled() {
            return limits;
        }
    }
}

#[test]
fn no_more_passes_in_any_time_than_the_limits_allow() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..60 {
        let mut tasks = Tasks::default();
        let limits = random_limits(&mut rng);
        let group = tasks.group(&[]);
        group.set_limits(&limits);
        let disks: Vec<_> = (0..rng.random_range(1..4)).map(|_| disk_in(&group)).collect();
        let passed = Rc::new(RefCell::new(Vec::<Pass>::new()));
        for _ in 0..120 {
            let direction = if rng.random() { Direction::Read } else { Direction::Write };
            let bytes = rng.random_range(1..40_000);
            let disk = Rc::clone(&disks[rng.random_range(0..disks.len())]);
            let (clock, passed) = (Arc::clone(&tasks.clock), Rc::clone(&passed));
            let number = tasks.spawn(async move {
                disk.admit(direction, bytes).await;
                passed.borrow_mut().push((clock.now(), direction, bytes));
            });
            if rng.random_bool(0.5) {
                let time = tasks.clock.now() + Duration::from_micros(rng.random_range(0..300_000));
                tasks.run_until(time);
            }
            if rng.random_bool(0.1) {
                tasks.all[rng.random_range(0..=number)].future = None;
            }
        }
        tasks.end();
        let passed = passed.borrow();
        assert!(keeps_limits(&limits, &passed), "{limits:?}: {passed:?}");
    }
}

#[test]
fn a_request_alone_passes_as_soon_as_it_may() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..60 {
        let mut tasks = Tasks::default();
        let limits = random_limits(&mut rng);
        let group = tasks.group(&[]);
        group.set_limits(&limits);
        let disk = disk_in(&group);
        let passed = Rc::new(RefCell::new(Vec::<Pass>::new()));
        for _ in 0..60 {
            let direction = if rng.random() { Direction::Read } else { Direction::Write };
            let (bytes, start) = (rng.random_range(1..40_000), tasks.clock.now());
            let (disk, clock) = (Rc::clone(&disk), Arc::clone(&tasks.clock));
            let log = Rc::clone(&passed);
            tasks.spawn(async move {
                disk.admit(direction, bytes).await;
                log.borrow_mut().push((clock.now(), direction, bytes));
            });
            while passed.borrow().len() < tasks.all.len() {
                let now = tasks.clock.now();
                tasks.run_until(now + MS);
            }
            let (time, ..) = *passed.borrow().last().unwrap();
            if time > start {
                // A nanosecond earlier it would have been too early.
                let mut earlier = passed.borrow().clone();
                earlier.last_mut().unwrap().0 = time.saturating_sub(Duration::from_nanos(1));
                assert!(!keeps_limits(&limits, &earlier), "{limits:?}: {earlier:?}");
            }
        }
    }
}

#[test]
fn requests_on_several_threads_all_pass_and_none_too_early() {
    const THREADS: u32 = 4;
    const REQUESTS: u32 = 100;
    const RATE: u32 = 2000;
    let clock = Arc::<crate::clock::SystemClock>::default();
    let group = Arc::new(Group::new("g", Arc::clone(&clock) as Arc<dyn Clock>));
    group.set_limits(&limits(&[("iops-total", u64::from(RATE))]));
    let start = clock.now();
    let threads: Vec<_> = (0..THREADS)
        .map(|number| {
            let group = Arc::clone(&group);
            std::thread::spawn(move || {
                let config = isobath_ring::Config::default();
                let executor = isobath_ring::Executor::new(&config).unwrap();
                executor.block_on(async move {
                    let disk = Rc::new(Throttle::default());
                    disk.set_group(Some(group));
                    let requests: Vec<_> = (0..REQUESTS)
                        .map(|request| {
                            let disk = Rc::clone(&disk);
                            let (direction, bytes) = if request % 2 == 0 { READ } else { WRITE };
                            isobath_ring::spawn(async move { disk.admit(direction, bytes).await })
                        })
                        .collect();
                    for (at, request) in requests.into_iter().enumerate() {
                        // Some are given up while they wait, others at the moment that they may pass.
                        if number == 0 && at % 3 == 0 {
                            request.abort();
                        }
                        let ended = request.await;
                        assert!(ended.is_ok() || number == 0);
                    }
                });
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    // The last thread's requests, and those of the others that were not given up, have passed at the rate.
    let passed = REQUESTS * (THREADS - 1);
    let least = SECOND * (passed - RATE / 10 - 1) / RATE;
    assert!(clock.now().saturating_sub(start) >= least);
}

/// A disk in memory with the clock of the tasks.
fn live_disk(tasks: &Tasks) -> Arc<LiveDisk<isobath_storage::memory::MemoryHost>> {
    let options = OpenOptions::new().writable(true);
    LiveDisk::new(testing::disk(), &options, Arc::new(Arc::clone(&tasks.clock)))
}

#[test]
fn a_disk_carries_out_what_was_not_admitted_without_waiting() {
    let mut tasks = Tasks::default();
    let live = live_disk(&tasks);
    live.throttle().set_group(Some(tasks.group(&[("iops-total", 1)])));
    let (disk, log) = (Arc::clone(&live), Rc::clone(&tasks.passed));
    let clock = Arc::clone(&tasks.clock);
    tasks.spawn(async move {
        let done = |name| log.borrow_mut().push((clock.now(), name));
        for _ in 0..3 {
            disk.write(0, IoBuf::zeroed(512)).await.unwrap();
            disk.write_zeroes(0, 4 * testing::CLUSTER, ZeroFlags::default()).await.unwrap();
            disk.discard(0, testing::CLUSTER).await.unwrap();
            disk.read(0, IoBuf::zeroed(512)).await.unwrap();
            done("job");
        }
        for _ in 0..3 {
            BlockDevice::admit(&*disk, Direction::Read, 512).await;
            done("client");
        }
    });
    tasks.end();
    assert_eq!(tasks.names()[..6], ["job", "job", "job", "client", "client", "client"]);
    assert_eq!(tasks.times(), [0, 0, 0, 0, 900, 1900]);
}

#[test]
fn the_chain_changes_while_requests_wait() {
    let mut tasks = Tasks::default();
    let live = live_disk(&tasks);
    live.throttle().set_group(Some(tasks.group(&[("iops-write", 1)])));
    for _ in 0..10 {
        let (disk, log) = (Arc::clone(&live), Rc::clone(&tasks.passed));
        let clock = Arc::clone(&tasks.clock);
        tasks.spawn(async move {
            BlockDevice::admit(&*disk, Direction::Write, 512).await;
            disk.write(0, IoBuf::zeroed(512)).await.unwrap();
            log.borrow_mut().push((clock.now(), "write"));
        });
    }
    assert_eq!((tasks.names().len(), live.io_stats().in_flight), (1, 0));
    let changed = Rc::new(RefCell::new(false));
    let (disk, done) = (Arc::clone(&live), Rc::clone(&changed));
    tasks.spawn(async move {
        disk.resize(2 * testing::SIZE, Preallocation::Off, false).await.unwrap();
        disk.inside(async |_| ()).await;
        disk.flush().await.unwrap();
        *done.borrow_mut() = true;
    });
    assert!(*changed.borrow(), "it does not wait for them");
    assert_eq!(live.throttle().waiting(), 9);
    // A frontend that ends lets them pass.
    let drained = BlockDevice::drain(&*live);
    tasks.settle();
    assert_eq!(tasks.names().len(), 10);
    drop(drained);
}
