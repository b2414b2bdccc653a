//! The goals of pacing, in virtual time: figures are asserted, because they are the same in each run.

use super::sim::{Compared, Drive, Job, Load, Outcome, SSD, bursts, run, traced};
use super::{GuestCounts, Pacer, Pacing, Step, Work};
use isobath_disk::live::Sample;
use proptest::prelude::*;
use std::time::Duration;

const GB: u64 = 1_000_000_000;
const LONG: Duration = Duration::from_mins(50);
/// A tenth of the requests, for long runs.
const SLOW: Drive = Drive { bandwidth: 40e6, ..SSD };
const ADAPTIVE: Job = Job::Paced(Pacing::Adaptive { deadline: None, max_impact: None }, 0);
const THRESHOLD: Job = Job::Paced(Pacing::threshold(), 0);

fn seconds(outcome: &Outcome) -> f64 {
    assert!(outcome.finished, "only {} bytes are copied", outcome.copied);
    outcome.time.as_secs_f64()
}

fn steady(load: Load) -> [(Duration, Load); 1] {
    [(Duration::from_hours(2), load)]
}

/// Asserts the goals for a guest with bursts of 64 concurrent requests.
fn fills_the_pauses(phases: &[(Duration, Load)]) {
    let paced = Compared::of(SSD, phases, ADAPTIVE, 10 * GB, LONG);
    let normal = Compared::of(SSD, phases, Job::Normal, 10 * GB, LONG);
    assert!(paced.bandwidth() >= 0.97, "bandwidth {:.3}", paced.bandwidth());
    assert!(paced.latency(0.99) <= 1.2, "p99 {:.2}", paced.latency(0.99));
    let longer = seconds(&paced.job) / seconds(&normal.job);
    assert!(longer <= 1.3, "time {longer:.2}");
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
fn bursts_of_single_requests_stay_quick() {
    let phases = bursts(Load::Depth(1), 40);
    let paced = Compared::of(SSD, &phases, ADAPTIVE, 10 * GB, LONG);
    assert!(paced.bandwidth() >= 0.97, "bandwidth {:.3}", paced.bandwidth());
    assert!(paced.latency(0.99) <= 1.2, "p99 {:.2}", paced.latency(0.99));
    assert!(seconds(&paced.job) < 110.0);
}

#[test]
fn bursts_of_milliseconds_leave_pauses_too() {
    let quick =
        [(Duration::from_millis(30), Load::Depth(64)), (Duration::from_millis(30), Load::Idle)];
    let paced = Compared::of(SSD, &quick, ADAPTIVE, 5 * GB, LONG);
    let normal = run(SSD, &quick, Job::Normal, 5 * GB, LONG);
    assert!(paced.bandwidth() >= 0.96, "bandwidth {:.3}", paced.bandwidth());
    assert!(paced.latency(0.99) <= 1.2, "p99 {:.2}", paced.latency(0.99));
    let longer = seconds(&paced.job) / seconds(&normal);
    assert!(longer < 2.8, "time {longer:.2}");
}

#[test]
fn a_job_alone_uses_all_of_the_disk() {
    let idle = steady(Load::Idle);
    let us = Duration::from_micros;
    let nvme = Drive { bandwidth: 3e9, latency: us(80), ..SSD };
    let network = Drive { bandwidth: 1e9, latency: us(1000), ..SSD };
    let far = Drive { bandwidth: 1e9, latency: us(10_000), ..SSD };
    for (drive, of_all) in [(SSD, 0.98), (nvme, 0.97), (network, 0.95), (far, 0.9)] {
        let paced = run(drive, &idle, ADAPTIVE, 10 * GB, LONG);
        let speed = 10e9 / seconds(&paced);
        assert!(speed > of_all * drive.bandwidth / 2.0, "{drive:?}: {speed}");
    }
    // Each request costs a seek: at least as fast as QEMU's pieces of 512 KiB.
    let seeks = Drive { bandwidth: 120e6, latency: us(100), seek: us(6000), jitter: 0.5 };
    let paced = seconds(&run(seeks, &idle, ADAPTIVE, GB, LONG));
    let normal = seconds(&run(seeks, &idle, Job::Normal, GB, LONG));
    assert!(paced <= normal, "{paced} of {normal}");
}

#[test]
fn a_steady_guest_keeps_most_and_the_job_ends() {
    for depth in [1, 4, 64] {
        let paced = Compared::of(SSD, &steady(Load::Depth(depth)), ADAPTIVE, GB, LONG);
        seconds(&paced.job);
        assert!(paced.bandwidth() >= 0.90, "{depth}: bandwidth {:.3}", paced.bandwidth());
        assert!(paced.latency(0.5) <= 1.1, "{depth}: median {:.2}", paced.latency(0.5));
        // A single request that coincides with a piece waits for it; 64 hardly notice.
        let most = if depth == 64 { 1.2 } else { 2.0 };
        assert!(paced.latency(0.99) <= most, "{depth}: p99 {:.2}", paced.latency(0.99));
    }
}

#[test]
fn a_share_grows_only_where_no_pauses_come() {
    let paced = run(SLOW, &steady(Load::Depth(64)), ADAPTIVE, GB, Duration::from_mins(10));
    let per_second =
        |from: usize, to: usize| (paced.progress[to] - paced.progress[from]) / (to - from) as u64;
    let (early, late) = (per_second(5, 30), per_second(400, 500));
    assert!(early > 50_000, "{early}");
    assert!(late > 2 * early && late < 2_500_000, "{early} {late}");
}

#[test]
fn sparse_guests_count_as_ones_that_pause() {
    let ms = Duration::from_millis;
    let loads = [(Load::Paced(100), 2.5), (Load::Paced(20), 1.3), (Load::Paced(400), 5.0)];
    for (load, most) in loads {
        let paced = Compared::of(SSD, &steady(load), ADAPTIVE, 5 * GB, LONG);
        let normal = run(SSD, &steady(load), Job::Normal, 5 * GB, LONG);
        let longer = seconds(&paced.job) / seconds(&normal);
        assert!(longer < most, "{load:?}: time {longer:.2}");
        assert!(paced.bandwidth() > 0.999, "{load:?}: {:.4}", paced.bandwidth());
        assert!(paced.latency(0.99) < 5.0, "{load:?}: p99 {:.2}", paced.latency(0.99));
    }
    // A guest that waits for its replies before it continues loses little of its own speed.
    for pause in [1, 3, 4, 10] {
        let load = steady(Load::Thinking(ms(pause)));
        let paced = Compared::of(SSD, &load, ADAPTIVE, 2 * GB, LONG);
        seconds(&paced.job);
        assert!(paced.bandwidth() > 0.97, "{pause} ms: {:.3}", paced.bandwidth());
    }
}

#[test]
fn a_load_that_changes_is_followed() {
    let forty = Duration::from_secs(40);
    let changes = [
        (forty, Load::Depth(64)),
        (forty, Load::Depth(2)),
        (forty, Load::Paced(1000)),
        (forty, Load::Thinking(Duration::from_millis(2))),
    ];
    let paced = Compared::of(SSD, &changes, ADAPTIVE, 5 * GB, LONG);
    assert!(seconds(&paced.job) < 300.0, "{:?}", paced.job.time);
    assert!(paced.bandwidth() >= 0.95, "bandwidth {:.3}", paced.bandwidth());
}

#[test]
fn deadlines_are_met_where_they_can_be() {
    for phases in [bursts(Load::Depth(64), 40), steady(Load::Depth(64)).to_vec()] {
        let mut kept = 0.0;
        for within in [70, 120, 300] {
            let deadline = Some(Duration::from_secs(within));
            let pacing = Pacing::Adaptive { deadline, max_impact: None };
            let paced = Compared::of(SLOW, &phases, Job::Paced(pacing, 0), GB, LONG);
            let took = seconds(&paced.job);
            assert!(took <= within as f64 + 0.1, "{took} of {within} s");
            assert!(paced.job.missed < 0.05, "{within} s: {:.2}", paced.job.missed);
            // With more time the guest loses less.
            assert!(paced.bandwidth() > kept, "{within} s: {:.3}", paced.bandwidth());
            kept = paced.bandwidth();
        }
        assert!(kept > 0.8, "{kept:.3}");
    }
}

#[test]
fn a_deadline_that_cannot_be_met_is_told() {
    let phases = steady(Load::Depth(64));
    let soon = Some(Duration::from_secs(45));
    // Too early for the disk, for its limits, or for the allowed impact on the guest.
    for (max_impact, speed) in [(None, 0), (None, 5_000_000), (Some(5.0), 0)] {
        let pacing = Pacing::Adaptive { deadline: soon, max_impact };
        let paced = run(SLOW, &phases, Job::Paced(pacing, speed), GB, LONG);
        assert!(paced.time > Duration::from_secs(45));
        assert!(paced.missed > 0.9, "{max_impact:?} {speed}: {:.2}", paced.missed);
    }
}

#[test]
fn a_guest_loses_what_it_may_and_no_more() {
    for (percent, least) in [(1.0, 0.0), (5.0, 0.02), (20.0, 0.1)] {
        for depth in [1, 64] {
            let pacing = Pacing::Adaptive { deadline: None, max_impact: Some(percent) };
            let load = steady(Load::Depth(depth));
            let paced = Compared::of(SLOW, &load, Job::Paced(pacing, 0), GB / 10, LONG);
            seconds(&paced.job);
            let lost = 1.0 - paced.bandwidth();
            assert!(lost <= percent / 100.0 + 0.01, "{percent} {depth}: {lost:.3}");
            assert!(lost >= least, "{percent} {depth}: {lost:.3}");
        }
    }
}

#[test]
fn a_limit_of_speed_holds_in_every_mode() {
    let bursts = bursts(Load::Depth(64), 10);
    for pacing in [Pacing::default(), Pacing::threshold(), Pacing::None] {
        let limited = run(SSD, &bursts, Job::Paced(pacing, 20_000_000), GB / 2, LONG);
        let speed = limited.copied as f64 / seconds(&limited);
        assert!(speed < 20_200_000.0, "{pacing:?}: {speed}");
    }
    let mut pacer = Pacer::new(&Pacing::None, 1, Duration::ZERO);
    let (guest, work) = (GuestCounts::default(), Work::default());
    assert!(matches!(pacer.next(Duration::ZERO, &guest, &work), Step::Wait { .. }));
    assert!(!pacer.is_paused());
    pacer.set_speed(Duration::ZERO, 0);
    assert!(matches!(pacer.next(Duration::ZERO, &guest, &work), Step::Copy { .. }));
}

#[test]
fn the_threshold_pauses_for_bursts() {
    let phases = bursts(Load::Depth(64), 40);
    let paced = Compared::of(SSD, &phases, THRESHOLD, 10 * GB, LONG);
    let normal = run(SSD, &phases, Job::Normal, 10 * GB, LONG);
    assert_eq!(paced.job.progress[14], 0, "it copied before it had looked on for 15 s");
    assert!(paced.job.progress[20] > 0);
    assert!(paced.bandwidth() > 0.95, "bandwidth {:.3}", paced.bandwidth());
    let longer = seconds(&paced.job) / seconds(&normal);
    assert!((1.4..1.8).contains(&longer), "time {longer:.2}");
    // Its running time is a third to a half of the whole, as it reports.
    let running = 1.0 - paced.job.paused.as_secs_f64() / seconds(&paced.job);
    assert!((0.3..0.5).contains(&running), "running {running:.2}");
}

/// Its threshold is sampled once: a load below it, here a single request at a time after bursts, is overrun. The guest
/// keeps about what the dissertation reports; in the adaptive mode it keeps almost all.
#[test]
fn the_threshold_overlooks_lesser_loads() {
    let ten = Duration::from_secs(10);
    let phases = [(ten * 2, Load::Depth(64)), (ten * 4, Load::Depth(1)), (ten * 4, Load::Depth(1))];
    let paced = Compared::of(SSD, &phases, THRESHOLD, 5 * GB, LONG);
    assert!((0.65..0.85).contains(&paced.bandwidth()), "bandwidth {:.3}", paced.bandwidth());
    let adaptive = Compared::of(SSD, &phases, ADAPTIVE, 5 * GB, LONG);
    assert!(adaptive.bandwidth() > 0.93, "bandwidth {:.3}", adaptive.bandwidth());
}

/// Beside a steady load it copies one piece per second for ten minutes, and after that the guest gets no consideration.
#[test]
fn the_threshold_streams_normally_after_ten_minutes_of_pauses() {
    let load = steady(Load::Depth(64));
    let paced = run(SLOW, &load, THRESHOLD, GB / 2, LONG);
    let (first, second) = (paced.progress[100], paced.progress[600]);
    assert!(first < 60_000_000 && second < 330_000_000, "{first} {second}");
    assert!((660.0..720.0).contains(&seconds(&paced)), "{:?}", paced.time);
}

#[test]
fn an_explicit_threshold_starts_at_once() {
    let pause_time = Duration::from_secs(2);
    let job = |threshold| Job::Paced(Pacing::Threshold { threshold, pause_time }, 0);
    let load = steady(Load::Depth(4));
    let above = run(SSD, &load, job(1e9), GB, LONG);
    assert!(above.paused.is_zero() && above.progress[1] > 0);
    assert_eq!(above.time, run(SSD, &load, Job::Normal, GB, LONG).time);
    let below = run(SSD, &load, job(1e6), GB / 100, LONG);
    // One piece after each pause.
    let pieces = (below.copied as f64 / f64::from(512 << 10)).ceil();
    assert!((seconds(&below) - 2.0 * (pieces - 1.0)).abs() < 1.0, "{:?} {pieces}", below.time);
}

/// A pacer that has filled a long pause, with one piece in flight, and the time.
fn filling() -> (Pacer, GuestCounts, Work, Duration) {
    let ms = Duration::from_millis;
    let mut pacer = Pacer::new(&Pacing::default(), 0, Duration::ZERO);
    let (guest, work) = (GuestCounts::default(), Work { remaining: GB, in_flight: 0, pieces: 0 });
    for step in 0..1000 {
        if let Step::Copy { bytes } = pacer.next(ms(step), &guest, &work) {
            pacer.copied(ms(step), bytes, Duration::from_micros(600));
        }
    }
    let work = Work { remaining: GB, in_flight: 64 << 10, pieces: 1 };
    assert!(matches!(pacer.next(ms(1000), &guest, &work), Step::Copy { .. }));
    (pacer, guest, work, ms(1000))
}

#[test]
fn the_job_gives_way_at_once_and_is_back_in_milliseconds() {
    let (mut pacer, mut guest, mut work, mut now) = filling();
    let us = Duration::from_micros;
    // A request arrives, and stays for 20 ms.
    guest.in_flight = 1;
    guest.last_activity = now;
    let step = pacer.next(now, &guest, &work);
    assert!(matches!(step, Step::Wait { until } if until <= now + us(5000)), "{step:?}");
    assert!(!pacer.is_paused(), "a piece is under way");
    work = Work { remaining: GB, in_flight: 0, pieces: 0 };
    let mut step = pacer.next(now, &guest, &work);
    assert!(pacer.is_paused());
    let mut beside = 0;
    while now < Duration::from_millis(1020) {
        match step {
            Step::Copy { bytes } => beside += bytes,
            Step::Wait { until } => now = until,
        }
        step = pacer.next(now, &guest, &work);
    }
    assert!(beside <= 128 << 10, "{beside} bytes beside the guest");
    // It completes.
    guest = GuestCounts {
        last_activity: now,
        beside: Sample { requests: 1, bytes: 4096, latency: us(20_000) },
        ..GuestCounts::default()
    };
    let fell_quiet = now;
    loop {
        match pacer.next(now, &guest, &work) {
            Step::Wait { until } => now = until,
            Step::Copy { bytes } if now >= fell_quiet + us(2000) => {
                assert!(now <= fell_quiet + us(5000), "{now:?}");
                assert_eq!(bytes, 64 << 10, "it starts slowly");
                break;
            }
            Step::Copy { .. } => now += us(600),
        }
    }
}

/// What happens between two calls of `next`.
#[derive(Clone, Debug)]
struct Happening {
    passed: u64,
    in_flight: u32,
    active: bool,
    alone: (u32, u64, u64),
    beside: (u32, u64, u64),
    copied: Option<(u64, u64)>,
}

fn happening() -> impl Strategy<Value = Happening> {
    let numbers = prop_oneof![0..10_000_u64, 0..10_000_000_000_u64, 0..1_u64 << 50];
    let sample = (0..1000_u32, numbers.clone(), numbers.clone());
    let copied = prop::option::of((numbers.clone(), numbers.clone()));
    (numbers, 0..100_u32, any::<bool>(), sample.clone(), sample, copied).prop_map(
        |(passed, in_flight, active, alone, beside, copied)| Happening {
            passed,
            in_flight: if active { in_flight } else { 0 },
            active,
            alone,
            beside,
            copied,
        },
    )
}

fn pacings() -> impl Strategy<Value = Pacing> {
    let times = prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::MAX),
        (0..1000_u64).prop_map(Duration::from_secs)
    ];
    let adaptive = (prop::option::of(times.clone()), prop::option::of(prop::num::f64::ANY))
        .prop_map(|(deadline, max_impact)| Pacing::Adaptive { deadline, max_impact });
    let threshold = (prop::num::f64::ANY, times)
        .prop_map(|(threshold, pause_time)| Pacing::Threshold { threshold, pause_time });
    prop_oneof![adaptive, threshold, Just(Pacing::None)]
}

