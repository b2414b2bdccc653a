//! What pacing is for, in virtual time: figures are asserted, because they are the same in each run.

use super::sim::{Compared, Job, Load, SSD, bursts, run, traced};
use super::{GuestCounts, Pacer, Work};
use super::{Pacing, Step};
use std::time::Duration;

const GB: u64 = 1_000_000_000;
const LONG: Duration = Duration::from_mins(50);
const ADAPTIVE: Job = Job::Paced(Pacing::Adaptive { deadline: None, max_impact: None }, 0);

/// Asserts what a guest with bursts of 64 requests at a time may expect.
fn fills_the_pauses(phases: &[(Duration, Load)]) {
    let paced = Compared::of(SSD, phases, ADAPTIVE, 10 * GB, LONG);
    let normal = Compared::of(SSD, phases, Job::Normal, 10 * GB, LONG);
    assert!(paced.bandwidth() >= 0.97, "bandwidth {:.3}", paced.bandwidth());
    assert!(paced.latency(0.99) <= 1.2, "p99 {:.2}", paced.latency(0.99));
    let longer = paced.job.time.as_secs_f64() / normal.job.time.as_secs_f64();
    assert!(paced.job.finished && longer <= 1.3, "time {longer:.2}");
    assert!(normal.bandwidth() < 0.7 && normal.latency(0.99) > 1.5, "the disk was not contended");
}

#[test]
fn pauses_between_bursts_are_filled() {
    fills_the_pauses(&bursts(Load::Depth(64), 40));
}

#[test]
fn pauses_of_the_trace_are_filled() {
    fills_the_pauses(&traced(Load::Depth(64), 40));
}

#[test]
fn a_job_alone_uses_all_of_the_disk() {
    let idle = [(LONG, Load::Idle)];
    let paced = run(SSD, &idle, ADAPTIVE, 10 * GB, LONG);
    let normal = run(SSD, &idle, Job::Normal, 10 * GB, LONG);
    assert!(paced.finished && paced.time < normal.time, "{paced:?}");
    assert!(paced.copied as f64 / paced.time.as_secs_f64() > 0.98 * SSD.bandwidth / 2.0);
}

#[test]
fn a_steady_guest_keeps_most_and_the_job_ends() {
    let steady = [(LONG, Load::Depth(64))];
    let paced = Compared::of(SSD, &steady, ADAPTIVE, 10 * GB, LONG);
    assert!(paced.job.finished, "{:?}", paced.job.copied);
    assert!(paced.bandwidth() >= 0.90, "bandwidth {:.3}", paced.bandwidth());
    assert!(paced.latency(0.99) <= 1.2, "p99 {:.2}", paced.latency(0.99));
}

#[test]
fn a_sparse_guest_counts_as_one_that_pauses() {
    let sparse = [(LONG, Load::Paced(100))];
    let paced = Compared::of(SSD, &sparse, ADAPTIVE, 10 * GB, LONG);
    let normal = run(SSD, &sparse, Job::Normal, 10 * GB, LONG);
    let longer = paced.job.time.as_secs_f64() / normal.time.as_secs_f64();
    assert!(paced.job.finished && longer < 2.5, "time {longer:.2}");
    assert!(paced.bandwidth() > 0.999 && paced.latency(0.99) < 2.0);
}

#[test]
fn a_limit_of_speed_holds_in_every_mode() {
    let bursts = bursts(Load::Depth(64), 10);
    for pacing in [Pacing::default(), Pacing::dissertation(), Pacing::None] {
        let limited = run(SSD, &bursts, Job::Paced(pacing, 20_000_000), GB / 2, LONG);
        let speed = limited.copied as f64 / limited.time.as_secs_f64();
        assert!(limited.finished && speed < 20_200_000.0, "{pacing:?}: {speed}");
    }
    let mut pacer = Pacer::new(&Pacing::None, 1, Duration::ZERO);
    let (guest, work) = (GuestCounts::default(), Work::default());
    assert!(matches!(pacer.next(Duration::ZERO, &guest, &work), Step::Wait { .. }));
    assert!(!pacer.is_paused());
    pacer.set_speed(Duration::ZERO, 0);
    assert!(matches!(pacer.next(Duration::ZERO, &guest, &work), Step::Copy { .. }));
}

#[test]
fn the_dissertation_s_mode_pauses_for_bursts() {
    let phases = bursts(Load::Depth(64), 40);
    let paced = Compared::of(SSD, &phases, Job::Paced(Pacing::dissertation(), 0), 10 * GB, LONG);
    assert!(
        paced.job.finished && paced.job.paused > Duration::from_secs(40),
        "{:?}",
        paced.job.paused
    );
    assert!(paced.bandwidth() > 0.95, "bandwidth {:.3}", paced.bandwidth());
}
