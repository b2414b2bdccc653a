"""What a backing chain's depth costs: the same disk in 1 to 10,000 layers. Isobath beside QEMU,
each figure the median of interleaved rounds, what counts the ratio within one run."""

from isobath_bench import scenario
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
    return scenario.run(PARTS, rounds, seconds, parts)
