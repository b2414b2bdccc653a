//! The page's charts.

use super::chart::{Chart, Series, Shape};
use crate::render::format::{bytes, date, microseconds, number, percent, span, time};
use crate::{Report, Spread, cost};
use isobath_charts::Axis;

/// All charts of a survey.
pub(super) fn all(report: &Report, page: &mut String) {
    for chart in [
        lengths(report),
        longest(report),
        intervals(report),
        made(report),
        look_ups(report),
        memory(report),
    ] {
        chart.draw(page);
    }
}

fn lengths(report: &Report) -> Chart {
    let shares = &report.lengths.shares;
    let (all_chains, all_files) =
        shares.iter().fold((0, 0), |sum, share| (sum.0 + share.chains, sum.1 + share.files));
    let series = |name: &str, total: u64, of: fn(&crate::LengthShare) -> u64| {
        let mut seen = 0;
        let points = shares.iter().map(|share| {
            seen += of(share);
            let part = if total == 0 { 0.0 } else { seen as f64 / total as f64 };
            let told = format!("{} up to {}", percent(part), share.length);
            (f64::from(share.length), part, told)
        });
        Series { name: name.into(), shape: Shape::Cumulative, points: points.collect() }
    };
    let longest = f64::from(report.lengths.longest).max(10.0);
    let merge_at = f64::from(report.merge_at);
    Chart {
        id: "lengths",
        title: "Chain length".into(),
        note:
            "Cumulative, over chains and over files; a shared file counts once, with its longest \
             chain."
                .into(),
        x: Axis::powers("files in a chain", 1.0, longest, |value| number(value as u64)),
        y: Axis::shares("share"),
        series: vec![
            series("chains", all_chains, |share| share.chains),
            series("files", all_files, |share| share.files),
        ],
        mark: (merge_at <= longest).then(|| (merge_at, format!("merge from {}", report.merge_at))),
    }
}

fn longest(report: &Report) -> Chart {
    let steps = &report.longest;
    let first = steps.first().map_or(report.taken_at, |step| step.0).min(report.taken_at - 1);
    let most = steps.last().map_or(1, |step| step.1);
    let points = steps.iter().map(|&(when, length)| {
        (when as f64, f64::from(length), format!("{length} on {}", time(when)))
    });
    Chart {
        id: "longest",
        title: "Longest chain over time".into(),
        note: "By creation time of the files that still exist; merged or deleted chains are not \
             included."
            .into(),
        x: time_axis(first, report.taken_at),
        y: Axis::counting("files", f64::from(most), |value| number(value as u64)),
        series: vec![Series {
            name: "longest chain".into(),
            shape: Shape::Steps,
            points: points.collect(),
        }],
        mark: None,
    }
}

fn intervals(report: &Report) -> Chart {
    const TICKS: [(f64, &str); 7] = [
        (1.0, "1 s"),
        (60.0, "1 min"),
        (3600.0, "1 h"),
        (86_400.0, "1 day"),
        (604_800.0, "1 week"),
        (31_536_000.0, "1 year"),
        (315_360_000.0, "10 years"),
    ];
    let most = f64::from(report.intervals.most.max(report.ages.most)).max(60.0);
    let to = TICKS.iter().map(|tick| tick.0).find(|&tick| tick >= most).unwrap_or(most);
    let series = |name: &str, spread: &Spread| {
        let points = spread.cdf.iter().map(|&(seconds, part)| {
            let told = format!("{} up to {}", percent(part), span(seconds));
            (f64::from(seconds).max(1.0), part, told)
        });
        Series { name: name.into(), shape: Shape::Cumulative, points: points.collect() }
    };
    let ticks = TICKS.iter().filter(|tick| tick.0 <= to);
    Chart {
        id: "intervals",
        title: "Time between layers, and age of backing files".into(),
        note:
            "Cumulative. A layer's interval starts when the file below it was created; overlays of \
             shared files are not included."
                .into(),
        x: Axis {
            label: "time".into(),
            from: 1.0,
            to,
            logarithmic: true,
            ticks: ticks.map(|&(at, label)| (at, label.to_owned())).collect(),
        },
        y: Axis::shares("share"),
        series: vec![
            series("time between layers", &report.intervals),
            series("age of backing files", &report.ages),
        ],
        mark: None,
    }
}

fn made(report: &Report) -> Chart {
    let made = &report.made;
    let first = made.bins.first().map_or(report.taken_at - 1, |bin| bin.start);
    let last = made.bins.last().map_or(report.taken_at, |bin| bin.start + made.step);
    let most = made.bins.iter().map(|bin| bin.count).max().unwrap_or(1);
    let step = match u32::try_from(made.step) {
        Ok(86_400) => "a day".to_owned(),
        Ok(604_800) => "a week".to_owned(),
        Ok(3600) => "an hour".to_owned(),
        Ok(60) => "a minute".to_owned(),
        Ok(other) => span(other),
        Err(_) => date(made.step),
    };
    let points = made.bins.iter().map(|bin| {
        let from = if made.step < 86_400 { time(bin.start) } else { date(bin.start) };
        (bin.start as f64, bin.count as f64, format!("{} from {from}", number(bin.count)))
    });
    Chart {
        id: "made",
        title: "Overlays created".into(),
        note: format!("Overlays that still exist, by creation time; each bar is {step}."),
        x: time_axis(first, last),
        y: Axis::counting("overlays", most as f64, |value| number(value as u64)),
        series: vec![Series {
            name: "overlays".into(),
            shape: Shape::Bars,
            points: points.collect(),
        }],
        mark: None,
    }
}

