"""What a guest's flush costs: syncs of the image, flushes of the device under its file system, time.
Isobath's ways of writing metadata beside QEMU's configurations and raw files that are fully written."""

from isobath_bench import scenario
from isobath_bench.flush import space, syncs

PARTS = {
    "space": space,
    "syncs": syncs,
}


def run(rounds, seconds, parts):
    return scenario.run(PARTS, rounds, seconds, parts)
