//! A chart as SVG: lines, steps or bars over a linear, logarithmic or time axis.

use super::text;
use std::fmt::Write as _;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 46.0;

/// An axis: what it is of, from where to where, and where it is marked.
pub(super) struct Axis {
    pub(super) label: String,
    pub(super) from: f64,
    pub(super) to: f64,
    pub(super) logarithmic: bool,
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Where a value lies, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.logarithmic { value.max(1e-9).log10() } else { value };
        let (from, to) = (scale(self.from), scale(self.to));
        if to <= from { 0.5 } else { ((scale(value) - from) / (to - from)).clamp(0.0, 1.0) }
    }

    /// From 0 to `most` in steps of 1, 2 or 5.
    pub(super) fn counting(label: &str, most: f64, show: impl Fn(f64) -> String) -> Self {
        let rough = (most.max(1.0) / 4.0).max(1.0);
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|factor| factor * power)
            .find(|&step| step >= rough)
            .unwrap_or(rough);
        let steps = (most / step).ceil().max(1.0);
        let ticks = (0..=steps as u32).map(|at| f64::from(at) * step).map(|at| (at, show(at)));
        let (label, to) = (label.to_owned(), steps * step);
        Self { label, from: 0.0, to, logarithmic: false, ticks: ticks.collect() }
    }

    /// From 0 to 100 %.
    pub(super) fn shares(label: &str) -> Self {
        let ticks = (0..=4).map(|at| (f64::from(at) / 4.0, format!("{} %", at * 25)));
        Self {
            label: label.to_owned(),
            from: 0.0,
            to: 1.0,
            logarithmic: false,
            ticks: ticks.collect(),
        }
    }

    /// Powers of ten.
    pub(super) fn powers(label: &str, from: f64, to: f64, show: impl Fn(f64) -> String) -> Self {
        let (first, last) = (from.log10().floor() as i32, to.log10().ceil() as i32);
        let ticks = (first..=last)
            .map(|power| 10_f64.powi(power))
            .filter(|&at| at >= from * 0.999 && at <= to * 1.001)
            .map(|at| (at, show(at)));
        let label = label.to_owned();
        Self { label, from, to, logarithmic: true, ticks: ticks.collect() }
    }
}

/// How points are joined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Straight lines.
    Line,
    /// A value holds until the next.
    Steps,
    /// As steps, from zero up to the first: a cumulative distribution.
    Cumulative,
    /// A bar from each point to the next.
    Bars,
}

/// Points, with what is told of each.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) shape: Shape,
    pub(super) points: Vec<(f64, f64, String)>,
}

pub(super) struct Chart {
    /// A name for the page's script and its tests.
    pub(super) id: &'static str,
    pub(super) title: String,
    pub(super) note: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// A line across at this `x`, with its name.
    pub(super) mark: Option<(f64, String)>,
}

impl Chart {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (
            LEFT + self.x.place(x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - self.y.place(y) * (HEIGHT - TOP - BOTTOM),
        )
    }

    /// Puts the chart into the page; a note where it has no points.
    pub(super) fn draw(&self, page: &mut String) {
        let _ =
            write!(page, "<figure id=\"{}\">\n<figcaption><h2>{}</h2>", self.id, text(&self.title));
        if self.series.len() > 1 {
            page.push_str("<ul class=\"legend\">");
            for (number, series) in (0..).zip(&self.series) {
                let _ = write!(page, "<li class=\"s{number}\">{}</li>", text(&series.name));
            }
            page.push_str("</ul>");
        }
        page.push_str("</figcaption>\n");
        if self.series.iter().all(|series| series.points.is_empty()) {
            page.push_str("<p class=\"nothing\">Nothing to show.</p>\n");
        } else {
            let _ = writeln!(
                page,
                "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
                text(&self.title)
            );
            self.axes(page);
            for (number, series) in (0..).zip(&self.series) {
                self.series(number, series, page);
            }
            page.push_str("</svg>\n");
        }
        let _ = writeln!(page, "<p class=\"note\">{}</p>\n</figure>", text(&self.note));
    }

    fn axes(&self, page: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, label) in &self.y.ticks {
            let (_, y) = self.at(self.x.from, *value);
            let _ = write!(
                page,
                "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                text(label)
            );
        }
        for (value, label) in &self.x.ticks {
            let (x, _) = self.at(*value, self.y.from);
            let anchor = if x > right - 1.0 { "end" } else { "middle" };
            let edge = if x > right - 1.0 { right + RIGHT } else { x };
            let _ = write!(
                page,
                "<line class=\"axis\" x1=\"{x:.1}\" y1=\"{bottom}\" x2=\"{x:.1}\" y2=\"{:.1}\"/>\
                 <text class=\"tick\" x=\"{edge:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                bottom + 4.0,
                bottom + 18.0,
                text(label)
            );
        }
        let _ = writeln!(
            page,
            "<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>\
             <text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(14 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, right),
            HEIGHT - 8.0,
            text(&self.x.label),
            f64::midpoint(TOP, bottom),
            text(&self.y.label),
        );
        if let Some((value, label)) = &self.mark {
            let (x, _) = self.at(*value, self.y.from);
            let _ = writeln!(
                page,
                "<line class=\"mark\" x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
                 <text class=\"marked\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 5.0,
                bottom - 8.0,
                text(label)
            );
        }
    }

    fn series(&self, number: usize, series: &Series, page: &mut String) {
        let bottom = HEIGHT - BOTTOM;
        let places: Vec<(f64, f64)> =
            series.points.iter().map(|(x, y, _)| self.at(*x, *y)).collect();
        let mut path = String::new();
        let mut last: Option<(f64, f64)> = None;
        for (at, &(x, y)) in places.iter().enumerate() {
            let _ = match (series.shape, last) {
                (Shape::Bars, _) => {
                    let next = places.get(at + 1).map_or(WIDTH - RIGHT, |next| next.0);
                    let end = x.max(next - 1.0);
                    write!(path, "M{x:.1} {bottom}V{y:.1}H{end:.1}V{bottom}Z")
                }
                (Shape::Cumulative, None) => write!(path, "M{x:.1} {bottom}V{y:.1}"),
                (_, None) => write!(path, "M{x:.1} {y:.1}"),
                (Shape::Steps | Shape::Cumulative, Some(_)) => write!(path, "H{x:.1}V{y:.1}"),
                (Shape::Line, Some(_)) => write!(path, "L{x:.1} {y:.1}"),
            };
            last = Some((x, y));
        }
        if matches!(series.shape, Shape::Steps | Shape::Cumulative) && last.is_some() {
            let _ = write!(path, "H{:.1}", WIDTH - RIGHT);
        }
        let class = if series.shape == Shape::Bars { "bars" } else { "line" };
        let _ = write!(page, "<path class=\"{class} s{number}\" d=\"{path}\" data-points=\"");
        let told: Vec<(f64, f64, &str)> = series
            .points
            .iter()
            .zip(places)
            .map(|((_, _, told), (x, y))| {
                ((x * 10.0).round() / 10.0, (y * 10.0).round() / 10.0, told.as_str())
            })
            .collect();
        // Numbers and strings become JSON without fail.
        page.push_str(&text(&serde_json::to_string(&told).unwrap_or_default()));
        let _ = writeln!(page, "\" data-name=\"{}\"/>", text(&series.name));
    }
}
