"""qemu-img's commands on chains, by Isobath and by qemu-img, in a warm page cache."""

from isobath_bench import scenario
from isobath_bench.toolbox import commit, convert, encryption, rebase, snapshots

PARTS = {"commit": commit, "rebase": rebase, "convert": convert, "snapshots": snapshots, "encryption": encryption}


def run(rounds, seconds, parts):
    return scenario.run(PARTS, rounds, seconds, parts)
