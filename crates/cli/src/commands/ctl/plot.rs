//! Plots of a job record: the guest's bandwidth over time, in the style of the dissertation's figures 4.5 to 4.7, with
//! shading while the job ran, and snapshots as lines.

use isobath_charts::{Axis, Frame, escaped, nice_step};
use isobath_jobs::record::{JobRecord, JobSample};
use std::fmt::Write as _;

const FRAME: Frame =
    Frame { width: 760.0, height: 380.0, left: 70.0, right: 18.0, top: 64.0, bottom: 48.0 };
/// Maximum points of a line: one for each unit of the chart's width.
const POINTS: usize = (FRAME.right_end() - FRAME.left) as usize;
/// Bytes of a unit.
const MIB: f64 = (1 << 20) as f64;
/// Steps of shading.
const SHADES: f64 = 20.0;

/// Colours that colour-blind people can distinguish (Okabe and Ito), on light and dark backgrounds.
const STYLE: &str = "
svg { --ground: #fff; --ink: #1b2330; --dim: #5d6878; --rule: #dfe3e9;
  --guest: #0072b2; --job: #7d3c5e; --shade: #e69f00; --snapshot: #009e73; }
@media (prefers-color-scheme: dark) { svg { --ground: #10141a; --ink: #e6eaf0; --dim: #98a4b5;
  --rule: #2b3442; --guest: #6cb9ea; --job: #e3a4c4; --shade: #e69f00; --snapshot: #3fd1a4; } }
.ground { fill: var(--ground); } text { fill: var(--dim); } .title { fill: var(--ink); }
.grid { stroke: var(--rule); } .axis { stroke: var(--dim); }
.shade { fill: var(--shade); } .line { fill: none; stroke-linejoin: round; }
.guest { stroke: var(--guest); stroke-width: 1.6; } .job { stroke: var(--job); stroke-width: 1.1; }
.snapshot { stroke: var(--snapshot); stroke-width: 1.2; stroke-dasharray: 5 3; }
";

/// The axes of a plot: seconds since the job started, and bytes per second.
struct Axes {
    x: Axis,
    y: Axis,
}

impl Axes {
    fn new(record: &JobRecord, samples: &[(f64, JobSample)]) -> Self {
        let highest = samples.iter().map(|(_, sample)| sample.guest.max(sample.job)).max();
        let highest = (highest.unwrap_or(0) as f64).max(MIB);
        // Slightly less, because of rounding errors.
        let step = |least: f64| nice_step(least * 0.999);
        let mebibytes_step = step(highest / 5.0 / MIB) * MIB;
        let y = Axis::stepped("Bandwidth (MiB/s)", highest, mebibytes_step, mebibytes);
        let to = if record.seconds.is_finite() { record.seconds.max(0.001) } else { 0.001 };
        let mut x = Axis::stepped("Time since the job started (s)", to, step(to / 8.0), plain);
        // It ends with the job, not with a tick.
        x.ticks.retain(|(at, _)| *at <= to * (1.0 + 1e-9));
        Self { x: Axis { to, ..x }, y }
    }

    fn x(&self, seconds: f64) -> f64 {
        FRAME.x(&self.x, seconds)
    }

    fn y(&self, bytes: f64) -> f64 {
        FRAME.y(&self.y, bytes)
    }
}

/// The record as an SVG picture, for light and dark backgrounds. `title` is shown above it.
pub(super) fn plot_svg(record: &JobRecord, title: &str) -> String {
    let samples = thinned(record);
    let axes = Axes::new(record, &samples);
    let Frame { width, height, left, top, .. } = FRAME;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         font-family=\"system-ui, 'Noto Sans', 'Liberation Sans', sans-serif\" font-size=\"12\">\n\
         <title>{0}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"ground\" width=\"{width}\" height=\"{height}\"/>\n\
         <text class=\"title\" x=\"{left}\" y=\"24\" font-size=\"16\" font-weight=\"600\">{0}</text>\n",
        escaped(title)
    );
    shades(&mut svg, &axes, &samples);
    FRAME.draw_axes(&mut svg, &axes.x, &axes.y);
    line(&mut svg, &axes, "job", &samples, |sample| sample.job);
    line(&mut svg, &axes, "guest", &samples, |sample| sample.guest);
    for &at in record.snapshots.iter().filter(|at| at.is_finite()) {
        let (x, bottom) = (axes.x(at), FRAME.floor());
        let _ = writeln!(
            svg,
            "<line class=\"snapshot\" x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>"
        );
    }
    legend(&mut svg, !record.snapshots.is_empty());
    svg.push_str("</svg>\n");
    svg
}

/// The same as an HTML page, with the record's totals.
pub(super) fn plot_html(record: &JobRecord, title: &str) -> String {
    let mean = |bytes: u64| bytes as f64 / record.seconds.max(0.001) / MIB;
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
         <style>body {{ margin: 24px auto; max-width: 1100px; padding: 0 16px; background: #fff; \
         color: #1b2330; font: 15px/1.5 system-ui, 'Noto Sans', 'Liberation Sans', sans-serif; }} \
         @media (prefers-color-scheme: dark) {{ body {{ background: #10141a; color: #e6eaf0; }} }} \
         svg {{ width: 100%; height: auto; }} p {{ margin-left: {:.1}%; }}</style>\n<body>\n{}\
         <p>The job took {:.1} s and was running for {:.1} s of that. On average, the guest \
         transferred {:.1} MiB/s and the job {:.1} MiB/s.</p>\n</body>\n</html>\n",
        escaped(title),
        FRAME.left / FRAME.width * 100.0,
        plot_svg(record, title),
        record.seconds,
        record.seconds_running,
        mean(record.guest_bytes),
        mean(record.job_bytes),
    )
}

/// As many samples as are visible, as means of adjacent ones, each with its start in seconds.
fn thinned(record: &JobRecord) -> Vec<(f64, JobSample)> {
    let each = record.samples.len().div_ceil(POINTS).max(1);
    let mean = |(number, group): (usize, &[JobSample])| {
        let mean = |value: fn(&JobSample) -> f64| {
            group.iter().map(value).sum::<f64>() / group.len() as f64
        };
        let sample = JobSample {
            guest: mean(|sample| sample.guest as f64) as u64,
            job: mean(|sample| sample.job as f64) as u64,
            running: mean(|sample| sample.running),
        };
        ((number * each) as f64 * record.sample_seconds, sample)
    };
    record.samples.chunks(each).enumerate().map(mean).collect()
}

/// Shades the times when the job ran: the larger its share of a sample, the darker.
fn shades(svg: &mut String, axes: &Axes, samples: &[(f64, JobSample)]) {
    let shade = |sample: &JobSample| (sample.running.clamp(0.0, 1.0) * SHADES).ceil() as u32;
    let mut rest = samples;
    while let Some((from, sample)) = rest.first() {
        let same = rest.iter().take_while(|(_, other)| shade(other) == shade(sample)).count();
        let (_, after) = rest.split_at(same.max(1));
        let to = after.first().map_or(axes.x.to, |(to, _)| *to);
        if shade(sample) > 0 {
            let (x, width) = (axes.x(*from), axes.x(to) - axes.x(*from));
            let _ = writeln!(
                svg,
                "<rect class=\"shade\" x=\"{x:.1}\" y=\"{}\" width=\"{width:.2}\" \
                 height=\"{:.1}\" opacity=\"{:.2}\"/>",
                FRAME.top,
                FRAME.floor() - FRAME.top,
                f64::from(shade(sample)) / SHADES * 0.4
            );
        }
        rest = after;
    }
}

/// A step line: each value holds for its whole sample.
fn line(
    svg: &mut String,
    axes: &Axes,
    class: &str,
    samples: &[(f64, JobSample)],
    value: impl Fn(&JobSample) -> u64,
) {
    if samples.is_empty() {
        return;
    }
    let _ = write!(svg, "<path class=\"line {class}\" d=\"");
    for (number, (from, sample)) in samples.iter().enumerate() {
        let to = samples.get(number + 1).map_or(axes.x.to, |(next, _)| *next);
        let move_to = if number == 0 { 'M' } else { 'L' };
        let y = axes.y(value(sample) as f64);
        let _ = write!(svg, "{move_to}{:.1} {y:.1}H{:.1}", axes.x(*from), axes.x(to));
    }
    svg.push_str("\"/>\n");
}

fn legend(svg: &mut String, snapshots: bool) {
    let mut x = FRAME.left;
    let mut entry = |mark: &str, name: &str| {
        let _ = writeln!(
            svg,
            "<g transform=\"translate({x} 44)\">{mark}<text x=\"26\" y=\"4\">{name}</text></g>"
        );
        x += 48.0 + 6.6 * name.len() as f64;
    };
    let stroke = |class: &str| format!("<path class=\"line {class}\" d=\"M0 0H20\"/>");
    entry(&stroke("guest"), "Guest");
    entry(&stroke("job"), "Job");
    let shade = "<rect class=\"shade\" y=\"-6\" width=\"20\" height=\"12\" opacity=\"0.4\"/>";
    entry(shade, "Job running");
    if snapshots {
        entry("<path class=\"snapshot\" d=\"M10 -8V8\"/>", "Snapshot");
    }
}

fn mebibytes(bytes: f64) -> String {
    plain(bytes / MIB)
}

/// Formats a number with as many digits as needed, up to three after the decimal point.
fn plain(value: f64) -> String {
    let shown = format!("{value:.3}");
    shown.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_jobs::record::Recorder;
    use std::time::Duration;

    fn bursts(seconds: u64) -> JobRecord {
        let mut recorder = Recorder::new(Duration::ZERO, 0);
        let (mut guest, mut job) = (0, 0);
        for step in 1..=seconds * 10 {
            let busy = step / 70 % 2 == 0;
            if busy {
                guest += 40_000_000;
            } else {
                job += 20_000_000;
            }
            recorder.tell(Duration::from_millis(step * 100), guest, job, !busy);
            if step % 150 == 0 {
                recorder.snapshot(Duration::from_millis(step * 100));
            }
        }
        recorder.record()
    }

    #[test]
    fn a_picture_has_all_that_the_record_has() {
        let record = bursts(60);
        let svg = plot_svg(&record, "Streaming");
        assert_eq!(svg.matches("class=\"snapshot\"").count(), record.snapshots.len() + 1);
        // Each interval, and the legend.
        assert!(svg.matches("class=\"shade\"").count() >= record.running.len());
        assert!(svg.contains("Bandwidth (MiB/s)") && svg.contains(">400</text>"));
        assert!(svg.contains("Time since the job started (s)") && svg.contains(">60</text>"));
        assert!(svg.contains("prefers-color-scheme: dark"));
        assert!(plot_html(&record, "Streaming").contains("The job took 60.0 s"));
    }

    #[test]
    fn a_long_record_makes_a_small_picture() {
        let svg = plot_svg(&bursts(40_000), "");
        assert!(svg.len() < 300_000, "{}", svg.len());
    }

    #[test]
    fn titles_are_text_and_no_numbers_are_missing() {
        let odd = JobRecord {
            seconds: f64::INFINITY,
            sample_seconds: f64::NAN,
            samples: vec![JobSample { guest: u64::MAX, job: 0, running: f64::NAN }; 2],
            snapshots: vec![f64::NAN, -1.0],
            ..JobRecord::default()
        };
        for record in [JobRecord::default(), odd] {
            let page = plot_html(&record, "<script>&\"\u{0}");
            assert!(
                !page.contains("<script") && page.contains("&lt;script&gt;&amp;&quot;\u{fffd}")
            );
            assert!(page.contains("</svg>"));
        }
        let svg = plot_svg(&JobRecord::default(), "x");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
