//! A disk, a guest and a job in virtual time.

use super::{Pacer, Pacing, Step, Work};
use isobath_disk::live::GuestCounts;
use isobath_disk::live::Sample;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A guest's load for a time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    Idle,
    /// This many requests in flight at any time.
    Depth(u32),
    /// This many requests per second, evenly spaced, whether or not the last one has completed.
    Paced(u32),
    /// One request at a time, and a pause after each.
    Thinking(Duration),
}

pub(super) const REQUEST: u64 = 16 << 10;

/// A disk that serves requests in order of arrival, and replies after a latency.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drive {
    pub(super) bandwidth: f64,
    pub(super) latency: Duration,
    /// Each request's fixed cost.
    pub(super) seek: Duration,
    /// Each request's service time varies by up to this part.
    pub(super) jitter: f64,
}

pub(super) const SSD: Drive = Drive {
    bandwidth: 400e6,
    latency: Duration::from_micros(150),
    seek: Duration::ZERO,
    jitter: 0.2,
};

/// The pacing of the job.
#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    /// There is no job.
    None,
    /// Like QEMU's stream: one piece of 512 KiB after the other.
    Normal,
    Paced(Pacing, u64),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Phase,
    Arrive(u64),
    Done(u64, u64, bool, u64),
    Read(u64, u64),
    Written(u64, u64),
    Wake(u64),
}

/// The results of a run.
#[derive(Debug)]
pub(super) struct Outcome {
    /// How long the job ran, or the run without one.
    pub(super) time: Duration,
    pub(super) finished: bool,
    pub(super) guest: u64,
    pub(super) copied: u64,
    /// Counts of latencies, each bucket 10 us.
    latencies: Vec<u32>,
    pub(super) paused: Duration,
    /// Bytes copied up to each second.
    pub(super) progress: Vec<u64>,
    /// The part of the forecasts, from five seconds on, that missed the deadline.
    pub(super) missed: f64,
}

impl Outcome {
    pub(super) fn latency(&self, quantile: f64) -> Duration {
        let total: u64 = self.latencies.iter().map(|&count| u64::from(count)).sum();
        let wanted = (total as f64 * quantile) as u64;
        let mut seen = 0;
        for (bucket, &count) in (0..).zip(&self.latencies) {
            seen += u64::from(count);
            if seen > wanted {
                return Duration::from_micros(bucket * 10);
            }
        }
        Duration::ZERO
    }

    /// Guest bytes per second.
    pub(super) fn bandwidth(&self) -> f64 {
        self.guest as f64 / self.time.as_secs_f64()
    }
}

struct Run<'a> {
    drive: Drive,
    phases: &'a [(Duration, Load)],
    phase: usize,
    load: Load,
    now: u64,
    free: f64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    random: StdRng,
    counts: GuestCounts,
    starts: u64,
    work: Work,
    latencies: Vec<u32>,
    copied: u64,
    generation: u64,
}

