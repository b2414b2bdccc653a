"""Reads through NBD: cold from the store, cached, and by a second server with the same cache."""

from .. import fio, report, servers, tools
from ..depth import chains
from ..rounds import Samples
from . import RATE, Store, emptied, link, pushed

DEPTHS = [1, 30]
WHOLE = dict(rw="read", block="1m", depth=4, once=True, seconds=600)
SMALL = dict(rw="randread", block="4k", depth=32, seconds=1)


def size():
    return 64 << 20 if tools.QUICK else 512 << 20


def chain(layers):
    """The active layer of a chain all of whose clusters hold data."""
    return chains.make(layers, size=size(), fill="100%")


def measure(store, active, address, seconds):
    """What a first server reads from the store, what a second one does, and what its cached reads cost beside the
    files."""
    cache = emptied("cache")
    chains.warm(active)
    with store.serve(address, cache, socket="remote") as first:
        store.taken()
        speed = fio.load(first, **WHOLE)["bytes_per_second"]
    cold = store.taken()
    with (
        store.serve(address, cache, socket="remote") as second,
        servers.isobath(active, "--read-only", socket="files") as files,
    ):
        for server in (second, files):
            fio.load(server, **WHOLE)
        again = store.taken()
        # In short slices, so that what else the machine does meets both.
        used = {second: [], files: []}
        for _ in range(seconds):
            for server, loads in used.items():
                loads.append(fio.load(server, **SMALL))
    cached_us, files_us = map(cpu_us, used.values())
    return {
        "speed": speed,
        "requests": cold["requests"],
        "of_layers": cold["of_layers"],
        "fetched": cold["fetched"],
        "second_requests": again["requests"],
        "second_of_layers": again["of_layers"],
        "cached_us": cached_us,
        "files_us": files_us,
        "cpu_ratio": report.ratio(cached_us, files_us),
    }


def cpu_us(loads):
    """The CPU time of a request in several loads."""
    cpu = sum(load["cpu_us_per_request"] * load["requests"] for load in loads)
    return cpu / sum(load["requests"] for load in loads)


def run(rounds, seconds):
    actives = {layers: chain(layers) for layers in DEPTHS}
    addresses = {layers: pushed(active) for layers, active in actives.items()}
    samples = Samples()
    with Store() as store:
        for _ in range(rounds):
            for layers in DEPTHS:
                samples.attempt(layers, lambda: measure(store, actives[layers], addresses[layers], seconds))
    emptied("cache")
    rows, goals = [], []
    for layers in DEPTHS:
        depth = f"{layers} layer{'s' * (layers > 1)}"

        def goal(what, field, factor=1, **bound):
            value = samples.median(layers, field)
            value = None if value is None else value * factor
            goals.append(report.limit(f"{what}, {depth}", value, why=samples.failure(layers), **bound))

        goal("cold sequential read ÷ the link's rate", "speed", 1 / RATE, at_least=0.9)
        goal("CPU of a cached 4 KiB read ÷ that of the files", "cpu_ratio", at_most=1.02, digits=3)
        goal("GETs of layers by a second server with the cache", "second_of_layers", at_most=0, unit="", digits=1)
        rows.append(
            [
                f"{layers}",
                samples.text(layers, "speed", "{:,.1f}", 2**-20),
                samples.text(layers, "requests"),
                samples.text(layers, "of_layers"),
                samples.text(layers, "fetched", "{:.3f}x", 1 / size()),
                samples.text(layers, "second_requests"),
                samples.text(layers, "cached_us", "{:.2f}"),
                samples.text(layers, "files_us", "{:.2f}"),
                samples.text(layers, "cpu_ratio", "{:.3f}x"),
            ]
        )
    table = {
        "title": "Reads from a store",
        "text": (
            f"A disk of {size() >> 20} MiB, all of it data in clusters of 64 KiB that belong to random layers, behind a"
            f" link with {link()}. *Cold*: 1 MiB in order, queue depth 4, with an empty cache. *Second*: a server that"
            " is started with the cache that the first has left, and its read of the whole disk. *Cached*: 4 KiB"
            " random reads, queue depth 32, of that server and of one of the files, in turn."
        ),
        "columns": [
            "layers",
            "cold MiB/s",
            "requests",
            "of layers",
            "fetched ÷ disk",
            "second: requests",
            "cached: CPU µs per read",
            "files: CPU µs",
            "ratio",
        ],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [], "notes": []}
