"""Figure 11: how long look-ups take."""

import contextlib
import statistics

from isobath_bench import tools

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..stage import slow
from ..verdict import Cause, compared
from . import passes, probes

NAME = "latency"
TITLE = "Look-up latency"
SOURCE = "SVD, figure 11"

# The paper's raw data: medians in µs of CPU, at 1 and 100 snapshots: where tables are read from the disk, and where
# they are cached.
PAPER = {
    ("ssd", "QEMU"): (37, 488),
    ("ssd", "SVD"): (49, 274),
    ("hdd", "QEMU"): (34, 525),
    ("hdd", "SVD"): (36, 360),
    ("hit", "QEMU"): (2, 160),
    ("hit", "SVD"): (2.5, 4),
}
HIT = "hit"
MISSES = {"ssd": "miss, SSD", "hdd": "miss, HDD"}
LONG = 100
# Points of a distribution that are kept.
QUANTILES = 100


class Setting:
    """Chains on slow disks and in the work directory; clusters hold no data, so that a request waits for tables
    only."""

    def __init__(self, profile, devices):
        self.devices = devices
        self.size = profile.of(2 << 30, 16 << 30)
        self.reads = profile.of(200, 4000)
        self.misses = {"ssd": 1000, "hdd": profile.of(2, 12)}


@contextlib.contextmanager
def setting(profile):
    with contextlib.ExitStack() as stack:
        devices = {kind: stack.enter_context(slow.device(kind, profile.of(256 << 20, 1536 << 20))) for kind in MISSES}
        yield Setting(profile, devices)


def points(profile):
    lengths = profile.of([1, 10], [1, LONG])
    found = [Point((HIT, name, layers), seconds=profile.of(1.5, 3)) for layers in lengths for name in passes.names()]
    return found + [
        Point(
            (kind, name, layers),
            seconds=profile.of(0.3, 12 if kind == "hdd" and layers > 1 else 2),
        )
        for kind in MISSES
        for layers in lengths
        for name in passes.names()
    ]


def measure(how, point, number):
    kind, name, layers = point.key
    if kind == HIT:
        return hits(how, name, layers, number)
    device = how.devices[kind]
    active = passes.chain_at(device.directory, name, layers, how.size)
    device.settle()
    with passes.served(name, active, cache="none") as server:
        return summed_up(passes.single_reads(server, passes.regions(how.size, number)[: how.misses[kind]]))