impl Run<'_> {
    fn at(&mut self, time: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((time, self.order, event)));
    }

    /// The time at which a request of `bytes` that arrives now completes.
    fn serve(&mut self, bytes: u64) -> u64 {
        let jitter = 1.0 + self.drive.jitter * self.random.random_range(-1.0..1.0);
        let service = bytes as f64 / self.drive.bandwidth * 1e9 + self.drive.seek.as_nanos() as f64;
        self.free = self.free.max(self.now as f64) + service * jitter;
        (self.free + self.drive.latency.as_nanos() as f64) as u64
    }

    fn issue(&mut self) {
        self.counts.in_flight += 1;
        self.counts.last_activity = Duration::from_nanos(self.now);
        let done = self.serve(REQUEST);
        let event = Event::Done(self.now, self.starts, self.work.pieces > 0, self.phase as u64);
        self.at(done, event);
    }

    fn phase(&mut self) {
        let (time, load) = self.phases[self.phase % self.phases.len()];
        self.phase += 1;
        self.load = load;
        self.at(self.now + time.as_nanos() as u64, Event::Phase);
        match load {
            Load::Idle => {}
            Load::Depth(depth) => (0..depth).for_each(|_| self.issue()),
            Load::Paced(_) => self.at(self.now, Event::Arrive(self.phase as u64)),
            Load::Thinking(_) => self.issue(),
        }
    }

    fn guest(&mut self, event: Event) {
        match event {
            Event::Phase => self.phase(),
            Event::Arrive(phase) if phase == self.phase as u64 => {
                self.issue();
                if let Load::Paced(rate) = self.load {
                    self.at(self.now + 1_000_000_000 / u64::from(rate), event);
                }
            }
            Event::Done(since, starts, beside, phase) => {
                let latency = self.now - since;
                self.counts.in_flight -= 1;
                self.counts.last_activity = Duration::from_nanos(self.now);
                let beside = beside || starts != self.starts;
                let sample = if beside { &mut self.counts.beside } else { &mut self.counts.alone };
                let Sample { requests, bytes, latency: sum } = sample;
                *requests += 1;
                *bytes += REQUEST;
                *sum += Duration::from_nanos(latency);
                let last = self.latencies.len() - 1;
                self.latencies[((latency / 10_000) as usize).min(last)] += 1;
                if phase == self.phase as u64 {
                    match self.load {
                        Load::Depth(_) => self.issue(),
                        Load::Thinking(time) => {
                            self.at(self.now + time.as_nanos() as u64, Event::Arrive(phase));
                        }
                        Load::Paced(_) | Load::Idle => {}
                    }
                }
            }
            _ => {}
        }
    }

    fn copy(&mut self, bytes: u64) {
        let cluster = 64 << 10;
        let bytes = (bytes / cluster).max(1) * cluster;
        let bytes = bytes.min(self.work.remaining - self.work.in_flight);
        self.work.in_flight += bytes;
        self.work.pieces += 1;
        self.starts += 1;
        let read = self.serve(bytes);
        self.at(read, Event::Read(self.now, bytes));
    }

    /// Processes a piece's event; returns its size and duration once it is copied.
    fn piece(&mut self, event: Event) -> Option<(u64, Duration)> {
        match event {
            Event::Read(since, bytes) => {
                let done = self.serve(bytes);
                self.at(done, Event::Written(since, bytes));
                None
            }
            Event::Written(since, bytes) => {
                self.work.in_flight -= bytes;
                self.work.remaining -= bytes;
                self.work.pieces -= 1;
                self.copied += bytes;
                Some((bytes, Duration::from_nanos(self.now - since)))
            }
            _ => None,
        }
    }
}

