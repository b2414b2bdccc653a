"""Figure 9: memory over the length of the chain."""

import contextlib

from .. import figures
from ..page import Section, Table
from ..plan import Point
from ..verdict import Verdict, compared
from . import passes

NAME = "memory"
TITLE = "Memory over the length of the chain"
SOURCE = "SVD, figure 9"

# The paper's raw data: MB beyond the guest's 4,096 after dd, by snapshots.
PAPER_LENGTHS = [0, 1, 50, 500, 1000]
PAPER = {"QEMU": [25.4, 30.2, 275.2, 2465.5, 4547.1], "SVD": [56.3, 55.5, 70.5, 162.5, 258.3]}
# Printed in the paper: QEMU's ÷ SVD's, and the snapshots from which on SVD takes less.
SAVED = {50: 3.9, 500: 15.2, 1000: 17.6}
BREAK_EVEN = 5
LENGTHS = [1, 2, 3, 5, 50, 500, 1000]
# What one entry of QEMU's cache maps, and at most what one piece of isobath's map does.
SPANS = {True: 32 << 20, False: passes.TABLE_SPAN}


class Setting:
    def __init__(self, profile):
        self.size = profile.of(1 << 30, 50 << 30)


def setting(profile):
    return contextlib.nullcontext(Setting(profile))


def points(profile):
    lengths = profile.of([1, 5, 50], LENGTHS)
    return [
        Point((name, layers), seconds=0.2 + layers / profile.of(500, 40))
        for layers in lengths
        for name in passes.names()
    ]


def measure(how, point, number):
    name, layers = point.key
    active = passes.chain(name, layers, how.size)
    with passes.served(name, active) as server:
        before = server.rss()
        passes.single_reads(server, passes.walks(how.size, number, span=SPANS[passes.own(name)]))
        sample = {"rss": server.rss(), "opened": before}
        return sample | ({"map": passes.map_of(server)["bytes"]} if passes.own(name) else {})


def section(results):
    lengths = sorted({layers for _, layers in results.keys()})
    qemu, title = passes.qemu(), "Memory after a pass over the disk"
    with figures.drawn(results, "fig9", title, columns=2) as (_, axes):
        ours = {
            name: [(layers, factor(results.median((name, layers), "rss"))) for layers in lengths]
            for name in passes.names()
        }
        paper = {name: list(zip(PAPER_LENGTHS, values, strict=True)) for name, values in PAPER.items()}
        for each, series, heading, label in (
            (axes[0], ours, "here: the server's RSS", "layers"),
            (axes[1], paper, "paper: RSS beyond the guest's", "snapshots"),
        ):
            figures.plot_lines(each, series)
            figures.decorate(each, label, "MB", log_y=True)
            each.set_title(heading)
    rows = [
        [
            name,
            f"{layers:,}",
            *(results.text((name, layers), field, "{:,.1f}", 1e-6) for field in ("rss", "opened")),
            per_layer(results, name, layers),
        ]
        for name in passes.names()
        for layers in lengths
    ]
    verdicts = [
        compared(
            results, f"{layers:,} layers: QEMU ÷ {name}", SAVED[layers], (qemu, layers), (name, layers), "rss", why=WHY
        )
        for name in passes.names()[:2]
        for layers in lengths
        if layers in SAVED
    ]
    for name in passes.names()[:2]:
        verdicts.append(
            Verdict(
                f"layers from which on {name} takes less than QEMU",
                BREAK_EVEN,
                break_even(results, name, lengths),
                better="lower",
                form="{:,.0f}",
                why="isobath has buffers for its clients from the start, which one layer of QEMU's has not",
            )
        )
    return Section(
        paper=(
            "After dd over a disk of 50 GB QEMU takes 25 MB beyond the guest's memory without a snapshot and 4,547 MB"
            " with 1,000, SVD 56 and 258 MB; SVD takes less from 5 snapshots on."
        ),
        ours=(
            "The server's RSS (there is no guest in it) with a disk of the paper's size, 50 GiB, 90 % full, clusters on"
            " random layers, after reads of 4 KiB that leave in the caches what dd would leave: at places that no layer"
            " has, so that the tables of all layers are loaded; one in each 512 MiB for QEMU, which loads tables of 64"
            " KiB as wholes, one in each 32 MiB for isobath. QEMU's caches hold all tables of all layers (6.25 MiB for"
            " each), as in the paper; isobath's map takes what it takes by default. 500 and 1,000 layers are measured"
            " once. "
        )
        + passes.ABOUT_CONTENDERS,
        parts=[
            figures.saved(results, "fig9", title),
            Table("Figure 9", ["disk by", "layers", "RSS, MB", "before the reads, MB", "MB a layer"], rows),
        ],
        verdicts=verdicts,
    )


WHY = "an L2 cache for each layer against one map, of which a piece is as large as one table's, and 4 KB for each layer"


def factor(value):
    return None if value is None else value / 1e6


def per_layer(results, name, layers):
    """MB that each layer beyond the first takes."""
    rss, one = (factor(results.median((name, each), "rss")) for each in (layers, 1))
    return "-" if layers == 1 or rss is None or one is None else f"{(rss - one) / (layers - 1):.3f}"


def break_even(results, name, lengths):
    """The shortest chain that is measured with which a contender takes no more than QEMU."""
    for layers in lengths:
        own, qemu = (results.median((each, layers), "rss") for each in (name, passes.qemu()))
        if own is not None and qemu is not None and own <= qemu:
            return layers
    return None
