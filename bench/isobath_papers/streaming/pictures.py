"""What was measured beside a guest over time, as figures and tables."""

from .. import figures
from ..page import Table
from .beside import NONE, without_job

# The dissertation's figures shade the time in which the job runs in orange.
SHADE = figures.ORANGE


def evolution(results, name, title, keys, until=None):
    """The guest's bandwidth over the first round's time, a panel for each key; the time in which the job got on is
    shaded."""
    runs = [(key, results.samples(key)[0]) for key in keys if results.samples(key)]
    if not runs:
        return None
    until = until or max(run["curve"][-1][0] for _, run in runs)
    most = max(rate for _, run in runs for _, rate in run["curve"])
    with figures.drawn(results, name, title, rows=len(runs), height=1.5 * len(runs) + 0.6) as (_, axes):
        for panel, (key, run) in zip(axes, runs, strict=True):
            for start, end in run["running"]:
                panel.axvspan(start, max(end, start + until / 1000), color=SHADE, alpha=0.35, linewidth=0)
            panel.plot(*zip(*run["curve"], strict=True), color=figures.BLUE, linewidth=0.8)
            panel.set(xlim=(0, until), ylim=(0, most * 1.05), ylabel="guest, MB/s")
            panel.set_title(label(key, run), fontsize=9, loc="left")
        axes[-1].set_xlabel("seconds; shaded: the job gets on")
    return figures.saved(results, name, title)


def label(key, run):
    """Who does what, and how long the job takes."""
    if key[1] == NONE:
        return f"{key[0]}, {NONE}"
    return f"{key[0]}, {key[1]}: {run['seconds']:.1f} s" + ("" if run["finished"] else ", not done")


def took(results, key):
    """A job's time in seconds, for a table."""
    done = all(sample["finished"] for sample in results.samples(key))
    return results.text(key, "seconds", "{:.1f}") + ("" if done else " (not done)")


def jobs(results, title, keys, text=""):
    """A table of what jobs cost the guest and how long they took."""
    rows = []
    for key in keys:
        job = (
            [took(results, key), *(results.text(key, field, "{:.0f} %", 100) for field in ("usrr", "in_bursts"))]
            if key[1] != NONE
            else ["-"] * 3
        )
        rows.append(
            [
                *key,
                results.text(key, "bandwidth", "{:,.1f}"),
                results.ratio_text(key, without_job(key), "bandwidth"),
                results.text(key, "p99_ms", "{:.1f}"),
                *job,
            ]
        )
    columns = [
        "by",
        "job",
        "guest, MB/s in bursts",
        "÷ no job",
        "guest's p99, ms",
        "job's time, s",
        "job gets on (USRR)",
        "of the bursts' time",
    ]
    return Table(title, columns, rows, text)
