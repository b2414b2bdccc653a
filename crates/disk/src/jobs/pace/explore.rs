//! What pacing is for, in virtual time.

use super::sim::*;
use super::*;

const GB: u64 = 1_000_000_000;
const LONG: Duration = Duration::from_secs(3000);

fn show(name: &str, compared: &Compared, other: &Outcome) {
    let job = &compared.job;
    eprintln!(
        "{name}: finished {} in {:.1} s, {:.2}x of {:.1}; guest {:.3}, p50 {:.2}x p99 {:.2}x of {:?} p99.9 {:.2}x; paused {:.2}; {:.1} MB/s missed {}",
        job.finished,
        job.time.as_secs_f64(),
        job.time.as_secs_f64() / other.time.as_secs_f64(),
        other.time.as_secs_f64(),
        compared.bandwidth(),
        compared.latency(0.5),
        compared.latency(0.99),
        compared.without.latency(0.99),
        compared.latency(0.999),
        job.paused.as_secs_f64() / job.time.as_secs_f64(),
        job.copied as f64 / job.time.as_secs_f64() / 1e6,
        job.missed,
    );
}

#[test]
fn deadlines() {
    let steady = |load| vec![(Duration::from_secs(5000), load)];
    for (name, phases) in [("bursts", bursts(Load::Depth(64), 40)), ("steady", steady(Load::Depth(64))), ("steady1", steady(Load::Depth(1))), ("idle", steady(Load::Idle))] {
        let normal = run(SSD, &phases, Job::Normal, 10 * GB, LONG);
        for seconds in [45, 55, 70, 90, 120, 300, 600] {
            let pacing = Pacing::Adaptive { deadline: Some(Duration::from_secs(seconds)), max_impact: None };
            show(&format!("{name} deadline {seconds}"), &Compared::of(SSD, &phases, Job::Paced(pacing, 0), 10 * GB, LONG), &normal);
        }
        for percent in [1.0, 5.0, 20.0, 50.0, 100.0] {
            let pacing = Pacing::Adaptive { deadline: None, max_impact: Some(percent) };
            show(&format!("{name} impact {percent}"), &Compared::of(SSD, &phases, Job::Paced(pacing, 0), 10 * GB, LONG), &normal);
        }
        let pacing = Pacing::Adaptive { deadline: Some(Duration::from_secs(70)), max_impact: Some(5.0) };
        show(&format!("{name} deadline 70 impact 5"), &Compared::of(SSD, &phases, Job::Paced(pacing, 0), 10 * GB, LONG), &normal);
    }
}
#[test]
fn drives() {
    let ms = Duration::from_millis;
    let us = Duration::from_micros;
    for (name, drive, size) in [
        ("hdd", Drive { bandwidth: 120e6, latency: us(100), jitter: 0.5, seek: ms(6) }, GB),
        ("nvme", Drive { bandwidth: 3e9, latency: us(80), jitter: 0.2, seek: Duration::ZERO }, 30*GB),
        ("net1", Drive { bandwidth: 1e9, latency: ms(1), jitter: 0.5, seek: Duration::ZERO }, 10*GB),
        ("net", Drive { bandwidth: 1e9, latency: ms(10), jitter: 0.5, seek: Duration::ZERO }, 10*GB),
        ("noisy", Drive { jitter: 1.0, ..SSD }, 10*GB),
    ] {
        for (load, phases) in [
            ("idle", vec![(LONG, Load::Idle)]),
            ("bursts 64", bursts(Load::Depth(64), 40)),
            ("bursts 1", bursts(Load::Depth(1), 40)),
            ("steady 64", vec![(LONG, Load::Depth(64))]),
            ("paced 30", vec![(LONG, Load::Paced(30))]),
            ("quick 64", vec![(ms(30), Load::Depth(64)), (ms(30), Load::Idle)]),
            ("ten 64", vec![(ms(10), Load::Depth(64)), (ms(10), Load::Idle)]),
            ("changes", vec![(ms(40_000), Load::Depth(64)), (ms(40_000), Load::Depth(2)), (ms(40_000), Load::Paced(1000))]),
        ] {
            if name == "hdd" && (load.contains("quick") || load.contains("ten") || load == "changes") { continue }
            let normal = run(drive, &phases, Job::Normal, size, LONG);
            show(&format!("{name} {load}"), &Compared::of(drive, &phases, Job::Paced(Pacing::default(), 0), size, Duration::from_secs(1500)), &normal);
        }
    }
}
