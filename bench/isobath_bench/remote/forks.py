"""Many overlays above one chain: `isobath fork`."""

import os
import time

from .. import report
from ..rounds import Samples, rotated
from . import Store, emptied, link, pushed, reads

COUNT = 1000
LAYERS = 30
STORE, FILES = "the store", "files"


def measure(store, base, form):
    cache, made = emptied("cache"), emptied("forks")
    made.mkdir()
    os.sync()
    store.taken()
    began = time.perf_counter()
    store.run("fork", "-q", "-n", COUNT, *form, "--cache-dir", cache, base, made / "f{}.qcow2")
    seconds = time.perf_counter() - began
    files = [path.stat() for path in made.iterdir()]
    return {
        "milliseconds": seconds * 1000 / len(files),
        "seconds": seconds,
        "length": max(file.st_size for file in files),
        "allocated": max(file.st_blocks * 512 for file in files),
        "requests": store.taken()["requests"],
    }


def run(rounds, seconds):
    del seconds
    active = reads.chain(LAYERS)
    bases = {STORE: (pushed(active), []), FILES: (active, ["-F", "qcow2"])}
    samples = Samples()
    with Store() as store:
        for number in range(rounds):
            for name in rotated(list(bases), number):
                samples.attempt(name, lambda: measure(store, *bases[name]))
    emptied("cache")
    emptied("forks")
    rows = [
        [
            name,
            samples.text(name, "seconds", "{:.2f}"),
            samples.text(name, "milliseconds", "{:.3f}"),
            samples.text(name, "length"),
            samples.text(name, "allocated"),
            samples.text(name, "requests"),
        ]
        for name in bases
    ]
    goal = report.limit(
        f"{COUNT:,} forks of a chain in the store, each",
        samples.median(STORE, "milliseconds"),
        at_most=1.0,
        unit="ms",
        why=samples.failure(STORE),
    )
    table = {
        "title": "Forks",
        "text": (
            f"`isobath fork -n {COUNT}` above a chain of {LAYERS} layers in the store, behind a link with {link()},"
            " with an empty cache, and above the same files."
        ),
        "columns": ["base in", "s", "ms each", "bytes of a file", "allocated", "requests"],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": [goal], "figures": [], "notes": []}
