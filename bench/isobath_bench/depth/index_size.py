"""What the index takes a snapshot, when a hundredth of the disk changes in between.

A snapshot is a new overlay, which `create -b` gives an index of the layers below it.
"""

import random
import shutil
import statistics

from .. import plot, report, tools
from ..rounds import Samples
from . import chains

CLUSTER = 65536
STEADY = 16
# Sizes of the disk, and how many snapshots: the index grows until all that is in it has changed
# again, and a larger disk's snapshots would not fit. The base is empty, so that a write takes a page.
DISKS = {"4 GiB": (4 << 30, 160), "50 GiB": (50 << 30, 44)}


def measure(disk):
    """Takes snapshots and writes to random clusters in between; gives the index's bytes in each."""
    size, count = DISKS[disk]
    if tools.QUICK:
        size, count = size >> 4, 6
    directory = tools.WORK / "snapshots"
    shutil.rmtree(directory, ignore_errors=True)
    generator = random.Random(1)
    clusters = size // CLUSTER
    try:
        tools.run(
            tools.ISOBATH, "chain", "generate", "--layers", 1, "--size", size,
            "--fill", "0%", "--data", "zero", directory,
        )  # fmt: skip
        active = directory / "layer-00000.qcow2"
        sizes = []
        for number in range(count):
            overlay = directory / f"snapshot-{number:03}.qcow2"
            tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", active.name, "-F", "qcow2", overlay)
            active = overlay
            changed = generator.sample(range(clusters), clusters // 100)
            commands = "".join(f"write -q -P {number + 1} {cluster * CLUSTER} 512\n" for cluster in changed)
            tools.run(tools.ISOBATH, "io", active, input=commands)
            sizes.append(chains.index_bytes(active))
        if None in sizes:
            raise tools.Failed(f"snapshot {sizes.index(None)} has no index")
        return {"sizes": sizes, "count": count, "steady": statistics.mean(sizes[-STEADY:]), "whole": clusters * 8}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(rounds, seconds):
    del rounds, seconds
    samples = Samples()
    if chains.can_index():
        for disk in DISKS:
            samples.attempt(disk, lambda: measure(disk))
    rows, goals, curves = [], [], {}
    for disk in DISKS:
        quotient = report.ratio(samples.median(disk, "steady"), samples.median(disk, "whole"))
        rows.append(
            [
                disk,
                samples.text(disk, "count"),
                samples.text(disk, "steady"),
                samples.text(disk, "whole"),
                "-" if quotient is None else f"{quotient:.3f}x",
            ]
        )
        why = samples.failure(disk) or "no command `index`"
        goals.append(
            report.limit(f"index a snapshot, 1 % changed, {disk}: ÷ 8 B a cluster", quotient, at_most=0.1, why=why)
        )
        if quotient is not None:
            curves[disk] = list(enumerate((size / 1024 for size in samples[disk][0]["sizes"]), 1))
    figure = plot.lines(
        "chain_depth-index.svg",
        "The index of each snapshot, 1 % of the clusters changed",
        "snapshot",
        "KiB",
        curves,
        log_y=True,
    )
    table = {
        "title": "Index",
        "text": (
            "Bytes of the index in each of many snapshots, between which 1 % of the clusters, chosen at random, are"
            f" written: mean of the last {STEADY}, beside 8 bytes for every cluster of the disk."
        ),
        "columns": ["disk", "snapshots", "bytes a snapshot", "8 B a cluster", "ratio"],
        "rows": rows,
    }
    notes = [f"{disk}: {each['why']}" for disk in DISKS for each in samples.get(disk, ()) if "why" in each]
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": notes}
