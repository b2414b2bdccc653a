//! What SVG charts have in common: axes, ticks, the position of a value, and escaped text. No I/O.
//!
//! Elements have the classes `grid`, `axis`, `tick` (a tick's label) and `label` (an axis's name), which the
//! chart's style sheet colours.

use std::fmt::Write as _;

/// An axis: its name, its range, and its ticks.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Its name, with the unit.
    pub label: String,
    /// The value at its start.
    pub from: f64,
    /// The value at its end.
    pub to: f64,
    /// Whether the scale is logarithmic, for values above 0.
    pub logarithmic: bool,
    /// Values to mark, with their labels.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// The position of a value, from 0 at the start to 1 at the end.
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.logarithmic { value.max(1e-9).log10() } else { value };
        let (from, to) = (scale(self.from), scale(self.to));
        if to <= from { 0.5 } else { ((scale(value) - from) / (to - from)).clamp(0.0, 1.0) }
    }

    /// An axis from 0 to at least `most`, with ticks at multiples of `step`; it ends at the last tick.
    pub fn stepped(label: &str, most: f64, step: f64, show: impl Fn(f64) -> String) -> Self {
        let steps = (most / step).ceil().max(1.0);
        let ticks = (0..=steps as u32).map(|at| f64::from(at) * step).map(|at| (at, show(at)));
        let (label, to) = (label.to_owned(), steps * step);
        Self { label, from: 0.0, to, logarithmic: false, ticks: ticks.collect() }
    }

    /// An axis from 0 to at least `most` for counts, in about four whole-number steps.
    pub fn counting(label: &str, most: f64, show: impl Fn(f64) -> String) -> Self {
        Self::stepped(label, most, nice_step((most.max(1.0) / 4.0).max(1.0)), show)
    }

    /// An axis from 0 to 100 %.
    pub fn shares(label: &str) -> Self {
        Self::stepped(label, 1.0, 0.25, |share| format!("{} %", share * 100.0))
    }

    /// A logarithmic axis with ticks at powers of ten.
    pub fn powers(label: &str, from: f64, to: f64, show: impl Fn(f64) -> String) -> Self {
        let (first, last) = (from.log10().floor() as i32, to.log10().ceil() as i32);
        let ticks = (first..=last)
            .map(|power| 10_f64.powi(power))
            .filter(|&at| at >= from * 0.999 && at <= to * 1.001)
            .map(|at| (at, show(at)));
        let label = label.to_owned();
        Self { label, from, to, logarithmic: true, ticks: ticks.collect() }
    }
}

/// The size of a chart and its margins, in units of the SVG.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Frame {
    /// Width of the whole chart.
    pub width: f64,
    /// Height of the whole chart.
    pub height: f64,
    /// Margin for the labels of the y axis.
    pub left: f64,
    /// Margin on the right.
    pub right: f64,
    /// Margin above, for a title or a legend.
    pub top: f64,
    /// Margin for the labels of the x axis.
    pub bottom: f64,
}

impl Frame {
    /// The right end of the x axis.
    pub const fn right_end(&self) -> f64 {
        self.width - self.right
    }

    /// The position of the x axis, from the top.
    pub const fn floor(&self) -> f64 {
        self.height - self.bottom
    }

    /// The position of a value on the x axis, from the left.
    pub fn x(&self, axis: &Axis, value: f64) -> f64 {
        self.left + axis.place(value) * (self.right_end() - self.left)
    }

    /// The position of a value on the y axis, from the top.
    pub fn y(&self, axis: &Axis, value: f64) -> f64 {
        self.floor() - axis.place(value) * (self.floor() - self.top)
    }

