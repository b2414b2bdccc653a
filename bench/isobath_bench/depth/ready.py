"""From a server's start to its greeting, warm and with an empty page cache."""

from .. import plot, report, tools
from ..rounds import Samples, rotated
from . import chains

DEPTHS = [1, 1000]
# What is not in the page cache: nothing, the chain, or the programs too.
WARM, CHAIN, ALL = "warm", "chain cold", "all cold"
STATES = [WARM, CHAIN, ALL]
SIZE = 4 << 30


def measure(name, layers, cold):
    # Clusters of zeroes are holes in the files: only tables and headers matter here.
    active = chains.make(layers, size=SIZE, data="zero", indexed=name == chains.INDEXED)
    if cold != WARM:
        tools.drop_caches(programs=cold == CHAIN)
    else:
        chains.server(name, active).__exit__()
    with chains.server(name, active) as server:
        return {"milliseconds": server.ready * 1000}


def run(rounds, seconds):
    del seconds
    samples = Samples()
    keys = [(name, layers, cold) for name in chains.names() for layers in DEPTHS for cold in STATES]
    for number in range(rounds):
        for key in rotated(keys, number * 4):
            samples.attempt(key, lambda: measure(*key))

    def middle(*key):
        return samples.median(key, "milliseconds")

    rows = [
        [name, f"{layers:,}", *(samples.text((name, layers, cold), "milliseconds", "{:,.1f}") for cold in STATES)]
        for name in chains.names()
        for layers in DEPTHS
    ]
    goals = []
    for name in filter(chains.names().__contains__, (chains.ISOBATH, chains.INDEXED)):
        goals.append(
            report.limit(f"ready to serve 1,000 layers, warm ({name})", middle(name, 1000, WARM), at_most=50, unit="ms")
        )
        for state, what in ((ALL, "cold with the programs"), (CHAIN, "cold, the programs warm")):
            cold = report.ratio(middle(name, 1000, state), middle(name, 1, state))
            goals.append(report.limit(f"ready to serve 1,000 layers, {what} ÷ 1 layer's ({name})", cold, at_most=10))
    bars = {
        f"{layers:,} layer{'s' * (layers > 1)}, {cold}": {name: middle(name, layers, cold) for name in chains.names()}
        for layers in DEPTHS
        for cold in STATES
    }
    figure = plot.bars(
        "chain_depth-ready.svg", "From the server's start to its greeting", "milliseconds", bars, log=True, unit="ms"
    )
    table = {
        "title": "Ready to serve",
        "text": (
            "From the start of the process to its first byte to a client; cold: after dropping the page cache, with the"
            " programs read again before the start, or not."
        ),
        "columns": ["server", "layers", *(f"{state}, ms" for state in STATES)],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": []}