def hits(how, name, layers, number):
    """Reads whose look-ups find all tables in memory."""
    active = passes.chain(name, layers, how.size)
    places = passes.anywhere(how.size, how.reads, number)
    with passes.served(name, active) as server:
        warm(server, how.size, name)
        sample = summed_up(passes.single_reads(server, places))
        if passes.own(name):
            times = passes.map_of(server)
            return sample | {
                "lookup_us": times["lookup-median-ns"] / 1000,
                "lookup_p99_us": times["lookup-p99-ns"] / 1000,
            }
    with passes.served(name, active, aio=probes.AIO) as server:
        warm(server, how.size, name)
        with probes.probing(probes.LOOKUP_TIMES, server.process.pid) as probe:
            passes.single_reads(server, places)
    times = sorted(int(each) / 1000 for each in probe.printed.split())
    if len(times) < len(places) // 2:
        raise tools.Failed(f"of {len(places)} look-ups of QEMU's {len(times)} were seen")
    return sample | {"lookup_us": statistics.median(times), "lookup_p99_us": times[len(times) * 99 // 100]}


def warm(server, size, name):
    """Has all tables in memory."""
    passes.single_reads(server, passes.regions(size, 0, 32 << 20 if passes.own(name) else passes.TABLE_SPAN))


def summed_up(took):
    """Median, mean, deviation and the distribution of µs."""
    order = sorted(took)
    quantiles = [order[min(len(order) * number // QUANTILES, len(order) - 1)] for number in range(QUANTILES)]
    return {
        "median_us": statistics.median(took),
        "mean_us": statistics.mean(took),
        "deviation_us": statistics.pstdev(took),
        "quantiles_us": quantiles,
        "count": len(took),
    }


def section(results):
    long = max(key[2] for key in results.keys())
    qemu, title = passes.qemu(), "Latency of a read of 4 KiB"
    headings = {HIT: "all tables in memory", "ssd": "tables read from the SSD", "hdd": "tables read from the HDD"}
    with figures.drawn(results, "fig11", title, columns=3, width=13) as (_, axes):
        for each, (kind, heading) in zip(axes, headings.items(), strict=True):
            for name in passes.names():
                for layers, style in ((1, ":"), (long, "-")):
                    for sample in results.samples((kind, name, layers))[:1]:
                        share = [number / QUANTILES for number in range(QUANTILES)]
                        each.plot(
                            sample["quantiles_us"],
                            share,
                            style,
                            color=figures.colour(name, passes.names()),
                            label=f"{name}, {layers}",
                        )
            figures.decorate(each, "µs", "part of the reads that take no longer", log_x=True)
            each.set_title(heading)
    rows = [
        [
            headings[kind],
            name,
            str(layers),
            *(
                results.text((kind, name, layers), field, "{:,.1f}")
                for field in ("median_us", "mean_us", "deviation_us")
            ),
            *(results.text((kind, name, layers), field, "{:,.2f}") for field in ("lookup_us", "lookup_p99_us")),
        ]
        for kind in headings
        for name in passes.names()
        for layers in (1, long)
    ]
    paper_rows = [[headings[kind], name, *(f"{value:g}" for value in values)] for (kind, name), values in PAPER.items()]
    verdicts = []
    for name in passes.names()[:2]:
        for kind in MISSES:
            verdicts.append(
                compared(
                    results,
                    f"{long} layers, {MISSES[kind]}: QEMU ÷ {name}, median",
                    PAPER[kind, "QEMU"][1] / PAPER[kind, "SVD"][1],
                    (kind, qemu, long),
                    (kind, name, long),
                    "median_us",
                    cause=Cause.OURS,
                    why=(
                        "without an index the tables of all layers were read for a piece of the map, where QEMU stops"
                        " at the owner, half way on average; since this was measured, the first read stops there, too"
                        " ([decision 0060](../decisions/0060-slices-resolved-in-part.md))"
                    ),
                )
            )
        verdicts.append(
            compared(
                results,
                f"{long} layers, tables in memory: look-up, QEMU ÷ {name}, median",
                PAPER[HIT, "QEMU"][1] / PAPER[HIT, "SVD"][1],
                (HIT, qemu, long),
                (HIT, name, long),
                "lookup_us",
            )
        )
        verdicts.append(
            compared(
                results,
                f"{name}: look-up with tables in memory, {long} layers ÷ 1",
                PAPER[HIT, "SVD"][1] / PAPER[HIT, "SVD"][0],
                (HIT, name, long),
                (HIT, name, 1),
                "lookup_us",
                better="lower",
                why="some tens of ns, with the clock's own cost in them",
            )
        )
    return Section(
        paper=(
            "A look-up takes 490 µs in QEMU and 270 µs in SVD with 100 snapshots (printed as ms; the raw data are ticks"
            " of `clock()`, µs of CPU), where tables are read; with tables in memory 160 µs and 4 µs."
        ),
        ours=(
            "Reads of 4 KiB over NBD, one after another, over 1 and 100 layers of a disk of 16 GiB, 90 % full,"
            " clusters on random layers. Clusters hold no data (they are holes in the files), so that a read waits for"
            " tables only. *Misses*: one read in each 512 MiB after the server's start, each of which finds no table"
            f" in memory, on simulated disks without the page cache (SSD: {slow.ABOUT['ssd']}; HDD:"
            f" {slow.ABOUT['hdd']}; of the latter 12 reads); times are the client's, of whole requests. *Tables in"
            " memory*: reads at random places; the look-up itself takes in isobath what `x-isobath-query-disks`"
            " samples, in QEMU the time from a request to the read of a layer's data, by probes on functions it"
            " exports, some µs of them the probes'. "
        )
        + passes.ABOUT_CONTENDERS,
        parts=[
            figures.saved(results, "fig11", title),
            Table(
                "Figure 11",
                [
                    "",
                    "disk by",
                    "layers",
                    "read, median µs",
                    "mean",
                    "deviation",
                    "look-up, median µs",
                    "99th percentile",
                ],
                rows,
            ),
            Table("The paper's medians", ["", "", "1 snapshot, µs", "100 snapshots, µs"], paper_rows),
        ],
        verdicts=verdicts,
    )