fn look_ups(report: &Report) -> Chart {
    let lengths = steps(report);
    let longest = lengths.last().copied().unwrap_or(100);
    let series = |name: &str, cost: &dyn Fn(u32) -> f64| {
        let points = lengths.iter().map(|&length| {
            let value = cost(length) / 1000.0;
            (f64::from(length), value, format!("{} at {length}", microseconds(value)))
        });
        Series { name: name.into(), shape: Shape::Line, points: points.collect() }
    };
    let most = cost::qemu_cold(longest) / 1000.0;
    Chart {
        id: "costs",
        title: "Lookup time by chain length".into(),
        note: "By the cost model below, for data in the base: cold with nothing cached, warm with \
             all tables cached."
            .into(),
        x: Axis::powers("files in a chain", 1.0, f64::from(longest), |value| number(value as u64)),
        y: Axis::powers("time", 0.1, 10_f64.powf(most.log10().ceil()), |value| {
            if value < 1.0 {
                "0.1 µs".into()
            } else if value < 1000.0 {
                format!("{value:.0} µs")
            } else {
                format!("{:.0} ms", value / 1000.0)
            }
        }),
        series: vec![
            series("isobath, cold", &|length| cost::our_cold(f64::from(length))),
            series("QEMU, cold", &cost::qemu_cold),
            series("isobath, warm", &|_| cost::our_warm()),
            series("QEMU, warm", &cost::qemu_warm),
            series("isobath with an index, cold", &|_| cost::indexed_cold()),
        ],
        mark: mark(report, longest),
    }
}

fn memory(report: &Report) -> Chart {
    const UNIT: u64 = 64 << 10;
    let disk = match report.held.disk_bytes.checked_div(report.counts.chains) {
        Some(mean) if mean > 0 => mean.next_multiple_of(UNIT),
        _ => 20 << 30,
    };
    let qemu = |length: u32| u64::from(length) * cost::qemu_layer_memory(disk / UNIT * 8);
    let ours = |length: u32| cost::our_memory(disk, UNIT, length);
    let lengths = steps(report);
    let series = |name: &str, memory: &dyn Fn(u32) -> u64| {
        let points = lengths.iter().map(|&length| {
            let told = format!("{} at {length}", bytes(memory(length)));
            (f64::from(length), memory(length) as f64, told)
        });
        Series { name: name.into(), shape: Shape::Line, points: points.collect() }
    };
    let longest = lengths.last().copied().unwrap_or(100);
    let (least, most) = (ours(1).min(qemu(1)) as f64, qemu(longest).max(ours(longest)) as f64);
    // Powers of two, each four times the previous one: KiB to PiB.
    let powers = (0..22).map(|step| 1024.0 * 4_f64.powi(step));
    let from = powers.clone().take_while(|&at| at <= least).last().unwrap_or(1024.0);
    let to = powers.clone().find(|&at| at >= most).unwrap_or(most);
    let ticks = powers.filter(|&at| at >= from && at <= to);
    Chart {
        id: "memory",
        title: "Memory by chain length".into(),
        note: format!(
            "Maximum, by the model below, for a disk of {}, the mean here, and clusters of 64 KiB.",
            bytes(disk)
        ),
        x: Axis::powers("files in a chain", 1.0, f64::from(longest), |value| number(value as u64)),
        y: Axis {
            label: "memory".into(),
            from,
            to,
            logarithmic: true,
            ticks: ticks
                .map(|at| (at, bytes(at as u64).replace(".00", "").replace(".0", "")))
                .collect(),
        },
        series: vec![series("isobath", &ours), series("QEMU", &qemu)],
        mark: mark(report, longest),
    }
}

/// The chain lengths at which a model is plotted.
fn steps(report: &Report) -> Vec<u32> {
    let longest = report.lengths.longest.max(100);
    (0..120)
        .map(|step| 10_f64.powf(f64::from(step) / 12.0).round() as u32)
        .take_while(|&length| length < longest)
        .chain([longest])
        .collect()
}

fn mark(report: &Report, most: u32) -> Option<(f64, String)> {
    let longest = report.lengths.longest;
    (longest > 1 && longest < most).then(|| (f64::from(longest), "longest here".to_owned()))
}

fn time_axis(from: i64, to: i64) -> Axis {
    // Five ticks, at least a minute apart.
    let from = from.min(to.saturating_sub(240));
    let length = to.saturating_sub(from);
    let ticks = (0..=4).map(|quarter| {
        let at = from.saturating_add(length / 4 * quarter);
        let label = if length < 3 * 86_400 {
            // The date is shown only at the first tick, and in the description of each point.
            time(at).get(if quarter == 0 { 0..16 } else { 11..16 }).unwrap_or_default().to_owned()
        } else {
            date(at)
        };
        (at as f64, label)
    });
    Axis {
        label: "created (UTC)".into(),
        from: from as f64,
        to: to as f64,
        logarithmic: false,
        ticks: ticks.collect(),
    }
}
