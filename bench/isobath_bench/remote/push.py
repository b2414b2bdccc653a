"""A push after a snapshot: of a chain that the store has, and a new layer."""

import random
import time

from .. import report, tools
from ..depth import chains
from ..rounds import Samples
from . import BUCKET, Store, emptied, link, pushed

LAYERS = 10
CLUSTER = 64 << 10
KEPT = tools.WORK / "remote-push-store"


def size():
    return 256 << 20 if tools.QUICK else 4 << 30


def snapshot(active):
    """A new layer on a chain, with 1 % of the disk's clusters written; and the bytes of these."""
    top = active.with_name("top.qcow2")
    top.unlink(missing_ok=True)
    tools.run(tools.ISOBATH, "create", "-q", "-f", "qcow2", "-b", active.name, "-F", "qcow2", top)
    clusters = size() // CLUSTER
    changed = random.Random(1).sample(range(clusters), clusters // 100)
    commands = "".join(f"write -q -P 1 {cluster * CLUSTER} {CLUSTER}\n" for cluster in changed)
    tools.run(tools.ISOBATH, "io", top, input=commands)
    return top, len(changed) * CLUSTER


def measure(top, changed):
    objects = emptied("pushed")
    # The store replaces files, and never changes one.
    tools.run("cp", "-al", KEPT, objects)
    with Store(objects) as store:
        began = time.perf_counter()
        store.run("push", "-q", top, f"s3://{BUCKET}/{top.parent.name}")
        seconds = time.perf_counter() - began
        counts = store.taken()
    return counts | {"seconds": seconds, "ratio": counts["sent"] / changed}


def run(rounds, seconds):
    del seconds
    active = chains.make(LAYERS, size=size(), fill="25%", data="zero")
    pushed(active, KEPT)
    top, changed = snapshot(active)
    samples, key = Samples(), "push"
    for _ in range(rounds):
        samples.attempt(key, lambda: measure(top, changed))
    emptied("pushed")
    top.unlink()
    ratio = samples.median(key, "ratio")
    goal = report.limit(
        "bytes sent by a push of a snapshot ÷ bytes changed", ratio, at_most=1.05, why=samples.failure(key), digits=3
    )
    table = {
        "title": "Push of a snapshot",
        "text": (
            f"A disk of {size() >> 20:,} MiB whose chain of {LAYERS} layers, {size() >> 22:,} MiB of data, the store"
            " has. 1 % of its clusters, chosen at random, are written to a new layer, and the chain is pushed again,"
            f" through a link with {link()}."
        ),
        "columns": ["MiB changed", "MiB sent", "s", "requests"],
        "rows": [
            [
                f"{changed / 2**20:,.2f}",
                samples.text(key, "sent", "{:,.2f}", 2**-20),
                samples.text(key, "seconds", "{:.2f}"),
                samples.text(key, "requests"),
            ]
        ],
    }
    return {"samples": samples.raw(), "tables": [table], "goals": [goal], "figures": [], "notes": []}