    /// Draws both axes, with a grid line at each tick of `y`.
    pub fn draw_axes(&self, svg: &mut String, x: &Axis, y: &Axis) {
        let Self { left, right: margin, .. } = *self;
        let (right, bottom) = (self.right_end(), self.floor());
        for (value, label) in &y.ticks {
            let at = self.y(y, *value);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 8.0,
                at + 4.0,
                escaped(label)
            );
        }
        for (value, label) in &x.ticks {
            let at = self.x(x, *value);
            // The label of the last tick must stay within the chart.
            let last = at > right - 1.0;
            let (edge, anchor) = if last { (right + margin, "end") } else { (at, "middle") };
            let _ = write!(
                svg,
                "<line class=\"axis\" x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{:.1}\"/>\
                 <text class=\"tick\" x=\"{edge:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                bottom + 4.0,
                bottom + 18.0,
                escaped(label)
            );
        }
        let _ = writeln!(
            svg,
            "<line class=\"axis\" x1=\"{left}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>\
             <text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(14 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>",
            f64::midpoint(left, right),
            self.height - 8.0,
            escaped(&x.label),
            f64::midpoint(self.top, bottom),
            escaped(&y.label),
        );
    }
}

/// The smallest number that is 1, 2 or 5 times a power of ten and at least `least`, which must be above 0.
pub fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let mut steps = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power);
    steps.find(|&step| step >= least).unwrap_or(least)
}

/// Escapes text for an element or a quoted attribute of SVG or HTML.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // XML cannot represent these.
            '\0'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => {
                escaped.push('\u{fffd}');
            }
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Frame =
        Frame { width: 200.0, height: 100.0, left: 40.0, right: 10.0, top: 5.0, bottom: 20.0 };

    #[test]
    fn steps_are_nice_and_not_too_short() {
        for (least, step) in [(1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (7.0, 10.0), (0.03, 0.05)] {
            assert!((nice_step(least) - step).abs() < step * 1e-9, "{least}: {}", nice_step(least));
        }
        let axis = Axis::counting("files", 139.0, |value| value.to_string());
        let ticks: Vec<&str> = axis.ticks.iter().map(|(_, label)| label.as_str()).collect();
        assert_eq!(ticks, ["0", "50", "100", "150"]);
        let labels = Axis::shares("share").ticks.into_iter().map(|(_, label)| label);
        assert_eq!(labels.collect::<Vec<_>>(), ["0 %", "25 %", "50 %", "75 %", "100 %"]);
    }

    #[test]
    fn values_lie_within_the_frame() {
        let linear = Axis::counting("files", 8.0, |value| value.to_string());
        let powers = Axis::powers("time", 0.1, 1000.0, |value| value.to_string());
        assert_eq!(powers.ticks.len(), 5);
        for (value, x) in [(-1.0, 40.0), (0.0, 40.0), (4.0, 115.0), (8.0, 190.0), (99.0, 190.0)] {
            assert!((FRAME.x(&linear, value) - x).abs() < 1e-9, "{value}");
        }
        for (value, y) in [(0.0, 80.0), (0.1, 80.0), (10.0, 42.5), (1000.0, 5.0)] {
            assert!((FRAME.y(&powers, value) - y).abs() < 1e-9, "{value}");
        }
        let point = Axis { from: 3.0, to: 3.0, ..linear };
        assert!((FRAME.x(&point, 3.0) - 115.0).abs() < 1e-9);
    }

    #[test]
    fn axes_have_all_ticks_and_no_markup_of_others() {
        let x = Axis::counting("<b>", 2.0, |value| value.to_string());
        let mut svg = String::new();
        FRAME.draw_axes(&mut svg, &x, &Axis::shares("share"));
        assert_eq!(svg.matches("class=\"tick\"").count(), x.ticks.len() + 5);
        assert!(svg.contains("&lt;b&gt;") && !svg.contains("<b>"), "{svg}");
        assert_eq!(svg.matches("text-anchor=\"end\">2</text>").count(), 1, "{svg}");
        assert_eq!(escaped("a&'\"\u{0}\n"), "a&amp;&#39;&quot;\u{fffd}\n");
    }
}
