"""Figures, as SVG and PNG, the same from the same results."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

# matplotlib is told before it is loaded: no display, and a date that does not change.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("SOURCE_DATE_EPOCH", "0")

import matplotlib
from matplotlib import pyplot

# Where figures are saved; set by `page`.
DIRECTORY = Path()

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)
COLOURS = [GREEN, PINK, YELLOW, SKY, BLACK, "#999999", "#8c564b", "#b8a9c9"]
# The papers' systems have the colour of ours.
FIXED = dict.fromkeys(["isobath", "SVD", "Selfie", "adaptive"], BLUE) | dict.fromkeys(["QEMU", "QEMU 7.2"], ORANGE)
PALE = 0.35

matplotlib.rcParams |= {
    "svg.hashsalt": "isobath",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "figure.dpi": 100,
}


@dataclass(frozen=True)
class Figure:
    """A figure that was saved: its file without the suffix."""

    title: str
    file: str


def colour(label, others=()):
    """A contender's colour: isobath's and QEMU's are the same everywhere, the others' differ within a figure."""
    if label in FIXED:
        return FIXED[label]
    others = [each for each in others or [label] if each not in FIXED]
    return COLOURS[others.index(label) % len(COLOURS)]


@contextlib.contextmanager
def drawn(results, name, title, *, columns=1, rows=1, width=None, height=None):
    """A figure to be drawn on: gives matplotlib's figure and its axes as a list, saves it at the end. Then
    `saved(results, name, title)` is the part of a section."""
    size = (width or (7.6 if columns == 1 else 4.6 * columns), height or 4.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        figure.suptitle(title, fontsize=11, fontweight="bold")
        yield figure, list(axes.flat)
        file = saved(results, name, title).file
        figure.savefig(DIRECTORY / f"{file}.svg", metadata={"Date": None})
        figure.savefig(DIRECTORY / f"{file}.png", metadata={"Software": None})
    finally:
        pyplot.close(figure)


def saved(results, name, title):
    """The part of a section for a figure that was drawn."""
    return Figure(title, f"{results.paper}-{name}")


def lines(results, name, title, x_label, y_label, series, *, log_x=False, log_y=False, paper=None, ticks=None):
    """Lines by label, of points `(x, y)` or `(x, y, low, high)`; points without a value are left out. `paper`: the
    paper's, drawn pale and dashed."""
    with drawn(results, name, title) as (_, [axes]):
        plot_lines(axes, series, paper or {})
        decorate(axes, x_label, y_label, log_x, log_y, ticks)
    return saved(results, name, title)


def plot_lines(axes, series, paper=None):
    """Draws lines, with bars from low to high where points have them."""
    labels = [*series, *(paper or {})]
    for given, pale in ((paper or {}, True), (series, False)):
        for label, points in given.items():
            points = [point for point in points if point[1] is not None]
            if not points:
                continue
            style = {"alpha": PALE, "linestyle": "--"} if pale else {}
            tint = colour(label, labels)
            x, y = [point[0] for point in points], [point[1] for point in points]
            axes.plot(x, y, marker="o", markersize=4, color=tint, label=f"{label} (paper)" if pale else label, **style)
            if all(len(point) == 4 for point in points):
                axes.fill_between(
                    x,
                    [point[2] for point in points],
                    [point[3] for point in points],
                    color=tint,
                    alpha=0.15,
                    linewidth=0,
                )


def decorate(axes, x_label, y_label, log_x=False, log_y=False, ticks=None):
    """Labels, scales and the legend of axes."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if log_x:
        axes.set_xscale(
            "symlog" if any(line.get_xdata().min() <= 0 for line in axes.lines if len(line.get_xdata())) else "log"
        )
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if ticks:
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
        axes.minorticks_off() if log_x else None
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def bars(results, name, title, y_label, groups, *, log=False, paper=None, form="{:,.3g}"):
    """Bars side by side, `{group: {label: value}}`; `paper`: the paper's, hatched, in a panel of their own."""
    panels = [("here", groups)] + ([("paper", paper)] if paper else [])
    with drawn(results, name, title, columns=len(panels), width=7.6 if len(panels) == 1 else 10) as (_, axes):
        for each, (heading, given) in zip(axes, panels, strict=True):
            plot_bars(each, given, hatched=heading == "paper", form=form)
            each.set_ylabel(y_label)
            if log:
                each.set_yscale("log")
            if len(panels) > 1:
                each.set_title(heading)
    return saved(results, name, title)


def plot_bars(axes, groups, *, hatched=False, form="{:,.3g}"):
    """Draws grouped bars with their values above."""
    labels = list(dict.fromkeys(label for each in groups.values() for label in each))
    width = 0.8 / max(len(labels), 1)
    for number, label in enumerate(labels):
        found = [(place, each[label]) for place, each in enumerate(groups.values()) if each.get(label) is not None]
        if not found:
            continue
        places = [place + (number - (len(labels) - 1) / 2) * width for place, _ in found]
        style = {"hatch": "//", "alpha": 0.6} if hatched else {}
        drawn_bars = axes.bar(
            places, [value for _, value in found], width * 0.92, color=colour(label, labels), label=label, **style
        )
        if len(labels) * len(groups) <= 30:
            axes.bar_label(
                drawn_bars,
                [form.format(value) for _, value in found],
                fontsize=6,
                padding=1,
                rotation=90 if len(labels) * len(groups) > 12 else 0,
            )
    long = any(len(group) > 9 for group in groups) and len(groups) > 4
    axes.set_xticks(range(len(groups)), list(groups), rotation=30 if long else 0, ha="right" if long else "center")
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.18)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