/// Runs a guest whose phases repeat beside a job that copies `size` bytes, until the job ends or
/// `most` has passed.
pub(super) fn run(
    drive: Drive,
    phases: &[(Duration, Load)],
    job: Job,
    size: u64,
    most: Duration,
) -> Outcome {
    let mut run = Run {
        drive,
        phases,
        phase: 0,
        load: Load::Idle,
        now: 0,
        free: 0.0,
        events: BinaryHeap::new(),
        order: 0,
        random: StdRng::seed_from_u64(7),
        counts: GuestCounts::default(),
        starts: 0,
        work: Work { remaining: size, ..Work::default() },
        latencies: vec![0; 100_000],
        copied: 0,
        generation: 0,
    };
    let mut pacer = match job {
        Job::Paced(pacing, speed) => Some(Pacer::new(&pacing, speed, Duration::ZERO)),
        Job::None | Job::Normal => None,
    };
    let (mut progress, mut paused, mut asked_for, mut missed) = (Vec::new(), 0, 0_u64, 0_u64);
    let mut was_paused = false;
    run.phase();
    run.at(0, Event::Wake(0));
    while let Some(Reverse((time, _, event))) = run.events.pop() {
        if time > most.as_nanos() as u64 {
            run.now = most.as_nanos() as u64;
            break;
        }
        if was_paused {
            paused += time - run.now;
        }
        run.now = time;
        while progress.len() as u64 <= time / 1_000_000_000 {
            progress.push(run.copied);
        }
        let asked = match event {
            Event::Phase | Event::Arrive(_) | Event::Done(..) => {
                run.guest(event);
                false
            }
            Event::Read(..) => {
                run.piece(event);
                false
            }
            Event::Written(..) => {
                let copied = run.piece(event);
                if let (Some(pacer), Some((bytes, took))) = (&mut pacer, copied) {
                    pacer.copied(Duration::from_nanos(time), bytes, took);
                }
                true
            }
            Event::Wake(generation) => generation == run.generation,
        };
        if run.work.remaining == 0 {
            break;
        }
        while asked && run.work.remaining > run.work.in_flight {
            let now = Duration::from_nanos(run.now);
            let step = match (&job, &mut pacer) {
                (Job::Paced(..), Some(pacer)) => {
                    let step = pacer.next(now, &run.counts, &run.work);
                    was_paused = pacer.is_paused();
                    let forecast = pacer.forecast(now, &run.work);
                    if now > Duration::from_secs(5) {
                        asked_for += 1;
                        missed += u64::from(forecast.is_some_and(|it| it.misses_deadline));
                    }
                    step
                }
                (Job::Normal, _) if run.work.pieces == 0 => Step::Copy { bytes: 512 << 10 },
                _ => break,
            };
            match step {
                Step::Copy { bytes } => run.copy(bytes),
                Step::Wait { until } => {
                    assert!(until > now, "a wait for the past");
                    run.generation += 1;
                    let wake = Event::Wake(run.generation);
                    run.at(until.as_nanos() as u64, wake);
                    break;
                }
            }
        }
    }
    Outcome {
        time: Duration::from_nanos(run.now),
        finished: run.work.remaining == 0,
        guest: run.counts.bytes(),
        copied: run.copied,
        latencies: run.latencies,
        paused: Duration::from_nanos(paused),
        progress,
        missed: missed as f64 / asked_for.max(1) as f64,
    }
}

/// A job's run, and the same guest's for as long without one.
pub(super) struct Compared {
    pub(super) job: Outcome,
    pub(super) without: Outcome,
}

impl Compared {
    pub(super) fn of(
        drive: Drive,
        phases: &[(Duration, Load)],
        job: Job,
        size: u64,
        most: Duration,
    ) -> Self {
        let job = run(drive, phases, job, size, most);
        let without = run(drive, phases, Job::None, 1, job.time);
        Self { job, without }
    }

    /// The guest's bandwidth beside the job, relative to that without it.
    pub(super) fn bandwidth(&self) -> f64 {
        self.job.bandwidth() / self.without.bandwidth()
    }

    /// A latency beside the job, relative to that without it.
    pub(super) fn latency(&self, quantile: f64) -> f64 {
        let part = self.without.latency(quantile).as_secs_f64();
        self.job.latency(quantile).as_secs_f64() / part
    }
}

/// Bursts and pauses of 1 to 20 s each, as in the dissertation's evaluation.
pub(super) fn bursts(load: Load, count: usize) -> Vec<(Duration, Load)> {
    let mut random = StdRng::seed_from_u64(11);
    let mut phases = Vec::new();
    for _ in 0..count {
        phases.push((Duration::from_millis(random.random_range(1000..20_000)), load));
        phases.push((Duration::from_millis(random.random_range(1000..20_000)), Load::Idle));
    }
    phases
}

/// Bursts like those of the dissertation's trace of 1,200 s: 574 s of them, 7.86 s on average and at most 48 s, with
/// matching pauses.
pub(super) fn traced(load: Load, count: usize) -> Vec<(Duration, Load)> {
    let mut random = StdRng::seed_from_u64(13);
    let mut phases = Vec::new();
    let mut drawn = |mean: f64| {
        let seconds = -mean * random.random_range(0.0_f64..1.0).max(1e-9).ln();
        Duration::from_secs_f64(seconds.clamp(0.5, 48.0))
    };
    for _ in 0..count {
        phases.push((drawn(7.86), load));
        phases.push((drawn(8.57), Load::Idle));
    }
    phases
}
