"""The first pass over a cold chain without an index: the whole disk, in order."""

from .. import fio, plot, report, tools
from ..rounds import Samples, rotated
from . import chains

LAYERS = 500


def box():
    """The seconds that QEMU is given."""
    return 10 if tools.QUICK else 60


def measure(name):
    active = chains.make(LAYERS)
    tools.drop_caches()
    with chains.server(name, active) as server:
        load = fio.load(server, rw="read", block="1m", depth=4, seconds=box(), once=True)
        seconds = load["bytes"] / load["bytes_per_second"]
        done = load["bytes"] / chains.disk_size()
        return {"ready": server.ready, "reading": seconds, "part": done, "whole": server.ready + seconds / done}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    names = [name for name in chains.names() if name != chains.INDEXED]
    for number in range(rounds):
        for name in rotated(names, number):
            # Once is enough for those that take the whole time box.
            if name == chains.ISOBATH or name not in samples:
                samples.attempt(name, lambda: measure(name))
    rows = [
        [
            name, samples.text(name, "ready", "{:,.2f}"), samples.text(name, "reading", "{:,.1f}"),
            samples.text(name, "part", "{:.1f} %", 100), samples.text(name, "whole", "{:,.1f}"),
        ]
        for name in names
    ]  # fmt: skip
    own = samples.median(chains.ISOBATH, "whole")
    goals = [
        report.limit(
            f"first pass, cold, {LAYERS} layers: {name}'s time ÷ isobath's",
            report.ratio(samples.median(name, "whole"), own),
            at_least=10,
            why=samples.failure(name),
        )
        for name in names
        if name != chains.ISOBATH
    ]
    bars = {"whole disk": {name: samples.median(name, "whole") for name in names}}
    figure = plot.bars(
        "chain_depth-first-pass.svg",
        f"First pass over a cold chain of {LAYERS} layers",
        "seconds",
        bars,
        log=True,
        unit="s",
    )
    table = {
        "title": "First pass",
        "text": f"1 MiB reads at queue depth 4 over {LAYERS} layers after dropping the page cache, no index, opening "
        f"included. A server that is not through after {box()} s is stopped and its time extrapolated from the part "
        "done (one run).",
        "columns": ["server", "open, s", "read, s", "part read", "whole pass, s"],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": []}
