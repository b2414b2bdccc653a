"""What a guest's flush costs: syncs of the image, flushes of the device under its file system, time.
Isobath's ways of writing metadata beside QEMU's configurations and raw files that are fully written."""

from isobath_bench import scenario
from isobath_bench.flush import apps, latency, no_flush, space, syncs

PARTS = {
    "space": space,
    "syncs": syncs,
    "latency": latency,
    "apps": apps,
    "no_flush": no_flush,
}


def run(rounds, seconds, parts):
    return scenario.run(PARTS, rounds, seconds, parts)
