//! A job's and its guest's activity over time: [`JobRecord`], and the [`Recorder`] that records it.
//!
//! A record has a bounded size however long the job runs: its samples become longer, and pauses that are short compared
//! with them are left out of its intervals.

use isobath_image::violated;
use isobath_sync::Invariants;
#[cfg(feature = "serde")]
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The length of samples at first, in seconds.
const EVERY: f64 = 0.1;
/// The most samples.
const SAMPLES: usize = 4096;
/// The most intervals.
const INTERVALS: usize = 4096;

/// A job's and its guest's activity over time. Times are in seconds since the job started.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct JobRecord {
    /// How long the job took, or has been running so far.
    pub seconds: f64,
    /// The time that it ran; it was throttled for the rest.
    pub seconds_running: f64,
    /// The guest's bytes in that time.
    pub guest_bytes: u64,
    /// The bytes that the job copied.
    pub job_bytes: u64,
    /// The length of each sample in seconds; the last one may be shorter.
    pub sample_seconds: f64,
    /// Samples, in order and without gaps.
    pub samples: Vec<JobSample>,
    /// When the job ran, in order. If there were too many intervals, they include short pauses.
    pub running: Vec<Interval>,
    /// When snapshots were taken, in order; one for each sample at most.
    pub snapshots: Vec<f64>,
}

/// The activity during one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct JobSample {
    /// The guest's bytes per second.
    pub guest: u64,
    /// The bytes per second that the job copied.
    pub job: u64,
    /// The part of the time that the job ran, from 0 to 1.
    pub running: f64,
}

/// A part of the time, in seconds since the job started.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(Serialize, Deserialize))]
pub struct Interval {
    /// Its start.
    pub from: f64,
    /// Its end.
    pub to: f64,
}

/// Sums over one sample's time.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    guest: f64,
    job: f64,
    running: f64,
}

/// Records a [`JobRecord`] while a job runs.
#[derive(Clone, Debug)]
pub struct Recorder {
    start: Duration,
    /// The last update: the time since the start, the bytes then, and whether the job ran from then on.
    at: f64,
    first_guest: u64,
    guest: u64,
    job: u64,
    runs: bool,
    seconds_running: f64,
    every: f64,
    sums: Vec<Sums>,
    running: Vec<Interval>,
    /// Pauses shorter than this are left out of the intervals.
    shortest: f64,
    snapshots: Vec<f64>,
}

impl Invariants for Recorder {
    fn check_invariants(&self) {
        if self.sums.len() > SAMPLES || self.running.len() > INTERVALS {
            violated("a record has a bounded size");
        }
        let mut last = 0.0;
        for interval in self.running.iter().rev().take(2).rev() {
            if interval.from < last || interval.to < interval.from || interval.to > self.at {
                violated("a record's intervals are in order");
            }
            last = interval.to;
        }
        if self.sums.len() > self.sample(self.at) + 1 {
            violated("a record's samples are of the time that has passed");
        }
        if let [.., before, last] = self.snapshots[..]
            && self.sample(before) >= self.sample(last)
        {
            violated("a record has one snapshot for each sample at most");
        }
        if self.seconds_running > self.at * (1.0 + 1e-9) {
            violated("a job ran for no longer than it took");
        }
    }
}

impl Recorder {
    /// Leaves it as no record may be.
    #[cfg(test)]
    pub(super) fn disorder(&mut self) {
        self.running.push(Interval { from: 2.0, to: 1.0 });
    }

    /// Starts a record; `guest_bytes`: what the guest moved up to now.
    pub fn new(now: Duration, guest_bytes: u64) -> Self {
        Self {
            start: now,
            at: 0.0,
            first_guest: guest_bytes,
            guest: guest_bytes,
            job: 0,
            runs: true,
            seconds_running: 0.0,
            every: EVERY,
            sums: Vec::new(),
            running: Vec::new(),
            shortest: 0.0,
            snapshots: Vec::new(),
        }
    }

    /// The job's bytes so far.
    pub(super) fn job_bytes(&self) -> u64 {
        self.job
    }

