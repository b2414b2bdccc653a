"""A new overlay on a long chain: `create -b`."""

from .. import plot, report, servers, tools
from ..rounds import Samples, rotated
from . import chains

LAYERS = 1000
# Sizes of the disk, and how much of it is allocated.
DISKS = {"4 GiB, 90 % allocated": (4 << 30, "90%"), "256 GiB, 0.01 % allocated": (256 << 30, "0.01%")}


def measure(name, disk):
    size, fill = DISKS[disk]
    active = chains.make(LAYERS, size=size, data="zero", fill=fill, indexed=name == chains.INDEXED)
    overlay = tools.WORK / "overlay.qcow2"
    own = name in (chains.ISOBATH, chains.INDEXED)
    program = tools.ISOBATH if own else chains.chains_program(name, "qemu-img")
    try:
        seconds = tools.timed(program, "create", "-q", "-f", "qcow2", "-b", active, "-F", "qcow2", overlay)
        return {"milliseconds": seconds * 1000}
    finally:
        overlay.unlink(missing_ok=True)


def run(rounds, seconds):
    del seconds
    samples = Samples()
    keys = [(name, disk) for disk in DISKS for name in chains.names()]
    for key in keys:
        samples.attempt(("first", *key), lambda: measure(*key))
    for number in range(rounds * 3):
        for key in rotated(keys, number):
            # QEMU takes seconds, and varies less.
            if number % 3 == 0 or key[0] not in servers.qemus():
                samples.attempt(key, lambda: measure(*key))
    rows = [[disk, name, samples.text((name, disk), "milliseconds", "{:,.1f}")] for name, disk in keys]
    goals = []
    for disk in DISKS:
        for name in filter(chains.names().__contains__, (chains.ISOBATH, chains.INDEXED)):
            for peer in servers.qemus():
                value = report.ratio(
                    samples.median((name, disk), "milliseconds"), samples.median((peer, disk), "milliseconds")
                )
                why = samples.failure((name, disk)) or samples.failure((peer, disk))
                goals.append(
                    report.limit(f"new overlay on 1,000 layers, {disk}: {name} ÷ {peer}", value, at_most=1.5, why=why)
                )
    bars = {disk: {name: samples.median((name, disk), "milliseconds") for name in chains.names()} for disk in DISKS}
    figure = plot.bars(
        "chain_depth-overlays.svg", f"A new overlay on {LAYERS:,} layers", "milliseconds", bars, log=True, unit="ms"
    )
    table = {
        "title": "New overlay",
        "text": f"`create -b` on a chain of {LAYERS:,} layers, page cache warm; three a round, of QEMU's one.",
        "columns": ["disk", "program", "ms"],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": []}
