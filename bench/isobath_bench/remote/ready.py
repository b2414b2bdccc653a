"""From a server's start to its greeting, by the number of layers in the store."""

import resource
import time

from .. import plot, report, servers, tools
from ..depth import chains
from ..rounds import Samples, rotated
from . import Store, emptied, link, pushed

SIZE = 256 << 20
SERVE, PULL = "serve", "pull, then serve"


def measure(store, way, active, address):
    cache, files = emptied("cache"), emptied("pulled")
    store.taken()
    if way == SERVE:
        with store.serve(address, cache) as server:
            return store.taken() | {"seconds": server.ready}
    files.mkdir()
    began = time.perf_counter()
    store.run("pull", "-q", address, files)
    pulled = time.perf_counter() - began
    with servers.isobath(files / active.name, "--read-only") as server:
        return store.taken() | {"seconds": pulled + server.ready}


def deepest():
    """As many layers as can be pushed here: each has two files open then."""
    return 10000 if resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 21000 else 5000


def run(rounds, seconds):
    del seconds
    depths = [1, 1000] if tools.QUICK else [1, 30, 1000, deepest()]
    actives = {layers: chains.make(layers, size=SIZE, data="zero") for layers in depths}
    addresses = {layers: pushed(active) for layers, active in actives.items()}
    pulled = [1] if tools.QUICK else [1, 30, 1000]
    keys = [(SERVE, layers) for layers in depths] + [(PULL, layers) for layers in pulled]
    samples = Samples()
    # What is cold is the cache, not the program.
    tools.run(tools.ISOBATH, "--version")
    with Store() as store:
        for number in range(rounds):
            # A pull takes long: once.
            for way, layers in rotated([key for key in keys if key[0] == SERVE or number == 0], number):
                samples.attempt((way, layers), lambda: measure(store, way, actives[layers], addresses[layers]))
    emptied("cache")
    emptied("pulled")
    rows = [
        [
            way,
            f"{layers:,}",
            samples.text((way, layers), "seconds", "{:.3f}"),
            samples.text((way, layers), "requests"),
            samples.text((way, layers), "fetched", "{:,.2f}", 2**-20),
        ]
        for way, layers in keys
    ]

    def middle(layers, field="seconds"):
        return samples.median((SERVE, layers), field)

    why = samples.failure((SERVE, 1000))
    goals = [
        report.limit("ready to serve 1,000 layers, cache empty", middle(1000), at_most=0.15, unit="s", why=why),
        report.limit("the same, requests", middle(1000, "requests"), at_most=2, unit="requests", why=why, digits=1),
    ]
    if depths[-1] > 1000:
        ratio, why = report.ratio(middle(depths[-1]), middle(1000)), samples.failure((SERVE, depths[-1])) or why
        goals.append(report.limit(f"ready to serve {depths[-1]:,} layers ÷ 1,000", ratio, at_most=1.5, why=why))
    table = {
        "title": "Ready to serve",
        "text": (
            f"From the start of the process to the greeting of its NBD server, with an empty cache, from a store behind"
            f" a link with {link()}; a disk of {SIZE >> 20} MiB. Beside it, `isobath pull` of the same chain and a"
            " server of the files."
        ),
        "columns": ["", "layers", "s", "requests", "MiB fetched"],
        "rows": rows,
    }
    curves = {
        way: [(layers, samples.median((way, layers), "seconds")) for layers in depths if (way, layers) in keys]
        for way in (SERVE, PULL)
    }
    figure = plot.lines(
        "remote-ready.svg", "Ready to serve a chain in a store, with an empty cache", "layers", "seconds", curves,
        log_x=True, log_y=True, x_ticks=depths,
    )  # fmt: skip
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [figure], "notes": []}