    /// Records the time up to now: the guest's and the job's bytes so far, and whether the job runs from now on. Call
    /// this when the job pauses or continues, and a few times per second.
    pub fn tell(&mut self, now: Duration, guest_bytes: u64, job_bytes: u64, runs: bool) {
        let to = now.saturating_sub(self.start).as_secs_f64().max(self.at);
        let guest = guest_bytes.saturating_sub(self.guest) as f64;
        let job = job_bytes.saturating_sub(self.job) as f64;
        let ran = if self.runs { to - self.at } else { 0.0 };
        if to > self.at {
            self.spread(to, Sums { guest, job, running: ran });
        } else if let Some(last) = self.sums.last_mut() {
            last.guest += guest;
            last.job += job;
        } else {
            self.sums.push(Sums { guest, job, running: 0.0 });
        }
        self.seconds_running += ran;
        if self.runs {
            self.ran(to);
        }
        self.guest = self.guest.max(guest_bytes);
        self.job = self.job.max(job_bytes);
        self.runs = runs;
        self.at = to;
    }

    /// Records a snapshot taken now.
    pub fn snapshot(&mut self, now: Duration) {
        let at = now.saturating_sub(self.start).as_secs_f64();
        if self.snapshots.last().is_none_or(|&last| self.sample(at) > self.sample(last)) {
            self.snapshots.push(at);
        }
    }

    /// The record up to the last update.
    pub fn record(&self) -> JobRecord {
        let samples = (0..).zip(&self.sums).map(|(number, sums)| {
            let from = f64::from(number) * self.every;
            let seconds = (self.at - from).min(self.every);
            if seconds <= 0.0 {
                return JobSample::default();
            }
            let per_second = |bytes: f64| (bytes / seconds).round() as u64;
            let running = rounded((sums.running / seconds).clamp(0.0, 1.0));
            JobSample { guest: per_second(sums.guest), job: per_second(sums.job), running }
        });
        let interval = |one: &Interval| Interval { from: rounded(one.from), to: rounded(one.to) };
        JobRecord {
            seconds: rounded(self.at),
            seconds_running: rounded(self.seconds_running),
            guest_bytes: self.guest - self.first_guest,
            job_bytes: self.job,
            sample_seconds: self.every,
            samples: samples.collect(),
            running: self.running.iter().map(interval).collect(),
            snapshots: self.snapshots.iter().copied().map(rounded).collect(),
        }
    }

    /// The number of the sample that a time lies in.
    fn sample(&self, at: f64) -> usize {
        (at / self.every) as usize
    }

    /// Distributes the activity from the last time to `to` over the samples between.
    fn spread(&mut self, to: f64, sums: Sums) {
        while self.sample(to) >= SAMPLES {
            self.halve();
        }
        let (first, last) = (self.sample(self.at), self.sample(to));
        if self.sums.len() <= last {
            self.sums.resize(last + 1, Sums::default());
        }
        let whole = to - self.at;
        for (number, sample) in self.sums.iter_mut().enumerate().take(last + 1).skip(first) {
            let from = (number as f64 * self.every).max(self.at);
            let until = if number == last { to } else { (number + 1) as f64 * self.every };
            let part = ((until - from) / whole).clamp(0.0, 1.0);
            sample.guest += sums.guest * part;
            sample.job += sums.job * part;
            sample.running += sums.running * part;
        }
    }

    /// Merges each pair of samples.
    fn halve(&mut self) {
        self.every *= 2.0;
        let two = |two: &[Sums]| Sums {
            guest: two.iter().map(|one| one.guest).sum(),
            job: two.iter().map(|one| one.job).sum(),
            running: two.iter().map(|one| one.running).sum(),
        };
        self.sums = self.sums.chunks(2).map(two).collect();
        let every = self.every;
        self.snapshots.dedup_by_key(|at| (*at / every) as usize);
    }

    /// The job ran up to `to`.
    fn ran(&mut self, to: f64) {
        let from = self.at;
        match self.running.last_mut() {
            Some(last) if from - last.to <= self.shortest => last.to = to,
            _ if to > from => self.running.push(Interval { from, to }),
            _ => {}
        }
        while self.running.len() > INTERVALS {
            self.shortest = (self.shortest * 2.0).max(0.001);
            let shortest = self.shortest;
            self.running.dedup_by(|next, before| {
                let short = next.from - before.to <= shortest;
                if short {
                    before.to = next.to;
                }
                short
            });
        }
    }
}

