"""Chains in an object store behind a link with 30 ms to the first byte of each answer and 100 MiB/s for all bodies.
The store is a small S3 server of the benchmark's own on the same machine, which counts requests and bytes."""

from isobath_bench import scenario, tools
from isobath_bench.remote import boot, forks, push, reads, ready

PARTS = {"ready": ready, "reads": reads, "push": push, "boot": boot, "forks": forks}


def run(rounds, seconds, parts):
    if tools.QUICK:
        rounds, seconds = 1, 1
    return scenario.run(PARTS, rounds, seconds, parts)
