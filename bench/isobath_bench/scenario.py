"""A scenario that is made of parts."""

import sys
import time

from . import tools


def run(modules, rounds, seconds, parts):
    """Runs the parts named, and puts together what they give."""
    result = {"rounds": rounds, "seconds": seconds, "parts": parts, "samples": {}}
    lists = {name: [] for name in ("tables", "goals", "figures", "notes")}
    if tools.QUICK:
        lists["notes"].append("**A quick run to try the benchmark out: the figures mean nothing.**")
    for name in parts:
        began = time.monotonic()
        part = modules[name].run(rounds, seconds)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        result["samples"][name] = part["samples"]
        for key, all_of_them in lists.items():
            all_of_them += [each for each in part[key] if each and each not in all_of_them]
    return result | lists