/// To the nearest microsecond, or millionth part.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by a panic")]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn close(one: f64, other: f64) {
        assert!((one - other).abs() <= 1e-4 * one.abs().max(1.0), "{one} {other}");
    }

    #[test]
    fn samples_and_intervals_are_as_told() {
        let mut recorder = Recorder::new(ms(5000), 70);
        recorder.tell(ms(5100), 1070, 500, false);
        recorder.snapshot(ms(5150));
        recorder.tell(ms(5350), 1570, 500, true);
        recorder.tell(ms(5400), 1570, 1500, true);
        let record = recorder.record();
        assert_eq!((record.guest_bytes, record.job_bytes), (1500, 1500));
        close(record.seconds, 0.4);
        close(record.seconds_running, 0.15);
        let guest: Vec<u64> = record.samples.iter().map(|sample| sample.guest).collect();
        assert_eq!(guest.get(..4), Some(&[10_000, 2000, 2000, 1000][..]));
        close(record.samples[0].running, 1.0);
        close(record.samples[1].running, 0.0);
        close(record.samples[3].running, 0.5);
        assert_eq!(record.samples[3].job, 10_000);
        let ends: Vec<u64> = record
            .running
            .iter()
            .flat_map(|interval| [interval.from, interval.to])
            .map(|at| (at * 1000.0).round() as u64)
            .collect();
        assert_eq!(ends, [0, 100, 350, 400]);
        assert_eq!(record.snapshots.len(), 1);
        #[cfg(feature = "serde")]
        {
            let json = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<JobRecord>(&json).unwrap(), record);
        }
    }

    #[test]
    fn a_long_job_s_record_stays_small_and_whole() {
        let mut recorder = Recorder::new(ms(0), 0);
        let (mut guest, mut job) = (0, 0);
        for step in 1..100_000_u64 {
            let running = step % 3 > 0;
            (guest, job) = (guest + 1000 * (step % 7), job + 500);
            recorder.tell(ms(step * 70), guest, job, running);
            recorder.snapshot(ms(step * 70));
        }
        let record = recorder.record();
        assert!(record.samples.len() <= SAMPLES && record.samples.len() > SAMPLES / 4);
        assert!(!record.running.is_empty() && record.running.len() <= INTERVALS);
        assert!(record.snapshots.len() <= SAMPLES && record.snapshots.len() > 1000);
        let sum = |value: fn(&JobSample) -> f64| {
            let mut left = record.seconds;
            let mut sum = 0.0;
            for sample in &record.samples {
                sum += value(sample) * record.sample_seconds.min(left);
                left -= record.sample_seconds;
            }
            sum
        };
        close(sum(|sample| sample.guest as f64), record.guest_bytes as f64);
        close(sum(|sample| sample.job as f64), record.job_bytes as f64);
        close(sum(|sample| sample.running), record.seconds_running);
        close(record.seconds_running / record.seconds, 2.0 / 3.0);
        let ordered = record.running.windows(2).all(|two| two[0].to < two[1].from);
        assert!(ordered && record.running.iter().all(|interval| interval.from < interval.to));
    }

    #[test]
    fn a_long_silence_is_one_step() {
        let mut recorder = Recorder::new(ms(0), 0);
        recorder.tell(Duration::from_hours(10_000), 36_000_000_000, 0, false);
        let record = recorder.record();
        assert!(record.samples.len() <= SAMPLES);
        assert_eq!(record.samples[5].guest, 1000);
        assert_eq!(record.running.len(), 1);
    }

    #[test]
    fn bytes_told_twice_at_one_time_are_not_lost() {
        let mut recorder = Recorder::new(ms(0), 0);
        recorder.tell(ms(0), 100, 0, true);
        recorder.tell(ms(50), 200, 0, true);
        recorder.tell(ms(50), 300, 0, true);
        assert_eq!(recorder.record().samples[0].guest, 6000);
    }

    #[test]
    fn a_broken_record_is_noticed() {
        type Change = fn(&mut Recorder);
        let cases: [(&str, Change); 7] = [
            ("a record has a bounded size", |recorder| {
                recorder.sums = vec![Sums::default(); SAMPLES + 1];
            }),
            ("a record has a bounded size", |recorder| {
                recorder.running = vec![Interval::default(); INTERVALS + 1];
            }),
            ("a record's intervals are in order", |recorder| recorder.disorder()),
            ("a record's intervals are in order", |recorder| recorder.at = 0.5),
            ("a record's samples are of the time that has passed", |recorder| {
                recorder.sums.resize(12, Sums::default());
            }),
            ("a record has one snapshot for each sample at most", |recorder| {
                recorder.snapshots = vec![0.21, 0.29];
            }),
            ("a job ran for no longer than it took", |recorder| recorder.seconds_running = 1.1),
        ];
        for (violated, change) in cases {
            let mut recorder = Recorder::new(ms(0), 0);
            recorder.tell(ms(1000), 0, 0, true);
            recorder.check_invariants();
            change(&mut recorder);
            let found = catch_unwind(AssertUnwindSafe(|| recorder.check_invariants()));
            let panic = found.expect_err(violated);
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(text.contains(violated), "{violated}: {text}");
        }
    }
}