proptest! {
    /// Whatever the guest, the disk and the clock do: pieces are not empty, waits end in the future, and only a bounded
    /// number of pieces start at one time.
    #[test]
    fn steps_are_sound(
        pacing in pacings(),
        speed in prop_oneof![Just(0), 0..u64::MAX],
        happenings in prop::collection::vec(happening(), 1..60),
    ) {
        let mut now = Duration::from_secs(1);
        let mut guest = GuestCounts { last_activity: now, ..GuestCounts::default() };
        let mut pacer = Pacer::new(&pacing, speed, now);
        for happening in happenings {
            now += Duration::from_nanos(happening.passed);
            guest.in_flight = happening.in_flight;
            for (sample, (requests, bytes, latency)) in
                [(&mut guest.alone, happening.alone), (&mut guest.beside, happening.beside)]
            {
                sample.requests += u64::from(requests);
                sample.bytes += bytes;
                sample.latency += Duration::from_nanos(latency);
            }
            if happening.active {
                guest.last_activity = now;
            }
            if let Some((bytes, took)) = happening.copied {
                pacer.copied(now, bytes, Duration::from_nanos(took));
            }
            let mut work = Work { remaining: 1 << 40, in_flight: 0, pieces: 0 };
            loop {
                match pacer.next(now, &guest, &work) {
                    Step::Copy { bytes } => {
                        prop_assert!(bytes > 0);
                        work.in_flight += bytes;
                        work.pieces += 1;
                        prop_assert!(work.pieces <= 32, "{work:?}");
                    }
                    Step::Wait { until } => {
                        prop_assert!(until > now);
                        break;
                    }
                }
            }
            if let Some(forecast) = pacer.forecast(now, &work) {
                prop_assert!(forecast.end > now);
            }
        }
    }
}
