"""How long requests are held up by a snapshot of a disk in use."""

import statistics
import time

from .. import plot, report, servers, tools
from ..depth import chains
from ..rounds import Samples, rotated
from . import guest, served

# Snapshots come in groups, each followed by as long without one.
GROUPS, EACH, EVERY = 5, 10, 0.2
# What is looked at around a snapshot, and between groups, in seconds to both sides.
AROUND = 0.3
# The guest's part of the disk: small, so that the copies of clusters that follow each snapshot do not
# fill the page cache with dirty pages.
AREA = 32 << 20
DEPTH = 16
# Layers below the active one.
DEPTHS = {served.ISOBATH: [1, 1000], "qemu": [1, 30]}


def keys():
    """All that is measured: servers and layers."""
    peer = next(iter(servers.qemus()))
    found = [(served.ISOBATH, layers) for layers in DEPTHS[served.ISOBATH]] + [
        (peer, layers) for layers in DEPTHS["qemu"]
    ]
    return [(name, 100 if tools.QUICK and layers > 100 else layers) for name, layers in found]


def groups():
    return 2 if tools.QUICK else GROUPS


def measure(name, layers):
    """Snapshots of a disk with a new active layer while it is written."""
    size = 256 << 20 if tools.QUICK else 2 << 30
    below = chains.make(layers, size=size)
    chains.warm(below)
    directory = tools.WORK / "live-snapshots"
    directory.mkdir(exist_ok=True)
    clean(directory)
    active = directory / "active.qcow2"
    tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", active)
    tools.run("sync", "--file-system", directory)
    length = 2 * groups() * (EACH * EVERY + 2 * AROUND) + 2
    try:
        with served.serve(name, active) as (server, qmp):
            load = guest.Guest(
                server,
                [guest.Burst(0, length + 60)],
                0,
                AREA,
                block=4096,
                depth=DEPTH,
                rw="randwrite",
                name="writer",
                rate=100_000,
            )
            time.sleep(1.5)
            taken, quiet = [], []
            node = served.DISK
            for _ in range(groups()):
                begin = time.time()
                for number in range(EACH):
                    time.sleep(max(begin + number * EVERY - time.time(), 0))
                    node = snapshot(name, qmp, node, directory / f"snapshot-{len(taken)}.qcow2", taken)
                time.sleep(2 * AROUND)
                begin = time.time()
                quiet += [begin + number * EVERY for number in range(EACH)]
                time.sleep(EACH * EVERY + AROUND)
            requests = load.stop()
        worst = [requests.longest(start - AROUND, end + AROUND) for start, end in taken]
        worst_quiet = [requests.longest(at - AROUND, at + AROUND) for at in quiet]
        return {
            "worst_ms": max(worst) * 1e3,
            "worst_quiet_ms": max(worst_quiet) * 1e3,
            "beyond_ms": (max(worst) - max(worst_quiet)) * 1e3,
            "median_ms": statistics.median(worst) * 1e3,
            "median_quiet_ms": statistics.median(worst_quiet) * 1e3,
            "median_beyond_ms": (statistics.median(worst) - statistics.median(worst_quiet)) * 1e3,
            "snapshot_ms": statistics.median(end - start for start, end in taken) * 1e3,
            "snapshot_worst_ms": max(end - start for start, end in taken) * 1e3,
            "iops": len(requests.at) / (requests.at[-1] - requests.at[0]),
            "each_ms": [each * 1e3 for each in worst],
            "each_quiet_ms": [each * 1e3 for each in worst_quiet],
        }
    finally:
        clean(directory)


def snapshot(name, qmp, node, path, taken):
    """Takes one; gives the name of the active layer's node from then on."""
    start = time.time()
    if name == served.ISOBATH:
        qmp.do("blockdev-snapshot-sync", device=served.DISK, snapshot_file=str(path), format="qcow2")
    else:
        new = f"active-{len(taken)}"
        qmp.do(
            "blockdev-snapshot-sync", node_name=node, snapshot_file=str(path), snapshot_node_name=new, format="qcow2"
        )
        node = new
    taken.append((start, time.time()))
    return node


def clean(directory):
    for path in directory.iterdir():
        path.unlink()


def run(rounds, seconds):
    del seconds
    samples = Samples()
    for number in range(max(rounds // 5, 1)):
        for key in rotated(keys(), number):
            samples.attempt(key, lambda: measure(*key))
    rows, goals = [], []
    for key in keys():
        rows.append(
            [
                key[0],
                f"{key[1]:,}",
                *(
                    samples.text(key, field, "{:.1f}")
                    for field in (
                        "snapshot_ms",
                        "snapshot_worst_ms",
                        "median_ms",
                        "median_quiet_ms",
                        "worst_ms",
                        "worst_quiet_ms",
                        "beyond_ms",
                    )
                ),
                samples.text(key, "iops"),
            ]
        )
        if key[0] == served.ISOBATH:
            what = f"a snapshot of {key[1]:,} layer{'s' * (key[1] > 1)}: the longest request around it"
            why = samples.failure(key)
            for field, which in (
                ("median_beyond_ms", "the median of windows, beyond that without one"),
                ("beyond_ms", "the worst, beyond the worst without one"),
            ):
                goals.append(
                    report.limit(f"{what}, {which}", samples.median(key, field), at_most=5, unit="ms", why=why)
                )
    table = {
        "title": "Requests during snapshots",
        "text": (
            f"{groups() * EACH} snapshots, one each {EVERY * 1000:.0f} ms in groups of {EACH}, of a disk that fio"
            f" writes over NBD: {DEPTH} requests of 4 KiB at a time, anywhere in {AREA >> 20} MiB, page cache. The"
            f" longest request of each window of ±{AROUND * 1000:.0f} ms around a snapshot, and of as many and as long"
            " windows between groups: the median of the windows, and the worst. After a snapshot each write to a"
            " cluster copies it first; between groups hardly any does."
        ),
        "columns": [
            "server",
            "layers below",
            "snapshot, ms",
            "slowest",
            "longest request around a snapshot, ms",
            "without",
            "worst around",
            "worst without",
            "beyond",
            "IOPS",
        ],
        "rows": rows,
    }
    bars = {
        f"{name}, {layers:,} layer{'s' * (layers > 1)}": {
            "around a snapshot": samples.median((name, layers), "worst_ms"),
            "without one": samples.median((name, layers), "worst_quiet_ms"),
            "snapshot": samples.median((name, layers), "snapshot_ms"),
        }
        for name, layers in keys()
    }
    figure = plot.bars(
        "live_chains-snapshots.svg",
        "The longest request around a snapshot, and without one",
        "milliseconds",
        bars,
        log=True,
        unit="ms",
    )
    notes = [f"{key}: {sample['why']}" for key, each in samples.items() for sample in each if "why" in sample]
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": notes}
