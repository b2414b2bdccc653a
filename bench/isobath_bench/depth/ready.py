"""From a server's start to its greeting, warm and with an empty page cache."""

from .. import plot, report, tools
from . import chains

DEPTHS = [1, 1000]
SIZE = 4 << 30


def measure(name, layers, cold):
    # Clusters of zeroes are holes in the files: only tables and headers matter here.
    active = chains.make(layers, size=SIZE, data="zero", indexed=name == chains.INDEXED)
    if cold:
        tools.drop_caches()
    else:
        chains.server(name, active).__exit__()
    with chains.server(name, active) as server:
        return {"milliseconds": server.ready * 1000}


def run(rounds, seconds):
    del seconds
    samples = chains.Samples()
    keys = [(name, layers, cold) for name in chains.names() for layers in DEPTHS for cold in (False, True)]
    for number in range(rounds):
        for key in chains.rotated(keys, number * 4):
            samples.attempt(key, lambda: measure(*key))

    def middle(*key):
        return samples.median(key, "milliseconds")

    rows = [
        [name, f"{layers:,}", *(samples.text((name, layers, cold), "milliseconds", "{:,.1f}") for cold in (False, True))]
        for name in chains.names()
        for layers in DEPTHS
    ]
    goals = []
    for name in filter(chains.names().__contains__, (chains.ISOBATH, chains.INDEXED)):
        cold = report.ratio(middle(name, 1000, True), middle(name, 1, True))
        goals += [
            report.limit(f"ready to serve 1,000 layers, warm ({name})", middle(name, 1000, False), at_most=50, unit="ms"),
            report.limit(f"ready to serve 1,000 layers, cold ÷ 1 layer's ({name})", cold, at_most=10),
        ]
    bars = {
        f"{layers:,} layer{'s' * (layers > 1)}, {'cold' if cold else 'warm'}": {name: middle(name, layers, cold) for name in chains.names()}
        for layers in DEPTHS
        for cold in (False, True)
    }
    figure = plot.bars("chain_depth-ready.svg", "From the server's start to its greeting", "milliseconds", bars, log=True, unit="ms")
    table = {
        "title": "Ready to serve",
        "text": "From the start of the process to its first byte to a client; cold: after dropping the page cache, the programs themselves read again.",
        "columns": ["server", "layers", "warm, ms", "cold, ms"],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": []}
