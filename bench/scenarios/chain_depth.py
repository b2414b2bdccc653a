"""What a backing chain's depth costs: the same disk in 1 to 10,000 layers. Isobath beside QEMU,
each figure the median of interleaved rounds, what counts the ratio within one run."""

import sys
import time

from isobath_bench import tools
from isobath_bench.depth import boot, first_pass, index_size, lookup, overlays, reads, ready

PARTS = {
    "reads": reads,
    "ready": ready,
    "first_pass": first_pass,
    "overlays": overlays,
    "index_size": index_size,
    "lookup": lookup,
    "boot": boot,
}


def run(rounds, seconds, parts):
    result = {"rounds": rounds, "seconds": seconds, "parts": parts, "samples": {}}
    lists = {name: [] for name in ("tables", "goals", "figures", "notes")}
    if tools.QUICK:
        lists["notes"].append("**A quick run to try the benchmark out: the figures mean nothing.**")
    for name in parts:
        began = time.monotonic()
        part = PARTS[name].run(rounds, seconds)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        result["samples"][name] = part["samples"]
        for key, all_of_them in lists.items():
            all_of_them += filter(None, part[key])
    return result | lists
