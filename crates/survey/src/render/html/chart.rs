//! A chart as SVG: lines, steps or bars over a linear, logarithmic or time axis.

use isobath_charts::{Axis, Frame, escaped};
use std::fmt::Write as _;

const FRAME: Frame =
    Frame { width: 640.0, height: 300.0, left: 76.0, right: 20.0, top: 14.0, bottom: 46.0 };

/// How points are joined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Straight lines.
    Line,
    /// Each value holds until the next point.
    Steps,
    /// Like `Steps`, but rising from zero to the first point: a cumulative distribution.
    Cumulative,
    /// A bar from each point to the next.
    Bars,
}

/// Points, with a description of each.
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
    /// A vertical line at this `x`, with its label.
    pub(super) mark: Option<(f64, String)>,
}

impl Chart {
    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (FRAME.x(&self.x, x), FRAME.y(&self.y, y))
    }

    /// Adds the chart to the page, or a note if it has no points.
    pub(super) fn draw(&self, page: &mut String) {
        let _ = write!(
            page,
            "<figure id=\"{}\">\n<figcaption><h2>{}</h2>",
            self.id,
            escaped(&self.title)
        );
        if self.series.len() > 1 {
            page.push_str("<ul class=\"legend\">");
            for (number, series) in (0..).zip(&self.series) {
                let _ = write!(page, "<li class=\"s{number}\">{}</li>", escaped(&series.name));
            }
            page.push_str("</ul>");
        }
        page.push_str("</figcaption>\n");
        if self.series.iter().all(|series| series.points.is_empty()) {
            page.push_str("<p class=\"nothing\">Nothing to show.</p>\n");
        } else {
            let _ = writeln!(
                page,
                "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">",
                FRAME.width,
                FRAME.height,
                escaped(&self.title)
            );
            self.axes(page);
            for (number, series) in (0..).zip(&self.series) {
                self.series(number, series, page);
            }
            page.push_str("</svg>\n");
        }
        let _ = writeln!(page, "<p class=\"note\">{}</p>\n</figure>", escaped(&self.note));
    }

    fn axes(&self, page: &mut String) {
        FRAME.draw_axes(page, &self.x, &self.y);
        if let Some((value, label)) = &self.mark {
            let (x, top, bottom) = (FRAME.x(&self.x, *value), FRAME.top, FRAME.floor());
            // On the side where there is room.
            let (to, anchor) =
                if x > FRAME.width / 2.0 { (x - 5.0, "end") } else { (x + 5.0, "start") };
            let _ = writeln!(
                page,
                "<line class=\"mark\" x1=\"{x:.1}\" y1=\"{top}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
                 <text class=\"marked\" text-anchor=\"{anchor}\" x=\"{to:.1}\" y=\"{:.1}\">{}</text>",
                bottom - 8.0,
                escaped(label)
            );
        }
    }

    fn series(&self, number: usize, series: &Series, page: &mut String) {
        let bottom = FRAME.floor();
        let places: Vec<(f64, f64)> =
            series.points.iter().map(|(x, y, _)| self.at(*x, *y)).collect();
        let mut path = String::new();
        let mut last: Option<(f64, f64)> = None;
        for (at, &(x, y)) in places.iter().enumerate() {
            let _ = match (series.shape, last) {
                (Shape::Bars, _) => {
                    let next = places.get(at + 1).map_or(FRAME.right_end(), |next| next.0);
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
            let _ = write!(path, "H{:.1}", FRAME.right_end());
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
        // Serializing numbers and strings cannot fail.
        page.push_str(&escaped(&serde_json::to_string(&told).unwrap_or_default()));
        let _ = writeln!(page, "\" data-name=\"{}\"/>", escaped(&series.name));
    }
}
