"""The library's look-up, without server or I/O."""

import json

from .. import report, tools
from ..rounds import Samples
from . import chains

PROGRAM = "lookup_latency"
DEPTHS = [1, 1000]


def measure(layers):
    """Runs the program on a chain; it prints `{"median_ns": ..., "p99_ns": ...}`."""
    out = tools.run(
        "cargo", "run", "--quiet", "--release", "--package=isobath-load", f"--bin={PROGRAM}", "--",
        chains.make(layers, size=4 << 30, data="zero"), cwd=tools.ROOT,
    )  # fmt: skip
    return json.loads(out)


def run(rounds, seconds):
    del seconds
    samples = Samples()
    for _ in range(rounds):
        for layers in DEPTHS:
            samples.attempt(layers, lambda: measure(layers))
    rows = [[f"{layers:,}", samples.text(layers, "median_ns"), samples.text(layers, "p99_ns")] for layers in DEPTHS]
    why = samples.failure(DEPTHS[-1])
    goals = [
        report.limit(
            "look-up in a warm map of 1,000 layers, median",
            samples.median(1000, "median_ns"),
            at_most=100,
            unit="ns",
            why=why,
        )
    ]
    notes = [each["why"] for layers in DEPTHS for each in samples.get(layers, ()) if "why" in each][:1]
    table = {
        "title": "Look-up in the library",
        "columns": ["layers", "median, ns", "99th percentile, ns"],
        "rows": rows,
    }
    return {"samples": samples.raw(), "tables": [table], "goals": goals, "figures": [], "notes": notes}
